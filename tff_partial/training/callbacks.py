"""Callbacks, which run after each round and can end a run early.

A callback is a function of a `RoundResult`. It ends the run by returning True:

    def log(result):
      print(result.round, result.metrics['loss'])

    tff_partial.train(
      ...,
      callbacks=[log, tff_partial.callbacks.EarlyStopping(patience=3)],
    )

That round is then the last one: it is validated and saved, and the run does not
resume when it is started again. After a kill a run repeats the rounds after its
last checkpoint, and calls for them again.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, TypeAlias

import numpy as np

from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.training import selection
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True, eq=False)
class RoundResult:
  """Results of a round, for callbacks.

  Attributes:
    round: The number of the round, from 1.
    metrics: The round's row of `metrics.csv`, column to number: training
      metrics, and `validation_*` after an evaluation. A private run's has
      nothing exact about the cohort, unless the run records `diagnostics`.
    validations: The pooled metrics of all validations so far, by round. They
      are kept in the checkpoints, so whatever follows from them alone is the
      same after a kill.
  """

  round: int
  metrics: Mapping[str, Any]
  validations: Mapping[int, Mapping[str, Any]] = dataclasses.field(repr=False)
  _get_weights: Callable[[], Any] = dataclasses.field(repr=False)
  # True if only the run's end made the round's validation due.
  _is_extra: bool = dataclasses.field(default=False, repr=False)

  @property
  def weights(self) -> Any:
    """The model's weights after the round, `ModelWeights`; read on access."""
    return self._get_weights()


Callback: TypeAlias = Callable[[RoundResult], Any]


@dataclasses.dataclass(frozen=True)
class EarlyStopping:
  """Callback that ends a run whose validation has stopped improving.

  It keeps no state between calls: the decision follows from the validations, so
  that a run that is killed and resumed ends at the same round.

  Attributes:
    patience: Number of evaluations in a row without improvement that end it.
    metric: A pooled metric of the validation clients.
    higher_is_better: True if a larger value is better.
    min_delta: Difference that an improvement must exceed.
  """

  patience: int
  metric: str = 'loss'
  higher_is_better: bool = False
  min_delta: float = 0.0

  def __post_init__(self) -> None:
    patience = {'EarlyStopping: patience': self.patience}
    checked_numbers.check_whole(ProgramError, 1, **patience)
    if wrong := checked_numbers.why_negative(self.min_delta):
      raise ProgramError(f'EarlyStopping: min_delta: {wrong}.')

  def __call__(self, result: RoundResult) -> bool:
    """Return True to end the run after this round."""
    if result.round not in result.validations:
      return False
    if result._is_extra or result.round % min(result.validations):
      return False  # A last round, which a longer run would not measure.
    better = selection.Selection(self.metric, self.higher_is_better)
    best: Mapping[str, Any] | None = None
    waited = 0
    for measured in result.validations.values():
      if better.is_better(measured, best, self.min_delta):
        best, waited = measured, 0
      else:
        waited += 1
    return waited >= self.patience


def check(
  callbacks: Sequence[Callback], validation_metrics: Sequence[str] | None
) -> None:
  """Check that callbacks can be called, and have the metrics they need.

  Args:
    callbacks: The callbacks of a run.
    validation_metrics: Metrics of its validation; None without validation.
  """
  expected = 'a list of callbacks, `callbacks=[callback]`'
  spelling.check_kind(
    'callbacks', callbacks, list | tuple, expected, ProgramError
  )
  for callback in callbacks:
    if isinstance(callback, type) or not callable(callback):
      raise ProgramError(
        f'callbacks: {callback!r} is no callback. Pass functions of a '
        '`RoundResult`, or instances such as `EarlyStopping(patience=3)`.'
      )
    if not isinstance(callback, EarlyStopping):
      continue
    if validation_metrics is None:
      raise ProgramError(
        f'{callback} needs validation clients. Pass '
        '`validation=EvaluationSet(evaluation, clients)`.'
      )
    if callback.metric not in validation_metrics:
      raise ProgramError(
        f'{callback}: the validation has no metric {callback.metric!r}. Choose '
        f'one of {list(validation_metrics)}.'
      )
    selection.warn_of_direction(callback)


def call(callbacks: Sequence[Callback], result: RoundResult) -> str | None:
  """Call all callbacks after a round.

  Args:
    callbacks: The callbacks of a run.
    result: Passed to each callback.

  Returns:
    The name of the first that ended the run by returning True, or None.
  """
  ended_by = None
  for callback in callbacks:
    ends = callback(result)
    # Other return values, such as a logger's, do not end the run.
    if isinstance(ends, (bool, np.bool_)) and ends and ended_by is None:
      ended_by = getattr(callback, '__name__', None) or repr(callback)
  return ended_by
