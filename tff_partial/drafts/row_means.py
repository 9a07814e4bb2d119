"""Means whose weights differ from row to row.

A client may know much about some rows of a table and little about others. It
sends each row times the weight that it gives to it, and the weights; the server
divides the sums.

Both are linear, so that they may be clipped and noised together with an update.
One clip then holds all that a client sends, and noise is in proportion to it.
So clients send moves in place of rows: by how much theirs differ from those
that they received, which is little. And the server divides by no less than half
of the weight that a row usually has, since a smaller sum may be mostly noise.
Of larger weights, without clip and noise, the mean is the same.
"""

import collections
from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.statistics import Join
from tff_partial.statistics import Server
from tff_partial.statistics import Statistic
from tff_partial.tiers import GLOBAL

# What a client knows -> how much it counts, zero or more: float `[rows]` for
# one number a row, or a scalar for all.
Weight: TypeAlias = Callable[[ClientContext], tf.Tensor]

# By what part of its usual weight, at least, the moves of a row are divided.
LEAST = 0.5
# Beside moves, weights are sent so much smaller: a clip is to hold both.
SENT = 0.1
# Of smaller weights no mean is made, where there is no noise.
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
  """Rows at the server become weighted means of what clients have there.

  Args:
    name: Of the statistic.
    values: What a client has in the place of GLOBAL variables, by their names.
    weight: How much it counts there, by row or as a whole, for all of these
      variables.
    join: How sums are made. With the update, they are sums of moves, clipped
      and noised as the aggregator says; weights should be bounded then, such as
      shares that add up to 1 at each client.
    usual: The weight of a row of which clients know as much as of most. With
      the update, sums are divided by no less than `LEAST` times this.
    in_state: Whether the rows are not GLOBAL variables but tensors of the
      server's state, by their names.

  Returns:
    The statistic. A row on which no client counts stays as it is.
  """
  by_moves = join is Join.WITH_UPDATE

  def summarize(client: ClientContext) -> tiers.NamedTensors:
    given, message = weight(client), collections.OrderedDict()
    received = client.server if in_state else client.received[GLOBAL]
    for variable, value in values(client).items():
      if by_moves:
        value -= received[variable]
      message[variable + _SUM] = _along_rows(given, value) * value
    message[_WEIGHT] = SENT * given if by_moves else given
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
  """Rows after the mean of clients' moves, of which the sums may have noise.

  Args:
    before: Where the rows were, `[rows, ...]`.
    moves: The sum of the weighted moves of all clients, of the same shape.
    weight: The sum of their weights times `SENT`, `[rows]` or a scalar.
    usual: The weight of a row of which clients know as much as of most. Where
      there is less than `LEAST` times this, a row goes a part of the way.
  """
  weight = tf.maximum(weight / SENT, LEAST * usual)
  return before + moves / _along_rows(weight, moves)


def _along_rows(of_rows: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
  """Numbers of rows, shaped to be multiplied with the rows."""
  rank = of_rows.shape.rank
  ones = [1] * (value.shape.rank - rank)
  return tf.reshape(of_rows, tf.concat([tf.shape(of_rows), ones], 0))
