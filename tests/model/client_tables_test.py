"""Tables that have as many rows as a client's own examples name.

Families rate items: each numbers its own users and its own items from 0, and
has a row of two tables for each of them. What joins a user's row with an item's
is learned together.
"""

from collections.abc import Mapping
import contextlib
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import small_runs
import tff_partial
from tff_partial import algorithms
from tff_partial import client_statistics
from tff_partial import processes
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import populations
from tff_partial.model import models
from tff_partial.training import sampling
from tff_partial.training.client_store import client_store

# The builder names 4 rows; a family has as many as it needs.
_BUILT_ROWS, _WIDTH = 4, 3
_INPUTS, _TABLES = ['user', 'item'], ['users', 'items']
_USERS, _ITEMS = 'users/embeddings', 'items/embeddings'
_ADAM = tff.learning.optimizers.build_adam(0.05)

# Family to its users, its items and its ratings.
_SIZES = {'ann': (2, 4, 9), 'bob': (3, 9, 30), 'cid': (1, 2, 3)}
# So that ann and cid are padded to one size, and bob to another.
_CAPACITIES = [10, 30]

Fields = Mapping[str, Any]


def _build(
  rows: int = _BUILT_ROWS,
  initializer: Any = 'glorot_uniform',
  dtype: tf.DType = tf.int32,
) -> tf.keras.Model:
  """A rating is a weighted sum of a user's row times an item's."""
  inputs = {
    name: tf.keras.Input([], dtype=dtype, name=name) for name in _INPUTS
  }
  user, item = (
    tf.keras.layers.Embedding(
      rows, _WIDTH, embeddings_initializer=initializer, name=f'{name}s'
    )(given)
    for name, given in inputs.items()
  )
  join = tf.keras.layers.Dense(
    1, kernel_initializer='ones', use_bias=False, name='join'
  )
  return tf.keras.Model(inputs, join(user * item))


def _model(**options: Any) -> models.PartialModel:
  """Each family has its own number of rows."""
  return tff_partial.from_keras(
    lambda: _build(**options), loss='mse', local=_TABLES, client_sized=_TABLES
  )


def _ratings(users: Any, items: Any, scale: float = 1.0) -> Fields:
  """Ratings of some items by some users; the values do not matter."""
  labels = scale * np.cos(np.arange(len(users)))
  return {
    'x': {'user': np.asarray(users), 'item': np.asarray(items)},
    'y': labels.astype(np.float32)[:, np.newaxis],
  }


def _family(users: int, items: int, number: int) -> Fields:
  """Ratings that name so many users and so many items."""
  places = np.arange(number)
  return _ratings(places % users, places % items)


def _families() -> dict[str, Fields]:
  return {name: _family(*sizes) for name, sizes in _SIZES.items()}


def _pack(
  process: Any, families: Mapping[str, Fields] | None = None, **options: Any
) -> populations.Population:
  options = {'capacities': _CAPACITIES, **options}
  return tff_partial.pack(
    families or _families(), process.example_spec, **options
  )


class _Run(NamedTuple):
  """A process between two rounds."""

  process: processes.PartialProcess
  state: Any
  store: client_store.ClientStore

  @classmethod
  def of(
    cls,
    process: processes.PartialProcess,
    folder: pathlib.Path | None = None,
    seed: int = 0,
  ) -> '_Run':
    store = client_store.ClientStore(
      process.initialize_client, seed=seed, folder=folder
    )
    return cls(process, process.initialize(), store)

  def after(self, clients: Any, number: int = 1) -> '_Run':
    """A round in which all clients take part."""
    ids = clients.client_ids
    cohort = clients.cohort(ids, sampling.client_seeds(ids, number))
    output = self.process.next(self.state, self.store.read(ids), cohort)
    self.store.write(ids, output.client_states)
    return self._replace(state=output.state)

  @property
  def kernel(self) -> np.ndarray:
    """What families learned together, `[width, 1]`."""
    weights = self.state.global_model_weights.trainable[tiers.GLOBAL]
    return np.asarray(weights['join/kernel'])

  def padded(self, client: str, name: str) -> np.ndarray:
    """A family's table with its padding."""
    state = self.store.client(client)
    assert state is not None
    return state[f'held/{name}' if f'held/{name}' in state else name]

  def number(self, client: str, name: str) -> int:
    """How many of its rows count."""
    state = self.store.client(client)
    assert state is not None
    return int(state[f'num_rows/{name}'])

  def rows(self, client: str, name: str) -> np.ndarray:
    """A family's table without its padding."""
    return self.padded(client, name)[: self.number(client, name)]


pytestmark = pytest.mark.usefixtures('in_cohorts')


@pytest.fixture(scope='module', name='furl')
def fixture_furl() -> processes.PartialProcess:
  """Rows are drawn, and trained by an optimizer that goes through all."""
  optimizers = {tiers.GLOBAL: tff_partial.sgd(0.1), tiers.LOCAL: _ADAM}
  return algorithms.build_furl(
    _model(),
    training=tff_partial.Phase(optimizer=optimizers, batch_size=4, epochs=2),
  )


@pytest.fixture(scope='module', name='trained')
def fixture_trained(furl: processes.PartialProcess) -> _Run:
  """After a round of all families; not to be changed."""
  return _Run.of(furl).after(_pack(furl))


# ---- the same as a table of fixed size ---------------------------------------


class _Equal(NamedTuple):
  """The same training in three ways."""

  fixed: _Run
  sized: _Run
  native: _Run


def _two_rounds(process: processes.PartialProcess) -> _Run:
  clients = _pack(process, capacities=[30])  # One shape, to be quick.
  return _Run.of(process).after(clients, 1).after(clients, 2)


@pytest.fixture(scope='module', name='equal', params=['sgd', 'adam'])
def fixture_equal(request: pytest.FixtureRequest) -> _Equal:
  """All rows begin as 0.3, so that no draw depends on how many there are."""
  constant = tf.keras.initializers.Constant(0.3)
  most = max(max(users, items) for users, items, _ in _SIZES.values())
  training = tff_partial.Phase(
    optimizer=_ADAM if request.param == 'adam' else tff_partial.sgd(0.1),
    batch_size=4,
    epochs=2,
  )
  sized, fixed = (
    algorithms.build_furl(model, training=training)
    for model in (
      _model(initializer=constant),
      tff_partial.from_keras(
        lambda: _build(most, constant), loss='mse', local=_TABLES
      ),
    )
  )
  in_cohorts = [_two_rounds(process) for process in (fixed, sized)]
  with runtimes.native():
    return _Equal(in_cohorts[0], in_cohorts[1], _two_rounds(sized))


@pytest.mark.slow
def test_rows_are_those_of_a_table_as_large_as_the_largest(equal):
  np.testing.assert_allclose(equal.sized.kernel, equal.fixed.kernel, atol=1e-6)
  assert np.abs(equal.sized.kernel - 1).max() > 1e-3  # It was trained.
  for client, (users, items, _) in _SIZES.items():
    for name, number in ((_USERS, users), (_ITEMS, items)):
      rows = equal.sized.rows(client, name)
      assert rows.shape == (number, _WIDTH)
      np.testing.assert_allclose(
        rows, equal.fixed.padded(client, name)[:number], atol=1e-6
      )
      assert np.abs(rows - 0.3).max() > 1e-3


@pytest.mark.slow
def test_runtimes_agree(equal):
  np.testing.assert_allclose(equal.sized.kernel, equal.native.kernel, atol=1e-6)
  for client in _SIZES:
    for name in (_USERS, _ITEMS):
      np.testing.assert_allclose(
        equal.sized.padded(client, name),
        equal.native.padded(client, name),
        atol=1e-6,
      )

  # Padding is zero. All share a bucket, whose largest tables are bob's.
  for run in (equal.sized, equal.native):
    for client, (users, items, _) in _SIZES.items():
      assert run.padded(client, _USERS).shape == (3, _WIDTH)
      assert run.padded(client, _ITEMS).shape == (9, _WIDTH)
      np.testing.assert_array_equal(run.padded(client, _USERS)[users:], 0.0)
      np.testing.assert_array_equal(run.padded(client, _ITEMS)[items:], 0.0)


# ---- padding -----------------------------------------------------------------


@pytest.mark.slow
def test_padding_changes_no_bit(furl, trained):
  repacked: list[dict[str, Any]] = [
    {'capacities': [30]},
    {'num_rows': {'ann': {_ITEMS: 50}}},  # Shares cid's bucket.
  ]
  for options in repacked:
    other = _Run.of(furl).after(_pack(furl, **options))
    # The families have other padding, and the same rows.
    assert len(other.padded('cid', _ITEMS)) in (9, 50)
    assert other.kernel.tobytes() == trained.kernel.tobytes()
    for client, (users, items, _) in _SIZES.items():
      for name, number in ((_USERS, users), (_ITEMS, items)):
        one, two = (run.padded(client, name) for run in (other, trained))
        assert one[:number].tobytes() == two[:number].tobytes()
      assert not other.padded(client, _USERS)[users:].any()


# ---- the first rows ----------------------------------------------------------


@pytest.fixture(scope='module', name='drawn')
def fixture_drawn(furl: processes.PartialProcess) -> _Run:
  """Two families alike, with 600 items each of which they rate the first."""
  alike = {client: _ratings([0, 0], [0, 0]) for client in ('dan', 'eve')}
  number = {client: {_ITEMS: 600} for client in alike}
  return _Run.of(furl).after(_pack(furl, alike, num_rows=number))


@pytest.mark.slow
def test_rows_are_distributed_as_the_builder_says(drawn):
  # Those that no example names are as they were drawn: Glorot's limit is
  # sqrt(6 / (4 rows + 3 columns)), and not that of 600 rows.
  limit = np.sqrt(6 / (_BUILT_ROWS + _WIDTH))
  rows = drawn.rows('dan', _ITEMS)[1:]
  assert 0.99 * limit < np.abs(rows).max() <= limit
  # A uniform draw up to a limit has the standard deviation limit / sqrt(3);
  # of 1,797 numbers, within 5 %.
  np.testing.assert_allclose(rows.std(), limit / np.sqrt(3), rtol=0.05)
  assert abs(rows.mean()) < 0.05

  one, two = (drawn.rows(client, _ITEMS)[1:] for client in ('dan', 'eve'))
  assert not np.isin(one, two).any()
  # And each row is another one.
  assert len(np.unique(one, axis=0)) == 599


def test_the_same_seed_draws_the_same_first_rows(furl, drawn):
  # Fewer rows, and no other family; only the round's seed counts.
  fewer = _pack(
    furl, {'dan': _ratings([0, 0], [0, 0])}, num_rows={'dan': {_ITEMS: 20}}
  )
  again = _Run.of(furl).after(fewer).rows('dan', _ITEMS)
  np.testing.assert_array_equal(again[1:], drawn.rows('dan', _ITEMS)[1:20])
  other = _Run.of(furl).after(fewer, number=2).rows('dan', _ITEMS)
  assert not np.isin(other[1:], again).any()


# ---- data that grow and shrink -----------------------------------------------


@pytest.mark.slow
def test_rows_come_and_go_with_the_data(furl):
  def rated(*items: int) -> populations.Population:
    return _pack(furl, {'ann': _ratings([0] * len(items), items)})

  run = _Run.of(furl).after(rated(0, 1, 2), 1)
  three = run.rows('ann', _ITEMS)
  # A later rating names item 4 alone. Rows 0 to 2 stay as they were trained,
  # row 3 is drawn, and row 4 is drawn and trained.
  run = run.after(rated(4), 2)
  five = run.rows('ann', _ITEMS)
  assert five.shape == (5, _WIDTH)
  assert five[:3].tobytes() == three.tobytes()
  assert (five[3:] != 0).all() and not np.isin(five[3:], three).any()
  # Item 0 alone is left, and then 1 and 2 are new ones.
  run = run.after(rated(0), 3)
  assert run.rows('ann', _ITEMS).shape == (1, _WIDTH)
  run = run.after(rated(2), 4)
  again = run.rows('ann', _ITEMS)
  assert again.shape == (3, _WIDTH)
  assert (again[1:] != 0).all() and not np.isin(again[1:], five).any()


@pytest.mark.slow
def test_families_without_examples_have_no_rows(furl, trained):
  families = {**_families(), 'dan': _family(1, 1, 0)}
  run = _Run.of(furl).after(_pack(furl, families, min_examples=0))
  assert run.rows('dan', _ITEMS).shape == (0, _WIDTH)
  assert not run.padded('dan', _ITEMS).any()
  assert run.kernel.tobytes() == trained.kernel.tobytes()


# ---- what is stored ----------------------------------------------------------


def _bits(states: client_store.ClientStates) -> dict[str, list[bytes]]:
  """All numbers of all families, bit by bit."""
  return {
    client: small_runs.flat(state)
    for client, state in zip(_SIZES, states.read(list(_SIZES)), strict=True)
  }


@pytest.mark.slow
def test_a_store_keeps_shapes_apart(furl, tmp_path):
  clients = _pack(furl)
  run = _Run.of(furl, tmp_path / 'clients')
  store = run.store
  with contextlib.closing(store):
    run = run.after(clients, 1)
    first = _bits(store)
    store.save(1)
    assert _bits(store) == first
    # States that are read back go on to a second round.
    run = run.after(clients, 2)
    second = _bits(store)
    store.save(2)
    assert _bits(store) == second != first
    assert _bits(store.at(1)) == first
    sizes = {client: len(run.padded(client, _ITEMS)) for client in _SIZES}
    assert sizes == {'ann': 4, 'bob': 9, 'cid': 4}
    store.go_back_to(1)
    assert _bits(store) == first
    assert store.delete('bob') and store.client('bob') is None
    left = _bits(store)
    assert {c: left[c] for c in ('ann', 'cid')} == {
      c: first[c] for c in ('ann', 'cid')
    }
    # A deleted family begins anew, without rows.
    assert [leaf.shape for leaf in store.read(['bob'])[0]['held'].values()] == [
      (0, _WIDTH),
      (0, _WIDTH),
    ]


# ---- clients -----------------------------------------------------------------


def _num_rows(clients: Any, name: str = _ITEMS) -> dict[str, tuple[int, int]]:
  """Client to its number of rows and that with padding."""
  ids = clients.client_ids
  cohort = clients.cohort(ids, np.zeros([len(ids), 2], np.int32))
  masks = {
    client: value['rows'][name]
    for client, value in zip(ids, cohort, strict=True)
  }
  return {client: (int(m.sum()), len(m)) for client, m in masks.items()}


def test_tables_are_padded_to_the_most_in_a_bucket(furl):
  clients = _pack(furl)
  assert _num_rows(clients) == {'ann': (4, 4), 'bob': (9, 9), 'cid': (2, 4)}
  assert _num_rows(clients, _USERS)['cid'] == (1, 2)
  clients = _pack(furl, num_rows={'cid': {_ITEMS: 7}})
  assert _num_rows(clients) == {'ann': (4, 7), 'bob': (9, 9), 'cid': (7, 7)}


@pytest.mark.slow
def test_readers_read_the_same(furl, trained):
  families = _families()
  reader = client_readers.Reader(
    list(families), families.__getitem__, furl.example_spec
  )
  # Sizes are powers of two, so that few occur.
  assert _num_rows(reader) == {'ann': (4, 16), 'bob': (9, 16), 'cid': (2, 16)}
  run = _Run.of(furl).after(reader)
  assert run.kernel.tobytes() == trained.kernel.tobytes()
  for client in families:
    for name in (_USERS, _ITEMS):
      one, two = (r.rows(client, name) for r in (run, trained))
      assert one.tobytes() == two.tobytes()


@pytest.mark.parametrize(
  ('said', 'message'),
  [
    (
      {_ITEMS: 8},
      f"Client 'bob': num_rows says 8 rows of '{_ITEMS}', but its examples "
      'name 9',
    ),
    ({'items': 10}, "Client 'bob': num_rows names 'items', but the tables"),
    ({_ITEMS: 9.5}, f"Client 'bob': num_rows says 9.5 rows of '{_ITEMS}'"),
    (10, "Client 'bob': num_rows is 10. Give a mapping"),
  ],
)
def test_numbers_of_rows_that_cannot_be_are_refused(furl, said, message):
  with pytest.raises(examples.ClientDataError, match=message):
    _pack(furl, num_rows={'bob': said})


def test_clients_of_a_model_with_fixed_tables_are_refused(furl):
  fixed = tff_partial.from_keras(
    lambda: _build(9), loss='mse', local=_TABLES, client_sized='users'
  )
  with pytest.raises(
    examples.ClientDataError,
    match=rf"count rows of the client-sized tables \['{_USERS}'\] instead of",
  ):
    _pack(fixed).check(furl.example_spec)


def test_ids_below_zero_are_refused(furl):
  with pytest.raises(
    examples.ClientDataError,
    match="Client 'ann', x.item: example 1 is -1, but table 'items' has as "
    'many rows as a client needs: ids are 0 and up',
  ):
    _pack(furl, {'ann': _ratings([0, 0], [0, -1])})


# ---- after training ----------------------------------------------------------


@pytest.fixture(scope='module', name='result')
def fixture_result(furl: processes.PartialProcess) -> Any:
  return tff_partial.train(furl, _pack(furl), rounds=1, clients_per_round=3)


def _rows_of(result: Any, client: str, name: str, number: int) -> np.ndarray:
  return result.client_store.client(client)[f'held/{name}'][:number]


@pytest.mark.slow
def test_a_familys_own_model_has_its_rows(furl, result, tmp_path):
  keras_model = tff_partial.personalise(result, _pack(furl), 'bob')
  for name, number in ((_USERS, 3), (_ITEMS, 9)):
    layer = keras_model.get_layer(name.removesuffix('/embeddings'))
    np.testing.assert_array_equal(
      layer.embeddings.numpy(), _rows_of(result, 'bob', name, number)
    )
    assert layer.input_dim == number
  other = tff_partial.personalise(result, _pack(furl), 'cid')
  assert other.get_layer('items').embeddings.shape == (2, _WIDTH)  # Unpadded.
  # The builder's tables have no item 8. What is saved can be loaded.
  last = {'user': np.array([2]), 'item': np.array([8])}
  user, item = (
    _rows_of(result, 'bob', name, number)[-1]
    for name, number in ((_USERS, 3), (_ITEMS, 9))
  )
  kernel = result.weights.trainable[tiers.GLOBAL]['join/kernel']
  expected = (user * item) @ np.asarray(kernel)
  keras_model.save(tmp_path / 'bob.keras')
  for one in (keras_model, tf.keras.models.load_model(tmp_path / 'bob.keras')):
    found = one.predict(last, verbose=0)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_families_that_forget_rebuild_as_many_rows_as_they_need(furl):
  process = algorithms.build_fed_recon(
    furl.model, reconstruct=tff_partial.Phase(batch_size=None)
  )
  remembered = process.initialize_client.type_signature.result
  assert process.is_stateless and len(remembered) == 0
  clients = _pack(process)
  result = tff_partial.train(process, clients, rounds=1, clients_per_round=3)
  assert result.client_store is None
  assert np.isfinite(result.train['loss'])
  kernel = result.weights.trainable[tiers.GLOBAL]['join/kernel']
  assert np.abs(np.asarray(kernel) - 1).max() > 1e-4


def test_a_statistic_that_settles_is_refused(furl):
  with pytest.raises(
    client_work.CompositionError,
    match=rf"'weight' settles .* their tables \['{_USERS}', '{_ITEMS}'\]",
  ):
    algorithms.build_furl(
      furl.model, private_rule=client_statistics.SCALED_BY_SHARE
    )


# ---- what is said ------------------------------------------------------------


def test_a_model_says_that_rows_are_the_clients_own(furl):
  assert repr(furl.model).splitlines()[1:7] == [
    '  global: 3 parameters',
    '    join/kernel: float32 [3, 1]',
    '  local: 0 parameters, and rows as each client needs them',
    f'    {_USERS}: float32 [None, 3]',
    f'    {_ITEMS}: float32 [None, 3]',
    '  ExampleSpec:',
  ]
  assert (
    "x.item: int32 [], 0 and up (table 'items' has as many rows as a client "
    'needs)' in repr(furl.example_spec)
  )
