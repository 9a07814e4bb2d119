"""Keras metrics, initializers and random layers as pure functions."""

from collections.abc import Callable, Sequence
import copy
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import keras_functions
from tff_partial import random_bits

layers = tf.keras.layers
metrics = tf.keras.metrics
_SEED = np.array([1, 2], np.int32)
_GENERATOR = np.random.default_rng(0)
_COUNT = 40


# ---- metrics -----------------------------------------------------------------


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
  (metrics.MeanAbsoluteError, _NUMBERS, _PROBABILITIES),
  (metrics.CosineSimilarity, _NUMBERS, _PROBABILITIES),
  (metrics.AUC, _YES_OR_NO, _PROBABILITIES),
  (
    lambda: metrics.AUC(20, curve='PR', multi_label=True, name='each_auc'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (metrics.Precision, _YES_OR_NO, _PROBABILITIES),
  (
    lambda: metrics.Recall([0.2, 0.8], name='recalls'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (metrics.BinaryAccuracy, _YES_OR_NO, _PROBABILITIES),
  (metrics.BinaryCrossentropy, _YES_OR_NO, _PROBABILITIES),
  (metrics.SparseCategoricalAccuracy, _CLASSES, _PROBABILITIES),
  (
    lambda: metrics.SparseTopKCategoricalAccuracy(2, name='top_2'),
    _CLASSES,
    _PROBABILITIES,
  ),
  (metrics.SparseCategoricalCrossentropy, _CLASSES, _PROBABILITIES),
  (
    lambda: metrics.SensitivityAtSpecificity(0.5, name='sensitivity'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  # These two make their variables when they first see an example.
  (
    lambda: metrics.F1Score('macro', threshold=0.5),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
  (
    lambda: metrics.FBetaScore(beta=2.0, name='f2'),
    _YES_OR_NO,
    _PROBABILITIES,
  ),
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
) -> keras_functions.PureMetrics:
  return keras_functions.PureMetrics(
    lambda: [build() for build in builders],
    _spec(labels),
    _spec(predictions),
    tf.TensorSpec([], tf.float32),
  )


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
  update = keras_functions.traced(
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


def test_states_of_clients_add_up():
  builders = [metrics.AUC, metrics.Precision, lambda: _Within(0.5)]
  pure = _pure(builders, _YES_OR_NO, _PROBABILITIES)
  states = [
    pure.update(
      pure.initial_state(),
      tf.constant(_YES_OR_NO[rows]),
      tf.constant(_PROBABILITIES[rows]),
      tf.constant(_WEIGHT[rows]),
    )
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
  (state,) = pure.update(
    pure.initial_state(),
    tf.constant(labels),
    predictions,
    tf.constant([1.0, 0.5]),
  ).values()
  # One of the three words is a 1; the two of the first sentence weigh 1 each.
  assert [tensor.numpy() for tensor in state] == [1.0, 2.5]


def test_metrics_begin_with_nothing():
  builders = [build for build, *_ in _METRICS[:6]]
  pure = _pure(builders, _YES_OR_NO, _PROBABILITIES)
  for state in pure.initial_state().values():
    for tensor in state:
      assert not tensor.numpy().any()
  # Names do not depend on how many metrics there were before.
  assert pure.names[3:] == ('auc', 'each_auc', 'precision')
  pure = _pure([metrics.AUC, metrics.AUC], _YES_OR_NO, _PROBABILITIES)
  assert pure.names == ('auc', 'auc_1')


# ---- initializers ------------------------------------------------------------


def _analysed(*inner: layers.Layer) -> keras_functions.KerasSpec:
  configs = [(type(layer), layer.get_config()) for layer in inner]
  return keras_functions.analyse(
    lambda: tf.keras.Sequential(
      [cls.from_config(config) for cls, config in configs]
    ),
    tf.TensorSpec([60], tf.float32),
  )


@pytest.mark.parametrize(
  'name',
  [
    'glorot_uniform',
    'glorot_normal',
    'he_uniform',
    'lecun_normal',
    'random_uniform',
    'random_normal',
    'truncated_normal',
    'orthogonal',
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
  expected = tf.keras.initializers.get(name)([60, 80]).numpy()
  assert drawn.shape == expected.shape
  assert drawn.dtype == expected.dtype
  assert abs(drawn.mean()) < 5 * expected.std() / np.sqrt(4800)
  assert drawn.std() == pytest.approx(expected.std(), rel=0.06)
  assert abs(drawn).max() == pytest.approx(abs(expected).max(), rel=0.3)


@pytest.mark.parametrize('name', ['zeros', 'ones', 'identity'])
def test_an_initializer_that_draws_nothing_needs_no_seed(name):
  spec = _analysed(layers.Dense(60, kernel_initializer=name))
  for variable in spec.variables:
    initializer = name if 'kernel' in variable.name else 'zeros'
    np.testing.assert_array_equal(
      variable.initialize(_SEED),
      tf.keras.initializers.get(initializer)(variable.shape),
    )


def test_a_function_may_be_an_initializer():
  # Keras makes the bias of an LSTM of zeros and ones in such a way.
  spec = keras_functions.analyse(
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

  @tf.function(autograph=False)
  def run(inputs, seed):
    outputs = [
      keras_functions.rebuild(
        build, (), {}, inputs, training=training, seed=seed
      )[0]
      for training in (True, False)
    ]
    return outputs

  inputs = tf.constant(_GENERATOR.normal(1.0, 1.0, [400, 60]), tf.float32)
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

  spec = keras_functions.analyse(build, None)

  def run(inputs, seed):
    tensors = {v.name: v.initialize(_SEED) for v in spec.variables}
    return [
      keras_functions.rebuild(
        build, spec.variables, tensors, inputs, training=training, seed=seed
      )[0]
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


def test_layers_draw_apart_and_steps_do_too():
  def build():
    inputs = tf.keras.Input([50])
    return tf.keras.Model(
      inputs, [layers.Dropout(0.5)(inputs), layers.Dropout(0.5)(inputs)]
    )

  def run(seed):
    (one, other), _ = keras_functions.rebuild(
      build, (), {}, tf.ones([8, 50]), training=True, seed=seed
    )
    return one, other

  run = tf.function(run, autograph=False)
  drawn = [
    tensor.numpy()
    for step in range(2)
    for tensor in run(random_bits.fold_in(_SEED, step))
  ]
  for place, one in enumerate(drawn):
    for other in drawn[place + 1 :]:
      # Two masks that have nothing to do with one another agree on half.
      assert (one == other).mean() == pytest.approx(0.5, abs=0.15)


# ---- graphs ------------------------------------------------------------------


def test_dependence_is_followed_through_operations():
  with tf.Graph().as_default():
    source = tf.compat.v1.placeholder(tf.float32, [2])
    other = tf.compat.v1.placeholder(tf.float32, [2])
    far = tf.reduce_sum(tf.exp(source) + 1.0)
    depends_on = keras_functions.depends_on
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
    keras_functions.ModelError, match='draws random numbers from hidden state'
  ):
    keras_functions.refuse_hidden_draws(graph)


def test_draws_from_a_seed_are_welcome():
  with tf.__internal__.FuncGraph('test').as_default() as graph:
    random_bits.normal(_SEED, [2])
    tf.random.stateless_uniform([2], _SEED)
  keras_functions.refuse_hidden_draws(graph)


def test_variables_are_answered_wherever_keras_asks():
  asked = []

  def creator(next_creator, **request):
    del next_creator
    asked.append(request['name'])
    return tf.zeros(request['shape'])

  def build():
    with keras_functions.answering_variables(creator):
      layers.Dense(1).build([None, 2])
      with tf.init_scope():
        layers.Dense(1, use_bias=False).build([None, 2])

  tf.function(build, autograph=False)()
  with keras_functions.answering_variables(creator):
    layers.Dense(1, use_bias=False).build([None, 2])
  assert asked == ['kernel', 'bias', 'kernel', 'kernel']
