"""Folders of clients that were damaged: none is trained with in silence."""

import collections
from collections.abc import Callable, Iterator
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest

from tests.support import small_clients
from tff_partial.data import client_files
from tff_partial.data import examples
from tff_partial.data import stored_clients

_SPEC = examples.ExampleSpec(small_clients.SPEC)
_DESCRIPTION = 'clients.json'

# What is done to a file.
Damage = Callable[[pathlib.Path], Any]


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('files') / 'clients'
  client_files.write_clients(folder, small_clients.clients().items(), _SPEC)
  return folder


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


# ---- kinds of damage ---------------------------------------------------------


def _to_bytes(name: str, raw: bytes) -> Iterator[tuple[str, bytes]]:
  """Other bytes in place of those of a file."""
  half = len(raw) // 2
  yield 'empty', b''
  yield 'half', raw[:half]
  yield 'without the last byte', raw[:-1]
  yield 'one byte more', raw + b'\0'
  yield 'twice', raw * 2
  yield 'zeros', bytes(len(raw))
  yield 'ones', b'\xff' * len(raw)
  yield 'backwards', raw[::-1]
  yield 'halves swapped', raw[half:] + raw[:half]
  yield 'a hole', raw[:half] + bytes(8) + raw[half + 8 :]
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
    for value in (None, -1, 0, 2**70, 1e300, 'x', '', [], {}, True, [[]]):
      yield f'{key} is {value!r}', {**found, key: value}
    if isinstance(found[key], int):
      for value in (found[key] - 1, found[key] + 1):
        yield f'{key} is {value}', {**found, key: value}
  fields = dict(found['fields'])
  yield 'fields turned', {**found, 'fields': dict(reversed(fields.items()))}
  for field in (['<f4', []], ['<i4', [-1]], ['<i4', [10**30]], ['|S0', []]):
    yield f'x is {field}', {**found, 'fields': {**fields, 'x': field}}
  yield 'a field more', {**found, 'fields': {**fields, 'z': ['<i4', []]}}


def _damages(folder: pathlib.Path) -> Iterator[tuple[str, str, Damage]]:
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
  assert len(outcomes['refused']) > 200


# ---- tables that are whole, and wrong ----------------------------------------


def _seal(folder: pathlib.Path, **changed: Any) -> None:
  """Writes checksums that fit to the files as they are now."""
  path = folder / _DESCRIPTION
  found = {**json.loads(path.read_text()), **changed}
  for name in found['checksums']:
    raw = (folder / name).read_bytes()
    found['checksums'][name] = stored_clients.digest(raw).hexdigest()
  found['fingerprint'] = stored_clients.fingerprint(found)
  path.write_text(json.dumps(found))


@pytest.mark.parametrize(
  'name, where, value, why',
  [
    ('ids.bin', 4, b'\xe9ve', "cannot be read: 'utf-8' codec can't decode"),
    ('ids.bin', 0, b'', 'ids are not distinct and ascending'),
    ('ids.bin', 0, b'bob', 'ids are not distinct and ascending'),
    ('ids.bin', 1, b'zoe', 'ids are not distinct and ascending'),
    ('ranges.bin', (4, 1), 20, 'ranges do not divide the 19 examples'),
    ('ranges.bin', (0, 0), -1, 'ranges do not divide the 19 examples'),
    ('ranges.bin', (1, 0), 2, 'ranges do not divide the 19 examples'),
    ('ranges.bin', 0, [3, 0], 'ranges do not divide the 19 examples'),
    ('checksums.bin', 4, bytes(16), "examples of client 'eve' are not as"),
  ],
)
def test_tables_are_checked_where_checksums_fit(
  folder, tmp_path, name, where, value, why
):
  shutil.copytree(folder, tmp_path / 'clients')
  path = tmp_path / 'clients' / name
  kinds = {'ids.bin': 'S3', 'ranges.bin': '<i8', 'checksums.bin': 'V16'}
  table = np.fromfile(path, kinds[name])
  if name == 'ranges.bin':
    table = table.reshape([-1, 2])
  assert len(table) == 5
  table[where] = value
  table.tofile(path)
  _seal(tmp_path / 'clients')
  with pytest.raises(examples.ClientDataError, match=why):
    _used(tmp_path / 'clients')


@pytest.mark.parametrize(
  'changed',
  [{'clients': 2**62}, {'clients': 0}, {'id_bytes': 2**40}, {'fields': {}}],
)
def test_sizes_are_checked_where_checksums_fit(folder, tmp_path, changed):
  shutil.copytree(folder, tmp_path / 'clients')
  _seal(tmp_path / 'clients', **changed)
  with pytest.raises(examples.ClientDataError, match='in place of|another'):
    _used(tmp_path / 'clients')


def test_folders_of_older_versions_are_refused(folder, tmp_path):
  shutil.copytree(folder, tmp_path / 'clients')
  _seal(tmp_path / 'clients', version=2)
  with pytest.raises(
    examples.ClientDataError, match='version 2 .* anew with `tff_partial.write'
  ):
    _used(tmp_path / 'clients')


# ---- private runs ------------------------------------------------------------


def test_all_examples_are_read_where_all_count(folder, tmp_path):
  shutil.copytree(folder, tmp_path / 'clients')
  clients = client_files.open_clients(tmp_path / 'clients', _SPEC)
  before = clients.fingerprint()
  with open(tmp_path / 'clients' / 'examples.bin', 'r+b') as file:
    file.seek(-1, 2)
    file.write(b'\1')
  # Eve's are damaged. A run that is not private may do without her.
  clients = client_files.open_clients(tmp_path / 'clients', _SPEC)
  assert clients.fingerprint(64) == before
  clients.read('ann')
  with pytest.raises(
    examples.ClientDataError, match='examples.bin.* not as it was written'
  ):
    clients.fingerprint()
