"""Robust joins beside NumPy, and against clients that pull backwards."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
import tff_partial
from tff_partial import aggregators
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.composition import Aggregation
from tff_partial.contexts import ClientContext
from tff_partial.contexts import OverwriteWeights
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_MOST = 12


def _median(updates: np.ndarray) -> np.ndarray:
  return np.median(updates, 0)


def _trimmed(updates: np.ndarray) -> np.ndarray:
  cut = int(0.2 * len(updates))
  return np.sort(updates, 0)[cut : len(updates) - cut].mean(0)


def _krum(updates: np.ndarray, chosen: int) -> np.ndarray:
  scores = []
  for own in updates:
    distances = np.sort([np.sum((own - other) ** 2) for other in updates])
    scores.append(sum(distances[1 : len(updates) - 2 - 2 + 1]))
  return updates[np.argsort(scores)[:chosen]].mean(0)


def _geometric(updates: np.ndarray) -> np.ndarray:
  point = _median(updates)
  for _ in range(8):
    shares = [1 / max(np.linalg.norm(one - point), 1e-6) for one in updates]
    point = np.average(updates, axis=0, weights=shares)
  return point


_JOINS = {
  'median': (aggregators.coordinate_median, {}, _median),
  'trimmed mean': (aggregators.trimmed_mean, {'share': 0.2}, _trimmed),
  'krum': (aggregators.krum, {'num_attackers': 2}, lambda u: _krum(u, 1)),
  'multi-krum': (
    aggregators.krum,
    {'num_attackers': 2, 'num_chosen': 5},
    lambda u: _krum(u, 5),
  ),
  'geometric median': (aggregators.geometric_median, {}, _geometric),
}


@pytest.fixture(name='join', params=_JOINS)
def fixture_join(request) -> Any:
  build, options, by_hand = _JOINS[request.param]
  return build(clients_per_round=_MOST, **options), by_hand


def _process(factory: Any) -> tff.templates.AggregationProcess:
  value = collections.OrderedDict(
    weights=tff.TensorType(np.float32, [2, 3]), bias=tff.TensorType(np.float32)
  )
  return factory.create(tff.to_type(value), tff.TensorType(np.float32))


@pytest.mark.parametrize(
  ('number', 'runtime'),
  [(9, 'no jit'), pytest.param(10, 'native', marks=pytest.mark.slow)],
)
def test_joins_beside_numpy(join, number, runtime):
  factory, by_hand = join
  process = _process(factory)
  updates = np.random.default_rng(number).normal(size=[number, 7])
  updates = updates.astype(np.float32)
  # Clients that do not count send zeros; any other weight is as good as 1.
  zeros = np.zeros([2, 7], np.float32)
  sent = [
    collections.OrderedDict(weights=row[:6].reshape([2, 3]), bias=row[6])
    for row in np.concatenate([zeros, updates])
  ]
  weights = [np.float32(0.0)] * 2 + [np.float32(1 + n) for n in range(number)]
  with planted.RUNTIMES[runtime]():
    found = process.next(process.initialize(), sent, weights).result
    nothing = process.next(process.initialize(), sent[:2], weights[:2]).result
  expected = by_hand(updates.astype(np.float64))
  np.testing.assert_allclose(found['weights'].ravel(), expected[:6], atol=1e-5)
  np.testing.assert_allclose(found['bias'], expected[6], atol=1e-5)
  assert not np.any(nothing['weights']) and not nothing['bias']


def test_wide_numbers_are_joined_as_such():
  factory = aggregators.coordinate_median(clients_per_round=3)
  value = collections.OrderedDict(a=np.float64, b=np.float32)
  process = factory.create(tff.to_type(value), tff.TensorType(np.float32))
  sent = [collections.OrderedDict(a=1.0 + n * 1e-12, b=1.0) for n in range(3)]
  with planted.RUNTIMES['no jit']():
    found = process.next(process.initialize(), sent, [1.0] * 3).result
  assert found['a'] == 1.0 + 1e-12 and found['b'] == 1.0


def test_more_clients_than_there_is_room_for_are_an_error():
  process = _process(aggregators.coordinate_median(clients_per_round=1))
  one = collections.OrderedDict(
    weights=np.ones([2, 3], 'f'), bias=np.float32(1.0)
  )
  with (
    runtimes.cohort(jit=False),
    pytest.raises(Exception, match='more clients took part than clients_per_'),
  ):
    process.next(process.initialize(), [one] * 2, [np.float32(1.0)] * 2)


@pytest.mark.parametrize('size', [1e6, 1e15, 1e35])
def test_one_client_moves_no_join_however_far_it_goes(join, size):
  factory, _ = join
  honest = np.random.default_rng(0).normal(1.0, 0.1, [_MOST - 1, 7])
  updates = np.concatenate([honest, np.full([1, 7], size)]).astype(np.float32)
  found = factory._join(tf.constant(updates)).numpy()
  np.testing.assert_allclose(found, honest.mean(0), atol=0.15)


def test_where_few_clients_answer_krum_averages_no_attackers():
  join = aggregators.krum(num_attackers=2, num_chosen=5, clients_per_round=12)
  updates = tf.constant([[1.0], [9.0], [1.1], [0.9], [-8.0]])
  np.testing.assert_allclose(join._join(updates), [1.0], rtol=1e-6)


def test_a_share_of_almost_a_half_leaves_the_middle():
  join = aggregators.trimmed_mean(share=0.49999, clients_per_round=4)._join
  updates = tf.constant([[1.0], [2.0], [4.0], [9.0]])
  np.testing.assert_allclose(join(updates), [3.0])


# ---- under attack ------------------------------------------------------------


def _line() -> tf.keras.Model:
  inputs = tf.keras.Input([3])
  line = tf.keras.layers.Dense(1, use_bias=False, name='line')
  return tf.keras.Model(inputs, line(inputs))


@pytest.fixture(scope='module', name='model')
def fixture_model() -> tff_partial.PartialModel:
  return tff_partial.from_keras(_line, loss='mse')


_MARKED = splits.Part(
  'marked',
  splits.everything().choose,
  {'is_hostile': tf.TensorSpec([], tf.int32)},
)


def _error(
  model: tff_partial.PartialModel, aggregator: Any, factor: float
) -> float:
  """Of the slopes, where two of ten clients flip the signs of updates."""

  def flipped(client: ClientContext) -> tiers.Weights:
    way = tf.where(client.examples['is_hostile'][0] == 1, -factor, 1.0)
    weights = {
      name: old + way * (client.weights[tiers.GLOBAL][name] - old)
      for name, old in client.received[tiers.GLOBAL].items()
    }
    return collections.OrderedDict({tiers.GLOBAL: weights})

  slopes = np.array([[1.0], [-2.0], [3.0]])
  generator = np.random.default_rng(0)
  clients = {}
  for number in range(10):
    x = generator.normal(size=[20, 3])
    clients[f'{number}'] = {
      'x': x.astype('f'),
      'y': (x @ slopes).astype('f'),
      'is_hostile': np.full(20, number < 2, np.int32),
    }
  process = tff_partial.compose(
    model,
    work=[
      Phase(optimizer=sgd(0.1), epochs=3, measured=True),
      OverwriteWeights(flipped, _MARKED),
    ],
    aggregation=Aggregation(aggregator),
  )
  with runtimes.cohort(jit=False):
    state, _ = planted.trained(process, clients, [list(clients)] * 15)
  found = planted.global_weights(process, state)['line/kernel']
  return float(np.abs(found - slopes).max())


@pytest.mark.slow
@pytest.mark.parametrize('factor', [1.0, 5.0])
def test_a_fifth_of_the_clients_that_flip_signs_moves_only_the_mean(
  join, model, factor
):
  # A mean goes (8 - 2 * factor) / 10 of the way: more slowly, or backwards.
  assert _error(model, join[0], factor) < 0.1
  if factor > 4.0:
    assert _error(model, None, factor) > 3.0


# ---- what does not fit -------------------------------------------------------


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (
      lambda: aggregators.coordinate_median(clients_per_round=0),
      'coordinate_median: clients_per_round=0: expected the most',
    ),
    (
      lambda: aggregators.trimmed_mean(share=0.5, clients_per_round=9),
      'share=0.5: expected at least 0 and less than 0.5',
    ),
    (
      lambda: aggregators.krum(num_attackers=4, clients_per_round=10),
      'num_attackers=4 of 10 clients per round',
    ),
    (
      lambda: aggregators.krum(
        num_attackers=1, num_chosen=11, clients_per_round=10
      ),
      'num_chosen=11: expected from 1',
    ),
    (
      lambda: aggregators.krum(
        num_attackers=1, num_chosen=1.5, clients_per_round=10
      ),
      'num_chosen=1.5: expected a whole number',
    ),
  ],
)
def test_numbers_that_fit_no_join_are_refused(build, message):
  with pytest.raises(SettingError, match=message):
    build()


def test_robust_joins_are_refused_for_members():
  median = aggregators.coordinate_median(clients_per_round=9)
  grouped = tff_partial.from_keras(_line, loss='mse', group='.*', num_groups=2)
  work = [tff_partial.groups.least_loss(), Phase(('group',), measured=True)]
  with pytest.raises(
    client_work.CompositionError, match='RobustFactory, .* does not weigh'
  ):
    tff_partial.compose(
      grouped, work=work, aggregation=Aggregation(median, mean_of_members=True)
    )
