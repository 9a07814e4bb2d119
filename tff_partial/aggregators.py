"""Aggregators to which clients send rows of tables instead of whole tables.

With TFF's own aggregators each client sends every table as a whole. Here it
sends the rows that its examples look up, and their ids, which reveal to the
aggregating side what these examples are about. They are added to one table.
"""

import abc
import collections
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.joins.robust import coordinate_median as coordinate_median
from tff_partial.joins.robust import geometric_median as geometric_median
from tff_partial.joins.robust import krum as krum
from tff_partial.joins.robust import trimmed_mean as trimmed_mean
from tff_partial.joins.row_aggregations import zeros_of
from tff_partial.sparse import rows

WeightedFactory: TypeAlias = tff.aggregators.WeightedAggregationFactory
Factory: TypeAlias = (
  WeightedFactory | tff.aggregators.UnweightedAggregationFactory
)


def as_weighted(factory: Factory) -> WeightedFactory:
  """Return a weighted factory; an unweighted one then ignores weights."""
  if isinstance(factory, tff.aggregators.WeightedAggregationFactory):
    return factory
  return tff.aggregators.as_weighted_aggregator(factory)


class RowAggregationFactory(abc.ABC):
  """Factory of aggregations of whole tables or of rows of them."""

  @abc.abstractmethod
  def create_by_rows(
    self,
    value_type: tff.Type,
    weight_type: tff.Type,
    ids_type: tff.Type,
    result_type: tff.Type,
  ) -> tff.templates.AggregationProcess:
    """Create the process that aggregates rows of some tables.

    Args:
      value_type: Type of clients' values: by tier, named tensors; for some
        tables only some rows, `[?, ...]`. A row may be repeated as zeros.
      weight_type: Type of clients' weights.
      ids_type: Type of the ids of these rows, int32 `[?]`, for each such table
        by tier and name.
      result_type: Type of the result, which has whole tables.

    Returns:
      A process whose weights are mappings of `weight` and `ids`.
    """


class MeanFactory(RowAggregationFactory, WeightedFactory):
  """A `tff.aggregators.MeanFactory` that also accepts rows of tables.

  Its states and measurements are the same. If all weights are zero, the mean is
  zero.
  """

  def __init__(
    self,
    around: Callable[[WeightedFactory], WeightedFactory] = lambda mean: mean,
  ):
    """Initialize the factory.

    Args:
      around: Wraps the mean in an aggregator that scales each client's value,
      by norms and the like: additional rows of zeros must make no difference.
      For example `lambda mean: tff.aggregators.clipping_factory(1.0, mean)`.
    """
    self._around = around

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Create the process that aggregates whole tables."""
    mean = tff.aggregators.MeanFactory(no_nan_division=True)
    return self._around(mean).create(value_type, weight_type)

  def create_by_rows(
    self,
    value_type: tff.Type,
    weight_type: tff.Type,
    ids_type: tff.Type,
    result_type: tff.Type,
  ) -> tff.templates.AggregationProcess:
    """Create the process that aggregates rows of some tables."""
    mean = _RowMeanFactory(result_type)
    # The weight passes unchanged through what wraps the mean.
    pair = tff.to_type(
      collections.OrderedDict(weight=weight_type, ids=ids_type)
    )
    return self._around(mean).create(value_type, pair)


def moves_nothing(state: Any, update: Any) -> tuple[tf.Tensor, Any]:
  """Return True for an update that changes nothing, and measurements.

  It is not finite, or zero: the mean of a round of which no client counts, in
  which momentum must not move weights either.

  Args:
    state: The server optimizer's state.
    update: The mean update.
  """
  is_rejected, measurements = tff.learning.templates.reject_non_finite_update(
    state, update
  )
  are_zero = [tf.reduce_all(tf.equal(t, 0)) for t in tf.nest.flatten(update)]
  return tf.logical_or(is_rejected, tf.reduce_all(are_zero)), measurements


def robust() -> MeanFactory:
  """Return a `tff.learning.robust_aggregator` that also accepts rows of tables.

  By adaptive bounds, it zeroes extreme updates and clips large ones.
  """
  return MeanFactory(
    lambda mean: tff.learning.robust_aggregator(
      # Despite its name, it may return any mean.
      debug_measurements_fn=lambda _: mean
    )
  )


class _RowMeanFactory(WeightedFactory):
  """Innermost mean, whose weights are pairs of weight and ids."""

  def __init__(self, result_type: tff.Type):
    self._result_type = result_type

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    # Only its state and the type of its measurements are used.
    whole = tff.aggregators.MeanFactory().create(
      self._result_type, weight_type['weight']
    )
    measurements_type = whole.next.type_signature.result.measurements.member
    total_type = tff.to_type(
      collections.OrderedDict(
        value=self._result_type, weight=weight_type['weight']
      )
    )

    zero = zeros_of(total_type)

    @tff.tensorflow.computation(value_type, weight_type)
    def weigh(value: Any, weight: Any) -> Any:
      by = weight['weight']
      weighted = tf.nest.map_structure(
        lambda t: t * tf.cast(by, t.dtype), value
      )
      return weighted, weight

    @tff.tensorflow.computation(total_type, weigh.type_signature.result)
    def accumulate(total: Any, sent: Any) -> Any:
      value, weight = sent
      for tier, named in total['value'].items():
        for name, tensor in named.items():
          ids = weight['ids'].get(tier, {}).get(name)
          named[name] = (
            tensor + value[tier][name]
            if ids is None
            else rows.Change(ids, value[tier][name]).added_to(tensor)
          )
      total['weight'] += weight['weight']
      return total

    @tff.tensorflow.computation(total_type, total_type)
    def merge(one: Any, other: Any) -> Any:
      return tf.nest.map_structure(tf.add, one, other)

    @tff.tensorflow.computation(total_type)
    def report(total: Any) -> Any:
      return tf.nest.map_structure(
        lambda t: tf.math.divide_no_nan(t, tf.cast(total['weight'], t.dtype)),
        total['value'],
      )

    @tff.federated_computation(
      whole.initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_aggregate(
          tff.federated_map(weigh, (value, weight)),
          zero(),
          accumulate,
          merge,
          report,
        ),
        tff.federated_value(
          tff.types.structure_from_tensor_type_tree(
            lambda leaf: leaf, measurements_type
          ),
          tff.SERVER,
        ),
      )

    return tff.templates.AggregationProcess(whole.initialize, next_fn)
