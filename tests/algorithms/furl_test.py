"""FURL agrees with FedAvg over a model that holds all users' parameters."""

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import client_statistics
from tff_partial import composition
from tff_partial import layers
from tff_partial import processes
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_COUNTS = {'ann': 7, 'bob': 14, 'cid': 3, 'dot': 9, 'eve': 22, 'fay': 1}
_USERS = tuple(_COUNTS)
_OWN, _TABLE = 'user/own', 'users/embeddings'
# Who takes part in each round.
_COHORTS = (
  ('ann', 'bob', 'cid'),
  ('bob', 'eve', 'fay', 'dot'),
  ('cid',),
  ('eve', 'ann'),
  ('fay', 'cid', 'bob', 'dot', 'ann', 'eve'),
)
_TRAINING = {
  'optimizer': sgd(0.3),
  'batch_size': 4,
  'epochs': 2,
  'shuffle': True,
}
pytestmark = pytest.mark.usefixtures('in_native')


def _predict(item: Any, user: Any) -> Any:
  """A rating by an item's vector and the user's, through hidden layers."""
  items = tf.keras.layers.Embedding(planted.NUM_ITEMS, 3, name='items')(item)
  both = tf.keras.layers.Concatenate()([items, user])
  hidden = tf.keras.layers.Dense(5, 'tanh', name='hidden')(both)
  return tf.keras.layers.Dense(1, name='rating')(hidden)


def _build_split() -> tf.keras.Model:
  """The model of FURL, which knows one user."""
  item = tf.keras.Input([], dtype=tf.int32, name='item')
  user = layers.PrivateVector(planted.NUM_FACTORS, name='user')(item)
  return tf.keras.Model({'item': item}, _predict(item, user))


def _build_central() -> tf.keras.Model:
  """The model of FedAvg, which holds the parameters of all users."""
  item = tf.keras.Input([], dtype=tf.int32, name='item')
  user = tf.keras.Input([], dtype=tf.int32, name='user')
  table = tf.keras.layers.Embedding(
    len(_USERS), planted.NUM_FACTORS, name='users'
  )
  rating = _predict(item, table(user))
  return tf.keras.Model({'item': item, 'user': user}, rating)


@functools.cache
def _split_model() -> models.PartialModel:
  return planted.factorization(_build_split)


@functools.cache
def _furl(
  rule: client_statistics.Statistic | None = None,
) -> processes.PartialProcess:
  return algorithms.build_furl(
    _split_model(), training=Phase(**_TRAINING), private_rule=rule
  )


class _OwnersMean(tff.aggregators.WeightedAggregationFactory):
  """The weighted mean, where users' rows count for those who moved them."""

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    @tff.tensorflow.computation(value_type, weight_type)
    def weigh(value: Any, weight: Any) -> Any:
      weights = tf.nest.map_structure(lambda _: weight, value)
      moved = tf.not_equal(value[tiers.GLOBAL][_TABLE], 0)
      weights[tiers.GLOBAL][_TABLE] = weight * tf.cast(
        tf.reduce_any(moved, axis=1, keepdims=True), tf.float32
      )
      summed = tf.nest.map_structure(lambda v, w: v * w, value, weights)
      return collections.OrderedDict(value=summed, weight=weights)

    @tff.tensorflow.computation(weigh.type_signature.result)
    def divide(total: Any) -> Any:
      return tf.nest.map_structure(
        tf.math.divide_no_nan, total['value'], total['weight']
      )

    @tff.federated_computation
    def initialize() -> Any:
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      total = tff.federated_sum(tff.federated_map(weigh, (value, weight)))
      return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_map(divide, total),
        tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)


def _fed_avg(
  aggregator: tff.aggregators.WeightedAggregationFactory | None = None,
) -> processes.PartialProcess:
  return composition.compose(
    planted.factorization(_build_central, local=None),
    work=[Phase((tiers.GLOBAL,), measured=True, **_TRAINING)],
    aggregation=Aggregation(aggregator=aggregator),
  )


def _clients() -> dict[str, planted.Fields]:
  """Ratings, with the number of whoever rated."""
  clients = planted.rate(_COUNTS)
  for number, fields in enumerate(clients.values()):
    item = fields['x']
    fields['x'] = {'item': item, 'user': np.full_like(item, number)}
    fields['y'] = fields['y'][:, None]
  return clients


def _first_states(process: processes.PartialProcess) -> dict[str, Any]:
  return {
    client: process.initialize_client(seed)
    for client, seed in zip(
      _USERS, planted.client_seeds(_USERS, 'first'), strict=True
    )
  }


def _cohort(process: Any, ids: tuple[str, ...], number: int) -> Any:
  population = planted.pack(_clients(), process.example_spec)
  return population.cohort(ids, planted.client_seeds(ids, number))


def _with_weights(
  process: processes.PartialProcess, weights: dict[str, np.ndarray]
) -> Any:
  """The first state of a process, with other weights."""
  named = {name: weights[name] for name in process.model.specs(tiers.GLOBAL)}
  return process.set_model_weights(
    process.initialize(), planted.as_model_weights(named)
  )


# ---- the theorem -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('rule', 'build_aggregator'),
  [(client_statistics.SCALED_BY_SHARE, lambda: None), (None, _OwnersMean)],
  ids=['Eq. 6', 'Eq. 7'],
)
def test_it_is_fed_avg_over_the_table_of_all_users(rule, build_aggregator):
  furl, fed_avg = _furl(rule), _fed_avg(build_aggregator())
  kept = _first_states(furl)
  state = furl.initialize()
  weights = planted.global_weights(furl, state)
  table = np.stack([kept[client][_OWN] for client in _USERS])
  first = {**weights, _TABLE: table}
  central_state = _with_weights(fed_avg, first)
  for number, ids in enumerate(_COHORTS):
    before = {client: kept[client][_OWN].copy() for client in _USERS}
    output = furl.next(
      state, [kept[client] for client in ids], _cohort(furl, ids, number)
    )
    state = output.state
    kept.update(zip(ids, output.client_states, strict=True))
    central = planted.run(fed_avg, _cohort(fed_avg, ids, number), central_state)
    central_state = central.state

    wanted = planted.global_weights(fed_avg, central_state)
    table = wanted.pop(_TABLE)
    found = planted.global_weights(furl, state)
    planted.assert_close(found, {name: wanted[name] for name in found})
    for row, client in zip(table, _USERS, strict=True):
      planted.assert_close(kept[client][_OWN], row)
      if client in ids:
        assert abs(row - before[client]).max() > 1e-4
      else:
        # Not even the last bit of who was not there has moved.
        planted.assert_same(kept[client][_OWN], before[client])
    metrics, theirs = map(planted.train_metrics, (output, central))
    assert metrics['rmse'] == pytest.approx(theirs['rmse'], rel=1e-5)
    assert metrics['num_examples'] == theirs['num_examples']
  for name, tensor in planted.global_weights(furl, state).items():
    assert abs(tensor - first[name]).max() > 1e-3


@pytest.mark.slow
def test_eq_6_is_the_clients_share_of_the_step_of_eq_7():
  furl, scaling = _furl(), _furl(client_statistics.SCALED_BY_SHARE)
  cohort = _cohort(furl, _USERS, 0)
  output, other = (planted.run(each, cohort) for each in (furl, scaling))
  planted.assert_same(
    planted.global_weights(furl, output.state),
    planted.global_weights(scaling, other.state),
  )
  total = sum(_COUNTS.values())
  for first, kept, scaled, count in zip(
    planted.first_states(furl, cohort),
    output.client_states,
    other.client_states,
    _COUNTS.values(),
    strict=True,
  ):
    step = kept[_OWN] - first[_OWN]
    planted.assert_close(scaled[_OWN] - first[_OWN], step * count / total)


# ---- training ----------------------------------------------------------------


@pytest.mark.slow
def test_private_parameters_may_have_an_optimizer_of_their_own():
  own = {tiers.GLOBAL: _TRAINING['optimizer'], tiers.LOCAL: sgd(0.0)}
  still = algorithms.build_furl(
    _split_model(), training=Phase(**{**_TRAINING, 'optimizer': own})
  )
  cohort = _cohort(still, _USERS, 0)
  first = planted.first_states(still, cohort)
  output = planted.run(still, cohort, None, first)
  planted.assert_same(list(output.client_states), list(first))
  before = planted.global_weights(still, still.initialize())
  for name, tensor in planted.global_weights(still, output.state).items():
    assert (tensor != before[name]).any()


# ---- users who are seen, and new ones ----------------------------------------


@pytest.mark.slow
def test_seen_users_are_measured_with_what_they_remember():
  exam = algorithms.build_furl_eval(_split_model(), split=splits.first(5))
  weights = _furl().get_model_weights(_furl().initialize())
  kept = _first_states(_furl())
  cohort = _cohort(exam, _USERS, 0)
  measured = exam.evaluate(weights, list(kept.values()), cohort)
  for client, fields, own in zip(
    _USERS, _clients().values(), measured.per_client, strict=True
  ):
    later = {'item': fields['x']['item'][5:]}
    assert own['num_examples'] == len(later['item'])
    if not own['num_examples']:
      continue
    keras = exam.model.to_keras(weights.trainable[tiers.GLOBAL], kept[client])
    errors = keras(later) - fields['y'][5:]
    assert own['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)


@pytest.mark.slow
def test_new_users_train_private_parameters_alone():
  exam = algorithms.build_furl_eval(
    _split_model(),
    split=splits.same(),
    personalise=Phase(optimizer=sgd(0.03), batch_size=100, epochs=5),
  )
  weights = _furl().get_model_weights(_furl().initialize())
  shared = dict(weights.trainable[tiers.GLOBAL])
  cohort = _cohort(exam, _USERS, 0)
  for value, first, fields in zip(
    cohort, planted.first_states(exam, cohort), _clients().values(), strict=True
  ):
    own = dict(exam.personalise(weights, first, value))
    trained = {_OWN: own.pop(_OWN)}
    planted.assert_same(own, shared)
    items = {'item': fields['x']['item']}
    before, after = (
      np.mean((exam.model.to_keras(shared, private)(items) - fields['y']) ** 2)
      for private in (first, trained)
    )
    assert after < before
    _, metrics = exam.measure(weights, first, value)
    assert metrics['loss'] == pytest.approx(after, rel=1e-5)
