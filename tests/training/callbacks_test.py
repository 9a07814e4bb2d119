"""Callbacks by themselves; programs_test.py has the runs that they end."""

import math

import pytest

from tff_partial.training import callbacks
from tff_partial.training import selection
from tff_partial.training.errors import ProgramError


def _result(losses: list[float], lost: dict[int, int] | None = None):
  """The round of the last of some validations, ten rounds apart."""
  validations = {
    10 * place: {
      'loss': loss,
      'num_clients': 9,
      'num_not_finite': (lost or {}).get(place, 0),
    }
    for place, loss in enumerate(losses, 1)
  }
  return callbacks.RoundResult(10 * len(losses), {}, validations, lambda: 'w')


def _ends_at(stopping: callbacks.EarlyStopping, *losses: float) -> int | None:
  """After which of some validations a run ends."""
  for number in range(1, len(losses) + 1):
    if stopping(_result(list(losses[:number]))):
      return number
  return None


@pytest.mark.parametrize(
  ('options', 'losses', 'expected'),
  [
    ({}, [3, 2, 1], None),
    ({}, [1, 2, 3], 3),
    ({}, [1, 1, 1], 3),  # To be as good is not to be better.
    ({}, [3, 2, 4, 1, 2, 2], 6),  # A better one begins the count anew.
    ({'patience': 1}, [1, 2], 2),
    ({'patience': 1}, [1], None),
    ({'higher_is_better': True}, [3, 2, 1], 3),
    ({'higher_is_better': True}, [1, 2, 3], None),
    # The best of those that counted is compared with: 0.8 is 0.2 below 1.
    ({'min_delta': 0.15}, [1.0, 0.9, 0.8, 0.7], None),
    ({'min_delta': 0.15}, [1.0, 0.9, 0.9, 0.1], 3),
    ({}, [math.nan, math.nan], 2),
    ({}, [math.nan, 1, math.nan, math.inf], 4),
  ],
)
def test_where_early_stopping_ends_a_run(options, losses, expected):
  stopping = callbacks.EarlyStopping(**{'patience': 2, **options})
  assert _ends_at(stopping, *losses) == expected


def test_a_last_round_between_evaluations_does_not_count():
  # A longer run, which does not measure it, would go on.
  measured = {'loss': 2.0, 'num_clients': 9, 'num_not_finite': 0}
  validations = {10: {**measured, 'loss': 1.0}, 20: measured, 25: measured}
  result = callbacks.RoundResult(25, {}, validations, lambda: 'w')
  assert not callbacks.EarlyStopping(patience=2)(result)


def test_to_lose_clients_is_no_improvement():
  stopping = callbacks.EarlyStopping(patience=1)
  assert stopping(_result([1.0, 0.5], lost={2: 4}))
  assert not stopping(_result([1.0, 2.0], lost={1: 4}))


def test_the_first_that_returns_true_ends_a_run():
  def first(result):
    return result.round == 10

  def second(result):
    return True

  def chatty(result):
    return 'a logger'  # What is returned by the way ends nothing.

  result = _result([1.0])
  assert callbacks.call([chatty], result) is None
  assert callbacks.call([chatty, second, first], result) == 'second'
  assert callbacks.call([first, second], result) == 'first'
  stopping = callbacks.EarlyStopping(patience=1)
  assert callbacks.call([stopping], _result([1.0, 2.0])) == repr(stopping)


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'patience': 0}, 'EarlyStopping: patience: .* at least 1, found 0'),
    ({'patience': math.nan}, 'expected a whole number, found nan'),
    ({'patience': 1, 'min_delta': -0.1}, '0 or more, found -0.1'),
    ({'patience': 1, 'min_delta': math.nan}, 'expected a finite'),
  ],
)
def test_impossible_early_stopping_is_refused(options, expected):
  with pytest.raises(ProgramError, match=expected):
    callbacks.EarlyStopping(**options)


def test_to_prefer_the_lowest_accuracy_or_highest_loss_is_warned_of(caplog):
  known = ['loss', 'accuracy']
  usual = callbacks.EarlyStopping(1, 'accuracy', higher_is_better=True)
  callbacks.check([callbacks.EarlyStopping(1), usual], known)
  assert not caplog.records
  callbacks.check([callbacks.EarlyStopping(1, 'accuracy')], known)
  assert 'takes the lowest accuracy for the best' in caplog.text
  selection.warn_of_direction(selection.Selection('loss', True))
  assert 'the highest loss for the best. If the lowest is, set' in caplog.text
