"""CLIENTS arguments as inputs of each loop over clients.

An argument is either a plain sequence of client values, stacked here, or a
cohort whose `groups` name rows of arrays that stay in place round after round.
The latter are passed to the program whole, with the rows to read. Groups that
are still unread are read shard by shard, by the process that runs the shard.
"""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import enum
from typing import Any, Protocol
import weakref

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.data import resident_arrays
from tff_partial.runtimes import errors
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import deposits
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import typed_values


class Kind(enum.Enum):
  """Meaning of the leading dimension of a tensor."""

  CLIENTS = 'the clients'
  RESIDENT = 'the rows of a population'
  LAID = 'the rows of sequences, end to end'


@dataclasses.dataclass(frozen=True)
class Feed:
  """Some clients' share of one argument, leaf by leaf.

  Attributes:
    tensors: One per leaf; for a sequence, those of `sequences.laid`.
    kinds: The meaning of the leading dimension of each tensor.
    rows: int32, the rows of the clients in a population.
  """

  tensors: Sequence[Any]
  kinds: tuple[Kind, ...]
  rows: Any

  def opened(self) -> 'Feed':
    """Return itself: there is nothing more to read."""
    return self


@dataclasses.dataclass(frozen=True)
class UnreadFeed:
  """`Feed` that is read where its loop runs, and can be sent there.

  Attributes:
    unread: The source to read.
    clients: The number of clients.
    where: The name of the argument in errors.
    size: The leading dimension of the feed.
  """

  unread: '_Unread'
  clients: int
  where: str
  size: int

  def opened(self) -> Feed:
    """Read the feed."""
    return _fed(self.unread.leaves(), self.clients, self.where, self.size)


class _Unread(Protocol):
  """Leaves of some clients' values that are read when needed."""

  def leaves(self) -> Sequence[np.ndarray]:
    """Read the leaves as arrays `[clients, ...]`."""


@dataclasses.dataclass(frozen=True)
class _UnreadFields:
  """Structures with some fields that are read when needed.

  Attributes:
    unread: The source of these fields.
    given: The other fields, `[clients, ...]`.
    reader: Reads the value of one client.
    where: The name of the argument in errors.
  """

  unread: Any
  given: Mapping[str, np.ndarray]
  reader: readers.Reader
  where: str

  def leaves(self) -> Sequence[np.ndarray]:
    """See `_Unread`."""
    fields = {**self.unread.load(), **self.given}
    return typed_values.leaves(self.reader.stacked(fields, self.where))


class DeviceArrays:
  """Tensors of arrays that are the same objects in every round."""

  def __init__(self) -> None:
    self._tensors: dict[int, tuple[weakref.ref, Any]] = {}

  def tensor(self, array: np.ndarray) -> tf.Tensor:
    """Return the array's tensor, its leading dimension rounded up.

    If `resident_arrays` made the array, the tensor shares its memory.
    """
    key = id(array)
    known = self._tensors.get(key)
    if known is not None and known[0]() is array:
      return known[1]
    tensor = self._made(array)
    forget = weakref.ref(array, lambda _: self._tensors.pop(key, None))
    self._tensors[key] = forget, tensor
    return tensor

  def _made(self, array: np.ndarray) -> Any:
    shared = resident_arrays.with_room(array)
    # In the memory of a GPU, it is always a copy.
    if shared is not None and not tf.config.list_physical_devices('GPU'):
      with contextlib.suppress(tf.errors.InvalidArgumentError):  # For bools.
        return tf.experimental.dlpack.from_dlpack(shared.__dlpack__())
    return tf.constant(_pad(array, resident_arrays.rounded(len(array))))

  def here(self, feeds: 'Sequence[Feed | UnreadFeed]') -> Sequence[Feed]:
    """Open the feeds for a loop that runs in this process."""
    return [feed.opened() for feed in feeds]


class Clients(abc.ABC):
  """Argument with a value for each client of a cohort."""

  @abc.abstractmethod
  def __len__(self) -> int:
    """Return the number of clients."""

  @abc.abstractmethod
  def client_bytes(self) -> int:
    """Return the approximate number of bytes fed for one client."""

  @abc.abstractmethod
  def groups(self) -> Sequence[int]:
    """Return a group number for each client, equal where all shapes are."""

  @abc.abstractmethod
  def feed(self, positions: np.ndarray, size: int) -> 'Feed | UnreadFeed':
    """Return the feed of a loop over some clients of one group.

    Args:
      positions: Their places in the cohort.
      size: The leading dimension, at least the number of clients.
    """


class _Stacked(Clients):
  """Arrays with a leading dimension of clients; none if nothing is fed."""

  def __init__(self, size: int, leaves: Sequence[np.ndarray], where: str):
    self._size, self._leaves = size, leaves
    _check_lengths(leaves, size, where)

  def __len__(self) -> int:
    return self._size

  def client_bytes(self) -> int:
    return sum(leaf.nbytes for leaf in self._leaves) // max(self._size, 1)

  def groups(self) -> Sequence[int]:
    return [0] * self._size

  def feed(self, positions: np.ndarray, size: int) -> Feed:
    tensors = [_pad(leaf[positions], size) for leaf in self._leaves]
    kinds = (Kind.CLIENTS,) * len(tensors)
    return Feed(tensors, kinds, np.zeros([size], np.int32))


def _fed(
  leaves: Sequence[np.ndarray], clients: int, where: str, size: int
) -> Feed:
  """Return the feed of clients whose values were just read."""
  return _Stacked(clients, leaves, where).feed(np.arange(clients), size)


class _Scattered(Clients):
  """Values in files, read by the process that runs their clients."""

  def __init__(self, scattered: deposits.Scattered, where: str):
    self._scattered, self._where = scattered, where

  def __len__(self) -> int:
    return len(self._scattered)

  def client_bytes(self) -> int:
    return self._scattered.client_bytes

  def groups(self) -> Sequence[int]:
    return [0] * len(self)

  def feed(self, positions: np.ndarray, size: int) -> UnreadFeed:
    scattered = self._scattered.take(positions)
    return UnreadFeed(scattered, len(positions), self._where, size)


class _OnDemand(Clients):
  """Values that are read when the loop over their clients starts."""

  def __init__(
    self,
    size: int,
    read: Callable[[Sequence[int]], client_batch.Columns],
    reader: readers.Reader,
    where: str,
  ):
    self._size, self._read = size, read
    self._reader, self._where = reader, where
    # All shapes are known, or the values would not be read on demand.
    self._client_bytes = typed_values.num_bytes(reader.type_spec) or 0

  def __len__(self) -> int:
    return self._size

  def client_bytes(self) -> int:
    return self._client_bytes

  def groups(self) -> Sequence[int]:
    return [0] * self._size

  def feed(self, positions: np.ndarray, size: int) -> Feed:
    read = self._read(positions.tolist()).stacked
    leaves = typed_values.leaves(self._reader.stacked(read, self._where))
    return _fed(leaves, len(positions), self._where, size)


class _Listed(Clients):
  """A plain sequence of client values."""

  def __init__(self, values: Sequence[Any], reader: readers.Reader, where: str):
    self._clients = [
      typed_values.leaves(reader(value, where, f'client {index}'))
      for index, value in enumerate(values)
    ]
    self._is_static = reader.is_static

  def __len__(self) -> int:
    return len(self._clients)

  def client_bytes(self) -> int:
    return max(
      (sum(leaf.nbytes for leaf in client) for client in self._clients),
      default=0,
    )

  def groups(self) -> Sequence[int]:
    if self._is_static:
      return [0] * len(self)
    numbers: dict[Any, int] = {}
    return [
      numbers.setdefault(tuple(leaf.shape for leaf in client), len(numbers))
      for client in self._clients
    ]

  def feed(self, positions: np.ndarray, size: int) -> Feed:
    clients = [self._clients[position] for position in positions]
    tensors: list[Any] = []
    kinds: list[Kind] = []
    for leaves in zip(*clients, strict=True):
      if isinstance(leaves[0], sequences.Elements):
        laid = sequences.laid(leaves, size)
        tensors.extend(laid)
        kinds.extend([Kind.LAID] * (len(laid) - 1))
      else:
        tensors.append(_pad(np.stack(leaves), size))
      kinds.append(Kind.CLIENTS)
    return Feed(tensors, tuple(kinds), np.zeros([size], np.int32))


class _Grouped(Clients):
  """Cohort whose groups say where their clients' values are."""

  def __init__(
    self,
    cohort: Any,
    reader: readers.Reader,
    where: str,
    arrays: DeviceArrays,
  ):
    size = len(cohort)
    self._group_of = np.full([size], -1, np.int64)
    self._place_of = np.zeros([size], np.int64)
    self._groups: list[_Resident | _UnreadGroup] = []
    for number, group in enumerate(cohort.groups):
      self._group_of[group.positions] = number
      self._place_of[group.positions] = np.arange(len(group.positions))
      self._groups.append(
        _Resident(group, reader, where, arrays)
        if group.unread is None
        else _UnreadGroup(group, reader, where)
      )
    if (self._group_of < 0).any():
      raise errors.ArgumentError(
        where,
        'a cohort whose groups hold every position',
        f'none for position {int(np.argmin(self._group_of))}',
        'give each client to one group',
      )

  def __len__(self) -> int:
    return len(self._group_of)

  def client_bytes(self) -> int:
    return max((group.client_bytes() for group in self._groups), default=0)

  def groups(self) -> Sequence[int]:
    return self._group_of.tolist()

  def feed(self, positions: np.ndarray, size: int) -> 'Feed | UnreadFeed':
    group = self._groups[self._group_of[positions[0]]]
    return group.feed(self._place_of[positions], size)


class _Resident:
  """Group whose clients are rows of resident arrays."""

  def __init__(
    self, group: Any, reader: readers.Reader, where: str, arrays: DeviceArrays
  ):
    found = _leaves_of(group, reader, where)
    given = [array for array, is_resident in found if not is_resident]
    _check_lengths(given, len(group.positions), where)
    self._rows = np.asarray(group.rows, np.int32)
    self._leaves = [
      (arrays.tensor(array) if is_resident else array, is_resident)
      for array, is_resident in found
    ]

  def client_bytes(self) -> int:
    return sum(
      leaf.nbytes // max(len(leaf), 1)
      for leaf, is_resident in self._leaves
      if not is_resident
    )

  def feed(self, places: np.ndarray, size: int) -> Feed:
    return Feed(
      [
        leaf if is_resident else _pad(leaf[places], size)
        for leaf, is_resident in self._leaves
      ],
      tuple(
        Kind.RESIDENT if is_resident else Kind.CLIENTS
        for _, is_resident in self._leaves
      ),
      _pad(self._rows[places], size),
    )


class _UnreadGroup:
  """Group whose clients are read where they run."""

  def __init__(self, group: Any, reader: readers.Reader, where: str):
    self._group, self._reader, self._where = group, reader, where
    given = typed_values.leaves([*group.given.values()])
    _check_lengths(given, len(group.positions), where)
    self._given_bytes = sum(
      array.nbytes // max(len(array), 1) for array in given
    )

  def client_bytes(self) -> int:
    return self._group.unread.client_bytes + self._given_bytes

  def feed(self, places: np.ndarray, size: int) -> UnreadFeed:
    group = self._group
    given = {name: array[places] for name, array in group.given.items()}
    unread = group.unread.take(group.rows[places])
    fields = _UnreadFields(unread, given, self._reader, self._where)
    return UnreadFeed(fields, len(places), self._where, size)


def _leaves_of(
  group: Any, reader: readers.Reader, where: str
) -> list[tuple[np.ndarray, bool]]:
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
      found.append((leaf, name not in group.given))
  return found


def open_argument(
  value: Any, reader: readers.Reader, where: str, arrays: DeviceArrays
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
    return _Stacked(len(value), typed_values.leaves(nested), where)
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


def _check_lengths(leaves: Sequence[np.ndarray], size: int, where: str) -> None:
  for leaf in leaves:
    if len(leaf) != size:
      raise errors.ArgumentError(
        where,
        f'arrays with a leading dimension of {size} clients',
        f'one of the shape {list(leaf.shape)}',
        'stack one value for each client',
      )


def _pad(array: np.ndarray, size: int) -> np.ndarray:
  """Repeat the last client: padding is never read, but must be valid."""
  missing = size - len(array)
  if not missing or not len(array):
    return array
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])
