"""Collection of clients' rows at the server in a buffer of fixed size."""

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial.errors import SettingError


class CollectRowsFactory(tff.aggregators.UnweightedAggregationFactory):
  """Factory of aggregations that concatenate clients' rows at the server.

  TFF has no `federated_collect`, so they are written into a buffer. A client
  sends `rows`, `[some rows, ...]`, and `is_real`, bool `[some rows]`; sizes may
  differ between clients. The result has `rows` and `is_real`,
  `[capacity, ...]`, and `num_sent`, int32: the number of real rows sent. Rows
  beyond the capacity are lost.
  """

  def __init__(self, capacity: int):
    """Set the capacity.

    Args:
      capacity: Maximum number of rows of all clients together.

    Raises:
      SettingError: If the capacity is below 1.
    """
    if capacity < 1:
      raise SettingError(
        f'capacity={capacity}: the server collects at least one row.'
      )
    self._capacity = capacity

  def create(self, value_type: Any) -> tff.templates.AggregationProcess:
    """Create the process; see `tff.aggregators`."""
    rows = value_type['rows']
    capacity, rest = self._capacity, list(rows.shape[1:])
    dtype = tf.dtypes.as_dtype(rows.dtype)

    # One extra row, for rows that exceed the capacity or are not real.
    buffer_type = tff.types.tensorflow_to_type(
      collections.OrderedDict(
        rows=tf.TensorSpec([capacity + 1, *rest], dtype),
        number=tf.TensorSpec([], tf.int32),
      )
    )

    def appended(buffer: Any, rows: tf.Tensor, is_real: tf.Tensor) -> Any:
      numbers = tf.cast(is_real, tf.int32)
      places = buffer['number'] + tf.cumsum(numbers) - 1
      fits = tf.logical_and(is_real, places < capacity)
      places = tf.where(fits, places, capacity)
      return collections.OrderedDict(
        rows=tf.tensor_scatter_nd_update(buffer['rows'], places[:, None], rows),
        number=buffer['number'] + tf.reduce_sum(numbers),
      )

    @tff.tensorflow.computation
    def zero() -> Any:
      return collections.OrderedDict(
        rows=tf.zeros([capacity + 1, *rest], dtype), number=tf.constant(0)
      )

    @tff.tensorflow.computation(buffer_type, value_type)
    def accumulate(buffer: Any, sent: Any) -> Any:
      return appended(buffer, sent['rows'], sent['is_real'])

    @tff.tensorflow.computation(buffer_type, buffer_type)
    def merge(one: Any, other: Any) -> Any:
      is_real = tf.range(capacity + 1) < tf.minimum(other['number'], capacity)
      both = appended(one, other['rows'], is_real)
      both['number'] = one['number'] + other['number']
      return both

    @tff.tensorflow.computation(buffer_type)
    def report(buffer: Any) -> Any:
      is_real = tf.range(capacity) < buffer['number']
      rows = buffer['rows'][:capacity]
      real = tf.reshape(is_real, [-1, *[1] * len(rest)])
      return collections.OrderedDict(
        rows=tf.where(real, rows, tf.zeros_like(rows)),
        is_real=is_real,
        num_sent=buffer['number'],
      )

    return aggregators.accumulating(value_type, zero, accumulate, merge, report)
