"""Updates of few bits: their levels, their mean, and what they weigh."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.errors import SettingError
from tff_partial.exchange import quantization
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_SEED = tf.constant([1, 2], tf.int32)
_CLIENTS = planted.rate({'one': 5, 'other': 9, 'third': 7})


def test_numbers_become_levels_between_the_least_and_the_largest():
  """Two bits are four levels: 0, 1, 2 and 3 for numbers from 0 to 3."""
  update = {'matrix': tf.linspace(0.0, 3.0, 101)}
  two_bits = quantization.Quantization(bits=2)
  rounded = two_bits(update, _SEED)['matrix'].numpy()
  assert set(rounded.tolist()) == {0.0, 1.0, 2.0, 3.0}
  # Each number becomes one of the two levels beside it.
  assert (abs(rounded - update['matrix'].numpy()) < 1.0).all()
  assert (two_bits(update, _SEED)['matrix'].numpy() == rounded).all()
  other = two_bits(update, _SEED + 1)['matrix'].numpy()
  assert (other != rounded).any()


def test_the_expectation_stays():
  """A quarter between two levels is rounded up once in four times."""
  numbers = np.full(40_002, 0.25, np.float32)
  numbers[:2] = 0.0, 1.0
  one_bit = quantization.Quantization(bits=1)
  rounded = one_bit({'table': tf.constant(numbers)}, _SEED)['table'].numpy()
  assert set(rounded.tolist()) == {0.0, 1.0}
  # Strays by .0022.
  assert rounded[2:].mean() == pytest.approx(0.25, abs=0.012)


def test_equal_numbers_and_small_tensors_stay_as_they_are():
  update = {'equal': tf.fill([200], 0.3), 'small': tf.constant([0.1, 0.7])}
  rounded = quantization.Quantization(bits=1)(update, _SEED)
  for name, tensor in update.items():
    np.testing.assert_array_equal(rounded[name], tensor)


def test_bytes_are_counted():
  three_bits = quantization.Quantization(bits=3, smallest=100)
  # 1,001 numbers of 3 bits, rounded up to bytes, and two bounds.
  large, small = (
    tff.TensorType(np.float32, shape) for shape in ([7, 143], [99])
  )
  assert three_bits.num_bytes(large) == 376 + 8
  assert three_bits.num_bytes(small) == 99 * 4


@pytest.mark.parametrize('bits', [0, 17])
def test_impossible_bits_are_refused(bits):
  with pytest.raises(SettingError, match=f'a number of {bits} bits is not'):
    quantization.Quantization(bits)


@pytest.mark.slow
def test_a_round_of_few_bits_is_near_one_of_all():
  """The mean over clients strays by less than one step of each."""
  moved = {}
  for bits in (None, 8):
    process = algorithms.build_fed_avg(
      planted.factorization(local=None),
      training=Phase(optimizer=sgd(0.1), epochs=3),
      postprocess_update=bits and quantization.Quantization(bits, smallest=1),
    )
    cohort = planted.cohort_of(process, _CLIENTS, 'seed')
    state = process.initialize()
    before = planted.global_weights(process, state)
    with runtimes.cohort(jit=False):
      output = planted.run(
        process, cohort, state, planted.first_states(process, cohort)
      )
    after = planted.global_weights(process, output.state)
    moved[bits] = {name: after[name] - before[name] for name in before}
  for name, exact in moved[None].items():
    spread = abs(exact).max() * 4 / 255
    assert abs(exact - moved[8][name]).max() < spread
    assert (exact != moved[8][name]).any()
