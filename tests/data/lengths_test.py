"""Sequences of open length: the numbers of those padded to the full length."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tff_partial
from tff_partial import Aggregation
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.data import buckets
from tff_partial.data import client_forms
from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans
from tff_partial.exchange import messages
from tff_partial.exporting import running
from tff_partial.exporting.errors import ExportError
from tff_partial.model.keras_variables import ModelError
from tff_partial.phases import Phase
from tff_partial.phases import sgd

layers = tf.keras.layers
_OPEN = examples.ExampleSpec(
  {
    'x': tf.TensorSpec([None], tf.int32),
    'y': tf.TensorSpec([None], tf.int32),
    'weight': tf.TensorSpec([None], tf.float32),
  }
)
_X = {'ann': [[1, 2, 3], [4]], 'bob': [[5] * 7, [], [6, 0, 0]], 'cid': [[7]]}
_Y = {name: [[1] * len(row) for row in rows] for name, rows in _X.items()}


def _given() -> dict[str, Any]:
  return {name: {'x': _X[name], 'y': _Y[name]} for name in _X}


def _held(population: Any) -> list[list[Any]]:
  seeds = np.zeros([3, 2], np.int32)
  return [
    [value['examples'][name].tolist() for name in 'xy']
    for value in population.cohort(list(_X), seeds)
  ]


# ---- packing -----------------------------------------------------------------


def test_a_client_is_padded_to_the_next_length():
  found = tff_partial.pack(_given(), _OPEN, lengths=[8, 2, 4], capacities=[3])
  assert 'padded to [3], sequences to [2, 4, 8]' in repr(found)
  ann, bob, cid = _held(found)
  assert ann[0] == [[1, 2, 3, 0], [4, 0, 0, 0], [0] * 4]
  assert ann[1] == [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4]
  # Zeros at the end are padding, whoever wrote them.
  assert [sum(map(bool, row)) for row in bob[0]] == [7, 0, 1]
  assert np.shape(bob[0]) == (3, 8)
  assert cid[0] == [[7, 0], [0, 0], [0, 0]]


def test_by_default_lengths_are_halves_if_that_saves_much():
  steps = [100, 26, 25, 3]
  inputs = np.zeros([4, 100, 999], np.float32)
  for place, number in enumerate(steps):
    inputs[place, number - 1, -1] = 1.0
  spec = examples.ExampleSpec({'x': tf.TensorSpec([None, 999], tf.float32)})
  found = buckets.lengths_of(spec, {'x': inputs}, np.arange(5))
  assert found is not None
  assert found.steps.tolist() == steps
  assert found.sizes == [13, 25, 50, 100]
  few = buckets.lengths_of(spec, {'x': inputs[..., -1:]}, np.arange(5))
  assert few is not None and few.sizes == [100]


def _batches(name: str, ragged: bool) -> tf.data.Dataset:
  rows = tf.ragged.constant(_X[name], dtype=tf.int32)
  labels = tf.ragged.constant(_Y[name], dtype=tf.int32)
  both = tf.data.Dataset.from_tensor_slices((rows, labels))
  if ragged:
    return both.batch(2)
  return both.map(lambda x, y: (x + 0, y + 0)).padded_batch(2)


def _frame() -> pd.DataFrame:
  return pd.DataFrame(
    [(n, x, y) for n in _X for x, y in zip(_X[n], _Y[n], strict=True)],
    columns=['who', 'words', 'next'],
  )


_FORMS: dict[str, Callable[[], Any]] = {
  'tuples': lambda: {name: (_X[name], _Y[name]) for name in _X},
  'ragged tensors': lambda: {
    name: (tf.ragged.constant(_X[name], dtype=tf.int32), _Y[name])
    for name in _X
  },
  'padded batches': lambda: {name: _batches(name, False) for name in _X},
  'ragged batches': lambda: {name: _batches(name, True) for name in _X},
}


@pytest.mark.parametrize('form', _FORMS)
def test_forms_of_sequences_are_read_alike(form):
  wanted = _held(tff_partial.pack(_given(), _OPEN, lengths=[4, 8]))
  found = tff_partial.pack(_FORMS[form](), _OPEN, lengths=[4, 8])
  assert _held(found) == wanted


def test_data_frames_and_readers_have_sequences():
  wanted = _held(tff_partial.pack(_given(), _OPEN))
  frame = tff_partial.from_pandas(
    _frame(), _OPEN, client_id='who', inputs='words', labels='next'
  )
  assert _held(frame) == wanted
  counts = {name: len(rows) for name, rows in _X.items()}
  reader = tff_partial.Reader(
    list(_X), _given().__getitem__, _OPEN, num_examples=counts
  )
  assert np.shape(_held(reader)[0][0]) == (4, 8)


def test_query_sequences_may_be_of_another_length():
  spec = _fixed(is_query=tf.TensorSpec([], tf.int32))
  query = {'ann': ([[8] * 7], [[1] * 7]), 'cid': ([[9]], [[1]])}
  found = tff_partial.pack(_given(), spec, query=query, lengths=[7])
  ann, _, cid = _held(found)
  assert ann[0] == [[1, 2, 3, *[0] * 4], [4, *[0] * 6], [8] * 7]
  assert cid[0][:2] == [[7, *[0] * 6], [9, *[0] * 6]]


def test_a_data_set_without_sequences_is_a_client_without_examples():
  given = {**_given(), 'dot': _batches('ann', False).take(0)}
  found = tff_partial.pack(given, _OPEN, min_examples=1)
  assert list(found.client_ids) == list(_X) and found.num_filtered == 1


def _fixed(**fields: Any) -> examples.ExampleSpec:
  return examples.ExampleSpec({**_OPEN, **fields})


@pytest.mark.parametrize(
  ('given', 'spec', 'options', 'message'),
  [
    (
      _X,
      _OPEN,
      {'lengths': [4]},
      "'bob' has sequences of 7 steps .* `lengths`",
    ),
    ({'ann': [1, 2]}, _OPEN, {}, r'have shape \(None,\), found \(\)'),
    ({'ann': [[[1]], [[2, 3]]]}, _OPEN, {}, "'ann', x: the examples differ"),
    (_X, _fixed(x=tf.TensorSpec([7], tf.int32)), {}, 'differ in shape. Pad or'),
  ],
)
def test_wrong_sequences_are_refused(given, spec, options, message):
  fields = {name: {'x': rows, 'y': rows} for name, rows in given.items()}
  with pytest.raises(examples.ClientDataError, match=message):
    tff_partial.pack(fields, spec, **options)


def test_no_lengths_are_the_default():
  assert repr(tff_partial.pack(_given(), _OPEN, lengths=[])) == repr(
    tff_partial.pack(_given(), _OPEN)
  )


@pytest.mark.parametrize(
  ('labels', 'message'),
  [
    ([[1, 2], [1, 2, 3]], 'has 3 steps, but no input has more than 2'),
    # They would be padded with the class 0.
    ([[1, 2], [1]], 'has 1 steps in example 1, whose input has 2. Give each'),
    (tf.ragged.constant([[1], [1, 2]]), 'has 1 steps in example 0, whose'),
  ],
)
def test_each_step_of_an_input_has_one_label(labels, message):
  with pytest.raises(examples.ClientDataError, match=message):
    tff_partial.pack({'ann': ([[1, 2], [3, 4]], labels)}, _OPEN)


def test_lengths_without_sequences_are_refused():
  spec = examples.ExampleSpec({'x': tf.TensorSpec([2], tf.int32)})
  with pytest.raises(examples.ClientDataError, match='no field .* open length'):
    buckets.lengths_of(spec, {}, np.arange(2), [4])


def test_files_of_sequences_are_refused(tmp_path):
  with pytest.raises(examples.ClientDataError, match='a field has an open len'):
    tff_partial.write_clients(tmp_path / 'clients', _given().items(), _OPEN)


def test_elements_of_other_shapes_are_rows():
  read = [{'x': np.ones(2)}, {'x': np.ones(1)}]
  found = client_forms.joined(read, _OPEN)
  assert [len(row) for row in found['x']] == [2, 1]
  assert lengths.padded(found['x'], _OPEN['x']).tolist() == [[1, 1], [1, 0]]


# ---- models ------------------------------------------------------------------


def _model(length: int | None, *middle: Any, **options: Any) -> Any:
  """Embeds, goes through layers, and predicts a number or one per step."""

  def build() -> tf.keras.Model:
    x = tf.keras.Input([length], dtype='int32')
    drawn = tf.keras.initializers.RandomNormal(seed=1)
    vector = layers.Embedding(
      9, 4, drawn, mask_zero=options.get('masked', True), name='words'
    )(x)
    for make in middle:
      vector = make()(vector)
    own = layers.Dense(1, kernel_initializer=drawn, name='own')
    return tf.keras.Model(x, own(vector))

  return tff_partial.from_keras(
    build,
    local=options.get('local'),
    loss='mse',
    metrics=['mae'],
    state=options.get('state'),
    weights=options.get('weights', tf.TensorSpec([])),
    labels=options.get('labels'),
  )


def _mean() -> Any:
  return layers.GlobalAveragePooling1D()


@pytest.mark.parametrize(
  ('middle', 'options', 'message'),
  [
    (
      [lambda: layers.Conv1D(3, 3, padding='same', name='mixing'), _mean],
      {},
      r"Layer 'mixing' \(Conv1D\) computes something else if more padding",
    ),
    pytest.param(
      [lambda: layers.GlobalMaxPooling1D(name='highest')],
      {},
      r"Layer 'highest' \(GlobalMaxPooling1D\) computes something else",
      marks=pytest.mark.slow,
    ),
    pytest.param(
      [lambda: layers.Conv1D(3, 3, padding='causal', name='causal')],
      {},
      r"Layer 'causal' \(Conv1D\) gives steps of padding no mask",
      marks=pytest.mark.slow,
    ),
    ([], {'masked': False}, r"Layer 'words' \(Embedding\) gives steps of pad"),
    (
      [lambda: layers.BatchNormalization(name='norm'), _mean],
      {'state': 'averaged'},
      r"Layer 'norm' \(BatchNormalization\) computes statistics over steps",
    ),
    (
      [lambda: layers.Conv1D(3, 9, name='long'), _mean],
      {},
      'cannot be called on sequences of 8 or 13 steps',
    ),
  ],
)
def test_what_padding_would_change_is_refused(middle, options, message):
  with pytest.raises(ModelError, match=message):
    _model(None, *middle, **options)


def test_a_length_beside_inputs_of_one_shape_is_refused():
  with pytest.raises(ModelError, match='Only the first axis .* an input is'):
    _model(8, _mean, labels=tf.TensorSpec([None]))


@pytest.mark.slow
def test_statistics_without_steps_may_be_learned():
  model = _model(None, _mean, layers.BatchNormalization, state='averaged')
  assert model.prediction_spec == tf.TensorSpec([1], tf.float32)


def _trained(
  length: int | None, runtime: Any, with_steps: bool, private: bool
) -> list[Any]:
  """Weights after two rounds, and what is measured then."""
  plan = privacy_plans.plan(
    clipping.FixedClip(0.1),
    noise_multiplier=0.1,
    delta=1e-3,
    population=3,
    rounds=2,
    clients_per_round=3,
  )
  model = _model(length, *([] if with_steps else [_mean]))
  process = algorithms.build_fed_avg(
    model,
    training=Phase(optimizer=sgd(0.5), batch_size=2, epochs=2),
    aggregation=Aggregation(
      plan.mean(noise_seed=1) if private else None,
      client_weighting=messages.ClientWeighting.UNIFORM,
    ),
  )
  given = {}
  for name, found in _X.items():
    rows = [row for row in found if row]
    labels: Any = [[float(row[0])] for row in rows]
    if length is not None:
      rows = [row + [0] * (length - len(row)) for row in rows]
    if with_steps:
      labels = [[[float(word)] for word in row] for row in rows]
    given[name] = {'x': rows, 'y': labels}
  options = {} if length is not None else {'lengths': [1, 4, 16]}
  data = tff_partial.pack(given, process.example_spec, **options)
  with runtime:
    ledger = privacy_plans.PrivacyLedger(plan, simulation=True)
    result = tff_partial.train(
      process,
      data,
      rounds=2,
      clients_per_round=3,
      privacy=ledger if private else None,
    )
    measured = tff_partial.evaluate(
      tff_partial.EvaluationSet(algorithms.build_fed_avg_eval(model), data),
      result.weights,
    )
  weights = tf.nest.flatten(result.weights.trainable)
  told = [] if private else [result.train['loss']]
  return [*weights, measured['loss'], measured['mae'], *told]


@pytest.mark.parametrize(
  ('runtime', 'with_steps', 'private'),
  [
    ('cohort', True, False),
    ('native', True, False),
    ('XLA', False, False),
    ('cohort', True, True),
  ],
)
@pytest.mark.slow
def test_numbers_are_those_of_the_full_length(runtime, with_steps, private):
  contexts = {
    'native': runtimes.native,
    'cohort': lambda: runtimes.cohort(strict=True, jit=False),
    'XLA': lambda: runtimes.cohort(strict=True, jit=True),
  }
  wanted = _trained(7, contexts['cohort'](), with_steps, private)
  found = _trained(None, contexts[runtime](), with_steps, private)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_devices_take_any_length(tmp_path):
  model = _model(None, local='own', weights=tf.TensorSpec([None]))
  weights = model.initial_weights('global', [0, 1])

  def export(form: str) -> Any:
    return tff_partial.export(
      model,
      weights,
      tmp_path / form,
      (form,),
      reconstruct=Phase(optimizer=sgd(0.5), batch_size=2),
      num_support=2,
    )

  run = running.load(export('saved_model').paths['saved_model'])
  found = []
  for length in (3, 7):
    x = lengths.cut_or_padded(np.array([[1, 2, 3], [4, 0, 0]], 'i'), length)
    own = run['reconstruct'](
      x=x, y=x[..., np.newaxis].astype('f'), count=np.int32(2)
    )
    predicted = run['predict'](x=x, **own)['predictions']
    found.append((*own.values(), predicted[:, :3]))
  for one, other in zip(*found, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)
  with pytest.raises(ExportError, match='BroadcastGrad.* Give inputs one len'):
    export('tflite')


@pytest.mark.slow
def test_batches_of_other_lengths_are_one_client_of_tffs_programs():
  model = _model(None)
  process = algorithms.build_fed_avg(
    model, training=Phase(optimizer=sgd(0.5), batch_size=2, shuffle=False)
  )
  words = {name: [row for row in rows if row] for name, rows in _X.items()}
  given = {
    name: {'x': rows, 'y': [[[float(word)] for word in row] for row in rows]}
    for name, rows in words.items()
  }
  data = tff_partial.pack(given, process.example_spec)

  def batches(name: str) -> tf.data.Dataset:
    rows = tf.data.Dataset.from_tensor_slices(
      tf.ragged.constant(words[name], dtype=tf.int32)
    )
    pairs = rows.map(
      lambda x: {'x': x + 0, 'y': tf.cast(x[:, tf.newaxis], tf.float32)}
    )
    return pairs.padded_batch(1)

  face = tff_partial.as_learning_process(process)
  with runtimes.cohort(jit=False):
    wanted = tff_partial.train(process, data, rounds=1, clients_per_round=3)
    found = face.next(face.initialize(), [batches(name) for name in words])
  measured = found.metrics['client_work']['train']
  assert measured['loss'] == pytest.approx(wanted.train['loss'], rel=1e-6)
  weights = face.get_model_weights(found.state).trainable
  np.testing.assert_allclose(
    weights['global']['own/kernel'],
    wanted.weights.trainable['global']['own/kernel'],
    rtol=1e-6,
  )
