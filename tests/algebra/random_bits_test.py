"""Laws of random draws: the same under every runtime, whatever the padding."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import random_bits

_SEED = np.array([7, -3], np.int32)

_DRAWS = {
  'bits': random_bits.bits,
  'uniform': random_bits.uniform,
  'uniform in a range': functools.partial(
    random_bits.uniform, low=-2.0, high=3.0
  ),
  'normal': random_bits.normal,
  'truncated normal': random_bits.truncated_normal,
}
# XLA may join a product and a sum to one step, and has its own logarithm.
_TOLERANCE = {
  'bits': 0.0,
  'uniform': 0.0,
  'uniform in a range': 1e-6,
  'normal': 1e-5,
  'truncated normal': 1e-5,
}


@functools.cache
def _function(name: str, jit: bool) -> tf.types.experimental.GenericFunction:
  """A draw of as many numbers as its argument has."""

  @tf.function(
    jit_compile=jit, input_signature=[tf.TensorSpec([None], tf.float32)]
  )
  def draw(like):
    return _DRAWS[name](_SEED, tf.shape(like))

  return draw


def _draw(name: str, size: int, jit: bool) -> np.ndarray:
  return _function(name, jit)(tf.zeros([size])).numpy()


@pytest.mark.parametrize('jit', [False, True], ids=['plain', 'xla'])
@pytest.mark.parametrize('name', _DRAWS)
def test_longer_draws_begin_as_shorter_ones(name, jit):
  longest = _draw(name, 259, jit)
  # Each size is compiled anew.
  for size in (1, 6, 31) if jit else (*range(1, 34), 63, 64, 65, 100, 258):
    np.testing.assert_array_equal(_draw(name, size, jit), longest[:size])


@pytest.mark.parametrize('name', _DRAWS)
def test_xla_draws_what_plain_kernels_draw(name):
  plain, compiled = (_draw(name, 1000, jit) for jit in (False, True))
  assert plain.dtype == compiled.dtype
  np.testing.assert_allclose(plain, compiled, rtol=0, atol=_TOLERANCE[name])


@pytest.mark.parametrize('jit', [False, True], ids=['plain', 'xla'])
def test_bits_are_those_of_tensorflow(jit):
  @tf.function(jit_compile=jit, input_signature=[random_bits.SEED_SPEC])
  def draw(seed):
    return random_bits.bits(seed, [2, 3])

  generator = np.random.default_rng(0)
  drawn = generator.integers(-(2**31), 2**31, [50, 2]).astype(np.int32)
  for seed in (*drawn, [0, 0], [-1, -1], _SEED):
    expected = tf.random.stateless_uniform(
      [2, 3], seed, None, None, tf.uint32, alg='philox'
    )
    np.testing.assert_array_equal(draw(tf.constant(seed)), expected)


def test_draws_have_the_shape_of_their_distribution():
  # With 40,000 draws a mean strays by less than 4 standard errors, 0.02 stddev.
  size = [200, 200]
  unit = random_bits.uniform(_SEED, size).numpy()
  assert unit.min() >= 0.0 and unit.max() < 1.0
  assert unit.mean() == pytest.approx(0.5, abs=0.01)
  assert unit.std() == pytest.approx(1 / np.sqrt(12), abs=0.01)

  normal = random_bits.normal(_SEED, size, mean=3.0, stddev=2.0).numpy()
  assert np.isfinite(normal).all()
  assert normal.mean() == pytest.approx(3.0, abs=0.04)
  assert normal.std() == pytest.approx(2.0, abs=0.04)
  assert (abs(normal - 3.0) > 4.0).mean() == pytest.approx(0.0455, abs=0.005)

  cut = random_bits.truncated_normal(_SEED, size, 3.0, 2.0).numpy()
  assert abs(cut - 3.0).max() <= 4.0
  assert cut.mean() == pytest.approx(3.0, abs=0.04)
  # The variance of a standard normal that is cut at two deviations.
  assert cut.std() == pytest.approx(2.0 * np.sqrt(0.7737), abs=0.04)


@pytest.mark.parametrize(
  ('low', 'high', 'dtype', 'below'),
  [
    (0.0, 1.0, tf.float32, 1 - 2**-24),
    (-2.0, 2.0, tf.float32, 2 - 2**-22),
    (1.0, 2.0, tf.float32, 2 - 2**-23),
    (0.0, 1.0, tf.bfloat16, 1 - 2**-8),
  ],
)
def test_the_largest_draw_is_below_the_end(
  monkeypatch, low, high, dtype, below
):
  ones = tf.constant(2**32 - 1, tf.uint32)
  monkeypatch.setattr(
    random_bits, 'bits', lambda _, shape: tf.fill(shape, ones)
  )
  drawn = random_bits.uniform(_SEED, [1], low, high, dtype)
  assert float(drawn[0]) == below


def test_words_make_seeds():
  # Fixed for ever: the results of a run follow from it.
  seed = random_bits.derive(0, 'client', '7')
  assert seed.tolist() == [64796808, 1565643221]
  assert seed.dtype == np.int32


def test_different_words_make_different_seeds():
  words = [
    *((), ('',), ('', ''), (1, 2), ('1', 2), (1, '2'), (12,), ('12',)),
    *(('1', '2'), ("1', '2",), ('1\x1f2',), ("1'\x1f'2",), (2, 1), (1, 2, '')),
  ]
  seeds = {tuple(random_bits.derive(*each)) for each in words}
  assert len(seeds) == len(words)


@pytest.mark.parametrize('word', [1.5, None, b'bytes', ('a',)])
def test_words_are_strings_and_whole_numbers(word):
  with pytest.raises(TypeError, match='integer'):
    random_bits.derive('client', word)


def test_purposes_fold_into_different_seeds():
  purposes = ['local', 'shuffle', *range(50)]
  seeds = {tuple(random_bits.fold_in(_SEED, p).numpy()) for p in purposes}
  assert len(seeds | {tuple(_SEED)}) == len(purposes) + 1
  # Pairs of which the sums are equal stay apart.
  one, two = np.array([5, 0], np.int32), np.array([6, 0], np.int32)
  assert not np.array_equal(
    random_bits.fold_in(one, 2), random_bits.fold_in(two, 1)
  )
