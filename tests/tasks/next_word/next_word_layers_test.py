"""Layers of models of the next word, beside Keras's and by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tasks.next_word import layers
from tasks.next_word.tokens import Tokens
from tests.support import planted

# Padding 0, words 1 2 3, buckets 4 5, beginning 6, end 7.
_TOKENS = Tokens(words=3, buckets=2)


def test_tokens_have_rows_of_two_tables():
  rows, buckets, is_bucket = layers.TokenRows(*_TOKENS)(tf.range(8)[None])
  # Words keep their place behind padding; beginning and end come after them.
  assert rows.numpy().tolist() == [[0, 1, 2, 3, 0, 0, 4, 5]]
  assert buckets.numpy().tolist() == [[0, 0, 0, 0, 0, 1, 0, 0]]
  assert is_bucket.numpy()[0].nonzero()[0].tolist() == [4, 5]


@pytest.mark.parametrize('jit', [False, True])
def test_the_lstm_computes_what_keras_computes(jit):
  generator = np.random.default_rng(0)
  inputs = tf.constant(generator.normal(size=(5, 11, 3)), tf.float32)
  keras = tf.keras.layers.LSTM(4, return_sequences=True)
  ours = layers.LoopedLSTM(4)
  first = []
  for layer in (keras, ours):
    layer.build(inputs.shape)
    first.append(layer.get_weights()[2])
  np.testing.assert_array_equal(*first)  # The biases.
  values = [generator.normal(size=w.shape) * 0.5 for w in keras.get_weights()]
  keras.set_weights(values)
  ours.set_weights(values)

  def run(layer):
    with tf.GradientTape() as tape:
      tape.watch(inputs)
      y = layer(inputs)
      loss = tf.reduce_sum(tf.sin(y))
    return y, tape.gradient(loss, [inputs, *layer.trainable_variables])

  found = tf.function(run, jit_compile=jit, autograph=False)(ours)
  planted.assert_close(found, run(keras), 1e-5, relative=1e-7)


@pytest.mark.parametrize(
  'layer', [layers.TokenRows(3, 2), layers.LoopedLSTM(7)]
)
def test_layers_can_be_made_again(layer):
  again = type(layer).from_config(layer.get_config())
  assert again.get_config() == layer.get_config()
