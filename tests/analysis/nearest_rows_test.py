"""Distances of drafts to rows, beside a loop and by hand."""

import math

import numpy as np
import pytest

from tff_partial.analysis import nearest_rows
from tff_partial.analysis.errors import AnalysisError

# Three rows on a line, each 5 from the next.
_ROWS = np.array([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])


def test_distances_by_hand():
  points = np.array([[0.0, 1.0], [3.0, 4.0], [6.0, 5.0]])
  # 1 from the first row; the second row itself; 3 from the third.
  assert nearest_rows.to_nearest(points, _ROWS).tolist() == [1.0, 0.0, 3.0]
  assert nearest_rows.to_nearest_other(_ROWS).tolist() == [5.0, 5.0, 5.0]
  assert nearest_rows.to_nearest(points[:0], _ROWS).tolist() == []


def test_rows_that_occur_twice_are_at_no_distance():
  rows = np.array([[1.0, 1.0], [4.0, 5.0], [1.0, 1.0]])
  assert nearest_rows.to_nearest_other(rows).tolist() == [0.0, 5.0, 0.0]


@pytest.mark.parametrize('far', [0.0, 1e6])
def test_distances_are_those_of_a_loop(far):
  random = np.random.default_rng(0)
  rows, points = far + random.normal(size=[60, 3]), random.normal(size=[20, 3])
  points = far + points
  points[7] = rows[30]
  found = nearest_rows.to_nearest(points, rows)
  others = nearest_rows.to_nearest_other(rows)
  for point, distance in zip(points, found, strict=True):
    nearest = min(math.dist(point, row) for row in rows)
    assert distance == pytest.approx(nearest, rel=1e-12)
  for place, distance in enumerate(others):
    apart = [math.dist(rows[place], row) for row in np.delete(rows, place, 0)]
    assert distance == pytest.approx(min(apart), rel=1e-12)
  assert found[7] == 0.0


def test_of_many_rows_some_are_compared_with_all():
  rows = np.random.default_rng(0).normal(size=[50, 2])
  every = nearest_rows.to_nearest_other(rows).tolist()
  some = nearest_rows.to_nearest_other(rows, 10, seed=1).tolist()
  assert len(some) == 10 and set(some) <= set(every)
  assert some == nearest_rows.to_nearest_other(rows, 10, seed=1).tolist()
  assert some != nearest_rows.to_nearest_other(rows, 10, seed=2).tolist()
  assert nearest_rows.to_nearest_other(rows, 50).tolist() == every


def test_nearness_by_hand():
  found = nearest_rows.nearness([3.0, 0.0, 1.0, 4.0, 1e-6], between_rows=2.0)
  # The 5 % quantile lies a fifth of the way from the first to the second.
  assert found == nearest_rows.Nearness(
    number=5,
    median=1.0,
    quantile=pytest.approx(0.2e-6),
    least=0.0,
    share_equal=0.4,
    between_rows=2.0,
  )


def test_where_rows_are_alike_only_the_same_is_equal():
  assert nearest_rows.nearness([0.0, 1e-9], 0.0).share_equal == 0.5


@pytest.mark.parametrize(
  ('make', 'expected'),
  [
    (lambda: nearest_rows.nearness([], 1.0), 'there is no draft'),
    (lambda: nearest_rows.to_nearest_other(_ROWS[:1]), 'there are 1. Give two'),
    (lambda: nearest_rows.to_nearest(_ROWS, _ROWS[:0]), 'at least one row'),
    (
      lambda: nearest_rows.to_nearest(_ROWS, np.zeros([2, 3])),
      r'points have the shape \(3, 2\), rows \(2, 3\)',
    ),
    (
      lambda: nearest_rows.to_nearest(_ROWS[0], _ROWS),
      r'points: expected vectors .*, found the shape \(2,\)',
    ),
    (
      lambda: nearest_rows.to_nearest_other(_ROWS / [[0.0, 1.0]]),
      'rows: some numbers are not finite',
    ),
  ],
)
@pytest.mark.filterwarnings('ignore:divide by zero', 'ignore:invalid value')
def test_what_has_no_distances_is_refused(make, expected):
  with pytest.raises(AnalysisError, match=expected):
    make()
