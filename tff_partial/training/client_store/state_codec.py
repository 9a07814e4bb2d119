"""Client states as records: arrays with a field for each leaf.

Runtimes take and return the states of a whole cohort leaf by leaf, a store
keeps them client by client. Records are in between: the bytes of one are a
client's state in a file, and each field is a leaf of all clients.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import json
import math
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import errors
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.ray_runtime import remote_shards
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values


class ClientStoreError(errors.UserError, RuntimeError):
  """Raised for a client store that cannot be read, written or resumed from."""


# Client states of this many bytes are large.
_LARGE_BYTES = 1 << 14
# The only field of records whose leaves differ in shape between clients.
_ENCODED = 'encoded'


class Format:
  """Layout of a client state's leaves in a record.

  If all clients have leaves of the same shapes, each is a field. Otherwise a
  record is an object, the bytes of the shapes and of the leaves one after
  another, so that each client has only what it needs.

  Attributes:
    text: Names, types and shapes of the leaves, as JSON; None is a dimension
      that differs between clients.
    specs: Types and shapes of the leaves.
    record_type: NumPy dtype of one record.
  """

  def __init__(self, text: str):
    """Parse `text`, as `Layout` wrote it."""
    self.text = text
    self._leaves = [
      (name, tf.dtypes.as_dtype(dtype).as_numpy_dtype, tuple(shape))
      for name, dtype, shape in json.loads(text)
    ]
    self.specs = [
      tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype))
      for _, dtype, shape in self._leaves
    ]
    self.is_ragged = any(None in shape for _, _, shape in self._leaves)
    self.record_type = (
      np.dtype([(_ENCODED, object)])
      if self.is_ragged
      else np.dtype(self._leaves)
    )

  def __str__(self) -> str:
    """Describe the leaves."""
    return ', '.join(
      f'{name} {dtype}{shape}' for name, dtype, shape in json.loads(self.text)
    )

  def of_bytes(self, states: Sequence[bytes]) -> np.ndarray:
    """Build records from their bytes.

    Args:
      states: As `to_bytes` returned them.
    """
    if not self.is_ragged:
      return np.frombuffer(b''.join(states), self.record_type)
    records = np.empty([len(states)], self.record_type)
    for place, state in enumerate(states):
      records[_ENCODED][place] = bytes(state)
    return records

  def to_bytes(self, record: np.ndarray) -> bytes:
    """Return the bytes of a record."""
    if self.is_ragged:
      return bytes(record[_ENCODED])
    return record.tobytes()

  def by_leaf(
    self, record: np.ndarray
  ) -> collections.OrderedDict[str, np.ndarray]:
    """Return the leaves of one record by name."""
    if not self.is_ragged:
      names = record.dtype.names or ()
      return collections.OrderedDict(
        (name, np.array(record[name])) for name in names
      )
    state = record[_ENCODED]
    rank = sum(len(shape) for _, _, shape in self._leaves)
    sizes = np.frombuffer(state, np.int64, rank).tolist()
    offset = rank * np.dtype(np.int64).itemsize
    found = collections.OrderedDict()
    for name, dtype, shape in self._leaves:
      own, sizes = sizes[: len(shape)], sizes[len(shape) :]
      count = math.prod(own)
      leaf = np.frombuffer(state, dtype, count, offset)
      offset += leaf.nbytes
      found[name] = leaf.reshape(own).copy()
    return found

  def columns(self, records: np.ndarray) -> list[Any]:
    """Return each leaf of all records: an array, or a list if shapes differ."""
    if not self.is_ragged:
      # Fields are strided in memory, TensorFlow needs contiguous arrays.
      return [
        np.ascontiguousarray(records[name]) for name in records.dtype.names
      ]
    clients = [self.by_leaf(record) for record in records]
    return [
      [client[name] for client in clients]
      if None in shape
      else np.stack([client[name] for client in clients])
      if clients
      else np.zeros([0, *shape], dtype)
      for name, dtype, shape in self._leaves
    ]

  def records(self, leaves: Sequence[Any], size: int) -> np.ndarray:
    """Build records from their leaves.

    Args:
      leaves: For each leaf, the clients' values.
      size: Number of clients.
    """
    records = np.empty([size], self.record_type)
    if not self.is_ragged:
      for name, leaf in zip(records.dtype.names or (), leaves, strict=False):
        records[name] = leaf
      return records
    for place in range(size):
      own = [
        np.asarray(leaf[place], dtype, order='C')
        for leaf, (_, dtype, _) in zip(leaves, self._leaves, strict=True)
      ]
      sizes = [number for leaf in own for number in leaf.shape]
      records[_ENCODED][place] = b''.join(
        [np.array(sizes, np.int64).tobytes(), *(x.tobytes() for x in own)]
      )
    return records


class Layout:
  """Conversion between client states and records.

  Attributes:
    format: Names, types and shapes of the leaves, and their layout.
  """

  def __init__(self, kind: tff.Type):
    """Take the type C of a client state.

    Raises:
      ClientStoreError: If its leaves are not numbers, or have an unknown rank.
    """
    names = typed_values.leaf_names(kind)
    specs = typed_values.tensor_specs(kind)
    for name, spec in zip(names, specs, strict=True):
      if spec.dtype == tf.string or spec.shape.rank is None:
        raise ClientStoreError(
          f'What clients remember has a leaf {name} of the type '
          f'{spec.dtype.name}{spec.shape}. A client store takes numbers, as '
          'scalars or arrays of a known number of dimensions.'
        )
    self.format = Format(
      json.dumps(
        [
          [name, spec.dtype.name, spec.shape.as_list()]
          for name, spec in zip(names, specs, strict=True)
        ]
      )
    )
    self._reader = readers.Reader(kind)
    self._convert = typed_values.converter(kind)

  def columns(self, records: np.ndarray) -> client_batch.Columns:
    """Return records as values that runtimes read leaf by leaf."""
    leaves = self.format.columns(records)
    return client_batch.Columns.of(len(records), leaves, self._convert)

  def scattered(self, states: sources.Scattered) -> client_batch.Columns:
    """Return scattered states as values that runtimes read leaf by leaf."""
    return client_batch.Columns.of_scattered(states, self._convert)

  @property
  def are_large(self) -> bool:
    """True if values should be made, or read, where they are needed."""
    size = self.format.record_type.itemsize
    return not self.format.is_ragged and size >= _LARGE_BYTES

  def where_they_lie(self, states: Sequence[Any]) -> sources.Scattered | None:
    """Return the location of a runtime's values, if they can stay there."""
    found = getattr(states, 'scattered', None)
    if found is None or [*found.specs] != self.format.specs:
      return None
    return found

  def records(self, states: Sequence[Any]) -> np.ndarray:
    """Convert values that a runtime returned to records."""
    if isinstance(states, client_batch.Columns) and states.is_dense:
      nested = self._reader.stacked(states.stacked, 'client states')
      leaves = typed_values.leaves(nested)
    else:
      flat = [
        typed_values.leaves(self._reader(state, f'client state {place}'))
        for place, state in enumerate(states)
      ]
      leaves = list(zip(*flat, strict=True))
    return self.format.records(leaves, len(states))


class Table:
  """Records of some clients in one array, which grows.

  Attributes:
    records: The records; only the rows of clients count.
    num_bytes: Memory of the records in bytes.
  """

  def __init__(self, layout: Layout):
    """Create an empty table."""
    self._format = layout.format
    self.records = np.zeros([0], layout.format.record_type)
    self.num_bytes = 0
    self._rows: dict[str, int] = {}

  def rows(self, client_ids: Sequence[str]) -> np.ndarray:
    """Return the row of each client, or -1."""
    return np.array([self._rows.get(c, -1) for c in client_ids], np.int64)

  def write(self, client_ids: Sequence[str], records: np.ndarray) -> None:
    """Store the record of each client."""
    for client in client_ids:
      self._rows.setdefault(client, len(self._rows))
    missing = len(self._rows) - len(self.records)
    if missing > 0:
      more = np.zeros([max(missing, len(self.records))], self.records.dtype)
      self.records = np.concatenate([self.records, more])
    rows = self.rows(client_ids)
    if self._format.is_ragged:
      self.num_bytes -= self._bytes_of(self.records[rows])
      self.num_bytes += self._bytes_of(records)
    else:
      self.num_bytes = self.records.nbytes
    self.records[rows] = records

  def delete(self, client_id: str) -> bool:
    """Forget a client; return True if it had a record."""
    if client_id not in self._rows:
      return False
    # The last client moves to its row, so that rows have no gaps.
    last_client, last = self._rows.popitem()
    row = last
    if last_client != client_id:
      row = self._rows.pop(client_id)
      self._rows[last_client] = row
    if self._format.is_ragged:
      self.num_bytes -= self._bytes_of(self.records[row : row + 1])
    self.records[row] = self.records[last]
    self.records[last] = np.zeros([], self.records.dtype)
    return True

  def _bytes_of(self, records: np.ndarray) -> int:
    """Return the size in bytes of records that differ in size."""
    return sum(len(self._format.to_bytes(record)) for record in records)

  def states(self) -> Iterator[tuple[str, bytes]]:
    """Yield each client with the bytes of its record."""
    for client, row in self._rows.items():
      yield client, self._format.to_bytes(self.records[row])


def first_states(
  initialize_client: tff.Computation, seeds: np.ndarray
) -> client_batch.Columns:
  """Make the initial states of clients that never took part.

  They are made here, whatever runtime is current, so that they are the same bit
  for bit under every one, and do not depend on the other clients.

  Args:
    initialize_client: `(int32[2] -> C)`.
    seeds: int32 `[clients, 2]`.

  Returns:
    A sequence of one value for each client, for `process.next`.
  """
  kind = initialize_client.type_signature.result
  leaves: list[Any] = []
  if typed_values.leaf_names(kind):
    found = _first_leaves(initialize_client)(np.asarray(seeds, np.int32))
    leaves = [leaf.numpy() for leaf in found]
  return client_batch.Columns.of(
    len(seeds), leaves, typed_values.converter(kind)
  )


@dataclasses.dataclass(frozen=True)
class FirstStates:
  """Initial states that are made on demand: a `sources.Source`.

  Attributes:
    program: `(int32[2] -> C)`.
    seeds: int32 `[clients, 2]`.
  """

  program: remote_shards.Program
  seeds: np.ndarray
  is_in_memory = False

  def __len__(self) -> int:
    return len(self.seeds)

  def erase(self, row: int) -> None:
    """Do nothing: states are made again each time."""

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `sources.Source`."""
    made = _first_leaves(_deserialized(self.program))(self.seeds[rows])
    for leaf, own in zip(leaves, made, strict=True):
      leaf[places] = own.numpy()

  def take(self, rows: np.ndarray) -> tuple[sources.Source, np.ndarray]:
    """Return the states of some clients, with their rows."""
    return FirstStates(self.program, self.seeds[rows]), np.arange(len(rows))


@functools.lru_cache(maxsize=8)
def _deserialized(program: remote_shards.Program) -> tff.Computation:
  """Return the same object for the same program, so it is traced once."""
  return program.computation()


@functools.lru_cache(maxsize=8)
def _first_leaves(
  initialize_client: tff.Computation,
) -> Callable[..., Sequence[tf.Tensor]]:
  """Build a function from seeds to stacked leaves of all clients."""
  program = flat_program.Program(initialize_client)
  specs = typed_values.tensor_specs(initialize_client.type_signature.result)

  def first(seed: tf.Tensor) -> list[tf.Tensor]:
    values = dict.fromkeys(program.arguments, seed)
    for step in program.steps.values():
      values[step.key] = program.run(step, values)
    return typed_values.leaves(program.evaluate(program.result, values))

  def of_all(seeds: tf.Tensor) -> list[tf.Tensor]:
    return tf.map_fn(first, seeds, fn_output_signature=specs)

  inputs = [tf.TensorSpec([None, 2], tf.int32)]
  return graphs.quick(graphs.trace(of_all, inputs), inputs)
