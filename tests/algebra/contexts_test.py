"""What a client computes of its examples: padding and weights in it."""

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import tiers
from tff_partial.contexts import Batch
from tff_partial.contexts import ClientContext
from tff_partial.contexts import ContextError
from tff_partial.model import keras_models


@pytest.mark.parametrize('capacity', [1, 3])
def test_predictions_for_padding_are_numbers_where_zeros_give_none(capacity):
  def build() -> tf.keras.Model:
    inputs = tf.keras.Input([2])
    unit = tf.keras.layers.Lambda(
      lambda tensor: tensor / tf.norm(tensor, axis=-1, keepdims=True)
    )
    last = tf.keras.layers.Dense(1, name='last')
    return tf.keras.Model(inputs, last(unit(inputs)))

  model = keras_models.from_keras(build, loss='mse')
  weights = {
    tiers.GLOBAL: {
      'last/kernel': tf.constant([[1.0], [2.0]]),
      'last/bias': tf.constant([0.0]),
    }
  }
  rest = [[0, capacity - 1], [0, 0]]
  examples = {
    'x': tf.pad([[3.0, 4.0]], rest),
    'y': tf.pad([[1.0]], rest),
    'weight': tf.pad([1.0], rest[:1]),
  }
  client = ClientContext(
    *(model, weights, weights, {}, examples),
    *(tf.constant(1), tf.constant([0, 0])),
  )
  found = client.predict()
  np.testing.assert_allclose(found, [[0.6 + 2 * 0.8]] * capacity, rtol=1e-6)


@pytest.mark.parametrize(
  ('weight', 'expected'),
  [
    ([2.0, 0.0, 1.0], 1.0),
    # As many steps as examples: each weighs as its steps do on average.
    ([[1.0, 0.0, 2.0], [0.5, 0.5, 0.5], [1.0, 1.0, 1.0]], 3.0),
  ],
)
def test_a_mean_weighs_examples_by_the_mean_of_their_steps(weight, expected):
  is_real = tf.constant([True, True, False])
  batch = Batch(None, None, tf.constant(weight), is_real, None)
  assert batch.mean(tf.constant([1.0, 10.0, 1e9])) == expected
  # They would meet the weights of other examples.
  with pytest.raises(ContextError, match=r'the shape \(3, 1\), not \[batch\]'):
    batch.mean(tf.constant([[1.0], [10.0], [1e9]]))
