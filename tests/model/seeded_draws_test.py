"""Keras's initializers and random layers draw from seeds."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.model import keras_analysis
from tff_partial.model import keras_functions
from tff_partial.templates import ranking

layers = tf.keras.layers
_SEED = np.array([1, 2], np.int32)
_GENERATOR = np.random.default_rng(0)


def _functions(build) -> keras_functions.Keras2Functions:
  return keras_functions.Keras2Functions(
    build, keras_analysis.analyse(build, None)
  )


# ---- initializers ------------------------------------------------------------


def _analysed(*inner: layers.Layer) -> keras_analysis.KerasSpec:
  configs = [(type(layer), layer.get_config()) for layer in inner]
  return keras_analysis.analyse(
    lambda: tf.keras.Sequential(
      [cls.from_config(config) for cls, config in configs]
    ),
    tf.TensorSpec([60], tf.float32),
  )


@pytest.mark.parametrize(
  'name',
  [
    *('glorot_uniform', 'glorot_normal', 'he_uniform', 'lecun_normal'),
    *('random_uniform', 'random_normal', 'truncated_normal', 'orthogonal'),
  ],
)
def test_an_initializer_draws_from_the_seed_as_keras_would(name):
  spec = _analysed(layers.Dense(80, kernel_initializer=name, use_bias=False))
  (kernel,) = spec.variables
  draw = tf.function(kernel.initialize, autograph=False)
  drawn = draw(tf.constant(_SEED)).numpy()
  np.testing.assert_array_equal(draw(tf.constant(_SEED)), drawn)
  assert (draw(tf.constant(_SEED + 1)).numpy() != drawn).any()
  # Keras's own draw has the same distribution: 4,800 numbers, whose deviation
  # strays by about one in a hundred.
  seeded = {'class_name': name, 'config': {'seed': 0}}
  expected = tf.keras.initializers.get(seeded)([60, 80]).numpy()
  assert drawn.shape == expected.shape
  assert drawn.dtype == expected.dtype
  assert abs(drawn.mean()) < 5 * expected.std() / np.sqrt(4800)
  assert drawn.std() == pytest.approx(expected.std(), rel=0.06)
  assert abs(drawn).max() == pytest.approx(abs(expected).max(), rel=0.3)


def test_a_function_may_be_an_initializer():
  # Keras makes the bias of an LSTM of zeros and ones in such a way.
  spec = keras_analysis.analyse(
    lambda: tf.keras.Sequential([layers.LSTM(2)]), tf.TensorSpec([3, 4])
  )
  (bias,) = (v for v in spec.variables if v.name.endswith('bias'))
  np.testing.assert_array_equal(
    bias.initialize(_SEED), [0, 0, 1, 1, 0, 0, 0, 0]
  )


# ---- random layers -----------------------------------------------------------


@pytest.mark.parametrize(
  'layer',
  [
    layers.Dropout(0.4),
    layers.Dropout(0.4, noise_shape=[None, 1]),
    layers.AlphaDropout(0.4),
    layers.GaussianDropout(0.4),
    layers.GaussianNoise(0.7),
  ],
  ids=lambda layer: layer.name,
)
def test_a_random_layer_draws_from_the_seed_as_keras_would(layer):
  config = layer.get_config()

  def build():
    return tf.keras.Sequential(
      [tf.keras.Input([60]), type(layer).from_config(config)]
    )

  functions = _functions(build)

  @tf.function(autograph=False)
  def run(inputs, seed):
    outputs = [
      functions.call({}, inputs, training=training, seed=seed)[0]
      for training in (True, False)
    ]
    return outputs

  # Keras's own draw follows from no seed. Of 8,000 examples, each of which one
  # layer drops as a whole, the share that is dropped strays by .6 in a hundred.
  inputs = tf.constant(_GENERATOR.normal(1.0, 1.0, [8000, 60]), tf.float32)
  drawn, plain = run(inputs, tf.constant(_SEED))
  np.testing.assert_array_equal(plain, inputs)
  np.testing.assert_array_equal(run(inputs, tf.constant(_SEED))[0], drawn)
  other = run(inputs, tf.constant(_SEED + 1))[0].numpy()
  assert (other != drawn.numpy()).any()
  expected = type(layer).from_config(config)(inputs, training=True).numpy()
  assert drawn.numpy().mean() == pytest.approx(expected.mean(), abs=0.1)
  assert drawn.numpy().std() == pytest.approx(expected.std(), rel=0.1)
  zeros = (drawn.numpy() == 0).mean()
  assert zeros == pytest.approx((expected == 0).mean(), abs=0.05)


def test_negative_items_are_drawn_again_for_each_seed():
  def build():
    item = tf.keras.Input([], dtype=tf.int32)
    return tf.keras.Model(item, ranking.NegativeItems(50, 4)(item))

  functions = _functions(build)

  @tf.function(autograph=False)
  def run(items, seed):
    return functions.call({}, items, training=True, seed=seed)[0]

  items = np.arange(500, dtype=np.int32) % 50
  drawn, other = (run(items, tf.constant(_SEED + i)).numpy() for i in (0, 1))
  np.testing.assert_array_equal(drawn[:, 0], items)
  np.testing.assert_array_equal(run(items, tf.constant(_SEED)), drawn)
  assert (drawn[:, 1:] == other[:, 1:]).mean() == pytest.approx(0.02, abs=0.02)
  # Of 2,000 draws each of 50 items has 40, give or take 6.
  counts = np.bincount(drawn[:, 1:].ravel(), minlength=50)
  assert len(counts) == 50
  assert 12 < counts.min() <= counts.max() < 75


@pytest.mark.slow
@pytest.mark.parametrize(
  'layer',
  [
    layers.SimpleRNN(8, dropout=0.3),
    layers.SimpleRNN(8, recurrent_dropout=0.3, return_sequences=True),
    layers.Bidirectional(layers.SimpleRNN(8, dropout=0.3)),
    layers.RNN(layers.StackedRNNCells([layers.SimpleRNNCell(8, dropout=0.3)])),
  ],
  ids=['inputs', 'states', 'in another layer', 'in a cell'],
)
def test_recurrent_layers_draw_from_the_seed(layer):
  config = layer.get_config()

  def build():
    return tf.keras.Sequential(
      [tf.keras.Input([5, 4]), type(layer).from_config(copy.deepcopy(config))]
    )

  functions = _functions(build)

  def run(inputs, seed):
    tensors = {v.name: v.initialize(_SEED) for v in functions.spec.variables}
    return [
      functions.call(tensors, inputs, training=training, seed=seed)[0]
      for training in (True, False)
    ]

  run = tf.function(run, autograph=False)
  inputs = tf.constant(_GENERATOR.normal(size=[6, 5, 4]), tf.float32)
  drawn, plain = run(inputs, tf.constant(_SEED))
  again, _ = run(inputs, tf.constant(_SEED))
  other, same = run(inputs, tf.constant(_SEED + 1))
  np.testing.assert_array_equal(drawn, again)
  np.testing.assert_array_equal(plain, same)
  assert (drawn.numpy() != other.numpy()).any()
  assert (drawn.numpy() != plain.numpy()).any()
