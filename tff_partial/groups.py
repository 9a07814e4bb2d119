"""Groups: the choice of the copy of GROUP weights that a client uses.

The server holds K copies, `[K, ...]`. At one point of its work a client chooses
one of them, by its own data and what it has received, or holds all of them. The
choice and its reason are not sent; but an update that is not zero for only one
copy reveals the choice to anyone who sees that update by itself.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import errors
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.data import splits


class GroupError(errors.UserError, TypeError):
  """Raised when groups are missing, or do not fit a model or its work."""


class Assign(NamedTuple):
  """The part of a client's work that chooses its group.

  Attributes:
    choose: (the client's context) -> int32 scalar, from 0 to K - 1.
    on: The examples in the context; all of them by default.
    holds_all: True if the client then holds, trains and sends the copies of all
      groups, `[K, ...]`. Its phases have a `weights_fn` for what the model
      reads, such as `one_of_all`.
  """

  choose: Callable[[ClientContext], tf.Tensor]
  on: splits.Part = splits.everything()
  holds_all: bool = False


# A client holds the copies of all groups, as in FedEM.
ALL_COPIES = Assign(lambda client: tf.constant(0), holds_all=True)


def one_of_all(group: int) -> tiers.WeightsFn:
  """Let the model read the copy of one group, from those of all."""

  def read(weights: tiers.Weights) -> tiers.Weights:
    own = copy_of(weights[tiers.GROUP], tf.constant(group))
    weights = tiers.server_and_local_weights(weights)
    return collections.OrderedDict(weights, **{tiers.GROUP: own})

  return read


def predict_all(
  client: ClientContext, weights: tiers.Weights, x: Any, training: bool = False
) -> list[Any]:
  """Compute predictions and layers' losses by the copy of each group.

  Args:
    client: The client's context.
    weights: Its weights, for GROUP all copies.
    x: A batch of inputs, `[batch, ...]`.
    training: True if layers such as dropout behave as in training.
  """
  return [
    client.model.predict(
      one_of_all(group)(weights),
      client.frozen,
      x,
      training=training,
      seed=client.seed,
    )
    for group in range(client.model.num_groups)
  ]


def by_attribute(read: Callable[[Mapping[str, Any]], tf.Tensor]) -> Assign:
  """Assign clients to a group that their examples name: FedEmbed-Type.

  Args:
    read: (the client's examples, `[capacity, ...]`) -> integers `[capacity]`;
      only the first is used: all examples of a client are of one group.
  """

  def choose(client: ClientContext) -> tf.Tensor:
    return tf.cast(read(client.examples)[0], tf.int32)

  return Assign(choose)


def nearest(embedding: str, centers: str) -> Assign:
  """Assign clients to the center nearest to their embedding.

  FedEmbed, section 3.3.2, where the centers are prototypes, and 3.3.1, where
  they are the nodes of a self-organizing map. Distances are Euclidean; ties go
  to the first.

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


def neighbourhood(radius: float, rows: int) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return (squared distances to all nodes, `[K]`) -> how far each is to move.

  The nodes are those of a self-organizing map (Kohonen, 1990). The nearest node
  moves by 1, and others by their distance to it on a lattice.

  Args:
    radius: Standard deviation of the neighbourhood, in nodes. At infinity all
      nodes move equally; at 0 only the nearest.
    rows: Rows of the lattice, with `K / rows` nodes each.

  Raises:
    GroupError: If a number is out of range.
  """
  if not (rows >= 1 and radius >= 0.0):
    raise GroupError(f'{rows=}, {radius=}: give at least 1, and 0.')

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


def least_loss() -> Assign:
  """Assign clients to the group whose copy has the least loss: IFCA.

  Ghosh et al., 2020, "An efficient framework for clustered federated learning",
  Algorithm 1, line 6. The loss is the model's own, over the client's examples,
  with the weights that the client holds beside the copy. Ties go to the first.
  A client computes K predictions, of which TensorFlow shares what the copies
  have in common. Also FedEmbed's clients may join by it:
  `Assignment(groups.least_loss())`.
  """

  def choose(client: ClientContext) -> tf.Tensor:
    client = client.filled()
    losses = [
      client.model.loss(
        client.examples['y'],
        predictions,
        client.examples['weight'],
        client.is_real,
      ).objective
      for predictions, _ in predict_all(
        client, client.weights, client.examples['x']
      )
    ]
    return tf.argmin(tf.stack(losses), output_type=tf.int32)

  return Assign(choose)


def squared_distances(point: tf.Tensor, centers: tf.Tensor) -> tf.Tensor:
  """Return squared distances `[..., K]` of `[..., size]` to `[K, size]`."""
  return tf.reduce_sum(
    tf.math.squared_difference(point[..., tf.newaxis, :], centers), -1
  )


def members_mean(
  mean: tiers.NamedTensors, members: tf.Tensor
) -> tiers.NamedTensors:
  """Convert means over all clients into means over each group's members.

  Args:
    mean: Named tensors `[K, ...]`: the mean of all clients' updates, which are
      zero for copies of groups other than the client's.
    members: float32 `[K]`, the total weight of each group's members.

  Returns:
    Named tensors `[K, ...]`; zeros for groups without members.
  """
  scale = tf.math.divide_no_nan(tf.reduce_sum(members), members)
  return tf.nest.map_structure(
    lambda t: tf.einsum('k,k...->k...', tf.cast(scale, t.dtype), t), mean
  )


def with_members(
  before: tiers.NamedTensors, after: tiers.NamedTensors, members: tf.Tensor
) -> Any:
  """Return the copies after a step, and before it of groups without members.

  Else momentum at the server would move these.

  Args:
    before: Named tensors `[K, ...]`.
    after: Likewise.
    members: float32 `[K]`, the total weight of each group's members.
  """

  def chosen(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    has_any = tf.reshape(members > 0, [-1, *[1] * (old.shape.rank - 1)])
    return tf.where(has_any, new, old)

  return tf.nest.map_structure(chosen, before, after)


def copy_of(stacked: tiers.NamedTensors, group: tf.Tensor) -> Any:
  """Return the weights of one group, from those of all."""
  return tf.nest.map_structure(lambda t: tf.gather(t, group), stacked)


def inherit_weights(copies: tiers.NamedTensors, moves: tf.Tensor) -> Any:
  """Return copies of groups that follow their clients.

  FedEmbed, section 3.3.1: a cluster starts from the weights of the old cluster
  with which it shares most clients. On a tie with itself, and without clients,
  it keeps its own.

  Args:
    copies: Named tensors `[K, ...]`.
    moves: `[K, K]`, numbers of clients by old group (rows) and new group.
  """
  stay = 0.5 * tf.eye(moves.shape[0])
  source = tf.argmax(tf.cast(moves, tf.float32) + stay, 0)
  return copy_of(copies, source)


def scatter_to_groups(
  copy: tiers.NamedTensors, group: tf.Tensor, number: int
) -> Any:
  """Stack one group's tensors with zeros for all others, `[K, ...]`."""
  hot = tf.one_hot(group, number)
  return tf.nest.map_structure(
    lambda t: tf.tensordot(tf.cast(hot, t.dtype), t, axes=0), copy
  )
