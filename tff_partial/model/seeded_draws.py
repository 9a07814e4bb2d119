"""Draws of Keras's own layers and initializers, redirected to seeds.

They follow from a seed and are the same under every runtime. Anything that
still draws from hidden state is refused when traced (see `tracing.py`).
"""

from collections.abc import Callable
import contextvars
import functools
import itertools
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.model.keras_variables import ModelError


def _normally(draw: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Return a method that draws with a mean and a standard deviation."""

  def method(
    self: 'SeededDraws',
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = None,
    nonce: Any = None,
    seed: Any = None,
  ) -> tf.Tensor:
    del nonce, seed
    return self._draw(draw, shape, mean, stddev, dtype=dtype)

  return method


# The number of the copy that is drawn, if it is not the first of several.
_COPY = contextvars.ContextVar[tuple[int, ...]]('copy', default=())


def seed_of(initializer_seed: int) -> tf.Tensor:
  """Return the seed of an initializer that was given one."""
  return tf.constant(
    random_bits.derive('initializer', initializer_seed, *_COPY.get())
  )


def of_copies(
  number: int, draw: Callable[[tf.Tensor], Any], seed: tf.Tensor
) -> list[Any]:
  """Draw several copies, each separately, by initializers with a seed, too."""

  def copy(place: int) -> Any:
    _COPY.set((place,) if place else ())
    return draw(random_bits.fold_in(seed, f'group {place}'))

  return [contextvars.copy_context().run(copy, n) for n in range(number)]


class SeededDraws:
  """A replacement for the random generators of both Kerases, from a seed."""

  RNG_STATELESS = 'stateless'
  RNG_STATEFUL = 'stateful'
  RNG_LEGACY_STATEFUL = 'legacy_stateful'

  def __init__(self, seed: tf.Tensor, rows: tf.Tensor | None = None):
    """Start from a seed; `rows` replace the leading dimension of all draws."""
    self._seed, self._rows = seed, rows
    self._draws = itertools.count()
    self._rng_type = self.RNG_STATELESS

  def _maybe_init(self) -> None:
    """Do nothing; Keras calls this before it builds a layer."""

  def make_legacy_seed(self) -> None:
    """Return None: there is no seed for stateful operations."""

  def make_seed_for_stateless_op(self) -> tf.Tensor:
    """Return the seed of one draw."""
    return random_bits.fold_in(self._seed, next(self._draws))

  def _draw(
    self, draw: Callable[..., tf.Tensor], shape: Any, *of: float, dtype: Any
  ) -> tf.Tensor:
    """Draw numbers, by default of Keras's float type."""
    dtype = tf.as_dtype(dtype or tf.keras.backend.floatx())
    if self._rows is not None:
      shape = tf.concat([[self._rows], tf.convert_to_tensor(shape)[1:]], 0)
    return draw(self.make_seed_for_stateless_op(), shape, *of, dtype)

  def random_uniform(
    self,
    shape: Any,
    minval: float = 0.0,
    maxval: float | None = None,
    dtype: Any = None,
    nonce: Any = None,
    seed: Any = None,
  ) -> tf.Tensor:
    """Draw uniform numbers."""
    del nonce, seed  # Draws never repeat here.
    high = 1.0 if maxval is None else maxval
    return self._draw(random_bits.uniform, shape, minval, high, dtype=dtype)

  random_normal = _normally(random_bits.normal)
  truncated_normal = _normally(random_bits.truncated_normal)

  def dropout(
    self, inputs: tf.Tensor, rate: float, noise_shape: Any = None
  ) -> tf.Tensor:
    """Set a random share of the inputs to zero and scale up the rest."""
    shape = tf.shape(inputs) if noise_shape is None else noise_shape
    kept = random_bits.uniform(self.make_seed_for_stateless_op(), shape) >= rate
    return inputs * tf.cast(kept, inputs.dtype) / (1.0 - rate)


def _initializer_of(initial_value: Any) -> Any:
  """Return the initializer in a request for a variable."""
  if isinstance(initial_value, functools.partial):
    initial_value = initial_value.func
  return getattr(initial_value, '__self__', initial_value)


def first_value(
  request: dict[str, Any], variable: tf.Variable
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return a pure function from a seed to a variable's drawn first value."""
  draw = _drawn_by(request)

  def initialize(seed: tf.Tensor) -> tf.Tensor:
    value = draw(seed, None)
    return tf.ensure_shape(tf.cast(value, variable.dtype), variable.shape)

  return initialize


def first_rows(
  request: dict[str, Any], variable: tf.Variable
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Return a pure function from a seed and a number to a variable's rows.

  They are distributed like the variable's own. The first rows are the same,
  however many are drawn.
  """
  draw = _drawn_by(request)
  rest = variable.shape[1:]

  def initialize(seed: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    value = tf.cast(draw(seed, number), variable.dtype)
    if not _draws(request):
      known = tf.get_static_value(value)
      if known is not None and (known != known[:1]).any():
        raise ModelError(
          f'Table {variable.name!r} begins with other values in each row, so '
          'that rows of which a client has more or fewer have none. Give it '
          'an initializer that draws, or one value for all.'
        )
      value = tf.broadcast_to(value[:1], tf.concat([[number], rest], 0))
    return tf.ensure_shape(value, [None, *rest])

  return initialize


def _draws(request: dict[str, Any]) -> bool:
  """Return true if an initializer draws its values."""
  initializer = _initializer_of(request['initial_value'])
  return hasattr(initializer, '_random_generator')


def _drawn_by(
  request: dict[str, Any],
) -> Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor]:
  """Return (seed, number of rows or None) -> the initializer's value."""
  initial_value = request['initial_value']
  initializer = _initializer_of(initial_value)
  own_seed = getattr(initializer, 'seed', None)

  def draw(seed: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    if not _draws(request):
      return initial_value()
    if own_seed is not None:
      seed = seed_of(own_seed)
    # Other layers or models may share the initializer.
    generator = initializer._random_generator
    initializer._random_generator = SeededDraws(seed, rows)
    initializer._used = False  # Keras warns of reuse without a seed.
    try:
      return initial_value()
    finally:
      initializer._random_generator = generator

  return draw
