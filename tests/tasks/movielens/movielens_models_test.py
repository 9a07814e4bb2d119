"""Tests of the matrix factorization model and its metrics."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tasks.movielens import models as movielens_models
from tff_partial import tiers
from tff_partial.model import keras_models
from tff_partial.model import models

_ITEMS = np.array([2, 0, 2, 4], np.int32)


def _build(**options) -> tf.keras.Model:
  return movielens_models.build_matrix_factorization(5, 3, **options)


def _set(model: tf.keras.Model, **values) -> None:
  """Gives layers their values, by the layers' names."""
  for name, value in values.items():
    model.get_layer(name).set_weights([np.asarray(value, np.float32)])


def _shapes(model: tf.keras.Model) -> dict[str, tuple[int, ...]]:
  return {v.name: tuple(v.shape) for v in model.trainable_variables}


# ---- the model ---------------------------------------------------------------


def test_the_papers_model():
  model = movielens_models.build_matrix_factorization(3706)
  assert _shapes(model) == {
    'item_embedding/embeddings:0': (3706, 50),
    'user_embedding/vector:0': (50,),
  }
  assert model.input_shape == (None,)
  assert model.output_shape == (None,)
  assert model.inputs[0].dtype == tf.int32
  assert not model.losses
  for variable in model.variables:
    values = variable.numpy()
    # The lowest value drawn is -0.05 in single precision, a little below -0.05.
    assert np.abs(values).max() <= np.float32(0.05)
    # Uniform values spread by their range over the root of twelve.
    assert values.std() == pytest.approx(0.1 / np.sqrt(12), rel=0.35)


def test_predictions_are_scalar_products():
  model = _build()
  generator = np.random.default_rng(0)
  items = generator.normal(size=[5, 3])
  user = generator.normal(size=[3])
  _set(model, item_embedding=items, user_embedding=user)
  np.testing.assert_allclose(model(_ITEMS), items[_ITEMS] @ user, rtol=1e-5)
  assert model(_ITEMS).dtype == tf.float32
  assert model(_ITEMS[:0]).shape == (0,)


def test_biases_and_mean_are_added():
  model = _build(biases=True, mean=3.5)
  assert _shapes(model) == {
    'item_embedding/embeddings:0': (5, 3),
    'user_embedding/vector:0': (3,),
    'item_bias/embeddings:0': (5, 1),
    'user_bias/bias:0': (),
  }
  assert not model.get_layer('item_bias').get_weights()[0].any()
  assert not model.get_layer('user_bias').get_weights()[0].any()
  biases = [[0.1], [0.2], [0.3], [0.4], [0.5]]
  _set(model, item_embedding=np.zeros([5, 3]), item_bias=biases, user_bias=-1.0)
  np.testing.assert_allclose(model(_ITEMS), [2.8, 2.6, 2.8, 3.0], rtol=1e-6)


def test_a_client_moves_only_the_items_it_has():
  model = _build(biases=True, l2=0.1)
  _set(model, user_embedding=np.ones(3))
  with tf.GradientTape() as tape:
    loss = tf.reduce_sum(model(_ITEMS) ** 2) + tf.add_n(model.losses)
  gradients = tape.gradient(loss, model.trainable_variables)
  pairs = zip(model.trainable_variables, gradients, strict=True)
  for variable, gradient in pairs:
    if variable.name.startswith('item_'):
      assert isinstance(gradient, tf.IndexedSlices)
      moved = tf.convert_to_tensor(gradient).numpy().any(axis=1)
      np.testing.assert_array_equal(moved, [True, False, True, False, True])


def test_penalties_are_sums_of_squares():
  user = [1.0, -2.0, 3.0]
  model = _build(l2=0.5)
  _set(model, user_embedding=user, item_embedding=np.ones([5, 3]))
  assert sum(model.losses).numpy() == pytest.approx(0.5 * 14)

  model = _build(l2=0.5, biases=True)
  _set(model, user_embedding=user, item_embedding=np.ones([5, 3]))
  _set(model, user_bias=4.0, item_bias=np.full([5, 1], 2.0))
  expected = 0.5 * (14 + 16)
  assert sum(model.losses).numpy() == pytest.approx(expected)

  # Of a table, the mean over the users.
  model = _build(l2=0.5, biases=True, num_users=2)
  _set(model, user_embedding=[user, [2, 0, 0]], user_bias=[[4], [1]])
  expected = 0.5 * ((14 + 16) + (4 + 1)) / 2
  assert sum(model.losses).numpy() == pytest.approx(expected)


def test_models_can_be_saved(tmp_path):
  model = _build(biases=True, mean=3.5, l2=0.1)
  path = tmp_path / 'model.keras'
  model.save(path)
  loaded = tf.keras.models.load_model(path)
  np.testing.assert_array_equal(loaded(_ITEMS), model(_ITEMS))
  assert len(loaded.losses) == 2
  config = loaded.get_layer('user_embedding').get_config()
  assert config['initializer']['config']['maxval'] == 0.05


# ---- as a partially local model ----------------------------------------------


def _partial(**options) -> models.PartialModel:
  return keras_models.from_keras(
    functools.partial(_build, biases=True, mean=3.0, **options),
    local=movielens_models.LOCAL_LAYERS,
    loss=tf.keras.losses.MeanSquaredError(),
    metrics=functools.partial(movielens_models.build_metrics, (1.0, 5.0)),
  )


def test_the_user_stays_local():
  model = _partial()
  assert {
    tier: {name: tuple(spec.shape) for name, spec in model.specs(tier).items()}
    for tier in model.tiers
  } == {
    tiers.GLOBAL: {
      'item_embedding/embeddings': (5, 3),
      'item_bias/embeddings': (5, 1),
    },
    tiers.LOCAL: {'user_embedding/vector': (3,), 'user_bias/bias': ()},
  }


@pytest.mark.slow
def test_padding_changes_neither_loss_nor_metrics():
  model = _partial(l2=0.1)
  labels = np.array([1.0, 5.0, 3.0, 4.0], np.float32)
  seed = np.array([1, 2], np.int32)
  weights = {tier: model.initial_weights(tier, seed) for tier in model.tiers}

  def measure(num_real: int, num_padded: int):
    order = [*range(num_real), *[0] * num_padded]
    is_real = np.arange(len(order)) < num_real

    @tf.function
    def run(weights, items, rated, weight, is_real):
      predictions, penalties = model.predict(
        weights, {}, items, training=True, seed=seed
      )
      loss = model.loss(rated, predictions, weight, is_real, penalties)
      state = model.metrics.update(
        model.metrics.initial_state(),
        rated,
        predictions,
        tf.cast(is_real, tf.float32) * weight,
      )
      return loss.objective, state

    return run(
      weights,
      tf.constant(_ITEMS[order]),
      tf.constant(labels[order]),
      tf.ones([len(order)]),
      tf.constant(is_real),
    )

  plain, padded = measure(3, 0), measure(3, 2)
  tf.nest.map_structure(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, padded
  )
  assert plain[1]['accuracy'][1].numpy() == 3.0


# ---- metrics -----------------------------------------------------------------

_RATED = np.array([1.0, 3.0, 5.0, 2.0], np.float32)
_PREDICTED = np.array([0.5, 3.51, 6.0, 2.4], np.float32)


def _measure(scale=None, weight=None, rated=_RATED, predicted=_PREDICTED):
  metrics = movielens_models.build_metrics(scale)
  for metric in metrics:
    metric.update_state(rated, predicted, sample_weight=weight)
  return {metric.name: float(metric.result()) for metric in metrics}


@pytest.mark.parametrize(
  ('scale', 'errors', 'accuracy'),
  [
    # Off by less than a half, the first and the last are close enough.
    (None, [0.5, 0.51, 1.0, 0.4], 0.5),
    # Clipped, the predictions are 1, 3.51, 5 and 2.4.
    ((1.0, 5.0), [0.0, 0.51, 0.0, 0.4], 0.75),
  ],
)
def test_metrics_by_hand(scale, errors, accuracy):
  result = _measure(scale)
  assert result['accuracy'] == accuracy
  expected = np.sqrt(np.mean(np.square(errors)))
  assert result['rmse'] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize('scale', [None, (1.0, 5.0)])
def test_examples_of_no_weight_are_not_measured(scale):
  weight = np.array([1.0, 0.0, 1.0, 0.0], np.float32)
  chosen = [0, 2]
  assert _measure(scale, weight) == pytest.approx(
    _measure(scale, None, _RATED[chosen], _PREDICTED[chosen])
  )
  assert _measure(scale, 2.0 * weight) == pytest.approx(_measure(scale, weight))
  assert _measure(scale, 3.0) == pytest.approx(_measure(scale))


def test_metrics_can_be_rebuilt():
  for metric in movielens_models.build_metrics((0.5, 5.0)):
    again = type(metric).from_config(metric.get_config())
    assert again.get_config() == metric.get_config()
    assert again.scale == (0.5, 5.0)
