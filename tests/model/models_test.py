"""Keras models as pure functions over named weights in three tiers."""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import kinds
from tests.support import planted
from tests.support.stacks import dense
from tests.support.stacks import stack
from tff_partial import phases
from tff_partial import tiers
from tff_partial.model import keras_functions
from tff_partial.model import keras_models
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.sparse import lookups

layers = tf.keras.layers
_SEED = np.array([5, 6], np.int32)
_BATCH = 6
_MSE = tf.keras.losses.MeanSquaredError()


@dataclasses.dataclass(frozen=True)
class Kind:
  """A Keras model and what to give it."""

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
  'functional': Kind(kinds.functional, _numbers(4), _numbers(2)),
  'sequential': Kind(kinds.sequential, _numbers(4), _numbers(2)),
  'without inputs': Kind(
    kinds.without_inputs, _numbers(4), _numbers(2), options=_VECTOR
  ),
  'subclassed': Kind(
    kinds.Subclassed, _numbers(4), _numbers(2), options=_VECTOR
  ),
  'nested': Kind(kinds.nested, _numbers(4), _numbers(2)),
  'dict of inputs': Kind(
    lambda: kinds.two_inputs(as_dict=True),
    {'traits': _numbers(4), 'word': _words(7, 2)},
    _numbers(2),
  ),
  'list of inputs': Kind(
    lambda: kinds.two_inputs(as_dict=False),
    {'traits': _numbers(4), 'word': _words(7, 2)},
    _numbers(2),
  ),
  'sequences': Kind(kinds.sequences, _SENTENCES, _SENTENCES[:, ::-1], _SPARSE),
  'frozen': Kind(kinds.frozen, _numbers(4), _numbers(2)),
  'tied': Kind(
    kinds.tied, _words(7), _words(7), _SPARSE, options={'local': 'twice'}
  ),
  'mixed types': Kind(kinds.mixed, _numbers(4), _numbers(2)),
  'scalar': Kind(kinds.scalar, _numbers(4), _numbers()),
  'given values': Kind(
    kinds.given_values, {'word': _words(7), 'traits': _numbers(3)}, _numbers(2)
  ),
  'sum': Kind(
    kinds.functional,
    _numbers(4),
    _numbers(2),
    tf.keras.losses.Huber(reduction='sum'),
  ),
  'function': Kind(
    kinds.functional, _numbers(4), _numbers(2), tf.keras.losses.log_cosh
  ),
  'two outputs': Kind(
    kinds.two_outputs,
    _numbers(4),
    _numbers(2),
    kinds.loss_of_two,
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


# Tracing an LSTM takes as long as all others together.
@pytest.fixture(
  scope='module',
  name='made',
  params=[
    pytest.param(kind, marks=pytest.mark.slow if kind == 'sequences' else ())
    for kind in KINDS
  ],
)
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
      tuple(vars(loss).values()),
      tf.nest.map_structure(tf.convert_to_tensor, gradients),
    )

  batch = tf.nest.map_structure(
    lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
    [*model.example_spec.values(), tf.TensorSpec([], tf.bool)],
  )
  return tracing.unconverted(compute).get_concrete_function(
    tf.nest.map_structure(tf.TensorSpec.from_tensor, weights), *batch
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
  planted.assert_close(found, expected, relative=1e-5)
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


def test_trained_weights_of_another_type_are_converted():
  wide = stack(2, dense(1, dtype='float64', name='head'))()
  build = stack(2, dense(1, name='head'))
  model = keras_models.from_keras(build, loss=_MSE, initial_weights=wide)
  found = model.initial_weights(tiers.GLOBAL, _SEED)['head/kernel']
  assert found.dtype == tf.float32
  np.testing.assert_allclose(found, wide.get_weights()[0], rtol=1e-6)


def test_what_becomes_a_keras_model_predicts_the_same(made):
  back = made.partial.to_keras(*made.weights.values())
  assert back is not made.keras
  planted.assert_same(back(made.kind.inputs), made.keras(made.kind.inputs))
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
    if made.kind.build is kinds.scalar:
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
  np.testing.assert_allclose(
    padded.of_examples, [*real.of_examples, 0.0, 0.0], rtol=1e-6
  )
  np.testing.assert_allclose(np.sum(real.of_examples), real.total, rtol=1e-6)
  # Nor does it matter what padding consists of.
  _, others = _objective(made, np.array([0, 1, 2, 5, 4]), np.arange(5) < 3)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(gradient, others[name], rtol=1e-6, atol=1e-7)


# ---- first values ------------------------------------------------------------


def test_first_values_follow_from_the_seed():
  model = keras_models.from_keras(kinds.functional, loss=_MSE, local='head')
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
  build = stack(3, *(dense(3, name=name) for name in 'abc'))
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


@pytest.mark.slow
def test_first_values_may_be_given_in_the_model():
  model = keras_models.from_keras(kinds.given_values, loss='mse', local='words')
  np.testing.assert_array_equal(
    model.initial_weights(tiers.LOCAL, _SEED)['words/embeddings'], kinds.TABLE
  )
  shared = model.initial_weights(tiers.GLOBAL, _SEED)
  assert shared['factor'].numpy().tolist() == [0.5] * 3
  assert shared['Variable'].numpy() == 0.25
  np.testing.assert_array_equal(shared['scale'], np.float32([0.1]))
  assert shared['set'].numpy() == 3.0
  frozen = model.frozen_weights()
  np.testing.assert_array_equal(frozen['fixed/embeddings'], 2 * kinds.TABLE)
  # What stands in a table's place when it is trained by rows is no variable.
  work = [phases.Phase(batch_size=4, optimizer=phases.sgd(0.1), measured=True)]
  model = keras_models.from_keras(kinds.given_values, loss='mse', local='head')
  assert lookups.Tables(model, work).names == ('words/embeddings',)


def test_first_values_may_come_from_a_trained_model():
  trained = kinds.frozen()
  trained(_numbers(4))
  values = [np.full(w.shape, i) for i, w in enumerate(trained.get_weights())]
  trained.set_weights(values)
  model = keras_models.from_keras(
    kinds.frozen, loss=_MSE, local='head', initial_weights=trained
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
    match=r"nor a part of it: its variables .*\('dense.*/kernel"
    r"', \(4, 2\)\)",
  ):
    keras_models.from_keras(kinds.functional, loss=_MSE, initial_weights=other)


def test_layers_of_a_trained_model_are_told_by_their_names():
  def build(*names):
    x = tf.keras.Input([1])
    made = [layers.Dense(1, use_bias=False, name=n)(x) for n in names]
    return tf.keras.Model(x, layers.Subtract()(made))

  trained = build('b', 'a')
  trained.get_layer('a').set_weights([np.float32([[7.0]])])
  model = keras_models.from_keras(
    lambda: build('a', 'b'), loss=_MSE, initial_weights=trained
  )
  assert model.initial_weights(tiers.GLOBAL, _SEED)['a/kernel'] == 7


_two_layers = stack(3, dense(2, 'relu', name='body'), dense(2, name='head'))


@pytest.mark.parametrize('name', ['model.keras', 'model', 'model.weights.h5'])
def test_first_values_may_come_from_a_file(name, tmp_path):
  trained, path = _two_layers(), tmp_path / name
  if path.suffix == '.h5':
    trained.save_weights(path)
  else:
    trained.save(path)
  model = keras_models.from_keras(_two_layers, loss=_MSE, initial_weights=path)
  for name, value in model.initial_weights(tiers.GLOBAL, _SEED).items():
    layer, kind = name.split('/')
    held = getattr(trained.get_layer(layer), kind)
    np.testing.assert_array_equal(value, held)


def test_a_backbone_gives_the_values_of_its_names():
  whole = _two_layers()
  body = tf.keras.Model(whole.input, whole.get_layer('body').output)
  model = keras_models.from_keras(
    _two_layers, loss=_MSE, initial_weights=body, seed=1
  )
  found = model.initial_weights(tiers.GLOBAL, _SEED)
  kernels = [whole.get_layer(name).kernel for name in ('body', 'head')]
  np.testing.assert_array_equal(found['body/kernel'], kernels[0])
  assert np.any(found['head/kernel'] != kernels[1])
  head = stack(2, dense(2, name='head'))
  for given, message in (
    ('there/is/none.keras', 'cannot be loaded: .*Give a file'),
    (stack(2, head, head)(), "head/kernel', .* counterpart each"),
  ):
    with pytest.raises(models.ModelError, match=message):
      keras_models.from_keras(_two_layers, loss=_MSE, initial_weights=given)


def test_names_that_count_other_layers_are_warned_of(caplog):
  # As Keras names it after another one. In the callable it would be `dense`.
  trained = stack(3, dense(3, name='dense_1'))()
  build = stack(3, dense(3), dense(3))
  keras_models.from_keras(build, loss=_MSE, initial_weights=trained)
  assert "the layers ['dense_1'] got their names" in caplog.text


@pytest.mark.slow
def test_frozen_variables_are_in_no_tier():
  model = keras_models.from_keras(kinds.frozen, loss=_MSE, local='head')
  frozen = {
    *('body/kernel', 'body/bias', 'norm/gamma', 'norm/beta'),
    *('norm/moving_mean', 'norm/moving_variance'),
  }
  assert set(model.frozen_weights()) == frozen
  assert set(model.specs(tiers.GLOBAL)) == {'middle/kernel', 'middle/bias'}
  assert set(model.specs(tiers.LOCAL)) == {'head/kernel', 'head/bias'}
  kernel = model.frozen_weights()['body/kernel'].numpy()
  assert kernel.any()
  np.testing.assert_array_equal(model.frozen_weights()['body/kernel'], kernel)
  other = keras_models.from_keras(kinds.frozen, loss=_MSE, local='head', seed=1)
  assert (other.frozen_weights()['body/kernel'].numpy() != kernel).any()


def test_models_of_lists_take_tuples():
  model = keras_models.from_keras(
    lambda: tf.keras.Sequential([layers.Concatenate(), layers.Dense(1)]),
    loss='mse',
    inputs=[tf.TensorSpec([2]), tf.TensorSpec([3])],
  )
  assert model.example_spec['x'] == (tf.TensorSpec([2]), tf.TensorSpec([3]))


def test_a_model_says_what_it_consists_of():
  model = keras_models.from_keras(
    lambda: kinds.two_inputs(as_dict=True),
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
  assert 'never trained: ' in repr(
    keras_models.from_keras(kinds.frozen, loss=_MSE)
  )


def test_weights_that_do_not_fit_a_keras_model_are_refused():
  model = keras_models.from_keras(kinds.one, loss=_MSE, local='a')
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
