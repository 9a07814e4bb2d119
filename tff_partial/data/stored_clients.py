"""Files of a folder of clients, verified with checksums when read.

`client_files` writes and opens them.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
from typing import Any

import numpy as np

from tff_partial.data import examples

DESCRIPTION, EXAMPLES = 'clients.json', 'examples.bin'
IDS, RANGES, SUMS = 'ids.bin', 'ranges.bin', 'checksums.bin'
VERSION = 3
SUM_TYPE = np.dtype('V16')


def example_type(fields: Mapping[str, Sequence[Any]]) -> np.dtype:
  """Return the dtype of an example, with all its fields in sequence."""
  return np.dtype(
    [(path, dtype, tuple(shape)) for path, (dtype, shape, *_) in fields.items()]
  )


def digest(raw: bytes = b'') -> Any:
  """Start a checksum with some bytes; it can be updated with more."""
  return hashlib.blake2b(raw, digest_size=SUM_TYPE.itemsize)


def fingerprint(description: Mapping[str, Any]) -> str:
  """Return a fingerprint of the files, from their description."""
  said = {k: v for k, v in description.items() if k != 'fingerprint'}
  return digest(json.dumps(said).encode()).hexdigest()


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
  """Name the file that cannot be read."""
  try:
    yield
  except examples.ClientDataError:
    raise
  except FileNotFoundError as error:
    raise examples.ClientDataError(
      f'{path} is missing: {os.path.dirname(path)} does not hold clients that '
      '`write_clients` has written.'
    ) from error
  except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
    raise examples.ClientDataError(
      f'{path} cannot be read: {error}. Copy the folder again from where it is '
      'whole, or write it again.'
    ) from error


class Files:
  """The files of a folder of clients, compared with their checksums.

  Attributes:
    folder: The folder.
    fields: Type and shape of each field by its path.
    fingerprint: Fingerprint of the files.
  """

  def __init__(self, folder: str):
    """Open the files.

    Raises:
      ClientDataError: If they are missing or damaged.
    """
    self.folder = folder
    with _reading(self._path(DESCRIPTION)):
      with open(self._path(DESCRIPTION), encoding='utf-8') as file:
        found = json.load(file)
      if found['version'] != VERSION:
        raise examples.ClientDataError(
          f'{self._path(DESCRIPTION)}: the clients were written in version '
          f'{found["version"]!r} of the format, where {VERSION} is read. '
          'Write them again with `tff_partial.write_clients`.'
        )
      if found['fingerprint'] != fingerprint(found):
        raise ValueError('it is not as it was written')
    self.fields: dict[str, list[Any]] = found['fields']
    self.fingerprint: str = found['fingerprint']
    self._checksums: dict[str, str] = found['checksums']
    self._example = example_type(self.fields)
    clients = found['clients']
    self._ids = self._table(IDS, f'S{found["id_bytes"]}', [clients])
    self._ranges = self._table(RANGES, '<i8', [clients, 2])
    self._sums = self._table(SUMS, SUM_TYPE, [clients])
    with _reading(self._path(EXAMPLES)):
      size = os.path.getsize(self._path(EXAMPLES))
      wanted = found['examples'] * self._example.itemsize
      if size != wanted:
        raise ValueError(f'it has {size:,} bytes in place of {wanted:,}')
      # Not mapped, so that cached pages do not count as memory of this process.
      self._examples = open(self._path(EXAMPLES), 'rb', buffering=0)

  def _path(self, name: str) -> str:
    return os.path.join(self.folder, name)

  def _table(self, name: str, kind: Any, shape: Sequence[int]) -> Any:
    """Open and check a table."""
    with _reading(self._path(name)):
      with open(self._path(name), 'rb') as file:
        self._check_whole(name, file)
      return np.memmap(self._path(name), kind, 'r', shape=tuple(shape))

  def _check_whole(self, name: str, file: Any) -> None:
    found = hashlib.file_digest(file, digest)
    if found.hexdigest() != self._checksums[name]:
      raise ValueError('it is not as it was written')

  def check_examples(self) -> None:
    """Read and check all examples.

    Raises:
      ClientDataError: If they are damaged.
    """
    with _reading(self._examples.name):
      self._examples.seek(0)
      self._check_whole(EXAMPLES, self._examples)

  def client_ids(self) -> tuple[str, ...]:
    """Return all ids, ascending by their bytes."""
    return tuple(name.decode() for name in self._ids.tolist())

  def _places(self, clients: Sequence[str]) -> np.ndarray:
    """Return the indices of clients in the tables, `[clients]`."""
    wanted = np.array(
      [client.encode(errors='surrogatepass') for client in clients], np.bytes_
    )
    places = np.searchsorted(self._ids, wanted)
    places = np.minimum(places, len(self._ids) - 1)
    missing = np.flatnonzero(self._ids[places] != wanted)
    if missing.size:
      raise examples.ClientDataError(
        f'There is no client {clients[missing[0]]!r} in {self.folder}.'
      )
    return places

  def num_examples(self, clients: Sequence[str]) -> np.ndarray:
    """Return clients' numbers of examples, int64 `[clients]`."""
    return np.diff(self._ranges[self._places(clients)])[:, 0]

  def read(self, clients: Sequence[str]) -> np.ndarray:
    """Read the examples of clients in sequence, with all fields.

    Raises:
      ClientDataError: If there is no such client, or its examples are damaged.
    """
    places = self._places(clients)
    file, size = self._examples.fileno(), self._example.itemsize
    with _reading(self._examples.name):
      read = [
        os.pread(file, (end - begin) * size, begin * size)
        for begin, end in self._ranges[places].tolist()
      ]
      for client, raw, wanted in zip(
        clients, read, self._sums[places].tolist(), strict=True
      ):
        if digest(raw).digest() != wanted:
          raise ValueError(
            f'the examples of client {client!r} are not as they were written'
          )
      return np.frombuffer(b''.join(read), self._example)
