"""How far predicted answers are from the true ones: HPFL, section 5.2.4.

Accumulated batch by batch, and over clients by `merge`, so that no one has to
hold all predictions of all models at once.
"""

from collections.abc import Sequence

import numpy as np

from tff_partial.analysis.errors import AnalysisError

# What users may answer: right or wrong, and ratings by stars.
BINARY = (0.0, 1.0)
FIVE_POINTS = (1.0, 2.0, 3.0, 4.0, 5.0)


class RatingMetrics:
  """RMSE, MAE, ACC and AUC of predictions, by sums over batches.

  A prediction is right if the nearest answer that users may give is the true
  one; halfway between two of them the lower one is taken for the nearest. So of
  right and wrong the threshold is 0.5, and exactly 0.5 says wrong; of five
  points 3.5 says 3, and all below 1 says 1.

  AUC is exact: the share of pairs of a right and a wrong answer in which the
  right one has the larger prediction, and half of those with the same. Only of
  two answers there is one. For it all predictions are kept, in the type that
  they come in: 4 bytes a record of float32. The others take sums alone, in 64
  bits.
  """

  def __init__(self, levels: Sequence[float]):
    """Count nothing yet.

    Args:
      levels: What users may answer, ascending, such as `BINARY`.

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
    # Predictions where the answer was the lower and the upper of two.
    self._scores: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])

  @property
  def num_records(self) -> int:
    """How many answers were compared."""
    return self._num_records

  def update(self, answers: np.ndarray, predictions: np.ndarray) -> None:
    """Compare a batch.

    Args:
      answers: True answers, each of them one of the levels.
      predictions: As many floats. One that is not finite is never right, and
        makes the other metrics NaN or infinite.

    Raises:
      AnalysisError: If the shapes differ, or an answer is none of the levels.
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
    """Add what another one has counted, such as that of another client.

    Args:
      other: Of the same levels; it stays as it is.

    Raises:
      AnalysisError: If its levels are others.
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
    """The metrics of all that was compared.

    Returns:
      `rmse`, `mae`, `accuracy`, and of two levels `auc`. NaN where there was
      nothing to compare; AUC takes both answers.
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
    """The area under the curve, by ranks."""
    lower, upper = (
      np.concatenate(scores) if scores else np.zeros(0)
      for scores in self._scores
    )
    if not (lower.size and upper.size):
      return float('nan')
    if not (np.isfinite(lower).all() and np.isfinite(upper).all()):
      return float('nan')
    lower = np.sort(lower)
    # Of each right answer, how many wrong ones have less, and how many no more.
    below = int(np.searchsorted(lower, upper, 'left').sum())
    not_above = int(np.searchsorted(lower, upper, 'right').sum())
    return (below + not_above) / (2 * lower.size * upper.size)
