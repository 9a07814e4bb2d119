"""Symmetric positive definite linear systems of a client.

They are solved in float64 by elimination, or by conjugate gradients where there
are too many unknowns for a matrix. Devices, whose TFLite has no float64, solve
in float32.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars

import tensorflow as tf

# True while a computation is traced for devices.
_portable: contextvars.ContextVar[bool] = contextvars.ContextVar(
  'portable', default=False
)
# Systems of at most so many unknowns are eliminated row by row, which XLA
# compiles; larger ones by TensorFlow's own operation, which is much faster
# there, and which XLA refuses.
_SMALL = 32
# Relative size of the residual at which conjugate gradients stop.
_TOLERANCE = 1e-6
# They end after as many steps as unknowns, but for rounding: so often as many,
# and at least so many. A larger residual than this is then no solution.
_ROUNDS, _LEAST_STEPS = 10, 1000
_ACCEPTED = 1e-4


@contextlib.contextmanager
def for_devices() -> Iterator[None]:
  """Use only operations that TFLite has, within the context."""
  token = _portable.set(True)
  try:
    yield
  finally:
    _portable.reset(token)


def dtype() -> tf.DType:
  """Return the type in which systems are built and solved."""
  return tf.float32 if _portable.get() else tf.float64


def solve(matrix: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
  """Solve a system for one or more right-hand sides.

  Args:
    matrix: Symmetric and positive definite, `[size, size]`.
    right: `[size, number]`.

  Returns:
    `[size, number]`; NaN if the matrix is not finite.
  """
  if _portable.get() or matrix.shape[0] <= _SMALL:
    return _eliminated(matrix, right)
  is_finite = tf.reduce_all(tf.math.is_finite(matrix))
  unit = tf.eye(tf.shape(matrix)[0], dtype=matrix.dtype)
  found = tf.linalg.solve(tf.where(is_finite, matrix, unit), right)
  return tf.where(is_finite, found, tf.constant(float('nan'), found.dtype))


def _eliminated(matrix: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
  """Solve a system by Gauss-Jordan elimination, which runs everywhere.

  Such a matrix needs no pivots. Numbers that are not finite end in NaN.
  """
  size = matrix.shape[0]

  def eliminated(
    place: tf.Tensor, both: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor]:
    column = tf.gather(both, place, axis=1)
    row = tf.gather(both, place) / tf.gather(column, place)
    column -= tf.one_hot(place, size, dtype=both.dtype)
    return place + 1, both - column[:, None] * row

  _, both = tf.while_loop(
    lambda place, _: place < size,
    eliminated,
    (tf.constant(0), tf.concat([matrix, right], 1)),
    parallel_iterations=1,
  )
  return both[:, size:]


def solve_by_products(
  product: Callable[[tf.Tensor], tf.Tensor], right: tf.Tensor
) -> tf.Tensor:
  """Solve a system by conjugate gradients.

  Args:
    product: The matrix times a vector.
    right: `[size]`.

  Returns:
    `[size]`; NaN if the right-hand side or a product is not finite, or if the
    steps end far from a solution, as with too small a ridge.
  """
  scale = tf.reduce_sum(tf.square(right))
  bound = _TOLERANCE**2 * scale
  max_steps = tf.maximum(_LEAST_STEPS, _ROUNDS * tf.size(right))

  def goes_on(step: tf.Tensor, *state: tf.Tensor) -> tf.Tensor:
    return tf.logical_and(step < max_steps, state[-1] > bound)

  def next_of(
    step: tf.Tensor,
    found: tf.Tensor,
    residual: tf.Tensor,
    way: tf.Tensor,
    square: tf.Tensor,
  ) -> tuple[tf.Tensor, ...]:
    moved = product(way)
    length = square / tf.reduce_sum(way * moved)
    residual -= length * moved
    new = tf.reduce_sum(tf.square(residual))
    return (
      step + 1,
      found + length * way,
      residual,
      residual + new / square * way,
      new,
    )

  _, found, *_, left = tf.while_loop(
    goes_on,
    next_of,
    (tf.constant(0), tf.zeros_like(right), right, right, scale),
    parallel_iterations=1,
  )
  is_solved = tf.math.is_finite(scale) & (left <= _ACCEPTED**2 * scale)
  return tf.where(is_solved, found, float('nan'))
