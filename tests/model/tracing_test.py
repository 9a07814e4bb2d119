"""What the graphs of traced functions tell."""

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import random_bits
from tff_partial.model import keras_variables
from tff_partial.model import tracing

_SEED = np.array([1, 2], np.int32)


def test_dependence_is_followed_through_operations():
  with tf.Graph().as_default():
    source = tf.compat.v1.placeholder(tf.float32, [2])
    other = tf.compat.v1.placeholder(tf.float32, [2])
    far = tf.reduce_sum(tf.exp(source) + 1.0)
    depends_on = tracing.depends_on
    assert depends_on([far], [source])
    assert depends_on([other, far], [source])
    assert not depends_on([far], [other])
    assert not depends_on([], [source])
    assert not depends_on([0.5], [source])


@pytest.mark.parametrize(
  'draw',
  [
    lambda: tf.random.normal([2]),
    lambda: tf.random.shuffle([1, 2]),
    lambda: tf.random.truncated_normal([2]),
    lambda: tf.random.categorical([[1.0, 2.0]], 3),
    lambda: tf.random.gamma([2], 1.0),
    lambda: tf.random.poisson([2], 1.0),
    lambda: tf.cond(
      tf.compat.v1.placeholder(tf.bool, []),
      lambda: tf.random.uniform([2]),
      lambda: tf.zeros([2]),
    ),
    lambda: tf.while_loop(
      lambda i: i < 1.0, lambda i: i + tf.random.uniform([]), [0.0]
    ),
  ],
)
def test_hidden_draws_are_found(draw):
  with tf.__internal__.FuncGraph('test').as_default() as graph:
    draw()
  with pytest.raises(
    keras_variables.ModelError, match='draws random numbers from hidden state'
  ):
    tracing.refuse_hidden_draws(graph)


def test_draws_from_a_seed_are_welcome():
  with tf.__internal__.FuncGraph('test').as_default() as graph:
    random_bits.normal(_SEED, [2])
    tf.random.stateless_uniform([2], _SEED)
  tracing.refuse_hidden_draws(graph)


def test_what_is_traced_can_do_without_assertions():
  def halve(number, other):
    tf.debugging.assert_equal(number % 2, 0)
    return number // 2

  spec = tf.TensorSpec([], tf.int32)
  traced = tracing.traced(halve, spec, spec)
  with pytest.raises(tf.errors.InvalidArgumentError):
    traced(tf.constant(7), tf.constant(0))
  bare = tf.function(tracing.without_assertions(traced, num_inputs=1))
  (half,) = bare(tf.constant(7))
  assert half.numpy() == 3
