"""K-means inside a client's computation: by hand, and against scikit-learn."""

import functools
from typing import Any

import numpy as np
import pytest
from sklearn import cluster
from sklearn import datasets
import tensorflow as tf
import threadpoolctl

from tff_partial.clustering import first_centers
from tff_partial.clustering import k_means as clustering
from tff_partial.errors import SettingError

_SEED = np.array([3, 14], np.int32)
_SIZE, _CAPACITY = 6, 32


@functools.cache
def _compiled(jit: bool = False, **options: Any) -> Any:
  """K-means as a graph, of any number of rows of `_SIZE`."""
  signature = [
    tf.TensorSpec([None, _SIZE]),
    tf.TensorSpec([None], tf.bool),
    tf.TensorSpec([], tf.int32),
    tf.TensorSpec([2], tf.int32),
  ]

  @tf.function(jit_compile=jit, input_signature=signature, autograph=False)
  def run(points, is_real, num_centers, seed):
    return clustering.k_means(
      points, is_real, _CAPACITY, num_centers, seed, **options
    )

  return run


@pytest.fixture(scope='module', autouse=True)
def fixture_compiled():
  yield
  _compiled.cache_clear()


def _found(
  rows: np.ndarray,
  num_centers: int,
  *,
  padding: int = 0,
  seed: np.ndarray = _SEED,
  **options: Any,
) -> clustering.KMeans:
  """What k-means finds among rows, in arrays without padding."""
  rows = np.asarray(rows, np.float32)
  # Padding may hold anything.
  points = np.full([len(rows) + padding, _SIZE], np.nan, np.float32)
  points[: len(rows)] = 0.0
  points[: len(rows), : rows.shape[1]] = rows
  is_real = np.arange(len(points)) < len(rows)
  found = _compiled(**options)(points, is_real, num_centers, seed)
  found = clustering.KMeans(*[value.numpy() for value in found])
  assert not found.assignment[len(rows) :].any()
  return found._replace(assignment=found.assignment[: len(rows)])


def _blobs(seed: int, number: int, num_blobs: int) -> np.ndarray:
  points, _ = datasets.make_blobs(
    number, _SIZE, centers=num_blobs, random_state=seed
  )
  return points.astype(np.float32)


def _uniform(seed: int, number: int) -> np.ndarray:
  return np.random.default_rng(seed).uniform(size=[number, _SIZE])


def _scikit_learn(rows: np.ndarray, num_centers: int) -> float:
  """The inertia of the best of ten starts of scikit-learn."""
  with threadpoolctl.threadpool_limits(1):  # More would wait for each other.
    found = cluster.KMeans(num_centers, n_init=10, random_state=0).fit(rows)
  return float(found.inertia_)


def _inertia(rows: np.ndarray, found: clustering.KMeans) -> float:
  """The sum of squared distances of rows to the means of their clusters."""
  centers = found.centers[found.assignment, : np.shape(rows)[1]]
  return float(np.square(rows - centers).sum())


def _blocks(rows: list[float]) -> tuple[tf.Tensor, tf.Tensor]:
  """Numbers as a block of vectors of one number, and which are rows."""
  points = tf.constant(rows, tf.float32)[:, None]
  padded, is_row = clustering.row_blocks.in_blocks(
    points, tf.ones([len(rows)], tf.bool)
  )
  return padded, is_row


# ---- what is found -----------------------------------------------------------


@pytest.mark.slow
def test_as_good_as_scikit_learn():
  worst = 0.0
  for seed in range(20):
    random = np.random.default_rng(seed)
    number = int(random.integers(60, 200))
    wanted = int(random.integers(2, 15))
    if seed % 2:
      rows = _uniform(seed, number)
    else:
      rows = _blobs(seed, number, wanted)
    tries = [
      _found(rows, wanted, padding=200 - number, seed=_SEED + start)
      for start in range(4)
    ]
    assert {found.is_real.sum() for found in tries} == {wanted}
    best = min(_inertia(rows, found) for found in tries)
    worst = max(worst, best / _scikit_learn(rows, wanted))
  assert worst < 1.01


def test_results_belong_together():
  rows = _uniform(1, 200).astype(np.float32)
  found = _found(rows, 20)
  counts = np.bincount(found.assignment, minlength=_CAPACITY)
  np.testing.assert_array_equal(found.counts, counts)
  np.testing.assert_array_equal(found.is_real, counts > 0)
  for place in range(_CAPACITY):
    own = rows[found.assignment == place]
    mean = own.mean(0) if len(own) else np.zeros(_SIZE)
    np.testing.assert_allclose(found.centers[place], mean, atol=1e-6)
  # Each row is nearest to its own center.
  squares = np.square(rows[:, None] - found.centers[None]).sum(-1)
  squares[:, ~found.is_real] = np.inf
  np.testing.assert_array_equal(squares.argmin(1), found.assignment)


@pytest.mark.slow
def test_centers_are_means_also_if_iterations_end_early():
  rows = _uniform(2, 200).astype(np.float32)
  found = _found(rows, 20, max_iterations=1)
  assert _inertia(rows, found) > _inertia(rows, _found(rows, 20))
  for place in np.flatnonzero(found.is_real):
    np.testing.assert_allclose(
      found.centers[place], rows[found.assignment == place].mean(0), atol=1e-6
    )


def test_rows_far_from_the_origin():
  rows = _blobs(3, 100, 4)
  near, far = _found(rows, 4), _found(rows + 5000.0, 4)
  inertia = _inertia(rows, near)
  assert _inertia(rows + 5000.0, far) == pytest.approx(inertia, rel=1e-3)


# ---- few rows ----------------------------------------------------------------


def test_no_row_has_no_center():
  for padding in (0, 5):
    found = _found(np.zeros([0, 1]), 3, padding=padding)
    assert not found.is_real.any()
    assert not found.centers.any()
    assert not found.counts.any()


def test_equal_rows_share_a_center():
  rows = np.repeat([[1.0], [5.0], [7.0]], [4, 1, 3], axis=0)
  found = _found(rows, 5)
  assert found.is_real.sum() == 3
  assert _inertia(rows, found) == 0.0
  centers = dict(zip(found.centers[:, 0], found.counts, strict=True))
  assert centers == {1.0: 4, 5.0: 1, 7.0: 3, 0.0: 0}
  assert not found.centers[~found.is_real].any()


# ---- exchanges ---------------------------------------------------------------


def test_a_row_moves_though_its_own_center_is_nearer():
  # The mean of 0 and 4 is 2, nearer to 4 than 7 is. But to leave saves
  # 2^2 * 2/1 = 8, and to join adds 3^2 * 1/2 = 4.5.
  points, is_row = _blocks([0.0, 4.0, 7.0])
  first = tf.pad(tf.constant([0, 0, 1]), [[0, len(points) - 3]])
  is_center = tf.constant([True, True])
  settled = clustering.lloyd(
    points, is_row, tf.constant([[2.0], [7.0]]), is_center, 10
  )
  np.testing.assert_array_equal(settled, first)
  found = clustering.exchange(points, is_row, first, is_center, 10)
  np.testing.assert_array_equal(found[:3], [0, 1, 1])


def test_an_empty_cluster_takes_the_farthest_row():
  points, is_row = _blocks([0.0, 1.0, 2.0, 9.0])
  together = tf.zeros_like(is_row, tf.int32)
  is_center = tf.constant([True, True, False])
  found = clustering.exchange(points, is_row, together, is_center, 1)
  np.testing.assert_array_equal(found[:4], [0, 0, 0, 1])


# ---- the first centers -------------------------------------------------------


def test_first_centers_differ_from_one_another():
  points, is_row = _blocks([1.0, 1.0, 1.0, 4.0, 8.0])
  centers, is_real = first_centers.draw(
    points, is_row, 6, tf.constant(6), _SEED
  )
  np.testing.assert_array_equal(is_real, [True] * 3 + [False] * 3)
  assert sorted(centers[:3, 0].numpy()) == [1.0, 4.0, 8.0]


# ---- the same numbers everywhere ---------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('jit', 'init'),
  [
    (False, clustering.K_MEANS_PLUS_PLUS),
    (False, clustering.RANDOM),
    (True, clustering.K_MEANS_PLUS_PLUS),
  ],
)
def test_padding_changes_no_bit(jit, init):
  rows = _uniform(5, 130)
  expected = _found(rows, 13, jit=jit, init=init)
  # In the same block, and up to a third; XLA compiles each size anew.
  for padding in (2000,) if jit else (1, 2000):
    found = _found(rows, 13, jit=jit, init=init, padding=padding)
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_xla_comes_to_the_same():
  for rows in (_blobs(6, 130, 5), _uniform(7, 130)):
    plain, compiled = _found(rows, 13), _found(rows, 13, jit=True)
    np.testing.assert_array_equal(compiled.assignment, plain.assignment)
    np.testing.assert_allclose(compiled.centers, plain.centers, rtol=1e-5)
    inertia = _inertia(rows, plain)
    assert _inertia(rows, compiled) == pytest.approx(inertia, rel=1e-5)


def test_the_seed_decides():
  rows = _uniform(8, 200)
  once, again = (_found(rows, 20) for _ in range(2))
  for one, other in zip(once, again, strict=True):
    np.testing.assert_array_equal(one, other)
  elsewhere = _found(rows, 20, seed=_SEED + 1)
  assert not np.array_equal(once.assignment, elsewhere.assignment)


# ---- sums of the nearest rows ------------------------------------------------


def test_sums_of_clients_make_a_step_of_lloyds_algorithm():
  centers = np.array([[0.0], [10.0], [11.0]], np.float32)
  # The last center does not count, and so 11 is nearest to 10.
  is_center = np.array([True, True, False])
  one = clustering.sums_and_counts(
    np.array([[1.0], [9.0], [99.0]], np.float32),
    np.array([True, True, False]),
    centers,
    is_center,
  )
  other = clustering.sums_and_counts(
    np.array([[3.0], [2.0], [11.0]], np.float32),
    np.ones(3, bool),
    centers,
    is_center,
  )
  np.testing.assert_array_equal(one[0][:, 0], [1.0, 9.0, 0.0])
  np.testing.assert_array_equal(one[1], [1, 1, 0])
  np.testing.assert_array_equal(other[0][:, 0], [5.0, 11.0, 0.0])
  np.testing.assert_array_equal(other[1], [2, 1, 0])
  # The means of 1, 3 and 2, and of 9 and 11.
  sums, counts = (
    a.numpy() + b.numpy() for a, b in zip(one, other, strict=True)
  )
  means = sums[:2, 0] / counts[:2]
  np.testing.assert_array_equal(means, [2.0, 10.0])


# ---- refusals ----------------------------------------------------------------

_ROWS, _MASK = np.zeros([4, 2], np.float32), np.ones(4, bool)


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    *(
      ({name: 0}, f'{name}: expected at least 1, found 0')
      for name in ('capacity', 'max_iterations')
    ),
    ({'init': 'far'}, "init='far': k-means"),
    ({'points': np.zeros([4], np.float32)}, 'points: expected flo'),
    ({'points': np.zeros([4, 2], np.int32)}, 'points: expected flo'),
    ({'is_real': np.ones(3, bool)}, 'is_real: expected bo'),
    ({'is_real': np.ones(4)}, 'is_real: expected bo'),
  ],
)
def test_what_makes_no_sense_is_refused(given, message):
  usual = {'points': _ROWS, 'is_real': _MASK, 'capacity': 3, 'num_centers': 2}
  with pytest.raises(SettingError, match=message):
    clustering.k_means(**{**usual, 'seed': _SEED, **given})


def test_centers_of_another_size_are_refused():
  with pytest.raises(SettingError, match='vectors of 3 numbers'):
    clustering.sums_and_counts(
      _ROWS, _MASK, np.zeros([5, 3], np.float32), np.ones(5, bool)
    )
