"""Accuracy by cuts between answers that validation records choose.

A client counts its validation records by answer and prediction, in bins. The
sums over all clients choose the cuts, the same for all, by which most records
are right; the paper (HPFL, section 5.3.1) does not say how predictions become
answers.
"""

import numpy as np

# Bins of predictions from one answer to the next.
_BINS = 50


def _bins(prediction: np.ndarray, scale: tuple[float, float]) -> np.ndarray:
  """Return the bins of predictions; beyond the scale, the first or last."""
  low, high = scale
  place = np.floor((np.nan_to_num(prediction) - low) * _BINS)
  return np.clip(place, 0, (high - low) * _BINS - 1).astype(np.int64)


def histogram(
  answer: np.ndarray, prediction: np.ndarray, scale: tuple[float, float]
) -> np.ndarray:
  """Count records by answer and prediction.

  Args:
    answer: Whole numbers on the scale, `[records]`.
    prediction: Predictions, `[records]`.
    scale: The lowest and the highest answer.

  Returns:
    Counts, int64 `[answers, bins]`.
  """
  low, high = map(int, scale)
  counts = np.zeros([high - low + 1, (high - low) * _BINS], np.int64)
  place = answer.astype(np.int64) - low, _bins(prediction, scale)
  np.add.at(counts, place, 1)
  return counts


def choose(counts: np.ndarray) -> np.ndarray:
  """Choose the cuts by which most records are right.

  Args:
    counts: The sum of clients' histograms.

  Returns:
    Ascending bins, int64 `[answers - 1]`: from the first one on a prediction
    means the second answer, and so on. Of equally good cuts, the highest.
  """
  # Records of each answer below each edge of a bin.
  below = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
  edges = np.arange(below.shape[1])
  right = np.zeros(below.shape[1], np.int64)
  before = []
  # A cut moves the records between it and the end from one answer to the next.
  for lower, upper in zip(below[:-1], below[1:], strict=True):
    best = np.maximum.accumulate(right)
    before.append(np.maximum.accumulate(np.where(right == best, edges, 0)))
    right = best + lower - upper
  cuts = [int(edges[right == right.max()][-1])]
  for places in reversed(before[1:]):
    cuts.append(int(places[cuts[-1]]))
  return np.array(cuts[::-1], np.int64)


def accuracy(
  answer: np.ndarray,
  prediction: np.ndarray,
  chosen: np.ndarray,
  scale: tuple[float, float],
) -> float:
  """Return the share of right predictions; NaN if one is not finite."""
  if not len(answer) or not np.isfinite(prediction).all():
    return float('nan')
  bins = _bins(prediction, scale)[:, np.newaxis]
  meant = scale[0] + (bins >= chosen).sum(axis=1)
  return float((meant == answer).mean())
