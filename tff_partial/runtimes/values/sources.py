"""Sources of clients' leaves: in memory, in a file, or made on demand.

What clients keep from round to round need not pass through the process that
draws cohorts. `Scattered` says for each client which source has its leaves, and
the process that runs a client reads them from there.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, Protocol, Self

import numpy as np
import tensorflow as tf


class Source(Protocol):
  """Source of the leaves of some clients, by row.

  Attributes:
    is_in_memory: True if the leaves are in the memory of this process.
  """

  is_in_memory: bool

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

  def erase(self, row: int) -> None:
    """Overwrite the leaves of a client with zeros."""

  def __len__(self) -> int:
    """Return the number of clients."""


@dataclasses.dataclass
class Held:
  """Leaves in memory.

  Attributes:
    leaves: Arrays `[clients, ...]`, of arrays where the type leaves the shape
      open.
  """

  leaves: Sequence[np.ndarray]
  is_in_memory = True

  def __len__(self) -> int:
    return len(self.leaves[0])

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `Source`."""
    for leaf, own in zip(leaves, self.leaves, strict=True):
      leaf[places] = own[rows]

  def take(self, rows: np.ndarray) -> 'tuple[Source, np.ndarray]':
    """Keep those rows alone, so that no others are sent."""
    return Held([leaf[rows] for leaf in self.leaves]), np.arange(len(rows))

  def erase(self, row: int) -> None:
    """See `Source`."""
    for leaf in self.leaves:
      leaf[row] = 0


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

  @classmethod
  def held(
    cls, specs: Sequence[tf.TensorSpec], leaves: Sequence[np.ndarray]
  ) -> Self:
    """Return clients whose leaves are in memory."""
    return cls.of(specs, [Held(leaves)], [np.arange(len(leaves[0]))])

  @classmethod
  def joined(
    cls,
    specs: Sequence[tf.TensorSpec],
    parts: 'Sequence[tuple[Scattered, np.ndarray]]',
  ) -> Self:
    """Join clients.

    Args:
      specs: The specs of the leaves of a client.
      parts: Some clients each, and their places in the result.
    """
    which, rows = np.zeros([2, sum(len(part) for part, _ in parts)], np.int64)
    found: list[Source] = []
    for part, places in parts:
      which[places], rows[places] = len(found) + part.which, part.rows
      found += part.sources
    return cls(specs, found, which, rows)

  @property
  def client_bytes(self) -> int:
    """Memory of the leaves of a client, in bytes."""
    return sum(
      spec.shape.num_elements() * spec.dtype.size for spec in self.specs
    )

  def take(self, places: np.ndarray) -> 'Scattered':
    """Select the clients at some places."""
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

    A leaf whose shape may differ between clients is an array of arrays.

    Raises:
      CohortRuntimeError: If a file cannot be read.
    """
    if len(self.sources) == 1 and self.specs:
      (source,) = self.sources
      whole = len(self) == len(source) and (np.diff(self.rows) == 1).all()
      if isinstance(source, Held) and whole:
        return [*source.leaves]
    leaves = [empty(spec, len(self)) for spec in self.specs]
    # Each source's places, in order.
    places = np.split(
      np.argsort(self.which, kind='stable'),
      np.cumsum(np.bincount(self.which, minlength=len(self.sources))),
    )
    for source, own in zip(self.sources, places, strict=False):
      source.fill(leaves, own, self.rows[own])
    return leaves


def empty(spec: tf.TensorSpec, size: int) -> np.ndarray:
  """Return room for a leaf of some clients."""
  if not spec.shape.is_fully_defined():
    return np.empty([size], object)
  return np.empty([size, *spec.shape], spec.dtype.as_numpy_dtype)


def stacked(values: Sequence[Any], spec: tf.TensorSpec) -> np.ndarray:
  """Return a leaf of some clients as one array, which may be of arrays."""
  if isinstance(values, np.ndarray) and spec.shape.is_fully_defined():
    return values
  found = empty(spec, len(values))
  for place, value in enumerate(values):
    found[place] = value
  return found
