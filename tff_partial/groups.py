"""Groups: which copy of the GROUP weights a client reads and trains.

The server holds K copies, `[K, ...]`. At one place of its work a client chooses
one of them, by what it knows and has received. Neither the choice nor the rule
by which it fell is sent; but an update that is not zero for one copy alone
reveals it to anyone who sees that update by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import errors
from tff_partial import tiers
from tff_partial.contexts import ClientContext


class GroupError(errors.UserError, TypeError):
  """Raised when groups are missing, or do not fit a model or its work."""


class Assign(NamedTuple):
  """The place in a client's work at which it chooses its group.

  Attributes:
    choose: (what the client knows) -> int32 scalar, from 0 to K - 1.
  """

  choose: Callable[[ClientContext], tf.Tensor]


def by_attribute(
  read: Callable[[Mapping[str, Any]], tf.Tensor],
) -> Assign:
  """Each client is told its group: FedEmbed-Type.

  Args:
    read: (the client's examples, `[capacity, ...]`) -> integers `[capacity]`,
      of which the first counts: a client is of one group with all it has.
  """

  def choose(client: ClientContext) -> tf.Tensor:
    return tf.cast(read(client.examples)[0], tf.int32)

  return Assign(choose)


def nearest(embedding: str, centers: str) -> Assign:
  """Each client joins the center that is nearest to its embedding.

  FedEmbed, section 3.3.2, where the centers are prototypes, and 3.3.1, where
  they are the nodes of a self-organizing map. Distances are Euclidean; of equal
  ones the first counts.

  Args:
    embedding: Name of the LOCAL variable, `[size]`.
    centers: Name of the GLOBAL variable, `[K, size]`.
  """

  def choose(client: ClientContext) -> tf.Tensor:
    distances = squared_distances(
      client.weight(tiers.LOCAL, embedding),
      client.weight(tiers.GLOBAL, centers),
    )
    return tf.argmin(distances, output_type=tf.int32)

  return Assign(choose)


def squared_distances(point: tf.Tensor, centers: tf.Tensor) -> tf.Tensor:
  """Squared Euclidean distances `[..., K]` of `[..., size]` to `[K, size]`."""
  return tf.reduce_sum(
    tf.math.squared_difference(point[..., tf.newaxis, :], centers), -1
  )


def members_mean(
  mean: tiers.NamedTensors, members: tf.Tensor
) -> tiers.NamedTensors:
  """The mean of each copy's updates over its members, of that over all clients.

  Args:
    mean: Named tensors `[K, ...]`: the mean of all clients' updates, which are
      zero for copies of other groups than the client's own.
    members: float32 `[K]`, the weights of each group's members, added up.

  Returns:
    Named tensors `[K, ...]`; zeros for groups without members.
  """
  scale = tf.math.divide_no_nan(tf.reduce_sum(members), members)
  return tf.nest.map_structure(
    lambda t: tf.einsum('k,k...->k...', tf.cast(scale, t.dtype), t), mean
  )


def copy_of(stacked: tiers.NamedTensors, group: tf.Tensor) -> Any:
  """The weights of one group, out of those of all."""
  return tf.nest.map_structure(lambda t: tf.gather(t, group), stacked)


def followed(copies: tiers.NamedTensors, moves: tf.Tensor) -> Any:
  """The copies of groups whose clients have moved, each where most went.

  FedEmbed, section 3.3.1: a cluster begins with the weights of that old one
  with which it has most clients in common. Where it has as many in common with
  itself, and where it has none, it keeps its own.

  Args:
    copies: Named tensors `[K, ...]`.
    moves: `[K, K]`, how many clients of each group (rows) are now in which.
  """
  stay = 0.5 * tf.eye(moves.shape[0])
  source = tf.argmax(tf.cast(moves, tf.float32) + stay, 0)
  return copy_of(copies, source)


def for_all(copy: tiers.NamedTensors, group: tf.Tensor, number: int) -> Any:
  """Stacks one group's tensors with zeros for all others, `[K, ...]`."""
  hot = tf.one_hot(group, number)
  return tf.nest.map_structure(
    lambda t: tf.tensordot(tf.cast(hot, t.dtype), t, axes=0), copy
  )
