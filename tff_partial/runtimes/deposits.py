"""What clients return and are given again, in files that all processes see.

A process that runs clients for another one leaves what they return in a file,
if it is much, and tells the other where. What a client remembers so goes from
whoever ran it to whoever runs it next, and never through the process that
draws cohorts.
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
from tff_partial.runtimes import private_folders


class DepositError(errors.CohortRuntimeError):
  """What clients remember cannot be written, or be read again."""


class Source(Protocol):
  """Has the leaves of some clients, each by its row."""

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """Copy what some clients have to the leaves of others.

    Args:
      leaves: Arrays `[clients, ...]` to be filled.
      places: Where there, `[number]`.
      rows: Whose leaves are copied, `[number]`.
    """

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
    """A source that has some of the rows at least, and their rows there."""


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
    """Those rows alone, so that no others travel."""
    return Held([leaf[rows] for leaf in self.leaves]), np.arange(len(rows))


# Compared as objects: a file is removed with the one that owns it.
@dataclasses.dataclass(frozen=True, eq=False)
class Deposit:
  """Leaves in a file, one after another, of all clients each.

  Attributes:
    path: The file.
    clients: Of how many clients.
    specs: Type and shape of the leaves of a client.
  """

  path: str
  clients: int
  specs: tuple[tuple[str, tuple[int, ...]], ...]

  @classmethod
  def write(cls, folder: str, leaves: Sequence[np.ndarray]) -> Self:
    """Make a file.

    Args:
      folder: Where.
      leaves: Arrays `[clients, ...]`.

    Raises:
      DepositError: If it cannot be written.
    """
    path = os.path.join(folder, uuid.uuid4().hex)
    try:
      with open(path, 'xb', buffering=0) as file:
        for leaf in leaves:
          np.ascontiguousarray(leaf).tofile(file)
    except OSError as error:
      with contextlib.suppress(OSError):
        os.unlink(path)
      raise DepositError(
        f'{folder}: what clients return cannot be written there: '
        f'{error.strerror}. Make room, or name another folder that all '
        'machines see.'
      ) from error
    specs = tuple((leaf.dtype.str, leaf.shape[1:]) for leaf in leaves)
    return cls(path, len(leaves[0]), specs)

  def owned(self) -> Self:
    """Itself, with which the file will go."""
    weakref.finalize(self, _remove, self.path)
    return self

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `Source`.

    Raises:
      DepositError: If the file cannot be read.
    """
    with self._opened('rb') as number:
      for leaf, (offset, size) in zip(leaves, self._lying, strict=True):
        if not size:
          continue
        into: Any = leaf.reshape([len(leaf), -1]).view(np.uint8)
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
          found = os.preadv(number, [into[place]], offset + row * size)
          if found < size:
            raise DepositError(
              f'{self.path} has become shorter. Go on from the last checkpoint.'
            )

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
    """Itself: a file is named, and not sent."""
    return self, rows

  def erase(self, row: int) -> None:
    """Overwrite what a client has.

    Raises:
      DepositError: If the file cannot be written.
    """
    with self._opened('r+b') as number:
      for offset, size in self._lying:
        os.pwrite(number, bytes(size), offset + row * size)

  @contextlib.contextmanager
  def _opened(self, mode: str) -> Iterator[int]:
    """The number of the open file."""
    try:
      with open(self.path, mode, buffering=0) as file:
        yield file.fileno()
    except OSError as error:
      raise DepositError(
        f'{self.path}: what clients remember cannot be read or changed: '
        f'{error.strerror}. All machines must see this folder.'
      ) from error

  @functools.cached_property
  def _lying(self) -> list[tuple[int, int]]:
    """Where each leaf begins, and how many bytes a client has of it."""
    sizes = [
      np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.specs
    ]
    ends = np.cumsum([size * self.clients for size in sizes]).tolist()
    return list(zip([0, *ends[:-1]], sizes, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Scattered:
  """The leaves of some clients, each somewhere.

  Attributes:
    specs: The leaves of a client.
    sources: Who has them.
    which: Of each client, which source, `[clients]`.
    rows: Of each client, its row there, `[clients]`.
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
    """Clients whose leaves the sources have in turn.

    Args:
      specs: The leaves of a client.
      sources: Who has them.
      places: Of each source, which clients it has, row by row.
    """
    size = sum(map(len, places))
    which, rows = np.zeros([2, size], np.int64)
    for number, own in enumerate(places):
      which[own], rows[own] = number, np.arange(len(own))
    return cls(specs, sources, which, rows)

  def __len__(self) -> int:
    return len(self.rows)

  def with_others(self, places: np.ndarray, others: 'Scattered') -> 'Scattered':
    """These clients, and others in between.

    Args:
      places: Where the others are then.
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
    """How much memory the leaves of a client take."""
    return sum(
      spec.shape.num_elements() * spec.dtype.size for spec in self.specs
    )

  def take(self, places: np.ndarray) -> 'Scattered':
    """Those of some clients.

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
    """Read them: arrays `[clients, ...]`.

    Raises:
      DepositError: If a file cannot be read.
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
    parent: Where.

  Raises:
    DepositError: If it cannot be made.
  """
  try:
    return private_folders.make(parent)
  except OSError as error:
    raise DepositError(
      f'{os.path.abspath(parent)}: no folder for what clients remember can be '
      f'made there: {error.strerror}. Name another one that all machines see.'
    ) from error


def _remove(path: str) -> None:
  with contextlib.suppress(OSError):
    os.unlink(path)
