"""What clients send beside their update, and what becomes of it."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import client_state
from tff_partial import composition
from tff_partial import contexts
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import privacy
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess

_CLIENTS = {
  'ann': {'x': np.arange(4), 'y': np.array([1.0, 2.0, 3.0, 4.0])},
  'bob': {'x': np.arange(2), 'y': np.array([5.0, 7.0])},
}
_TABLE = 'items/embeddings'
pytestmark = pytest.mark.usefixtures('in_cohorts')


def _build() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  table = tf.keras.layers.Embedding(
    6, 1, embeddings_initializer='zeros', name='items'
  )
  return tf.keras.Model(item, table(item))


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return keras_models.from_keras(
    _build,
    loss=lambda labels, found: 0.5 * tf.square(labels - found[:, 0]),
    labels=tf.TensorSpec([], tf.float32),
  )


def _compose(model: models.PartialModel, **options: Any) -> PartialProcess:
  return composition.compose(
    model,
    **{
      'work': [Phase(optimizer=sgd(1.0), batch_size=None, measured=True)],
      'server_state': lambda model: tf.zeros([2]),
      **options,
    },
  )


def _mean_label(client: ClientContext) -> Any:
  """The mean of a client's labels, and one."""
  labels = client.examples['y'][: client.count]
  return collections.OrderedDict(mean=tf.stack([tf.reduce_mean(labels), 1.0]))


def _half_labels(client: ClientContext) -> Any:
  return tf.nest.map_structure(
    lambda mean: tf.cast(mean, tf.float16), _mean_label(client)
  )


def _add(server: Server, joined: Any) -> Server:
  return server._replace(state=server.state + joined['mean'])


_STATISTIC = Statistic('labels', _mean_label, update=_add)


def _round(
  process: PartialProcess, state: Any = None, kept: Any = None
) -> tuple[Any, Any]:
  cohort = planted.cohort_of(process, _CLIENTS, 1)
  output = planted.run(process, cohort, state, kept)
  return output.state, output.client_states


def _assert_learned_as_without(process: PartialProcess, state: Any) -> None:
  """A first round's weights are those of a process without statistics."""
  plain = composition.compose(process.model, work=process.work.work)
  expected, _ = _round(plain)
  planted.assert_same(
    planted.global_weights(process, state),
    planted.global_weights(plain, expected),
  )


def _server(state: Any) -> Any:
  return np.asarray(state.client_work['server'])


@pytest.mark.slow
@pytest.mark.parametrize('join', Join)
def test_a_client_whose_statistic_is_no_number_does_not_count(model, join):
  def summarize(client: ClientContext) -> Any:
    is_bob = client.count == 2
    mean = _mean_label(client)['mean']
    return {'mean': tf.where(is_bob, np.nan, mean)}

  statistic = _STATISTIC._replace(summarize=summarize, join=join)
  process = _compose(model, statistics=[statistic])
  output = planted.run(process, planted.cohort_of(process, _CLIENTS, 1))
  metrics = planted.train_metrics(output)
  assert (metrics['num_clients'], metrics['num_not_finite']) == (1, 1)
  np.testing.assert_array_equal(_server(output.state), [2.5, 1.0])


@pytest.mark.slow
def test_a_client_of_weight_zero_sends_no_statistic(model):
  process = _compose(
    model,
    aggregation=Aggregation(
      # Bob has two examples.
      client_weighting=lambda done: tf.cast(done.num_examples > 2, tf.float32)
    ),
    statistics=[_STATISTIC],
  )
  np.testing.assert_array_equal(_server(_round(process)[0]), [2.5, 1.0])


@pytest.mark.slow
def test_a_mean_of_none_moves_no_statistic(model):
  process = _compose(
    model,
    statistics=[_STATISTIC._replace(join=Join.WITH_UPDATE)],
    aggregation=Aggregation(tff.aggregators.MeanFactory()),
  )
  clients = {'ann': {**_CLIENTS['ann'], 'y': np.full([4], 1e30)}}
  output = planted.run(process, planted.cohort_of(process, clients, 1))
  np.testing.assert_array_equal(_server(output.state), [0.0, 0.0])


@pytest.mark.slow
def test_a_sum_reaches_the_server_and_is_kept_there(model):
  process = _compose(model, statistics=[_STATISTIC])
  state = process.initialize()
  np.testing.assert_array_equal(_server(state), [0.0, 0.0])
  for rounds in (1, 2):
    state, _ = _round(process, state)
    # The means are 2.5 and 6.
    np.testing.assert_array_equal(_server(state), [8.5 * rounds, 2.0 * rounds])
    assert state.client_work['round'] == rounds
  _assert_learned_as_without(process, _round(process)[0])


@pytest.mark.slow
def test_with_the_update_it_is_weighted_as_that_is(model):
  statistic = _STATISTIC._replace(join=Join.WITH_UPDATE)
  process = _compose(model, statistics=[statistic])
  state, _ = _round(process)
  np.testing.assert_allclose(
    _server(state), [(4 * 2.5 + 2 * 6.0) / 6, 1.0], rtol=1e-6
  )
  _assert_learned_as_without(process, state)


@pytest.mark.slow
def test_with_the_update_it_is_clipped_and_paid_for_as_that_is(model):
  statistic = _STATISTIC._replace(join=Join.WITH_UPDATE)
  private = privacy.private_mean(
    clipping_lib.FixedClip(1.0), noise_multiplier=1e-6, clients_per_round=2.0
  )
  process = _compose(
    model,
    aggregation=Aggregation(
      aggregator=private, client_weighting=ClientWeighting.UNIFORM
    ),
    statistics=[statistic],
  )
  assert process.mechanism == private.mechanism
  state, _ = _round(process)
  # The update of a row is its label over the number of examples, downwards.
  found = []
  for fields in _CLIENTS.values():
    labels = fields['y']
    sent = np.concatenate([labels / len(labels), [labels.mean(), 1.0]])
    found.append(sent[-2:] / np.linalg.norm(sent))
  np.testing.assert_allclose(_server(state), np.mean(found, 0), atol=1e-4)


@pytest.mark.slow
def test_by_part_it_is_a_part_of_its_own(model):
  process = _compose(
    model,
    aggregation=Aggregation(
      aggregator=privacy.private_mean(
        {
          tiers.GLOBAL: clipping_lib.FixedClip(100.0),
          'labels': clipping_lib.FixedClip(1.0),
        },
        noise_multiplier=0.0,
        clients_per_round=2.0,
      ),
      client_weighting=ClientWeighting.UNIFORM,
    ),
    statistics=[_STATISTIC._replace(join=Join.WITH_UPDATE)],
  )
  state, _ = _round(process)
  units = [np.array([mean, 1.0]) for mean in (2.5, 6.0)]
  expected = np.mean([u / np.linalg.norm(u) for u in units], 0)
  np.testing.assert_allclose(_server(state), expected, rtol=1e-5)


@pytest.mark.slow
def test_local_noise_is_for_what_is_sent_with_the_update(model):
  process = _compose(
    model,
    aggregation=Aggregation(
      client_weighting=ClientWeighting.UNIFORM,
      postprocess_update=local_noise.LocalNoise(1.0, 0.0),
    ),
    statistics=[_STATISTIC._replace(join=Join.WITH_UPDATE)],
  )
  state, _ = _round(process)
  assert np.linalg.norm(_server(state)) < 1.0


@pytest.mark.slow
def test_after_the_update_clients_read_the_new_weights(model):
  statistic = Statistic(
    'heights',
    lambda client: client.weights[tiers.GLOBAL][_TABLE][:2, 0],
    update=lambda server, joined: server._replace(
      weights=collections.OrderedDict(
        [
          (
            tiers.GLOBAL,
            collections.OrderedDict(
              [(_TABLE, server.weights[tiers.GLOBAL][_TABLE] + 1.0)]
            ),
          )
        ]
      ),
      state=joined,
    ),
    after_update=True,
  )
  process = _compose(model, statistics=[statistic])
  state, _ = _round(process)
  table = planted.global_weights(process, state)[_TABLE]
  plain = _compose(model, server_state=None)
  learned = planted.global_weights(plain, _round(plain)[0])[_TABLE]
  np.testing.assert_allclose(_server(state), 2 * learned[:2, 0], rtol=1e-6)
  np.testing.assert_allclose(table, learned + 1.0, rtol=1e-6)


@pytest.mark.slow
def test_clients_settle_what_they_keep_by_what_all_sent(model):
  memory = client_state.ClientState(
    first=lambda model, seed: tf.zeros([]),
    recall=lambda model, kept, received, seed: collections.OrderedDict(),
    keep=lambda client: tf.cast(client.count, tf.float32),
  )
  statistic = Statistic(
    'count',
    lambda client: tf.cast(client.count, tf.float32),
    update_client_state=lambda before, after, own, joined: (
      before + after + own / joined
    ),
  )
  process = _compose(model, client_state=memory, statistics=[statistic])
  _, kept = _round(process)
  np.testing.assert_allclose(list(kept), [4 + 4 / 6, 2 + 2 / 6], rtol=1e-6)
  _, kept = _round(process, kept=kept)
  np.testing.assert_allclose(list(kept), [8 + 8 / 6, 4 + 4 / 6], rtol=1e-6)


@pytest.mark.slow
def test_what_is_computed_on_the_way_can_be_sent(model):
  first = contexts.Compute(
    'first', lambda client: client.gradients()[_TABLE][:2, 0]
  )
  half = first._replace(name='half', on=splits.halves().query)
  statistic = Statistic(
    'slopes',
    lambda client: client.computed['first'] + 10.0 * client.computed['half'],
    update=lambda server, joined: server._replace(state=joined),
  )
  work = [first, half, Phase(measured=True)]
  process = _compose(model, work=work, statistics=[statistic])
  state, _ = _round(process)
  # Of the whole: -1 / 4 - 5 / 2 and -2 / 4 - 7 / 2. The second half of ann's
  # has neither item, that of bob's the second.
  np.testing.assert_allclose(_server(state), [-2.75, -4.0 - 70.0], rtol=1e-6)


_UPDATES_NOTHING = Statistic('labels', _mean_label)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'statistics': [_STATISTIC, _STATISTIC]},
      "statistics: the name 'labels' is taken",
    ),
    (
      {'statistics': [_STATISTIC._replace(name=tiers.GLOBAL)]},
      "statistics: the name 'global' is taken",
    ),
    (
      {
        'statistics': [
          _STATISTIC._replace(join=Join.WITH_UPDATE, after_update=True)
        ]
      },
      'is computed after the update, and cannot be joined with it',
    ),
    (
      {
        'statistics': [
          _UPDATES_NOTHING._replace(
            join=Join.WITH_UPDATE,
            update_client_state=lambda before, after, own, joined: after,
          )
        ],
        'aggregation': Aggregation(
          postprocess_update=local_noise.LocalNoise(1.0, 0.0)
        ),
      },
      'by what they send themselves, which `postprocess_update` changes',
    ),
    (
      {
        'statistics': [
          _STATISTIC._replace(
            update=lambda server, joined: server._replace(state=tf.zeros([3]))
          )
        ]
      },
      "'labels' makes .* What the server holds must keep its type",
    ),
    *(
      (
        {
          'statistics': [
            _UPDATES_NOTHING._replace(summarize=_half_labels, join=join)
          ]
        },
        "'labels' has numbers of float16, .* Cast them to float32",
      )
      for join in Join
    ),
  ],
)
def test_what_does_not_fit_is_refused(model, options, message):
  with pytest.raises(client_work.CompositionError, match=message):
    _compose(model, **options)
