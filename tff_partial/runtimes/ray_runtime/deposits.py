"""Clients' results that later rounds read again, in files all processes see.

A process that runs clients for another one writes large results to a file, and
sends the other its path. So the state of a client goes from the process that
ran it to the one that runs it next, and never through the process that draws
cohorts.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import functools
import math
import os
from typing import Any, Self
import uuid
import weakref

import numpy as np

from tff_partial.runtimes import errors
from tff_partial.runtimes.ray_runtime import private_folders
from tff_partial.runtimes.values import sources


# Compared as objects: a file is removed with the object that owns it.
@dataclasses.dataclass(frozen=True, eq=False)
class Deposit:
  """Leaves in a file, one after another, each for all clients.

  Attributes:
    path: The file.
    clients: The number of clients.
    specs: Dtype and shape of the leaves of a client.
  """

  path: str
  clients: int
  specs: tuple[tuple[str, tuple[int, ...]], ...]
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
    try:
      with open(path, 'xb', buffering=0) as file:
        for leaf in leaves:
          np.ascontiguousarray(leaf).tofile(file)
    except OSError as error:
      with contextlib.suppress(OSError):
        os.unlink(path)
      raise errors.CohortRuntimeError(
        f'{folder}: what clients return cannot be written there: '
        f'{error.strerror}. Make room, or name another folder that all '
        'machines see.'
      ) from error
    specs = tuple((leaf.dtype.str, leaf.shape[1:]) for leaf in leaves)
    return cls(path, len(leaves[0]), specs)

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
    with self._opened('rb') as number:
      for leaf, (offset, size) in zip(leaves, self._lying, strict=True):
        if not size:
          continue
        into: Any = leaf.reshape([len(leaf), -1]).view(np.uint8)
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
          found = os.preadv(number, [into[place]], offset + row * size)
          if found < size:
            raise errors.CohortRuntimeError(
              f'{self.path} has become shorter. Go on from the last checkpoint.'
            )

  def take(self, rows: np.ndarray) -> 'tuple[sources.Source, np.ndarray]':
    """Return itself: a file is not sent, only its path."""
    return self, rows

  def erase(self, row: int) -> None:
    """Overwrite the leaves of a client with zeros.

    Raises:
      CohortRuntimeError: If the file cannot be written.
    """
    with self._opened('r+b') as number:
      for offset, size in self._lying:
        os.pwrite(number, bytes(size), offset + row * size)

  @contextlib.contextmanager
  def _opened(self, mode: str) -> Iterator[int]:
    """Open the file and yield its descriptor."""
    try:
      with open(self.path, mode, buffering=0) as file:
        yield file.fileno()
    except OSError as error:
      raise errors.CohortRuntimeError(
        f'{self.path}: what clients remember cannot be read or changed: '
        f'{error.strerror}. All machines must see this folder.'
      ) from error

  @functools.cached_property
  def _lying(self) -> list[tuple[int, int]]:
    """Offset of each leaf, and its bytes per client."""
    sizes = [
      np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.specs
    ]
    ends = np.cumsum([size * self.clients for size in sizes]).tolist()
    return list(zip([0, *ends[:-1]], sizes, strict=True))


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
