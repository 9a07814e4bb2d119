"""Sums, means and nearest centers of rows, which padding does not change.

Clients pad their rows, and no bit of their results may depend on that. The
order in which a kernel sums depends on shapes. So rows are processed in blocks
of one size, whatever their number, so that all matrix products have the same
shape; and sums over all rows are in the rows' order, to which padding adds
nothing.

Everything is plain TensorFlow of static shapes, which compiles under XLA.
"""

from collections.abc import Callable
import math
from typing import Any

import tensorflow as tf

# Rows per block. Distances of a block to 1,100 centers take 4.5 MB.
BLOCK = 1024
# The segment of rows that sums ignore.
NOWHERE = -1


def in_blocks(
  points: tf.Tensor, is_real: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Pad rows, `[n, d]`, with zeros to whole blocks; also return their mask."""
  number = points.shape[0]
  if number is None:
    number = tf.shape(points)[0]
  missing = (number // BLOCK + 1) * BLOCK - number
  return (
    tf.pad(tf.where(is_real[:, None], points, 0.0), [[0, missing], [0, 0]]),
    tf.pad(is_real, [[0, missing]]),
  )


def by_block(
  function: Callable[..., Any], rows: tuple[tf.Tensor, ...], dtypes: Any
) -> Any:
  """Stack the results of a function of a block of each array."""
  blocks = [
    tf.reshape(values, [-1, BLOCK, *values.shape[1:]]) for values in rows
  ]
  return tf.map_fn(
    lambda block: function(*block),
    tuple(blocks),
    fn_output_signature=dtypes,
    parallel_iterations=1,
  )


def to_centers(centers: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return the function from a block to |x - c|^2 - |x|^2, `[BLOCK, k]`."""
  squares = tf.reduce_sum(tf.square(centers), -1)
  scaled = -2.0 * centers
  return lambda block: tf.matmul(block, scaled, transpose_b=True) + squares


def nearest(
  points: tf.Tensor, centers: tf.Tensor, is_center: tf.Tensor
) -> tf.Tensor:
  """Return the nearest center of each row of whole blocks, int32 `[n]`.

  Centers must be near the origin, where distances by matrix products are exact.
  """
  distances = to_centers(centers)

  def of_block(block: tf.Tensor) -> tf.Tensor:
    return tf.argmin(
      tf.where(is_center, distances(block), math.inf), -1, output_type=tf.int32
    )

  return tf.reshape(by_block(of_block, (points,), tf.int32), [-1])


def squared_distances(
  points: tf.Tensor, centers: tf.Tensor, assignment: tf.Tensor
) -> tf.Tensor:
  """Return squared distances of rows to their centers, exactly 0 if equal."""
  return tf.reduce_sum(
    tf.math.squared_difference(points, tf.gather(centers, assignment)), -1
  )


def sums(
  values: tf.Tensor,
  is_row: tf.Tensor,
  segments: tf.Tensor,
  number: int | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Return sums and counts of each segment's rows, in the order of the rows."""
  segments = tf.where(is_row, segments, NOWHERE)
  ones = tf.ones_like(segments)
  return (
    tf.math.unsorted_segment_sum(values, segments, number),
    tf.math.unsorted_segment_sum(ones, segments, number),
  )


def means(
  points: tf.Tensor,
  is_row: tf.Tensor,
  segments: tf.Tensor,
  number: int | tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Return means of each segment's rows, zeros without any, and counts."""
  totals, counts = sums(points, is_row, segments, number)
  return totals / tf.cast(tf.maximum(counts, 1), tf.float32)[:, None], counts
