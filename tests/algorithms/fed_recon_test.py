"""Federated reconstruction agrees with the paper, by hand, and with TFF."""

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import processes
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

layers = tf.keras.layers
optimizers = tff.learning.optimizers
_START = 0.3
_TABLE = 'items/embeddings'
pytestmark = pytest.mark.usefixtures('in_native')


@functools.cache
def _model() -> models.PartialModel:
  return planted.factorization(planted.constant_user(_START))


# ---- by hand -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Setting:
  """Arguments of `build_fed_recon`, and what a client does with them.

  Attributes:
    options: The arguments.
    parts: From the number of examples to the support and the query set.
    reconstruction: Passes over the support set, and steps at most.
    update: Passes over the query set, and steps at most.
  """

  options: dict[str, Any]
  parts: Callable[[int], tuple[list[int], list[int]]]
  reconstruction: tuple[int, int] = (1, 100)
  update: tuple[int, int] = (1, 100)


def _in_halves(count: int) -> tuple[list[int], list[int]]:
  half = max(min(round(count / 2), count - 1), min(count, 1))
  return list(range(half)), list(range(half, count))


def _in_batches_of_3(count: int) -> tuple[list[int], list[int]]:
  places = range(count)
  return [i for i in places if i // 3 % 2 == 0], [
    i for i in places if i // 3 % 2 == 1
  ]


def _all_twice(count: int) -> tuple[list[int], list[int]]:
  return list(range(count)), list(range(count))


_ALIKE = Aggregation(client_weighting=tff.learning.ClientWeighting.UNIFORM)
_SETTINGS = {
  'defaults': Setting({}, _in_halves),
  'epochs and steps': Setting(
    {
      'split': splits.alternating(3),
      'reconstruct': {'epochs': 3, 'max_steps': 4},
      'update': {'epochs': 2, 'max_steps': 3},
    },
    _in_batches_of_3,
    (3, 4),
    (2, 3),
  ),
  'no reconstruction': Setting(
    {'reconstruct': {'max_steps': 0}}, _in_halves, (1, 0)
  ),
  'joint training': Setting(
    {'joint': True, 'update': {'epochs': 2}}, _in_halves, update=(2, 100)
  ),
  'support is query': Setting({'split': splits.same()}, _all_twice),
  'all alike': Setting({'aggregation': _ALIKE}, _in_halves),
  'other rates': Setting(
    {
      'reconstruct': {'optimizer': sgd(0.2)},
      'update': {'optimizer': sgd(0.05)},
      'server_optimizer': sgd(0.5),
    },
    _in_halves,
  ),
}
_COUNTS = {'ann': 7, 'bob': 14, 'cid': 1, 'dot': 2, 'eve': 9}


def _batches(rows: list[int], epochs: int, steps: int) -> Iterator[list[int]]:
  """The rows of each step: batches of 3; an epoch's last may be smaller."""
  cut = [rows[i : i + 3] for i in range(0, len(rows), 3)]
  yield from (cut * epochs)[:steps]


def _client_by_hand(
  setting: Setting, table: np.ndarray, fields: planted.Fields
) -> tuple[np.ndarray, list[float], int]:
  """A client's table after a round, its errors, and how much it weighs."""
  table, user = table.copy(), np.full(planted.NUM_FACTORS, _START)
  rates = {'local': 0.1, 'global': 0.1}
  if 'server_optimizer' in setting.options:
    rates = {'local': 0.2, 'global': 0.05}
  support, query = setting.parts(len(fields['x']))
  for rows in _batches(support, *setting.reconstruction):
    vectors = table[fields['x'][rows]]
    slope = 2 * (vectors @ user - fields['y'][rows]) / len(rows)
    user = user - rates['local'] * slope @ vectors
  errors = []
  for rows in _batches(query, *setting.update):
    vectors = table[fields['x'][rows]]
    error = vectors @ user - fields['y'][rows]
    errors.extend(error)
    slope = 2 * error / len(rows)
    np.add.at(
      table, fields['x'][rows], -rates['global'] * np.outer(slope, user)
    )
    if setting.options.get('joint'):
      user = user - rates['global'] * slope @ vectors
  weight = len(query)
  if 'aggregation' in setting.options:
    weight = int(weight > 0)
  return table, errors, weight


def _build(
  model: models.PartialModel,
  batch_size: int = 3,
  rate: float = 0.1,
  reconstruct: Mapping[str, Any] = {},
  update: Mapping[str, Any] = {},
  **options: Any,
) -> processes.PartialProcess:
  how = {'optimizer': sgd(rate), 'batch_size': batch_size}
  return algorithms.build_fed_recon(
    model,
    reconstruct=Phase(**{**how, **reconstruct}),
    update=Phase(batch_size=batch_size, **update),
    **options,
  )


@functools.cache
def _process(name: str) -> processes.PartialProcess:
  """The process of a setting, which several tests look at."""
  return _build(_model(), **_SETTINGS[name].options)


@pytest.mark.slow
@pytest.mark.parametrize('name', _SETTINGS)
def test_two_rounds_by_hand(name):
  setting, process = _SETTINGS[name], _process(name)
  clients = planted.rate(_COUNTS)
  cohort = planted.cohort_of(process, clients)
  state = process.initialize()
  table = planted.global_weights(process, state)[_TABLE].astype(np.float64)
  for _ in range(2):
    output = planted.run(process, cohort, state)
    state = output.state
    worked = [_client_by_hand(setting, table, f) for f in clients.values()]
    weights = np.array([weight for _, _, weight in worked])
    mean = np.einsum('c,cij->ij', weights, [t for t, _, _ in worked])
    rate = 0.5 if 'server_optimizer' in setting.options else 1.0
    table += rate * (mean / weights.sum() - table)
    found = planted.global_weights(process, state)[_TABLE]
    planted.assert_close(found, table, 1e-6)
    errors = np.concatenate([errors for _, errors, _ in worked])
    metrics = planted.train_metrics(output)
    assert metrics['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)
    assert metrics['rmse'] == pytest.approx(
      np.sqrt(np.mean(errors**2)), rel=1e-5
    )
    queries = [len(setting.parts(count)[1]) for count in _COUNTS.values()]
    assert metrics['num_examples'] == sum(queries)
    assert metrics['num_clients'] == sum(size > 0 for size in queries)


# ---- as TFF does it ----------------------------------------------------------

_RECON = tff.learning.models.ReconstructionModel
_NAMES = [f'client {number}' for number in range(20)]


def _dense(inputs: int = 5) -> tf.keras.Model:
  """No embedding: a body that is shared and a head that is not."""
  constant = functools.partial(
    layers.Dense, kernel_initializer=tf.keras.initializers.Constant(0.2)
  )
  return tf.keras.Sequential(
    [
      tf.keras.Input([inputs]),
      layers.Dense(6, 'tanh', name='items'),
      constant(3, activation='relu', name='user'),
      layers.Dense(1, name='last'),
    ]
  )


def _dense_clients() -> dict[str, planted.Fields]:
  generator = np.random.default_rng(2)
  sizes = generator.integers(9, 31, len(_NAMES))
  return planted.drawn(dict(zip(_NAMES, sizes, strict=True)), 5, generator)


def _rating_clients() -> dict[str, planted.Fields]:
  sizes = np.random.default_rng(1).integers(9, 31, len(_NAMES))
  return planted.rate(dict(zip(_NAMES, map(int, sizes), strict=True)))


def _datasets(
  clients: Mapping[str, planted.Fields], batch_size: int
) -> list[tf.data.Dataset]:
  return [
    tf.data.Dataset.from_tensor_slices(collections.OrderedDict(fields)).batch(
      batch_size
    )
    for fields in clients.values()
  ]


def _input_spec(clients: Mapping[str, planted.Fields]) -> Any:
  return collections.OrderedDict(
    (name, tf.TensorSpec([None, *array.shape[1:]], array.dtype))
    for name, array in next(iter(clients.values())).items()
  )


def _of_tff(
  build: Callable[[], tf.keras.Model],
  clients: Mapping[str, planted.Fields],
  **options: Any,
) -> tff.learning.templates.LearningProcess:
  def model_fn():
    keras = build()
    return _RECON.from_keras_model_and_layers(
      keras,
      global_layers=[layer for layer in keras.layers if layer.name != 'user'],
      local_layers=[keras.get_layer('user')],
      input_spec=_input_spec(clients),
    )

  return tff.learning.algorithms.build_fed_recon(
    model_fn,
    loss_fn=tf.keras.losses.MeanSquaredError,
    metrics_fn=lambda: [tf.keras.metrics.RootMeanSquaredError(name='rmse')],
    reconstruction_optimizer_fn=optimizers.build_sgdm(0.2),
    client_optimizer_fn=optimizers.build_sgdm(0.1),
    server_optimizer_fn=optimizers.build_sgdm(1.0),
    **options,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ('build', 'clients', 'mine', 'theirs'),
  [
    (planted.constant_user(_START), _rating_clients(), {}, {}),
    (
      planted.constant_user(_START),
      _rating_clients(),
      {
        'reconstruct': {'epochs': 4, 'max_steps': 7},
        'update': {'epochs': 2, 'max_steps': 4},
        'aggregation': _ALIKE,
      },
      {
        'recon_epochs': 4,
        'recon_steps_max': 7,
        'post_recon_epochs': 2,
        'post_recon_steps_max': 4,
      },
    ),
    (
      _dense,
      _dense_clients(),
      {'reconstruct': {'epochs': 2}, 'update': {'epochs': 2}},
      {'recon_epochs': 2, 'post_recon_epochs': 2},
    ),
  ],
  ids=['one pass', 'epochs and steps', 'dense model'],
)
def test_tff_comes_to_the_same_weights(build, clients, mine, theirs):
  # Three rounds of 20 clients with ragged last batches, on both sides of the
  # split. TFF weighs a client by the examples of all its steps: as often as it
  # has epochs, which makes no difference unless steps end early.
  batch_size = 4
  model = planted.factorization(build)
  split = splits.alternating(batch_size)
  process = _build(model, batch_size, 0.2, split=split, **mine)
  weighting = mine.get('aggregation', Aggregation()).client_weighting
  reference = _of_tff(
    build,
    clients,
    dataset_split_fn=_RECON.build_dataset_split_fn(
      split_dataset=True, **theirs
    ),
    client_weighting=weighting or tff.learning.ClientWeighting.NUM_EXAMPLES,
  )
  cohort = planted.cohort_of(process, clients)
  datasets = _datasets(clients, batch_size)
  state = process.initialize()
  first = planted.global_weights(process, state)
  reference_state = reference.set_model_weights(
    reference.initialize(),
    tff.learning.models.ModelWeights(list(first.values()), []),
  )
  for _ in range(3):
    output = planted.run(process, cohort, state)
    expected = reference.next(reference_state, datasets)
    state, reference_state = output.state, expected.state
    found = planted.train_metrics(output)
    assert found['rmse'] == pytest.approx(
      expected.metrics['client_work']['train']['rmse'], rel=1e-5
    )
  last = planted.global_weights(process, state)
  wanted = reference.get_model_weights(reference_state).trainable
  assert len(last) == len(wanted)
  for (name, tensor), other in zip(last.items(), wanted, strict=True):
    assert abs(tensor - other).max() < 1e-6
    assert abs(tensor - first[name]).max() > 1e-3


# ---- any aggregator, any server optimizer ------------------------------------


@pytest.fixture(scope='module', name='plain')
def fixture_plain() -> dict[str, np.ndarray]:
  """The weights before a round, and the mean updates of its clients."""
  first, after = _one_round(_process('defaults'))
  _, alike = _one_round(_process('all alike'))
  return {'first': first, 'weighted': first - after, 'alike': first - alike}


def _one_round(
  process: processes.PartialProcess,
) -> tuple[np.ndarray, np.ndarray]:
  """The table before and after a round."""
  clients = planted.rate({'a': 9, 'b': 20, 'c': 6})
  before, after = planted.before_and_after(process, clients)
  return before[_TABLE], after[_TABLE]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('aggregator', 'mean'),
  [
    # Clips and zeroes what is much larger than these updates.
    (tff.learning.robust_aggregator(), 'weighted'),
    (tff.aggregators.UnweightedMeanFactory(), 'alike'),
    (
      tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
        noise_multiplier=0.0, clients_per_round=3, clip=100.0
      ),
      'alike',
    ),
  ],
  ids=['robust', 'unweighted', 'private without noise'],
)
def test_any_aggregator_joins_the_updates(plain, aggregator, mean):
  process = _build(_model(), aggregation=Aggregation(aggregator))
  before, after = _one_round(process)
  planted.assert_same(before, plain['first'])
  assert abs(plain[mean]).max() > 1e-3
  assert abs(plain['weighted'] - plain['alike']).max() > 1e-4
  planted.assert_close(before - after, plain[mean], 1e-7)
