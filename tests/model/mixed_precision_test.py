"""Keras's policies of half precision: layers compute in it, weights do not."""

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
from tff_partial import algorithms
from tff_partial import Exact
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.model import keras_models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

keras = tf.keras
L2 = keras.regularizers.L2(0.5)


@pytest.fixture(params=['bfloat16', 'float16'], autouse=True)
def half(request: pytest.FixtureRequest) -> Iterator[str]:
  keras.mixed_precision.set_global_policy(f'mixed_{request.param}')
  yield request.param
  keras.mixed_precision.set_global_policy('float32')


def _dense() -> tf.keras.Model:
  x = keras.Input([4])
  hidden = keras.layers.Dense(3, 'tanh', kernel_regularizer=L2, name='hidden')
  return keras.Model(x, keras.layers.Dense(1, name='head')(hidden(x)))


def _cnn() -> tf.keras.Model:
  x = keras.Input([5, 5, 1])
  hidden = keras.layers.Conv2D(3, 3, name='conv')(x)
  hidden = keras.layers.BatchNormalization(momentum=0.5, name='norm')(hidden)
  head = keras.layers.Dense(1, name='head')
  return keras.Model(x, head(keras.layers.Flatten()(hidden)))


def _words() -> tf.keras.Model:
  x = keras.Input([6], dtype=tf.int32)
  vectors = keras.layers.Embedding(9, 4, mask_zero=True, name='words')(x)
  found = keras.layers.MultiHeadAttention(2, 4)(vectors, vectors)
  found = keras.layers.LayerNormalization()(found)
  found = keras.layers.LSTM(3)(found)
  return keras.Model(x, keras.layers.Dense(1, name='head')(found))


def _numbers(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


WORDS = np.random.default_rng(0).integers(0, 9, [8, 6]).astype(np.int32)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'state', 'x'),
  [
    (_dense, None, _numbers(8, 4)),
    (_cnn, 'averaged', _numbers(8, 5, 5, 1)),
    (_words, None, WORDS),
  ],
)
def test_a_step_is_that_of_keras(half, build, state, x):
  """Also where the policy is another one when clients train."""
  model = keras_models.from_keras(build, loss='mse', state=state)
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(0.1), batch_size=None)
  )
  y = _numbers(8, 1)
  before = planted.global_weights(process, process.initialize())
  theirs = model.to_keras(process.get_model_weights(process.initialize()))
  assert theirs.get_layer('head').compute_dtype == half
  optimizer = keras.mixed_precision.LossScaleOptimizer(
    keras.optimizers.SGD(0.1), dynamic=False, initial_scale=1024.0
  )
  theirs.compile(optimizer, 'mse', jit_compile=False)
  theirs.fit(x, y, batch_size=8, verbose=0)

  keras.mixed_precision.set_global_policy('float32')
  output = planted.run(
    process, planted.cohort_of(process, {'one': {'x': x, 'y': y}})
  )
  after = planted.global_weights(process, output.state)
  ours = model.to_keras(process.get_model_weights(output.state))
  assert ours.get_layer('head').compute_dtype == half
  for mine, wanted in zip(ours.variables, theirs.variables, strict=True):
    # Keras rounds the loss and what flows back from it to bfloat16 as well.
    np.testing.assert_allclose(mine, wanted, rtol=0.02, atol=0.005)
  assert all(value.dtype == np.float32 for value in after.values())
  assert any(np.any(after[name] != before[name]) for name in after)


def test_predictions_are_those_of_keras_in_float32():
  model = keras_models.from_keras(_dense, local='head', loss='mse')
  assert model.prediction_spec.dtype == tf.float32
  weights = {
    tiers.GLOBAL: {
      'hidden/kernel': _numbers(4, 3),
      'hidden/bias': np.zeros(3, np.float32),
    },
    tiers.LOCAL: {
      'head/kernel': _numbers(3, 1),
      'head/bias': np.zeros(1, np.float32),
    },
  }
  tensors = tf.nest.map_structure(tf.constant, weights)
  x = _numbers(5, 4)
  found, (loss,) = model.predict(tensors, {}, x, training=False, seed=[0, 0])
  theirs = model.to_keras({**weights[tiers.GLOBAL], **weights[tiers.LOCAL]})
  wanted = tf.cast(theirs(x), tf.float32)  # Graphs fuse some roundings away.
  np.testing.assert_allclose(found, wanted, rtol=0.01)
  # Regularizers see weights of float32.
  np.testing.assert_allclose(
    loss, 0.5 * np.sum(np.square(_numbers(4, 3))), rtol=1e-6
  )


def test_small_gradients_do_not_vanish():
  """Two examples with x = 1 and labels -2e-8, from a weight of 0.

  The loss, a mean of products of predictions and labels, has the gradient
  -2e-8, of which half, that of one example, is zero in float16.
  """

  def build() -> tf.keras.Model:
    x = keras.Input([1])
    head = keras.layers.Dense(1, use_bias=False, kernel_initializer='zeros')
    return keras.Model(x, head(x))

  model = keras_models.from_keras(
    build, loss=lambda y, found: (y * found)[:, 0]
  )
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(1.0), batch_size=None)
  )
  examples = {
    'x': np.ones([2, 1], np.float32),
    'y': np.full([2, 1], -2e-8, np.float32),
  }
  output = planted.run(process, planted.cohort_of(process, {'one': examples}))
  (kernel,) = planted.global_weights(process, output.state).values()
  np.testing.assert_allclose(kernel, [[2e-8]], rtol=0.01)


@pytest.mark.slow
def test_exact_solves_see_gradients_of_the_loss_itself():
  """A ridge that gradients 1,024 times as large would outweigh."""

  def build() -> tf.keras.Model:
    x = keras.Input([1])
    shared = keras.layers.Dense(1, kernel_initializer='ones', name='shared')
    own = keras.layers.Dense(1, use_bias=False, name='own')
    return keras.Model(x, own(shared(x)))

  model = keras_models.from_keras(build, local='own', loss='mse')
  measuring = algorithms.build_fed_recon_eval(
    model, personalise=Phase(optimizer=Exact(ridge=5.0)), split=splits.same()
  )
  x = np.array([[1.0], [2.0]], np.float32)
  (client,) = planted.cohort_of(measuring, {'a': {'x': x, 'y': x}})
  first = model.initial_weights(tiers.GLOBAL, [0, 0])
  found = measuring.personalise(planted.as_model_weights(first), {}, client)
  # Of squares that sum up to 5, beside a ridge of 5.
  np.testing.assert_allclose(found['own/kernel'], [[0.5]], rtol=0.01)
