"""Keras models as pure functions over named weights in three tiers."""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers
from tff_partial.model import keras_functions
from tff_partial.model import keras_models
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError
from tff_partial.sparse import lookups

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
  """Reads the table of an embedding backward: scores of all words."""

  def __init__(self, table, **options):
    super().__init__(**options)
    self.table = table

  def call(self, inputs):
    return tf.matmul(inputs, self.table, transpose_b=True)


def _tied() -> tf.keras.Model:
  """One layer is called twice, and one variable is used by two layers."""
  word = tf.keras.Input([], dtype=tf.int32)
  embedding = layers.Embedding(7, 3, name='words')
  twice = layers.Dense(3, 'tanh', name='twice')
  hidden = twice(twice(embedding(word)))
  scores = _Transposed(embedding.embeddings, name='scores')(hidden)
  return tf.keras.Model(word, scores)


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


_TABLE = np.random.default_rng(7).normal(size=[7, 3]).astype('f')
_ADAPTED = layers.Normalization()
_ADAPTED.adapt(np.random.default_rng(8).normal(2.0, 3.0, [9, 3]))
_SCALES = tf.constant(np.linspace(0.5, 2.0, 3), tf.float32)


class _Bare(layers.Layer):
  """Makes variables without `add_weight`, and reads a constant."""

  def __init__(self, **options):
    super().__init__(**options)
    self.factor = tf.Variable(tf.ones([3]) * 0.5, name='factor')
    # Not the types that these variables have.
    self.scale = tf.Variable(np.array([0.1]), dtype=tf.float32, name='scale')
    self.set = self.add_weight('set', [], initializer='zeros')
    with tf.init_scope():
      self.set.assign(3.0)
    self.shifts = {'one': [tf.Variable(0.25)]}

  def call(self, inputs):
    shift = self.shifts['one'][0]
    inputs = inputs * self.factor * _SCALES + self.scale * self.set
    return inputs + shift.read_value() + shift.value()


def _given_values() -> tf.keras.Model:
  """Has values of its own: of normalization, of tables, of variables."""
  word = tf.keras.Input([], dtype=tf.int32, name='word')
  traits = tf.keras.Input([3], name='traits')
  table = layers.Embedding(7, 3, weights=[_TABLE], name='words')
  fixed = layers.Embedding(
    7, 3, weights=[2 * _TABLE], trainable=False, name='fixed'
  )
  normalized = layers.Normalization(
    mean=_ADAPTED.mean, variance=_ADAPTED.variance
  )(traits)
  hidden = _Bare(name='bare')(table(word) + fixed(word) + normalized)
  return tf.keras.Model([word, traits], layers.Dense(2, name='head')(hidden))


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
  'given values': Kind(
    _given_values, {'word': _words(7), 'traits': _numbers(3)}, _numbers(2)
  ),
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
  objective: Callable[..., Any]


@pytest.fixture(scope='module', name='made', params=KINDS)
def fixture_made(request) -> Made:
  kind = KINDS[request.param]
  keras = kind.build()
  keras(kind.inputs)
  generator = np.random.default_rng(2)
  keras.set_weights(
    [generator.uniform(0.2, 1.0, w.shape) for w in keras.get_weights()]
  )
  partial = keras_models.from_keras(
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
  return Made(
    kind, keras, partial, weights, _traced_objective(partial, weights)
  )


def _traced_objective(
  model: models.PartialModel, weights: tiers.Weights
) -> Callable[..., Any]:
  """(weights, a batch) -> the loss of the batch, and its gradients."""

  def compute(weights, inputs, labels, weight, is_real):
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(weights)
      predictions, regularization = model.predict(
        weights, model.frozen_weights(), inputs, training=False, seed=_SEED
      )
      loss = model.loss(labels, predictions, weight, is_real, regularization)
    gradients = tape.gradient(loss.objective, weights)
    return (
      (loss.objective, loss.total, loss.num_elements, loss.regularization),
      tf.nest.map_structure(tf.convert_to_tensor, gradients),
    )

  batch = tf.nest.map_structure(
    lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
    [*model.example_spec.values(), tf.TensorSpec([], tf.bool)],
  )
  return tracing.unconverted(compute).get_concrete_function(
    tf.nest.map_structure(tf.TensorSpec.from_tensor, weights), *batch
  )


def _predict(
  model: models.PartialModel,
  weights: tiers.Weights,
  inputs: Any,
  training: bool = False,
  seed: np.ndarray = _SEED,
) -> Any:
  @tracing.unconverted
  def predict(weights, inputs, seed):
    return model.predict(
      weights, model.frozen_weights(), inputs, training=training, seed=seed
    )

  return predict(weights, inputs, tf.constant(seed))[0]


@pytest.mark.slow
def test_predictions_are_those_of_keras(made):
  found = _predict(made.partial, made.weights, made.kind.inputs)
  tf.nest.map_structure(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found,
    made.keras(made.kind.inputs),
  )


def test_predictions_can_be_made_eagerly(made):
  found, regularization = made.partial.predict(
    made.weights,
    made.partial.frozen_weights(),
    tf.nest.map_structure(tf.constant, made.kind.inputs),
    training=False,
    seed=_SEED,
  )
  expected = made.keras(made.kind.inputs)
  tf.nest.map_structure(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    found,
    expected,
  )
  for term, wanted in zip(regularization, made.keras.losses, strict=True):
    np.testing.assert_allclose(term, wanted, rtol=1e-5)
  if keras_functions.mask_of(expected) is not None:
    np.testing.assert_array_equal(
      keras_functions.mask_of(found), keras_functions.mask_of(expected)
    )


def test_operators_of_keras_are_not_spoilt(tmp_path):
  def build() -> tf.keras.Model:
    inputs = tf.keras.Input([2])
    return tf.keras.Model(inputs, inputs + layers.Dense(2, name='head')(inputs))

  model = keras_models.from_keras(build, loss=_MSE)
  weights = {tiers.GLOBAL: model.initial_weights(tiers.GLOBAL, _SEED)}
  predicted, _ = model.predict(
    weights, {}, tf.ones([1, 2]), training=False, seed=_SEED
  )
  model.to_keras(*weights.values()).save(tmp_path / 'model.keras')
  loaded = tf.keras.models.load_model(tmp_path / 'model.keras')
  np.testing.assert_allclose(loaded(tf.ones([1, 2])), predicted, rtol=1e-6)


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
) -> tuple[losses.LossValue, dict[str, tf.Tensor]]:
  """The loss of some rows of the batch, and its gradients."""
  weight = np.linspace(0.5, 1.5, _BATCH, dtype=np.float32)
  loss, gradients = made.objective(
    made.weights,
    tf.nest.map_structure(
      lambda array: tf.constant(array[rows]), made.kind.inputs
    ),
    tf.constant(made.kind.labels[rows]),
    tf.constant(weight[rows]),
    tf.constant(is_real),
  )
  named: dict[str, tf.Tensor] = {}
  for each in gradients.values():
    named.update(each)
  return losses.LossValue(*loss), named


def test_losses_and_gradients_are_those_of_keras(made):
  rows = np.arange(_BATCH)
  loss, gradients = _objective(made, rows, np.ones(_BATCH, bool))
  weight = np.linspace(0.5, 1.5, _BATCH, dtype=np.float32)
  with tf.GradientTape() as tape:
    predictions = made.keras(made.kind.inputs)
    labels = made.kind.labels
    if made.kind.build is _scalar:
      # Keras takes the only axis for that of a prediction's parts.
      labels, predictions = labels[:, None], predictions[:, None]
    if isinstance(made.kind.loss, tf.keras.losses.Loss):
      expected = made.kind.loss(labels, predictions, weight)
    else:
      losses = made.kind.loss(labels, predictions)
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


# ---- which part is local -----------------------------------------------------


def _three() -> tf.keras.Model:
  """Layers `a`, `b` and `b2`, the last two inside `both`."""
  both = tf.keras.Sequential(
    [layers.Dense(3, name='b'), layers.Dense(3, name='b2')], name='both'
  )
  inputs = tf.keras.Input([4])
  hidden = both(layers.Dense(3, name='a')(inputs))
  return tf.keras.Model(inputs, layers.Dense(2, name='c')(hidden))


_OF_B = {'b/kernel', 'b/bias'}
_OF_BOTH = {'b/kernel', 'b/bias', 'b2/kernel', 'b2/bias'}


@pytest.mark.parametrize(
  ('selector', 'names'),
  [
    ('b', _OF_B),  # A layer's whole name, though others begin with it.
    ('both', _OF_BOTH),
    (['b', 'b2'], _OF_BOTH),
    (('b', 'a/bias'), {*_OF_B, 'a/bias'}),
    ('b.*', _OF_BOTH),
    (re.compile('b2?'), _OF_BOTH),
    ('.*/bias', {'a/bias', 'b/bias', 'b2/bias', 'c/bias'}),
    ('b/kernel', {'b/kernel'}),
    (layers.Dense(1, name='b'), _OF_B),
    (lambda variable: variable.shape == (3,), {'a/bias', 'b/bias', 'b2/bias'}),
    (lambda variable: 'both' in variable.layers, _OF_BOTH),
  ],
)
def test_the_local_part_is_named_in_many_ways(selector, names):
  model = keras_models.from_keras(_three, loss=_MSE, local=selector)
  assert {v.name for v in model.trainable(tiers.LOCAL)} == names
  assert {v.name for v in model.trainable(tiers.GLOBAL)} == {
    v.name for v in model.variables
  } - names


def test_without_a_selector_nothing_is_local():
  model = keras_models.from_keras(_three, loss=_MSE)
  assert model.tiers == (tiers.GLOBAL,)
  assert len(model.trainable(tiers.GLOBAL)) == 8


@pytest.mark.slow
def test_groups_are_named_like_the_local_part():
  model = keras_models.from_keras(
    _three, loss=_MSE, local='a', group='both', num_groups=3
  )
  assert model.tiers == (tiers.GLOBAL, tiers.GROUP, tiers.LOCAL)
  assert {v.name for v in model.trainable(tiers.GROUP)} == _OF_BOTH
  # The server has three copies, each drawn by itself.
  for name, spec in model.specs(tiers.GROUP).items():
    at_server = model.specs_at_server(tiers.GROUP)[name]
    assert at_server.shape == [3, *spec.shape]
  drawn = model.initial_weights_at_server(tiers.GROUP, [1, 2])
  kernel = drawn[next(name for name in _OF_BOTH if 'kernel' in name)].numpy()
  assert len({copy.tobytes() for copy in kernel}) == 3


@pytest.mark.parametrize(
  'options', [{'group': 'both'}, {'num_groups': 3}], ids=['which', 'how many']
)
def test_groups_need_variables_and_a_number(options):
  with pytest.raises(
    ModelError,
    match='need both variables of their own and a number',
  ):
    keras_models.from_keras(_three, loss=_MSE, **options)


@pytest.mark.parametrize(
  ('build', 'selectors', 'message'),
  [
    (
      _three,
      {'local': 'user'},
      r"local='user' matches no variable. The model has the layers .*'both'.* "
      r"with the variables .*'a/kernel'",
    ),
    (
      _three,
      {'local': 'bot'},
      r"Whole names are matched: where 'bot' is a part of one, write '\.\*bot",
    ),
    (_three, {'local': ['a', 'x.*']}, r"local='x\.\*' matches no variable"),
    (_three, {'local': lambda variable: False}, 'matches no variable'),
    (
      _three,
      {'local': '.*'},
      r"local='\.\*' matches every trainable variable, so that nothing would "
      'be learned together. Name fewer layers',
    ),
    (
      _three,
      {'local': 'both', 'group': ['a', 'b']},
      "Variable 'b/kernel' is selected for two tiers: group and local",
    ),
    (
      _three,
      {'local': 'a('},
      r"local='a\(' is not a regular expression: missing \), .*position 1",
    ),
    (
      _three,
      {'local': layers.Dense},
      'local=Dense is a class. Name the layers, or pass a predicate',
    ),
    (
      _frozen,
      {'local': 'body'},
      r"local='body' matches only variables that are not trainable: "
      r"\['body/kernel', 'body/bias'\]. Make them trainable, or leave",
    ),
    (
      _tied,
      {'local': 'words'},
      r"local=\['words'\]: variable 'words/embeddings' is also used by "
      r"\['scores'\]. A variable belongs to one tier: select all of its "
      'layers, or give each a variable of its own',
    ),
  ],
)
def test_selectors_that_cannot_be_meant_are_refused(build, selectors, message):
  loss = _SPARSE if build is _tied else _MSE
  with pytest.raises(ModelError, match=message):
    keras_models.from_keras(build, loss=loss, **selectors)


def test_a_tied_variable_is_local_if_all_of_its_layers_are():
  for selector in (['words', 'scores'], 'words/embeddings'):
    model = keras_models.from_keras(_tied, loss=_SPARSE, local=selector)
    assert {v.name for v in model.trainable(tiers.LOCAL)} == {
      'words/embeddings'
    }


# ---- first values ------------------------------------------------------------


def test_first_values_follow_from_the_seed():
  model = keras_models.from_keras(_functional, loss=_MSE, local='head')
  draw = lambda tier, seed: model.initial_weights(tier, seed)  # noqa: E731
  for tier in model.tiers:
    one, again, other = (draw(tier, seed) for seed in (_SEED, _SEED, _SEED + 1))
    for name in one:
      np.testing.assert_array_equal(one[name], again[name])
      if name.endswith('kernel'):
        assert not np.isclose(one[name], other[name]).any()
      else:
        assert not other[name].numpy().any()  # Biases begin with zeros.


def test_variables_draw_apart_from_one_another():
  def build():
    return tf.keras.Sequential(
      [tf.keras.Input([3]), *(layers.Dense(3, name=n) for n in 'abc')]
    )

  model = keras_models.from_keras(build, loss=_MSE, local='b')
  weights = tiers.join(
    *({tier: model.initial_weights(tier, _SEED)} for tier in model.tiers)
  )
  kernels = [
    tensor.numpy()
    for named in weights.values()
    for name, tensor in named.items()
    if name.endswith('kernel')
  ]
  assert len(kernels) == 3
  for one, other in ((0, 1), (1, 2), (0, 2)):
    assert not np.isclose(kernels[one], kernels[other]).any()


def test_an_initializer_with_a_seed_draws_the_same_for_everybody():
  def build():
    initializer = tf.keras.initializers.RandomNormal(seed=3)
    return tf.keras.Sequential(
      [
        tf.keras.Input([3]),
        layers.Dense(3, kernel_initializer=initializer, name='local'),
        layers.Dense(2),
      ]
    )

  model = keras_models.from_keras(build, loss=_MSE, local='local')
  one, other = (
    model.initial_weights(tiers.LOCAL, seed)['local/kernel'].numpy()
    for seed in (_SEED, _SEED + 1)
  )
  np.testing.assert_array_equal(one, other)
  assert one.any()


@pytest.mark.slow
def test_first_values_may_be_given_in_the_model():
  model = keras_models.from_keras(_given_values, loss='mse', local='words')
  np.testing.assert_array_equal(
    model.initial_weights(tiers.LOCAL, _SEED)['words/embeddings'], _TABLE
  )
  shared = model.initial_weights(tiers.GLOBAL, _SEED)
  assert shared['factor'].numpy().tolist() == [0.5] * 3
  assert shared['Variable'].numpy() == 0.25
  np.testing.assert_array_equal(shared['scale'], np.float32([0.1]))
  assert shared['set'].numpy() == 3.0
  frozen = model.frozen_weights()
  np.testing.assert_array_equal(frozen['fixed/embeddings'], 2 * _TABLE)
  # What stands in a table's place when it is trained by rows is no variable.
  work = [phases.Phase(batch_size=4, optimizer=phases.sgd(0.1), measured=True)]
  model = keras_models.from_keras(_given_values, loss='mse', local='head')
  assert lookups.Tables(model, work).names == ('words/embeddings',)


@pytest.mark.slow
def test_constants_become_part_of_computations():
  """Of TFF, whose graphs cannot read what lies outside of them."""
  model = keras_models.from_keras(_given_values, loss='mse')
  traced = tracing.traced(
    lambda word, traits: _given_predictions(model, word, traits),
    tf.TensorSpec([None], tf.int32),
    tf.TensorSpec([None, 3], tf.float32),
  )
  batch = {'word': _words(7), 'traits': _numbers(3)}
  with tf.Graph().as_default():
    predictions = tracing.value_of(traced(*map(tf.constant, batch.values())))
  keras = model.to_keras(model.initial_weights(tiers.GLOBAL, _SEED))
  np.testing.assert_allclose(predictions, keras(batch), rtol=1e-5)


def _given_predictions(model, word, traits):
  return model.predict(
    {tiers.GLOBAL: model.initial_weights(tiers.GLOBAL, _SEED)},
    model.frozen_weights(),
    {'word': word, 'traits': traits},
    training=False,
    seed=_SEED,
  )[0]


def test_first_values_may_come_from_a_trained_model():
  trained = _frozen()
  trained(_numbers(4))
  values = [np.full(w.shape, i) for i, w in enumerate(trained.get_weights())]
  trained.set_weights(values)
  model = keras_models.from_keras(
    _frozen, loss=_MSE, local='head', initial_weights=trained
  )
  held = {
    **model.initial_weights(tiers.GLOBAL, _SEED),
    **model.initial_weights(tiers.LOCAL, _SEED + 1),
    **model.frozen_weights(),
  }
  assert len(held) == len(values)
  for variable, wanted in zip(trained.variables, values, strict=True):
    np.testing.assert_array_equal(held[variable.name.split(':')[0]], wanted)


def test_a_trained_model_of_another_shape_is_refused():
  other = tf.keras.Sequential([tf.keras.Input([4]), layers.Dense(2)])
  with pytest.raises(
    models.ModelError,
    match=r"`initial_weights` has variables of other shapes .*\('dense.*/kernel"
    r":0', \(4, 2\)\)",
  ):
    keras_models.from_keras(_functional, loss=_MSE, initial_weights=other)


@pytest.mark.slow
def test_frozen_variables_are_in_no_tier():
  model = keras_models.from_keras(_frozen, loss=_MSE, local='head')
  frozen = {
    'body/kernel',
    'body/bias',
    'norm/gamma',
    'norm/beta',
    'norm/moving_mean',
    'norm/moving_variance',
  }
  assert set(model.frozen_weights()) == frozen
  assert set(model.specs(tiers.GLOBAL)) == {'middle/kernel', 'middle/bias'}
  assert set(model.specs(tiers.LOCAL)) == {'head/kernel', 'head/bias'}
  kernel = model.frozen_weights()['body/kernel'].numpy()
  assert kernel.any()
  np.testing.assert_array_equal(model.frozen_weights()['body/kernel'], kernel)
  other = keras_models.from_keras(_frozen, loss=_MSE, local='head', seed=1)
  assert (other.frozen_weights()['body/kernel'].numpy() != kernel).any()


# ---- what layers draw --------------------------------------------------------


def _noisy() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([40]),
      layers.Dropout(0.25),
      layers.Dropout(0.5),
      layers.Dense(1, kernel_initializer='ones', name='local'),
      layers.Dense(1),
    ]
  )


@pytest.mark.slow
def test_dropout_follows_from_the_seed_in_training_alone():
  model = keras_models.from_keras(_noisy, loss=_MSE, local='local')
  weights = tiers.join(
    *({tier: model.initial_weights(tier, _SEED)} for tier in model.tiers)
  )
  inputs = np.ones([8, 40], np.float32)
  draw = lambda **options: _predict(model, weights, inputs, **options).numpy()  # noqa: E731
  plain = draw()
  # Each input counts alike, so the same prediction for each example.
  assert np.ptp(plain) == 0
  dropped = draw(training=True)
  np.testing.assert_array_equal(draw(training=True), dropped)
  assert len(np.unique(dropped)) > 4
  assert (draw(training=True, seed=_SEED + 1) != dropped).any()
  np.testing.assert_array_equal(draw(seed=_SEED + 1), plain)
  # Of 40 inputs 15 are left, each counted 8/3 times; so says the mean of 8.
  shares = dropped / plain
  assert shares.mean() == pytest.approx(1.0, abs=0.3)
  np.testing.assert_allclose(shares * 15, np.round(shares * 15), atol=1e-3)


# ---- losses ------------------------------------------------------------------


class _AsItIs(layers.Layer):
  """Predicts its inputs."""

  def build(self, shape):
    self.zero = self.add_weight('zero', initializer='zeros')

  def call(self, inputs):
    return inputs + self.zero


def _as_it_is(shape):
  inputs = tf.keras.Input(shape)
  return tf.keras.Model(inputs, _AsItIs()(inputs))


@pytest.mark.parametrize('loss', ['mse', 'mae', 'cosine_similarity', _MSE])
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


def _one() -> tf.keras.Model:
  return tf.keras.Sequential(
    [tf.keras.Input([1]), layers.Dense(1, name='a'), layers.Dense(1, name='b')]
  )


@pytest.mark.parametrize(
  ('reduction', 'objective'), [('auto', 1.5), ('none', 1.5), ('sum', 3.0)]
)
def test_a_loss_by_hand(reduction, objective):
  # Losses are 1, 4 and 25; 1 and 4 * 0.5 count. Keras divides by the number of
  # examples, whatever they weigh.
  loss = tf.keras.losses.MeanSquaredError(reduction=reduction)
  value = _loss_of(keras_models.from_keras(_one, loss=loss, local='a'))
  assert value.objective.numpy() == objective
  assert value.total.numpy() == 3.0
  assert value.num_elements.numpy() == 2.0


def test_regularization_is_added_once_whatever_the_batch():
  model = keras_models.from_keras(_one, loss=_MSE, local='a')
  terms = [tf.constant(0.25), tf.constant([0.5, 0.5], tf.float64)]
  value = _loss_of(model, regularization=terms)
  assert value.objective.numpy() == 1.5 + 1.25
  assert value.total.numpy() == 3.0


def test_a_batch_of_padding_has_no_loss():
  model = keras_models.from_keras(_one, loss=_MSE, local='a')
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
  labels = _words(11, 5)
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
  model = keras_models.from_keras(_one, loss=_MSE)
  assert model.example_spec['y'] == tf.TensorSpec([1], tf.float32)
  model = keras_models.from_keras(_word_by_word, loss=_SPARSE)
  assert model.example_spec['y'] == tf.TensorSpec([5], tf.int32)
  assert model.example_spec['weight'] == tf.TensorSpec([], tf.float32)
  model = keras_models.from_keras(
    _one, loss=_MSE, labels=tf.TensorSpec([1], tf.float64)
  )
  assert model.example_spec['y'].dtype == tf.float64


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'instance'),
  [
    ('mse', tf.keras.losses.MeanSquaredError()),
    ('mean_absolute_error', tf.keras.losses.MeanAbsoluteError()),
    ('huber', tf.keras.losses.Huber()),
  ],
)
def test_losses_have_names(name, instance):
  named = keras_models.from_keras(_one, loss=name, local='a')
  made = keras_models.from_keras(_one, loss=instance, local='a')
  assert named.example_spec == made.example_spec
  one, other = map(_loss_of, (named, made))
  np.testing.assert_allclose(one.objective, other.objective, rtol=1e-6)
  np.testing.assert_allclose(one.total, other.total, rtol=1e-6)


def test_models_of_lists_take_tuples():
  model = keras_models.from_keras(
    lambda: tf.keras.Sequential([layers.Concatenate(), layers.Dense(1)]),
    loss='mse',
    inputs=[tf.TensorSpec([2]), tf.TensorSpec([3])],
  )
  assert model.example_spec['x'] == (tf.TensorSpec([2]), tf.TensorSpec([3]))


def test_a_model_says_what_it_consists_of():
  model = keras_models.from_keras(
    lambda: _two_inputs(as_dict=True),
    loss='mse',
    local='head',
    group='words',
    num_groups=3,
    metrics=['mae'],
  )
  assert (
    repr(model)
    == """\
PartialModel with the loss mean_squared_error and the metrics mae
  group (3 copies): 21 parameters
    words/embeddings: float32 [7, 3]
  local: 22 parameters
    head/kernel: float32 [10, 2]
    head/bias: float32 [2]
  ExampleSpec:
    x.word: int32 [2], 0 to 6 (table 'words' has 7 rows)
    x.traits: float32 [4]
    y: float32 [2]
    weight: float32 []"""
  )
  assert 'never trained: ' in repr(keras_models.from_keras(_frozen, loss=_MSE))


# ---- refusals ----------------------------------------------------------------


def _stack(*inner: layers.Layer, inputs: tuple[int, ...] = (4,)):
  """A callable that builds a model of which the layers are made anew."""
  configs = [(type(layer), layer.get_config()) for layer in inner]

  def build() -> tf.keras.Model:
    made = [cls.from_config(config) for cls, config in configs]
    return tf.keras.Sequential(
      [tf.keras.Input(inputs), *made, layers.Dense(1, name='last')]
    )

  return build


def _norm_inside() -> tf.keras.Model:
  inner = tf.keras.Sequential(
    [layers.Dense(3), layers.BatchNormalization(name='norm')], name='inner'
  )
  inputs = tf.keras.Input([4])
  return tf.keras.Model(inputs, layers.Dense(1)(inner(inputs)))


class _AddsLoss(layers.Layer):
  def call(self, inputs):
    self.add_loss(tf.reduce_mean(inputs))
    return inputs


class _Draws(layers.Layer):
  """Draws with a function of TensorFlow, in the open or inside another."""

  def __init__(self, inside: bool = False, **options):
    super().__init__(**options)
    self.inside = inside

  def get_config(self):
    return {**super().get_config(), 'inside': self.inside}

  def call(self, inputs):
    draw = lambda: inputs + tf.random.uniform(tf.shape(inputs))  # noqa: E731
    return tf.function(draw)() if self.inside else draw()


class _Counts(layers.Layer):
  def build(self, _):
    self.calls = self.add_weight('calls', [], trainable=False)

  def call(self, inputs):
    self.calls.assign_add(1.0)
    return inputs


class _HiddenInitializer(tf.keras.initializers.Initializer):
  def __call__(self, shape, dtype=None, **_):
    return tf.random.normal(shape, dtype=dtype)


def _mixed_precision() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([4]),
      layers.Dense(3, dtype='mixed_bfloat16', name='half'),
      layers.Dense(1, dtype='float32'),
    ]
  )


def _loads_weights() -> tf.keras.Model:
  model = _one()
  model.get_layer('a').kernel.assign([[3.0]])
  return model


def _initialized_by(initializer) -> Callable[[], tf.keras.Model]:
  return lambda: tf.keras.Sequential(
    [tf.keras.Input([4]), layers.Dense(1, kernel_initializer=initializer)]
  )


def _adapts() -> tf.keras.Model:
  layer = layers.Normalization()
  layer.adapt(_numbers(4))
  return tf.keras.Sequential([tf.keras.Input([4]), layer, layers.Dense(1)])


_OUTSIDE = tf.Variable(2.0)


class _ReadsOutside(layers.Layer):
  def call(self, inputs):
    return inputs * _OUTSIDE


class _Calls(layers.Layer):
  """Has a weight, and does anything."""

  def __init__(self, function, **options):
    super().__init__(**options)
    self.function = function

  def get_config(self):
    return {**super().get_config(), 'function': self.function}

  def build(self, _):
    self.number = self.add_weight('number', [4])

  def call(self, inputs):
    return self.function(self, inputs)


@tf.autograph.experimental.do_not_convert
def _decides(layer, inputs):
  return inputs * layer.number if tf.reduce_all(inputs > 0) else inputs


@tf.autograph.experimental.do_not_convert
def _reads_sparsely(layer, inputs):
  return inputs * layer.number.sparse_read([0])


class _Drawn(layers.Layer):
  """Draws a value eagerly, where nobody sees it."""

  def build(self, _):
    self.number = tf.Variable(tf.random.normal([4]), name='number')

  def call(self, inputs):
    return inputs * self.number


_SHARED = layers.Dense(1, name='shared')


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      _norm_inside,
      r"Layer 'norm' \(BatchNormalization\) changes its variables while it "
      'trains, .* Use .*GroupNormalization',
    ),
    (
      _stack(
        layers.Conv2D(2, 2),
        layers.BatchNormalization(),
        layers.Flatten(),
        inputs=(4, 4, 1),
      ),
      r"Layer 'batch_normalization.*' \(BatchNormalization\) changes its",
    ),
    (_stack(_Counts(name='counts')), r"Layer 'counts' \(_Counts\) changes its"),
    (
      _stack(layers.Dense(2, activity_regularizer='l2', name='active')),
      "Layer 'active' has an activity regularizer, whose value would depend on "
      'padded examples. Regularize its weights instead',
    ),
    (
      _stack(_AddsLoss()),
      'A loss that a layer adds with `add_loss` depends on its inputs, .* Add '
      'losses of weights only, or compute the term in the loss function',
    ),
    (
      _stack(_Draws(name='noise')),
      r"The operation '.*noise/.*' \(RandomUniform\) draws random numbers from "
      "hidden state, .* Use Keras's own initializers and random layers",
    ),
    (_stack(_Draws(inside=True)), r'\(RandomUniform\) draws random numbers'),
    (
      _initialized_by(_HiddenInitializer()),
      r'\(RandomStandardNormal\) draws random numbers',
    ),
    (
      _initialized_by(lambda shape, dtype: tf.random.normal(shape)),
      r'\(RandomStandardNormal\) draws random numbers',
    ),
    (
      _stack(layers.Dense(2, kernel_constraint='non_neg', name='positive')),
      "'positive/kernel' has a constraint, which would not be applied.*"
      'Use a regularizer',
    ),
    (
      _stack(layers.RandomFlip(name='flip'), inputs=(4, 4, 1)),
      r"Layer 'flip' \(RandomFlip\) keeps a random generator, .* augment "
      'examples before you pack them',
    ),
    (
      _mixed_precision,
      "Layer 'half' has weights of float32 and computes in bfloat16. .* Build "
      'the model with the dtype policy float32',
    ),
    (
      _loads_weights,
      'changes a variable while the model is built. Give trained values with '
      '`initial_weights` instead of loading them in the builder',
    ),
    (
      lambda: tf.keras.Sequential([tf.keras.Input([4]), _SHARED]),
      r"The variables \['kernel:0', 'bias:0'\] exist before the "
      'model is built. Create every layer inside the callable',
    ),
    (
      lambda: tf.keras.Sequential([layers.Dense(1)]),
      "Model 'sequential.*' does not say what its inputs are. Pass "
      '`inputs=tf.TensorSpec',
    ),
    (lambda: 'model', 'must return a `tf.keras.Model`, it returned str'),
    (
      _one(),
      'Pass a callable that makes the Keras model, not the model.*pass it as '
      '`initial_weights` besides.*clone_model',
    ),
    ('model', 'Pass a callable that makes the Keras model.*found a str'),
    (
      _stack(layers.SpectralNormalization(layers.Dense(3), name='spectral')),
      r"Layer 'spectral' \(SpectralNormalization\) changes its weights while "
      'it trains.*orthogonal_regularizer',
    ),
    (
      _stack(layers.Normalization(name='norm')),
      r"Layer 'norm' waits for `adapt`, .*Normalization\(mean=adapted.mean,",
    ),
    (
      _stack(type('Mine', (layers.Normalization,), {})(name='norm')),
      r"Layer 'norm' waits for `adapt`",
    ),
    (_adapts, r'A layer waits for `adapt`, which cannot be called while a'),
    (
      lambda: tf.keras.Sequential([tf.keras.Input([None, 4]), layers.GRU(2)]),
      r'An input has the shape \[None, 4\], but examples are packed in arrays '
      'of one shape. Say how long they are',
    ),
    (
      _stack(_ReadsOutside()),
      'reads a variable or a table that is none of its own. Make it inside',
    ),
    (
      _stack(_Calls(_decides)),
      'The model cannot be traced: .*Decide with `tf.where`',
    ),
    (
      _stack(_Calls(_reads_sparsely)),
      'can be called with its variables, but not with tensors in their place: '
      '.*sparse_read.* Make weights with `self.add_weight`, and do no more in',
    ),
    (
      _stack(_Drawn()),
      "Variable '.*number' begins with another value each time that the model "
      'is built. Make it with `self.add_weight',
    ),
    (
      lambda: tf.keras.Sequential([tf.keras.Input([4]), layers.Flatten()]),
      'The model has no trainable variable',
    ),
  ],
)
def test_models_that_are_no_pure_functions_are_refused(build, message):
  if build is not _SHARED and not _SHARED.built:
    _SHARED.build([None, 4])
  with pytest.raises(models.ModelError, match=message):
    keras_models.from_keras(build, loss=_MSE)


class _OwnTable(layers.Layer):
  """Looks words up in a table that the user made."""

  def __init__(self):
    super().__init__(name='own')
    words = tf.lookup.KeyValueTensorInitializer(['a', 'b'], [1, 2])
    self._table = tf.lookup.StaticHashTable(words, 0)

  def call(self, inputs):
    return self._table.lookup(inputs)


def _embedding(
  layer: Callable[[], layers.Layer], dtype: tf.DType = tf.string
) -> Callable[[], tf.keras.Model]:
  """A model that numbers its inputs with a layer and embeds the numbers."""
  return lambda: tf.keras.Sequential(
    [tf.keras.Input([1], dtype=dtype), layer(), layers.Embedding(9, 1)]
  )


@pytest.mark.parametrize(
  ('build', 'name'),
  [
    (
      _embedding(lambda: layers.StringLookup(vocabulary=['a'], name='words')),
      r"'words' \(StringLookup\)",
    ),
    (
      _embedding(
        lambda: layers.IntegerLookup(vocabulary=[7], name='ids'), tf.int64
      ),
      r"'ids' \(IntegerLookup\)",
    ),
    (
      _embedding(lambda: layers.TextVectorization(vocabulary=['a'])),
      r"'string_lookup.*' \(StringLookup\)",
    ),
    (_embedding(_OwnTable), r"'own' \(_OwnTable\)"),
  ],
  ids=['strings', 'integers', 'text', 'own'],
)
def test_layers_with_a_lookup_table_are_refused(build, name):
  with pytest.raises(
    models.ModelError,
    match=f'Layer {name} looks its inputs up in a table, which a pure function '
    'cannot hold. Map strings to integers before you pack .*Vocabulary.*, or '
    'use `tf.keras.layers.Hashing`',
  ):
    keras_models.from_keras(build, loss=_MSE)


def test_hashing_needs_no_table():
  def hashing() -> layers.Layer:
    return layers.Hashing(9)

  model = keras_models.from_keras(_embedding(hashing), loss=_MSE)
  weights = {tiers.GLOBAL: model.initial_weights(tiers.GLOBAL, [1, 2])}
  words = tf.constant([['a'], ['some'], ['words']])
  predict = tf.function(
    lambda words: model.predict(
      weights, {}, words, training=False, seed=tf.constant([1, 2])
    )[0],
    autograph=False,
  )
  (table,) = weights[tiers.GLOBAL].values()
  np.testing.assert_array_equal(
    predict(words), tf.gather(table, hashing()(words))
  )


def _changing(*sizes: tuple[int, ...]) -> Callable[[], tf.keras.Model]:
  """Builds another model with every call."""
  waiting = list(sizes)

  def build() -> tf.keras.Model:
    units = waiting.pop(0) if len(waiting) > 1 else waiting[0]
    return tf.keras.Sequential(
      [tf.keras.Input([4]), *(layers.Dense(n) for n in units)]
    )

  return build


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      _changing((3, 2), (4, 2)),
      r"asks for a variable .* of shape \(4, 4\) where it had 'dense/kernel' "
      r'of shape \(4, 3\) before. The callable given to `from_keras` must '
      'build the same model every time',
    ),
    (
      _changing((3, 2), (3,)),
      r"no longer asks for the variables \['dense_1/kernel', 'dense_1/bias'\]",
    ),
    (
      _changing((3, 2), (3, 2, 2)),
      r'asks for the variables .*which it had not before',
    ),
  ],
)
def test_a_model_that_changes_from_call_to_call_is_refused(build, message):
  with pytest.raises(models.ModelError, match=message):
    keras_models.from_keras(build, loss=_MSE)


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


class _Starts(tf.keras.metrics.Metric):
  def __init__(self):
    super().__init__(name='starts')
    self.product = self.add_weight('product', initializer='ones')

  def update_state(self, y_true, y_pred, sample_weight=None):
    del y_true, y_pred, sample_weight

  def result(self):
    return self.product


class _TakesNoWeight(tf.keras.metrics.Metric):
  def update_state(self, y_true, y_pred):
    del y_true, y_pred

  def result(self):
    return 0.0


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
      {'build': _functional, 'local': 'head', 'labels': tf.TensorSpec([3])},
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
      {'metrics': lambda: [tf.keras.metrics.AUC(name='num_examples')]},
      "distinct names other than .*'num_examples'",
    ),
    (
      {'metrics': lambda: [3]},
      '3 is no metric. Pass Keras metrics, their names, or functions',
    ),
    ({'metrics': {'a': 'mse'}}, 'Pass `metrics` as a list.*found a dict'),
    ({'metrics': lambda: None}, 'Pass `metrics` as a list.*found a NoneType'),
    (
      {'metrics': ['mae', 'meanness']},
      "Keras has no metric 'meanness'. Pass one of its names",
    ),
    (
      {'metrics': [_Configured(0.5)]},
      r"Metric 'configured' \(_Configured\) cannot be copied from its "
      r'configuration: .*metrics=lambda: \[...\]',
    ),
    ({'loss': 'kindness'}, "Keras has no loss 'kindness'. Pass one of its"),
    ({'loss': None}, 'loss=None is no loss. Pass a Keras loss or its name'),
    (
      {'metrics': lambda: [_ignores_weights()]},
      "The state of metric 'ignorant' .* changed by an example of weight 0, so "
      'that it would count padding .*Honour `sample_weight`',
    ),
    (
      {'metrics': lambda: [_Starts()]},
      "The state of metric 'starts' does not begin with zeros",
    ),
    (
      {'metrics': lambda: [_TakesNoWeight(name='none')]},
      "unexpected keyword argument 'sample_weight'",
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
      **{'build': _one, 'loss': _MSE, 'local': 'a', **options}
    )


def test_several_outputs_need_the_spec_of_a_label():
  with pytest.raises(
    models.ModelError, match='The model has several outputs. Pass the spec of'
  ):
    keras_models.from_keras(_two_outputs, loss=_loss_of_two)


def test_weights_that_do_not_fit_a_keras_model_are_refused():
  model = keras_models.from_keras(_one, loss=_MSE, local='a')
  shared, own = (model.initial_weights(tier, _SEED) for tier in model.tiers)
  with pytest.raises(
    models.ModelError,
    match=r"no values for the variables \['a/kernel', 'a/bias'\]",
  ):
    model.to_keras(shared)
  own['a/kernel'] = np.zeros([1, 2])
  with pytest.raises(
    models.ModelError,
    match=r"'a/kernel' has shape \(1, 1\), the value given for it \(1, 2\)",
  ):
    model.to_keras(shared, own)
