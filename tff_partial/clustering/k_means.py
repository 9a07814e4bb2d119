"""K-means of a client's rows, inside the client's own computation.

In HPFL (Wu et al., WWW '21, section 4.2) each client clusters the vectors of
its users and of its items; it sends the centers, called drafts.

Rows come with a mask, because clients pad theirs at the end. Padding does not
change a bit of the result: see `row_blocks`, and a row's random draws depend
only on its index.
"""

import math
from typing import NamedTuple

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.arguments import checked_numbers
from tff_partial.clustering import first_centers
from tff_partial.clustering import row_blocks
from tff_partial.errors import SettingError

# Choices of the first centers, named as in scikit-learn.
K_MEANS_PLUS_PLUS, RANDOM = 'k-means++', 'random'
INITS = (K_MEANS_PLUS_PLUS, RANDOM)
# Gains below this fraction of what leaving saves are rounding errors.
_LEAST_GAIN = 1e-5


class KMeans(NamedTuple):
  """Result of k-means.

  Attributes:
    centers: float32 `[k, d]`, the mean of each cluster's rows; zeros for
      centers that are not real.
    is_real: bool `[k]`, True for real centers.
    assignment: int32 `[n]`, the cluster of each row; 0 for padding.
    counts: int32 `[k]`, the number of rows of each center; 0 if it is not real.
  """

  centers: tf.Tensor
  is_real: tf.Tensor
  assignment: tf.Tensor
  counts: tf.Tensor


def k_means(
  points: tf.Tensor,
  is_real: tf.Tensor,
  capacity: int | tf.Tensor,
  num_centers: int | tf.Tensor,
  seed: tf.Tensor,
  *,
  init: str = K_MEANS_PLUS_PLUS,
  max_iterations: int = 50,
) -> KMeans:
  """Cluster a client's rows around the means of their clusters.

  First centers are chosen (`first_centers`) and moved to the means of the rows
  that are nearest to them (Lloyd's algorithm). Then single rows are exchanged
  between clusters while that lowers the inertia, the sum of squared distances
  of rows to their means (`exchange`), which also fills empty clusters. Centers
  are the means of their rows, even if iterations end before assignments
  converge.

  Args:
    points: Float `[n, d]`.
    is_real: bool `[n]`; False for padding, which comes last.
    capacity: Rows of the result's centers: a number, or a vector of this many
      elements, since XLA knows sizes only by shapes.
    num_centers: Integer scalar, the requested number of centers, at most
      `capacity`. If there are fewer distinct rows, surplus centers are not
      real.
    seed: Integer `[2]`.
    init: Choice of the first centers: `K_MEANS_PLUS_PLUS`, far from one
      another, or `RANDOM` rows, which is much faster for thousands of centers.
    max_iterations: Maximum iterations of either kind.

  Raises:
    SettingError: If shapes do not fit, a number is below 1, or `init` is
      unknown.
  """
  if init not in INITS:
    raise SettingError(
      f'init={init!r}: k-means begins with one of {", ".join(INITS)}.'
    )
  if not tf.is_tensor(capacity):
    checked_numbers.check_whole(SettingError, 1, capacity=capacity)
    capacity = tf.zeros([capacity])
  checked_numbers.check_whole(SettingError, 1, max_iterations=max_iterations)
  points = _checked(points, 'points')
  _check_one_a_row(is_real, points, 'is_real')
  padded, is_row = row_blocks.in_blocks(points, is_real)
  num_centers = tf.cast(num_centers, tf.int32)
  number = tf.size(capacity)
  choose = first_centers.draw
  if init == RANDOM:
    choose = first_centers.any_rows
  together = tf.zeros_like(is_row, tf.int32)
  middle, _ = row_blocks.means(padded, is_row, together, 1)
  shifted = tf.where(is_row[:, None], padded - middle, 0.0)
  own = random_bits.fold_in(seed, 0)
  first, is_center = choose(shifted, is_row, number, num_centers, own)
  assignment = lloyd(shifted, is_row, first, is_center, max_iterations)
  assignment = exchange(shifted, is_row, assignment, is_center, max_iterations)
  centers, counts = row_blocks.means(padded, is_row, assignment, number)
  is_kept = (counts > 0) & (tf.range(number) < num_centers)
  return KMeans(
    tf.where(is_kept[:, None], centers, 0.0),
    is_kept,
    tf.ensure_shape(assignment[: tf.shape(points)[0]], points.shape[:1]),
    tf.where(is_kept, counts, 0),
  )


def sums_and_counts(
  points: tf.Tensor,
  is_real: tf.Tensor,
  centers: tf.Tensor,
  is_center: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Sum the rows that are nearest to each center: one step of Lloyd's.

  Totals over clients, sums divided by counts, are the next centers of a k-means
  of all their rows, though no row is sent.

  Args:
    points: Float `[n, d]`.
    is_real: bool `[n]`; False for padding, which comes last.
    centers: Float `[k, d]`.
    is_center: bool `[k]`, True for centers that count.
  """
  points, centers = _checked(points, 'points'), _checked(centers, 'centers')
  if points.shape[1] != centers.shape[1]:
    raise SettingError(
      f'centers: they are vectors of {centers.shape[1]} numbers, points of '
      f'{points.shape[1]}. Distances need the same size.'
    )
  _check_one_a_row(is_real, points, 'is_real')
  _check_one_a_row(is_center, centers, 'is_center')
  padded, is_row = row_blocks.in_blocks(points, is_real)
  # Centers may lie far from the origin, near which distances are exact.
  together = tf.zeros_like(is_center, tf.int32)
  middle, _ = row_blocks.means(centers, is_center, together, 1)
  nearest = row_blocks.nearest(padded - middle, centers - middle, is_center)
  is_counted = is_row & tf.gather(is_center, nearest)
  return row_blocks.sums(padded, is_counted, nearest, tf.shape(centers)[0])


# ---- iterations --------------------------------------------------------------


def lloyd(
  points: tf.Tensor,
  is_row: tf.Tensor,
  centers: tf.Tensor,
  is_center: tf.Tensor,
  max_iterations: int,
) -> tf.Tensor:
  """Move centers to the means of their rows until assignments converge.

  Rows are whole blocks. Returns the assignment, int32 `[n]`.
  """

  def iterate(
    is_done: tf.Tensor, centers: tf.Tensor, assignment: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    del is_done
    nearest = row_blocks.nearest(points, centers, is_center)
    nearest = tf.where(is_row, nearest, 0)
    number = tf.size(is_center)
    means, counts = row_blocks.means(points, is_row, nearest, number)
    return (
      tf.reduce_all(tf.equal(nearest, assignment)),
      # A center without rows stays in place.
      tf.where(counts[:, None] > 0, means, centers),
      nearest,
    )

  *_, assignment = tf.while_loop(
    lambda is_done, *_: ~is_done,
    iterate,
    (
      tf.constant(False),
      centers,
      tf.fill(tf.shape(is_row), row_blocks.NOWHERE),
    ),
    maximum_iterations=max_iterations,
    parallel_iterations=1,
  )
  return assignment


def exchange(
  points: tf.Tensor,
  is_row: tf.Tensor,
  assignment: tf.Tensor,
  is_center: tf.Tensor,
  max_iterations: int,
) -> tf.Tensor:
  """Move rows to other clusters while that lowers the inertia.

  A row at distance d from the mean of its cluster of n rows adds
  d^2 n / (n - 1) to the inertia; at distance e from the mean of m other rows it
  would add e^2 m / (m + 1) (Hartigan and Wong, 1979). If clusters are small, as
  with a tenth of the rows as centers, this lowers the inertia after Lloyd's
  algorithm by several percent. Each iteration moves the rows that gain most
  among all that would leave or join either cluster, so that no two moves share
  a cluster and every move gains. An empty cluster costs nothing to join: it
  takes the row that gains most by leaving, far from its own mean.

  Rows are whole blocks around the origin. Returns the assignment.
  """

  def iterate(
    is_done: tf.Tensor, assignment: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    del is_done
    number = tf.size(is_center)
    means, counts = row_blocks.means(points, is_row, assignment, number)
    sizes = tf.cast(counts, tf.float32)
    own = tf.gather(sizes, assignment)
    saved = row_blocks.squared_distances(points, means, assignment)
    saved *= own / tf.maximum(own - 1.0, 1.0)
    other, added = _best_others(points, means, sizes, assignment, is_center)
    gains = saved - added
    is_gain = is_row & (gains > _LEAST_GAIN * saved)
    # Equal gains, as of equal rows, are ordered by index.
    order = tf.argsort(
      tf.where(is_gain, gains, 0.0), direction='DESCENDING', stable=True
    )
    rank = tf.math.invert_permutation(order)
    first = tf.minimum(
      tf.math.unsorted_segment_min(rank, assignment, number),
      tf.math.unsorted_segment_min(rank, other, number),
    )
    is_moved = is_gain & tf.equal(
      rank, tf.minimum(tf.gather(first, assignment), tf.gather(first, other))
    )
    return ~tf.reduce_any(is_moved), tf.where(is_moved, other, assignment)

  _, assignment = tf.while_loop(
    lambda is_done, _: ~is_done,
    iterate,
    (tf.constant(False), assignment),
    maximum_iterations=max_iterations,
    parallel_iterations=1,
  )
  return assignment


def _best_others(
  points: tf.Tensor,
  means: tf.Tensor,
  sizes: tf.Tensor,
  assignment: tf.Tensor,
  is_center: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Return each row's best other cluster, and the inertia it would add."""
  to_means = row_blocks.to_centers(means)
  places = tf.range(tf.size(sizes))

  def of_block(
    block: tf.Tensor, assignment: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    squares = tf.reduce_sum(tf.square(block), -1, keepdims=True)
    added = tf.maximum(to_means(block) + squares, 0.0) * sizes / (sizes + 1.0)
    is_other = is_center & tf.not_equal(places, assignment[:, None])
    added = tf.where(is_other, added, math.inf)
    return tf.argmin(added, -1, output_type=tf.int32), tf.reduce_min(added, -1)

  best, added = row_blocks.by_block(
    of_block, (points, assignment), (tf.int32, tf.float32)
  )
  return tf.reshape(best, [-1]), tf.reshape(added, [-1])


# ---- checks ------------------------------------------------------------------


def _checked(vectors: tf.Tensor, name: str) -> tf.Tensor:
  vectors = tf.convert_to_tensor(vectors)
  shape = vectors.shape
  if shape.rank != 2 or shape[1] is None or not vectors.dtype.is_floating:
    raise SettingError(
      f'{name}: expected floats [rows, size], found {vectors.dtype.name} of '
      f'the shape {shape}. Make one vector of known size of each row.'
    )
  return tf.cast(vectors, tf.float32)


def _check_one_a_row(mask: tf.Tensor, vectors: tf.Tensor, name: str) -> None:
  mask = tf.convert_to_tensor(mask)
  if mask.dtype != tf.bool or not mask.shape.is_compatible_with(
    vectors.shape[:1]
  ):
    raise SettingError(
      f'{name}: expected booleans {vectors.shape[:1]}, one for each row, found '
      f'{mask.dtype.name} of the shape {mask.shape}.'
    )
