"""Errors of predicted answers: HPFL, section 5.2.4.

Accumulated batch by batch, and over clients by `merge`, so that the predictions
of all models need not be in memory at once.
"""

from collections.abc import Sequence

import numpy as np

from tff_partial.analysis.errors import AnalysisError

# Possible answers: right or wrong, and star ratings.
BINARY = (0.0, 1.0)
FIVE_POINTS = (1.0, 2.0, 3.0, 4.0, 5.0)


class RatingMetrics:
  """RMSE, MAE, ACC and AUC of predictions, by sums over batches.

  A prediction is right if the nearest possible answer is the true one; halfway
  between two answers, the lower one counts as the nearest. So for right and
  wrong the threshold is 0.5, and exactly 0.5 means wrong; for five points 3.5
  means 3, and anything below 1 means 1.

  AUC is exact: the share of pairs of a right and a wrong answer in which the
  right one has the larger prediction; ties count one half. It exists only for
  two possible answers. For it all predictions are kept in their own dtype: 4
  bytes per record for float32. The others only need sums, in 64 bits.
  """

  def __init__(self, levels: Sequence[float]):
    """Start with empty sums.

    Args:
      levels: The possible answers, ascending, such as `BINARY`.

    Raises:
      AnalysisError: If these are not two or more ascending numbers.
    """
    self._levels = np.asarray(levels, np.float64)
    if self._levels.size < 2 or not (np.diff(self._levels) > 0.0).all():
      raise AnalysisError(
        f'levels={list(levels)}: give two or more answers in ascending order, '
        'such as BINARY or FIVE_POINTS.'
      )
    self._halfway = (self._levels[1:] + self._levels[:-1]) / 2.0
    self._num_records = self._num_right = 0
    self._squares = self._distances = 0.0
    # Predictions for the lower and for the upper of two answers.
    self._scores: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

  @property
  def num_records(self) -> int:
    """The number of answers compared."""
    return self._num_records

  def update(self, answers: np.ndarray, predictions: np.ndarray) -> None:
    """Add a batch.

    Args:
      answers: True answers, each of them one of the levels.
      predictions: As many floats. One that is not finite is never right, and
        makes the other metrics NaN or infinite.

    Raises:
      AnalysisError: If the shapes differ, or an answer is not one of the
        levels.
    """
    answers, predictions = np.asarray(answers), np.asarray(predictions)
    if answers.shape != predictions.shape:
      raise AnalysisError(
        f'There are answers of shape {answers.shape}, and predictions of shape '
        f'{predictions.shape}. Give one prediction for each answer.'
      )
    answers, predictions = answers.ravel(), predictions.ravel()
    known = np.isin(answers, self._levels)
    if not known.all():
      raise AnalysisError(
        f'Found the answer {answers[~known][0]}, where users may answer '
        f'{self._levels.tolist()}. Name all answers as levels.'
      )
    apart = predictions.astype(np.float64) - answers
    nearest = self._levels[np.searchsorted(self._halfway, predictions)]
    is_right = (nearest == answers) & np.isfinite(predictions)
    self._num_records += answers.size
    self._num_right += int(is_right.sum())
    self._squares += float(np.square(apart).sum())
    self._distances += float(np.abs(apart).sum())
    if self._is_binary:
      for scores, level in zip(self._scores, self._levels, strict=True):
        scores.append(predictions[answers == level])

  def merge(self, other: 'RatingMetrics') -> None:
    """Add the sums of other metrics, such as those of another client.

    Args:
      other: Metrics with the same levels; they are not changed.

    Raises:
      AnalysisError: If their levels differ.
    """
    if not np.array_equal(self._levels, other._levels):
      raise AnalysisError(
        f'Metrics of answers {self._levels.tolist()} and of answers '
        f'{other._levels.tolist()} cannot be merged: keep them apart.'
      )
    self._num_records += other._num_records
    self._num_right += other._num_right
    self._squares += other._squares
    self._distances += other._distances
    for own, scores in zip(self._scores, other._scores, strict=True):
      own.extend(scores)

  def result(self) -> dict[str, float]:
    """Return the metrics of all batches.

    Returns:
      `rmse`, `mae`, `accuracy`, and `auc` for two levels. NaN if nothing was
      compared; AUC requires both answers.
    """
    number = self._num_records or float('nan')
    found = {
      'rmse': float(np.sqrt(self._squares / number)),
      'mae': self._distances / number,
      'accuracy': self._num_right / number,
    }
    if self._is_binary:
      found['auc'] = self._auc()
    return found

  @property
  def _is_binary(self) -> bool:
    return self._levels.size == 2

  def _auc(self) -> float:
    """Compute the area under the ROC curve, by ranks."""
    lower, upper = (
      np.concatenate(scores) if scores else np.zeros(0)
      for scores in self._scores
    )
    if not (lower.size and upper.size):
      return float('nan')
    if not (np.isfinite(lower).all() and np.isfinite(upper).all()):
      return float('nan')
    lower = np.sort(lower)
    # For each right answer, the wrong ones with less, and with at most as much.
    below = int(np.searchsorted(lower, upper, 'left').sum())
    not_above = int(np.searchsorted(lower, upper, 'right').sum())
    return (below + not_above) / (2 * lower.size * upper.size)
