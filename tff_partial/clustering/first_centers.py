"""First centers of k-means, by greedy k-means++, or random rows.

Arthur and Vassilvitskii (2007), section 2.2, sample each further center from
the rows in proportion to their squared distance to the nearest center so far.
Of several rows sampled like this, the one that lowers the inertia most is
chosen (section 7).
"""

import math

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.clustering import row_blocks

# Number of rows that compete for each center.
_CANDIDATES = 8


def draw(
  points: tf.Tensor,
  is_row: tf.Tensor,
  capacity: int | tf.Tensor,
  num_centers: tf.Tensor,
  seed: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Choose distinct rows as first centers by k-means++.

  Returns the centers, `[capacity, d]`, and the mask of real ones, which come
  first.
  """
  squares = tf.reduce_sum(tf.square(points), -1)

  def choose(
    place: tf.Tensor, chosen: tf.Tensor, distances: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    times = race(distances, random_bits.fold_in(seed, place))
    later, rows = tf.math.top_k(-times, _CANDIDATES)
    inertias = _inertias(points, squares, distances, tf.gather(points, rows))
    best = tf.argmin(tf.where(later > -math.inf, inertias, math.inf))
    row = tf.gather(rows, best)
    return (
      place + 1,
      tf.tensor_scatter_nd_update(chosen, [[place]], [row]),
      tf.minimum(distances, row_blocks.squared_distances(points, points, row)),
    )

  def goes_on(
    place: tf.Tensor, chosen: tf.Tensor, distances: tf.Tensor
  ) -> tf.Tensor:
    del chosen
    is_wanted = place < tf.minimum(num_centers, capacity)
    return is_wanted & tf.reduce_any(distances > 0.0)

  number, chosen, _ = tf.while_loop(
    goes_on,
    choose,
    (
      tf.constant(0),
      tf.zeros([capacity], tf.int32),
      # Before there is a center, all rows are equally far.
      tf.where(is_row, tf.float32.max, 0.0),
    ),
    parallel_iterations=1,
  )
  return tf.gather(points, chosen), tf.range(tf.size(chosen)) < number


def any_rows(
  points: tf.Tensor,
  is_row: tf.Tensor,
  capacity: int | tf.Tensor,
  num_centers: tf.Tensor,
  seed: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Choose random rows, each set with equal probability; some may be equal.

  Args and results are those of `draw`.
  """
  times = race(tf.cast(is_row, tf.float32), seed)
  # Padding comes last.
  order = tf.argsort(times, stable=True)
  size = tf.minimum(tf.size(order), capacity)
  chosen = tf.pad(order[:size], [[0, capacity - size]])
  number = tf.minimum(num_centers, tf.reduce_sum(tf.cast(is_row, tf.int32)))
  return tf.gather(points, chosen), tf.range(capacity) < number


def race(weights: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
  """Draw a time for each row, by which rows are sampled without replacement.

  A row's time is an exponential draw, by inversion, divided by its weight, and
  infinite if that is 0. So the first row is sampled in proportion to the
  weights, the second in proportion to the weights of the others, and so on.
  Unlike sampling by cumulative weights this needs no sum, and does not depend
  on padding.
  """
  shares = weights / tf.reduce_max(weights)
  draws = random_bits.uniform(seed, tf.shape(weights))
  # The middle of the draw's step: neither 0 nor 1.
  draws = tf.minimum(draws + 2.0**-25, 1.0 - 2.0**-24)
  times = tf.math.divide_no_nan(-tf.math.log1p(-draws), shares)
  return tf.where(shares > 0.0, times, math.inf)


def _inertias(
  points: tf.Tensor,
  squares: tf.Tensor,
  distances: tf.Tensor,
  candidates: tf.Tensor,
) -> tf.Tensor:
  """Return the inertia with each candidate as a center, `[candidates]`."""
  to_candidates = row_blocks.to_centers(candidates)

  def of_block(
    block: tf.Tensor, squares: tf.Tensor, distances: tf.Tensor
  ) -> tf.Tensor:
    found = tf.maximum(to_candidates(block) + squares[:, None], 0.0)
    return tf.reduce_sum(tf.minimum(distances[:, None], found), 0)

  blocks = row_blocks.by_block(
    of_block, (points, squares, distances), tf.float32
  )
  first = tf.zeros_like(blocks[:, 0], tf.int32)
  return tf.math.unsorted_segment_sum(blocks, first, 1)[0]
