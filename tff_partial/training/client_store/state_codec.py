"""Client states as bytes in a store, and as arrays of a whole cohort.

Runtimes take and return the states of a cohort leaf by leaf, a store keeps them
client by client.
"""

import collections
from collections.abc import Callable, Sequence
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
from tff_partial.runtimes.program import serialized
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values


class ClientStoreError(errors.UserError, RuntimeError):
  """Raised for a client store that cannot be read, written or resumed from."""


class Format:
  """Layout of a client state in a file: its leaves, one after another.

  If leaves differ in shape between clients, all shapes come first.

  Attributes:
    text: Names, types and shapes of the leaves, as JSON; None is a dimension
      that differs between clients.
    specs: Types and shapes of the leaves.
    num_bytes: Size of a state; None if it differs between clients.
  """

  def __init__(self, text: str):
    """Parse `text`, as `of_type` wrote it."""
    self.text = text
    self._names: list[str] = []
    self.specs: list[tf.TensorSpec] = []
    for name, dtype, shape in json.loads(text):
      self._names.append(name)
      self.specs.append(tf.TensorSpec(shape, tf.dtypes.as_dtype(dtype)))
    self.num_bytes: int | None = None
    if all(spec.shape.is_fully_defined() for spec in self.specs):
      self._record = np.dtype(
        [
          (name, spec.dtype.as_numpy_dtype, tuple(spec.shape))
          for name, spec in zip(self._names, self.specs, strict=True)
        ]
      )
      self.num_bytes = self._record.itemsize

  @classmethod
  def of_type(cls, kind: tff.Type) -> 'Format':
    """Return the format of a type of client states.

    Raises:
      ClientStoreError: If there are no leaves, or they are not numbers or have
        an unknown rank.
    """
    names = typed_values.leaf_names(kind)
    specs = typed_values.tensor_specs(kind)
    if not names:
      raise ClientStoreError(
        f'Clients that remember nothing ({kind}) need no client store.'
      )
    for name, spec in zip(names, specs, strict=True):
      if spec.dtype == tf.string or spec.shape.rank is None:
        raise ClientStoreError(
          f'What clients remember has a leaf {name} of the type '
          f'{spec.dtype.name}{spec.shape}. A client store takes numbers, as '
          'scalars or arrays of a known number of dimensions.'
        )
    leaves = [
      [name, spec.dtype.name, spec.shape.as_list()]
      for name, spec in zip(names, specs, strict=True)
    ]
    return cls(json.dumps(leaves))

  def __str__(self) -> str:
    """Describe the leaves."""
    return ', '.join(
      f'{name} {dtype}{shape}' for name, dtype, shape in json.loads(self.text)
    )

  def encode(self, leaves: Sequence[Any], size: int) -> list[bytes]:
    """Return the bytes of each client's state.

    Args:
      leaves: For each leaf, the clients' values.
      size: Number of clients.
    """
    if self.num_bytes is not None:
      records = np.empty([size], self._record)
      for name, leaf in zip(self._names, leaves, strict=True):
        records[name] = leaf
      return [record.tobytes() for record in records]
    states = []
    for place in range(size):
      own = [
        np.asarray(leaf[place], spec.dtype.as_numpy_dtype, order='C')
        for leaf, spec in zip(leaves, self.specs, strict=True)
      ]
      sizes = np.array([number for leaf in own for number in leaf.shape])
      parts = [sizes.astype(np.int64), *own]
      states.append(b''.join(part.tobytes() for part in parts))
    return states

  def decode(self, states: Sequence[bytes]) -> list[np.ndarray]:
    """Return each leaf of all clients; an array of arrays if shapes differ."""
    if self.num_bytes is not None:
      records = np.frombuffer(b''.join(states), self._record)
      # Fields are strided in memory, TensorFlow needs contiguous arrays.
      return [np.ascontiguousarray(records[name]) for name in self._names]
    clients = [self.by_leaf(state).values() for state in states]
    leaves = [sources.empty(spec, len(states)) for spec in self.specs]
    for place, client in enumerate(clients):
      for leaf, value in zip(leaves, client, strict=True):
        leaf[place] = value
    return leaves

  def by_leaf(self, state: bytes) -> collections.OrderedDict[str, np.ndarray]:
    """Return the leaves of one client by name."""
    shapes = [tuple(spec.shape.as_list()) for spec in self.specs]
    offset = 0
    if self.num_bytes is None:
      rank = sum(map(len, shapes))
      sizes = iter(np.frombuffer(state, np.int64, rank).tolist())
      shapes = [tuple(next(sizes) for _ in shape) for shape in shapes]
      offset = rank * np.dtype(np.int64).itemsize
    found = collections.OrderedDict()
    for name, spec, shape in zip(self._names, self.specs, shapes, strict=True):
      dtype = spec.dtype.as_numpy_dtype
      leaf = np.frombuffer(state, dtype, math.prod(shape), offset)
      offset += leaf.nbytes
      found[name] = leaf.reshape(shape).copy()
    return found


class Converter:
  """Conversion between values of runtimes and sources of leaves."""

  def __init__(self, kind: tff.Type):
    self._reader = readers.ValueReader(kind)
    self._convert = typed_values.converter(kind)
    self.specs = typed_values.tensor_specs(kind)

  def columns(self, states: sources.Scattered) -> client_batch.Columns:
    """Return states as values that runtimes read leaf by leaf."""
    return client_batch.Columns.of_scattered(states, self._convert)

  def scattered(self, states: Sequence[Any]) -> sources.Scattered:
    """Return where the leaves of values lie that a runtime returned."""
    found = getattr(states, 'scattered', None)
    if found is not None and [*found.specs] == self.specs:
      return found
    leaves: Sequence[Any]
    if isinstance(states, client_batch.Columns) and states.is_dense:
      nested = self._reader.stacked(states.stacked, 'client states')
      leaves = typed_values.leaves(nested)
    else:
      flat = [
        typed_values.leaves(self._reader(state, f'client state {place}'))
        for place, state in enumerate(states)
      ]
      leaves = list(zip(*flat, strict=True))
    leaves = list(map(sources.stacked, leaves, self.specs))
    return sources.Scattered.held(self.specs, leaves)


def first_states(
  initialize_client: tff.Computation, seeds: np.ndarray
) -> client_batch.Columns:
  """Make the initial states of clients that never took part.

  They are made here, whatever runtime is current, so that they are the same bit
  for bit under every one, and do not depend on the other clients.

  `initialize_client` is `(int32[2] -> C)`, and `seeds` int32 `[clients, 2]`.

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


@dataclasses.dataclass(frozen=True, eq=False)
class FirstStates:
  """Initial states that are made where clients run: a `sources.Source`.

  Attributes:
    program: `(int32[2] -> C)`, serialized.
    seeds: int32 `[clients, 2]`.
  """

  program: bytes
  seeds: np.ndarray
  is_in_memory = False

  @classmethod
  def of(
    cls, initialize_client: tff.Computation, seeds: np.ndarray
  ) -> 'FirstStates':
    """Serialize the computation once, however often states are made."""
    return cls(serialized.to_bytes(initialize_client), seeds)

  def __len__(self) -> int:
    return len(self.seeds)

  def erase(self, row: int) -> None:
    """Do nothing: states are made again each time."""

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `sources.Source`."""
    made = _first_leaves(serialized.from_bytes(self.program))(self.seeds[rows])
    for leaf, own in zip(leaves, made, strict=True):
      leaf[places] = own.numpy()

  def take(self, rows: np.ndarray) -> tuple[sources.Source, np.ndarray]:
    """Return the states of some clients, with their rows."""
    return FirstStates(self.program, self.seeds[rows]), np.arange(len(rows))


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
      values[step.key] = program.evaluate(step.block, values)
    return typed_values.leaves(program.evaluate(program.result, values))

  def of_all(seeds: tf.Tensor) -> list[tf.Tensor]:
    return tf.map_fn(first, seeds, fn_output_signature=specs)

  inputs = [tf.TensorSpec([None, 2], tf.int32)]
  return graphs.quick(graphs.trace(of_all, inputs), inputs)
