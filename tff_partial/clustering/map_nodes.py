"""Nodes of a self-organizing map (Kohonen, 1990), and how they move."""

import collections
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import groups
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.contexts import ClientContext
from tff_partial.joins.row_aggregations import accumulating
from tff_partial.joins.row_aggregations import zeros_of
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def neighbourhood(radius: float, rows: int) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return (squared distances to all nodes, `[K]`) -> how far each is to move.

  The nearest node moves by 1, and others by their distance to it on a lattice.

  Args:
    radius: Standard deviation of the neighbourhood, in nodes. At infinity all
      nodes move equally; at 0 only the nearest.
    rows: Rows of the lattice, with `K / rows` nodes each.

  Raises:
    GroupError: If a number is out of range.
  """
  if not (rows >= 1 and radius >= 0.0):
    raise groups.GroupError(f'{rows=}, {radius=}: give at least 1, and 0.')

  def near(distances: tf.Tensor) -> tf.Tensor:
    number = distances.shape[-1]
    best = tf.argmin(distances, -1, output_type=tf.int32)
    if not radius:
      return tf.one_hot(best, number)
    place = tf.range(number)
    columns = -(-number // rows)
    lattice = tf.stack([place // columns, place % columns], -1)
    steps = tf.gather(lattice, best) - lattice
    squares = tf.cast(tf.reduce_sum(tf.square(steps), -1), tf.float32)
    return tf.exp(-squares / (2.0 * radius**2))

  return near


def following_nearest(
  embedding: str,
  nodes: str,
  near: Callable[[tf.Tensor], tf.Tensor],
  rate: float,
) -> Statistic:
  """Return the statistic by which each node follows the client nearest to it.

  Clients send how near they are to each node and how it would move, and the
  move of the nearest client is applied: FedEmbed's section 3.3.1.

  Args:
    embedding: Name of the embedding, a LOCAL variable `[size]`.
    nodes: Name of the nodes, a GLOBAL variable `[K, size]`.
    near: As returned by `neighbourhood`.
    rate: The fraction of the way from a node to the embedding.
  """

  def moves(client: ClientContext) -> dict[str, tf.Tensor]:
    way = client.weight(LOCAL, embedding) - client.weight(GLOBAL, nodes)
    distances = tf.reduce_sum(tf.square(way), -1)
    # Clients that do not count send zeros, which are never the best.
    scores = 1.0 / (1.0 + distances)
    return collections.OrderedDict(
      scores=scores, moves=rate * near(distances)[:, tf.newaxis] * way
    )

  def update(server: Server, best: Any) -> Server:
    moved = server.weights[GLOBAL][nodes] + best['moves']
    return server.with_solved({nodes: moved}, server.state, tf.constant(True))

  return Statistic('nodes', moves, join=_BestFactory(), update=update)


class _BestFactory(tff.aggregators.UnweightedAggregationFactory):
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

    same = tff.tensorflow.computation(lambda kept: kept, value_type)
    return accumulating(value_type, zeros_of(value_type), better, better, same)
