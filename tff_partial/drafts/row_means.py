"""Means with a separate weight for each row.

A client may have much data on some rows of a table and little on others. It
sends each row times its weight, and the weights; the server divides the sums.

Both are linear, so that they may be clipped and noised together with an update.
One clip then bounds all that a client sends, and noise is in proportion to it.
So clients send moves instead of rows: the small differences of their rows from
those that they received. And the server divides by at least half of a row's
usual weight, since a smaller sum may be mostly noise. For larger weights,
without clip and noise, the mean is the same.
"""

import collections
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from tff_partial import tiers
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.contexts import ClientContext
from tff_partial.tiers import GLOBAL

# A client's context -> its weight, zero or more: float `[rows]` for one weight
# per row, or a scalar for all.
Weight: TypeAlias = Callable[[ClientContext], tf.Tensor]

# The minimum divisor of a row's moves, as a fraction of its usual weight.
MIN_WEIGHT_SHARE = 0.5
# Weights are scaled down by this when sent with moves: one clip bounds both.
WEIGHT_SCALE = 0.1
# Without noise, rows with a smaller total weight do not change.
_NOTHING = 1e-6
_SUM, _WEIGHT = '/sum', 'weight'


def row_means(
  name: str,
  values: Callable[[ClientContext], tiers.NamedTensors],
  weight: Weight,
  *,
  join: Join = Join.SUM,
  usual: float = 1.0,
  in_state: bool = False,
) -> Statistic:
  """Build a statistic that sets rows at the server to means of clients' rows.

  Args:
    name: Name of the statistic.
    values: (the client's context) -> its values of GLOBAL variables, by name.
    weight: (the client's context) -> its weight, by row or as a whole, for all
      of these variables.
    join: How sums are aggregated. With WITH_UPDATE they are sums of moves,
      clipped and noised by the aggregator; weights should then be bounded, such
      as shares that add up to 1 at each client.
    usual: The usual weight of a row. With WITH_UPDATE, sums are divided by at
      least `MIN_WEIGHT_SHARE` times this.
    in_state: True if the rows are not GLOBAL variables but tensors of the
      server's state, by name.

  Returns:
    The statistic. A row without any client's weight does not change.
  """
  by_moves = join is Join.WITH_UPDATE

  def summarize(client: ClientContext) -> tiers.NamedTensors:
    given, message = weight(client), collections.OrderedDict()
    received = client.server if in_state else client.received[GLOBAL]
    for variable, value in values(client).items():
      if by_moves:
        value -= received[variable]
      message[variable + _SUM] = _along_rows(given, value) * value
    message[_WEIGHT] = WEIGHT_SCALE * given if by_moves else given
    return message

  def update(server: Server, joined: tiers.NamedTensors) -> Server:
    held = collections.OrderedDict(
      server.state if in_state else server.weights[GLOBAL]
    )
    total = joined[_WEIGHT]
    for key, value in joined.items():
      if key == _WEIGHT:
        continue
      variable = key.removesuffix(_SUM)
      if by_moves:
        held[variable] = moved(held[variable], value, total, usual)
        continue
      counts = total >= _NOTHING
      mean = value / _along_rows(tf.where(counts, total, 1.0), value)
      held[variable] = tf.where(
        _along_rows(counts, value), mean, held[variable]
      )
    if in_state:
      return server._replace(state=held)
    return server._replace(
      weights=collections.OrderedDict(server.weights, **{GLOBAL: held})
    )

  return Statistic(name, summarize, join=join, update=update)


def moved(
  before: tf.Tensor, moves: tf.Tensor, weight: tf.Tensor, usual: float
) -> tf.Tensor:
  """Move rows by the mean of clients' moves, whose sums may have noise.

  `weight` is the sum of their weights times `WEIGHT_SCALE`. Rows with less than
  `MIN_WEIGHT_SHARE` of the usual weight move only a part of the way.
  """
  weight = tf.maximum(weight / WEIGHT_SCALE, MIN_WEIGHT_SHARE * usual)
  return before + moves / _along_rows(weight, moves)


def _along_rows(of_rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  """Reshape one number per row so that it multiplies the rows."""
  rank = of_rows.shape.rank
  ones = [1] * (value.shape.rank - rank)
  return tf.reshape(of_rows, tf.concat([tf.shape(of_rows), ones], 0))
