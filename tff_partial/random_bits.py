"""Random draws that are equal under every runtime.

TensorFlow's stateless samplers of floating-point numbers return different
values under XLA and in plain kernels. Full-range integers do not differ, if the
algorithm is specified. So every draw here starts from such integers and
continues in ordinary arithmetic: `bits` and `uniform` on the unit interval are
equal to the last bit, the others up to rounding. And a longer draw starts with
the same bits as a shorter one, so that padding does not change draws.

A seed is an integer vector of two elements. `derive` makes one on the host from
words (run, round, client, purpose); `fold_in` derives another one inside a
computation.
"""

from collections.abc import Callable, Sequence
import functools
import hashlib
import math
import operator
from typing import Any

import numpy as np
import tensorflow as tf

SEED_SPEC = tf.TensorSpec([2], tf.int32)

# Smallest positive step of a 24-bit uniform draw; all of them are exact floats.
_STEP = 2.0**-24
# The key with which TensorFlow scrambles seeds. Its own operation for that
# (StatelessRandomGetKeyCounter) differs under XLA for negative seeds.
_SCRAMBLE = np.array([0x02461E293EC8F720], np.uint64)
# A multiple of the vector length of any processor.
_LANES = 64


def derive(*words: int | str) -> np.ndarray:
  """Return the seed, int32 `[2]`, of a sequence of words.

  The same words give the same seed on every machine, and different words give
  unrelated seeds.

  Args:
    *words: For example a run's seed, a round number and a client id.
  """
  text = '\x1f'.join(map(_text, words))
  return _seeds(hashlib.blake2b(text.encode(), digest_size=8).digest())[0]


def not_negative(*words: int | str) -> int:
  """Return a seed of some words for other libraries, from 0 to 2**31 - 1.

  Args:
    *words: As for `derive`.
  """
  return int(derive(*words)[0]) & 0x7FFFFFFF


def derive_each(
  words: Sequence[int | str], last: Sequence[int | str]
) -> np.ndarray:
  """Return `derive(*words, word)` for each last word, int32 `[words, 2]`.

  Args:
    words: The common words, for example a run's seed and a round.
    last: The last words, for example client ids.
  """
  common = hashlib.blake2b(
    ''.join(f'{_text(word)}\x1f' for word in words).encode(), digest_size=8
  )
  digests = []
  for word in last:
    own = common.copy()
    own.update(_text(word).encode())
    digests.append(own.digest())
  return _seeds(b''.join(digests))


def _seeds(digests: bytes) -> np.ndarray:
  return np.frombuffer(digests, '<i4').astype(np.int32).reshape([-1, 2])


def _text(word: int | str) -> str:
  # NumPy's numbers equal Python's. Quotes distinguish '1' from 1.
  if isinstance(word, str):
    return ascii(str(word))  # NumPy 2 would include its type.
  return str(operator.index(word))


def generator(*words: int | str) -> np.random.Generator:
  """Return a NumPy generator with the seed of some words.

  Args:
    *words: As for `derive`: for example a seed and a purpose.
  """
  return np.random.default_rng(derive(*words).view(np.uint32))


def bits(seed: tf.Tensor, shape: Sequence[int] | tf.Tensor) -> tf.Tensor:
  """Draw full-range unsigned integers, uint32 `shape`.

  They equal those of `tf.random.stateless_uniform` for `alg='philox'`, which
  adds four times as many operations.
  """
  key, counter = tf.split(
    tf.bitcast(_philox(_SCRAMBLE, tf.cast(seed, tf.uint64), [2, 2]), tf.uint64),
    2,
  )
  return _philox(key, tf.pad(counter, [[1, 0]]), shape)


def _philox(key: Any, counter: tf.Tensor, shape: Any) -> tf.Tensor:
  return tf.raw_ops.StatelessRandomUniformFullIntV2(
    shape=tf.convert_to_tensor(shape, dtype_hint=tf.int32),
    key=key,
    counter=counter,
    dtype=tf.uint32,
    alg=tf.random.Algorithm.PHILOX.value,
  )


def of_parts(seed: tf.Tensor) -> tf.Tensor:
  """Return the seed by which a client's data divide, from that of its round."""
  return fold_in(seed, 'part')


def fold_in(seed: tf.Tensor, purpose: int | str | tf.Tensor) -> tf.Tensor:
  """Return a new seed, int32 `[2]`, for one purpose of the given seed.

  Args:
    seed: Integer `[2]`.
    purpose: A word or number known when tracing, or an integer scalar tensor
      such as a step's index.
  """
  if isinstance(purpose, str):
    purpose = int(derive(purpose)[0])
  return _folded()(tf.cast(seed, tf.int32), tf.cast(purpose, tf.int32))


@functools.cache
def _folded() -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
  """Trace `fold_in` once, so that a call adds one operation, not 40."""

  def fold(seed: tf.Tensor, purpose: tf.Tensor) -> tf.Tensor:
    # Two rounds, so that (seed, purpose) pairs with equal sums differ.
    mixed = tf.bitcast(bits(seed, [2]), tf.int32)
    return tf.bitcast(bits(mixed + tf.stack([purpose, 0]), [2]), tf.int32)

  with tf.Graph().as_default():  # The first caller's would stay in memory.
    return tf.function(fold, autograph=False).get_concrete_function(
      SEED_SPEC, tf.TensorSpec([], tf.int32)
    )


def uniform(
  seed: tf.Tensor,
  shape: Sequence[int] | tf.Tensor,
  low: float = 0.0,
  high: float = 1.0,
  dtype: tf.DType = tf.float32,
) -> tf.Tensor:
  """Draw uniform numbers from `[low, high)`."""
  drawn = tf.cast(tf.bitwise.right_shift(bits(seed, shape), 8), tf.float32)
  unit = drawn * tf.constant(_STEP)
  draws = tf.cast(low + unit * (high - low), dtype)
  if not _may_reach(low, high, dtype):
    return draws
  below = np.nextafter(*np.array([high, low], dtype.as_numpy_dtype))
  return tf.minimum(draws, tf.constant(below, dtype))


def _may_reach(low: Any, high: Any, dtype: tf.DType) -> bool:
  """Return True if the largest uniform draw may be rounded to `high`."""
  if tf.is_tensor(low) or tf.is_tensor(high) or not low < high:
    return False
  unit, span = 1.0 - _STEP, high - low
  largest = np.float32(low) + np.float32(unit) * np.float32(span)
  # In one step, as XLA may join them, and in two.
  found = np.array([low + unit * span, largest], np.float32)
  return bool((found.astype(dtype.as_numpy_dtype) >= high).any())


def _in_whole_lanes(
  draw: Callable[[Sequence[int] | tf.Tensor], tf.Tensor],
  shape: Sequence[int] | tf.Tensor,
) -> tf.Tensor:
  """Draw slightly more than `shape`, and cut.

  Plain kernels compute the remainder after whole vectors one by one, with a
  logarithm that differs in the last bit. So there must be no remainder.
  """
  if not tf.is_tensor(shape):
    shape = [int(size) for size in shape]
  size = tf.reduce_prod(shape) if tf.is_tensor(shape) else math.prod(shape)
  drawn = draw([-(-size // _LANES) * _LANES])
  return tf.reshape(drawn[:size], shape)


def normal(
  seed: tf.Tensor,
  shape: Sequence[int] | tf.Tensor,
  mean: float = 0.0,
  stddev: float = 1.0,
  dtype: tf.DType = tf.float32,
) -> tf.Tensor:
  """Draw normal numbers by the Box-Muller transform."""

  def draw(shape: Sequence[int] | tf.Tensor) -> tf.Tensor:
    # The radius needs a draw above zero, for its logarithm.
    above_zero = uniform(fold_in(seed, 0), shape) + _STEP
    angle = uniform(fold_in(seed, 1), shape, 0.0, 2.0 * math.pi)
    return tf.sqrt(-2.0 * tf.math.log(above_zero)) * tf.cos(angle)

  return tf.cast(mean + stddev * _in_whole_lanes(draw, shape), dtype)


def truncated_normal(
  seed: tf.Tensor,
  shape: Sequence[int] | tf.Tensor,
  mean: float = 0.0,
  stddev: float = 1.0,
  dtype: tf.DType = tf.float32,
) -> tf.Tensor:
  """Draw normal numbers within two standard deviations, by inversion."""
  # Phi(2) of the standard normal distribution, mapped to erfinv's argument.
  edge = math.erf(2.0 / math.sqrt(2.0))
  drawn = math.sqrt(2.0) * _in_whole_lanes(
    lambda shape: tf.math.erfinv(uniform(seed, shape, -edge, edge)), shape
  )
  return tf.cast(mean + stddev * tf.clip_by_value(drawn, -2.0, 2.0), dtype)
