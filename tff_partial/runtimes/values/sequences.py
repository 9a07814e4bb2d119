"""Sequences, such as a client's `tf.data.Dataset`, as dense arrays.

A sequence is read once per call, whatever its source, into one array for each
component of its elements; a client gets a data set made of its part. Elements
have one shape, or are batches, where only the last may be shorter: then the
arrays hold examples, which are batched again. The arrays of all clients are
concatenated, so that clients may have any number of elements, and nothing is
padded.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
from typing import Any, Self

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.graphs import data_loops
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.values import typed_values

# Data sets of an unknown number of elements that end only with their input.
_ON_AND_ON = frozenset(
  """
  _BatchDataset _FilterDataset _MapDataset _OptionsDataset _ParallelBatchDataset
  _ParallelMapDataset _PrefetchDataset _ShardDataset _ShuffleDataset
  """.split()
)
# Number of elements of one shape that are read at once.
_READ_AT_ONCE = 1 << 10


def _quiet() -> tf.data.Options:
  """Return options without optimizations for large data sets on disk."""
  options = tf.data.Options()
  options.autotune.enabled = False
  options.experimental_optimization.apply_default_optimizations = False
  return options


_QUIET = _quiet()


@dataclasses.dataclass(frozen=True, eq=False)
class Elements:
  """Elements of one sequence.

  Attributes:
    components: Arrays in the order of `tf.data`, with a leading dimension of
      elements, or of the examples in all batches.
    batch_size: The number of rows in an element but the last, which may have
      fewer; zero if a row is an element.
  """

  components: Sequence[np.ndarray]
  batch_size: int

  @property
  def shape(self) -> tuple[tuple[int, ...], ...]:
    """Shapes of a row: sequences with equal ones may be concatenated."""
    return tuple(rows.shape[1:] for rows in self.components)

  @property
  def nbytes(self) -> int:
    """Bytes of padding for a client's share: its rows need none."""
    return 3 * np.dtype(np.int64).itemsize

  def dataset(self) -> tf.Tensor:
    """Build the data set that a computation takes."""
    return _dataset(self.components, self.batch_size or None)


class SequenceLayout:
  """Layout of sequences of one type.

  Attributes:
    num_components: The number of arrays for the elements' leaves.
  """

  def __init__(self, type_spec: tff.SequenceType):
    """Analyse a type.

    Raises:
      UnsupportedComputationError: If sequences of the type are not dense.
    """
    self._element_type = type_spec.element
    self._specs = typed_values.tensor_specs(type_spec.element)
    self.num_components = len(self._specs)
    if not self._specs or any(s.shape.rank is None for s in self._specs):
      raise errors.UnsupportedComputationError(
        f'a sequence of {type_spec.element}',
        'its elements have no tensor, or one of any number of dimensions',
      )
    self._places: tuple[Any, list[int]] | None = None
    self._reading: dict[Any, Callable[..., Sequence[tf.Tensor]]] = {}
    self._is_static = all(spec.shape.is_fully_defined() for spec in self._specs)
    self._is_batched = all(
      spec.shape.rank and spec.shape[0] is None for spec in self._specs
    )
    # From the order of `tf.data`, which sorts names, to that of the type.
    places = typed_values.like(
      typed_values.pattern(type_spec.element), itertools.count()
    )
    self._order = tf.nest.flatten(
      typed_values.to_element(places, type_spec.element)
    )

  def read(
    self,
    value: Any,
    where: tuple[str, ...],
    read_element: Callable[..., typed_values.Nested],
  ) -> Elements:
    """Read a data set or a list of elements.

    Args:
      value: The sequence.
      where: The path to it, for errors.
      read_element: Reads an element of a list.

    Raises:
      ArgumentError: If it is no sequence of the type.
      UnsupportedComputationError: If it is, but its elements have different
        shapes, or are infinitely many.
    """
    if isinstance(value, tf.data.Dataset):
      columns = self._of_dataset(value, where)
    elif isinstance(value, list):
      read = [
        typed_values.leaves(read_element(element, *where, f'element {place}'))
        for place, element in enumerate(value)
      ]
      columns = [
        _Column.of([np.asarray(leaves[place]) for leaves in read], spec)
        for place, spec in enumerate(self._specs)
      ]
    else:
      raise errors.ArgumentError(
        '/'.join(where),
        f'a tf.data.Dataset or a list of elements {self._element_type}',
        f'a {type(value).__name__}',
        'put the elements in one',
      )
    batch_size = self._batch_size(columns, where) if self._is_batched else 0
    rows = [
      column.rows(spec.shape, self._is_batched, where)
      for column, spec in zip(columns, self._specs, strict=True)
    ]
    return Elements([rows[place] for place in self._order], batch_size)

  def dataset(self, rows: Sequence[Any], bounds: Any) -> tf.Tensor:
    """Build the data set of one of many concatenated sequences.

    Args:
      rows: The rows of all of them; see `laid`.
      bounds: int64 `[3]`, the start and end of this one, and its batch size.
    """
    start, stop, batch_size = tf.unstack(bounds)
    return _dataset(
      [tf.convert_to_tensor(part)[start:stop] for part in rows],
      batch_size if self._is_batched else None,
    )

  def _of_dataset(
    self, dataset: tf.data.Dataset, where: tuple[str, ...]
  ) -> list['_Column']:
    """Read a data set's elements, leaf by leaf, in the type's order."""
    places = self._places_in(dataset.element_spec, where)
    if _is_endless(dataset):
      raise errors.UnsupportedComputationError(
        f'a sequence without an end ({"/".join(where)})', 'it cannot be read'
      )
    specs = tuple(self._specs[places.index(p)] for p in range(len(places)))
    if specs not in self._reading:
      self._reading[specs] = _reading(specs, self._is_static)
    read = self._reading[specs]
    try:
      parts = [part.numpy() for part in read(dataset)]
    except tf.errors.OpError as error:
      raise errors.CohortRuntimeError(
        f'{"/".join(where)}: expected a data set that can be read, found that '
        f'it fails: {errors.telling_line(error)}; iterate over it to see where.'
      ) from error
    columns = []
    for place in places:
      values, shapes = parts[2 * place : 2 * place + 2]
      if self._is_static:
        shapes = np.repeat(shapes[:, 1:], shapes[:, 0], 0)
      columns.append(_Column(values, shapes))
    return columns

  def _places_in(self, element_spec: Any, where: tuple[str, ...]) -> list[int]:
    """Return the place of each leaf of the type in a data set's elements."""
    if self._places is not None and self._places[0] == element_spec:
      return self._places[1]
    found = 'elements that TFF has no type for'
    try:
      element_type = tff.types.tensorflow_to_type(element_spec)
    except TypeError:
      element_type = None
    else:
      found = str(element_type)
    if element_type is None or not self._element_type.is_assignable_from(
      element_type
    ):
      raise errors.ArgumentError(
        '/'.join(where),
        f'a sequence of {self._element_type}',
        f'one of {found}',
        'convert its elements with `Dataset.map`',
      )
    flat = tf.nest.flatten(element_spec)
    places = _in_order(
      tf.nest.pack_sequence_as(element_spec, list(range(len(flat))))
    )
    self._places = element_spec, places
    return places

  def _batch_size(
    self, columns: Sequence['_Column'], where: tuple[str, ...]
  ) -> int:
    """Return the size of all batches but the last, which may be smaller."""
    sizes = columns[0].shapes[:, 0]
    if not len(sizes):
      return 1
    size = sizes[0]
    if (
      all((column.shapes[:, 0] == sizes).all() for column in columns)
      and (sizes[:-1] == size).all()
      and 1 <= sizes[-1] <= size
    ):
      return int(size)
    raise _uneven(where)


@dataclasses.dataclass(frozen=True)
class _Column:
  """One leaf of all elements of a sequence, concatenated.

  Attributes:
    values: Its values, one after the other.
    shapes: int64 `[elements, rank]`.
  """

  values: np.ndarray
  shapes: np.ndarray

  @classmethod
  def of(cls, leaves: Sequence[np.ndarray], spec: tf.TensorSpec) -> Self:
    """Concatenate leaves."""
    none = np.zeros([0], spec.dtype.as_numpy_dtype)
    shapes = np.array([leaf.shape for leaf in leaves], np.int64)
    return cls(
      np.concatenate([none, *[leaf.reshape(-1) for leaf in leaves]]),
      shapes.reshape(len(leaves), spec.shape.rank),
    )

  def rows(
    self, shape: tf.TensorShape, is_batched: bool, where: tuple[str, ...]
  ) -> np.ndarray:
    """Return all elements, or all examples in them, in one array.

    Args:
      shape: The shape of the leaf, as far as the type gives it.
      is_batched: Whether an element is a batch of examples.
      where: The path to the sequence.

    Raises:
      UnsupportedComputationError: If the shapes of elements differ.
    """
    number = len(self.shapes)
    inner = [size or 0 for size in shape]
    if number:
      inner = self.shapes[0].tolist()
    if (self.shapes[:, is_batched:] != inner[is_batched:]).any():
      raise _uneven(where)
    if is_batched:
      number = self.shapes[:, 0].sum()
    return self.values.reshape(number, *inner[is_batched:])


def _reading(
  specs: Sequence[tf.TensorSpec], is_static: bool
) -> Callable[[tf.data.Dataset], Sequence[tf.Tensor]]:
  """Build a function that reads the values and shapes of `_Column`s.

  Args:
    specs: The specs of a data set's components.
    is_static: Whether many elements are read at once, which have one shape and
      then a dimension more.
  """

  def start(spec: tf.TensorSpec) -> list[tf.TensorArray]:
    rank = spec.shape.rank + is_static
    values, shapes = (
      tf.TensorArray(dtype, 0, True, element_shape=shape, infer_shape=False)
      for dtype, shape in ((spec.dtype, [None]), (tf.int64, [rank]))
    )
    # `concat` requires at least one entry.
    return [
      values.write(0, tf.zeros([0], spec.dtype)),
      shapes.write(0, tf.zeros([rank], tf.int64)),
    ]

  def add(
    element: Sequence[tf.Tensor], count: tf.Tensor, *arrays: tf.TensorArray
  ) -> list[Any]:
    parts = [
      part
      for leaf in element
      for part in (tf.reshape(leaf, [-1]), tf.cast(tf.shape(leaf), tf.int64))
    ]
    return [
      count + 1,
      *[a.write(count, part) for a, part in zip(arrays, parts, strict=True)],
    ]

  def read(variant: tf.Tensor) -> list[tf.Tensor]:
    dataset = tf.data.experimental.from_variant(variant, specs)
    if is_static:
      dataset = dataset.batch(_READ_AT_ONCE)
    arrays = [array for spec in specs for array in start(spec)]
    _, *arrays = data_loops.reduced(
      tf.data.experimental.to_variant(dataset.with_options(_QUIET)),
      [spec.dtype for spec in specs],
      add,
      [tf.constant(1), *arrays],
      [tf.TensorShape([]), *[tf.TensorShape(None)] * len(arrays)],
    )
    return [
      part
      for values, shapes in zip(arrays[::2], arrays[1::2], strict=True)
      for part in (values.concat(), shapes.stack()[1:])
    ]

  inputs = [tf.TensorSpec([], tf.variant)]
  run = graphs.quick(graphs.trace(read, inputs), inputs)
  return lambda dataset: run(tf.data.experimental.to_variant(dataset))


def laid(sequences: Sequence[Elements], size: int) -> list[np.ndarray]:
  """Concatenate sequences.

  Args:
    sequences: The sequences of some clients, with rows of the same shapes.
    size: The number of clients to make room for.

  Returns:
    The components, and int64 `[size, 3]`, the `bounds` of each client's part.
  """
  lengths = [len(elements.components[0]) for elements in sequences]
  ends = np.cumsum(lengths)
  batch_sizes = [elements.batch_size for elements in sequences]
  bounds = np.zeros([size, 3], np.int64)
  bounds[: len(sequences)] = np.stack([ends - lengths, ends, batch_sizes], 1)
  columns = zip(*[e.components for e in sequences], strict=True)
  return [*map(np.concatenate, columns), bounds]


def _dataset(rows: Sequence[Any], batch_size: Any) -> tf.Tensor:
  with tf.device('/device:cpu:0'):  # There are no data sets elsewhere.
    dataset = tf.data.Dataset.from_tensor_slices(tuple(rows))
    if batch_size is not None:
      dataset = dataset.batch(batch_size)
    return tf.data.experimental.to_variant(dataset.with_options(_QUIET))


def _is_endless(dataset: tf.data.Dataset) -> bool:
  """Check whether a data set has no end, also where a filter hides it."""
  cardinality = dataset.cardinality().numpy()
  if cardinality == tf.data.UNKNOWN_CARDINALITY:
    inputs = dataset._inputs() if type(dataset).__name__ in _ON_AND_ON else []
    return any(map(_is_endless, inputs))
  return bool(cardinality == tf.data.INFINITE_CARDINALITY)


def _in_order(nested: Any) -> list[int]:
  """Return the leaves of an element in the order of its TFF type."""
  if isinstance(nested, int):
    return [nested]
  container: Iterable[Any] = tff.structure.from_container(nested)
  return [place for element in container for place in _in_order(element)]


def _uneven(where: tuple[str, ...]) -> errors.UnsupportedComputationError:
  return errors.UnsupportedComputationError(
    f'a sequence whose elements differ in shape ({"/".join(where)})',
    'only batches of one size, of which the last may be shorter, are dense',
  )
