"""Parts of a message that are clipped separately."""

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tensorflow_privacy as tfp

from tff_partial.dp import dp_queries
from tff_partial.dp.private_rows import NestedSumQuery

# Name of the single part of values that are clipped jointly.
WHOLE = 'all.parts'


class UpdateParts:
  """Queries of an update: one of the whole, or one for each part."""

  def __init__(self, queries: Mapping[str, dp_queries.PrivateSumQuery]):
    self.queries = queries

  def split(self, structure: Any) -> Any:
    """Return the parts of a structure, by name."""
    return {WHOLE: structure} if WHOLE in self.queries else structure

  def join(self, parts: Mapping[str, Any]) -> Any:
    """Join parts to a structure."""
    return parts.get(WHOLE, parts)

  @property
  def query(self) -> tfp.SumAggregationDPQuery:
    """The query of the whole structure."""
    if WHOLE in self.queries:
      return self.queries[WHOLE]
    return NestedSumQuery(collections.OrderedDict(self.queries))

  def are_clipped(self, params: Any, value: Any) -> Any:
    """Return whether a client's parts are clipped, which is not private."""
    params, value = self.split(params), self.split(value)
    clipped = collections.OrderedDict(
      (part, tf.cast(query.is_clipped(params[part], value[part]), tf.int32))
      for part, query in self.queries.items()
    )
    return clipped, tf.constant(1)

  def measure(self, divisor: float, before: Any, after: Any, total: Any) -> Any:
    """Measure a round from values that are already private."""
    before, after = self.split(before), self.split(after)
    total = self.split(total)
    measured = collections.OrderedDict(
      (part, query.measure(before[part], after[part], total[part]))
      for part, query in self.queries.items()
    )
    for one in measured.values():
      one['noise_stddev'] /= divisor
    return self.join(measured)
