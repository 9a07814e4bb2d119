"""Exported models: what devices compute is what the simulation computes."""

import collections
import json
import pathlib
import runpy
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tasks.emnist import models as emnist_models
from tasks.movielens import models as movielens_models
from tests.support import commands
from tests.support import planted
import tff_partial
from tff_partial import errors
from tff_partial import evaluation
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client.client_work import ModelWeights
from tff_partial.data import vocabularies
from tff_partial.exporting import exports
from tff_partial.exporting import running
from tff_partial.exporting.errors import ExportError
from tff_partial.model import models
from tff_partial.templates import rating_intervals
from tff_partial.templates import rating_posteriors

_SIZE, _COUNT = 12, 7
_PHASE = tff_partial.Phase(batch_size=3, epochs=2, shuffle=True)


def _rating_model() -> models.PartialModel:
  return tff_partial.from_keras(
    lambda: movielens_models.build_matrix_factorization(
      9, 3, biases=True, mean=3.0, l2=0.1
    ),
    local=movielens_models.LOCAL_LAYERS,
    loss=tf.keras.losses.MeanSquaredError(),
  )


def _image_model() -> models.PartialModel:
  return tff_partial.from_keras(
    lambda: emnist_models.build_classifier('cnn', (8, 8), 3, 255),
    local='head',
    loss=emnist_models.classification_loss(),
  )


def _text_model() -> models.PartialModel:
  def build() -> tf.keras.Model:
    words = tf.keras.Input([4], dtype=tf.int32)
    vectors = tf.keras.layers.Embedding(6, 5, name='words')(words)
    mean = tf.keras.layers.GlobalAveragePooling1D()(vectors)
    own = tff_partial.layers.PrivateVector(5, name='own')(words)
    next_word = tf.keras.layers.Dense(6, name='next')
    return tf.keras.Model(words, next_word(mean + own))

  return tff_partial.from_keras(
    build,
    local='own',
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )


def _normalized_model() -> models.PartialModel:
  def build() -> tf.keras.Model:
    x = tf.keras.Input([4])
    hidden = tf.keras.layers.Dense(5)(x)
    hidden = tf.keras.layers.BatchNormalization(name='norm')(hidden)
    return tf.keras.Model(x, tf.keras.layers.Dense(1, name='own')(hidden))

  return tff_partial.from_keras(
    build, local='own', loss='mse', state='averaged'
  )


class _Case(NamedTuple):
  """A model in both formats, and what a client of the simulation makes.

  Attributes:
    exported: What was written.
    support: What `reconstruct` reads: seven examples in the room of twelve.
    expected: The client's local weights in the simulation, by variable.
    keras_model: The client's own model.
  """

  exported: exports.Exported
  support: dict[str, np.ndarray]
  expected: dict[str, np.ndarray]
  keras_model: tf.keras.Model


_MODELS = {
  'ratings': (_rating_model, [], 9, np.float32),
  'images': (_image_model, [8, 8], 255, np.int32),
  'text': (_text_model, [4], 6, np.int32),
  'normalized': (_normalized_model, [4], 9, np.float32),
}


@pytest.fixture(scope='module', params=list(_MODELS), name='case')
def fixture_case(request, tmp_path_factory) -> _Case:
  folder = tmp_path_factory.mktemp('exported') / request.param
  return _exported(request.param, _PHASE, folder)


def _exported(
  kind_of_model: str, phase: tff_partial.Phase, folder: pathlib.Path
) -> _Case:
  build, shape, most, labels = _MODELS[kind_of_model]
  model = build()
  random = np.random.default_rng(0)
  kind = model.example_spec['x'].dtype.as_numpy_dtype
  x = random.integers(0, most, [_COUNT, *shape]).astype(kind)
  y_shape = [_COUNT, *model.example_spec['y'].shape]
  y = random.integers(0, 3, y_shape).astype(labels)
  shared = model.initial_weights(tiers.GLOBAL, random_bits.derive('shared'))
  weights = ModelWeights({tiers.GLOBAL: shared}, {})
  exported = tff_partial.export(
    model, weights, folder, reconstruct=phase, num_support=_SIZE
  )
  same = tff_partial.splits.same()
  simulated = evaluation.build_query_evaluation(
    model, train=(tiers.LOCAL,), personalise=phase, split=same
  )
  client = collections.OrderedDict(
    examples=collections.OrderedDict(x=x, y=y, weight=np.ones(_COUNT, 'f')),
    count=np.int32(_COUNT),
    seed=exported.seed,
  )
  own = simulated.personalise(weights, (), client)
  expected = {name: np.asarray(own[name]) for name in model.specs(tiers.LOCAL)}
  support = {
    'x': running.padded(x, _SIZE),
    'y': running.padded(y, _SIZE),
    'count': np.int32(_COUNT),
  }
  return _Case(exported, support, expected, model.to_keras(own))


@pytest.fixture(scope='module', params=exports.FORMATS, name='loaded')
def fixture_loaded(request, case) -> dict[str, running.Runner]:
  return running.load(case.exported.paths[request.param])


@pytest.fixture(name='device')
def fixture_device(loaded) -> dict[str, running.Runner]:
  loaded['reset']()
  return loaded


def test_texts_are_padded_with_empty_ones():
  for dtype in (object, 'U2'):
    assert running.padded(np.array(['ab'], dtype), 2).tolist() == ['ab', '']


# ---- the same as the simulation ----------------------------------------------


@pytest.mark.slow
def test_a_device_reconstructs_as_the_simulation_does(case, device):
  found = device['reconstruct'](**case.support)
  names = json.loads((case.exported.folder / 'signatures.json').read_text())
  assert set(names['local'].values()) == set(case.expected)
  assert set(found) == set(names['local'])
  first = device['reset']()
  for name, variable in names['local'].items():
    np.testing.assert_allclose(
      found[name], case.expected[variable], rtol=0, atol=1e-6
    )
    assert np.abs(found[name] - first[name]).max() > 1e-3  # It did train.


@pytest.mark.slow
def test_a_device_whose_steps_end_in_no_number_keeps_what_it_had(tmp_path):
  case = _exported('normalized', _PHASE, tmp_path / 'exported')
  y = np.full_like(case.support['y'], np.nan)
  for path in case.exported.paths.values():
    device = running.load(path)
    trained = device['train'](**case.support)
    planted.assert_same(device['train'](**{**case.support, 'y': y}), trained)


@pytest.mark.slow
@pytest.mark.parametrize('kind', list(_MODELS))
def test_a_device_solves_as_the_simulation_does(kind, tmp_path):
  phase = tff_partial.Phase(optimizer=tff_partial.Exact(ridge=2.0))
  case = _exported(kind, phase, tmp_path / 'exported')
  for path in case.exported.paths.values():
    found = running.load(path)['reconstruct'](**case.support)
    for name, variable in case.exported.local.items():
      np.testing.assert_allclose(
        found[name], case.expected[variable], rtol=0, atol=1e-5
      )


@pytest.mark.slow
@pytest.mark.parametrize('rated_items', [False, True])
def test_a_device_has_the_intervals_of_the_simulation(tmp_path, rated_items):
  draw = np.random.default_rng(0)
  model = rating_posteriors.build_model(9, 2, rated_items=rated_items)
  process = tff_partial.algorithms.build_fed_als(model)
  ratings = {}
  for k in range(12):
    x, y = draw.integers(0, 9, 6), draw.normal(size=6)
    ratings[f'u{k}'] = {'x': np.int32(x), 'y': np.float32(y)}
  clients = tff_partial.pack(ratings, process.example_spec)
  result = tff_partial.train(process, clients, rounds=3, clients_per_round=12)
  exported = tff_partial.export(
    *(model, result.best_weights, tmp_path / 'device'),
    reconstruct=result,
    num_support=8,
  )
  items = np.arange(9, dtype=np.int32)
  # As a client that did not take part.
  new = tff_partial.pack({'new': ratings['u3']}, process.example_spec)
  low, high = tff_partial.Predictor(result, new).interval('new', items)
  padded = {k: running.padded(v, 8) for k, v in ratings['u3'].items()}
  for path in exported.paths.values():
    device = running.load(path)
    own = device['reconstruct'](**padded, count=np.int32(6))
    found = device['predict'](x=items, **own)
    half = rating_intervals.half_width(found['predictions_variance'], 0.8)
    rating = found['predictions_rating']
    np.testing.assert_allclose(rating - half, low, rtol=0, atol=1e-5)
    np.testing.assert_allclose(rating + half, high, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_device_predicts_as_keras_does(case, device):
  own = device['reconstruct'](**case.support)
  for number in (1, 5):
    x = case.support['x'][:number]
    found = device['predict'](x=x, **own)['predictions']
    expected = case.keras_model.predict(x, verbose=0)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.slow
def test_the_state_inside_persists_across_calls(case, device):
  x = case.support['x'][:5]

  def infer() -> np.ndarray:
    return device['infer'](x=x)['predictions']

  def infers_as_with(local: dict[str, np.ndarray]) -> None:
    expected = device['predict'](x=x, **local)['predictions']
    np.testing.assert_allclose(infer(), expected, atol=1e-6)

  once = device['train'](**case.support)
  after_once = infer()
  infers_as_with(once)
  twice = device['train'](**case.support)
  assert any(np.abs(twice[name] - once[name]).max() > 1e-4 for name in once)
  assert np.abs(infer() - after_once).max() > 1e-4
  # What `reconstruct` finds is no state, and begins from the first values.
  for name, found in device['reconstruct'](**case.support).items():
    np.testing.assert_allclose(found, once[name], atol=1e-7)
  device['restore'](**once)
  np.testing.assert_array_equal(infer(), after_once)
  infers_as_with(device['reset']())


@pytest.mark.slow
def test_padding_counts_for_nothing_as_no_examples_do(case, device):
  found = device['reconstruct'](**case.support)
  other = {**case.support, 'x': case.support['x'].copy()}
  other['x'][_COUNT:] = 1
  for name, value in device['reconstruct'](**other).items():
    np.testing.assert_array_equal(value, found[name])
  nothing = {**case.support, 'count': np.int32(0)}
  first = device['reset']()
  for name, value in device['reconstruct'](**nothing).items():
    np.testing.assert_array_equal(value, first[name])


def _serve(monkeypatch: Any, file: str, *options: str) -> None:
  script = str(commands.ROOT / 'examples' / 'serve_tflite.py')
  arguments = [script, file, '--of=3,4', '--are=1,5', *options]
  monkeypatch.setattr(sys, 'argv', arguments)
  runpy.run_path(script, run_name='__main__')


def test_an_example_refuses_items_without_ratings(capsys, monkeypatch):
  with pytest.raises(SystemExit):
    _serve(monkeypatch, 'none.tflite', '--of=3,4,5')
  assert '3 items have 2 ratings' in capsys.readouterr().err


@pytest.mark.slow
def test_an_example_serves_a_user(case, capsys, monkeypatch):
  if 'local_user_bias_bias' not in case.exported.signatures['reset']['outputs']:
    pytest.skip('The example is of ratings.')
  _serve(monkeypatch, str(case.exported.paths['tflite']), '--among=9')
  lines = capsys.readouterr().out.splitlines()
  items = sorted(line.split(':')[0] for line in lines)
  assert items == [f'item {number}' for number in range(9)]


# ---- other settings ----------------------------------------------------------


@pytest.fixture(scope='module', name='slope')
def fixture_slope() -> models.PartialModel:
  return tff_partial.from_keras(planted.build_slope, local='own', loss='mse')


_SHARED = {'shared/own': np.float32([0.0])}


def _support(**fields: Any) -> dict[str, Any]:
  return {
    'x': np.float32([[1.0], [2.0]]),
    'y': np.float32([[1.0], [2.0]]),
    'count': np.int32(2),
    **fields,
  }


def test_weights_of_examples_and_first_values_by_hand(slope, tmp_path):
  # From own = 0.5 the errors are -0.5 and -1; only the first example counts, so
  # the slope is 2 * -0.5 * 1 / 2 = -0.5, and a step of 0.1 makes 0.55 of it.
  exported = tff_partial.export(
    slope,
    {**_SHARED, 'own/kernel': np.float32([[0.5]])},
    tmp_path / 'out',
    ['saved_model'],
    weighted=True,
    reconstruct=tff_partial.Phase(),
    num_support=np.int64(2),  # As the largest of some counts is.
    num_predicted=3,
  )
  assert '"num_support": 2' in (exported.folder / 'signatures.json').read_text()
  assert [path.name for path in exported.folder.iterdir()] != []
  assert set(exported.paths) == set(exported.sizes()) == {'saved_model'}
  said = f'Exported to {exported.folder}: saved_model ('
  assert repr(exported).startswith(said)
  assert len(repr(exported)) < 400
  assert exported.signatures['infer']['inputs']['x']['shape'] == [3, 1]
  device = running.load(exported.paths['saved_model'])
  found = device['reconstruct'](**_support(weight=np.float32([1.0, 0.0])))
  np.testing.assert_allclose(found['local_own_kernel'], [[0.55]], rtol=1e-6)


@pytest.mark.slow
def test_a_device_takes_the_steps_of_the_process(slope, tmp_path):
  process = tff_partial.algorithms.build_fed_recon(
    slope, reconstruct=tff_partial.Phase(epochs=lambda done: 10 * done)
  )
  fields = {name: _support()[name] for name in ('x', 'y')}
  clients = tff_partial.pack({'ann': fields}, process.example_spec)
  result = tff_partial.train(process, clients, rounds=2, clients_per_round=1)
  mine = tff_partial.personalise(result, clients, 'ann')
  found = {}
  for name, steps in {'result': result, 'phase': tff_partial.Phase()}.items():
    exported = tff_partial.export(
      *(slope, result.best_weights, tmp_path / name, ['saved_model']),
      reconstruct=steps,
      num_support=2,
    )
    device = running.load(exported.paths['saved_model'])
    found[name] = device['reconstruct'](**_support())['local_own_kernel']
  (expected,) = mine.get_layer('own').get_weights()
  np.testing.assert_allclose(found['result'], expected, rtol=1e-6)
  # One step of 0.1, as a phase takes by default, is another.
  assert abs(found['phase'] - expected) > 0.1
  with pytest.raises(
    ExportError, match='epochs of the process follow the roun'
  ):
    tff_partial.export(
      slope, result.best_weights, tmp_path / 'out', reconstruct=process
    )


def test_a_model_without_local_weights_predicts_and_no_more(tmp_path):
  model = tff_partial.from_keras(planted.build_slope, loss='mse')
  weights = {'shared/own': np.zeros([1]), 'own/kernel': [[2]]}
  exported = tff_partial.export(model, weights, tmp_path / 'out', ['tflite'])
  assert list(exported.signatures) == ['predict']
  device = running.load(exported.paths['tflite'])
  found = device['predict'](x=np.float32([[3.0]]))
  np.testing.assert_array_equal(found['predictions'], [[6.0]])


@pytest.mark.parametrize(
  'error',
  [
    OSError(28, 'No space left on device'),
    tf.errors.ResourceExhaustedError(None, None, 'No space left on device'),
  ],
)
def test_a_full_disk_leaves_no_half_of_an_export(error, tmp_path, monkeypatch):
  def full(*_):
    raise error

  model = tff_partial.from_keras(planted.build_slope, loss='mse')
  items = vocabularies.Vocabulary('ab')
  monkeypatch.setattr(vocabularies, 'save', full)
  weights = {'shared/own': [0.0], 'own/kernel': [[2.0]]}
  settings = {'formats': ['saved_model'], 'vocabularies': {'item': items}}
  with pytest.raises(ExportError, match='nothing was .* No space left'):
    tff_partial.export(model, weights, tmp_path / 'out', **settings)
  assert not (tmp_path / 'out').exists()


# ---- refusals ----------------------------------------------------------------


_OF_A_COPY = tff_partial.Phase(
  train=(tiers.LOCAL,), weights_fn=tiers.personal_copy
)
_OF_GLOBAL = tff_partial.Phase(optimizer={tiers.GLOBAL: tff_partial.sgd(0.1)})


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'formats': ['onnx']}, "'onnx' is none of saved_model, tflite"),
    ({'formats': 'tflite'}, 'give a sequence of some of saved_model, tflite'),
    ({'formats': []}, 'give a sequence of some of'),
    ({'num_support': 2.5}, 'num_support=2.5: give room .* a whole number'),
    ({'num_support': 0}, 'num_support=0: give room for 1 example'),
    ({'num_predicted': -1}, 'num_predicted=-1: give room for 1 example'),
    ({'reconstruct': [3]}, 'expected phases.*found a int'),
    (
      {'reconstruct': tff_partial.Phase(epochs=lambda number: number)},
      'epochs of a phase follow the rounds',
    ),
    ({'reconstruct': _OF_A_COPY}, 'reads a copy of the weights'),
    ({'reconstruct': _OF_GLOBAL}, 'no optimizer for local weights'),
    ({'reconstruct': None}, 'Say by which steps: `reconstruct=r'),
  ],
)
def test_impossible_settings_are_refused(slope, tmp_path, settings, message):
  with pytest.raises(ExportError, match=message):
    tff_partial.export(slope, _SHARED, tmp_path / 'out', **settings)
  assert not (tmp_path / 'out').exists()


def test_a_folder_that_holds_something_is_refused(slope, tmp_path):
  (tmp_path / 'mine.txt').write_text('mine')
  with pytest.raises(ExportError, match='Name a new folder, or an empty one'):
    tff_partial.export(slope, _SHARED, tmp_path)
  with pytest.raises(ExportError, match='there is something already'):
    tff_partial.export(slope, _SHARED, tmp_path / 'mine.txt')


def test_missing_weights_are_refused(slope, tmp_path):
  with pytest.raises(errors.UserError, match='shared/own'):
    tff_partial.export(slope, {}, tmp_path / 'out')


def test_weights_of_examples_that_nothing_reads_are_refused(tmp_path):
  whole = tff_partial.from_keras(planted.build_slope, loss='mse')
  weights = {**_SHARED, 'own/kernel': np.float32([[0.0]])}
  with pytest.raises(ExportError, match='weighted=True: devices train nothing'):
    tff_partial.export(whole, weights, tmp_path / 'out', weighted=True)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda y: tf.keras.layers.Dropout(0.5)(y),
      'StatelessRandomUniformFullIntV2.*as for a dropout',
    ),
    (lambda y: y[:, :1], 'StridedSliceGrad, for .*Take `tf.gather`'),
  ],
)
def test_operators_that_tflite_lacks_are_named(tmp_path, change, message):
  def build() -> tf.keras.Model:
    x = tf.keras.Input([2])
    slope = tf.keras.layers.Dense(1, use_bias=False, name='own')(x)
    shared = tff_partial.layers.PrivateVector(1, name='shared')(x)
    return tf.keras.Model(x, change(slope) + shared)

  model = tff_partial.from_keras(build, local='own', loss='mse')
  with pytest.raises(ExportError, match=message) as refused:
    tff_partial.export(model, _SHARED, tmp_path / 'out', reconstruct=_PHASE)
  assert "formats=('saved_model',)" in str(refused.value)
  assert not (tmp_path / 'out').exists()


def test_double_precision_is_named_not_its_operators(tmp_path):
  def build() -> tf.keras.Model:
    x = tf.keras.Input([2], dtype=tf.float64)
    own = tf.keras.layers.Dense(1, use_bias=False, dtype='float64', name='own')
    return tf.keras.Model(x, own(x))

  model = tff_partial.from_keras(build, loss='mse')
  weights = {'own/kernel': [[1.0], [2.0]]}
  with pytest.raises(ExportError, match='float64, .*the policy float32'):
    tff_partial.export(model, weights, tmp_path / 'out', ['tflite'])


# ---- the program -------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_is_exported_and_compared(tmp_path):
  run = commands.trained().folder
  arguments = [f'--output_dir={run}', f'--to={tmp_path / "out"}']
  outcome = commands.run_program(commands.command('export', *arguments))
  assert outcome.status == 0, outcome
  title, _, *lines = outcome.output.splitlines()
  assert title.startswith('Exported round 6 to ')
  for name, line in zip(exports.FORMATS, lines, strict=False):
    found, *_, local, predictions = line.split()
    assert found == name
    assert float(local) < 1e-6 and float(predictions) < 2e-6
  again = commands.run_program(commands.command('export', *arguments))
  commands.is_for_users(again, 'Name a new folder, or an empty one.')
