"""What clients return, gathered leaf by leaf while a loop runs.

Leaves of one shape become a stacked array. Where the shape is unknown before a
client has run, clients may differ: their values are laid end to end, and their
shapes kept beside them. A caller gets `Columns`, and so need not touch clients
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

from tff_partial.runtimes import deposits


class Column:
  """One leaf of a value that every client returns."""

  def __init__(self, spec: tf.TensorSpec):
    self._spec = spec
    self.is_ragged = not spec.shape.is_fully_defined()

  def arrays(self, bucket: int, stop: tf.Tensor) -> list[tf.TensorArray]:
    """Empty arrays for a loop over `stop` clients, at most `bucket`."""
    if not self.is_ragged:
      return [
        tf.TensorArray(self._spec.dtype, bucket, element_shape=self._spec.shape)
      ]
    # Only what was written can be laid end to end.
    return [
      tf.TensorArray(
        self._spec.dtype, stop, element_shape=[None], infer_shape=False
      ),
      tf.TensorArray(tf.int32, stop, element_shape=[self._spec.shape.rank]),
    ]

  def write(
    self, arrays: Iterator[tf.TensorArray], index: tf.Tensor, leaf: tf.Tensor
  ) -> list[tf.TensorArray]:
    """Add one client's leaf to the next arrays."""
    return [next(arrays).write(index, part) for part in self._parts(leaf)]

  def stack(self, arrays: Iterator[tf.TensorArray]) -> list[tf.Tensor]:
    """The tensors in which a loop returns the next arrays."""
    if not self.is_ragged:
      return [next(arrays).stack()]
    return [next(arrays).concat(), next(arrays).stack()]

  def stack_eagerly(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same, of clients that ran one by one."""
    parts = list(zip(*[self._parts(leaf) for leaf in leaves], strict=True))
    if not self.is_ragged:
      return [tf.stack(parts[0])]
    return [tf.concat(parts[0], 0), tf.stack(parts[1])]

  def read(self, tensors: Iterator[tf.Tensor]) -> 'tf.Tensor | Ragged':
    """Take what `stack` returned: the clients' leaves, by place."""
    first = next(tensors)
    return Ragged(first, next(tensors)) if self.is_ragged else first

  def _parts(self, leaf: tf.Tensor) -> list[tf.Tensor]:
    if self.is_ragged:
      return [tf.reshape(leaf, [-1]), tf.shape(leaf)]
    return [leaf]


class Ragged:
  """Arrays of different shapes, laid end to end."""

  def __init__(self, values: Any, shapes: Any):
    self._values, self._shapes = values, shapes

  def mapped(self, convert: Callable[[Any], Any]) -> 'Ragged':
    """The same with both arrays converted, to tensors or from them."""
    return Ragged(convert(self._values), convert(self._shapes))

  def numpy(self) -> list[Any]:
    """One array for each client."""
    shapes = self._shapes.numpy()
    ends = np.cumsum([math.prod(shape) for shape in shapes.tolist()])
    parts = np.split(self._values.numpy(), ends[:-1])
    return [
      part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
    ]


def gather(
  spec: tf.TensorSpec,
  parts: Sequence[Any],
  positions: Sequence[np.ndarray],
  size: int,
) -> Any:
  """Put what shards returned of one leaf into the order of the cohort.

  Args:
    spec: The leaf of one client.
    parts: For each shard, its clients' leaves: an array with a leading
      dimension, which may be longer than the shard, or a list.
    positions: The places of its clients in the cohort.
    size: The number of clients in the cohort.

  Returns:
    An array with a leading dimension, or a list of arrays where the type leaves
    the shape open.
  """
  if spec.shape.is_fully_defined():
    shape = (size, *spec.shape)
    column = np.empty(shape, spec.dtype.as_numpy_dtype)
    for part, places in zip(parts, positions, strict=True):
      column[places] = part[: len(places)]
    return column
  listed: list[Any] = [None] * size
  for part, places in zip(parts, positions, strict=True):
    for leaf, place in zip(part, places, strict=False):
      listed[place] = leaf
  return listed


class Columns(list[Any]):
  """What the clients of a cohort return: a list of one value for each.

  The values of all clients lie in one array a leaf; that of one client is made
  when it is asked for, and shares no memory with the others. TFF's own contexts
  want a list; the first change makes it an ordinary one.
  """

  # Both are None in an ordinary list, which has none of the others either.
  _leaves: Sequence[Any] | None = None
  _read: 'Callable[[Sequence[int]], Columns] | None' = None
  _scattered: deposits.Scattered | None = None
  _size: int
  _convert: Callable[[Iterator[Any]], Any]

  @classmethod
  def of(
    cls,
    size: int,
    leaves: Sequence[Any],
    convert: Callable[[Iterator[Any]], Any],
  ) -> Self:
    """Take over leaves, stacked by client.

    Args:
      size: The number of clients.
      leaves: What `gather` returned, leaf by leaf.
      convert: Puts leaves into the containers of a client's value.
    """
    columns = cls()
    columns._size, columns._leaves, columns._convert = size, leaves, convert
    return columns

  @classmethod
  def on_demand(
    cls, size: int, read: 'Callable[[Sequence[int]], Columns]'
  ) -> Self:
    """Values that are read whenever they are asked for, and not kept.

    Args:
      size: The number of clients.
      read: Returns the values of those at some places; all leaves have a shape
        that the type says. It is called by one thread at a time.
    """
    columns, turn = cls(), threading.Lock()

    def read_in_turn(places: Sequence[int]) -> Columns:
      with turn:
        return read(places)

    columns._size, columns._read = size, read_in_turn
    return columns

  @classmethod
  def of_scattered(
    cls,
    scattered: deposits.Scattered,
    convert: Callable[[Iterator[Any]], Any],
  ) -> Self:
    """Values that lie in files; whoever runs a client can read its own.

    Args:
      scattered: Where they lie.
      convert: Puts leaves into the containers of a client's value.
    """

    def read(places: Sequence[int]) -> Columns:
      leaves = scattered.take(np.asarray(places, np.int64)).leaves()
      return Columns.of(len(places), leaves, convert)

    columns = cls.on_demand(len(scattered), read)
    columns._scattered = scattered
    return columns

  @property
  def scattered(self) -> deposits.Scattered | None:
    """Where the values lie, if not in this process."""
    return self._scattered

  @property
  def read(self) -> 'Callable[[Sequence[int]], Columns] | None':
    """Reads the values at some places, if they are read on demand."""
    return self._read

  @functools.cached_property
  def stacked(self) -> Any:
    """All values in one, with a leading dimension of clients in each array.

    A leaf whose type leaves the shape open is a list of arrays.

    Raises:
      AttributeError: If the list has been changed since.
    """
    if self._read is not None:
      return self._read(range(self._size)).stacked
    leaves = self.leaves
    return self._convert(iter(leaves))

  @property
  def leaves(self) -> Sequence[Any]:
    """The leaves of `stacked`, in the order of the type.

    Raises:
      AttributeError: If the list has been changed since.
    """
    if self._read is not None:
      return self._read(range(self._size)).leaves
    if self._leaves is None:
      raise AttributeError('A list that was changed is stacked no longer.')
    return self._leaves

  @property
  def is_dense(self) -> bool:
    """Whether every leaf of `stacked` is an array."""
    if self._leaves is None:
      return self._read is not None
    return all(isinstance(leaf, np.ndarray) for leaf in self._leaves)

  @property
  def _is_list(self) -> bool:
    """Whether it is an ordinary list by now."""
    return self._leaves is None and self._read is None

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
    if self._read is not None:
      return self._read([position])[0]
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

  # What `tf.nest` makes of columns is a list.
  def __tf_flatten__(self) -> tuple[None, tuple[Any, ...]]:
    return None, tuple(self)

  @classmethod
  def __tf_unflatten__(
    cls, metadata: None, components: tuple[Any, ...]
  ) -> list[Any]:
    return list(components)

  def _fill(self) -> None:
    """Becomes an ordinary list, which holds its values itself."""
    if not self._is_list:
      values = list(self)
      self.__dict__.clear()
      super().extend(values)


def _reading(name: str) -> Callable[..., Any]:
  """A method of lists that leaves them as they are."""
  method = getattr(list, name)

  @functools.wraps(method)
  def read(self: Columns, *rest: Any) -> Any:
    # A method of lists looks into the memory of another list, too.
    return method(
      list(self), *[list(o) if isinstance(o, Columns) else o for o in rest]
    )

  return read


def _changing(name: str) -> Callable[..., Any]:
  """A method of lists that changes them."""
  method = getattr(list, name)

  @functools.wraps(method)
  def change(self: Columns, *rest: Any, **options: Any) -> Any:
    self._fill()
    return method(self, *rest, **options)

  return change


# What is not defined above would see the list's own memory, which is empty
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
  """A client's own array, so that keeping it does not keep the others'."""
  return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
