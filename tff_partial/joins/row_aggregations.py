"""Aggregations of rows that clients send: added up, or collected."""

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.errors import SettingError
from tff_partial.sparse import rows

ROWS, IS_REAL = 'rows', 'is_real'


def accumulating(
  value_type: tff.Type,
  zero: tff.Computation,
  accumulate: tff.Computation,
  merge: tff.Computation,
  report: tff.Computation | None = None,
) -> tff.templates.AggregationProcess:
  """Return the process of a `tff.federated_aggregate` that keeps no state.

  Args:
    value_type: Type of a client's value.
    zero: () -> the first accumulator.
    accumulate: (accumulator, a client's value) -> accumulator.
    merge: (accumulator, accumulator) -> accumulator.
    report: (accumulator) -> the result; the accumulator itself by default.
  """
  if report is None:
    report = tff.tensorflow.computation(
      lambda total: total, merge.type_signature.result
    )

  @tff.federated_computation
  def initialize() -> Any:
    return tff.federated_value((), tff.SERVER)

  @tff.federated_computation(
    initialize.type_signature.result, tff.FederatedType(value_type, tff.CLIENTS)
  )
  def next_fn(state: Any, value: Any) -> Any:
    return tff.templates.MeasuredProcessOutput(
      state,
      tff.federated_aggregate(value, zero(), accumulate, merge, report),
      tff.federated_value((), tff.SERVER),
    )

  return tff.templates.AggregationProcess(initialize, next_fn)


def zeros_of(value_type: tff.Type) -> tff.Computation:
  """Return the computation of zeros of a type, as a first accumulator."""
  return tff.tensorflow.computation(
    lambda: tff.types.structure_from_tensor_type_tree(
      lambda leaf: tf.zeros(leaf.shape, leaf.dtype), value_type
    )
  )


class SumOfRowsFactory(tff.aggregators.UnweightedAggregationFactory):
  """Factory of sums of rows of a table, which are alike for each client.

  A client's value is a mapping of `ids`, int32 `[rows]`, which may repeat,
  `weights`, `[rows, parts]`, and `parts`, `[parts, columns]`: each of its rows
  is a weighted sum of these. The result is `[num_rows, columns]`.
  """

  def __init__(self, num_rows: int):
    """Set the number of rows of the table."""
    self._num_rows = num_rows

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Create the process."""
    parts = value_type['parts']
    shape = [self._num_rows, *parts.shape[1:]]
    total_type = tff.TensorType(parts.dtype, shape)

    @tff.tensorflow.computation(total_type, value_type)
    def accumulate(total: Any, sent: Any) -> Any:
      values = tf.matmul(sent['weights'], sent['parts'])
      return rows.Change(sent['ids'], values).added_to(total)

    @tff.tensorflow.computation(total_type, total_type)
    def merge(one: Any, other: Any) -> Any:
      return one + other

    return accumulating(value_type, zeros_of(total_type), accumulate, merge)


class BestMovesFactory(tff.aggregators.UnweightedAggregationFactory):
  """Factory of aggregations that keep, of each node, the best client's move."""

  def create(self, value_type: tff.Type) -> tff.templates.AggregationProcess:
    """Create the process for `scores`, `[K]`, and `moves`, `[K, size]`."""

    @tff.tensorflow.computation(value_type, value_type)
    def better(kept: Any, sent: Any) -> Any:
      is_better = sent['scores'] > kept['scores']
      return collections.OrderedDict(
        scores=tf.where(is_better, sent['scores'], kept['scores']),
        moves=tf.where(is_better[:, tf.newaxis], sent['moves'], kept['moves']),
      )

    return accumulating(value_type, zeros_of(value_type), better, better)


class CollectRowsFactory(tff.aggregators.UnweightedAggregationFactory):
  """Factory of aggregations that concatenate clients' rows at the server.

  TFF has no `federated_collect`, so they are written into a buffer. A client
  sends `rows`, `[some rows, ...]`, and `is_real`, bool `[some rows]`; sizes may
  differ between clients. The result has `rows` and `is_real`,
  `[capacity, ...]`, and `num_sent`, int32: the number of real rows sent. Rows
  beyond the capacity are lost.
  """

  def __init__(self, capacity: int):
    """Set the most rows of all clients together, at least 1."""
    if capacity < 1:
      raise SettingError(
        f'capacity={capacity}: the server collects at least one row.'
      )
    self._capacity = capacity

  def create(self, value_type: Any) -> tff.templates.AggregationProcess:
    """Create the process; see `tff.aggregators`."""
    kind = value_type[ROWS]
    capacity, rest = self._capacity, list(kind.shape[1:])

    # One extra row, for rows that exceed the capacity or are not real.
    buffer_type = tff.types.tensorflow_to_type(
      collections.OrderedDict(
        rows=tf.TensorSpec([capacity + 1, *rest], kind.dtype),
        number=tf.TensorSpec([], tf.int32),
      )
    )

    def appended(buffer: Any, rows: tf.Tensor, is_real: tf.Tensor) -> Any:
      numbers = tf.cast(is_real, tf.int32)
      places = buffer['number'] + tf.cumsum(numbers) - 1
      fits = tf.logical_and(is_real, places < capacity)
      places = tf.where(fits, places, capacity)
      return collections.OrderedDict(
        rows=tf.tensor_scatter_nd_update(buffer[ROWS], places[:, None], rows),
        number=buffer['number'] + tf.reduce_sum(numbers),
      )

    @tff.tensorflow.computation(buffer_type, value_type)
    def accumulate(buffer: Any, sent: Any) -> Any:
      return appended(buffer, sent[ROWS], sent[IS_REAL])

    @tff.tensorflow.computation(buffer_type, buffer_type)
    def merge(one: Any, other: Any) -> Any:
      is_real = tf.range(capacity + 1) < tf.minimum(other['number'], capacity)
      both = appended(one, other[ROWS], is_real)
      both['number'] = one['number'] + other['number']
      return both

    @tff.tensorflow.computation(buffer_type)
    def report(buffer: Any) -> Any:
      is_real = tf.range(capacity) < buffer['number']
      rows = buffer[ROWS][:capacity]
      real = tf.reshape(is_real, [-1, *[1] * len(rest)])
      return collections.OrderedDict(
        rows=tf.where(real, rows, tf.zeros_like(rows)),
        is_real=is_real,
        num_sent=buffer['number'],
      )

    zero = zeros_of(buffer_type)
    return accumulating(value_type, zero, accumulate, merge, report)
