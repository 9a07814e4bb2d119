"""Laws that hold for every algorithm: a new one is a new row of the table."""

from collections.abc import Callable, Collection
import copy
import dataclasses
import functools
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tree

import baselines
from tests.support import planted
import tff_partial
from tff_partial import aggregators
from tff_partial import algorithms
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import processes
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.algorithms import hpfl
from tff_partial.client import client_work
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.model import first_values
from tff_partial.model import keras_3
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact
from tff_partial.templates import implicit_factors
from tff_partial.templates import rating_posteriors

optimizers = tff.learning.optimizers
Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
  """An algorithm with settings such that it learns in a few rounds.

  Attributes:
    name: That of the builder, and after a comma what is special.
    options: Settings of the process.
    measuring: Settings of the evaluation.
    measured_as: Whose evaluation it is, if it has none of its own.
    local: Whether it is for models with local variables.
    personal: Whether its clients end with a model of their own.
    exact: Whether padding changes no bit; if not, it changes rounding.
    grouped: Whether it is for models with groups.
    wrap: Makes the model that it trains of the one that it is for.
    shares_copies: Whether clients send something of their own copies of the
      global weights, as HPFL does, and updates that MOON's copies moved.
    template: The model that it is for, if for no other: 'posterior' or
      'implicit', of whose local weights clients send sums.
  """

  name: str
  options: Options = dataclasses.field(default_factory=dict)
  measuring: Options = dataclasses.field(default_factory=dict)
  measured_as: str = ''
  local: bool = False
  personal: bool = False
  exact: bool = True
  grouped: bool = False
  wrap: Callable[[models.PartialModel], models.PartialModel] = copy.copy
  shares_copies: bool = False
  template: str = ''

  @property
  def form(self) -> str:
    """The model that it is for."""
    if self.grouped:
      return 'grouped' if self.local else 'clustered'
    if self.template:
      return self.template
    return 'partly local' if self.local else 'global'

  def model(
    self, model_of: dict[str, models.PartialModel]
  ) -> models.PartialModel:
    return self.wrap(model_of[self.form])

  def build(
    self, model: models.PartialModel, **options: Any
  ) -> processes.PartialProcess:
    return _builder(self.name)(model, **{**self.options, **options})

  @property
  def measure(self) -> Callable[..., evaluation.Evaluation]:
    """The builder of its evaluation."""
    return _builder(self.measured_as or self.name, '_eval')


def _builder(name: str, ending: str = '') -> Any:
  builder = f'build_{name.split(",")[0]}{ending}'
  package = algorithms if hasattr(algorithms, builder) else baselines
  return getattr(package, builder)


# Each item has an attribute of its own.
_OF_ITEMS = hpfl.Attributes(
  planted.NUM_ITEMS,
  lambda items: tf.one_hot(items, planted.NUM_ITEMS),
  ['items/embeddings'],
  lambda labels, predictions: tf.abs(labels - predictions) < 0.5,
)


def _training(rate: Any = 0.1, epochs: int = 5, **options: Any) -> Phase:
  optimizer = sgd(rate) if isinstance(rate, float) else rate
  return Phase(optimizer=optimizer, epochs=epochs, shuffle=True, **options)


def _partly_local(
  name: str,
  *,
  measuring: Options | None = None,
  measured_as: str = '',
  exact: bool = True,
  wrap: Any = copy.copy,
  template: str = '',
  **options: Any,
) -> Row:
  """An algorithm for models with local variables, with its settings."""
  return Row(
    *(name, options, measuring or {}, measured_as),
    local=True,
    personal=True,
    exact=exact,
    wrap=wrap,
    template=template,
  )


def _fed_embed(name: str, of_local: Any, exact: bool = True) -> Row:
  parts = {'parts': planted.HEADS, 'assignment': planted.OF_FIRST_ITEM}
  rates = {tiers.GLOBAL: sgd(0.03), tiers.LOCAL: of_local}
  options = {
    'training': _training(rates, batch_size=5),
    'server_optimizer': optimizers.build_adam(0.1),
  }
  return dataclasses.replace(
    _partly_local(name, exact=exact, **parts, **options),
    measuring={**parts, 'split': splits.same()},
    grouped=True,
  )


def _brought(
  model: models.PartialModel, kind: str, **options: Any
) -> models.PartialModel:
  """One of the models that people bring, of the same Keras as another one."""
  keras = keras_3.module_of(model.build())
  return planted.brought(keras, kind, **options)


_add_lora = tff_partial.add_lora
_BOTH_RATES = {tiers.GLOBAL: sgd(0.1), tiers.LOCAL: sgd(0.05)}
_RECON: Options = {
  'reconstruct': Phase(optimizer=sgd(0.1), epochs=5),
  'update': Phase(optimizer=sgd(0.1), epochs=5),
}
_TEN_EPOCHS = {'personalise': Phase(epochs=10)}
_FINE_TUNED = {
  'personalise': Phase(optimizer=sgd(0.1), epochs=30),
  'split': splits.same(),
}
_OF_RATINGS = {'features': lambda ratings: ratings[:, tf.newaxis]}
_TRAINED: Options = {'training': _training()}

ROWS = [
  _partly_local('fed_recon', measuring=_TEN_EPOCHS, **_RECON),
  _partly_local(
    'fed_recon, exact',
    measuring={'personalise': Phase(optimizer=Exact(ridge=1.0))},
    exact=False,
    reconstruct=Phase(optimizer=Exact(ridge=1.0)),
    update=Phase(optimizer=sgd(0.02), epochs=5),
  ),
  _partly_local('fed_als', exact=False, template='posterior'),
  _partly_local('fed_ials', exact=False, template='implicit'),
  *(
    _partly_local(
      name,
      aggregation=Aggregation(
        aggregator=privacy.private_mean(
          clipping.FixedClip(1.0), noise_multiplier=0.0, clients_per_round=12
        )
      ),
      measured_as='fed_als',
      exact=False,
      template='posterior',
    )
    for name in ('fed_als_private', 'dp_als')
  ),
  _partly_local(
    'fed_recon, joint',
    measuring=_TEN_EPOCHS,
    split=splits.shuffled(splits.by_time(share=0.6)),
    joint=True,
    aggregation=Aggregation(aggregator=tff.learning.robust_aggregator()),
    **_RECON,
  ),
  _partly_local(
    'fed_recon, adaptive',
    measuring=_TEN_EPOCHS,
    split=splits.shuffled(splits.alternating(4)),
    reconstruct=Phase(
      optimizer=optimizers.build_adam(0.02), batch_size=4, epochs=10
    ),
    update=Phase(optimizer=optimizers.build_adam(0.05), batch_size=4),
    server_optimizer=optimizers.build_yogi(0.1),
    aggregation=Aggregation(
      client_weighting=tff.learning.ClientWeighting.UNIFORM
    ),
  ),
  _partly_local(
    'fed_recon, learned first values',
    measuring=_TEN_EPOCHS,
    wrap=tff_partial.learn_first_values,
    reconstruct=Phase(optimizer=sgd(0.1), epochs=10),
    update=Phase(optimizer=sgd(0.3)),
  ),
  _partly_local(
    'furl, low-rank adapters of items',
    wrap=lambda m: _add_lora(m, 4, where='items', alpha=1.0, b=tiers.LOCAL),
    training=_training(epochs=10),
  ),
  _partly_local(
    'furl, two adapters',
    wrap=lambda model: _add_lora(
      _add_lora(model, 2, where='items'),
      2,
      where='items',
      a=tiers.LOCAL,
      b=tiers.LOCAL,
      name='own',
    ),
    training=_training(0.04, epochs=10),
  ),
  _partly_local(
    'fed_recon, adapters that are rebuilt',
    measuring={'personalise': Phase(optimizer=sgd(0.05), epochs=20)},
    wrap=lambda model: _add_lora(
      _brought(model, '', local=None),
      2,
      where='user',
      b=tiers.LOCAL,
      train='items',
    ),
    reconstruct=Phase(optimizer=sgd(0.05), epochs=20),
    update=Phase(optimizer=sgd(0.1), epochs=5),
  ),
  Row(
    'fed_avg, adapters whose A is frozen',
    _TRAINED,
    wrap=lambda m: _add_lora(m, 4, where='user', a='frozen', train='items'),
  ),
  _partly_local('furl', training=_training(_BOTH_RATES)),
  *(
    _partly_local(
      f'furl, {kind}',
      wrap=functools.partial(_brought, kind=kind),
      training=_training(0.05),
    )
    for kind in ('strings', 'texts', 'outputs', 'mixed_bfloat16')
  ),
  *(
    _partly_local(
      f'furl, {state} statistics',
      wrap=functools.partial(_brought, kind='normalized', state=state),
      training=_training(0.2, epochs=10),
      exact=False,
    )
    for state in ('averaged', 'local')
  ),
  _partly_local('fed_att', training=_training(_BOTH_RATES)),
  Row(
    'hpfl',
    {
      'attributes': _OF_ITEMS,
      'drafts': None,
      'split': splits.fraction(0.8),
      'threshold': 0.0,
      **_TRAINED,
    },
    {'attributes': _OF_ITEMS},
    local=True,
    personal=True,
    shares_copies=True,
  ),
  _fed_embed('fed_embed', sgd(0.05)),
  _fed_embed('fed_embed, exact', Exact(), exact=False),
  _partly_local(
    'fed_rep',
    head=Phase(optimizer=sgd(0.05), epochs=5),
    representation=_training(0.05),
  ),
  _partly_local('fed_babu', measuring=_FINE_TUNED, **_TRAINED),
  Row('ifca', _TRAINED, personal=True, grouped=True),
  # These tastes are no mixture, and in so few rounds all shares are alike:
  # groups_test.py has clients whose mixtures are found.
  Row(
    'fed_em',
    {'are_logits': False, **_TRAINED},
    {'are_logits': False},
    exact=False,
    grouped=True,
  ),
  Row('fed_avg', _TRAINED),
  Row(
    'fed_avg, robust join',
    {
      'aggregation': Aggregation(
        aggregators.coordinate_median(clients_per_round=20)
      ),
      **_TRAINED,
    },
  ),
  Row('fed_sgd', {'client_learning_rate': 0.5}, exact=False),
  Row('fed_prox', {'penalty': 0.01, **_TRAINED}),
  Row('fed_adam', {'server_learning_rate': 0.02, **_TRAINED}),
  Row(
    'ditto',
    {'penalty': 0.01, 'personal': _training(), **_TRAINED},
    {'penalty': 0.01},
    personal=True,
  ),
  Row(
    'p_fed_me',
    {
      'penalty': 0.1,
      'personal': _training(steps_per_batch=5),
      'client_learning_rate': 2.0,
    },
    {
      'penalty': 0.1,
      'personalise': Phase(optimizer=sgd(0.1), epochs=5, steps_per_batch=5),
      'split': splits.same(),
    },
    personal=True,
  ),
  Row(
    'scaffold', {'num_clients': 12, 'server_optimizer': sgd(1.0), **_TRAINED}
  ),
  Row('fed_dyn', {'penalty': 0.01, **_TRAINED}),
  Row(
    'per_fed_avg',
    {'adaptation_rate': 0.02, 'training': _training(0.05)},
    _FINE_TUNED,
    personal=True,
  ),
  Row('moon', {'penalty': 0.1, **_OF_RATINGS, **_TRAINED}, shares_copies=True),
  Row(
    'apfl',
    {'mixture': 0.8, 'mixture_learning_rate': 0.01, **_TRAINED},
    {'mixture': 0.8, 'mixture_learning_rate': 0.01},
    personal=True,
  ),
  Row(
    'mr_mtl',
    {'penalty': 0.01, **_TRAINED},
    {'penalty': 0.01},
    personal=True,
    shares_copies=True,
  ),
  Row('pp_sgd', _TRAINED, personal=True, shares_copies=True),
  Row(
    'fed_ala',
    {'adaptation': Phase(optimizer=sgd(30.0), epochs=20), **_TRAINED},
    personal=True,
    shares_copies=True,
  ),
  _partly_local(
    'fed_proto',
    num_classes=2,
    classes=lambda ratings: tf.cast(ratings > 0, tf.int32),
    penalty=0.01,
    **_OF_RATINGS,
    **_TRAINED,
  ),
  _partly_local('fed_dbe', penalty=0.1, **_OF_RATINGS, **_TRAINED),
  _partly_local('local_only', **_TRAINED),
]

_NAMES = [f'client {number}' for number in range(12)]
_SIZES = (9, 14, 3, 40, 22, 6, 31, 17, 1, 12, 25, 8)
_COUNTS = dict(zip(_NAMES, _SIZES, strict=True))
# Whose own weights grow some hundredfold within a round, and more.
_DIVERGING = ('client 2',)


@pytest.fixture(scope='module', autouse=True)
def fixture_runtime():
  with runtimes.native():
    yield


@pytest.fixture(scope='module', name='model_of')
def fixture_model_of() -> dict[str, models.PartialModel]:
  """The same model with and without local variables, and one with groups."""
  return {
    'partly local': planted.factorization(planted.build_tastes),
    'global': planted.factorization(planted.build_tastes, local=None),
    'clustered': planted.factorization(
      planted.build_tastes, local=None, group='user', num_groups=6
    ),
    'grouped': planted.heads(),
    'posterior': rating_posteriors.build_model(planted.NUM_ITEMS, 3),
    'implicit': implicit_factors.build_model(planted.NUM_ITEMS, 3),
  }


def rows(quick: Collection[str]) -> list[Any]:
  """All rows, of which `make test` runs those that are named."""
  return [
    pytest.param(
      row, id=row.name, marks=() if row.name in quick else pytest.mark.slow
    )
    for row in ROWS
  ]


# `make test` runs the algorithms of three of the papers.
@pytest.fixture(
  scope='module', name='row', params=rows(('fed_recon', 'furl', 'hpfl'))
)
def fixture_row(request) -> Row:
  return request.param


@pytest.fixture(scope='module', name='process')
def fixture_process(row, model_of) -> processes.PartialProcess:
  return row.build(row.model(model_of))


@pytest.fixture(scope='module', name='measuring')
def fixture_measuring(row, model_of) -> evaluation.Evaluation:
  return row.measure(row.model(model_of), **row.measuring)


# The composition of another row under another name, as baselines_test.py,
# fed_embed_test.py and attention_and_noise_test.py prove, or none at all.
EXEMPT = {
  'build_centralized': 'FedAvg of one client',
  'build_fed_alt': 'FedRep',
  'build_fed_bn': 'FedPer of normalization',
  'build_fed_bn_eval': 'measures what FedBN trains',
  'build_fed_noise': 'FURL, with noise that also spoilt clients send',
  'build_fed_per': 'FURL',
  'build_fed_proto_nearest_eval': 'measures what FedProto trains',
  'build_fed_rap': 'FURL, with a step on two more terms after each',
  'build_fed_recon_fine_tuning_eval': 'measures what FedRecon trains',
  'build_fed_sim': 'FURL',
  'build_fed_yogi': 'FedAdam, with another optimizer at the server',
  'build_fine_tuning_eval': 'measures what others train',
  'build_knn_per_eval': 'measures what others train',
  'build_lg_fed_avg': 'FURL',
  'build_ngram_cache_eval': 'measures what others train',
  'build_p_fed_km': 'FedEmbed, with gradients in place of embeddings',
  'build_p_fed_km_eval': 'FedEmbed',
}


def test_every_algorithm_has_a_row():
  packages = [vars(package) for package in (algorithms, baselines)]
  known = {f'build_{row.name.split(",")[0]}' for row in ROWS} | set(EXEMPT)
  assert known <= {*packages[0], *packages[1]}
  for package in packages:
    for name in package['__all__']:
      is_measured = package[name] in [row.measure for row in ROWS]
      assert name in known or is_measured, name


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


# They train such weights on terms alone, exactly, or not at all.
_KEEP_FIRST_VALUES = (
  *(('averaged', 'p_fed_me'), ('local', 'fed_babu')),
  ('averaged', 'per_fed_avg'),
  ('local', 'fed_recon, exact'),
)


@pytest.mark.slow
@pytest.mark.parametrize('state', ['averaged', 'local'])
def test_moving_averages_are_trained(row, state, model_of):
  """At the server or at the client, unless the algorithm says that it cannot.

  The variance of items' vectors is far from 1, its first value.
  """
  has_own_model = row.name == 'hpfl' or (
    row.wrap not in (copy.copy, tff_partial.learn_first_values)
  )
  if row.form not in ('partly local', 'global') or has_own_model:
    pytest.skip('Its models have a form of their own.')
  is_local = state == 'local' and not row.local
  model = _brought(
    model_of[row.form],
    'normalized',
    local='user' if row.local else None,
    state=state,
  )
  if is_local:
    pytest.skip('Its clients keep no local variables.')
  if (state, row.name) in _KEEP_FIRST_VALUES:
    with pytest.raises(
      client_work.CompositionError, match='would keep their first values'
    ):
      row.build(model)
    return
  process = row.build(model)
  clients = _without(_clients(), *_DIVERGING)
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  shared = planted.global_weights(process, output.state)
  name = 'norm/moving_variance'
  assert (name in shared) == (state == 'averaged')
  of_server, of_clients = (
    [
      np.asarray(tensor)
      for path, tensor in tree.flatten_with_path(held)
      if path[-1] == name
    ]
    for held in (shared, output.client_states)
  )
  if row.name == 'pp_sgd':  # Clients hold differences, of weights alone.
    assert not of_clients
  found = of_server + of_clients
  if state == 'local' and not found:
    assert process.is_stateless  # What clients estimate is forgotten.
    return
  assert min(np.min(each) for each in found) > 0
  assert min(np.max(each) for each in found) < 0.9


# ---- stays home --------------------------------------------------------------


# What all clients learn together, of the shapes of local weights; that these
# are not in it, first_values_test.py shows.
_FIRST_VALUES = rf'{first_values.PREFIX}[\w/]+=\w+\[[\d,]+\]'


def _shapes(type_spec: tff.Type) -> list[str]:
  """All shapes of tensors in a type, as they are printed."""
  text = re.sub(_FIRST_VALUES, '', type_spec.compact_representation())
  return re.findall(r'\[([\d,?]+)\]', text)


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


def _served(signature: tff.FunctionType) -> list[tff.Type]:
  return _at_server(signature.parameter) + _at_server(signature.result)


def test_local_weights_stay_home(row, process, measuring):
  if not row.local:
    pytest.skip('The model has no local weights.')
  if row.template:
    pytest.skip("Items' weights have the shapes of users' ones.")
  if 'user/kernel' in process.model.frozen_weights():
    pytest.skip('What adapters are added to has the shape of local ones.')
  local = str(planted.LOCAL_SIZE)
  kept = process.initialize_client.type_signature.result
  assert local in _sizes(kept) or process.is_stateless
  served = _served(process.next.type_signature)
  assert len(served) == 3
  assert str(planted.NUM_ITEMS) in _sizes(*served)
  assert local not in _sizes(*served, process.initialize.type_signature.result)
  # Nor do they leave when they are measured.
  assert local in _sizes(measuring.personalise.type_signature.result)
  served = _served(measuring.evaluate.type_signature)
  assert len(served) == 2
  assert local not in _sizes(
    *served, measuring.evaluate.type_signature.result.per_client
  )


def test_copies_of_the_global_weights_stay_home(row, process):
  if row.shares_copies:
    pytest.skip('Clients send their copies.')
  # They have the shapes of what is sent: what becomes of them must show.
  cohort = planted.cohort_of(process, _clients(), 1)
  kept = planted.first_states(process, cohort)
  if process.is_stateless or tiers.PERSONAL not in kept[0]:
    pytest.skip('Clients keep no copies.')
  outputs = []
  for value in (0.1, 0.2):
    for each in kept:
      each['initialized'] = True
      for name, spec in process.model.specs(tiers.GLOBAL).items():
        each[tiers.PERSONAL][name] = np.full(spec.shape, value, 'f')
    outputs.append(planted.run(process, cohort, client_states=kept))
  one, other = outputs
  planted.assert_same_weights(process, one.state, other.state)
  first, second = (o.client_states[0][tiers.PERSONAL] for o in outputs)
  assert all((first[name] != second[name]).any() for name in first)


# ---- padding is inert --------------------------------------------------------


def test_padding_changes_no_bit(row, process):
  compare = planted.assert_same if row.exact else planted.assert_close
  clients = _clients()
  expected = planted.run(process, planted.cohort_of(process, clients, 1))
  for capacities in ([64], [3, 14, 40]):
    cohort = planted.cohort_of(process, clients, 1, capacities=capacities)
    found = planted.run(process, cohort)
    _compare(process, found, expected, compare)
    compare(found.client_states, expected.client_states)


# ---- draws -------------------------------------------------------------------


def test_what_is_drawn_follows_from_the_clients_seeds(row, process):
  if row.template:
    pytest.skip('Nothing is drawn.')
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
  assert planted.train_metrics(one)['loss'] != pytest.approx(
    planted.train_metrics(other)['loss'], abs=1e-9
  )


# ---- who else is there -------------------------------------------------------


def test_the_order_of_clients_matters_no_more_than_rounding(process):
  clients = _clients()
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  turned = dict(reversed(clients.items()))
  found = planted.run(process, planted.cohort_of(process, turned, 1))
  by_rounding = functools.partial(planted.assert_close, relative=1e-5)
  _compare(process, found, output, by_rounding)
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
def test_where_nobody_counts_the_weights_stay_as_they_are(row, process, who):
  clients = _clients() if who == 'spoilt' else {}
  for fields in clients.values():
    _spoil(fields)
  state = process.initialize()
  if clients:
    cohort = planted.cohort_of(process, clients, 1)
    output = planted.run(process, cohort, state)
  else:
    output = process.next(state, [], [])
  planted.assert_same_weights(process, output.state, state)
  metrics = planted.train_metrics(output)
  # A solve, unlike steps, stays finite where no example is left to measure.
  solves = row.name == 'fed_recon, exact'
  alone = [len(fields['y']) for fields in clients.values()].count(1)
  assert metrics['num_not_finite'] == len(clients) - solves * alone
  assert metrics['num_clients'] == metrics['num_examples'] == 0
  assert metrics['loss'] == 0.0
  assert output.state.client_work['round'] == 1


# ---- runtimes agree ----------------------------------------------------------


def test_another_runtime_comes_to_the_same(process):
  cohort = planted.cohort_of(process, _clients(), 1)
  state = process.initialize()
  kept = planted.first_states(process, cohort)
  expected = planted.run(process, cohort, state, kept)
  with runtimes.cohort(jit=False):
    found = planted.run(process, cohort, state, kept)
  _compare(process, found, expected, planted.assert_close)
  planted.assert_close(list(found.client_states), list(expected.client_states))


# ---- learns ------------------------------------------------------------------


@pytest.mark.slow
def test_tastes_are_learned_where_there_is_a_model_for_each(
  row, process, measuring
):
  if row.template == 'implicit':
    pytest.skip('It reads no ratings; its own tests have tastes to find.')
  clients = planted.rate({f'client {i}': 40 for i in range(20)})
  generator = np.random.default_rng(1)
  liked = generator.normal(size=planted.NUM_ITEMS).astype(np.float32)
  # What tastes add to how much an item is liked by all.
  variance = np.var(np.concatenate([f['y'] for f in clients.values()]))
  for fields in clients.values():
    fields['y'] += liked[fields['x']]
    fields['time'] = np.zeros(40, np.int64)
  state = process.initialize()
  kept = None
  with runtimes.cohort(jit=False):
    for number in range(15):
      cohort = planted.cohort_of(process, clients, number)
      output = planted.run(process, cohort, state, kept)
      state = output.state
      kept = None if process.is_stateless else output.client_states
      assert planted.train_metrics(output)['num_not_finite'] == 0
    cohort = planted.cohort_of(measuring, clients, 'measured')
    same = process.initialize_client.type_signature.is_equivalent_to(
      measuring.initialize_client.type_signature
    )
    measured = measuring.evaluate(
      process.get_model_weights(state),
      # What SCAFFOLD's clients remember, no model reads.
      kept if kept and same else planted.first_states(measuring, cohort),
      cohort,
    )
  loss = measured.metrics['loss']
  if row.personal:
    assert loss < 0.5 * variance
  else:
    assert 0.7 * variance < loss < 1.3 * variance


# ---- refuses -----------------------------------------------------------------


def test_a_model_with_groups_is_refused_by_who_has_none(row):
  if row.grouped or row.template:
    pytest.skip('It has groups, or a model of its own.')
  local = 'user' if row.local else None
  model = planted.factorization(
    planted.build_tastes, local=local, group='items', num_groups=2
  )
  with pytest.raises(
    groups.GroupError,
    match='variables for groups, but the algorithm has no groups. Build the '
    'model without `group`',
  ):
    row.build(model)


def test_a_model_with_local_weights_is_refused_by_who_trains_none(
  row, model_of
):
  if row.local or row.grouped:
    pytest.skip('It trains them, or is for another model.')
  with pytest.raises(
    client_work.CompositionError,
    match=r"local variables, \['user/kernel'\], which no phase trains. Build "
    'it without `local`, or take an algorithm that trains them',
  ):
    row.build(model_of['partly local'])
