"""Keras metrics as pure functions give what Keras gives."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.model import keras_metrics
from tff_partial.model import tracing

metrics = tf.keras.metrics
_GENERATOR = np.random.default_rng(0)
_COUNT = 40


class _Within(metrics.Metric):
  """The share of predictions that are close: a metric as users write them."""

  def __init__(self, distance: float, name: str = 'within'):
    super().__init__(name=name)
    self.distance = distance
    self.close = self.add_weight('close', initializer='zeros')
    self.all = self.add_weight('all', shape=[], initializer='zeros')

  def update_state(self, y_true, y_pred, sample_weight=None):
    close = tf.cast(abs(y_true - y_pred) < self.distance, self.dtype)
    close = tf.reduce_mean(close, -1)
    if sample_weight is None:
      sample_weight = tf.ones_like(close)
    # AutoGraph turns this condition into one on tensors.
    if tf.reduce_any(close > 0):
      found = tf.reduce_sum(close * sample_weight)
    else:
      found = 0.0
    self.close.assign_add(found)
    self.all.assign_add(tf.reduce_sum(sample_weight))

  def result(self):
    return self.close / self.all


class _WithinInherited(metrics.MeanMetricWrapper):
  def __init__(self, name='inherited'):
    super().__init__(lambda y, p: tf.reduce_max(abs(y - p), -1), name=name)


_PROBABILITIES = _GENERATOR.uniform(size=[_COUNT, 3]).astype(np.float32)
_CLASSES = _GENERATOR.integers(0, 3, [_COUNT]).astype(np.int32)
_YES_OR_NO = _GENERATOR.integers(0, 2, [_COUNT, 3]).astype(np.float32)
_NUMBERS = _GENERATOR.normal(size=[_COUNT, 3]).astype(np.float32)
_WEIGHT = _GENERATOR.uniform(0.5, 2.0, [_COUNT]).astype(np.float32)

# Builder, labels, predictions.
_METRICS: list[tuple[Callable[[], Any], np.ndarray, np.ndarray]] = [
  (metrics.RootMeanSquaredError, _NUMBERS, _PROBABILITIES),
  (metrics.CosineSimilarity, _NUMBERS, _PROBABILITIES),
  (metrics.AUC, _YES_OR_NO, _PROBABILITIES),
  (
    lambda: metrics.AUC(20, curve='PR', multi_label=True, name='each_auc'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (
    lambda: metrics.AUC(
      multi_label=True,
      num_labels=3,
      label_weights=[1.0, 2.0, 0.5],
      name='weighted_auc',
    ),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (metrics.TruePositives, _YES_OR_NO, _PROBABILITIES),
  (metrics.Precision, _YES_OR_NO, _PROBABILITIES),
  (
    lambda: metrics.Recall([0.2, 0.8], name='recalls'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (metrics.SparseCategoricalAccuracy, _CLASSES, _PROBABILITIES),
  (
    lambda: metrics.SensitivityAtSpecificity(0.5, name='sensitivity'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  # This one makes its variables when it first sees an example.
  (lambda: metrics.F1Score('macro', threshold=0.5), _YES_OR_NO, _PROBABILITIES),
  (lambda: metrics.MeanIoU(3, name='iou'), _CLASSES, _CLASSES[::-1].copy()),
  (lambda: _Within(0.5), _NUMBERS, _PROBABILITIES),
  (_WithinInherited, _NUMBERS, _PROBABILITIES),
]


def _spec(array: np.ndarray) -> tf.TensorSpec:
  return tf.TensorSpec(array.shape[1:], array.dtype)


def _pure(
  builders: Sequence[Callable[[], Any]],
  labels: np.ndarray,
  predictions: np.ndarray,
) -> keras_metrics.PureMetrics:
  return keras_metrics.PureMetrics(
    lambda: [build() for build in builders],
    _spec(labels),
    _spec(predictions),
    tf.TensorSpec([], tf.float32),
  )


def _after(
  pure: keras_metrics.PureMetrics, labels: Any, predictions: Any, weight: Any
) -> Any:
  """The state after one batch."""
  batch = tf.nest.map_structure(
    tf.convert_to_tensor, (labels, predictions, weight)
  )
  return pure.update(pure.initial_state(), *batch)


@pytest.mark.parametrize(
  ('build', 'labels', 'predictions'),
  _METRICS,
  ids=[build().name for build, *_ in _METRICS],
)
def test_a_metric_is_that_of_keras(build, labels, predictions):
  # Beside another one, whose variables are not its own.
  pure = _pure([metrics.KLDivergence, build], labels, predictions)
  if labels is _CLASSES:
    pure = _pure([build], labels, predictions)
  name = pure.names[-1]
  initial = pure.initial_state()
  update = tracing.traced(
    pure.update,
    tf.nest.map_structure(tf.TensorSpec.from_tensor, initial),
    tf.TensorSpec([16, *labels.shape[1:]], labels.dtype),
    tf.TensorSpec([16, *predictions.shape[1:]], predictions.dtype),
    tf.TensorSpec([16], tf.float32),
  )
  state = initial
  # Batches of 16, of which the last one is half padding: it repeats an example
  # and has no weight.
  for start in range(0, 48, 16):
    rows = np.arange(start, start + 16)
    is_real = rows < _COUNT
    rows = np.where(is_real, rows, start)
    state = update(
      state,
      tf.constant(labels[rows]),
      tf.constant(predictions[rows]),
      tf.constant(_WEIGHT[rows] * is_real),
    )
  expected = build()
  expected.update_state(labels, predictions, sample_weight=_WEIGHT)
  for mine, variable in zip(state[name], expected.variables, strict=True):
    np.testing.assert_allclose(mine, variable, rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(
    pure.finalizers()[name](state[name]), expected.result(), rtol=1e-5
  )


_NAN = float('nan')
_ONE = np.ones([4, 1], np.float32)
_TWO = np.array([[1, 0], [1, 0], [1, 1], [1, 0]], np.float32)
_LIKE_TWO = np.array([[1, 0], [1, 0], [1, 0], [1, 1]], np.float32)


@pytest.mark.parametrize(
  ('build', 'labels', 'predictions', 'expected'),
  [
    (metrics.AUC, _ONE, _ONE, _NAN),
    (lambda: metrics.AUC(curve='PR'), 0 * _ONE, _ONE, _NAN),
    (lambda: metrics.AUC(curve='PR'), _ONE, _ONE, 1.0),
    # Of two labels one is always there; the other is right 2 times of 3.
    (lambda: metrics.AUC(multi_label=True), _TWO, _LIKE_TWO, 1 / 3),
    (metrics.Precision, _ONE, 0 * _ONE, _NAN),
    (metrics.Precision, 0 * _ONE, _ONE, 0.0),
    (metrics.Recall, 0 * _ONE, _ONE, _NAN),
    (metrics.Recall, _ONE, 0 * _ONE, 0.0),
    (lambda: metrics.Recall([0.2, 0.8]), 0 * _ONE, _ONE, [_NAN, _NAN]),
    (lambda: metrics.PrecisionAtRecall(0.5), 0 * _ONE, _ONE, _NAN),
    (lambda: metrics.SensitivityAtSpecificity(0.5), _ONE, _ONE, _NAN),
    (lambda: metrics.SpecificityAtSensitivity(0.5), _ONE, _ONE, _NAN),
    (lambda: metrics.IoU(2, [1]), 0 * _ONE, 0 * _ONE, _NAN),
    (lambda: metrics.MeanIoU(2), 0 * _ONE, 0 * _ONE, 1.0),
    (lambda: metrics.F1Score(threshold=0.5), 0 * _TWO, 0 * _TWO, [_NAN, _NAN]),
    (
      lambda: metrics.F1Score('macro', 0.5),
      *(_ONE * [[1, 0]], _ONE * [[1, 0]], 1.0),
    ),
    (lambda: metrics.F1Score('macro', 0.5), 0 * _TWO, 0 * _TWO, _NAN),
    (lambda: metrics.F1Score('weighted', 0.5), 0 * _TWO, _TWO, _NAN),
    (metrics.TruePositives, 0 * _ONE, _ONE, 0.0),
    # One of four labels is missed by 1, and they lie 5 from their mean.
    (metrics.R2Score, [[0], [1], [2], [3]], [[0], [1], [2], [4]], 0.8),
    (metrics.R2Score, _ONE, 0 * _ONE, _NAN),
    (metrics.R2Score, np.full([5, 1], 3.7), np.zeros([5, 1]), _NAN),
  ],
)
def test_what_examples_leave_undefined_is_no_number(
  build, labels, predictions, expected
):
  labels, predictions = np.float32(labels), np.float32(predictions)
  pure = _pure([build], labels, predictions)
  ((name, finalize),) = pure.finalizers().items()
  state = _after(pure, labels, predictions, np.ones(len(labels), np.float32))
  np.testing.assert_allclose(finalize(state[name]), expected, rtol=1e-5)


_LABELS = {
  'binary': (_YES_OR_NO[:, :1], _PROBABILITIES[:, :1]),
  'categorical': (_YES_OR_NO, _PROBABILITIES),
  'sparse_categorical': (_CLASSES, _PROBABILITIES),
  # Numbers without an axis of their own are still one of each example.
  'numbers': (_YES_OR_NO[:, 0], _PROBABILITIES[:, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize('kind', _LABELS)
def test_metrics_are_named_as_in_keras(kind):
  labels, predictions = _LABELS[kind]
  given = ['accuracy', 'crossentropy', metrics.MeanAbsoluteError(name='mine')]
  given += [metrics.RootMeanSquaredError, tf.keras.losses.log_cosh, 'mse']
  if kind == 'sparse_categorical':
    given = given[:2]
  pure = keras_metrics.PureMetrics(
    given, _spec(labels), _spec(predictions), tf.TensorSpec([], tf.float32)
  )
  names = ['accuracy', 'crossentropy', 'mine', 'root_mean_squared_error']
  assert list(pure.names) == [*names, 'log_cosh', 'mse'][: len(given)]
  weight = _WEIGHT * (np.arange(_COUNT) < 30)
  states = _after(pure, labels, predictions, weight)
  if kind == 'numbers':
    labels, predictions = labels[:, None], predictions[:, None]
  keras = tf.keras.Sequential([tf.keras.Input(predictions.shape[1:])])
  keras.compile(
    weighted_metrics=[
      metric() if isinstance(metric, type) else metric for metric in given
    ]
  )
  measured = keras.evaluate(
    predictions[:30],
    labels[:30],
    sample_weight=_WEIGHT[:30],
    verbose=0,
    return_dict=True,
  )
  for name, finalize in pure.finalizers().items():
    np.testing.assert_allclose(
      finalize(states[name]), measured[name], rtol=1e-4, err_msg=name
    )


def test_metrics_have_the_names_of_keras_3_too():
  pure = keras_metrics.PureMetrics(
    ['r2_score', 'auc'],
    *[tf.TensorSpec([1], tf.float32)] * 2,
    tf.TensorSpec([], tf.float32),
  )
  assert [type(metric) for metric in pure.build()] == [
    metrics.R2Score,
    metrics.AUC,
  ]
  assert pure.names == ('r2_score', 'auc')


def test_a_metric_that_was_used_is_given_as_new():
  used = metrics.MeanAbsoluteError(name='used')
  used.update_state([[1.0]], [[5.0]])
  pure = keras_metrics.PureMetrics(
    [used], _spec(_NUMBERS), _spec(_NUMBERS), tf.TensorSpec([], tf.float32)
  )
  state = _after(pure, _NUMBERS, _NUMBERS + 1.0, _WEIGHT)
  np.testing.assert_allclose(
    pure.finalizers()['used'](state['used']), 1.0, rtol=1e-5
  )
  assert used.result().numpy() == 4.0
  alone = keras_metrics.PureMetrics(
    used, _spec(_NUMBERS), _spec(_NUMBERS), tf.TensorSpec([], tf.float32)
  )
  assert alone.build()[0] is not used


def test_a_state_keeps_the_dtype_that_a_policy_gave_it():
  tf.keras.mixed_precision.set_global_policy('float64')
  try:
    pure = _pure([metrics.MeanAbsoluteError], _NUMBERS, _NUMBERS)
  finally:
    tf.keras.mixed_precision.set_global_policy('float32')
  first = pure.initial_state()['mean_absolute_error']
  found = _after(pure, _NUMBERS, _NUMBERS + 1.0, _WEIGHT)
  assert found['mean_absolute_error'][0].dtype == first[0].dtype == tf.float64


@pytest.mark.parametrize(
  ('build', 'axes'),
  [
    (metrics.BinaryIoU, (3, 2)),
    (metrics.TruePositives, (3,)),
    (metrics.AUC, ()),
  ],
)
def test_each_pixel_has_the_weight_of_its_image(build, axes):
  generator = np.random.default_rng(0)
  labels, predictions = generator.uniform(size=[2, _COUNT, *axes, 1])
  labels = np.round(labels[..., 0]).astype(np.float32)
  pure = _pure([build], labels, predictions.astype(np.float32))
  state = _after(pure, labels, predictions.astype(np.float32), _WEIGHT)
  expected = build()
  weight = np.reshape(_WEIGHT, [_COUNT, *(1 for _ in axes)])
  expected.update_state(
    labels, predictions[..., 0], weight * np.ones_like(labels)
  )
  (name,) = pure.names
  np.testing.assert_allclose(
    pure.finalizers()[name](state[name]), expected.result(), rtol=1e-5
  )


def test_states_of_clients_add_up():
  builders = [metrics.AUC, metrics.Precision, lambda: _Within(0.5)]
  pure = _pure(builders, _YES_OR_NO, _PROBABILITIES)
  states = [
    _after(pure, _YES_OR_NO[rows], _PROBABILITIES[rows], _WEIGHT[rows])
    for rows in (slice(0, 7), slice(7, 8), slice(8, None))
  ]
  total = tf.nest.map_structure(lambda *tensors: sum(tensors), *states)
  for name, build in zip(pure.names, builders, strict=True):
    expected = build()
    expected.update_state(_YES_OR_NO, _PROBABILITIES, sample_weight=_WEIGHT)
    found = pure.finalizers()[name](total[name])
    np.testing.assert_allclose(found, expected.result(), rtol=1e-5)


def test_a_metric_leaves_out_what_a_layer_masks():
  labels = np.array([[1, 2, 0], [2, 0, 0]], np.int32)
  logits = np.zeros([2, 3, 4], np.float32)
  logits[:, :, 1] = 1.0  # Always predicts 1.
  pure = _pure([metrics.SparseCategoricalAccuracy], labels, logits)
  predictions = tf.constant(logits)
  predictions._keras_mask = tf.constant(labels != 0)
  (state,) = _after(pure, labels, predictions, np.float32([1.0, 0.5])).values()
  # One of the three words is a 1; the two of the first sentence weigh 1 each.
  assert [tensor.numpy() for tensor in state] == [1.0, 2.5]


@pytest.mark.parametrize('build', [metrics.AUC, metrics.Precision])
def test_thresholds_leave_out_what_a_layer_masks(build):
  labels = np.array([[1, 0, 1], [0, 1, 1]], np.float32)[..., None]
  predicted = np.array([[0.9, 0.6, 0.1], [0.7, 0.8, 0.2]], np.float32)
  mask = np.array([[1, 1, 0], [1, 0, 0]], bool)
  weight = np.array([1.0, 0.5], np.float32)
  pure = _pure([build], labels, predicted[..., None])
  predictions = tf.constant(predicted[..., None])
  predictions._keras_mask = tf.constant(mask)
  state = _after(pure, labels, predictions, weight)
  expected = build()
  expected.update_state(
    labels[mask], predicted[mask][:, None], sample_weight=[1.0, 1.0, 0.5]
  )
  (name,) = pure.names
  found = pure.finalizers()[name](state[name])
  np.testing.assert_allclose(found, expected.result(), rtol=1e-6)


def test_each_output_has_its_own_mask():
  labels = {'a': np.ones([2, 3, 1], 'f'), 'b': np.ones([2, 1], 'f')}
  specs = {name: _spec(array) for name, array in labels.items()}
  pure = keras_metrics.PureMetrics(
    {'a': 'mae', 'b': 'mae'}, specs, specs, tf.TensorSpec([], tf.float32)
  )
  steps = tf.constant([[[0.0], [1.0], [9.0]], [[4.0], [9.0], [9.0]]])
  steps._keras_mask = tf.constant([[True, True, False], [True, False, False]])
  predictions = {'a': steps, 'b': tf.zeros([2, 1])}
  state = _after(pure, labels, predictions, np.ones(2, np.float32))
  # The steps err by 1, 0 and 3.
  assert [t.numpy() for t in state['a_mae']] == [4.0, 3.0]
  assert [t.numpy() for t in state['b_mae']] == [2.0, 2.0]
