"""Private sums of rows: each row counts once, however often it is sent."""

import collections
import secrets
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tff_partial import random_bits
from tff_partial.dp import dp_queries
from tff_partial.dp import mechanisms
from tff_partial.joins.row_aggregations import accumulating
from tff_partial.sparse import rows


def seed_maker(noise_seed: int | None, part: str) -> dp_queries.MakeSeed:
  """Make the function that makes the seed of a part's noise.

  Args:
    noise_seed: Source of seeds in a simulation. If None, they come from the
      operating system and the time: no two runs may have the same noise, even
      if one process initializes both.
    part: Name of the part.
  """
  is_secret = noise_seed is None
  source = secrets.randbits(128) if noise_seed is None else noise_seed
  first = random_bits.derive(source, 'privacy noise', part)

  def make_seed() -> tf.Tensor:
    name = mechanisms.SECRET if is_secret else 'noise_seed'
    seed = tf.constant(first, name=name)
    if is_secret:
      for word in tf.unstack(tf.bitcast(tf.timestamp(), tf.int32)):
        seed = random_bits.fold_in(seed, word)
    return seed

  return make_seed


class NestedSumQuery(tfp.NestedQuery, tfp.SumAggregationDPQuery):
  """Several sum queries in one."""


def with_distinct_rows(sent: Any, specs: Any) -> Any:
  """Add up a client's rows of the same id; replace the others by zeros.

  Only then does the norm of its update equal the norm of its change of tables.
  `specs` are those of the whole value, with whole tables.
  """
  left = iter(tf.nest.flatten(sent['ids']))

  def distinct(part: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    if part.shape.is_fully_defined():
      return part
    ids = next(left)
    first = rows.first_of_equals(ids, spec.shape[0])
    return tf.math.unsorted_segment_sum(part, first, tf.size(ids))

  return tf.nest.map_structure(distinct, sent['value'], specs)


class RowsQuery(tfp.SumAggregationDPQuery):
  """A query of whole tables to which clients add rows: (value, ids).

  Rows of zeros do not change a norm, so a client clips only its own rows.
  """

  def __init__(self, query: tfp.SumAggregationDPQuery, specs: Any):
    self._query, self._specs = query, specs

  def initial_global_state(self) -> Any:
    """Return the state of the query of tables."""
    return self._query.initial_global_state()

  def derive_sample_params(self, global_state: Any) -> Any:
    """Return the parameters of a round."""
    return self._query.derive_sample_params(global_state)

  def get_noised_result(self, sample_state: Any, global_state: Any) -> Any:
    """Add the noise to the sum."""
    return self._query.get_noised_result(sample_state, global_state)

  def initial_sample_state(self, template: Any = None) -> Any:
    """Return the empty sum: whole tables."""
    return self._query.initial_sample_state(self._specs)

  def preprocess_record(self, params: Any, record: Any) -> Any:
    """Clip the rows of one client, each of them once."""
    return collections.OrderedDict(
      value=self._query.preprocess_record(
        params, with_distinct_rows(record, self._specs)
      ),
      ids=record['ids'],
    )


class RowSumFactory(tff.aggregators.UnweightedAggregationFactory):
  """A factory that sums clients' rows from `RowsQuery` to whole tables."""

  def __init__(self, query: RowsQuery):
    self._query = query

  def create(self, value_type: Any) -> tff.templates.AggregationProcess:
    """Return the process that sums values of a type."""

    @tff.tensorflow.computation
    def zero() -> Any:
      return self._query.initial_sample_state()

    total_type = zero.type_signature.result

    @tff.tensorflow.computation(total_type, value_type)
    def accumulate(total: Any, sent: Any) -> Any:
      # Both have the same order, and `ids` that of the tables with rows.
      ids = iter(tf.nest.flatten(sent['ids']))
      return tf.nest.map_structure(
        lambda table, part: (
          table + part
          if part.shape.is_fully_defined()
          else rows.Change(next(ids), part).added_to(table)
        ),
        total,
        sent['value'],
      )

    @tff.tensorflow.computation(total_type, total_type)
    def merge(one: Any, other: Any) -> Any:
      return tf.nest.map_structure(tf.add, one, other)

    return accumulating(value_type, zero, accumulate, merge)
