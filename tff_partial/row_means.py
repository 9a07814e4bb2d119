"""Means whose weights differ from row to row.

A client may know much about some rows of a table and little about others. It
sends each row times the weight that it gives to it, and the weights; the server
divides the sums. Both are linear, so that they may be clipped and noised
together with an update.
"""

import collections
from collections.abc import Callable, Mapping
from typing import TypeAlias

import tensorflow as tf

from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.statistics import Join
from tff_partial.statistics import Server
from tff_partial.statistics import Statistic
from tff_partial.tiers import GLOBAL

# What a client knows -> variable name to float weights, `[rows]` for one a row,
# or a scalar for all.
RowWeights: TypeAlias = Callable[[ClientContext], Mapping[str, tf.Tensor]]

_SUM, _WEIGHT = 'sum', 'weight'


def row_means(
  name: str,
  values: Callable[[ClientContext], tiers.NamedTensors],
  weights: RowWeights,
  *,
  join: Join = Join.SUM,
  least: float = 1e-6,
) -> Statistic:
  """Rows of GLOBAL variables become weighted means of what clients have there.

  Args:
    name: Of the statistic.
    values: What a client has in the place of GLOBAL variables, by their names.
    weights: How much its rows count, zero or more, for the same variables.
    join: How sums are made. With the update, they are clipped and noised as the
      aggregator says.
    least: A row stays as it is if the weights of all clients add up to less.
  """

  def summarize(client: ClientContext) -> tiers.NamedTensors:
    given = weights(client)
    sums = collections.OrderedDict()
    for variable, value in values(client).items():
      weight = tf.cast(given[variable], value.dtype)
      sums[f'{variable}/{_SUM}'] = _along_rows(weight, value) * value
      sums[f'{variable}/{_WEIGHT}'] = weight
    return sums

  def update(server: Server, joined: tiers.NamedTensors) -> Server:
    held = collections.OrderedDict(server.weights[GLOBAL])
    for key, weight in joined.items():
      variable, kind = key.rsplit('/', 1)
      if kind != _WEIGHT:
        continue
      value = joined[f'{variable}/{_SUM}']
      counts = weight >= least
      mean = value / _along_rows(tf.where(counts, weight, 1.0), value)
      held[variable] = tf.where(
        _along_rows(counts, value), mean, held[variable]
      )
    return server._replace(
      weights=collections.OrderedDict(server.weights, **{GLOBAL: held})
    )

  return Statistic(name, summarize, join=join, update=update)


def _along_rows(of_rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  """Numbers of rows, shaped to be multiplied with the rows."""
  rank = of_rows.shape.rank
  ones = [1] * (value.shape.rank - rank)
  return tf.reshape(of_rows, tf.concat([tf.shape(of_rows), ones], 0))
