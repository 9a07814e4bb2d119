"""Clients in a folder, of which a round reads those that take part.

    tff_partial.write_clients('clients', clients, process.example_spec)
    clients = tff_partial.open_clients('clients', process.example_spec)

For populations that do not fit into memory, or into that of each worker of
`runtimes.ray()`. The folder has a file of examples, with all fields of each, in
which clients lie one after another, so that a client is read at once; a file of
ids; a file that says where each begins and ends; and `clients.json`, which
describes them. Ids are found by binary search in their file: a table of all is
only with who draws cohorts.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.data import client_readers
from tff_partial.data import examples
from tff_partial.data import populations

_DESCRIPTION = 'clients.json'
_EXAMPLES, _IDS, _RANGES = 'examples.bin', 'ids.bin', 'ranges.bin'
_VERSION = 2


def write_clients(
  folder: str | os.PathLike[str],
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: examples.ExampleSpec,
  *,
  min_examples: int | None = None,
) -> None:
  """Writes clients to a new folder, one after another as they come.

  Args:
    folder: The folder, which must not be there yet.
    clients: Ids, and fields `x`, `y`, perhaps `weight` and others, arrays
      `[examples, ...]`.
    example_spec: What one example consists of: `process.example_spec`.
    min_examples: Clients with fewer, or without any, are left out and counted
      in the log; by default none is, and an empty client is an error.

  Raises:
    ClientDataError: For fields that `pack` would refuse, two clients of one id,
      strings, or a folder that is there or cannot be written.
  """
  folder = pathlib.Path(folder)
  for path, spec in examples.leaves(example_spec):
    if spec.dtype == tf.string:
      raise examples.ClientDataError(
        f'{folder}: {path} holds strings, which have no fixed size. Give '
        'numbers in their place, such as those of a `Vocabulary`.'
      )
  if folder.exists():
    raise examples.ClientDataError(
      f'{folder} is there already. Remove it, or write to another folder.'
    )
  part = folder.with_name(f'{folder.name}.part')
  shutil.rmtree(part, ignore_errors=True)
  try:
    part.mkdir(parents=True)
    _write(part, clients, example_spec, min_examples)
    part.rename(folder)
  except OSError as error:
    raise examples.ClientDataError(
      f'{folder}: the clients were not written: {error}'
    ) from error
  finally:
    shutil.rmtree(part, ignore_errors=True)


def open_clients(
  folder: str | os.PathLike[str],
  example_spec: examples.ExampleSpec,
  *,
  capacities: Sequence[int] | None = None,
) -> client_readers.Reader:
  """Opens a folder that `write_clients` has written.

  A worker of `runtimes.ray()` reads the clients that it runs itself, from a
  folder of the same name.

  Args:
    folder: The folder.
    example_spec: What one example consists of: `process.example_spec`.
    capacities: Sizes to pad to; see `Reader`.

  Raises:
    ClientDataError: If there is no such folder, files are damaged, or its
      clients are of another model.
  """
  files = _Files(os.path.abspath(folder))
  wanted = _described(example_spec)
  if wanted != files.fields:
    differ = [
      f'{path}: {files.fields.get(path, "none")} instead of '
      f'{wanted.get(path, "none")}'
      for path in {**wanted, **files.fields}
      if files.fields.get(path) != wanted.get(path)
    ]
    raise examples.ClientDataError(
      f'{folder}: the clients were written for another model: '
      f'{"; ".join(differ)}. Write them anew with the `example_spec` of the '
      'process.'
    )
  return client_readers.Reader(
    files.client_ids(),
    _Read(files.folder, files.fingerprint, example_spec),
    example_spec,
    capacities,
    files.fingerprint,
  )


# ---- writing -----------------------------------------------------------------


def _write(
  folder: pathlib.Path,
  clients: Iterable[tuple[str, Mapping[str, Any]]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
) -> None:
  """Writes all files of a folder."""
  ids: list[bytes] = []
  counts: list[int] = []
  fields = _described(example_spec)
  kind = _example_type(fields)
  digest = hashlib.blake2b(json.dumps(fields).encode(), digest_size=16)
  with open(folder / _EXAMPLES, 'wb') as file:
    for client, arrays, count in populations.LargeEnough(
      clients,
      example_spec,
      # Who has none cannot be read again.
      None if min_examples is None else max(min_examples, 1),
    ):
      _check_id(client)
      ids.append(client.encode())
      counts.append(count)
      written = np.empty([count], kind)
      for path, (_, array) in zip(fields, examples.leaves(arrays), strict=True):
        written[path] = array
      file.write(written.tobytes())
      digest.update(written.tobytes())
  names = np.array(ids)
  order = np.argsort(names, kind='stable')
  same = np.flatnonzero(names[order][1:] == names[order][:-1])
  if same.size:
    raise examples.ClientDataError(
      f'{folder.with_suffix("")}: two clients have the id '
      f'{names[order][same[0]].decode()!r}. Give each an id of its own.'
    )
  ends = np.cumsum(counts)
  ranges = np.stack([ends - counts, ends], axis=1).astype(np.int64)
  for name, array in {_IDS: names, _RANGES: ranges}.items():
    array[order].tofile(folder / name)
    digest.update(array)
  description = {
    'version': _VERSION,
    'clients': len(ids),
    'examples': int(ends[-1]),
    'id_bytes': names.dtype.itemsize,
    'fields': fields,
    'fingerprint': digest.hexdigest(),
  }
  (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1))


def _check_id(client: str) -> None:
  """Refuses what is no id, or could not be told from another one."""
  if not isinstance(client, str) or not client or client.endswith('\0'):
    raise examples.ClientDataError(
      f'{client!r} is no id of a client. Give a string that is not empty.'
    )


def _described(example_spec: examples.ExampleSpec) -> dict[str, list[Any]]:
  """Type and shape of each field, as JSON has them."""
  return {
    path: [np.dtype(spec.dtype.as_numpy_dtype).str, list(spec.shape)]
    for path, spec in examples.leaves(example_spec)
  }


def _example_type(fields: Mapping[str, Sequence[Any]]) -> np.dtype:
  """All fields of an example, one after another."""
  return np.dtype(
    [(path, dtype, tuple(shape)) for path, (dtype, shape) in fields.items()]
  )


# ---- reading -----------------------------------------------------------------


class _Files:
  """The files of a folder.

  Attributes:
    folder: The folder.
    fields: Type and shape of each field by its path.
    fingerprint: Says what is in the files.
    ids: Bytes `[clients]`, ascending.
  """

  def __init__(self, folder: str):
    """Opens them.

    Raises:
      ClientDataError: If there are none, or they are damaged.
    """
    self.folder = folder
    try:
      with open(os.path.join(folder, _DESCRIPTION), encoding='utf-8') as file:
        found = json.load(file)
      if found['version'] != _VERSION:
        raise ValueError(f'version {found["version"]} is not {_VERSION}')
      self.fields: dict[str, list[Any]] = found['fields']
      self.fingerprint: str = found['fingerprint']
      kind, number = np.dtype(f'S{found["id_bytes"]}'), int(found['clients'])
      self.ids = np.memmap(self._path(_IDS, number * kind.itemsize), kind, 'r')
      self._ranges = np.memmap(
        self._path(_RANGES, number * 16), '<i8', 'r', shape=(number, 2)
      )
      self._example = _example_type(self.fields)
      # It is read, and not mapped: what the system keeps of it then does not
      # count as memory of this process.
      self._examples = open(
        self._path(_EXAMPLES, found['examples'] * self._example.itemsize),
        'rb',
        buffering=0,
      )
    except FileNotFoundError as error:
      raise examples.ClientDataError(
        f'{error.filename} is missing: {folder} does not hold clients that '
        '`write_clients` has written.'
      ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
      raise examples.ClientDataError(
        f'{folder}: the clients cannot be read: {error}. Write them anew.'
      ) from error

  def _path(self, name: str, size: int) -> str:
    """The path of a file, which must have so many bytes."""
    path = os.path.join(self.folder, name)
    found = os.path.getsize(path)
    if found != size:
      raise ValueError(f'{name} has {found:,} bytes in place of {size:,}')
    return path

  def client_ids(self) -> tuple[str, ...]:
    """All ids, ascending by their bytes."""
    return tuple(name.decode() for name in self.ids.tolist())

  def ranges_of(self, clients: Sequence[str]) -> np.ndarray:
    """Where the examples of some clients begin and end, int64 `[clients, 2]`.

    Raises:
      ClientDataError: If there is no such client.
    """
    wanted = np.array([client.encode() for client in clients], np.bytes_)
    places = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
    missing = np.flatnonzero(self.ids[places] != wanted)
    if missing.size:
      raise examples.ClientDataError(
        f'There is no client {clients[missing[0]]!r} in {self.folder}.'
      )
    return self._ranges[places]

  def read(self, ranges: np.ndarray) -> np.ndarray:
    """The examples in some ranges, one after another; each has all fields."""
    file, size = self._examples.fileno(), self._example.itemsize
    read = b''.join(
      os.pread(file, (end - begin) * size, begin * size)
      for begin, end in ranges.tolist()
    )
    if len(read) < np.diff(ranges).sum() * size:
      raise examples.ClientDataError(
        f'{self._examples.name} has become shorter. Write the clients anew.'
      )
    return np.frombuffer(read, self._example)


@functools.lru_cache(maxsize=16)
def _opened(folder: str, fingerprint: str) -> _Files:
  """A folder as it was when somebody opened it, maybe in another process.

  Raises:
    ClientDataError: If it is another one by now.
  """
  files = _Files(folder)
  if files.fingerprint != fingerprint:
    raise examples.ClientDataError(
      f'{folder}: the clients were written anew after they had been opened. '
      'Open them again.'
    )
  return files


@dataclasses.dataclass(frozen=True)
class _Read:
  """Reads clients of a folder; only its name is sent to other processes."""

  folder: str
  fingerprint: str
  example_spec: examples.ExampleSpec

  def __call__(self, client: str) -> Mapping[str, Any]:
    return self.together([client])

  def num_examples(self, client_ids: Sequence[str]) -> np.ndarray:
    files = _opened(self.folder, self.fingerprint)
    return np.diff(files.ranges_of(client_ids))[:, 0]

  def together(self, client_ids: Sequence[str]) -> Mapping[str, Any]:
    files = _opened(self.folder, self.fingerprint)
    found = files.read(files.ranges_of(client_ids))
    paths = (path for path, _ in examples.leaves(self.example_spec))
    fields = examples.map_fields(
      lambda _: found[next(paths)], self.example_spec
    )
    return fields
