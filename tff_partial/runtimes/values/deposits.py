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
from typing import Any, Protocol, Self
import uuid
import weakref

import numpy as np
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.values import private_folders


class Source(Protocol):
  """Source of the leaves of some clients, by row."""

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """Copy some clients' leaves into arrays.

    Args:
      leaves: Arrays `[clients, ...]` to be filled.
      places: The places to fill in them, `[number]`.
      rows: The rows to copy, `[number]`.
    """

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
    """Return a source with at least some rows, and their rows there."""


@dataclasses.dataclass(frozen=True)
class Held:
  """Leaves in memory.

  Attributes:
    leaves: Arrays `[clients, ...]`.
  """

  leaves: Sequence[np.ndarray]

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `Source`."""
    for leaf, own in zip(leaves, self.leaves, strict=True):
      leaf[places] = own[rows]

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
    """Keep those rows alone, so that no others are sent."""
    return Held([leaf[rows] for leaf in self.leaves]), np.arange(len(rows))


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

  @classmethod
  def write(cls, folder: str, leaves: Sequence[np.ndarray]) -> Self:
    """Write a file.

    Args:
      folder: Its folder.
      leaves: Arrays `[clients, ...]`.

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
    """See `Source`.

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

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
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


@dataclasses.dataclass(frozen=True, eq=False)
class Scattered:
  """Leaves of some clients, spread over several sources.

  Attributes:
    specs: The specs of the leaves of a client.
    sources: The sources of the leaves.
    which: For each client, its source, `[clients]`.
    rows: For each client, its row there, `[clients]`.
  """

  specs: Sequence[tf.TensorSpec]
  sources: Sequence[Source]
  which: np.ndarray
  rows: np.ndarray

  @classmethod
  def of(
    cls,
    specs: Sequence[tf.TensorSpec],
    sources: Sequence[Source],
    places: Sequence[np.ndarray],
  ) -> Self:
    """Combine the clients of several sources.

    Args:
      specs: The specs of the leaves of a client.
      sources: The sources of the leaves.
      places: For each source, the places of its clients, row by row.
    """
    size = sum(map(len, places))
    which, rows = np.zeros([2, size], np.int64)
    for number, own in enumerate(places):
      which[own], rows[own] = number, np.arange(len(own))
    return cls(specs, sources, which, rows)

  def __len__(self) -> int:
    return len(self.rows)

  def with_others(self, places: np.ndarray, others: 'Scattered') -> 'Scattered':
    """Insert other clients between these.

    Args:
      places: The places of the others in the result.
      others: The others.
    """
    is_here = np.ones([len(self) + len(others)], bool)
    is_here[places] = False
    which, rows = np.zeros([2, len(is_here)], np.int64)
    which[is_here], rows[is_here] = self.which, self.rows
    which[places], rows[places] = len(self.sources) + others.which, others.rows
    sources = [*self.sources, *others.sources]
    return Scattered(self.specs, sources, which, rows)

  @property
  def client_bytes(self) -> int:
    """Memory of the leaves of a client, in bytes."""
    return sum(
      spec.shape.num_elements() * spec.dtype.size for spec in self.specs
    )

  def take(self, places: np.ndarray) -> 'Scattered':
    """Select some clients.

    Args:
      places: Their places among the clients.
    """
    which, rows = self.which[places], self.rows[places].copy()
    used, which = np.unique(which, return_inverse=True)
    sources = []
    for number, source in enumerate(used.tolist()):
      taken, rows[which == number] = self.sources[source].take(
        rows[which == number]
      )
      sources.append(taken)
    return Scattered(self.specs, sources, which, rows)

  def leaves(self) -> list[np.ndarray]:
    """Read the leaves as arrays `[clients, ...]`.

    Raises:
      CohortRuntimeError: If a file cannot be read.
    """
    leaves = [
      np.empty([len(self), *spec.shape], spec.dtype.as_numpy_dtype)
      for spec in self.specs
    ]
    for number, source in enumerate(self.sources):
      places = np.flatnonzero(self.which == number)
      source.fill(leaves, places, self.rows[places])
    return leaves


def make_folder(parent: str | os.PathLike[str]) -> str:
  """Make a folder for files; see `private_folders`.

  Args:
    parent: The folder to make it in.

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
