"""TFF's own programs train our processes, to the same numbers."""

import asyncio
import collections
from collections.abc import Mapping
import csv
import functools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import composition
from tff_partial import phases
from tff_partial import processes
from tff_partial.algorithms import fed_avg
from tff_partial.algorithms import fed_recon
from tff_partial.client.client_work import CompositionError
from tff_partial.client_state import persist_local
from tff_partial.composition import Aggregation
from tff_partial.data import cohorts
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.dp import clipping
from tff_partial.dp import local_noise
from tff_partial.dp import privacy
from tff_partial.exchange import messages
from tff_partial.learning_process import as_learning_process
from tff_partial.learning_process import client_seed
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.runtimes.native_runtime.native import native
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

ITEMS = 13
COUNTS = (9, 4, 17, 1, 6)
TIMED = splits.shuffled(splits.by_time('time'))


def build_matrix_factorization() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32, name='item')
  vector = tf.keras.layers.Embedding(ITEMS, 3, name='items')(item)
  rating = tf.keras.layers.Dense(1, use_bias=False, name='user')(vector)
  return tf.keras.Model(item, rating)


def make_clients() -> dict[str, dict[str, np.ndarray]]:
  random = np.random.default_rng(5)
  return {
    str(number): {
      'x': random.integers(0, ITEMS, count).astype(np.int32),
      'y': random.integers(1, 6, [count, 1]).astype(np.float32),
      'weight': random.uniform(0.5, 2.0, count).astype(np.float32),
      'time': random.permutation(count).astype(np.int64),
    }
    for number, count in enumerate(COUNTS)
  }


CLIENTS = make_clients()


def as_dataset(
  client: Mapping[str, np.ndarray], *, batch_size: int, fields: str
) -> tf.data.Dataset:
  chosen = collections.OrderedDict((f, client[f]) for f in fields.split())
  return tf.data.Dataset.from_tensor_slices(chosen).batch(
    # Then the size of a batch is known, and written in the element's spec.
    batch_size,
    drop_remainder=batch_size == 1,
  )


def pack(
  process: Any, round_number: int, clients: Mapping[str, Any] = CLIENTS, seed=0
) -> cohorts.Cohort:
  """What the face makes of sequences, made on the host and padded."""
  seeds = [
    client_seed(
      {
        name: client.get(name, np.ones_like(client['y'][:, 0]))
        for name in process.example_spec
      },
      len(client['y']),
      round_number,
      seed=seed,
    )
    for client in clients.values()
  ]
  spec = process.example_spec
  clients = {
    name: {field: client[field] for field in client if field in spec}
    for name, client in clients.items()
  }
  population = packing.pack(clients, spec, capacities=[20])
  return population.cohort(list(clients), np.stack(seeds))


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return planted.factorization(build_matrix_factorization)


@pytest.fixture(scope='module', name='process')
def fixture_process(model) -> processes.PartialProcess:
  return fed_recon.build_fed_recon(
    model,
    split=TIMED,
    reconstruct=phases.Phase(batch_size=4),
    server_optimizer=phases.sgd(0.9),
  )


@pytest.fixture(scope='module', name='face')
def fixture_face(process) -> Any:
  return as_learning_process(process)


pytestmark = pytest.mark.usefixtures('in_native')


@pytest.mark.slow
def test_types_are_those_of_the_process(process, face):
  assert isinstance(face, tff.learning.templates.LearningProcess)
  state_type, data_type = face.next.type_signature.parameter
  assert state_type.is_identical_to(process.next.type_signature.parameter[0])
  assert (
    str(data_type) == '{<x=int32[?],y=float32[?,1],time=int64[?]>*}@CLIENTS'
  )
  result = face.next.type_signature.result
  assert result.python_container is tff.learning.templates.LearningProcessOutput
  assert result.metrics.is_identical_to(
    process.next.type_signature.result.metrics
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'fields, batch_size',
  [('x y weight time', 5), ('time user weight y x', 1), ('x y time', 100)],
)
def test_rounds_equal_those_on_packed_clients(process, fields, batch_size):
  clients = {
    name: {f: client[f] for f in client if f in fields}
    for name, client in CLIENTS.items()
  }
  datasets = [
    as_dataset(
      client | {'user': np.zeros(len(client['y']))},
      batch_size=batch_size,
      fields=fields,
    )
    for client in clients.values()
  ]
  face = as_learning_process(process, datasets[0].element_spec, seed=3)
  state = expected = process.initialize()
  for round_number in range(2):
    cohort = pack(process, round_number, clients, seed=3)
    nothing = [collections.OrderedDict()] * len(cohort)
    expected, _, measured = process.next(expected, nothing, cohort)
    state, metrics = face.next(state, datasets)
    planted.assert_same(metrics, measured)
    planted.assert_same(
      face.get_model_weights(state), process.get_model_weights(expected)
    )
  assert state.client_work['round'] == 2
  # The client with a single example has nothing to be measured on.
  assert metrics['client_work']['train']['num_clients'] == 4


def test_weights_can_be_set(face):
  state = face.initialize()
  weights = face.get_model_weights(state)
  weights.trainable[GLOBAL] = tf.nest.map_structure(
    lambda w: w + 1.0, weights.trainable[GLOBAL]
  )
  changed = face.set_model_weights(state, weights)
  planted.assert_same(face.get_model_weights(changed), weights)
  assert changed.client_work['round'] == 0


def test_seeds_of_clients_tell_them_apart():
  random = np.random.default_rng(2)
  values = {
    'x': random.integers(0, 2, [6, 3]).astype(np.int64),
    'y': np.array([b'a', b'b', b'a', b'c', b'', b'a'], object),
    'weight': np.ones(6, np.float32),
    'flag': np.array([True, False, True, True, False, True]),
    'half': np.arange(6).astype(np.float16),
    'double': np.arange(6).astype(np.float64),
    'wave': np.arange(6).astype(np.complex64),
  }
  others = [
    values | {'x': values['x'][::-1]},
    values | {'y': np.array([b'b', b'a', b'a', b'c', b'', b'a'], object)},
    values | {'weight': np.float32([1, 1, 1, 1, 1, 2])},
    values | {'flag': ~values['flag']},
    values | {'half': values['half'] + np.float16(1)},
    values | {'double': values['double'] * 2},
    values | {'wave': values['wave'] * 1j},
  ]

  def seed_of(client, count=6, number=0, **kwargs):
    tensors = {name: tf.constant(value) for name, value in client.items()}
    seed = client_seed(tensors, count, number, **kwargs)
    assert seed.dtype == tf.int32 and seed.shape == [2]
    return tuple(seed.numpy().tolist())

  seed = seed_of(values)
  assert seed == seed_of(dict(reversed(values.items())))
  padded = {
    name: np.concatenate([value, value[:2]]) for name, value in values.items()
  }
  assert seed == seed_of(padded)
  found = {
    seed,
    *map(seed_of, others),
    seed_of(values, count=5),
    seed_of(values, number=1),
    seed_of(values, seed=1),
  }
  assert len(found) == 4 + len(others)


@pytest.mark.slow
def test_fingerprints_stay_what_they_are():
  # A resumed run, perhaps on another machine, draws what the first one did.
  client = {'x': tf.range(4), 'y': tf.constant([1.0, 2.0, 3.0, 4.0])}
  golden = [1600411845, 816034204]
  assert client_seed(client, 4, 7, seed=1).numpy().tolist() == golden
  for compiled in (False, True):
    traced = tf.function(
      lambda c: client_seed(c, 4, 7, seed=1), jit_compile=compiled
    )
    assert traced(client).numpy().tolist() == golden


@pytest.mark.slow
def test_refuses_clients_that_remember(model):
  process = composition.compose(
    model,
    client_state=persist_local,
    work=[phases.Phase(train=(GLOBAL, LOCAL), measured=True)],
    aggregation=Aggregation(aggregator=tff.aggregators.MeanFactory()),
    server_optimizer=phases.sgd(1.0),
  )
  with pytest.raises(CompositionError, match=r'float32\[3,1\]'):
    as_learning_process(process)


def _private(noise_multiplier: float) -> tff.aggregators.AggregationFactory:
  return privacy.private_mean(
    clipping.FixedClip(1.0),
    noise_multiplier=noise_multiplier,
    clients_per_round=2,
  )


_LOCAL = local_noise.LocalNoise(0.1, 1.0)


@pytest.mark.parametrize(
  ('aggregator', 'expected'),
  [
    pytest.param(
      *(tff.aggregators.MeanFactory(), _LOCAL.mechanism), marks=pytest.mark.slow
    ),
    # A ledger counts what noises: the server clips alone.
    pytest.param(_private(0.0), _LOCAL.mechanism, marks=pytest.mark.slow),
    (_private(0.5), _private(0.5).mechanism),
  ],
  ids=['local alone', 'beside clips', 'beside noise'],
)
def test_refuses_noise_of_clients_with_seeds_of_their_examples(
  model, aggregator, expected
):
  noised = fed_recon.build_fed_recon(
    model,
    split=TIMED,
    aggregation=Aggregation(
      aggregator,
      client_weighting=messages.ClientWeighting.UNIFORM,
      postprocess_update=_LOCAL,
    ),
  )
  assert noised.mechanism == expected
  assert noised.noises_at_clients and noised.is_noised
  with pytest.raises(CompositionError, match='would add the same noise'):
    as_learning_process(noised)


def test_refuses_tables_whose_size_no_batch_says():
  def build():
    item = tf.keras.Input([], dtype=tf.int32)
    vectors = tf.keras.layers.Embedding(3, 1, name='own')(item)
    return tf.keras.Model(item, tf.keras.layers.Dense(1)(vectors))

  process = fed_recon.build_fed_recon(
    keras_models.from_keras(build, loss='mse', local='own', client_sized='own')
  )
  with pytest.raises(CompositionError, match=r"\['own/embeddings'\] have the"):
    as_learning_process(process)


def _specs(**changes: Any) -> Any:
  specs = collections.OrderedDict(
    x=tf.TensorSpec([None], tf.int32),
    y=tf.TensorSpec([None, 1], tf.float32),
    time=tf.TensorSpec([None], tf.int64),
  )
  specs.update(changes)
  return collections.OrderedDict(
    (name, spec) for name, spec in specs.items() if spec is not None
  )


@pytest.mark.parametrize(
  'element_spec, message',
  [
    (tuple(_specs().values()), 'mappings with the fields'),
    (_specs(time=None), r"lack the fields \['time'\]"),
    (_specs(y=tf.TensorSpec([None], tf.float32)), "field 'y'"),
    (_specs(y=tf.TensorSpec([None, 1], tf.float64)), "field 'y'"),
    (_specs(x=tf.TensorSpec([], tf.int32)), "field 'x'"),
    (_specs(x=[_specs()['x']] * 2), "field 'x'"),
    (_specs(x=tf.RaggedTensorSpec([None, None], tf.int32)), "field 'x'"),
    (_specs(weight=tf.TensorSpec([None, 2], tf.float32)), "field 'weight'"),
  ],
)
def test_refuses_batches_that_do_not_fit(process, element_spec, message):
  with pytest.raises(CompositionError, match=message):
    as_learning_process(process, element_spec)


def test_refuses_a_tuple_of_inputs_for_named_ones():
  def build():
    user, item = (tf.keras.Input([], name=name) for name in ('user', 'item'))
    factors = [tf.keras.layers.Dense(1)(x[:, None]) for x in (user, item)]
    return tf.keras.Model({'user': user, 'item': item}, sum(factors))

  process = fed_avg.build_fed_avg(keras_models.from_keras(build, loss='mse'))
  batches = _specs(x=(tf.TensorSpec([None], tf.float32),) * 2, time=None)
  with pytest.raises(CompositionError, match="field 'x' as .*'user'"):
    as_learning_process(process, batches)


@pytest.mark.slow
def test_inputs_may_be_nested_and_weights_have_a_shape():
  def build():
    inputs = {
      'word': tf.keras.Input([4], dtype=tf.string, name='word'),
      'age': tf.keras.Input([1], name='age'),
    }
    words = tf.keras.layers.Hashing(num_bins=3)(inputs['word'])
    vectors = tf.keras.layers.Embedding(3, 2, name='table')(words)
    ages = tf.keras.layers.RepeatVector(4)(inputs['age'])
    both = tf.keras.layers.Concatenate()([vectors, ages])
    return tf.keras.Model(inputs, tf.keras.layers.Dense(1, name='out')(both))

  model = keras_models.from_keras(
    build,
    local='out',
    loss=tf.keras.losses.MeanSquaredError(),
    weights=tf.TensorSpec([4], tf.float32),
  )
  steps = phases.Phase(batch_size=2)
  process = fed_recon.build_fed_recon(model, reconstruct=steps)
  random = np.random.default_rng(0)
  words = random.choice([b'a', b'b', b'c'], [5, 4]).astype(object)
  client = {
    'x': {'age': random.random([5, 1], np.float32), 'word': words},
    'y': random.random([5, 4, 1], np.float32),
    'weight': np.ones([5, 4], np.float32),
  }
  seed = client_seed(client, 5, 0)
  cohort = packing.pack({'a': client}, process.example_spec).cohort(
    ['a'], seed[None].numpy()
  )
  expected = process.next(
    process.initialize(), [collections.OrderedDict()], cohort
  )
  # Fields in another order than the model has them.
  inputs = collections.OrderedDict((f, client['x'][f]) for f in ('word', 'age'))
  dataset = tf.data.Dataset.from_tensor_slices(
    collections.OrderedDict(y=client['y'], x=inputs)
  ).batch(2)
  face = as_learning_process(process, dataset.element_spec)
  state, metrics = face.next(face.initialize(), [dataset])
  planted.assert_same(state, expected.state)
  planted.assert_same(metrics, expected.metrics)


# TFF's programs.


@tff.tensorflow.computation(np.str_)
def read_client(client_id):
  """Makes a client's batches out of its id, inside the client's computation."""
  number = tf.strings.to_number(client_id, tf.int32)
  end = tf.cumsum(COUNTS)[number]
  start = end - tf.constant(COUNTS)[number]
  examples_of_client = collections.OrderedDict(
    (f, tf.concat([c[f] for c in CLIENTS.values()], 0)[start:end])
    for f in ('x', 'y', 'time')
  )
  return tf.data.Dataset.from_tensor_slices(examples_of_client).batch(5)


def run_program(folder: pathlib.Path, face: Any, rounds: int) -> dict[str, Any]:
  """Trains as TFF's users do, and returns what was released."""
  released: dict[str, Any] = {
    name: tff.program.MemoryReleaseManager() for name in ('model', 'train')
  }
  clients = tff.program.ClientIdDataSource(list(CLIENTS))
  with native(asynchronous=True) as context:
    federated = tff.program.NativeFederatedContext(context)
    with tff.framework.get_context_stack().install(federated):
      asyncio.run(
        tff.learning.programs.train_model(
          train_process=face,
          train_data_source=clients,
          train_per_round_clients=5,
          train_total_rounds=rounds,
          program_state_manager=tff.program.FileProgramStateManager(
            folder / 'states', prefix='round_'
          ),
          model_output_manager=released['model'],
          train_metrics_manager=tff.program.GroupingReleaseManager(
            [
              released['train'],
              tff.program.CSVFileReleaseManager(
                folder / 'train.csv', key_fieldname='round'
              ),
            ]
          ),
          evaluation_manager=None,
          evaluation_periodicity=2,
        )
      )
  return {name: manager.values() for name, manager in released.items()}


@pytest.mark.slow
def test_train_model_trains_saves_and_resumes(tmp_path, process, face):
  program_face = (
    tff.simulation.compose_dataset_computation_with_learning_process(
      read_client, face
    )
  )
  first = run_program(tmp_path, program_face, rounds=2)
  assert list(first['train']) == [1, 2]
  then = run_program(tmp_path, program_face, rounds=3)
  assert list(then['train']) == [3]

  # All clients take part, in an order that TFF draws.
  clients = {
    name: {field: client[field] for field in ('x', 'y', 'time')}
    for name, client in CLIENTS.items()
  }
  nothing = [collections.OrderedDict()] * len(clients)

  assert_close = functools.partial(planted.assert_close, relative=1e-5)
  state = process.initialize()
  for number in (1, 2, 3):
    cohort = pack(process, number - 1, clients)
    state, _, metrics = process.next(state, nothing, cohort)
    released = first if number < 3 else then
    assert_close(
      released['train'][number]['model_metrics'],
      metrics['client_work']['train'],
    )
  released_state = then['model']['training_checkpoint_round_3']
  assert_close(released_state.global_model_weights, state.global_model_weights)
  assert released_state.client_work['round'] == 3
  with open(tmp_path / 'train.csv', encoding='utf-8') as file:
    rows = list(csv.DictReader(file))
  assert [row['round'] for row in rows] == ['1', '2', '3']
  assert float(rows[-1]['model_metrics/rmse']) > 0
