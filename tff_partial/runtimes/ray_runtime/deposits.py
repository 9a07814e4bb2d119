"""Clients' results that later rounds read again, in files all processes see.

A process that runs clients for another one writes large results to a file, and
sends the other its path. So the state of a client goes from the process that
ran it to the one that runs it next, and never through the process that draws
cohorts.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import os
from typing import Any, IO, Self
import uuid
import weakref

import numpy as np

from tff_partial.runtimes import errors
from tff_partial.runtimes.ray_runtime import private_folders
from tff_partial.runtimes.values import sources


# Compared as objects: a file is removed with the object that owns it.
@dataclasses.dataclass(frozen=True, eq=False)
class Deposit:
  """Leaves in a file, client after client.

  Attributes:
    path: The file.
    clients: The number of clients.
    record: The dtype of a client's leaves, with a field for each.
  """

  path: str
  clients: int
  record: np.dtype
  is_in_memory = False

  def __len__(self) -> int:
    return self.clients

  @classmethod
  def write(cls, folder: str, leaves: Sequence[np.ndarray]) -> Self:
    """Write leaves, arrays `[clients, ...]`, to a file in a folder.

    Raises:
      CohortRuntimeError: If it cannot be written.
    """
    path = os.path.join(folder, uuid.uuid4().hex)
    record = np.dtype([('', leaf.dtype, leaf.shape[1:]) for leaf in leaves])
    try:
      with open(path, 'xb') as file:
        # One by one: together they would be in memory twice.
        for client in zip(*leaves, strict=True):
          file.write(np.array(client, record).tobytes())
    except OSError as error:
      with contextlib.suppress(OSError):
        os.unlink(path)
      raise errors.CohortRuntimeError(
        f'{folder}: what clients return cannot be written there: '
        f'{error.strerror}. Make room, or name another folder that all '
        'machines see.'
      ) from error
    return cls(path, len(leaves[0]), record)

  def owned(self) -> Self:
    """Return itself; the file is removed when the object is."""
    weakref.finalize(self, _remove, self.path)
    return self

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `sources.Source`.

    Raises:
      CohortRuntimeError: If the file cannot be read.
    """
    size = self.record.itemsize
    with self._opened('rb') as file:
      for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        file.seek(row * size)
        found = file.read(size)
        if len(found) < size:
          raise errors.CohortRuntimeError(
            f'{self.path} has become shorter. Go on from the last checkpoint.'
          )
        record: Any = np.ndarray((), self.record, found)[()]  # Or of no bytes.
        for leaf, value in zip(leaves, record, strict=True):
          leaf[place] = value

  def take(self, rows: np.ndarray) -> 'tuple[sources.Source, np.ndarray]':
    """Return itself: a file is not sent, only its path."""
    return self, rows

  def erase(self, row: int) -> None:
    """Overwrite the leaves of a client with zeros.

    Raises:
      CohortRuntimeError: If the file cannot be written.
    """
    with self._opened('r+b') as file:
      file.seek(row * self.record.itemsize)
      file.write(bytes(self.record.itemsize))

  @contextlib.contextmanager
  def _opened(self, mode: str) -> Iterator[IO[bytes]]:
    try:
      with open(self.path, mode) as file:
        yield file
    except OSError as error:
      raise errors.CohortRuntimeError(
        f'{self.path}: what clients remember cannot be read or changed: '
        f'{error.strerror}. All machines must see this folder.'
      ) from error


def make_folder(parent: str | os.PathLike[str]) -> str:
  """Make a folder for files; see `private_folders`.

  Raises:
    CohortRuntimeError: If it cannot be made.
  """
  try:
    return private_folders.make(parent)
  except OSError as error:
    raise errors.CohortRuntimeError(
      f'{os.path.abspath(parent)}: no folder for what clients remember can be '
      f'made there: {error.strerror}. Name another one that all machines see.'
    ) from error


def _remove(path: str) -> None:
  with contextlib.suppress(OSError):
    os.unlink(path)
