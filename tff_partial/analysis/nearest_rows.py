"""Distances of drafts of private tables to the rows that they stand for.

HPFL (Wu et al., 2021, section 4.2) calls drafts, centers of clusters of a
client's rows, 'low sensitive'. The nearer a draft is to a user's row, the more
it reveals of the user. So drafts are measured by their distance to the nearest
row of any client, compared with the distance of rows to their nearest other
row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sklearn import neighbors

from tff_partial import random_bits
from tff_partial.analysis.errors import AnalysisError

# Up to this fraction of the distance between rows, a draft counts as a row.
EQUAL = 1e-6
_QUANTILE = 0.05


class Nearness(NamedTuple):
  """Statistics of the distances of drafts to rows.

  Attributes:
    number: The number of drafts.
    median: Their median distance to the nearest row.
    quantile: The distance below which 5 % of them are.
    least: The smallest distance.
    share_equal: The share of drafts that are rows: their distance is at most
      `EQUAL` times `between_rows`.
    between_rows: The median distance of rows to their nearest other row.
  """

  number: int
  median: float
  quantile: float
  least: float
  share_equal: float
  between_rows: float


def nearness(
  distances: Sequence[float] | np.ndarray, between_rows: float
) -> Nearness:
  """Summarise the distances of drafts to rows.

  Args:
    distances: Floats `[drafts]`, from `to_nearest`.
    between_rows: The median of the distances from `to_nearest_other`.

  Raises:
    AnalysisError: If there is no draft.
  """
  found = np.asarray(distances, np.float64)
  if not len(found):
    raise AnalysisError('Nearness: there is no draft. Give one or more.')
  return Nearness(
    len(found),
    float(np.median(found)),
    float(np.quantile(found, _QUANTILE)),
    float(found.min()),
    float(np.mean(found <= EQUAL * between_rows)),
    float(between_rows),
  )


def to_nearest(points: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Compute the Euclidean distance of each point to the nearest row.

  Distances are computed block by block, so that memory does not grow with the
  product of both numbers.

  Args:
    points: Floats `[points, width]`, such as drafts.
    rows: Floats `[rows, width]`, at least one.

  Returns:
    float64 `[points]`, exactly 0 where a point is a row.

  Raises:
    AnalysisError: If shapes do not fit, or numbers are not finite.
  """
  points, rows = _checked(points, 'points'), _checked(rows, 'rows')
  if not len(rows) or points.shape[1] != rows.shape[1]:
    raise AnalysisError(
      f'Distances: points have the shape {points.shape}, rows {rows.shape}. '
      'Give vectors of one length, and at least one row.'
    )
  if not len(points):
    return np.zeros([0])
  return _to_nearest(points, rows, 1)[:, 0]


def to_nearest_other(
  rows: np.ndarray, most: int | None = None, seed: int = 0
) -> np.ndarray:
  """Compute the Euclidean distance of rows to their nearest other row.

  Rows that occur twice are at a distance of 0 from one another.

  Args:
    rows: Floats `[rows, width]`, at least two.
    most: The size of a random sample of more rows, which is compared with all.
    seed: The seed of the sample.

  Returns:
    float64 `[rows]`, or `[most]`.

  Raises:
    AnalysisError: If there are fewer than two rows, or numbers are not finite.
  """
  rows = _checked(rows, 'rows')
  if len(rows) < 2:
    raise AnalysisError(
      f'Distances between rows: there are {len(rows)}. Give two or more.'
    )
  chosen = rows
  if most is not None and most < len(rows):
    generator = random_bits.generator(seed, 'rows that are compared')
    places = np.sort(generator.choice(len(rows), most, replace=False))
    chosen = rows[places]
  # One of the two nearest is the row itself, or an equal one.
  return _to_nearest(chosen, rows, 2).max(axis=1)


def _to_nearest(
  points: np.ndarray, rows: np.ndarray, number: int
) -> np.ndarray:
  """Compute distances to the `number` nearest rows, `[points, number]`."""
  # Far from the origin, matrix products distinguish near rows less precisely.
  middle = rows.mean(axis=0)
  search = neighbors.NearestNeighbors(n_neighbors=number, algorithm='brute')
  places = search.fit(rows - middle).kneighbors(
    points - middle, return_distance=False
  )
  return np.stack(
    [
      np.linalg.norm(points - rows[places[:, near]], axis=1)
      for near in range(number)
    ],
    axis=1,
  )


def _checked(vectors: np.ndarray, name: str) -> np.ndarray:
  vectors = np.asarray(vectors, np.float64)
  if vectors.ndim != 2:
    raise AnalysisError(
      f'{name}: expected vectors [{name}, width], found the shape '
      f'{vectors.shape}. Give one vector each.'
    )
  if not np.isfinite(vectors).all():
    raise AnalysisError(
      f'{name}: some numbers are not finite. The run diverged; look at the '
      'weights of its best round.'
    )
  return vectors
