"""Losses and metrics: Keras's numbers, by hand, and refusals."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.support import kinds
from tests.support.stacks import dense
from tests.support.stacks import stack
from tff_partial.model import keras_models
from tff_partial.model import losses
from tff_partial.model import models

layers = tf.keras.layers
_MSE = tf.keras.losses.MeanSquaredError()
_SPARSE = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_BATCH = 6


class _AsItIs(layers.Layer):
  """Predicts its inputs."""

  def build(self, shape):
    self.zero = self.add_weight('zero', initializer='zeros')

  def call(self, inputs):
    return inputs + self.zero


def _as_it_is(shape):
  inputs = tf.keras.Input(shape)
  return tf.keras.Model(inputs, _AsItIs()(inputs))


@pytest.mark.parametrize(
  'loss',
  [
    'cosine_similarity',
    *(pytest.param(it, marks=pytest.mark.slow) for it in ('mae', 'mse', _MSE)),
  ],
)
@pytest.mark.parametrize(
  ('label', 'prediction'),
  [([], [1]), ([3], [3, 1]), ([3, 1], [3]), ([3, 1], [3, 1])],
)
def test_ranks_of_labels_are_those_of_keras(label, prediction, loss):
  # As many examples as steps: what broadcasts would not fail.
  random = np.random.default_rng(0)
  y = random.uniform(size=[3, *label]).astype(np.float32)
  x = random.uniform(size=[3, *prediction]).astype(np.float32)
  weight = np.array([1.0, 0.5, 2.0], np.float32)
  metric = 'mae' if loss is _MSE else loss
  model = keras_models.from_keras(
    lambda: _as_it_is(prediction),
    loss=loss,
    metrics=[metric],
    labels=tf.TensorSpec(label, tf.float32),
  )
  value = model.loss(
    tf.constant(y), tf.constant(x), tf.constant(weight), tf.fill([3], True)
  )
  state = model.metrics.update(
    model.metrics.initial_state(),
    tf.constant(y),
    tf.constant(x),
    tf.constant(weight),
  )
  keras = _as_it_is(prediction)
  keras.compile(loss=loss, weighted_metrics=[metric])
  expected = keras.evaluate(x, y, sample_weight=weight, verbose=0)
  np.testing.assert_allclose(value.objective, expected[0], rtol=1e-5)
  found = model.metrics.finalizers()[metric](state[metric])
  np.testing.assert_allclose(found, expected[1], rtol=1e-5)


def test_perfect_predictions_have_no_loss_whatever_their_ranks():
  y = tf.random.stateless_normal([4, 4], [0, 1])
  for weights, shape in (([], [4]), ([4], [4, 4])):
    model = keras_models.from_keras(
      lambda: _as_it_is([4, 1]),
      loss='mse',
      metrics=['mae'],
      labels=tf.TensorSpec([4]),
      weights=tf.TensorSpec(weights),
    )
    value = model.loss(y, y[..., None], tf.ones(shape), tf.fill([4], True))
    assert value.total == 0
    assert value.num_elements == np.prod(shape)
    state = model.metrics.update(
      model.metrics.initial_state(), y, y[..., None], tf.ones(shape)
    )
    assert state['mae'][0] == 0


def _square(labels, predictions):
  return tf.reduce_mean((labels - predictions) ** 2, -1)


@pytest.mark.parametrize(
  ('label', 'prediction', 'options', 'message'),
  [
    ([], [1], {'loss': _square}, 'Sub broadcasts'),
    ([1], [1, 3], {'loss': 'mse'}, 'SquaredDifference broadcasts'),
    ([3], [3, 1], {'loss': _square}, 'equal, but are batch and 3'),
    ([3], [3, 2], {'loss': 'mse'}, 'cannot be computed from labels'),
    ([3], [3, 1], {'loss': 'mse', 'metrics': [_square]}, None),
  ],
)
def test_labels_that_would_meet_other_examples_are_refused(
  label, prediction, options, message
):
  def make():
    return keras_models.from_keras(
      lambda: _as_it_is(prediction), labels=tf.TensorSpec(label), **options
    )

  if message is None:
    make()  # Keras gives functions among metrics the same ranks.
    return
  with pytest.raises(models.ModelError, match=message):
    make()


def _loss_of(model: models.PartialModel, **given) -> losses.LossValue:
  return model.loss(
    **{
      'labels': tf.constant([[0.0], [0.0], [0.0]]),
      'predictions': tf.constant([[1.0], [2.0], [5.0]]),
      'weight': tf.constant([1.0, 0.5, 7.0]),
      'is_real': tf.constant([True, True, False]),
      **given,
    }
  )


@pytest.mark.parametrize(
  ('reduction', 'objective'), [('auto', 1.5), ('none', 1.5), ('sum', 3.0)]
)
def test_a_loss_by_hand(reduction, objective):
  # Losses are 1, 4 and 25; 1 and 4 * 0.5 count. Keras divides by the number of
  # examples, whatever they weigh.
  loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
  value = _loss_of(keras_models.from_keras(kinds.one, loss=loss, local='a'))
  assert value.objective.numpy() == objective
  assert value.total.numpy() == 3.0
  assert value.num_elements.numpy() == 2.0


def test_a_mean_over_weights_of_keras_3_is_refused():
  loss = type('Loss', (), {'reduction': 'mean_with_sample_weight'})
  loss.__call__ = lambda self, y, p: tf.square(y - p)
  with pytest.raises(models.ModelError, match='divides by weights'):
    losses.as_loss(loss())


def test_the_loss_of_a_phase_is_checked_and_may_be_named():
  model = keras_models.from_keras(kinds.one, loss=_MSE, local='a')
  assert _loss_of(model, of='mae').objective.numpy() == 1.0
  with pytest.raises(models.ModelError, match='is a class; pass an instance'):
    model.check_loss(tf.keras.losses.MeanAbsoluteError)


def test_regularization_is_added_once_whatever_the_batch():
  model = keras_models.from_keras(kinds.one, loss=_MSE, local='a')
  terms = [tf.constant(0.25), tf.constant([0.5, 0.5], tf.float64)]
  value = _loss_of(model, regularization=terms)
  assert value.objective.numpy() == 1.5 + 1.25
  assert value.total.numpy() == 3.0


def test_a_batch_of_padding_has_no_loss():
  model = keras_models.from_keras(kinds.one, loss=_MSE, local='a')
  value = _loss_of(model, is_real=tf.constant([False] * 3))
  assert value.objective.numpy() == value.num_elements.numpy() == 0.0


def _word_by_word() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([5], dtype=tf.int32),
      layers.Embedding(11, 4, name='words'),
      layers.Dense(11),
    ]
  )


def test_each_step_of_a_sequence_may_have_its_weight():
  random = np.random.default_rng(1)
  labels = random.integers(1, 11, [_BATCH, 5]).astype(np.int32)
  model = keras_models.from_keras(
    _word_by_word,
    loss=_SPARSE,
    local='words',
    weights=tf.TensorSpec([5], tf.float32),
  )
  weight = np.linspace(0, 2, 5 * _BATCH, dtype=np.float32).reshape(_BATCH, 5)
  logits = np.random.default_rng(4).normal(size=[_BATCH, 5, 11]).astype('f')
  is_real = np.arange(_BATCH) < 4
  value = model.loss(
    tf.constant(labels),
    tf.constant(logits),
    tf.constant(weight),
    tf.constant(is_real),
  )
  expected = tf.keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction='sum'
  )(labels[:4], logits[:4], weight[:4])
  np.testing.assert_allclose(value.total, expected, rtol=1e-5)
  assert value.num_elements.numpy() == 4 * 5


@pytest.mark.slow
def test_a_label_is_assumed_to_be_like_a_prediction():
  model = keras_models.from_keras(kinds.one, loss=_MSE)
  assert model.example_spec['y'] == tf.TensorSpec([1], tf.float32)
  model = keras_models.from_keras(_word_by_word, loss=_SPARSE)
  assert model.example_spec['y'] == tf.TensorSpec([5], tf.int32)
  assert model.example_spec['weight'] == tf.TensorSpec([], tf.float32)
  model = keras_models.from_keras(
    kinds.one, loss=_MSE, labels=tf.TensorSpec([1], tf.float64)
  )
  assert model.example_spec['y'].dtype == tf.float64


def _ignores_weights(name='ignorant'):
  class Ignorant(tf.keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
      super().update_state(tf.ones_like(y_pred))

  return Ignorant(name=name)


class _Configured(tf.keras.metrics.Sum):
  """Does not say with what it was made."""

  def __init__(self, distance, name='configured', dtype=None):
    super().__init__(name=name, dtype=dtype)
    self.distance = distance


class _Defaulted(_Configured):
  """Does not say either, but can be made without."""

  def __init__(self, distance=tf.abs, name='defaulted', dtype=None):
    super().__init__(distance, name, dtype)


class _Starts(tf.keras.metrics.Metric):
  def __init__(self):
    super().__init__(name='starts')
    self.product = self.add_weight('product', initializer='ones')

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, y_pred, sample_weight

  def result(self):
    return self.product


class _Largest(tf.keras.metrics.Sum):
  """The largest error of a client; its sum over clients is none."""

  def update_state(self, y_true, y_pred, sample_weight=None):
    largest = tf.reduce_max(tf.abs(y_true - y_pred)[:, 0] * sample_weight)
    self.total.assign(tf.maximum(self.total, largest))


class _AssignsInside(tf.keras.metrics.Sum):
  def update_state(self, y_true, y_pred, sample_weight=None):
    if tf.reduce_any(sample_weight > 0):
      super().update_state(y_pred, sample_weight)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'loss': tf.keras.losses.MeanSquaredError},
      r'loss=MeanSquaredError is a class; pass an instance: MeanSquaredError()',
    ),
    (
      {'loss': lambda labels, predictions: tf.reduce_mean(predictions)},
      'must return one loss per example, it returned a scalar. Leave the '
      'averaging to the training',
    ),
    (
      {
        'build': kinds.functional,
        'local': 'head',
        'labels': tf.TensorSpec([3]),
      },
      r'cannot be computed from labels TensorSpec\(shape=\(3,\).* and '
      r'predictions TensorSpec\(shape=\(2,\).*: Dimensions must be equal.* '
      'Pass the spec of one label',
    ),
    (
      {'loss': _MSE, 'weights': tf.TensorSpec([5])},
      'The weight of examples has 2 axes, batch included, where the losses '
      'have 1',
    ),
    (
      {'metrics': lambda: [tf.keras.metrics.MeanSquaredError()] * 2},
      "distinct names other than .*, found .*'mean_squared_error', "
      "'mean_squared_error'.*Pass `name=`",
    ),
    (
      {'metrics': lambda: [tf.keras.metrics.MeanSquaredError(name='loss')]},
      "distinct names other than .*'loss', 'num_examples'",
    ),
    (
      {'metrics': lambda: [3]},
      '3 is no metric. Pass Keras metrics, their names, or functions',
    ),
    ({'metrics': {'a': 'mse'}}, "metrics: there is no label 'a'"),
    (
      {'metrics': ['mae', 'meanness']},
      "Keras has no metric 'meanness'. Pass one of its names",
    ),
    ({'metrics': 'bce'}, "Keras has no metric 'bce'. Pass one of its names"),
    (
      {'metrics': [_Configured(0.5)]},
      r"Metric 'configured' \(_Configured\) cannot be copied from its "
      r'configuration: .*metrics=lambda: \[...\]',
    ),
    *(
      ({'metrics': [_Defaulted(given)]}, "'defaulted' .* Its 'distance' is not")
      for given in (0.5, tf.square)
    ),
    (
      {'metrics': [lambda labels, predictions: tf.reduce_mean(predictions)]},
      "Metric 'lambda' must return one number per example, it returned a "
      'scalar',
    ),
    (
      {'metrics': tf.keras.metrics.MeanAbsoluteError('recall@5')},
      "metric 'recall@5': TFF reads names of English letters",
    ),
    (
      {'loss': lambda y, p: tf.square(y - p)[:, 0] - tf.reduce_mean(p)},
      r"The loss: the operation '.*' \(Mean\) computes with all examples",
    ),
    ({'loss': 'kindness'}, "Keras has no loss 'kindness'. Pass one of its"),
    ({'loss': None}, 'loss=None is no loss. Pass a Keras loss or its name'),
    (
      {'metrics': lambda: [_ignores_weights()]},
      "The state of metric 'ignorant' .* changed by an example of weight 0, so "
      'that it would count padding .*Honour `sample_weight`',
    ),
    (
      {'metrics': tf.keras.metrics.R2Score(num_regressors=1)},
      "The state of metric 'r2_score' .* changed by an example of weight 0",
    ),
    (
      {'metrics': lambda: [_Starts()]},
      "The state of metric 'starts' does not begin with zeros",
    ),
    (
      {'metrics': lambda: [_Largest(name='largest')]},
      "The state of metric 'largest' is no sum: two equal examples do not "
      'count twice as much as one, .* a total and a count',
    ),
    (
      {'metrics': [lambda y, p: tf.abs(p - tf.reduce_mean(p))[:, 0]]},
      "Metric 'lambda' reads other examples of a batch, also those of weight 0"
      r'.*: \[batch, 1\] with labels or weights of \[batch\] makes',
    ),
    (
      {'metrics': lambda: [_AssignsInside(name='inside')]},
      "Metric 'inside' assigns its state inside a condition or a loop, .* "
      'Compute the value there, and assign it afterwards',
    ),
  ],
)
def test_losses_and_metrics_that_cannot_work_are_refused(options, message):
  with pytest.raises(models.ModelError, match=message):
    keras_models.from_keras(
      **{'build': kinds.one, 'loss': _MSE, 'local': 'a', **options}
    )


def test_several_outputs_need_the_spec_of_a_label():
  with pytest.raises(
    models.ModelError, match='The model has several outputs. Give each a loss'
  ):
    keras_models.from_keras(kinds.two_outputs, loss=kinds.loss_of_two)


@pytest.mark.parametrize('activation', [None, 'softmax'])
@pytest.mark.parametrize('from_logits', [False, True])
@pytest.mark.parametrize('is_named', [False, True])
def test_a_cross_entropy_of_no_probabilities_is_warned_of(
  activation, from_logits, is_named, caplog
):
  def build():
    inputs = tf.keras.Input([5, 4])
    output = layers.Dense(3, activation)(inputs)
    return tf.keras.Model(inputs, {'a': output} if is_named else output)

  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
  keras_models.from_keras(build, loss={'a': loss} if is_named else loss)
  is_wrong = activation is None and not from_logits
  assert ('expects probabilities, and the' in caplog.text) == is_wrong


def test_metrics_of_probabilities_beside_a_loss_of_logits_are_warned_of(caplog):
  metrics = tf.keras.metrics
  good = [
    metrics.AUC(from_logits=True, name='a'),
    metrics.Precision(0.0, name='b'),
    metrics.BinaryAccuracy(threshold=0.0, name='c'),
    'mae',
  ]
  bad = [metrics.AUC(name='d'), 'recall', 'accuracy', 'binary_crossentropy']
  keras_models.from_keras(
    stack(4, dense(1)),
    loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[*good, *bad],
  )
  warned = re.findall(r"The metric '(\w+)' expects probabilities", caplog.text)
  assert warned == ['d', 'recall', 'accuracy', 'binary_crossentropy']
