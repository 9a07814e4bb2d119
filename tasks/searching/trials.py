"""Execution of the trials of a search, one after another.

A trial is a run of `tasks.train` in its own folder. At each rung its validation
metric is reported; if Optuna's pruner does not end it there, the same command
with more rounds resumes from its checkpoint.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import os
import pathlib
from typing import Any

from tasks.errors import OptionError
from tasks.experiment.command_line import flags
from tasks.experiment.run.folder import Folder
from tasks.searching import plan as plans
from tasks.searching import studies
from tff_partial.training import files

# Runs `tasks.train` with some arguments, and returns its exit status.
Train = Callable[[Sequence[str]], int]

# Attributes of a trial that are stored in addition to its values.
WHY, EPSILON, DELTA = 'why', 'epsilon', 'delta'
DIVERGED = 'it diverged'
# An exit status from here on means that the run was killed by a signal.
_SIGNALS = 128


class _Ended(Exception):
  """Raised with the reason why a trial ended without a value."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
  """The trials of a search.

  Attributes:
    plan: The plan of the search.
    root: The folder of the sweep.
    train: Trains a run.
  """

  plan: plans.Plan
  root: pathlib.Path
  train: Train

  def run(self) -> studies.Study:
    """Run the trials that are not done yet.

    Returns:
      The study, with all trials.

    Raises:
      OptionError: If the folder holds another search, a run was interrupted,
        or there is no such metric.
      RunError: If another process searches in the folder.
    """
    self.root.mkdir(parents=True, exist_ok=True)
    lock = files.locked(self.root)
    try:
      study = studies.Study(
        self.root, self.plan.direction, self.plan.build_pruner()
      )
      study.claim(self.plan.settings(), self.root)
      ended = [trial.state.is_finished() for trial in study.trials()]
      for number in range(self.plan.search.trials):
        if number >= len(ended) or not ended[number]:
          self._run_one(study, number)
    finally:
      os.close(lock)
    return study

  def _run_one(self, study: studies.Study, number: int) -> None:
    """Run or resume a trial, and store how it ended."""
    trial = study.open_trial(
      number, list(self.plan.parameters), self.plan.search.search_seed
    )
    said = ' '.join(f'--{n}={v}' for n, v in trial.params.items())
    print(
      f'[{number + 1}/{self.plan.search.trials}] '
      f'{trial_folder(self.root, number)}: {said}',
      flush=True,
    )
    states = studies.optuna().trial.TrialState
    try:
      self._check(trial.params)
      value = self._climb(study, trial)
    except _Ended as end:
      trial.set_user_attr(WHY, str(end))
      print(f'  ended: {end}', flush=True)
      is_failure = str(end) != DIVERGED
      study.study.tell(
        number, state=states.FAIL if is_failure else states.PRUNED
      )
      return
    if value is None:
      study.study.tell(number, state=states.PRUNED)
      return
    study.study.tell(number, value)

  def _arguments(self, chosen: dict[str, Any]) -> list[str]:
    """Return a trial's arguments, without flags its algorithm does not read."""
    arguments = flags.expand([*self.plan.arguments, *_as_flags(chosen)])
    if 'algorithm' not in chosen:
      return arguments
    return flags.without_unread(arguments, flags.algorithm_of(arguments))

  def _check(self, chosen: dict[str, Any]) -> None:
    """End a trial with contradictory values before it is run."""
    try:
      flags.parse(self._arguments(chosen))
    except OptionError as error:
      raise _Ended(str(error)) from error

  def _climb(self, study: studies.Study, trial: Any) -> float | None:
    """Run a trial from rung to rung.

    Returns:
      The metric after all rounds; None if it ended before.
    """
    known = study.trials()[trial.number].intermediate_values  # Before a kill.
    value = known[max(known)] if known else math.nan
    for rung in self.plan.rungs:
      if rung < max(known, default=0):
        continue
      if rung not in known:
        value = self._measure(trial, rung)
        trial.report(value, rung)
      if rung < self.plan.rungs[-1] and trial.should_prune():
        print(f'  ended after round {rung} at {value:.4g}.', flush=True)
        return None
    return value

  def _measure(self, trial: Any, rounds: int) -> float:
    """Train a trial's run up to some rounds, and return its metric."""
    path = trial_folder(self.root, trial.number)
    status = self.train(
      [
        *self._arguments(trial.params),
        f'--rounds={rounds}',
        f'--output_dir={path}',
      ]
    )
    if status < 0 or status >= _SIGNALS:
      raise OptionError(
        f'{path}: the run was interrupted (status {status}). Run the same '
        'command again to go on with the search.'
      )
    result = Folder(str(path)).read_result()
    if result is None or (status and not result['diverged']):
      raise _Ended(f'the run failed with status {status}, see above')
    if result.get('privacy'):
      for name in (EPSILON, DELTA):
        trial.set_user_attr(name, float(result['privacy'][name]))
    if result['diverged']:
      raise _Ended(DIVERGED)
    measured = result['validation']
    if self.plan.metric not in measured or isinstance(
      measured[self.plan.metric], dict
    ):
      names = [n for n in measured if n not in ('per_client', 'best_round')]
      raise OptionError(
        f'--metric={self.plan.metric}: the validation clients are measured by '
        f'{", ".join(names)}. Choose one of these, in another --sweep_dir.'
      )
    value = float(measured[self.plan.metric])
    if math.isnan(value):
      raise _Ended(
        f'{self.plan.metric} is undefined, by what the validation clients hold'
      )
    return value


def trial_folder(root: pathlib.Path, number: int) -> pathlib.Path:
  """Return the folder of a trial's run.

  Args:
    root: The folder of the sweep.
    number: The trial's number, from 0.
  """
  return root / f'trial_{number:04}'


def _as_flags(chosen: dict[str, Any]) -> list[str]:
  return [flags.argument(name, value) for name, value in chosen.items()]
