"""What breaks independent aggregation (FURL, Eqs. 2 and 3) is found."""

import functools
import math
from typing import Any

import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import client_statistics
from tff_partial import processes
from tff_partial import tiers
from tff_partial.checks import independent_aggregation
from tff_partial.checks import split_personalization
from tff_partial.composition import Aggregation
from tff_partial.data import packing
from tff_partial.model import models

pytestmark = pytest.mark.usefixtures('in_native')


@functools.cache
def _model() -> models.PartialModel:
  return planted.factorization()


@functools.cache
def _furl(rule: client_statistics.Statistic | None = None):
  return algorithms.build_furl(_model(), private_rule=rule)


def _check(
  process: processes.PartialProcess, **options: Any
) -> split_personalization.Report:
  clients = planted.rate({'ann': 4, 'bob': 9, 'cid': 6})
  population = packing.pack(clients, process.example_spec)
  return independent_aggregation.check_independent_aggregation(
    process, population, **options
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'rule', [None, client_statistics.SCALED_BY_SHARE], ids=['Eq. 7', 'Eq. 6']
)
def test_furl_keeps_the_constraint(rule):
  report = _check(_furl(rule))
  assert report.holds
  assert str(report) == 'Eq. 2 holds.\nEq. 3 holds.'


@pytest.mark.slow
def test_who_remembers_nothing_keeps_the_constraint():
  assert _check(algorithms.build_fed_recon(_model())).holds


def test_a_global_variable_whose_name_ends_in_a_local_ones_may_be_sent():
  model = tff_partial.learn_first_values(_model())
  assert _check(algorithms.build_fed_recon(model)).holds


_VECTOR = 'user/vector'


def _sum_of_own(client: Any) -> tf.Tensor:
  return tf.reduce_sum(client.weights[tiers.LOCAL][_VECTOR])


@pytest.mark.slow
def test_a_rule_that_looks_at_others_breaks_eq_3():
  """Clients go to where the others are."""
  gossip = client_statistics.Statistic(
    'gossip',
    _sum_of_own,
    update_client_state=lambda before, after, own, total: tf.nest.map_structure(
      lambda w: w + 0.5 * tf.reduce_mean(total), after
    ),
  )
  report = _check(_furl(gossip))
  (violation,) = report.violations
  assert violation.equation == 3
  assert violation.variable == 'user/vector'
  # Half the sum of some moves, which are 0.1 in size.
  assert 0.01 < violation.size < 1
  assert str(report).startswith('Eq. 2 holds.\nEq. 3 does not hold, by 0.')
  assert 'user/vector is remembered by a client and depends on' in str(report)


@pytest.mark.slow
def test_private_weights_that_are_sent_are_found_in_the_types():
  rule = client_statistics.Statistic(
    'sent',
    lambda client: {_VECTOR: client.weights[tiers.LOCAL][_VECTOR]},
    update_client_state=lambda before, after, own, total: after,
  )
  report = _check(_furl(rule))
  assert [tuple(v)[:3] for v in report.violations] == [
    (2, 'user/vector', math.inf)
  ]
  assert 'user/vector is sent to the server' in str(report)


@pytest.mark.slow
def test_a_server_that_looks_at_private_weights_breaks_eq_2():
  """It adds what clients remember to its item vectors."""

  def update(server: client_statistics.Server, total: Any) -> Any:
    added = tf.nest.map_structure(lambda w: w + 0.1 * total, server.weights)
    return server._replace(weights=added)

  leak = client_statistics.Statistic('leak', _sum_of_own, update=update)
  report = _check(_furl(leak))
  (violation,) = report.violations
  assert violation.equation == 2
  assert violation.variable == (
    'global_model_weights/trainable/global/items/embeddings'
  )
  # A tenth of the moves of 0.1, of some numbers, as many times as ratings.
  assert 0.01 < violation.size < 2
  assert str(report).startswith('Eq. 3 holds.\nEq. 2 does not hold, by ')


@pytest.mark.slow
@pytest.mark.parametrize(
  ('clients', 'message'),
  [
    ({'ann': 4}, 'needs two clients or more, found 1'),
    ({'ann': 4, 'bob': 5}, 'not finite, .* Lower the learning rates'),
  ],
)
def test_clients_that_tell_nothing_are_refused(clients, message):
  process = _furl()
  fields = planted.rate(clients)
  fields['ann']['y'][:] = 1e30
  population = packing.pack(fields, process.example_spec)
  with pytest.raises(split_personalization.CheckError, match=message):
    independent_aggregation.check_independent_aggregation(process, population)


@pytest.mark.slow
def test_noise_that_follows_from_no_seed_is_refused():
  noisy = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
    noise_multiplier=1.0, clients_per_round=3, clip=1.0
  )
  process = algorithms.build_furl(
    _model(), aggregation=Aggregation(aggregator=noisy)
  )
  said = 'Check the process without the noise'
  with pytest.raises(split_personalization.CheckError, match=said):
    _check(process)
