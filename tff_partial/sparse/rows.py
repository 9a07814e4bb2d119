"""Some rows of an embedding table, in place of the whole table.

A client's examples look up few rows of a table. If a model does nothing else
with the table, and only plain gradient descent moves it, a client can train
these rows alone, and the others stay exactly the same. The client's cost then
depends on the rows that it looks up, not on the size of the table.
"""

import collections
from collections.abc import Iterator, Sequence
import contextlib
import contextvars
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

# Ids of each lookup of a table, in the order of the model's lookups.
Lookups: TypeAlias = collections.OrderedDict[str, list[tf.Tensor]]


class _Reading:
  """A model call whose lookups are recorded."""

  def __init__(self) -> None:
    self.graph = tf.compat.v1.get_default_graph()
    self.lookups: Lookups = collections.OrderedDict()


_reading: contextvars.ContextVar[_Reading] = contextvars.ContextVar('reading')


@contextlib.contextmanager
def reading() -> Iterator[Lookups]:
  """Let one model call look up `Rows` within the context."""
  call = _Reading()
  token = _reading.set(call)
  try:
    yield call.lookups
  finally:
    _reading.reset(token)


class Rows(tf.experimental.ExtensionType):
  """Stand-in for a table of a model, for lookups only.

  Attributes:
    name: The name of the table's variable.
    num_rows: Number of rows of the table.
    values: Some of these rows, `[rows, ...]`.
    places: For each lookup, in the model's order, the indices of its rows in
      `values`. Empty to find out which lookups there are.
  """

  name: str
  num_rows: int
  values: tf.Tensor
  places: tuple[tf.Tensor, ...]

  @property
  def shape(self) -> tf.TensorShape:
    """The shape of the table."""
    return tf.TensorShape([self.num_rows, *self.values.shape[1:]])

  @property
  def dtype(self) -> tf.DType:
    """The type of the table."""
    return self.values.dtype

  def assign(self, value: Any, *_: Any, **__: Any) -> Any:
    """Ignore the initial value that Keras assigns; the rows have theirs."""
    return value

  def look_up(self, ids: Any) -> tf.Tensor:
    """Look up rows by their ids."""
    ids = tf.convert_to_tensor(ids)
    call = _reading.get()
    if tf.compat.v1.get_default_graph() is not call.graph:
      # Keras calls the layer to infer its output shape.
      return self._any(ids)
    lookups = call.lookups.setdefault(self.name, [])
    lookups.append(ids)
    if not self.places:
      return self._any(ids)
    return tf.gather(self.values, self.places[len(lookups) - 1])

  def _any(self, ids: tf.Tensor) -> tf.Tensor:
    """Return arbitrary rows that depend on `values` as real ones do."""
    return tf.gather(self.values, tf.zeros_like(ids))


@tf.experimental.dispatch_for_api(tf.nn.embedding_lookup, {'params': Rows})
def _embedding_lookup(
  params: Rows, ids: Any, max_norm: Any = None, name: str | None = None
) -> tf.Tensor:
  if max_norm is not None:
    raise ValueError('Rows are looked up as they are.')
  return params.look_up(ids)


@tf.experimental.dispatch_for_api(tf.gather, {'params': Rows})
def _gather(
  params: Rows,
  indices: Any,
  validate_indices: Any = None,
  axis: Any = None,
  batch_dims: int = 0,
  name: str | None = None,
) -> tf.Tensor:
  if axis not in (None, 0) or batch_dims:
    raise ValueError('Rows are looked up along the first axis.')
  return params.look_up(indices)


class Change(NamedTuple):
  """Changes of some rows of a table.

  Attributes:
    ids: Ids of the rows, int32 `[rows]`. They may repeat.
    values: `[rows, ...]`, to be added to the rows; zero for all but one of
      those with the same id.
  """

  ids: tf.Tensor
  values: tf.Tensor

  def added_to(self, table: tf.Tensor) -> tf.Tensor:
    """Return the table with these changes added."""
    return tf.tensor_scatter_nd_add(table, self.ids[:, None], self.values)


class ChosenRows(NamedTuple):
  """Rows of a table that a client's examples look up.

  A row that several lookups read appears once for each of them. Only the first
  of these is used; the others keep their initial values.

  Attributes:
    ids: int32 `[rows]`.
    first: int32 `[rows]`: index of the first occurrence of the same row.
    places: For each lookup of the model, the indices of each example's rows,
      int32 `[examples, ...]`.
  """

  ids: tf.Tensor
  first: tf.Tensor
  places: list[tf.Tensor]

  def of(self, table: tf.Tensor) -> tf.Tensor:
    """Return the chosen rows of a table."""
    return tf.gather(table, self.ids)

  def within(self, table: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return the table with other values in the chosen rows."""
    used = tf.gather(values, self.first)
    return tf.tensor_scatter_nd_update(table, self.ids[:, None], used)


def choose(
  lookups: Sequence[tf.Tensor], count: tf.Tensor, num_rows: int
) -> ChosenRows:
  """Choose the rows that lookups of real examples read.

  Args:
    lookups: The ids of each lookup, integer `[examples, ...]`.
    count: int32 scalar, the number of real examples.
    num_rows: Number of rows of the table.
  """
  flat = [tf.reshape(_of_real(ids, count, num_rows), [-1]) for ids in lookups]
  ids = tf.concat(flat, 0)
  # At most all rows of the table. XLA knows from the shapes which of the two
  # cases applies, and computes only that one.
  takes_all = tf.size(ids) > num_rows
  number = tf.minimum(tf.size(ids), num_rows)
  place = tf.where(takes_all, ids, first_of_equals(ids, num_rows, takes_all))
  every = tf.range(number)
  sizes = [tf.size(part) for part in flat]
  return ChosenRows(
    tf.where(takes_all, every, ids[:number]),
    tf.where(takes_all, every, place[:number]),
    [
      tf.reshape(part, tf.shape(ids))
      for part, ids in zip(tf.split(place, sizes), lookups, strict=True)
    ],
  )


def _of_real(ids: tf.Tensor, count: tf.Tensor, num_rows: int) -> tf.Tensor:
  """Return ids as int32, with 0 at padding, which may hold any id."""
  if ids.dtype.size > tf.int32.size:
    # Ids outside of the table stay outside.
    ids = tf.clip_by_value(ids, -1, num_rows)
  is_real = tf.range(tf.shape(ids)[0]) < count
  is_real = tf.reshape(is_real, [-1] + [1] * (ids.shape.rank - 1))
  return tf.where(is_real, tf.cast(ids, tf.int32), 0)


def first_of_equals(
  ids: tf.Tensor, num_rows: int, is_needless: tf.Tensor | bool = False
) -> tf.Tensor:
  """Find the first occurrence of each id, int32 `[number]`.

  Ids are hashed into slots. In each slot, all ids equal to the first one have
  found it; the others try again with another hash. This takes a few turns,
  whatever the size of ids, and one turn if there is a slot for each row of the
  table. Sorting takes XLA ten times as long.

  Args:
    ids: int32 `[number]`.
    num_rows: Number of rows of the table. Ids may lie outside of it.
    is_needless: bool scalar; True to return anything, at no cost. A condition
      around all this would change the rounding of neighbouring operations.
  """
  number = tf.size(ids)
  position = tf.range(number)
  num_slots = tf.minimum(2 * number + 1, num_rows + 2)
  # Ids outside of the table, on either side, share a slot.
  row = tf.clip_by_value(ids, -1, num_rows) + 1

  def turn(
    count: tf.Tensor, is_found: tf.Tensor, first: tf.Tensor
  ) -> tuple[tf.Tensor, ...]:
    hashed = _hash(ids, count) % tf.cast(num_slots, tf.uint32)
    is_by_row = tf.equal(count, 0) & (num_slots > num_rows + 1)
    slot = tf.where(is_by_row, row, tf.cast(hashed, tf.int32))
    firsts = tf.math.unsorted_segment_min(
      tf.where(is_found, number, position), slot, num_slots
    )
    found = tf.minimum(tf.gather(firsts, slot), number - 1)
    is_new = ~is_found & tf.equal(tf.gather(ids, found), ids)
    return count + 1, is_found | is_new, tf.where(is_new, found, first)

  _, _, first = tf.while_loop(
    lambda count, is_found, first: tf.reduce_any(~is_found),
    turn,
    (tf.constant(0), tf.fill([number], is_needless), position),
    shape_invariants=(
      tf.TensorShape([]),
      tf.TensorShape([None]),
      tf.TensorShape([None]),
    ),
    parallel_iterations=1,
  )
  return first


def _hash(ids: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
  """Return one of many hashes of int32 ids, as uint32."""
  factor = tf.constant(0x9E3779B1, tf.uint32) + 2 * tf.cast(number, tf.uint32)
  mixed = tf.bitcast(ids, tf.uint32)
  for shift in (15, 13):
    high = tf.bitwise.right_shift(mixed, tf.constant(shift, tf.uint32))
    mixed = tf.bitwise.bitwise_xor(mixed, high) * factor
  return tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, 16))
