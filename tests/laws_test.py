"""Laws that hold for every algorithm: a new one is a new row of the table."""

from collections.abc import Callable
import re

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests import planted
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import client_work
from tff_partial import models
from tff_partial import processes
from tff_partial import runtimes
from tff_partial import splits
from tff_partial import tiers
from tff_partial.phases import Phase
from tff_partial.phases import sgd

optimizers = tff.learning.optimizers


def _keep_local(model: models.PartialModel) -> processes.PartialProcess:
  """Clients remember their local weights and train everything together."""
  return processes.compose(
    model,
    memory=client_state.keep_local,
    work=[
      Phase(
        (tiers.GLOBAL, tiers.LOCAL),
        optimizer=sgd(0.1),
        epochs=3,
        shuffle=True,
        measured=True,
      )
    ],
    aggregator=tff.aggregators.MeanFactory(no_nan_division=True),
    server_optimizer=sgd(1.0),
  )


# Name of the algorithm, and how it is built for a model. Its settings are such
# that it learns in a few rounds.
ROWS: list[
  tuple[str, Callable[[models.PartialModel], processes.PartialProcess]]
] = [
  (
    'fed_recon',
    lambda model: algorithms.build_fed_recon(
      model,
      reconstruction_optimizer=sgd(0.1),
      reconstruction_epochs=5,
      update_optimizer=sgd(0.3),
      update_epochs=5,
    ),
  ),
  (
    'fed_recon, joint',
    lambda model: algorithms.build_fed_recon(
      model,
      split=splits.shuffled(splits.by_time(share=0.6)),
      joint=True,
      reconstruction_optimizer=sgd(0.1),
      reconstruction_epochs=5,
      update_optimizer=sgd(0.1),
      update_epochs=5,
      aggregator=tff.learning.robust_aggregator(),
    ),
  ),
  (
    'fed_recon, adaptive',
    lambda model: algorithms.build_fed_recon(
      model,
      split=splits.shuffled(splits.alternating(4)),
      batch_size=4,
      reconstruction_optimizer=optimizers.build_adam(0.02),
      reconstruction_epochs=10,
      update_optimizer=optimizers.build_adam(0.05),
      server_optimizer=optimizers.build_yogi(0.1),
      client_weighting=tff.learning.ClientWeighting.UNIFORM,
    ),
  ),
  ('keep_local', _keep_local),
]

_NAMES = [f'client {number}' for number in range(12)]
_SIZES = (9, 14, 3, 40, 22, 6, 31, 17, 1, 12, 25, 8)
_COUNTS = dict(zip(_NAMES, _SIZES, strict=True))


@pytest.fixture(scope='module', autouse=True)
def fixture_runtime():
  with runtimes.native():
    yield


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return planted.factorization(planted.build_tastes)


@pytest.fixture(
  scope='module', name='process', params=ROWS, ids=[name for name, _ in ROWS]
)
def fixture_process(request, model) -> processes.PartialProcess:
  _, build = request.param
  return build(model)


def _clients() -> dict[str, planted.Fields]:
  clients = planted.rate(_COUNTS)
  for fields in clients.values():
    fields['time'] = np.arange(len(fields['y']), dtype=np.int64) // 3
  return clients


def _without(
  clients: dict[str, planted.Fields], *names: str
) -> dict[str, planted.Fields]:
  return {name: fields for name, fields in clients.items() if name not in names}


def _spoil(fields: planted.Fields) -> None:
  """Makes labels finite numbers whose squares are not."""
  fields['y'][:] = 1e30


def _compare(
  process: processes.PartialProcess,
  one: processes.PartialProcessOutput,
  other: processes.PartialProcessOutput,
  compare: Callable[..., None] = planted.assert_same,
) -> None:
  """Compares what two rounds come to, but not what their clients remember."""
  compare(
    planted.global_weights(process, one.state),
    planted.global_weights(process, other.state),
  )
  first, second = planted.train_metrics(one), planted.train_metrics(other)
  compare(
    {name: first[name] for name in first if name != 'num_not_finite'},
    {name: second[name] for name in second if name != 'num_not_finite'},
  )


# ---- stays home --------------------------------------------------------------


def _shapes(type_spec: tff.Type) -> list[str]:
  """All shapes of tensors in a type, as they are printed."""
  return re.findall(r'\[([\d,?]+)\]', type_spec.compact_representation())


def _sizes(*type_specs: tff.Type) -> set[str]:
  return {
    size
    for type_spec in type_specs
    for shape in _shapes(type_spec)
    for size in shape.split(',')
  }


def _at_server(type_spec: tff.Type) -> list[tff.Type]:
  """All types placed at the server in an argument or a result."""
  if isinstance(type_spec, tff.FederatedType):
    return [type_spec] if type_spec.placement is tff.SERVER else []
  return [
    found
    for _, element in tff.structure.iter_elements(type_spec)
    for found in _at_server(element)
  ]


def test_local_weights_stay_home(process):
  local = str(planted.LOCAL_SIZE)
  kept = process.initialize_client.type_signature.result
  assert local in _sizes(kept) or process.is_stateless
  signature = process.next.type_signature
  served = _at_server(signature.parameter) + _at_server(signature.result)
  assert len(served) == 3
  assert str(planted.NUM_ITEMS) in _sizes(*served)
  assert local not in _sizes(*served, process.initialize.type_signature.result)


def test_local_weights_stay_home_when_a_model_is_measured(model):
  evaluation = algorithms.build_fed_recon_eval(model)
  local = str(planted.LOCAL_SIZE)
  assert local in _sizes(evaluation.personalise.type_signature.result)
  signature = evaluation.evaluate.type_signature
  served = _at_server(signature.parameter) + _at_server(signature.result)
  assert len(served) == 2
  assert local not in _sizes(*served)
  assert local not in _sizes(signature.result.per_client)


# ---- padding is inert --------------------------------------------------------


def test_padding_changes_no_bit(process):
  clients = _clients()
  expected = planted.run(process, planted.cohort_of(process, clients, 1))
  for capacities in ([64], [1, 3, 9, 14, 25, 40]):
    cohort = planted.cohort_of(process, clients, 1, capacities=capacities)
    found = planted.run(process, cohort)
    _compare(process, found, expected)
    planted.assert_same(found.client_states, expected.client_states)


# ---- draws -------------------------------------------------------------------


def test_what_is_drawn_follows_from_the_clients_seeds(process):
  clients = _clients()
  outputs = [
    planted.run(
      process,
      planted.cohort_of(process, clients, word),
      client_states=planted.first_states(
        process, planted.cohort_of(process, clients, 'first')
      ),
    )
    for word in ('one', 'one', 'other')
  ]
  one, again, other = outputs
  _compare(process, one, again)
  planted.assert_same(one.client_states, again.client_states)
  (weights,) = planted.global_weights(process, one.state).values()
  (others,) = planted.global_weights(process, other.state).values()
  assert (weights != others).any()


# ---- who else is there -------------------------------------------------------


def test_the_order_of_clients_matters_no_more_than_rounding(process):
  clients = _clients()
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  turned = dict(reversed(clients.items()))
  found = planted.run(process, planted.cohort_of(process, turned, 1))
  _compare(
    process,
    found,
    output,
    lambda a, b: tf.nest.map_structure(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
    ),
  )
  planted.assert_same(
    list(reversed(found.client_states)), list(output.client_states)
  )


def test_a_client_remembers_the_same_whoever_else_is_there(process):
  clients = _clients()
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  few = _without(clients, *_NAMES[::2])
  found = planted.run(process, planted.cohort_of(process, few, 1))
  planted.assert_same(list(found.client_states), output.client_states[1::2])


def test_a_spoilt_client_counts_for_nothing_and_is_counted(process):
  clients = _clients()
  spoilt = (_NAMES[3], _NAMES[6])
  others = _without(clients, *spoilt)
  for name in spoilt:
    _spoil(clients[name])
  found = planted.run(process, planted.cohort_of(process, clients, 1))
  expected = planted.run(process, planted.cohort_of(process, others, 1))
  _compare(process, found, expected)
  assert planted.train_metrics(found)['num_not_finite'] == 2
  assert planted.train_metrics(expected)['num_not_finite'] == 0
  if process.is_stateless:
    return
  # It keeps what it had.
  first = planted.first_states(process, planted.cohort_of(process, clients, 1))
  for place in (3, 6):
    planted.assert_same(found.client_states[place], first[place])


@pytest.mark.parametrize('who', ['spoilt', 'nobody'])
def test_where_nobody_counts_the_weights_stay_as_they_are(process, who):
  clients = _clients() if who == 'spoilt' else {}
  for fields in clients.values():
    _spoil(fields)
  state = process.initialize()
  if clients:
    cohort = planted.cohort_of(process, clients, 1)
    output = planted.run(process, cohort, state)
  else:
    output = process.next(state, [], [])
  planted.assert_same(
    planted.global_weights(process, output.state),
    planted.global_weights(process, state),
  )
  metrics = planted.train_metrics(output)
  assert metrics['num_not_finite'] == len(clients)
  assert metrics['num_clients'] == metrics['num_examples'] == 0
  assert metrics['loss'] == 0.0
  assert output.state.client_work['round'] == 1


# ---- learns ------------------------------------------------------------------


def test_planted_tastes_are_learned(process):
  clients = planted.rate({f'client {i}': 40 for i in range(20)})
  for fields in clients.values():
    fields['time'] = np.zeros(40, np.int64)
  state = process.initialize()
  kept = None
  losses = []
  for number in range(15):
    cohort = planted.cohort_of(process, clients, number)
    output = planted.run(process, cohort, state, kept)
    state = output.state
    kept = None if process.is_stateless else output.client_states
    losses.append(planted.train_metrics(output)['loss'])
  assert planted.train_metrics(output)['num_not_finite'] == 0
  # Who knows no tastes loses as much as the ratings vary.
  variance = np.var(np.concatenate([f['y'] for f in clients.values()]))
  assert losses[-1] < 0.5 * variance
  assert losses[-1] < 0.6 * losses[0]


# ---- refuses -----------------------------------------------------------------


@pytest.mark.parametrize(
  'build', [b for _, b in ROWS], ids=[n for n, _ in ROWS]
)
def test_a_model_with_groups_is_refused_by_who_has_none(build):
  model = planted.factorization(planted.build_tastes, group='items')
  with pytest.raises(client_work.CompositionError, match='has no groups'):
    build(model)
