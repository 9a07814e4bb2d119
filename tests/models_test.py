"""Keras models as pure functions over named weights in three tiers."""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import keras_functions
from tff_partial import models
from tff_partial import tiers

layers = tf.keras.layers
_SEED = np.array([5, 6], np.int32)
_BATCH = 6
_MSE = tf.keras.losses.MeanSquaredError()


# ---- one model of each kind --------------------------------------------------


def _functional() -> tf.keras.Model:
  inputs = tf.keras.Input([4])
  hidden = layers.Dense(3, 'tanh', kernel_regularizer='l2')(inputs)
  outputs = layers.Dense(2, name='head', bias_regularizer='l1')(hidden)
  return tf.keras.Model(inputs, outputs)


def _sequential() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'relu'),
      layers.Dropout(0.5),
      layers.Dense(2, name='head'),
    ]
  )


def _without_inputs() -> tf.keras.Model:
  """Has variables only once it was called, and an optimizer before that."""
  model = tf.keras.Sequential(
    [layers.Dense(3, 'relu'), layers.Dense(2, name='head')]
  )
  model.compile('adam', 'mse', metrics=['mae'])
  return model


class _Subclassed(tf.keras.Model):
  """Creates variables in three ways, and not in the order of their use."""

  def __init__(self):
    super().__init__()
    self.scale = tf.Variable([1.0, 2.0, 3.0], name='scale')
    self.head = layers.Dense(2, name='head')
    self.body = layers.Dense(3, 'tanh')

  def build(self, _):
    self.shift = self.add_weight('shift', [3], initializer='random_normal')
    self.built = True

  def call(self, inputs):
    self.add_loss(0.1 * tf.reduce_sum(self.scale**2))
    return self.head(self.body(inputs) * self.scale + self.shift)


def _nested() -> tf.keras.Model:
  inner = tf.keras.Sequential(
    [layers.Dense(3, 'tanh', kernel_regularizer='l2'), layers.Dense(3)],
    name='inner',
  )
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, layers.Dense(2, name='head')(inner(inputs)))


def _two_inputs(as_dict: bool) -> tf.keras.Model:
  word = tf.keras.Input([2], name='word', dtype=tf.int32)
  traits = tf.keras.Input([4], name='traits')
  embedded = layers.Flatten()(layers.Embedding(7, 3, name='words')(word))
  outputs = layers.Dense(2, name='head')(
    layers.Concatenate()([embedded, traits])
  )
  # Not in alphabetical order.
  inputs = {'word': word, 'traits': traits} if as_dict else [word, traits]
  return tf.keras.Model(inputs, outputs)


def _sequences() -> tf.keras.Model:
  """Predicts the next word at each place, and nothing where there is none."""
  return tf.keras.Sequential(
    [
      tf.keras.Input([5], dtype=tf.int32),
      layers.Embedding(11, 4, mask_zero=True, name='words'),
      layers.LSTM(3, return_sequences=True, dropout=0.2),
      layers.Dense(11, name='head'),
    ]
  )


def _image() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4, 4, 1]),
      layers.Conv2D(4, 3),
      layers.GroupNormalization(2),
      layers.Flatten(),
      layers.Dense(2, name='head'),
    ]
  )


def _frozen() -> tf.keras.Model:
  """Some of its layers are never trained, a batch normalization among them."""
  model = tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'tanh', name='body'),
      layers.BatchNormalization(trainable=False, name='norm'),
      layers.Dense(3, name='middle'),
      layers.Dense(2, name='head'),
    ]
  )
  model.get_layer('body').trainable = False
  return model


class _Transposed(layers.Layer):
  """Reads an embedding backward: scores of all words."""

  def __init__(self, embedding):
    super().__init__()
    self.embedding = embedding

  def call(self, inputs):
    return tf.matmul(inputs, self.embedding.embeddings, transpose_b=True)


def _tied() -> tf.keras.Model:
  """One layer is called twice, and one variable is used by two layers."""
  word = tf.keras.Input([], dtype=tf.int32)
  embedding = layers.Embedding(7, 3, name='words')
  twice = layers.Dense(3, 'tanh', name='twice')
  hidden = twice(twice(embedding(word)))
  return tf.keras.Model(word, _Transposed(embedding)(hidden))


def _mixed() -> tf.keras.Model:
  """Weights of two types."""
  return tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, 'tanh', dtype='float64', kernel_regularizer='l2'),
      layers.Dense(2, name='head'),
    ]
  )


class _Scale(layers.Layer):
  """A layer with a variable that is a single number."""

  def build(self, _):
    self.factor = self.add_weight('factor', [], initializer='ones')

  def call(self, inputs):
    return self.factor * tf.reduce_sum(inputs, -1)


def _scalar() -> tf.keras.Model:
  """A prediction is a number, without an axis for itself."""
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, _Scale(name='head')(layers.Dense(3)(inputs)))


def _two_outputs() -> tf.keras.Model:
  inputs = tf.keras.Input([4])
  return tf.keras.Model(
    inputs,
    {
      'head': layers.Dense(2, name='head')(inputs),
      'b': layers.Dense(1)(inputs),
    },
  )


def _loss_of_two(labels, predictions):
  one = tf.reduce_sum((labels - predictions['head']) ** 2, -1)
  return one + tf.abs(predictions['b'][:, 0])


@dataclasses.dataclass(frozen=True)
class Kind:
  """A Keras model and what to give it.

  Attributes:
    build: Makes the model.
    inputs: A batch of inputs.
    labels: A batch of labels.
    loss: The loss.
    options: Further arguments of `from_keras`.
  """

  build: Callable[[], tf.keras.Model]
  inputs: Any
  labels: np.ndarray
  loss: Any = _MSE
  options: dict[str, Any] = dataclasses.field(default_factory=dict)


def _numbers(*shape: int) -> np.ndarray:
  return np.random.default_rng(0).normal(size=[_BATCH, *shape]).astype('f')


def _words(size: int, *shape: int) -> np.ndarray:
  drawn = np.random.default_rng(1).integers(1, size, [_BATCH, *shape])
  return drawn.astype(np.int32)


# Sentences of different lengths: what follows is no word.
_SENTENCES = _words(11, 5) * (np.arange(5) < np.array([[5, 3, 4, 1, 2, 5]]).T)
_SPARSE = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_VECTOR = {'inputs': tf.TensorSpec([4])}

KINDS = {
  'functional': Kind(_functional, _numbers(4), _numbers(2)),
  'sequential': Kind(_sequential, _numbers(4), _numbers(2)),
  'without inputs': Kind(
    _without_inputs, _numbers(4), _numbers(2), options=_VECTOR
  ),
  'subclassed': Kind(_Subclassed, _numbers(4), _numbers(2), options=_VECTOR),
  'nested': Kind(_nested, _numbers(4), _numbers(2)),
  'dict of inputs': Kind(
    lambda: _two_inputs(as_dict=True),
    {'traits': _numbers(4), 'word': _words(7, 2)},
    _numbers(2),
  ),
  'list of inputs': Kind(
    lambda: _two_inputs(as_dict=False),
    {'traits': _numbers(4), 'word': _words(7, 2)},
    _numbers(2),
  ),
  'sequences': Kind(_sequences, _SENTENCES, _SENTENCES[:, ::-1], _SPARSE),
  'image': Kind(_image, _numbers(4, 4, 1), _words(2), _SPARSE),
  'frozen': Kind(_frozen, _numbers(4), _numbers(2)),
  'tied': Kind(
    _tied, _words(7), _words(7), _SPARSE, options={'local': 'twice'}
  ),
  'mixed types': Kind(_mixed, _numbers(4), _numbers(2)),
  'scalar': Kind(_scalar, _numbers(4), _numbers()),
  'sum': Kind(
    _functional,
    _numbers(4),
    _numbers(2),
    tf.keras.losses.Huber(reduction='sum'),
  ),
  'function': Kind(
    _functional, _numbers(4), _numbers(2), tf.keras.losses.log_cosh
  ),
  'two outputs': Kind(
    _two_outputs,
    _numbers(4),
    _numbers(2),
    _loss_of_two,
    options={'labels': tf.TensorSpec([2])},
  ),
}


@dataclasses.dataclass(frozen=True)
class Made:
  """A Keras model with weights of its own, and the same as a `PartialModel`."""

  kind: Kind
  keras: tf.keras.Model
  partial: models.PartialModel
  weights: tiers.Weights


@pytest.fixture(scope='module', name='made', params=KINDS)
def fixture_made(request) -> Made:
  kind = KINDS[request.param]
  keras = kind.build()
  keras(kind.inputs)
  generator = np.random.default_rng(2)
  keras.set_weights(
    [generator.uniform(0.2, 1.0, w.shape) for w in keras.get_weights()]
  )
  partial = models.from_keras(
    kind.build,
    **{
      'local': 'head',
      'loss': kind.loss,
      'initial_weights': keras,
      **kind.options,
    },
  )
  weights = tiers.join(
    {tier: partial.initial_weights(tier, _SEED) for tier in partial.tiers}
  )
  return Made(kind, keras, partial, weights)


def _predict(
  model: models.PartialModel,
  weights: tiers.Weights,
  inputs: Any,
  training: bool = False,
  seed: np.ndarray = _SEED,
) -> Any:
  @tf.function
  def predict(weights, inputs, seed):
    return model.predict(
      weights, model.frozen_weights(), inputs, training=training, seed=seed
    )

  return predict(weights, inputs, tf.constant(seed))[0]


def test_predictions_are_those_of_keras(made):
  found = _predict(made.partial, made.weights, made.kind.inputs)
  tf.nest.map_structure(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found,
    made.keras(made.kind.inputs),
  )


def test_what_becomes_a_keras_model_predicts_the_same(made):
  back = made.partial.to_keras(*made.weights.values())
  assert back is not made.keras
  tf.nest.map_structure(
    np.testing.assert_array_equal,
    back(made.kind.inputs),
    made.keras(made.kind.inputs),
  )
  assert [v.shape for v in back.trainable_variables] == [
    v.shape for v in made.keras.trainable_variables
  ]


def _objective(
  made: Made, rows: np.ndarray, is_real: np.ndarray
) -> tuple[models.LossValue, dict[str, tf.Tensor]]:
  """The loss of some rows of the batch, and its gradients."""
  model = made.partial
  weight = np.linspace(0.5, 1.5, _BATCH, dtype=np.float32)

  @tf.function
  def compute(weights, inputs, labels, weight, is_real):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(weights)
      predictions, regularization = model.predict(
        weights, model.frozen_weights(), inputs, training=False, seed=_SEED
      )
      loss = model.loss(labels, predictions, weight, is_real, regularization)
    gradients = tape.gradient(loss.objective, weights)
    return (
      (loss.objective, loss.total, loss.num_elements),
      tf.nest.map_structure(tf.convert_to_tensor, gradients),
    )

  loss, gradients = compute(
    made.weights,
    tf.nest.map_structure(lambda array: array[rows], made.kind.inputs),
    made.kind.labels[rows],
    weight[rows],
    is_real,
  )
  named: dict[str, tf.Tensor] = {}
  for each in gradients.values():
    named.update(each)
  return models.LossValue(*loss), named


def test_losses_and_gradients_are_those_of_keras(made):
  rows = np.arange(_BATCH)
  loss, gradients = _objective(made, rows, np.ones(_BATCH, bool))
  weight = np.linspace(0.5, 1.5, _BATCH, dtype=np.float32)
  with tf.GradientTape() as tape:
    predictions = made.keras(made.kind.inputs)
    if isinstance(made.kind.loss, tf.keras.losses.Loss):
      expected = made.kind.loss(made.kind.labels, predictions, weight)
    else:
      losses = made.kind.loss(made.kind.labels, predictions)
      expected = tf.reduce_mean(losses * weight)
    for term in made.keras.losses:
      expected += tf.cast(term, tf.float32)
  wanted = tape.gradient(expected, made.keras.trainable_variables)
  np.testing.assert_allclose(loss.objective, expected, rtol=1e-5)
  names = [
    v.name
    for v in sorted(made.partial.variables, key=lambda v: v.position)
    if v.trainable
  ]
  assert len(names) == len(wanted)
  for name, gradient in zip(names, wanted, strict=True):
    np.testing.assert_allclose(
      gradients[name], tf.convert_to_tensor(gradient), rtol=1e-3, atol=1e-5
    )


def test_padding_is_in_no_loss_and_no_gradient(made):
  real, _ = _objective(made, np.array([0, 1, 2]), np.ones(3, bool))
  padded, gradients = _objective(
    made, np.array([0, 1, 2, 0, 0]), np.arange(5) < 3
  )
  np.testing.assert_allclose(padded.objective, real.objective, rtol=1e-6)
  np.testing.assert_allclose(padded.total, real.total, rtol=1e-6)
  np.testing.assert_allclose(padded.num_elements, real.num_elements)
  # Nor does it matter what padding consists of.
  _, others = _objective(made, np.array([0, 1, 2, 5, 4]), np.arange(5) < 3)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(gradient, others[name], rtol=1e-6, atol=1e-7)


def test_the_part_that_is_named_is_local(made):
  local = made.kind.options.get('local', 'head')
  names = {v.name for v in made.partial.trainable(tiers.LOCAL)}
  assert names == {
    v.name for v in made.partial.variables if local in v.layers and v.trainable
  }
  assert names
  assert made.partial.tiers == (tiers.GLOBAL, tiers.LOCAL)
  for tier in made.partial.tiers:
    specs = made.partial.specs(tier)
    assert list(specs) == list(made.weights[tier])
    for name, spec in specs.items():
      assert spec.is_compatible_with(made.weights[tier][name])
