"""CLIENTS arguments as inputs of each loop over clients.

An argument is either a plain sequence of client values, stacked here, or a
cohort whose `groups` name rows of arrays that stay in place round after round.
The latter are passed to the program whole, with the rows to read. Groups that
are still unread are read shard by shard, by the process that runs the shard.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, TypeAlias

import numpy as np
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import typed_values
from tff_partial.runtimes.values.client_feeds import LeadingAxis

# An array, and the meaning of its leading dimension.
_Leaf: TypeAlias = tuple[Any, LeadingAxis]


@dataclasses.dataclass(frozen=True)
class Clients:
  """Argument with a value for each client of a cohort.

  Attributes:
    client_bytes: The approximate number of bytes fed for one client.
    groups: A group number for each client, equal where all shapes are.
    feed: Returns the feed of a loop over some clients of one group, from their
      places in the cohort and the leading dimension, at least their number.
  """

  client_bytes: int
  groups: Sequence[int]
  feed: Callable[[np.ndarray, int], client_feeds.MaybeRead]

  def __len__(self) -> int:
    return len(self.groups)


def _stacked(
  size: int, leaves: Sequence[_Leaf], where: str, rows: np.ndarray | None = None
) -> Clients:
  """Open arrays of clients, or of a population with the clients' `rows`."""
  given = [leaf for leaf, axis in leaves if axis is LeadingAxis.CLIENTS]
  client_feeds.check_lengths(given, size, where)
  own_rows = np.zeros([size], np.int32) if rows is None else rows
  axes = tuple(axis for _, axis in leaves)

  def feed(positions: np.ndarray, bucket: int) -> client_feeds.Feed:
    tensors = [
      client_feeds.pad(leaf[positions], bucket)
      if axis is LeadingAxis.CLIENTS
      else leaf
      for leaf, axis in leaves
    ]
    return client_feeds.Feed(
      tensors, axes, client_feeds.pad(own_rows[positions], bucket)
    )

  return Clients(_client_bytes(given), [0] * size, feed)


def _client_bytes(leaves: Sequence[np.ndarray]) -> int:
  return sum(leaf.nbytes // max(len(leaf), 1) for leaf in leaves)


def _unread(
  size: int,
  client_bytes: int,
  read: Callable[[np.ndarray], Callable[[], Sequence[np.ndarray]]],
  where: str,
) -> Clients:
  """Open values that the process that runs their clients reads.

  `read` returns a picklable function, which reads the leaves at some places.
  """
  return Clients(
    client_bytes,
    [0] * size,
    lambda positions, bucket: functools.partial(
      client_feeds.fed, read(positions), len(positions), where, bucket
    ),
  )


def _on_demand(
  values: client_batch.Columns, reader: readers.ValueReader, where: str
) -> Clients:
  """Open values that are read when the loop over their clients starts."""

  def read(positions: np.ndarray) -> Callable[[], list[Any]]:
    stacked = values.read(positions.tolist()).stacked  # type: ignore[misc]
    leaves = typed_values.leaves(reader.stacked(stacked, where))
    return functools.partial(list, leaves)

  # All shapes are known, or the values would not be read on demand.
  client_bytes = typed_values.num_bytes(reader.type_spec) or 0
  return _unread(len(values), client_bytes, read, where)


def _listed(
  values: Sequence[Any], reader: readers.ValueReader, where: str
) -> Clients:
  """Open a plain sequence of client values."""
  clients = [
    typed_values.leaves(reader(value, where, f'client {index}'))
    for index, value in enumerate(values)
  ]
  groups = [0] * len(clients)
  if not reader.is_static:
    numbers: dict[Any, int] = {}
    groups = [
      numbers.setdefault(tuple(leaf.shape for leaf in client), len(numbers))
      for client in clients
    ]

  def feed(positions: np.ndarray, bucket: int) -> client_feeds.Feed:
    tensors: list[Any] = []
    axes: list[LeadingAxis] = []
    for leaves in zip(*[clients[place] for place in positions], strict=True):
      if isinstance(leaves[0], sequences.Elements):
        laid = sequences.laid(leaves, bucket)
        tensors.extend(laid)
        axes.extend([LeadingAxis.LAID] * (len(laid) - 1))
      else:
        tensors.append(client_feeds.pad(np.stack(leaves), bucket))
      axes.append(LeadingAxis.CLIENTS)
    return client_feeds.Feed(tensors, tuple(axes), np.zeros([bucket], np.int32))

  sizes = (sum(leaf.nbytes for leaf in client) for client in clients)
  return Clients(max(sizes, default=0), groups, feed)


def _grouped(
  cohort: Any,
  reader: readers.ValueReader,
  where: str,
  arrays: client_feeds.DeviceArrays,
) -> Clients:
  """Open a cohort whose groups say where their clients' values are."""
  group_of = np.full([len(cohort)], -1, np.int64)
  place_of = np.zeros([len(cohort)], np.int64)
  opened: list[Clients] = []
  for number, group in enumerate(cohort.groups):
    size = len(group.positions)
    group_of[group.positions] = number
    place_of[group.positions] = np.arange(size)
    if group.unread is not None:
      opened.append(_unread_group(group, reader, where))
    else:
      leaves = _leaves_of(group, reader, where, arrays)
      rows = np.asarray(group.rows, np.int32)
      opened.append(_stacked(size, leaves, where, rows))
  if (group_of < 0).any():
    raise errors.ArgumentError(
      where,
      'a cohort whose groups hold every position',
      f'none for position {int(np.argmin(group_of))}',
      'give each client to one group',
    )

  def feed(positions: np.ndarray, bucket: int) -> client_feeds.MaybeRead:
    group = opened[group_of[positions[0]]]
    return group.feed(place_of[positions], bucket)

  largest = max((group.client_bytes for group in opened), default=0)
  return Clients(largest, group_of.tolist(), feed)


def _unread_group(
  group: Any, reader: readers.ValueReader, where: str
) -> Clients:
  """Open a group whose clients are read where they run."""
  given = typed_values.leaves([*group.given.values()])
  client_feeds.check_lengths(given, len(group.positions), where)

  def read(places: np.ndarray) -> Callable[[], Sequence[np.ndarray]]:
    return functools.partial(
      client_feeds.read_fields,
      group.unread.take(group.rows[places]),
      {name: array[places] for name, array in group.given.items()},
      reader,
      where,
    )

  client_bytes = group.unread.client_bytes + _client_bytes(given)
  return _unread(len(group.positions), client_bytes, read, where)


def _leaves_of(
  group: Any,
  reader: readers.ValueReader,
  where: str,
  arrays: client_feeds.DeviceArrays,
) -> list[_Leaf]:
  """Return a type's leaves, found by name."""
  if not group.resident:
    return _of_clients(group.given, reader, where)
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
      if name in group.given:
        found.append((leaf, LeadingAxis.CLIENTS))
      else:
        found.append((arrays.tensor(leaf), LeadingAxis.RESIDENT))
  return found


def _of_clients(
  stacked: Any, reader: readers.ValueReader, where: str
) -> list[_Leaf]:
  """Return the leaves of values that are stacked by client."""
  nested = reader.stacked(stacked, where)
  return [(leaf, LeadingAxis.CLIENTS) for leaf in typed_values.leaves(nested)]


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
      return _stacked(len(value), [], where)
    return _grouped(value, reader, where, arrays)
  if isinstance(value, client_batch.Columns):
    scattered = value.scattered
    if scattered is not None and [*scattered.specs] == (
      typed_values.tensor_specs(reader.type_spec)
    ):
      return _unread(
        len(value),
        scattered.client_bytes,
        lambda positions: scattered.take(positions).leaves,
        where,
      )
    if value.is_dense and value.read is not None and reader.is_static:
      return _on_demand(value, reader, where)
    if value.is_dense and not reader.has_sequences:
      leaves = _of_clients(value.stacked, reader, where)
      return _stacked(len(value), leaves, where)
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
    return _stacked(len(value), [], where)
  return _listed(value, reader, where)
