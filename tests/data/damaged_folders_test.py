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
  assert len(outcomes['refused']) > 100


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
