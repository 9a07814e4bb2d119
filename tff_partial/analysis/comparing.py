"""Comparisons of methods: each is trained and tested, over several seeds.

    methods = {'FedAvg': lambda seed: (process, evaluation), 'FedPer': ...}
    found = tff_partial.compare(
      methods, clients, metric='accuracy', higher_is_better=True,
      rounds=100, clients_per_round=10)
    print(found.to_markdown())

All methods have the same clients, rounds and seeds, and are measured by one
rule. Differences are taken between runs of the same seed. A method may have
several settings, as in `{'FedPer': {'rate 0.1': ..., 'rate 0.3': ...}}`: all
are trained with the first seed, and the best one with the others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import os
import pathlib
import re
from typing import Any, NamedTuple, TypeAlias

from absl import logging
import numpy as np
import pandas as pd

from tff_partial import evaluation as evaluation_lib
from tff_partial import processes
from tff_partial.analysis import comparisons
from tff_partial.analysis.communication import communication
from tff_partial.analysis.errors import AnalysisError
from tff_partial.arguments import spelling
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.training import evaluation_sets
from tff_partial.training import programs
from tff_partial.training import selection

# From a seed to a method: what is trained, and how it is measured.
Method: TypeAlias = Callable[
  [int], tuple[processes.PartialProcess, evaluation_lib.Evaluation]
]
# From the spec of an example to clients, such as
# `lambda spec: tff_partial.from_pandas(frame, spec, ...)`.
Clients: TypeAlias = Callable[[examples.ExampleSpec], cohorts.ClientSource]


def compare(
  methods: Mapping[str, Method | Mapping[str, Method]],
  clients: Clients,
  *,
  metric: str,
  higher_is_better: bool,
  rounds: int,
  clients_per_round: int,
  seeds: Iterable[int] = (0, 1, 2),
  test: Clients | None = None,
  validation: Clients | None = None,
  evaluate_every: int = 50,
  output_dir: str | os.PathLike[str] | None = None,
  show_progress: bool | None = None,
) -> comparisons.Comparison:
  """Train and test each method with each seed.

  Args:
    methods: Name to a function from a seed to a process and its evaluation, or
      to several of them by the names of their settings, of which `validation`
      chooses one. Give the seed to `from_keras`: first weights then differ
      between seeds.
    clients: Makes the training clients for the spec of an example.
    metric: The pooled metric to compare, such as 'accuracy'.
    higher_is_better: True if a larger value is better.
    rounds: Number of rounds of each run.
    clients_per_round: Number of clients in a round.
    seeds: Seeds of the runs, and of what clients draw when they are tested.
    test: Makes the clients to test. By default those of training, each with
      what it remembers; let evaluations then measure other examples, such as
      those of `splits.by_mark()`.
    validation: Makes clients that choose the best round, and the best setting
      by its best round with the first seed; by default the last round is
      tested. Without `test`, they come with what they remember, too.
    evaluate_every: Rounds between validations.
    output_dir: Folder of a folder for each run, from which the call resumes.
    show_progress: As for `train`.

  Raises:
    AnalysisError: If methods or seeds are missing, or seeds or folders repeat.
    UserError: As from `train` and `evaluate`; if the metric is not one number.
  """
  _check_kind('seeds', seeds, Iterable, 'a list such as `[0, 1]`')
  chosen = list(seeds)
  _check(list(methods), chosen, output_dir is not None)
  _check_functions(methods, clients=clients, test=test, validation=validation)
  of_methods = {
    name: dict(given) if isinstance(given, Mapping) else {'': given}
    for name, given in methods.items()
  }
  _check_settings(of_methods, validation, output_dir is not None)
  study = _Study(
    clients,
    selection.Selection(metric, higher_is_better),
    validation,
    test,
    {'rounds': rounds, 'clients_per_round': clients_per_round}
    | {'evaluate_every': evaluate_every, 'show_progress': show_progress},
    output_dir,
  )
  selection.warn_of_direction(study.rule)
  runs, of_clients, history = [], [], []
  for name, settings in of_methods.items():
    setting, first = study.best(name, settings, chosen[0])
    for seed in chosen:
      is_first = seed == chosen[0]
      run = first if is_first else study.train(name, setting, settings, seed)
      measured, found = _tested(run, test, metric, seed)
      place = {'method': name, 'seed': seed}
      tuned = {'setting': setting, 'num_settings': len(settings)}
      runs.append({**place, **tuned, **measured, **_costs(run)})
      frame = pd.DataFrame(found).rename_axis('client').reset_index()
      of_clients.append(frame.assign(method=name, seed=seed))
      history += [{**place, **row} for row in run.result.history]
  table = pd.DataFrame(runs)
  _warn_of_unlike(table)
  joined = pd.concat(of_clients, ignore_index=True)
  return comparisons.Comparison(
    metric, higher_is_better, table, joined, pd.DataFrame(history)
  )


class _Run(NamedTuple):
  """A trained method, with its evaluation and its training clients."""

  measure: evaluation_lib.Evaluation
  data: cohorts.ClientSource
  result: programs.TrainingResult


@dataclasses.dataclass(frozen=True)
class _Study:
  """What all runs have in common."""

  clients: Clients
  rule: selection.Selection
  validation: Clients | None
  test: Clients | None
  how: Mapping[str, Any]
  output_dir: str | os.PathLike[str] | None

  def train(
    self, name: str, setting: str, settings: Mapping[str, Method], seed: int
  ) -> _Run:
    """Train a setting of a method with a seed."""
    process, measure = settings[setting](seed)
    data = self.clients(process.example_spec)
    programs.EvaluationSet(measure, data).check_metric(self.rule.metric)
    held = None
    if self.validation is not None:
      known = self.validation(measure.example_spec)
      remembering = self.test is None and not measure.is_stateless
      held = programs.EvaluationSet(measure, known, remembering)
    folders = [_slug(part) for part in (name, setting) if part]
    result = programs.train(
      process,
      data,
      seed=seed,
      validation=held,
      select=self.rule if held else None,
      output_dir=self.output_dir
      and pathlib.Path(self.output_dir, *folders, f'seed_{seed}'),
      **self.how,
    )
    return _Run(measure, data, result)

  def best(
    self, name: str, settings: Mapping[str, Method], seed: int
  ) -> tuple[str, _Run]:
    """Train all settings, and return the best by validation; else the first."""
    first, *others = settings
    best = first, self.train(name, first, settings, seed)
    for setting in others:
      run = self.train(name, setting, settings, seed)
      if self._is_better(run.result, best[1].result):
        best = setting, run
    return best

  def _is_better(
    self, result: programs.TrainingResult, best: programs.TrainingResult
  ) -> bool:
    measured = None if result.diverged else result.best_validation
    least = None if best.diverged else best.best_validation
    return measured is not None and self.rule.is_better(measured, least)


def _check_kind(name: str, value: Any, kind: Any, expected: str) -> None:
  spelling.check_kind(f'compare: {name}', value, kind, expected, AnalysisError)


def _check_functions(methods: Any, **clients: Any) -> None:
  """Refuse what is no function where one is needed."""
  by_name = "functions by name, `{'FedRecon': lambda seed: (process, measure)}`"
  _check_kind('methods', methods, Mapping, by_name)
  of_spec = '`lambda spec: tff_partial.from_pandas(frame, spec, ...)`'
  for name, given in clients.items():
    if given is not None:
      _check_kind(name, given, Callable, of_spec)
  for name, given in methods.items():
    builds = {f'methods[{name!r}]': given}
    if given and isinstance(given, Mapping):
      builds = {f'methods[{name!r}][{of!r}]': own for of, own in given.items()}
    for where, build in builds.items():
      _check_kind(
        where, build, Callable, '`lambda seed: (process, evaluation)`'
      )


def _check(names: Sequence[str], seeds: Sequence[int], writes: bool) -> None:
  """Refuse runs that do not exist, or that would count twice."""
  if not (names and seeds):
    raise AnalysisError('compare: give at least one method, and one seed.')
  if len(set(seeds)) < len(seeds):
    raise AnalysisError(f'compare: seeds={seeds}: give each seed once.')
  if writes:
    _check_folders('methods', names)


def _check_folders(what: str, names: Sequence[str]) -> None:
  """Refuse names that would be one folder."""
  for name in names:
    alike = [other for other in names if _slug(other) == _slug(name)]
    if len(alike) > 1:
      raise AnalysisError(
        f'compare: the {what} {", ".join(map(repr, alike))} would write to '
        f'one folder, {_slug(name)!r}. Give them names that differ by more.'
      )


def _check_settings(
  of_methods: Mapping[str, Mapping[str, Method]],
  validation: Clients | None,
  writes: bool,
) -> None:
  """Refuse a choice without validation clients, and warn of an unequal one."""
  counts = {name: len(settings) for name, settings in of_methods.items()}
  if max(counts.values()) > 1 and validation is None:
    raise AnalysisError(
      'compare: methods have several settings. Give `validation`, clients by '
      'which the best one is chosen.'
    )
  for settings in of_methods.values() if writes else ():
    _check_folders('settings', list(settings))
  if len(set(counts.values())) > 1:
    logging.warning(
      'compare: methods have different numbers of settings, so that some are '
      'tuned more than others: %s.',
      ', '.join(f'{count} of {name}' for name, count in counts.items()),
    )


def _warn_of_unlike(table: pd.DataFrame) -> None:
  """Warn of methods that were measured on other examples than the rest."""
  for seed, of_seed in table.groupby('seed'):
    counts = of_seed.set_index('method')['num_examples'].dropna()
    if counts.nunique() > 1:
      logging.warning(
        'compare: with seed %s, methods were measured on different numbers of '
        'examples, so that their metrics are not of the same data: %s. Let '
        'their evaluations have the same split.',
        seed,
        ', '.join(f'{int(n):,} by {name}' for name, n in counts.items()),
      )


def _slug(name: str) -> str:
  return re.sub(r'\W+', '_', name).strip('_').lower()


def _costs(run: _Run) -> dict[str, Any]:
  """Return the best round of a run, and bytes and seconds of a round."""
  result = run.result
  sent = communication(result.process, run.data)
  is_whole = 'upload_not_counted' not in sent  # Drafts are not.
  up = sent.get('upload_bytes_by_rows', sent['upload_bytes'])
  return {
    'best_round': result.best_round,
    'download_bytes': sent['download_bytes'],
    'upload_bytes': up if is_whole else np.nan,
    # Of all rounds, also those of an earlier call.
    'seconds_round': np.median(
      [row['seconds_round'] for row in result.history]
    ),
  }


def _tested(
  run: _Run, test: Clients | None, metric: str, seed: int
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
  """Return a run's test metric with its examples, and clients' metrics."""
  measure, data, result = run
  lost = {metric: np.nan, 'num_examples': np.nan, 'diverged': True}
  if result.diverged:
    return lost, {metric: []}
  if test is None:
    tested = programs.EvaluationSet(measure, data, not measure.is_stateless)
  else:
    tested = programs.EvaluationSet(measure, test(measure.example_spec))
  found: dict[str, Any] = {}
  measured = evaluation_sets.evaluate(
    tested, result, seed=seed, on_clients=found.update
  )
  # Without validation only the test may show weights that exploded.
  size = evaluation_lib.num_measured(measured)
  if size and selection.StoppingRule().has_diverged(measured, None, size):
    return lost, {metric: []}
  kept = {name: measured.get(name) for name in (metric, 'num_examples')}
  kept['diverged'] = False
  return kept, found or {metric: []}  # Maybe no client was measured.
