"""CLIENTS arguments as inputs of each loop over clients.

An argument is either a plain sequence of client values, stacked here, or a
cohort whose `groups` name rows of arrays that stay in place round after round.
The latter are passed to the program whole, with the rows to read. Groups that
are still unread are read shard by shard, by the process that runs the shard.
"""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import numpy as np
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values


class Clients(abc.ABC):
  """Argument with a value for each client of a cohort."""

  def __init__(self, size: int):
    self._size = size

  def __len__(self) -> int:
    return self._size

  @abc.abstractmethod
  def client_bytes(self) -> int:
    """Return the approximate number of bytes fed for one client."""

  def groups(self) -> Sequence[int]:
    """Return a group number for each client, equal where all shapes are."""
    return [0] * len(self)

  @abc.abstractmethod
  def feed(self, positions: np.ndarray, size: int) -> client_feeds.MaybeRead:
    """Return the feed of a loop over some clients of one group.

    Args:
      positions: Their places in the cohort.
      size: The leading dimension, at least the number of clients.
    """


class _Stacked(Clients):
  """Arrays with a leading dimension of clients; none if nothing is fed.

  Those that are resident have one of the rows of a population instead.
  """

  def __init__(
    self,
    size: int,
    leaves: Sequence[tuple[Any, bool]],
    where: str,
    rows: np.ndarray | None = None,
  ):
    """Take arrays, and whether each is resident; and the clients' rows."""
    super().__init__(size)
    self._leaves = leaves
    given = [leaf for leaf, is_resident in leaves if not is_resident]
    client_feeds.check_lengths(given, size, where)
    self._rows = np.zeros([size], np.int32) if rows is None else rows

  def client_bytes(self) -> int:
    return sum(
      leaf.nbytes // max(len(leaf), 1)
      for leaf, is_resident in self._leaves
      if not is_resident
    )

  def feed(self, positions: np.ndarray, size: int) -> client_feeds.Feed:
    return client_feeds.Feed(
      [
        leaf if is_resident else client_feeds.pad(leaf[positions], size)
        for leaf, is_resident in self._leaves
      ],
      tuple(
        client_feeds.LeadingAxis.RESIDENT
        if is_resident
        else client_feeds.LeadingAxis.CLIENTS
        for _, is_resident in self._leaves
      ),
      client_feeds.pad(self._rows[positions], size),
    )


class _Scattered(Clients):
  """Values that are read by the process that runs their clients."""

  def __init__(self, values: sources.Scattered, where: str):
    super().__init__(len(values))
    self._values, self._where = values, where

  def client_bytes(self) -> int:
    return self._values.client_bytes

  def feed(
    self, positions: np.ndarray, size: int
  ) -> Callable[[], client_feeds.Feed]:
    read = self._values.take(positions).leaves
    return functools.partial(
      client_feeds.fed, read, len(positions), self._where, size
    )


class _OnDemand(Clients):
  """Values that are read when the loop over their clients starts."""

  def __init__(
    self,
    size: int,
    read: Callable[[Sequence[int]], client_batch.Columns],
    reader: readers.ValueReader,
    where: str,
  ):
    super().__init__(size)
    self._read, self._reader, self._where = read, reader, where
    # All shapes are known, or the values would not be read on demand.
    self._client_bytes = typed_values.num_bytes(reader.type_spec) or 0

  def client_bytes(self) -> int:
    return self._client_bytes

  def feed(self, positions: np.ndarray, size: int) -> client_feeds.Feed:
    read = self._read(positions.tolist()).stacked
    leaves = typed_values.leaves(self._reader.stacked(read, self._where))
    return client_feeds.fed(lambda: leaves, len(positions), self._where, size)


class _Listed(Clients):
  """A plain sequence of client values."""

  def __init__(
    self, values: Sequence[Any], reader: readers.ValueReader, where: str
  ):
    super().__init__(len(values))
    self._clients = [
      typed_values.leaves(reader(value, where, f'client {index}'))
      for index, value in enumerate(values)
    ]
    self._is_static = reader.is_static

  def client_bytes(self) -> int:
    return max(
      (sum(leaf.nbytes for leaf in client) for client in self._clients),
      default=0,
    )

  def groups(self) -> Sequence[int]:
    if self._is_static:
      return super().groups()
    numbers: dict[Any, int] = {}
    return [
      numbers.setdefault(tuple(leaf.shape for leaf in client), len(numbers))
      for client in self._clients
    ]

  def feed(self, positions: np.ndarray, size: int) -> client_feeds.Feed:
    clients = [self._clients[position] for position in positions]
    tensors: list[Any] = []
    kinds: list[client_feeds.LeadingAxis] = []
    for leaves in zip(*clients, strict=True):
      if isinstance(leaves[0], sequences.Elements):
        laid = sequences.laid(leaves, size)
        tensors.extend(laid)
        kinds.extend([client_feeds.LeadingAxis.LAID] * (len(laid) - 1))
      else:
        tensors.append(client_feeds.pad(np.stack(leaves), size))
      kinds.append(client_feeds.LeadingAxis.CLIENTS)
    return client_feeds.Feed(tensors, tuple(kinds), np.zeros([size], np.int32))


class _Grouped(Clients):
  """Cohort whose groups say where their clients' values are."""

  def __init__(
    self,
    cohort: Any,
    reader: readers.ValueReader,
    where: str,
    arrays: client_feeds.DeviceArrays,
  ):
    super().__init__(len(cohort))
    self._group_of = np.full([len(cohort)], -1, np.int64)
    self._place_of = np.zeros([len(cohort)], np.int64)
    self._groups: list[_Stacked | _UnreadGroup] = []
    for number, group in enumerate(cohort.groups):
      self._group_of[group.positions] = number
      self._place_of[group.positions] = np.arange(len(group.positions))
      if group.unread is not None:
        self._groups.append(_UnreadGroup(group, reader, where))
        continue
      leaves = _leaves_of(group, reader, where, arrays)
      rows = np.asarray(group.rows, np.int32)
      size = len(group.positions)
      self._groups.append(_Stacked(size, leaves, where, rows))
    if (self._group_of < 0).any():
      raise errors.ArgumentError(
        where,
        'a cohort whose groups hold every position',
        f'none for position {int(np.argmin(self._group_of))}',
        'give each client to one group',
      )

  def client_bytes(self) -> int:
    return max((group.client_bytes() for group in self._groups), default=0)

  def groups(self) -> Sequence[int]:
    return self._group_of.tolist()

  def feed(self, positions: np.ndarray, size: int) -> client_feeds.MaybeRead:
    group = self._groups[self._group_of[positions[0]]]
    return group.feed(self._place_of[positions], size)


class _UnreadGroup:
  """Group whose clients are read where they run."""

  def __init__(self, group: Any, reader: readers.ValueReader, where: str):
    self._group, self._reader, self._where = group, reader, where
    given = typed_values.leaves([*group.given.values()])
    client_feeds.check_lengths(given, len(group.positions), where)
    self._given_bytes = sum(
      array.nbytes // max(len(array), 1) for array in given
    )

  def client_bytes(self) -> int:
    return self._group.unread.client_bytes + self._given_bytes

  def feed(
    self, places: np.ndarray, size: int
  ) -> Callable[[], client_feeds.Feed]:
    group = self._group
    given = {name: array[places] for name, array in group.given.items()}
    unread = group.unread.take(group.rows[places])
    read = functools.partial(
      client_feeds.read_fields, unread, given, self._reader, self._where
    )
    return functools.partial(
      client_feeds.fed, read, len(places), self._where, size
    )


def _leaves_of(
  group: Any,
  reader: readers.ValueReader,
  where: str,
  arrays: client_feeds.DeviceArrays,
) -> list[tuple[Any, bool]]:
  """Return a type's leaves, found by name, and whether each is resident."""
  if not group.resident:
    nested = reader.stacked(group.given, where)
    return [(leaf, False) for leaf in typed_values.leaves(nested)]
  if not isinstance(reader.type_spec, tff.StructType):
    raise errors.ArgumentError(
      where,
      f'a list with a value of the type {reader.type_spec} for each client',
      'a cohort of named fields',
      'let the computation take a structure of these fields',
    )
  stacked = reader.stacked
  fields = collections.OrderedDict([*group.resident.items()])
  fields.update(group.given)
  found = []
  for value, (name, element) in zip(
    stacked.open(fields, where), stacked.elements, strict=True
  ):
    for leaf in typed_values.leaves(element(value, where, name)):
      is_resident = name not in group.given
      found.append((arrays.tensor(leaf) if is_resident else leaf, is_resident))
  return found


def open_argument(
  value: Any,
  reader: readers.ValueReader,
  where: str,
  arrays: client_feeds.DeviceArrays,
) -> Clients:
  """Open a CLIENTS argument without copying resident arrays.

  Args:
    value: A sequence of client values, or a cohort with `groups`. If clients'
      values are empty, only its length matters.
    reader: Reads the value of one client.
    where: The name of the argument in errors.
    arrays: Keeps resident arrays on the device.

  Raises:
    ArgumentError: If the value is not of the type.
  """
  if hasattr(value, 'groups'):
    if reader.has_sequences:
      raise errors.ArgumentError(
        where,
        'a list with a `tf.data.Dataset` for each client',
        f'a {type(value).__name__}',
        'let the computation take dense tensors instead of sequences',
      )
    if reader.is_empty:
      return _Stacked(len(value), [], where)
    return _Grouped(value, reader, where, arrays)
  if isinstance(value, client_batch.Columns) and value.scattered is not None:
    specs = typed_values.tensor_specs(reader.type_spec)
    if [*value.scattered.specs] == specs:
      return _Scattered(value.scattered, where)
  is_dense = isinstance(value, client_batch.Columns) and value.is_dense
  if is_dense and value.read is not None and reader.is_static:
    return _OnDemand(len(value), value.read, reader, where)
  if is_dense and not reader.has_sequences:
    nested = reader.stacked(value.stacked, where)
    leaves = [(leaf, False) for leaf in typed_values.leaves(nested)]
    return _Stacked(len(value), leaves, where)
  if isinstance(value, str | bytes | Mapping) or not isinstance(
    value, Sequence
  ):
    raise errors.ArgumentError(
      where,
      f'a list with a value of the type {reader.type_spec} for each client',
      f'a {type(value).__name__}',
      'put the client values in a list',
    )
  if reader.is_empty:
    for index, client in enumerate(value[:1]):
      reader(client, where, f'client {index}')
    return _Stacked(len(value), [], where)
  return _Listed(value, reader, where)
