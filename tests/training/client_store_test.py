"""Laws of client stores: what is remembered is what was written, or nothing."""

import collections
import contextlib
import fcntl
import gc
import json
import os
import pathlib
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import commands
from tests.support import computations
import tff_partial
from tff_partial import errors
from tff_partial import random_bits
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.values import sources
from tff_partial.training import sampling
from tff_partial.training.client_store import client_store
from tff_partial.training.client_store import fresh_states
from tff_partial.training.client_store import sqlite_backend
from tff_partial.training.client_store import state_codec

ClientStore = client_store.ClientStore
ClientStoreError = client_store.ClientStoreError

SEED_TYPE = tff.TensorType(np.int32, [2])


@tff.tensorflow.computation(SEED_TYPE)
def initialize_client(seed):
  """A state with leaves of several types, at several depths."""
  return collections.OrderedDict(
    local=collections.OrderedDict(
      user=random_bits.normal(seed, [5]), bias=tf.zeros([])
    ),
    seen=(tf.constant(0), tf.constant([False, True])),
  )


# A fixed number of floats.
@tff.tensorflow.computation(SEED_TYPE)
def initialize_small(seed):
  return collections.OrderedDict(x=random_bits.uniform(seed, [3]))


# As many rows as the client's seed says.
@tff.tensorflow.computation(SEED_TYPE)
def initialize_table(seed):
  return collections.OrderedDict(table=tf.ones([tf.abs(seed[0]) % 3 + 1, 2]))


STATE_TYPE = initialize_client.type_signature.result


def _change(state: Any) -> Any:
  """What a round does to a state here: all numbers change."""
  local, (count, flags) = state['local'], state['seen']
  return collections.OrderedDict(
    local=collections.OrderedDict(
      user=local['user'] * 0.9 + 1.0, bias=local['bias'] - 1.0
    ),
    seen=(count + 1, tf.logical_not(flags)),
  )


take_part = computations.mapped(_change, STATE_TYPE)


pytestmark = pytest.mark.usefixtures('in_cohorts')


# Where states are that were not saved yet: in memory, or in files of the
# processes that ran their clients.
WHERE = ('memory', 'file', 'file, deposited')


def folder_of(where: str, path: Any, monkeypatch: Any) -> Any:
  """The folder of a store, if it is in one."""
  if where == 'file, deposited':
    deposit_states(path.parent / 'deposits', monkeypatch)
  return None if where == 'memory' else path


def deposit_states(folder: pathlib.Path, monkeypatch: Any) -> None:
  """Has states written to files, of which a store is told, and made late."""
  folder.mkdir(exist_ok=True)
  monkeypatch.setattr(client_store, '_LARGE_BYTES', 0)
  write = ClientStore.write

  def deposited(self: Any, client_ids: Any, states: Any) -> None:
    if client_ids and len(states) == len(client_ids):
      converter = state_codec.Converter(self.type)
      held = converter.scattered(states)
      deposit = deposits.Deposit.write(str(folder), held.leaves()).owned()
      states = converter.columns(
        sources.Scattered.of(
          held.specs, [deposit], [np.arange(len(client_ids))]
        )
      )
    write(self, client_ids, states)

  monkeypatch.setattr(ClientStore, 'write', deposited)


@pytest.fixture(name='store', params=WHERE)
def fixture_store(request, tmp_path, monkeypatch):
  folder = folder_of(request.param, tmp_path / 'clients', monkeypatch)
  store = ClientStore(initialize_client, seed=3, folder=folder)
  yield store
  store.close()


@pytest.fixture(name='folder')
def fixture_folder(tmp_path):
  return tmp_path / 'clients'


def names(*numbers: int) -> list[str]:
  return [f'client {number}' for number in numbers]


def as_bytes(states: Any) -> list[list[bytes]]:
  """Every number of every state, bit by bit."""
  return [
    [
      np.asarray(leaf).tobytes()
      for leaf in tff.structure.flatten(
        tff.structure.from_container(state, recursive=True)
      )
    ]
    for state in states
  ]


def opened(folder: Any, **options: Any) -> Any:
  """A context that closes a store of small states."""
  return contextlib.closing(
    ClientStore(initialize_small, folder=folder, **options)
  )


def round_of(store: ClientStore, *numbers: int) -> None:
  """Some clients take part."""
  ids = names(*numbers)
  store.write(ids, take_part(store.read(ids)))


def small(value: float, size: int = 1) -> list[Any]:
  """States of `initialize_small` that tell their number."""
  return [
    collections.OrderedDict(x=np.full([3], value, np.float32))
    for _ in range(size)
  ]


def values(states: client_store.ClientStates, *numbers: int) -> list[float]:
  return [float(state['x'][0]) for state in states.read(names(*numbers))]


# ---- first values ------------------------------------------------------------


def test_a_first_value_follows_from_the_seed_and_the_client(store):
  ids = names(4, 2, 7)
  seeds = sampling.client_seeds(ids, 3, 'first state')
  expected = [initialize_client(seed) for seed in seeds]
  assert as_bytes(store.read(ids)) == as_bytes(expected)
  # Whoever else is drawn, and in whatever order.
  assert as_bytes(store.read(ids[::-1])) == as_bytes(expected[::-1])
  assert as_bytes(store.read(ids[1:2])) == as_bytes(expected[1:2])
  other = ClientStore(initialize_client, seed=4)
  assert as_bytes(other.read(ids)) != as_bytes(expected)
  assert len({tuple(state) for state in as_bytes(expected)}) == 3


def test_first_values_are_the_same_under_every_runtime():
  seeds = sampling.client_seeds(names(*range(9)), 0)
  found = []
  for runtime in (
    tff_partial.runtimes.cohort(jit=True),
    tff_partial.runtimes.native(),
  ):
    with runtime:
      first = state_codec.first_states(initialize_client, seeds)
      found.append(as_bytes(first))
  assert found[0] == found[1]
  assert len(found[0]) == 9


def test_clients_that_remember_nothing_have_a_length():
  nothing = tff.tensorflow.computation(
    lambda seed: collections.OrderedDict(), SEED_TYPE
  )
  first = state_codec.first_states(nothing, np.zeros([4, 2], np.int32))
  assert list(first) == [collections.OrderedDict()] * 4
  with pytest.raises(ClientStoreError, match='need no client store'):
    ClientStore(nothing)


# ---- reading and writing -----------------------------------------------------


@pytest.mark.parametrize('runtime', ['cohort', 'native'])
def test_what_is_written_is_read(store, runtime):
  ids = names(5, 3, 8)
  with getattr(tff_partial.runtimes, runtime)():
    first = store.read(ids)
    after = take_part(first)
    store.write(ids, after)
    for saved in (False, True):
      if saved:
        store.save(1)
      # One of them, nobody that it does not know, and in another order.
      states = store.read(names(8, 1, 5))
      assert as_bytes(states[:1]) == as_bytes(after[2:])
      assert as_bytes(states[2:]) == as_bytes(after[:1])
      again = take_part(states)
      assert int(again[0]['seen'][0]) == 2
      assert int(again[1]['seen'][0]) == 1
  user = np.asarray(first[0]['local']['user'])
  expected = (user * np.float32(0.9)) + np.float32(1.0)
  np.testing.assert_allclose(
    store.client('client 5')['local/user'], expected, rtol=1e-6
  )


def test_no_older_state_of_a_client_stays_in_memory(tmp_path):
  specs, leaves = [tf.TensorSpec([2])], [np.ones([1, 2], np.float32)]
  fresh = fresh_states.FreshStates(specs)
  fresh.write(['ann'], sources.Scattered.held(specs, leaves))
  deposit = deposits.Deposit.write(str(tmp_path), leaves).owned()
  fresh.write(['ann'], sources.Scattered.of(specs, [deposit], [np.arange(1)]))
  in_memory, _ = fresh._table.take(np.array([0]))
  assert fresh.delete('ann')
  assert not in_memory.leaves[0].any()


@pytest.mark.parametrize(('saved', 'named'), [(True, 7), (False, '7')])
def test_clients_may_be_named_by_numbers(store, saved, named):
  """Those of NumPy, as `unique` gives them, are the same as Python's."""
  ids = [np.int64(7), np.int64(8)]
  store.write(ids, take_part(store.read(ids)))
  if saved:
    store.save(1)
  for client in (7, np.int64(7), '7'):
    assert store.client(client) is not None, client
  assert store.client(9) is None
  assert store.delete(named) and store.client(np.int64(7)) is None
  store.save(1)
  assert store.client(7) is None


def test_every_bit_is_kept(store):
  odd = np.array([np.nan, -np.inf, -0.0, 1e-45, 3.4e38], np.float32)
  odd[0] = np.array([0x7FC12345], np.uint32).view(np.float32)[0]
  state = collections.OrderedDict(
    local=collections.OrderedDict(user=odd, bias=np.float32(-0.0)),
    seen=(np.int32(-(2**31)), np.array([True, False])),
  )
  store.write(names(1), [state])
  store.save(1)
  assert as_bytes(store.read(names(1))) == as_bytes([state])


def test_a_state_of_another_shape_is_refused(store):
  with pytest.raises(
    errors.UserError, match=r'client state 0.*x.*float32\[2\]'
  ):
    bad = [collections.OrderedDict(x=np.zeros([2], np.float32))]
    ClientStore(initialize_small).write(names(1), bad)
  with pytest.raises(ClientStoreError, match='2 states for 1 clients'):
    store.write(names(1), store.read(names(1, 2)))


@pytest.mark.parametrize(
  'spec', [tf.TensorSpec(None, tf.float32), tf.TensorSpec([], tf.string)]
)
def test_what_cannot_lie_in_a_record_is_refused(spec):
  kind = tff.types.tensorflow_to_type(collections.OrderedDict(word=spec))
  with pytest.raises(ClientStoreError, match='leaf word .* takes numbers'):
    state_codec.Format.of_type(kind)


# ---- rounds ------------------------------------------------------------------


class _Reference:
  """A run that keeps everything, without a thought for its size.

  Attributes:
    now: What clients remember.
    saved: The same, after the rounds that were saved, and the best round then.
    checkpoints: The rounds of the server's checkpoints that are kept.
  """

  def __init__(self) -> None:
    self.now: dict[str, float] = {}
    self.saved: dict[int, tuple[dict[str, float], int]] = {0: ({}, 0)}
    self.checkpoints: list[int] = []

  def save(self, number: int, best: int) -> None:
    self.saved[number] = dict(self.now), best

  def resume(self) -> tuple[int, int]:
    """Goes on from the newest checkpoint; returns its round and its best."""
    newest = self.checkpoints[-1] if self.checkpoints else 0
    self.now = dict(self.saved[newest][0])
    return newest, self.saved[newest][1]

  def needed(self) -> set[int]:
    """All rounds that a run may still ask for."""
    best = {self.saved[number][1] for number in self.checkpoints}
    return (best | {*self.checkpoints}) - {0}


@pytest.mark.parametrize(
  'draw', [0, 1, *(pytest.param(d, marks=pytest.mark.slow) for d in (2, 3, 4))]
)
@pytest.mark.parametrize('where', WHERE)
def test_any_history_reads_as_if_everything_were_kept(
  tmp_path, where, draw, monkeypatch
):
  random = np.random.default_rng(draw)
  folder = folder_of(where, tmp_path, monkeypatch)
  store, expected = ClientStore(initialize_small, folder=folder), _Reference()
  people = range(9)
  first = dict(zip(names(*people), values(store, *people), strict=True))
  number, best = 0, 0
  for _ in range(80):
    number += int(random.integers(1, 4))
    some = random.choice(9, random.integers(0, 4), replace=False)
    states = [small(number + who / 16)[0] for who in some]
    store.write(names(*some), states)
    for who in some:
      expected.now[f'client {who}'] = number + who / 16
    if random.random() < 0.5:
      continue
    best = number if random.random() < 0.3 else best
    store.save(number, best or None)
    expected.save(number, best)
    fate = random.choice(['killed', 'killed later', 'damaged', *['well'] * 5])
    if fate != 'killed':
      expected.checkpoints = [*expected.checkpoints, number][-2:]
    if fate == 'damaged':
      expected.checkpoints.pop()
    if fate != 'well':
      number, best = expected.resume()
      if folder is not None:
        store.close()
        store = ClientStore(initialize_small, folder=folder)
      store.go_back_to(number)
    assert expected.needed() <= set(store.rounds)
    for states, remembered in [
      (store, expected.now),
      *[(store.at(n), expected.saved[n][0]) for n in expected.needed()],
    ]:
      assert values(states, *people) == [
        remembered.get(name, first[name]) for name in names(*people)
      ]
  most = max(len(store._versions.versions(name)) for name in names(*people))
  assert most <= 6  # Three rounds, and the best one of each.
  store.close()


def test_versions_do_not_pile_up_while_the_best_round_stays(folder):
  store = ClientStore(initialize_small, folder=folder)
  for number in range(1, 40):
    store.write(names(1), small(number))
    store.save(number, best=7 if number >= 7 else None)
  assert store._versions.versions('client 1') == [7, 37, 38, 39]
  assert values(store.at(7), 1) == [7.0]
  with pytest.raises(ClientStoreError, match=r'round 20, .*7, 37, 38, 39'):
    store.at(20)


@pytest.mark.slow
def test_files_that_are_little_in_use_go_with_a_save(tmp_path, monkeypatch):
  folder = folder_of('file, deposited', tmp_path / 'clients', monkeypatch)
  store = ClientStore(initialize_small, folder=folder)

  def files_after(number: int, *clients: int) -> int:
    store.write(names(*clients), small(number, len(clients)))
    store.save(number)
    gc.collect()
    return len(list((tmp_path / 'deposits').iterdir()))

  assert files_after(1, 1, 2, 3, 4) == 1
  # Two of four clients still have their newest states in the first.
  assert files_after(2, 1, 2) == 2
  # One has; it is read from the store's own file from now on.
  assert files_after(3, 3) == 2
  assert values(store, 1, 2, 3, 4) == [2.0, 2.0, 3.0, 1.0]
  store.close()
  gc.collect()
  assert not list((tmp_path / 'deposits').iterdir())


# ---- kills -------------------------------------------------------------------


def test_a_save_that_is_cut_short_never_was(folder, tmp_path, monkeypatch):
  store = ClientStore(initialize_small, folder=folder)
  store.write(names(*range(3000)), small(1.0, 3000))
  store.save(1)
  # So that pages reach the file long before the transaction ends.
  store._versions._run('PRAGMA cache_size = 5')
  copy = tmp_path / 'copy'

  def die(*arguments):
    shutil.copytree(folder, copy)
    raise KeyboardInterrupt

  monkeypatch.setattr(sqlite_backend.Versions, '_prune', die)
  store.write(names(*range(3000)), small(2.0, 3000))
  size = store.path.stat().st_size
  with pytest.raises(KeyboardInterrupt):
    store.save(2)
  # The copy is what a killed process leaves: half of it, and a journal.
  assert (copy / sqlite_backend.FILE).stat().st_size > size
  assert [path.suffix for path in copy.glob('*-journal')]
  for left in (copy, folder):
    if left == folder:
      store.close()
    with opened(left, writable=False) as reader:
      assert reader.rounds == [1]
      assert set(values(reader, *range(3000))) == {1.0}


_ENDLESS_SAVES = """
import sys
from tests.training import client_store_test as tests

store = tests.ClientStore(tests.initialize_small, folder=sys.argv[1])
store._versions._run('PRAGMA cache_size = 5')
number = 0
while True:
  number += 1
  store.write(tests.names(*range(2000)), tests.small(number, 2000))
  store.save(number)
  print(number, flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_whole_round(tmp_path):
  random = np.random.default_rng()
  code = textwrap.dedent(_ENDLESS_SAVES)
  for kill in range(6):
    folder = tmp_path / f'clients {kill}'
    program = subprocess.Popen(
      [sys.executable, '-c', code, str(folder)],
      cwd=commands.ROOT,
      env=commands.environment(),
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
    )
    try:
      # `read` would wait for more than there is.
      told = [int(program.stdout.readline()) for _ in range(2)]
      time.sleep(random.uniform(0.0, 0.3))
    finally:
      program.send_signal(signal.SIGKILL)
      told += [int(line) for line in program.stdout]
      assert program.wait() == -signal.SIGKILL
    with opened(folder) as store:
      assert store.rounds[-1] in (told[-1], told[-1] + 1)
      assert set(values(store, *range(2000))) == {store.rounds[-1]}
      # As the server would, if its checkpoint had not appeared.
      store.go_back_to(store.rounds[-2])
      assert set(values(store, *range(2000))) == {store.rounds[-1]}


# ---- deletion ----------------------------------------------------------------


def test_a_deleted_client_begins_anew(store):
  first = as_bytes(store.read(names(1, 2, 3, 4)))
  for number in (1, 2):
    round_of(store, 1, 2, 3)
    store.save(number)
  round_of(store, 1, 2, 3)
  before = as_bytes(store.read(names(1, 2, 3, 4)))
  assert store.delete('client 2')
  assert store.client('client 2') is None
  expected = [before[0], first[1], before[2], before[3]]
  assert as_bytes(store.read(names(1, 2, 3, 4))) == expected
  assert not store.delete('client 2')
  assert not store.delete('client 4')
  # Neither a save nor an older round brings it back.
  store.save(3)
  assert as_bytes(store.read(names(1, 2, 3, 4))) == expected
  store.go_back_to(1)
  assert as_bytes(store.read(names(2)))[0] == first[1]
  assert as_bytes(store.read(names(1)))[0] != first[0]


def test_who_has_not_been_saved_yet_is_deleted(store):
  round_of(store, 1, 2, 3)
  before = as_bytes(store.read(names(1, 2, 3)))
  assert store.delete('client 1')
  assert store.delete('client 3')
  after = as_bytes(store.read(names(1, 2, 3)))
  assert after[1] == before[1]
  assert after[0] != before[0]
  assert after[2] != before[2]
  store.save(1)
  assert as_bytes(store.read(names(1, 2, 3))) == after


def test_a_deleted_state_is_overwritten(folder):
  store = ClientStore(initialize_small, folder=folder)
  secret = np.array([0.123456, 7.654321, 1.357911], np.float32)
  for number in (1, 2):
    states = [*small(1.0, 400), collections.OrderedDict(x=secret)]
    store.write(names(*range(401)), states)
    store.save(number)
  assert secret.tobytes() in store.path.read_bytes()
  store.delete('client 400')
  assert secret.tobytes() not in store.path.read_bytes()
  assert sorted(path.name for path in folder.iterdir()) == [store.path.name]


def test_files_of_workers_are_overwritten_as_well(tmp_path, monkeypatch):
  folder = folder_of('file, deposited', tmp_path / 'clients', monkeypatch)
  store = ClientStore(initialize_small, folder=folder)
  store.write(names(1, 2, 3), [*small(7.25), *small(0.5, 2)])
  store.save(1)
  store.write(names(1, 2), [*small(8.25), *small(0.5)])
  # Client 3 keeps the first file, in which client 1 has an older state.
  files = list((tmp_path / 'deposits').iterdir())
  assert len(files) == 2
  secrets = [np.float32(value).tobytes() for value in (7.25, 8.25)]
  assert [
    any(secret in file.read_bytes() for file in files) for secret in secrets
  ] == [True, True]
  assert store.delete('client 1')
  assert not any(
    secret in file.read_bytes() for file in files for secret in secrets
  )
  assert values(store, 2, 3) == [0.5, 0.5]
  store.close()


# ---- what is refused ---------------------------------------------------------


@pytest.fixture(name='path')
def fixture_path(folder):
  """The file of a store with a thousand clients."""
  store = ClientStore(initialize_small, seed=5, folder=folder)
  store.write(names(*range(1000)), small(1.0, 1000))
  store.save(1)
  store.close()
  return store.path


def test_a_store_of_another_type_is_refused(path):
  with pytest.raises(ClientStoreError) as caught:
    ClientStore(initialize_client, folder=path.parent)
  message = str(caught.value)
  assert str(path) in message
  assert 'x float32[3]' in message
  assert 'local/user float32[5], local/bias float32[], seen/0 int32' in message
  # And is free for its own run again.
  ClientStore(initialize_small, folder=path.parent).close()


def test_a_store_of_another_seed_is_refused(path):
  with pytest.raises(ClientStoreError, match='has the seed 5, here it is 6'):
    ClientStore(initialize_small, seed=6, folder=path.parent)
  with opened(path.parent) as store:
    assert store.seed == 5


def test_an_old_copy_is_refused(path):
  with (
    opened(path.parent) as store,
    pytest.raises(ClientStoreError, match=r'round 8, .* rounds \[1\] only'),
  ):
    store.go_back_to(8)


def _run_sql(path: pathlib.Path, *statements: str) -> None:
  connection = sqlite3.connect(path)
  for statement in statements:
    connection.execute(statement)
  connection.commit()
  connection.close()


# Nothing of this is damage to SQLite, and each would change figures.
@pytest.mark.parametrize(
  'statement, problem',
  [
    (
      "UPDATE states SET state = x'00' WHERE client = 'client 0'",
      "client 'client 0' .* damaged",
    ),
    (
      'UPDATE states SET checksum = checksum + 1',
      "client 'client 0' .* damaged",
    ),
    ("UPDATE notes SET text = replace(text, '5', '6')", 'what is noted about'),
    ('DELETE FROM notes', 'what is noted about the store is damaged'),
    ('CREATE TABLE more (name TEXT)', 'no client store of the format 3'),
    ('PRAGMA user_version = 4', 'no client store of the format 3'),
    ('PRAGMA user_version = 2', 'by an earlier version of tff_partial. Go on'),
  ],
)
@pytest.mark.parametrize('writable', [True, False])
def test_what_is_altered_is_refused(path, statement, problem, writable):
  _run_sql(path, statement)
  with pytest.raises(ClientStoreError, match=problem) as caught:
    with opened(path.parent, writable=writable) as store:
      store.read(names(*range(1000)))
  assert str(path) in str(caught.value)


def test_a_damaged_client_can_be_deleted(path):
  _run_sql(path, "UPDATE states SET state = x'00' WHERE client = 'client 7'")
  store = ClientStore(initialize_small, folder=path.parent)
  assert values(store, 1, 8) == [1.0, 1.0]
  with pytest.raises(ClientStoreError, match="'client 7'"):
    store.read(names(1, 7))
  store.delete('client 7')
  assert values(store, 7) != [1.0]
  store.close()


def test_rounds_are_saved_in_their_order(store):
  store.save(4)
  store.save(4)
  with pytest.raises(ClientStoreError, match='round 3 cannot be saved after'):
    store.save(3)


def test_a_store_is_its_owners(path):
  assert path.stat().st_mode & 0o077 == 0


def test_a_locked_file_is_named(path, monkeypatch):
  monkeypatch.setattr(sqlite_backend, '_PATIENCE', 0.05)
  store = ClientStore(initialize_small, folder=path.parent)
  other = sqlite3.connect(path)
  other.execute('BEGIN EXCLUSIVE')
  for work in (lambda: store.save(2), lambda: store.read(names(1))):
    with pytest.raises(ClientStoreError, match='Another program is using'):
      work()
  other.close()
  store.save(2)
  store.close()


def test_two_runs_cannot_share_a_store(path):
  store = ClientStore(initialize_small, folder=path.parent)
  with pytest.raises(errors.UserError, match='another process is training'):
    ClientStore(initialize_small, folder=path.parent)
  # Who only reads may.
  reader = ClientStore(initialize_small, folder=path.parent, writable=False)
  assert values(reader, 1) == [1.0]
  store.release()
  ClientStore(initialize_small, folder=path.parent).close()
  for released in (store, reader):
    assert values(released, 1) == [1.0]
    for change in (
      lambda s=released: s.save(2),
      lambda s=released: s.delete('client 1'),
    ):
      with pytest.raises(ClientStoreError, match='Open it again to change it'):
        change()
    released.close()
    with pytest.raises(ClientStoreError, match='was closed'):
      released.read(names(1))


def test_a_full_disk_costs_nothing_but_the_save(path):
  store = ClientStore(initialize_small, folder=path.parent)
  store._versions._run('PRAGMA max_page_count = 1')  # No more than there are.
  store.write(names(*range(1000, 3000)), small(2.0, 2000))
  with pytest.raises(
    ClientStoreError, match='disk is full.*disk is full: make'
  ):
    store.save(2)
  assert store.rounds == [1]
  assert values(store.at(1), 1) == [1.0]
  # Nothing of what was written is lost either, once there is room.
  store._versions._run('PRAGMA max_page_count = 1000000')
  store.save(2)
  assert values(store, 1, 1000, 2999) == [1.0, 2.0, 2.0]
  store.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
  (tmp_path / 'clients').write_text('')
  with pytest.raises(ClientStoreError, match='clients: .*Choose another'):
    ClientStore(initialize_small, folder=tmp_path / 'clients')


def test_where_there_is_no_store_nothing_is_made(tmp_path):
  with pytest.raises(ClientStoreError, match='no client store in'):
    ClientStore(initialize_small, folder=tmp_path / 'a', writable=False)
  assert not list(tmp_path.iterdir())


# ---- one client, in Python and by command ------------------------------------


@pytest.fixture(name='output')
def fixture_output(tmp_path):
  """The output folder of a run that was killed before a checkpoint appeared."""
  output = tmp_path / 'run'
  store = ClientStore(initialize_client, folder=output / 'clients')
  for number in (4, 6):
    (output / 'checkpoints' / f'round_{number}').mkdir(parents=True)
    round_of(store, 1, 2)
    store.save(number)
  round_of(store, 1, 3)
  store.save(8)
  store.close()
  return output


def _command(output: pathlib.Path, *arguments: str) -> commands.Outcome:
  return commands.run_here('clients', f'--output_dir={output}', *arguments)


def _at(output: pathlib.Path, number: int, client_id: str) -> Any:
  with contextlib.closing(
    ClientStore(initialize_client, folder=output / 'clients', writable=False)
  ) as store:
    return store.at(number).client(client_id)


def test_the_command_shows_a_client(output):
  outcome = _command(output, '--client=client 1')
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  expected = _at(output, 6, 'client 1')
  assert list(expected) == ['local/user', 'local/bias', 'seen/0', 'seen/1']
  lines = outcome.output.splitlines()
  # What was saved for a checkpoint that never appeared does not count.
  assert lines[0] == 'Client client 1 remembers, as of round 6:'
  assert lines[1].startswith(
    f'  local/user  float32[5]  {expected["local/user"][0]:.6g}'
  )
  assert lines[2:] == [
    '  local/bias  float32[]  -2',
    '  seen/0  int32[]  2',
    '  seen/1  bool[2]  0 1',
  ]


def test_before_the_first_checkpoint_nothing_is_shown(output):
  shutil.rmtree(output / 'checkpoints')
  commands.is_for_users(
    _command(output, '--client=client 1'), 'nothing yet: no round has a check'
  )


@pytest.mark.parametrize('ending', ['json', 'npz'])
def test_the_command_exports_a_client(output, tmp_path, ending):
  file = tmp_path / f'exported.{ending}'
  outcome = _command(
    output, '--client=client 2', '--do=export', f'--file={file}'
  )
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  assert str(file) in outcome.output
  exported = np.load(file) if ending == 'npz' else json.loads(file.read_text())
  expected = _at(output, 6, 'client 2')
  assert set(exported) == set(expected)
  for name, leaf in expected.items():
    assert np.array_equal(np.asarray(exported[name], leaf.dtype), leaf), name


def test_the_command_deletes_a_client(output):
  outcome = _command(output, '--client=client 1', '--do=delete')
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  assert 'Deleted 3 versions' in outcome.output
  assert 'stays learned' in outcome.output
  for number in (4, 6, 8):
    assert _at(output, number, 'client 1') is None
    assert _at(output, number, 'client 2') is not None
  commands.is_for_users(
    _command(output, '--client=client 1', '--do=delete'), 'was deleted'
  )


@pytest.mark.parametrize(
  'arguments, expected',
  [
    ([], '--client: name the run'),
    (['--client=nobody'], 'holds nothing of this client'),
    (['--client=nobody', '--do=delete'], 'holds nothing of this client'),
    (['--client=client 3'], 'checkpoint of round 6'),
    (['--client=client 1', '--do=export'], 'an export has a file'),
    (['--client=client 1', '--file=a.json'], 'an export has a file'),
    (
      ['--client=client 1', '--do=export', '--file=a.txt'],
      'a.txt: a state is exported to a file that ends in .json or .npz',
    ),
    (
      ['--client=client 1', '--do=export', '--file=missing/a.json'],
      'missing/a.json cannot be written',
    ),
  ],
)
def test_what_the_command_refuses(output, arguments, expected, monkeypatch):
  monkeypatch.chdir(output)
  before = commands.files(output)
  commands.is_for_users(_command(output, *arguments), expected)
  assert commands.files(output) == before


def test_a_full_disk_leaves_an_earlier_export(tmp_path):
  path = tmp_path / 'a.json'
  path.write_text('earlier')
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
  try:
    with pytest.raises(ClientStoreError, match='a.json cannot be written'):
      client_store.export({'leaf': np.zeros([9999])}, path)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert commands.files(tmp_path) == {'a.json': b'earlier'}


def test_where_there_is_no_store_the_command_says_so(tmp_path):
  outcome = _command(tmp_path, '--client=client 1', '--do=delete')
  commands.is_for_users(outcome, f'no client store in {tmp_path}')
  assert not list(tmp_path.iterdir())


def test_nothing_is_deleted_while_a_run_trains(output):
  lock = os.open(output / 'clients', os.O_RDONLY)
  fcntl.flock(lock, fcntl.LOCK_EX)
  outcome = _command(output, '--client=client 1', '--do=delete')
  commands.is_for_users(outcome, 'another process is training')
  # To look is allowed.
  assert _command(output, '--client=client 1').status == 0
  os.close(lock)
  assert _at(output, 6, 'client 1') is not None


@pytest.mark.parametrize('initialize', [initialize_small, initialize_table])
def test_only_a_client_with_another_state_than_its_first_has_learned(
  initialize,
):
  store = ClientStore(initialize)
  (state,) = store.read(['a'])
  store.write(['a', 'b'], [state, *store.read(['b'])])
  assert not any(map(store.has_learned, ['a', 'b', 'new']))
  ((name, value),) = state.items()
  store.write(['a'], [collections.OrderedDict({name: value + 1.0})])
  assert store.has_learned('a')
