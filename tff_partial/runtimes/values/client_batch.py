"""Clients' results, gathered leaf by leaf while a loop runs.

Leaves of one shape become a stacked array. Where the shape is unknown before a
client has run, clients may differ: their values are concatenated, and their
shapes kept separately. A caller gets `Columns`, so it need not touch clients
one by one.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
import operator
import threading
from typing import Any, Self

import numpy as np
import tensorflow as tf

from tff_partial.runtimes.values.sources import Scattered


class Column:
  """One leaf of the value that every client returns."""

  def __init__(self, spec: tf.TensorSpec):
    self._spec = spec
    self.is_ragged = not spec.shape.is_fully_defined()

  def arrays(self, bucket: int, stop: tf.Tensor) -> list[tf.TensorArray]:
    """Create empty arrays for a loop over `stop` clients, at most `bucket`."""
    if not self.is_ragged:
      return [
        tf.TensorArray(self._spec.dtype, bucket, element_shape=self._spec.shape)
      ]
    # Only entries that were written can be concatenated.
    return [
      tf.TensorArray(
        self._spec.dtype, stop, element_shape=[None], infer_shape=False
      ),
      tf.TensorArray(tf.int32, stop, element_shape=[self._spec.shape.rank]),
    ]

  def write(
    self, arrays: Iterator[tf.TensorArray], index: tf.Tensor, leaf: tf.Tensor
  ) -> list[tf.TensorArray]:
    """Write one client's leaf to the next arrays."""
    parts = [leaf]
    if self.is_ragged:
      parts = [tf.reshape(leaf, [-1]), tf.shape(leaf)]
    return [next(arrays).write(index, part) for part in parts]

  def stack(self, arrays: Iterator[tf.TensorArray]) -> list[tf.Tensor]:
    """Convert the next arrays to the tensors that a loop returns."""
    if not self.is_ragged:
      return [next(arrays).stack()]
    return [next(arrays).concat(), next(arrays).stack()]

  def read(self, tensors: Iterator[tf.Tensor]) -> 'tf.Tensor | Ragged':
    """Return the clients' leaves, by place, from what `stack` returned."""
    first = next(tensors)
    return Ragged(first, next(tensors)) if self.is_ragged else first


class Ragged:
  """Arrays of different shapes, flattened and concatenated."""

  def __init__(self, values: Any, shapes: Any):
    self._values, self._shapes = values, shapes

  def mapped(self, convert: Callable[[Any], Any]) -> 'Ragged':
    """Convert both arrays, to tensors or from them."""
    return Ragged(convert(self._values), convert(self._shapes))

  def numpy(self) -> list[Any]:
    """Return one array for each client."""
    shapes = self._shapes.numpy()
    ends = np.cumsum([math.prod(shape) for shape in shapes.tolist()])
    parts = np.split(self._values.numpy(), ends[:-1])
    return [
      part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
    ]


class Columns(list[Any]):
  """List of the values that the clients of a cohort return.

  The values of all clients are in one array per leaf; that of one client is
  made on access, and shares no memory with the others, so that its arrays are
  read-only. TFF's own contexts require a list; the first change makes it an
  ordinary one.

  Attributes:
    read: Function that reads the values at some places, if read on demand.
    scattered: Location of the values, if not in this process.
  """

  # Both are None in an ordinary list, which lacks the others too.
  _leaves: Sequence[Any] | None = None
  read: 'Callable[[Sequence[int]], Columns] | None' = None
  scattered: Scattered | None = None
  _size: int
  _convert: Callable[[Iterator[Any]], Any]

  @classmethod
  def of(
    cls,
    size: int,
    leaves: Sequence[Any],
    convert: Callable[[Iterator[Any]], Any],
  ) -> Self:
    """Wrap leaves that are stacked by client.

    Args:
      size: The number of clients.
      leaves: For each leaf, an array `[clients, ...]`, or a list of arrays
        where the type leaves the shape open.
      convert: Puts leaves into the containers of a client's value.
    """
    columns = cls()
    columns._size, columns._leaves, columns._convert = size, leaves, convert
    return columns

  @classmethod
  def on_demand(
    cls, size: int, read: 'Callable[[Sequence[int]], Columns]'
  ) -> Self:
    """Wrap values that are read on each access and not kept.

    Args:
      size: The number of clients.
      read: Returns the values of the clients at some places; the type gives the
        shape of all leaves. It is called by one thread at a time.
    """
    columns, turn = cls(), threading.Lock()

    def read_in_turn(places: Sequence[int]) -> Columns:
      with turn:
        return read(places)

    columns._size, columns.read = size, read_in_turn
    return columns

  @classmethod
  def of_scattered(
    cls, scattered: Scattered, convert: Callable[[Iterator[Any]], Any]
  ) -> Self:
    """Wrap values that lie in several places.

    Those that are not in memory are left for the processes that run clients.
    """

    def leaves(some: Scattered) -> list[Any]:
      return [
        leaf if spec.shape.is_fully_defined() else list(leaf)
        for spec, leaf in zip(some.specs, some.leaves(), strict=True)
      ]

    if all(source.is_in_memory for source in scattered.sources):
      return cls.of(len(scattered), leaves(scattered), convert)

    def read(places: Sequence[int]) -> Columns:
      some = scattered.take(np.asarray(places, np.int64))
      return Columns.of(len(places), leaves(some), convert)

    columns = cls.on_demand(len(scattered), read)
    columns.scattered = scattered
    return columns

  @functools.cached_property
  def stacked(self) -> Any:
    """All values as one, with a leading dimension of clients in each array.

    A leaf whose type leaves the shape open is a list of arrays.

    Raises:
      AttributeError: If the list has been changed.
    """
    if self.read is not None:
      return self.read(range(self._size)).stacked
    leaves = self.leaves  # Raises first if the list has been changed.
    return self._convert(iter(leaves))

  @property
  def leaves(self) -> Sequence[Any]:
    """Leaves of `stacked`, in the order of the type.

    Raises:
      AttributeError: If the list has been changed.
    """
    if self.read is not None:
      return self.read(range(self._size)).leaves
    if self._leaves is None:
      raise AttributeError('A list that was changed is stacked no longer.')
    return self._leaves

  @property
  def is_dense(self) -> bool:
    """True if every leaf of `stacked` is an array."""
    if self._leaves is None:
      return self.read is not None
    return all(isinstance(leaf, np.ndarray) for leaf in self._leaves)

  @property
  def _is_list(self) -> bool:
    """True if it has become an ordinary list."""
    return self._leaves is None and self.read is None

  def __len__(self) -> int:
    return super().__len__() if self._is_list else self._size

  def __iter__(self) -> Iterator[Any]:
    return map(self.__getitem__, range(len(self)))

  def __getitem__(self, position: Any) -> Any:
    if self._is_list:
      return super().__getitem__(position)
    if isinstance(position, slice):
      return [self[p] for p in range(*position.indices(len(self)))]
    position = range(len(self))[operator.index(position)]
    if self.read is not None:
      return self.read([position])[0]
    return self._convert(_copy(leaf[position]) for leaf in self._leaves or ())

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Sequence):
      return NotImplemented
    return list(self) == list(other)

  def __ne__(self, other: object) -> bool:
    if not isinstance(other, Sequence):
      return NotImplemented
    return not self == other

  def __radd__(self, other: list[Any]) -> list[Any]:
    return other + list(self)

  def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
    return list, (list(self),)

  # `tf.nest` turns columns into a list.
  def __tf_flatten__(self) -> tuple[None, tuple[Any, ...]]:
    return None, tuple(self)

  @classmethod
  def __tf_unflatten__(
    cls, metadata: None, components: tuple[Any, ...]
  ) -> list[Any]:
    return list(components)

  def _fill(self) -> None:
    """Become an ordinary list, which holds its values itself."""
    if not self._is_list:
      values = list(self)
      self.__dict__.clear()
      super().extend(values)


def _reading(name: str) -> Callable[..., Any]:
  """Wrap a list method that leaves the list unchanged."""
  method = getattr(list, name)

  @functools.wraps(method)
  def read(self: Columns, *rest: Any) -> Any:
    # A list method reads the memory of another list, too.
    return method(
      list(self), *[list(o) if isinstance(o, Columns) else o for o in rest]
    )

  return read


def _changing(name: str) -> Callable[..., Any]:
  """Wrap a list method that changes the list."""
  method = getattr(list, name)

  @functools.wraps(method)
  def change(self: Columns, *rest: Any, **options: Any) -> Any:
    self._fill()
    return method(self, *rest, **options)

  return change


# Methods not defined above would see the list's own memory, which is empty
# before the first change.
for _name in (
  *('__add__', '__contains__', '__ge__', '__gt__', '__le__', '__lt__'),
  *('__mul__', '__repr__', '__reversed__', '__rmul__', 'copy', 'count'),
  'index',
):
  setattr(Columns, _name, _reading(_name))
for _name in (
  *('__delitem__', '__iadd__', '__imul__', '__setitem__', 'append', 'clear'),
  *('extend', 'insert', 'pop', 'remove', 'reverse', 'sort'),
):
  setattr(Columns, _name, _changing(_name))


def _copy(leaf: Any) -> Any:
  """Copy a client's array, so that keeping it does not keep the others'."""
  if not isinstance(leaf, np.ndarray):
    return leaf
  copy = leaf.copy()
  copy.flags.writeable = False  # A change would be lost.
  return copy
