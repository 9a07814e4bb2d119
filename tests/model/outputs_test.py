"""Several outputs: losses, their weights and metrics as in Keras."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.model import keras_models
from tff_partial.model.keras_variables import ModelError
from tff_partial.phases import Phase
from tff_partial.phases import sgd

keras = tf.keras
_DRAW = np.random.default_rng(0)
_COUNT = 12
_LOSSES = {'rating': 'mse', 'genre': 'sparse_categorical_crossentropy'}
_SCALES = {'genre': 0.3}


def _drawn(seed: int) -> Any:
  return keras.initializers.RandomNormal(seed=seed)


def _heads() -> tuple[Any, Any, Any]:
  x = keras.Input([4])
  hidden = keras.layers.Dense(5, 'tanh', kernel_initializer=_drawn(1))(x)
  rating = keras.layers.Dense(2, kernel_initializer=_drawn(2), name='own')
  genre = keras.layers.Dense(
    3, 'softmax', kernel_initializer=_drawn(3), name='shared'
  )
  return x, rating(hidden), genre(hidden)


def build_named() -> tf.keras.Model:
  x, rating, genre = _heads()
  return keras.Model(x, {'rating': rating, 'genre': genre})


def build_listed() -> tf.keras.Model:
  x, rating, genre = _heads()
  return keras.Model(x, [rating, genre])


_X = _DRAW.normal(size=[_COUNT, 4]).astype(np.float32)
_Y = {
  'rating': _DRAW.normal(size=[_COUNT, 2]).astype(np.float32),
  'genre': _DRAW.integers(0, 3, _COUNT).astype(np.int32),
}
_WEIGHT = _DRAW.uniform(0.5, 2, [_COUNT, 2]).astype(np.float32)


def _model(build: Any = build_named, **options: Any) -> Any:
  metrics = {'genre': ['accuracy'], 'rating': ['mae']}
  return keras_models.from_keras(
    build,
    **{'loss': _LOSSES, 'loss_weights': _SCALES, 'metrics': metrics, **options},
  )


@pytest.mark.parametrize(
  'form',
  [
    'named',
    pytest.param('listed', marks=pytest.mark.slow),
    pytest.param('weighted by output', marks=pytest.mark.slow),
  ],
)
def test_objective_and_metrics_are_those_of_keras(form: str) -> None:
  """One step of all examples, and the evaluation after it."""
  fields: dict[str, Any] = {'x': _X, 'y': _Y, 'weight': _WEIGHT[:, 0]}
  compiled: dict[str, Any] = {
    'loss': _LOSSES,
    'loss_weights': {'rating': 1, **_SCALES},
  }
  weight: Any = _WEIGHT[:, 0]
  if form == 'listed':
    names = list(_LOSSES)
    compiled = {'loss': list(_LOSSES.values()), 'loss_weights': [1.0, 0.3]}
    model = _model(build_listed, metrics={1: 'accuracy', 0: 'mae'}, **compiled)
    fields['y'] = tuple(_Y[name] for name in names)
    labels: Any = list(fields['y'])
  elif form == 'named':
    model, labels = _model(), _Y
  else:
    model, labels = _model(weights=tf.TensorSpec([2])), _Y
    fields['weight'] = _WEIGHT
    weight = {name: _WEIGHT[:, k] for k, name in enumerate(_LOSSES)}
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(0.5), batch_size=None)
  )
  data = tff_partial.pack({'a': fields}, process.example_spec)
  with runtimes.native():
    result = tff_partial.train(process, data, rounds=1, clients_per_round=1)
    measured = tff_partial.evaluate(
      tff_partial.EvaluationSet(algorithms.build_fed_avg_eval(model), data),
      result.weights,
    )
  made = model.to_keras(process.get_model_weights(process.initialize()))
  weighted = ['accuracy'], ['mae']
  by_name = {'genre': weighted[0], 'rating': weighted[1]}
  made.compile(
    keras.optimizers.SGD(0.5),
    **compiled,
    weighted_metrics=by_name if form != 'listed' else list(weighted[::-1]),
  )
  if form == 'listed':
    weight = [weight, weight]
  made.fit(_X, labels, _COUNT, sample_weight=weight, verbose=0)
  if form == 'weighted by output':
    weight = {name: weight[name] for name in _LOSSES}
  expected = made.evaluate(
    _X, labels, _COUNT, sample_weight=weight, verbose=0, return_dict=True
  )
  ours = {'loss': 'loss', 'genre_accuracy': '1_accuracy', 'rating_mae': '0_mae'}
  theirs = {'genre_accuracy': 'shared_accuracy', 'rating_mae': 'own_mae'}
  for name, listed in ours.items():
    mine = measured[listed if form == 'listed' else name]
    found = expected.get(name, expected.get(theirs.get(name)))
    assert mine == pytest.approx(found, rel=1e-6), name
  assert measured['loss'] != pytest.approx(result.train['loss'], rel=1e-3)


@pytest.mark.slow
def test_one_head_is_private_and_one_shared() -> None:
  model = _model(local='own')
  process = algorithms.build_fed_recon(model)
  data = tff_partial.pack(
    {name: {'x': _X, 'y': _Y} for name in 'ab'}, process.example_spec
  )
  result = tff_partial.train(process, data, rounds=2, clients_per_round=2)
  found = tff_partial.personalise(result, data, 'a').predict(_X, verbose=0)
  assert found['rating'].shape == (_COUNT, 2)
  assert found['genre'].shape == (_COUNT, 3)
  shared = process.get_model_weights(process.initialize()).trainable
  assert 'own/kernel' not in shared['global']


def test_labels_lie_within_their_classes() -> None:
  model = _model()
  assert 'y.genre: int32 [], 0 to 2' in repr(model.example_spec)
  assert 'rating: mean_squared_error' in repr(model)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'loss': {'price': 'mse'}, 'loss_weights': None},
      r"no outputs \['price'\]",
    ),
    ({'loss': {'rating': None}}, 'no output has a loss'),
    ({'loss_weights': {'price': 1.0}}, r"\['price'\] are no outputs"),
    ({'loss_weights': {'genre': float('nan')}}, 'expected a finite number'),
    ({'loss': 'mse', 'loss_weights': _SCALES}, 'there is one loss'),
    (
      {
        'loss': {'rating': keras.losses.MeanSquaredError(reduction='sum')},
        'loss_weights': None,
      },
      r"the outputs \['rating'\] are sums",
    ),
    ({'metrics': {'price': ['mae']}}, "there is no label 'price'"),
    ({'weights': tf.TensorSpec([3])}, 'one for each output with a loss'),
    ({'loss': 'mse', 'loss_weights': None}, 'Give each a loss'),
  ],
)
def test_what_no_output_has_is_refused(options: Any, message: str) -> None:
  with pytest.raises(ModelError, match=message):
    _model(**options)


def test_metrics_of_listed_outputs_find_their_labels() -> None:
  def build() -> tf.keras.Model:
    x = keras.Input([3])
    return keras.Model(x, [keras.layers.Dense(1)(x) for _ in range(3)])

  options: dict[str, Any] = {'loss': [None, 'mse', 'mse']}
  metrics = tff_partial.from_keras(
    build, metrics={1: 'mae', 2: 'mae'}, **options
  ).metrics
  labels = tuple(tf.constant([[value]]) for value in (10.0, 20.0))
  predictions = tuple(tf.constant([[value]]) for value in (0.0, 1.0, 2.0))
  state = metrics.update(
    metrics.initial_state(), labels, predictions, tf.ones([1])
  )
  found = {n: float(f(state[n])) for n, f in metrics.finalizers().items()}
  assert found == {'1_mae': 9.0, '2_mae': 18.0}
  with pytest.raises(ModelError, match='there is no label 0'):
    tff_partial.from_keras(build, metrics={0: 'mae'}, **options)


def test_a_masked_output_beside_another_is_refused() -> None:
  def build() -> tf.keras.Model:
    x = keras.Input([3], dtype='int32')
    steps = keras.layers.Embedding(4, 2, mask_zero=True)(x)
    mean = keras.layers.GlobalAveragePooling1D()(steps)
    return keras.Model(x, {'rating': mean, 'steps': steps})

  with pytest.raises(ModelError, match="'steps' has a mask, and so means over"):
    _model(
      build,
      loss={'rating': 'mse', 'steps': 'mse'},
      loss_weights=None,
      metrics=(),
    )
  ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
  with pytest.raises(ModelError, match="loss of 'genre' has a mask"):
    _model(loss={**_LOSSES, 'genre': ignoring})


def test_a_loss_of_an_example_is_the_same_however_it_is_weighted() -> None:
  labels = {name: tf.constant(label) for name, label in _Y.items()}
  predictions = {
    'rating': tf.zeros([_COUNT, 2]),
    'genre': tf.fill([_COUNT, 3], 1 / 3),
  }
  one, by_output = (
    _model(weights=tf.TensorSpec(shape)).loss(
      labels, predictions, tf.fill([_COUNT, *shape], 0.5), tf.range(_COUNT) < 9
    )
    for shape in ([], [2])
  )
  np.testing.assert_allclose(by_output.of_examples, one.of_examples, rtol=1e-6)
  assert by_output.num_elements.numpy() == one.num_elements.numpy() == 9
  np.testing.assert_allclose(by_output.objective, one.objective, rtol=1e-6)


def test_labels_have_the_order_of_the_weights_of_outputs() -> None:
  specs = {name: tf.TensorSpec(_Y[name].shape[1:]) for name in sorted(_LOSSES)}
  model = _model(labels=specs, weights=tf.TensorSpec([2]))
  assert list(model.example_spec['y']) == list(_LOSSES)
