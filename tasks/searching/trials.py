"""Runs the trials of a search, one after another.

A trial is a run of `tasks.train` in a folder of its own. At each rung its
validation metric is reported; if it is among the better ones, the same command
with more rounds goes on from its checkpoint, and otherwise the trial ends. At a
rung that keeps the best 1 / reduction of those that came so far, this is
successive halving without waiting (ASHA: Li et al., A System for Massively
Parallel Hyperparameter Tuning, MLSys 2020, algorithm 2), for one worker. Unlike
there, a trial that was ended is never taken up again.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
import os
import pathlib
from typing import Any

from tasks.errors import OptionError
from tasks.experiment import flags
from tasks.experiment.folder import Folder
from tasks.searching import plan as plans
from tasks.searching import studies
from tff_partial.training import checkpoints

# Runs `tasks.train` with some arguments, and returns its exit status.
Train = Callable[[Sequence[str]], int]

# What is noted of a trial beside its values.
WHY, EPSILON, DELTA = 'why', 'epsilon', 'delta'
DIVERGED = 'it diverged'
# Beyond these, a status stands for a signal.
_SIGNALS = 128
# Runs that are compared with the median: before so many, none ends.
_FINISHED_FIRST = 4


class _Ended(Exception):
  """A trial ended without a value; says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class Trials:
  """The trials of a search.

  Attributes:
    plan: What is searched for, and how.
    root: The folder of the sweep.
    train: Trains a run.
  """

  plan: plans.Plan
  root: pathlib.Path
  train: Train

  def run(self) -> studies.Study:
    """Run those that are not done yet.

    Returns:
      The study, with all trials.

    Raises:
      OptionError: If the folder holds another search, a run was interrupted,
        or there is no such metric.
      CheckpointError: If another process searches in the folder.
    """
    self.root.mkdir(parents=True, exist_ok=True)
    lock = checkpoints.locked(self.root)
    try:
      study = studies.Study(self.root, self.plan.direction)
      study.claim(self.plan.settings(), self.root)
      ended = [trial.state.is_finished() for trial in study.trials()]
      for number in range(self.plan.search.trials):
        if number >= len(ended) or not ended[number]:
          self._run_one(study, number)
    finally:
      os.close(lock)
    return study

  def _run_one(self, study: studies.Study, number: int) -> None:
    """Run a trial, or goes on with it, and notes how it ended."""
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
    """What a trial's run is given; of several algorithms what its own reads."""
    arguments = flags.expand([*self.plan.arguments, *_as_flags(chosen)])
    if 'algorithm' not in chosen:
      return arguments
    return flags.without_unread(arguments, flags.algorithm_of(arguments))

  def _check(self, chosen: dict[str, Any]) -> None:
    """End a trial whose values do not go together, before it is run."""
    try:
      flags.parse(self._arguments(chosen))
    except OptionError as error:
      raise _Ended(str(error)) from error

  def _climb(self, study: studies.Study, trial: Any) -> float | None:
    """Run a trial from rung to rung.

    Returns:
      The metric after all rounds; None if it is ended before.
    """
    known = study.trials()[trial.number].intermediate_values
    value = math.nan
    for rung in self.plan.rungs:
      if rung in known:
        value = known[rung]  # Before a kill.
      else:
        value = self._measure(trial, rung)
        trial.report(value, rung)
      if rung < self.plan.rungs[-1] and self._is_poor(study, trial, rung):
        print(f'  ended after round {rung} at {value:.4g}.', flush=True)
        return None
    return value

  def _measure(self, trial: Any, rounds: int) -> float:
    """Trains a trial's run up to some rounds; returns its metric."""
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

  def _is_poor(self, study: studies.Study, trial: Any, rung: int) -> bool:
    """Whether a trial ends at a rung.

    What follows is a function of what the journal holds, so that a kill at this
    place changes nothing; Optuna's own successive halving notes that it was
    asked, and would let the trial pass when asked again.
    """
    if self.plan.pruner == plans.NEVER:
      return False
    if self.plan.pruner == plans.MEDIAN:
      study.study.pruner = studies.optuna().pruners.MedianPruner(
        n_startup_trials=_FINISHED_FIRST
      )
      return bool(trial.should_prune())
    here = [
      other.intermediate_values[rung]
      for other in study.trials()[: trial.number + 1]
      if rung in other.intermediate_values
    ]
    return not is_kept(here, self.plan)


def is_kept(values: Sequence[float], plan: plans.Plan) -> bool:
  """Whether the last one of those at a rung goes on.

  Args:
    values: The metric of all that came, in their order.
    plan: What is better, and how many are kept.
  """
  sign = 1.0 if plan.direction == plans.MINIMIZE else -1.0
  *others, own = (sign * value for value in values)
  if math.isnan(own):
    return False
  better = sum(other < own for other in others)
  return better < max(len(values) // plan.search.reduction, 1)


def trial_folder(root: pathlib.Path, number: int) -> pathlib.Path:
  """The folder of a trial's run.

  Args:
    root: The folder of the sweep.
    number: Of the trial, from 0.
  """
  return root / f'trial_{number:04}'


def _as_flags(chosen: dict[str, Any]) -> list[str]:
  return [f'--{name}={value}' for name, value in chosen.items()]
