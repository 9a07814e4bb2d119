"""HPFL beside a NumPy loop, and what leaves a client.

The model predicts `sum over k of m_k u_k c_k`: m says which attributes a record
has, u is the row of the record's user, a private table of the client's own
size, and c, public, has a number for each attribute.
"""

import collections
from collections.abc import Iterator
import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import client_statistics
from tff_partial import composition
from tff_partial import contexts
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial import training
from tff_partial.algorithms import hpfl
from tff_partial.client import client_work
from tff_partial.composition import Aggregation
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.drafts import centers as drafts
from tff_partial.drafts import row_means
from tff_partial.errors import SettingError
from tff_partial.errors import UserError
from tff_partial.joins import row_aggregations
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact
from tff_partial.training.client_store import state_codec

_ATTRIBUTES, _RATE = 3, 0.05
_USERS = 'users/embeddings'
_PUBLIC = 'public/kernel'
_NUM_USERS = {'ann': 3, 'bob': 5}
_NUM_RECORDS = {'ann': 12, 'bob': 20}
_THRESHOLD = 0.9


@pytest.fixture(scope='module', autouse=True)
def fixture_runtime() -> Iterator[None]:
  with runtimes.cohort(jit=False, strict=True):
    yield


def _build() -> tf.keras.Model:
  user = tf.keras.Input([], dtype=tf.int32, name='user')
  has = tf.keras.Input([_ATTRIBUTES], name='has')
  rows = tf.keras.layers.Embedding(
    4, _ATTRIBUTES, embeddings_initializer='glorot_uniform', name='users'
  )
  public = tf.keras.layers.Dense(
    1, use_bias=False, kernel_initializer='ones', name='public'
  )
  return tf.keras.Model(
    {'user': user, 'has': has}, public(has * rows(user)), name='by_hand'
  )


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return keras_models.from_keras(
    _build, loss='mse', local='users', client_sized='users'
  )


def _is_correct(labels: Any, predictions: Any) -> Any:
  return abs(labels - predictions)[:, 0] < 0.5


_KNOWN = hpfl.Attributes(
  _ATTRIBUTES, lambda x: x['has'], [_PUBLIC], _is_correct
)


def _examples(name: str) -> dict[str, Any]:
  random = np.random.default_rng(len(name) + _NUM_USERS[name])
  number = _NUM_RECORDS[name]
  user = np.arange(number) % _NUM_USERS[name]
  has = (random.random([number, _ATTRIBUTES]) < 0.6).astype(np.float32)
  has[:, 0] = 1.0
  return {
    'x': {'user': user.astype(np.int32), 'has': has},
    'y': random.normal(size=[number, 1]).astype(np.float32),
    'is_validation': np.arange(number) % 3 == 0,
  }


_DATA = {name: _examples(name) for name in _NUM_USERS}


def _train(process: Any, rounds: int = 1, data: Any = _DATA, **options: Any):
  """Rounds of all clients."""
  clients = packing.pack(data, process.example_spec)
  return training.programs.train(
    process, clients, rounds=rounds, clients_per_round=len(data), **options
  )


def _trained(
  model: models.PartialModel,
  *,
  rounds: int = 3,
  data: Any = None,
  attributes: hpfl.Attributes = _KNOWN,
  threshold: float = _THRESHOLD,
  privacy: Any = None,
  **options: Any,
) -> Any:
  process = algorithms.build_hpfl(
    model,
    attributes=attributes,
    tables=[_USERS],
    training=Phase(optimizer=sgd(_RATE), batch_size=None, epochs=2),
    threshold=threshold,
    **options,
  )
  if process.is_noised and privacy is None:
    privacy = 'unaccounted'
  return _train(process, rounds, data or _DATA, privacy=privacy)


def _users(state: Any) -> np.ndarray:
  (table,) = [state[name] for name in state if name.endswith(f'local/{_USERS}')]
  return table


def _by_hand(
  first: dict[str, np.ndarray],
  *,
  rounds: int = 3,
  public: bool = True,
  centers_of: Any = None,
  with_update: bool = False,
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
  """The rounds in NumPy: the server's c, and each client's own and users."""
  c = np.ones([_ATTRIBUTES])
  own = {name: c.copy() for name in _DATA}
  users = {name: first[name].astype(np.float64) for name in _DATA}
  accuracy: dict[str, tuple[np.ndarray, float]] = {}
  threshold = np.zeros([_ATTRIBUTES])
  centers = None
  for _ in range(rounds):
    sums, weights = np.zeros([2, _ATTRIBUTES])
    measured: list[tuple[np.ndarray, np.ndarray]] = []
    for name, data in _DATA.items():
      has, user = data['x']['has'], data['x']['user']
      if name in accuracy:
        a = accuracy[name][0]
        if public:
          own[name] = a * own[name] + (1 - a) * c
        if centers is not None:
          for row in users[name]:
            distance = np.linalg.norm(row - centers, axis=1)
            mean = (distance / distance.sum()) @ centers
            row[:] = a * row + (1 - a) * mean
      held_out = data['is_validation']
      h, u, y = has[~held_out], user[~held_out], data['y'][~held_out, 0]
      for _ in range(2):
        error = (h * users[name][u]) @ own[name] - y
        slope = 2 * error[:, None] / len(y)
        of_users = np.zeros_like(users[name])
        np.add.at(of_users, u, slope * h * own[name])
        of_public = (slope * h * users[name][u]).sum(0)
        users[name] -= _RATE * of_users
        own[name] = own[name] - _RATE * of_public
      predictions = (has * users[name][user]) @ own[name]
      right = np.abs(predictions - data['y'][:, 0]) < 0.5
      number = has[held_out].sum(0)
      mean = right[held_out].mean()
      on_each = np.where(
        number > 0,
        (has * right[:, None])[held_out].sum(0) / np.maximum(number, 1),
        mean,
      )
      accuracy[name] = on_each, mean
      measured.append((on_each * (number > 0), number > 0))
      weight = np.where(on_each > threshold, on_each * h.sum(0), 0.0)
      if with_update:
        # Shares of the client's records, halved as a mean over two clients is.
        weight /= 2 * h.sum()
      sums += weight * (own[name] - with_update * c)
      weights += weight
    totals, numbers = np.sum(measured, 0)
    if with_update:
      c = c + sums / np.maximum(weights, 0.5 / _ATTRIBUTES)
      of_measured = [_THRESHOLD * a - n * threshold for a, n in measured]
      threshold = threshold + np.mean(of_measured, 0)
    else:
      if public:
        c = np.where(weights > 0, sums / np.where(weights > 0, weights, 1), c)
      threshold = _THRESHOLD * totals / np.maximum(numbers, 1)
    if centers_of is not None:
      centers = centers_of(users)
  return c, own, users


@pytest.fixture(scope='module', name='first')
def fixture_first(model: models.PartialModel) -> dict[str, np.ndarray]:
  """Users as clients draw them: trained by nothing, with a rate of 0."""
  process = algorithms.build_hpfl(
    model,
    attributes=_KNOWN,
    drafts=None,
    public=False,
    training=Phase(optimizer=sgd(0.0), batch_size=None),
  )
  result = _train(process)
  return {
    name: _users(result.client_store.client(name))[: _NUM_USERS[name]]
    for name in _DATA
  }


def _assert_alike(result: Any, expected: Any, atol: float = 1e-6) -> None:
  c, own, users = expected
  np.testing.assert_allclose(
    result.weights.trainable['global'][_PUBLIC][:, 0], c, atol=atol
  )
  for name, number in _NUM_USERS.items():
    state = result.client_store.client(name)
    (mine,) = [state[n] for n in state if n.endswith(f'personal/{_PUBLIC}')]
    np.testing.assert_allclose(mine[:, 0], own[name], atol=atol)
    np.testing.assert_allclose(_users(state)[:number], users[name], atol=atol)


@pytest.mark.slow
def test_hpfl_k_is_eqs_1_and_3(model, first):
  result = _trained(model, drafts=None)
  _assert_alike(result, _by_hand(first))


@pytest.mark.slow
def test_hpfl_r_moves_users_to_the_center_of_all(model, first):
  # Of one center, that of all users, sums know what it is.
  result = _trained(model, drafts=drafts.Sums(1), public=False)
  expected = _by_hand(
    first,
    public=False,
    centers_of=lambda users: np.concatenate([*users.values()]).mean(0)[None],
  )
  _assert_alike(result, expected)


@pytest.mark.slow
def test_hpfl_is_both(model, first):
  # Each user is a center where a draft stands for one row: Eq. 2 of them all.
  result = _trained(
    model, rounds=2, drafts=drafts.ClientCenters(8, 8, rows_per_center=1)
  )
  expected = _by_hand(
    first,
    rounds=2,
    centers_of=lambda users: np.concatenate(list(users.values())),
  )
  # A row's distance to itself is a difference of squares, in single precision.
  _assert_alike(result, expected, atol=5e-5)


@pytest.mark.slow
def test_more_drafts_than_there_is_room_for_are_an_error(model):
  few = drafts.ClientCenters(1, 1, rows_per_center=1)
  with pytest.raises(Exception, match='more centers than num_collected=1'):
    _trained(model, rounds=1, drafts=few)


def test_eq_2_as_printed_weighs_far_centers_more():
  centers = {
    'rows': tf.constant([[1.0, 0.0], [4.0, 0.0], [9.0, 9.0]]),
    'is_real': tf.constant([True, True, False]),
  }
  row, share = tf.constant([[0.0, 0.0]]), tf.constant(0.5)
  printed = drafts.toward_centers(row, centers, share, by_nearness=False)
  nearer = drafts.toward_centers(row, centers, share, by_nearness=True)
  # Distances are 1 and 4: shares 1/5 and 4/5, or 4/5 and 1/5.
  np.testing.assert_allclose(printed, [[0.5 * (0.2 * 1 + 0.8 * 4), 0.0]])
  np.testing.assert_allclose(nearer, [[0.5 * (0.8 * 1 + 0.2 * 4), 0.0]])


def test_without_centers_rows_stay():
  centers = {'rows': tf.zeros([2, 2]), 'is_real': tf.zeros([2], tf.bool)}
  row = tf.constant([[3.0, 4.0]])
  moved = drafts.toward_centers(
    row, centers, tf.constant(0.0), by_nearness=False
  )
  np.testing.assert_array_equal(moved, row)


@pytest.mark.slow
def test_tables_are_solved_for_before_the_rest_is_trained(model):
  process = algorithms.build_hpfl(
    model,
    attributes=_KNOWN,
    drafts=None,
    public=False,
    training=Phase(
      train=(tiers.PERSONAL,),
      optimizer={tiers.PERSONAL: sgd(0.0), tiers.LOCAL: Exact(ridge=0.5)},
      batch_size=None,
    ),
  )
  result = _train(process)
  for name, fields in _DATA.items():
    found = _users(result.client_store.client(name))
    for user in range(_NUM_USERS[name]):
      mine = ~fields['is_validation'] & (fields['x']['user'] == user)
      has, y = fields['x']['has'][mine], fields['y'][mine, 0]
      wanted = np.linalg.solve(
        has.T @ has + 0.5 * np.eye(len(has.T)), has.T @ y
      )
      np.testing.assert_allclose(found[user], wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope='module', name='process')
def fixture_process(model: models.PartialModel) -> processes.PartialProcess:
  return algorithms.build_hpfl(
    model,
    attributes=_KNOWN,
    drafts=drafts.ClientCenters(6, 2, rows_per_center=3),
    tables=[_USERS],
    training=Phase(optimizer=sgd(_RATE)),
  )


@pytest.mark.slow
def test_no_private_table_has_a_type_at_the_server(process):
  state = process.initialize.type_signature.result
  text = state.formatted_representation()
  # Centers have a fixed number of rows; tables have an open one.
  assert 'centers' in text
  assert '?' not in text


@pytest.mark.slow
def test_a_client_that_joins_later_begins_with_the_public_components(process):
  clients = packing.pack(_DATA, process.example_spec)
  early = _train(process, 2, {'ann': _DATA['ann']})
  seeds = np.zeros([1, 2], np.int32)
  first = state_codec.first_states(process.initialize_client, seeds)
  state = process.set_model_weights(process.initialize(), early.weights)
  output = process.next(state, first, clients.cohort(['bob'], seeds))
  (kept,) = output.client_states
  assert kept['held']['initialized']
  assert kept['num_rows'][_USERS] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
  'how', [None, drafts.Sums(1), drafts.ClientCenters(28, 1, rows_per_center=1)]
)
def test_a_client_that_trains_on_nothing_moves_nothing(how, model):
  held_out = {**_DATA['bob'], 'is_validation': np.ones([20], bool)}
  found = [
    _trained(model, rounds=1, data=data, drafts=how).state.client_work
    for data in (_DATA, {**_DATA, 'eve': held_out})
  ]
  planted.assert_close(*(work['server'] for work in found))


@pytest.mark.parametrize(
  ('sent', 'expected', 'num_sent'),
  [
    # Real rows come one after another.
    (
      [([[1, 1], [2, 2]], [True, False]), ([[3, 3]], [True]), ([], [])],
      [[1, 1], [3, 3], [0, 0], [0, 0]],
      2,
    ),
    # What finds no room is counted and lost.
    (
      [([[1, 1], [2, 2]], [True, True]), ([[3, 3]], [True])],
      [[1, 1], [2, 2]],
      3,
    ),
  ],
)
def test_the_server_has_the_rows_of_all_clients(sent, expected, num_sent):
  kind = tff.to_type(
    collections.OrderedDict(
      rows=tff.TensorType(np.float32, [None, 2]),
      is_real=tff.TensorType(np.bool_, [None]),
    )
  )
  factory = row_aggregations.CollectRowsFactory(len(expected))
  process = factory.create(kind)
  value = [
    collections.OrderedDict(
      rows=np.array(rows, np.float32).reshape([-1, 2]),
      is_real=np.array(is_real, bool),
    )
    for rows, is_real in sent
  ]
  result = process.next(process.initialize(), value).result
  assert result['rows'].tolist() == expected
  assert result['is_real'].tolist() == np.any(expected, 1).tolist()
  assert result['num_sent'] == num_sent


def test_no_room_at_all_is_refused():
  with pytest.raises(SettingError, match='at least one row'):
    row_aggregations.CollectRowsFactory(0)


def _rows(**options: Any) -> client_statistics.Statistic:
  """Means of `table`, of what clients compute and how they weigh it."""
  return row_means.row_means(
    'rows',
    lambda client: {'table': client.computed['values']},
    lambda client: client.computed['weights'],
    **options,
  )


def _knows(
  model: models.PartialModel, values: Any, weights: Any
) -> contexts.ClientContext:
  """A client that received rows of 1 and 2, and has others by now."""
  received = {'global': {'table': tf.constant([[1.0], [2.0]])}}
  seed = tf.zeros([2], tf.int32)
  client = contexts.ClientContext(
    model, received, received, {}, {}, tf.constant(1), seed
  )
  return client._replace(
    computed={'values': tf.constant(values), 'weights': tf.constant(weights)}
  )


def test_a_record_of_weight_zero_is_none():
  sharing = hpfl._Sharing(_KNOWN, (), (), False, client_statistics.Join.SUM)
  client = contexts.ClientContext(
    *(None, {}, {}, {}),  # type: ignore[arg-type]
    {
      'x': {'has': tf.constant([[1.0, 0, 1], [1, 1, 0], [1, 0, 0]])},
      'weight': tf.constant([1.0, 0.0, 2.0]),
    },
    *(tf.constant(2), tf.zeros([2], tf.int32)),
  )
  assert sharing.records(client).numpy().tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
  'method',
  [
    drafts.Sums(2, join=client_statistics.Join.WITH_UPDATE),
    drafts.ClientCenters(2, 2),
  ],
)
@pytest.mark.parametrize('was_real', [False, True])
def test_centers_stay_where_no_client_counts(model, method, was_real):
  before = collections.OrderedDict(
    rows=tf.constant([[1.0] * _ATTRIBUTES] * 2), is_real=tf.fill([2], was_real)
  )
  none = tf.zeros([2, _ATTRIBUTES])
  joined = {
    'rows': none,
    'is_real': tf.fill([2], False),
    'num_sent': 0,
    'sums': none,
    'counts': tf.zeros([2]),
  }
  state = {drafts.CENTERS: {_USERS: before}}
  server = method.statistic(model, _USERS).update(
    client_statistics.Server({}, state), joined
  )
  planted.assert_same(server.state[drafts.CENTERS][_USERS], before)


def test_row_means_keep_what_no_client_weighs(model):
  statistic = _rows()
  held = {'table': tf.constant([[1.0], [2.0]])}
  sent = [
    statistic.summarize(_knows(model, v, w))
    for v, w in (([[4.0], [7.0]], [1.0, 0.0]), ([[8.0], [9.0]], [3.0, 0.0]))
  ]
  joined = tf.nest.map_structure(lambda *parts: sum(parts), *sent)
  server = statistic.update(
    client_statistics.Server({'global': held}, None), joined
  )
  # (4 + 3 * 8) / 4 = 7 for the first row; nothing was said of the second.
  assert server.weights['global']['table'].numpy().tolist() == [[7.0], [2.0]]


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'attributes': _KNOWN._replace(number=7), 'drafts': None},
      'no global variable with a row',
    ),
    (
      {'attributes': _KNOWN, 'drafts': drafts.Sums(2), 'tables': [_PUBLIC]},
      "'public/kernel' is no local",
    ),
    ({'attributes': _KNOWN, 'drafts': drafts.Sums(2)}, 'no table to draft'),
    (
      {'attributes': _KNOWN, 'drafts': None, 'threshold': float('nan')},
      'threshold: expected a finite number .* found nan',
    ),
    (
      {
        'attributes': _KNOWN,
        'drafts': None,
        'training': Phase(on=splits.halves().query),
      },
      'Leave `on` out, or change `split`',
    ),
  ],
)
def test_what_does_not_fit_hpfl_is_refused(model, options, message):
  with pytest.raises(UserError, match=message):
    algorithms.build_hpfl(model, **options)


# ---- one record, clipped and noised ------------------------------------------

_TOGETHER = client_statistics.Join.WITH_UPDATE
_CENTERS_OF_USERS = f'drafts/{_USERS}'


def _private(
  clip: Any, *, noise_multiplier: float = 0.0, **options: Any
) -> privacy.PrivateFactory:
  return privacy.private_mean(
    clip, noise_multiplier=noise_multiplier, clients_per_round=2, **options
  )


@pytest.mark.slow
def test_with_the_update_clients_send_shares_and_moves(model, first):
  # Nothing is clipped, and there is no noise. The center is the mean of the
  # clients' means, though bob has more users.
  result = _trained(
    model,
    drafts=drafts.Sums(1, join=_TOGETHER),
    join=_TOGETHER,
    aggregation=Aggregation(aggregator=_private(clipping.FixedClip(10.0))),
  )
  expected = _by_hand(
    first,
    centers_of=lambda users: np.mean(
      [rows.mean(0, keepdims=True) for rows in users.values()], 0
    ),
    with_update=True,
  )
  _assert_alike(result, expected)


def test_a_clipped_client_counts_for_less(model):
  # One client would move a row from 1 to 1.1 with the weight 0.8, so it sends
  # 0.08, and a tenth of its weight, 0.08; the other moves it by 0.05 with the
  # weight 0.4. The clip halves what the first one sends.
  statistic = _rows(join=_TOGETHER, usual=0.2)
  sent = [
    statistic.summarize(_knows(model, [[value], [2.0]], [weight, 0.0]))
    for value, weight in ((1.1, 0.8), (1.05, 0.4))
  ]
  kind = tff.types.tensorflow_to_type(
    tf.nest.map_structure(tf.TensorSpec.from_tensor, sent[0])
  )
  held = {'table': tf.constant([[1.0], [2.0]])}
  moved = []
  for clip in (1.0, 0.04 * 2**0.5):
    process = _private(clipping.FixedClip(clip)).create(kind)
    joined = process.next(process.initialize(), sent).result
    joined = tf.nest.map_structure(tf.constant, joined)
    server = statistic.update(
      client_statistics.Server({'global': held}, None), joined
    )
    moved.append(server.weights['global']['table'].numpy()[:, 0])
  np.testing.assert_allclose(moved[0], [1.0 + 0.1 / 1.2, 2.0], atol=1e-6)
  np.testing.assert_allclose(moved[1], [1.0 + 0.06 / 0.8, 2.0], atol=1e-6)


def test_a_sum_of_little_weight_moves_a_row_a_part_of_the_way():
  # Of a weight of 0.1, where 1 is usual, noise may have made most.
  before, moves = tf.constant([[1.0], [1.0]]), tf.constant([[0.1], [0.8]])
  weight = row_means.WEIGHT_SCALE * tf.constant([0.1, 0.8])
  after = row_means.moved(before, moves, weight, 1.0)
  np.testing.assert_allclose(after, [[1.0 + 0.1 / 0.5], [2.0]], rtol=1e-6)
  # Also if there is no weight at all, or less.
  after = row_means.moved(before, moves, tf.constant(-1.0), 1.0)
  np.testing.assert_allclose(after, [[1.2], [2.6]], rtol=1e-6)


def _noised(
  model: models.PartialModel,
  of_tables: Any,
  join: client_statistics.Join = _TOGETHER,
  clip: Any = None,
) -> processes.PartialProcess:
  return algorithms.build_hpfl(
    model,
    attributes=_KNOWN,
    drafts=of_tables,
    tables=[_USERS],
    join=join,
    aggregation=Aggregation(
      aggregator=_private(clip or clipping.FixedClip(1.0), noise_multiplier=1.0)
    ),
  )


@pytest.mark.parametrize(
  ('of_tables', 'join', 'exact'),
  [
    (drafts.ClientCenters(4, 2), _TOGETHER, _CENTERS_OF_USERS),
    (drafts.Sums(2), _TOGETHER, _CENTERS_OF_USERS),
    (drafts.Sums(2, join=_TOGETHER), client_statistics.Join.SUM, 'public'),
    (None, client_statistics.Join.SUM, 'public'),
  ],
)
def test_what_is_exact_beside_noise_is_refused(model, of_tables, join, exact):
  with pytest.raises(
    client_work.CompositionError,
    match=f'{exact!r}: clients would send it exactly',
  ):
    _noised(model, of_tables, join)


@pytest.mark.slow
def test_all_that_clients_send_is_in_the_record(model, monkeypatch):
  composed: list[Any] = []

  def spy(*args: Any, **options: Any) -> processes.PartialProcess:
    composed.extend(options['statistics'])
    return composition.compose(*args, **options)

  monkeypatch.setattr(hpfl, 'compose', spy)
  # A clip for each part: a record that had others would be refused.
  parts = ('public', 'accuracy', _CENTERS_OF_USERS)
  clips = {part: clipping.FixedClip(1.0) for part in parts}
  process = _noised(model, drafts.Sums(2, join=_TOGETHER), clip=clips)
  assert {s.name: s.join for s in composed} == dict.fromkeys(parts, _TOGETHER)
  assert not process.sent  # Nor is there another update.
  assert process.mechanism is not None
  assert process.mechanism.clipping == clips


# ---- drafts, to look at them -------------------------------------------------

# Of two rows there is one center.
_CENTERS = drafts.ClientCenters(10, 10, rows_per_center=2)
# Which become the centers (20, 0), a row, and (10, 0.25).
_ROWS = np.array([[10.0, 0.0], [10.0, 0.5], [20.0, 0.0]], np.float32)


def test_drafts_are_centers_of_rows():
  found = _CENTERS.clusters(_ROWS, tf.ones([3], tf.bool), tf.constant([0, 0]))
  real = found.centers.numpy()[found.is_real]
  assert sorted(real.tolist()) == [[10.0, 0.25], [20.0, 0.0]]


def test_a_draft_is_what_a_client_sends():
  # Bit for bit, with the same draws.
  rows = tf.random.stateless_normal([25, 3], [1, 2])
  seed = tf.constant([3, 4])
  client = types.SimpleNamespace(
    seed=seed,
    rows={},
    weight=lambda tier, table: rows,
    outcome=contexts.Outcome(tf.constant(1), {}, tf.constant(1.0)),
  )
  statistic = _CENTERS.statistic(types.SimpleNamespace(seed=0), 'users')
  sent = statistic.summarize(client)
  found = _CENTERS.clusters(
    rows, tf.ones([25], tf.bool), random_bits.fold_in(seed, 'drafts of users')
  )
  np.testing.assert_array_equal(sent['rows'], found.centers)
  np.testing.assert_array_equal(sent['is_real'], found.is_real)
  assert int(tf.reduce_sum(found.counts)) == 25
