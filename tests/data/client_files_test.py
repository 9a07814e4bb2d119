"""Clients in a folder, and readers that know how many examples clients have."""

import collections
from collections.abc import Callable, Iterator
import json
import pathlib
import pickle
import shutil
import threading
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
from tests.support import small_clients
from tests.support import small_runs
import tff_partial
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import runtimes
from tff_partial import sgd
from tff_partial.data import client_files
from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import packing

_SPEC = examples.ExampleSpec(small_clients.SPEC)


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('files') / 'clients'
  clients = small_clients.clients()
  client_files.write_clients(folder, reversed(clients.items()), _SPEC)
  return folder


def _write(folder, clients, spec=_SPEC, **options):
  client_files.write_clients(folder, clients, spec, **options)


# ---- what is written is read -------------------------------------------------


def test_a_folder_has_the_clients_that_were_written(folder):
  clients = client_files.open_clients(folder, _SPEC, capacities=[4, 8])
  assert clients.client_ids == ('ann', 'bob', 'cid', 'dot', 'eve')
  members = ['dot', 'cid', 'bob', 'cid']
  small_clients.check_cohort(clients, members)
  cohort = clients.cohort(members, small_clients.seeds(4))
  # dot and bob fit into 4, cid twice into 8.
  assert [list(group.positions) for group in cohort.groups] == [[0, 2], [1, 3]]


def test_fields_of_any_structure_are_read(tmp_path):
  spec = collections.OrderedDict(
    x={
      'image': tf.TensorSpec([2, 3], tf.uint8),
      'id': tf.TensorSpec([], tf.int64),
    },
    y=(tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.bool)),
    weight=examples.WEIGHT_SPEC,
  )
  fields = {
    'x': {
      'id': np.array([7, 8]),
      'image': np.arange(12, dtype=np.uint8).reshape([2, 2, 3]),
    },
    'y': (np.array([[1.5], [2.5]]), np.array([True, False])),
    'weight': np.array([1.0, 0.5]),
  }
  _write(tmp_path / 'clients', [('ümlaut', fields)], spec)
  clients = client_files.open_clients(tmp_path / 'clients', spec)
  (value,) = clients.cohort(clients.client_ids, small_clients.seeds(1))
  (packed,) = packing.pack({'ümlaut': fields}, spec).cohort(
    ['ümlaut'], small_clients.seeds(1)
  )
  tf.nest.map_structure(np.testing.assert_array_equal, value, packed)


def test_other_examples_have_another_fingerprint(folder, tmp_path):
  clients = small_clients.clients()
  _write(tmp_path / 'same', clients.items())
  clients['eve']['x'] = clients['eve']['x'] + 1
  _write(tmp_path / 'other', clients.items())
  first, same, other = (
    client_files.open_clients(each, _SPEC).fingerprint()
    for each in (folder, tmp_path / 'same', tmp_path / 'other')
  )
  assert first != other
  # They lie in another order, but each has the same.
  assert first != same


# ---- who reads, and when -----------------------------------------------------


def test_clients_are_read_by_the_thread_that_runs_them():
  read = []

  def note(client):
    read.append((client, threading.current_thread()))
    return small_clients.clients()[client]

  reader = client_readers.Reader(
    list(small_clients.COUNTS), note, _SPEC, num_examples=small_clients.COUNTS
  )
  names = list(small_clients.COUNTS) * 20
  cohort = reader.cohort(names, small_clients.seeds(100))
  assert not read
  with runtimes.cohort(threads=2, jit=False):
    total = small_clients.total_of_labels(cohort)
  # 0 + 1/4 + 2/4 + ... of each client's labels.
  expected = sum(n * (n - 1) / 8 for n in small_clients.COUNTS.values())
  assert total == 20 * expected
  assert sorted(client for client, _ in read) == sorted(names)
  assert threading.main_thread() not in {thread for _, thread in read}


def test_what_is_sent_elsewhere_names_the_folder_alone(folder):
  clients = client_files.open_clients(folder, _SPEC)
  (group,) = clients.cohort(['ann', 'eve'], small_clients.seeds(2)).groups
  sent = pickle.dumps(group.unread.take(np.array([1])))
  assert b'eve' in sent
  assert b'ann' not in sent
  loaded = pickle.loads(sent).load()['examples']
  np.testing.assert_array_equal(loaded['x'][0, :5], np.arange(400, 405))


@pytest.mark.slow
@pytest.mark.parametrize('jit', [False, True])
def test_training_comes_to_the_bits_of_clients_in_memory(tmp_path, jit):
  process = algorithms.build_furl(
    small_runs.build_model(),
    training=Phase(optimizer=sgd(0.1), epochs=2, shuffle=True),
  )
  spec = process.example_spec
  random = np.random.default_rng(5)
  given = {
    f'client {n:02}': {
      'x': random.integers(0, small_runs.ITEMS, 3 + n % 5),
      'y': random.normal(size=[3 + n % 5, 1]),
    }
    for n in range(40)
  }
  _write(tmp_path / 'clients', given.items(), spec)
  in_files = client_files.open_clients(
    tmp_path / 'clients', spec, capacities=[4, 8]
  )
  in_memory = tff_partial.pack(given, spec, capacities=[4, 8])

  def train(clients):
    found = tff_partial.train(process, clients, rounds=3, clients_per_round=36)
    kept = found.client_store.read(clients.client_ids)
    return found.weights, list(kept)

  with runtimes.cohort(jit=jit):
    planted.assert_same(train(in_files), train(in_memory))


def test_own_tables_are_counted_when_the_cohort_is_put_together():
  ids = {'x': (id_ranges.IdRange(None, 'table', table='users'),)}
  spec = examples.ExampleSpec(small_clients.SPEC, ids)
  reader = client_readers.Reader(
    list(small_clients.COUNTS),
    lambda client: small_clients.clients()[client],
    spec,
    num_examples=small_clients.COUNTS,
  )
  (group,) = reader.cohort(['bob'], small_clients.seeds(1)).groups
  assert group.unread is None
  assert group.resident['rows']['users'].sum() == 101  # Its item is 100.


# ---- refusals ----------------------------------------------------------------


def _refused(words):
  return pytest.raises(examples.ClientDataError, match=words)


def test_what_cannot_be_written_is_refused(tmp_path, folder):
  ann = ('ann', small_clients.fields(2))
  path = tmp_path / 'new'
  with _refused('is there already. Remove it'):
    _write(folder, [ann])
  with _refused("two clients have the id 'ann'"):
    _write(path, [ann, ann])
  with _refused("'' is no id of a client"):
    _write(path, [('', small_clients.fields(2))])
  with _refused('no id of a client'):  # Half of a pair that UTF-8 has not.
    _write(path, [('\ud83d', small_clients.fields(2))])
  with _refused("'eve' has no examples"):
    _write(path, [ann, ('eve', small_clients.fields(0))])
  with _refused("'eve', time: expected"):
    _write(path, [('eve', {**small_clients.fields(2), 'time': ['a', 'b']})])
  with _refused('None of 1 clients has the 9 examples'):
    _write(path, [ann], min_examples=9)
  strings = examples.ExampleSpec({**_SPEC, 'x': tf.TensorSpec([], tf.string)})
  with _refused('x holds strings'):
    _write(path, [ann], strings)
  (tmp_path / 'file').write_text('')
  with _refused('the clients were not written'):
    _write(tmp_path / 'file' / 'new', [ann])
  # Nothing is left of all these.
  assert [each.name for each in tmp_path.iterdir()] == ['file']


def test_what_cannot_be_read_is_refused(tmp_path, folder):
  with _refused('clients.json is missing'):
    client_files.open_clients(tmp_path, _SPEC)
  other = examples.ExampleSpec({**_SPEC, 'x': tf.TensorSpec([2], tf.int32)})
  with _refused(r"another model: x: \['<i4', \[\]\] instead of"):
    client_files.open_clients(folder, other)
  clients = client_files.open_clients(folder, _SPEC)
  with _refused("There is no client 'zoe' in"):
    clients.cohort(['ann', 'zoe'], small_clients.seeds(2))
  with _refused("There is no client 'anna' in"):
    clients.read('anna')
  ids = {'x': (id_ranges.IdRange(402, 'items'),)}
  with _refused("The clients, x: example 2 of client 'eve' is 402"):
    list(
      client_files.open_clients(
        folder, examples.ExampleSpec(small_clients.SPEC, ids)
      ).cohort(['ann', 'eve'], small_clients.seeds(2))[:]
    )


# ---- damage ------------------------------------------------------------------

_DESCRIPTION = 'clients.json'


def _used(folder: pathlib.Path) -> list[bytes]:
  """What a run with all clients trains with, after its start."""
  clients = client_files.open_clients(folder, _SPEC)
  clients.fingerprint(64)
  used = []
  names = list(small_clients.COUNTS)
  for group in clients.cohort(names, small_clients.seeds(5)).groups:
    assert group.unread is not None
    loaded = group.unread.load()['examples']
    used.append(group.unread.counts.tobytes())
    used += [array.tobytes() for _, array in examples.leaves(loaded)]
  return used


def _outcome(folder: pathlib.Path, name: str, original: list[bytes]) -> str:
  """What becomes of a run: refused, the same, silent or raw."""
  try:
    return 'the same' if _used(folder) == original else 'silent'
  except examples.ClientDataError as error:
    return 'refused' if str(folder / name) in str(error) else f'raw: {error}'
  except Exception as error:
    return f'raw: {error!r}'


def _to_bytes(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
  """Other bytes in place of those of a file."""
  half = len(raw) // 2
  yield 'empty', b''
  yield 'half', raw[:half]
  yield 'without the last byte', raw[:-1]
  yield 'one byte more', raw + b'\0'
  yield 'twice', raw * 2
  yield 'zeros', bytes(len(raw))
  yield 'halves swapped', raw[half:] + raw[:half]
  random = np.random.default_rng(3)
  yield 'noise', random.bytes(len(raw))
  for place in random.integers(0, len(raw), 12).tolist():
    changed = bytearray(raw)
    changed[place] ^= 1 << (place % 8)
    yield f'a bit of byte {place}', bytes(changed)


def _to_values(found: Any) -> Iterator[tuple[str, Any]]:
  """Other values in place of those of a description."""
  for value in (None, [], 7, 'x', {}):
    yield f'{value!r} alone', value
  for key in found:
    yield f'no {key}', {k: v for k, v in found.items() if k != key}
    for value in (None, -1, 2**70, 'x', [], {}):
      yield f'{key} is {value!r}', {**found, key: value}


def _damages(folder: pathlib.Path) -> Iterator[tuple[str, str, Callable]]:
  """File, what is done to it, and a function that does."""
  for path in sorted(folder.iterdir()):
    yield path.name, 'missing', lambda file: file.unlink()
    yield path.name, 'a folder', lambda file: (file.unlink(), file.mkdir())
    for what, raw in _to_bytes(path.name, path.read_bytes()):
      yield path.name, what, lambda file, raw=raw: file.write_bytes(raw)
  found = json.loads((folder / _DESCRIPTION).read_text())
  for what, value in _to_values(found):
    text = json.dumps(value)
    yield _DESCRIPTION, what, lambda file, text=text: file.write_text(text)
  deep = '[' * 200_000
  yield _DESCRIPTION, 'deep', lambda file: file.write_text(deep)


def test_no_damage_goes_unnoticed(folder, tmp_path):
  original = _used(folder)
  outcomes = collections.defaultdict(list)
  for number, (name, what, damage) in enumerate(_damages(folder)):
    copy = tmp_path / str(number)
    shutil.copytree(folder, copy)
    damage(copy / name)
    outcomes[_outcome(copy, name, original)].append(f'{name}: {what}')
  assert set(outcomes) == {'refused'}, dict(outcomes)
  assert len(outcomes['refused']) > 100


def test_all_examples_are_read_where_all_count(folder, tmp_path):
  shutil.copytree(folder, tmp_path / 'clients')
  clients = client_files.open_clients(tmp_path / 'clients', _SPEC)
  before = clients.fingerprint()
  with open(tmp_path / 'clients' / 'examples.bin', 'r+b') as file:
    file.seek(-1, 2)
    file.write(b'\1')
  # Ann's, written last, are damaged. Other runs than private ones may not
  # need them.
  clients = client_files.open_clients(tmp_path / 'clients', _SPEC)
  assert clients.fingerprint(64) == before
  clients.read('eve')
  with pytest.raises(
    examples.ClientDataError, match='examples.bin.* not as it was written'
  ):
    clients.fingerprint()
