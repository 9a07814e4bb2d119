"""The trials of a search, kept in Optuna's journal, one after another.

A trial is a run of `tasks.train` in its own folder. At each rung its validation
metric is reported; if Optuna's pruner does not end it there, the same command
with more rounds resumes from its checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import math
import os
import pathlib
from typing import Any

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line import flags
from tasks.experiment.runs.folder import Folder
from tasks.searching import plan as plans
from tff_partial import random_bits
from tff_partial.training import files

# Runs `tasks.train` with some arguments, and returns its exit status.
Train = Callable[[Sequence[str]], int]

_NAME = 'search'
# Attributes of the study and of trials.
SETTINGS, WHY, EPSILON, DELTA = 'settings', 'why', 'epsilon', 'delta'
DIVERGED = 'it diverged'
# An exit status from here on means that the run was killed by a signal.
_SIGNALS = 128
# Combinations of values that `check` tries for one of them at most.
_MOST_CHECKED = 2000


class _Ended(Exception):
  """Raised with the reason why a trial ended without a value."""


class _RunFailed(_Ended):
  """Raised if its run failed, maybe by something else than its values."""


def load(root: pathlib.Path, plan: plans.Plan | None = None) -> Any:
  """Load the study of a folder, or create it for a plan if one is given.

  Raises:
    OptionError: If Optuna is missing, the journal cannot be read, or the search
      in the folder has another plan.
  """
  library = plans.optuna()
  from optuna.storages import journal

  path = root / plans.JOURNAL
  try:
    storage = library.storages.JournalStorage(
      journal.JournalFileBackend(str(path))
    )
    if plan is None:
      return library.load_study(study_name=_NAME, storage=storage)
    study = library.create_study(
      study_name=_NAME,
      storage=storage,
      direction=plan.direction,
      pruner=plan.build_pruner(),
      load_if_exists=True,
    )
  except (KeyError, ValueError) as error:
    raise OptionError(
      f'{path}: this is no journal of a search ({error!s:.200}). Move it '
      'away, or choose another --sweep_dir.'
    ) from error
  now = plan.settings()
  before = study.user_attrs.get(SETTINGS)
  if before is None:
    study.set_user_attr(SETTINGS, now)
    return study
  for name in sorted(before.keys() | now.keys()):
    if before.get(name) != now.get(name):
      raise OptionError(
        f'--sweep_dir={root}: the search there was begun with '
        f'{name}={before.get(name)}, now it is {now.get(name)}. Give the same '
        'to go on with it, or choose another folder.'
      )
  return study


def run(plan: plans.Plan, root: pathlib.Path, train: Train) -> Any:
  """Run the trials that are not done yet.

  Raises:
    OptionError: If the folder holds another search, a run was interrupted, or
      there is no such metric.
    RunError: If another process searches in the folder.
  """
  root.mkdir(parents=True, exist_ok=True)
  lock = files.locked(root)
  try:
    _mend_journal(root / plans.JOURNAL)
    study = load(root, plan)
    ended = [trial.state.is_finished() for trial in study.trials]
    for number in range(plan.search.trials):
      if number >= len(ended) or not ended[number]:
        _run_trial(plan, root, train, study, number)
  finally:
    os.close(lock)
  return study


def _mend_journal(path: pathlib.Path) -> None:
  """Remove what a kill or a full disk left of the last write of a journal.

  Optuna would append to half a line, and then read neither; and may wait for a
  lock of its own without end, while `files.locked` already excludes others.
  """
  path.with_name(f'{path.name}.lock').unlink(missing_ok=True)
  if path.exists():
    written = path.read_bytes()
    whole = written.rfind(b'\n') + 1
    if written[whole:].startswith(b'{'):
      os.truncate(path, whole)


def _arguments(plan: plans.Plan, chosen: Mapping[str, Any]) -> list[str]:
  """Return the arguments of a trial without its rounds and folder."""
  own = itertools.starmap(flags.argument, chosen.items())
  written = [*plan.arguments, *own]
  arguments = command_line.expand(written, written)
  if 'algorithm' in chosen:
    algorithm = command_line.algorithm_of(arguments)
    arguments = command_line.without_unread(arguments, algorithm)
  return arguments


def check(plan: plans.Plan) -> None:
  """Check choices and ends of ranges before the first trial.

  Raises:
    OptionError: If one is impossible beside all those of other flags, if these
      are not too many to try.
  """
  for flag, tried in plan.tried.items():
    for value in tried:
      why = None
      beside = {**plan.tried, flag: [value]}
      if math.prod(map(len, beside.values())) > _MOST_CHECKED:
        continue
      for values in itertools.product(*beside.values()):
        try:
          chosen = dict(zip(beside, values, strict=True))
          command_line.parse(_arguments(plan, chosen))
          break
        except OptionError as error:
          why = why or error
      else:
        raise OptionError(f'--search={flag}: no trial can have {value}. {why}')


def _open(plan: plans.Plan, study: Any, number: int) -> Any:
  """Start a trial, or resume one that a kill interrupted.

  Its values follow from the seed, its number and the trials before it. Each has
  a generator of its own, so that a kill between two of them changes nothing.
  """

  def draw_by(purpose: str) -> None:
    seed = random_bits.not_negative(
      plan.search.search_seed, f'trial {number} {purpose}'
    )
    study.sampler = plans.optuna().samplers.TPESampler(
      seed=seed, multivariate=False
    )

  draw_by('')
  begun = study.trials[number:]
  if begun:
    trial = plans.optuna().trial.Trial(study, begun[0]._trial_id)
    trial.set_user_attr(WHY, None)  # It may have failed before.
  else:
    trial = study.ask()
  for flag, suggest in plan.parameters.items():
    draw_by(flag)
    suggest(trial)
  return trial


def _run_trial(
  plan: plans.Plan, root: pathlib.Path, train: Train, study: Any, number: int
) -> None:
  """Run or resume a trial, and store how it ended."""
  trial = _open(plan, study, number)
  chosen = [flags.argument(name, value) for name, value in trial.params.items()]
  path = folder(root, number)
  print(
    f'[{number + 1}/{plan.search.trials}] {path}: {" ".join(chosen)}',
    flush=True,
  )
  states = plans.optuna().trial.TrialState
  value, state = None, states.PRUNED
  try:
    try:
      arguments = _arguments(plan, trial.params)
      command_line.warn_without_effect(
        command_line.parse(arguments), [*plan.arguments, *chosen]
      )
    except OptionError as error:
      raise _Ended(str(error)) from error
    # Values from before a kill.
    known = study.trials[number].intermediate_values
    for rung in plan.rungs:
      if rung < max(known, default=0):
        continue
      value = known.get(rung)
      if value is None:
        value = _measure(plan, trial, path, rung, arguments, train)
        trial.report(value, rung)
      if rung < plan.rungs[-1] and trial.should_prune():
        print(f'  ended after round {rung} at {value:.4g}.', flush=True)
        break
    else:
      state = states.COMPLETE
  except _Ended as end:
    trial.set_user_attr(WHY, str(end))
    print(f'  ended: {end}', flush=True)
    if isinstance(end, _RunFailed):
      return  # The search tries it again when it goes on.
    if not str(end).startswith(DIVERGED):
      state = states.FAIL
  study.tell(number, value if state == states.COMPLETE else None, state=state)


def _measure(
  plan: plans.Plan,
  trial: Any,
  path: pathlib.Path,
  rounds: int,
  arguments: Sequence[str],
  train: Train,
) -> float:
  """Train a trial's run up to some rounds, and return its metric."""
  status = train([*arguments, f'--rounds={rounds}', f'--output_dir={path}'])
  if status < 0 or status >= _SIGNALS:
    raise OptionError(
      f'{path}: the run was interrupted (status {status}). Run the same '
      'command again to go on with the search.'
    )
  result = Folder(str(path)).read_result()
  if result is None or (status and not result['diverged']):
    raise _RunFailed(f'the run failed with status {status}, see above')
  if result.get('privacy'):
    for name in (EPSILON, DELTA):
      trial.set_user_attr(name, float(result['privacy'][name]))
  if result['diverged']:
    raise _Ended(DIVERGED)
  measured = result['validation']
  names = [n for n in measured if n not in ('per_client', 'best_round')]
  if plan.metric not in names:
    raise OptionError(
      f'--metric={plan.metric}: the validation clients are measured by '
      f'{", ".join(names)}. Choose one of these, in another --sweep_dir.'
    )
  # To lose the worst of them must not look like progress.
  if lost := int(measured['num_not_finite']):
    raise _Ended(f'{DIVERGED} at {lost} validation clients')
  value = float(measured[plan.metric])
  if math.isnan(value):
    raise _Ended(
      f'{plan.metric} is undefined, by what the validation clients hold'
    )
  return value


def has_failed(trial: Any) -> bool:
  """Return True if a trial's values did not fit together, or its run failed."""
  is_open = trial.state.name == 'RUNNING'
  has_reason = trial.user_attrs.get(WHY) is not None
  return trial.state.name == 'FAIL' or (is_open and has_reason)


def folder(root: pathlib.Path, number: int) -> pathlib.Path:
  """Return the folder of a trial's run in that of the sweep."""
  return root / f'trial_{number:04}'
