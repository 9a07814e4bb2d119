"""Assignment of clients to the sub-population whose head they use.

The methods of FedEmbed's section 3.3: clients know their sub-population, or
join the nearest prototype, or the nearest node of a self-organizing map.

Clients that join a prototype know only their own examples: for each, if they
like it, and its type. The positive prototype is that of a liked example's type
("identify from D_u", Algorithm 1, line 9). Only prototypical clients know
their true sub-population, as all clients do in FedEmbed-Type.

Deviations: Eq. 1 has the usual hinge. Nodes of the map follow the mean of their
clients, or, as section 3.3.1 prints, the nearest one. The prototypes are the
embeddings of the prototypical clients of section 3.3.2, which train like all
others: whenever one takes part, the prototype of its sub-population moves a
fraction of the way to its embedding. The paper says only that prototypes are
updated with the global model. Clients may form their embedding, through the
heads that all share, before they join; in the paper they join by their last
embedding, which requires clients that take part often.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import types
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import groups
from tff_partial import phases
from tff_partial import random_bits
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.joins.row_aggregations import BestMovesFactory
from tff_partial.model import losses
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


@dataclasses.dataclass(frozen=True)
class FedEmbedVariables:
  """Roles of a model's variables and outputs.

  The model's own loss is that of the sub-population's head and of the type
  head. Its outputs may have any structure.

  Attributes:
    embedding: Name of the personal embedding, a LOCAL variable `[size]`.
    global_head: Regular expression over whole names of the variables of the
      global head.
    global_loss: Loss of the global head: (labels, outputs of a batch) -> one
      loss per example.
    shared_loss: Loss of all heads that are shared across sub-populations, which
      forms embeddings; `global_loss` if None.
    prototypes: Name of the vectors of a `layers.Centers`, a GLOBAL variable
      `[K, size]`; '' if the model has none.
    sub_population: (labels of a batch) -> the index of the client's true
      sub-population, from 0: for clients that know it.
    liked_type: (labels of a batch) -> the index of the sub-population that
      likes such examples; -1 where the client does not like the example.
    is_prototypical: (labels of a batch) -> True if the client is prototypical
      and so knows its sub-population.
  """

  embedding: str
  global_head: str
  global_loss: losses.LossFn
  shared_loss: losses.LossFn | None = None
  prototypes: str = ''
  sub_population: Callable[[Any], tf.Tensor] | None = None
  liked_type: Callable[[Any], tf.Tensor] | None = None
  is_prototypical: Callable[[Any], tf.Tensor] | None = None


class Assignment(NamedTuple):
  """An assignment of clients to sub-populations, section 3.3.

  Attributes:
    assign: Chooses the head; None if each client has its own.
    before: Phases before the choice.
    after: Phases after all training.
    reassign: How clients would choose their head after the round, if heads
      follow clients.
    statistics: What clients send about it besides their update.
    server_optimizers: Regular expression over whole variable names to the
      server optimizer of these variables, instead of that of all others.
  """

  assign: groups.Assign | None
  before: tuple[Phase, ...] = ()
  after: tuple[Phase, ...] = ()
  reassign: groups.Assign | None = None
  statistics: tuple[Statistic, ...] = ()
  server_optimizers: Mapping[str, Optimizer] = types.MappingProxyType({})


# Each client has its own head, a LOCAL one: FedEmbed-Personal. With
# `OWN_HEAD._replace(before=(Phase(train=(LOCAL,), variable_filter='head/.*',
# optimizer=Exact()),))` it is solved for before the client trains.
OWN_HEAD = Assignment(None)


def by_type(parts: FedEmbedVariables) -> Assignment:
  """Assign clients to the sub-population that they know: FedEmbed-Type."""
  sub_population = _known(parts)
  return Assignment(groups.by_attribute(lambda held: sub_population(held['y'])))


def by_prototype(
  parts: FedEmbedVariables,
  *,
  margin: float = 1.0,
  steps: int = 10,
  optimizer: Optimizer | None = None,
  forming: Phase | None = None,
  client_learning_rate: float = 0.1,
  server_learning_rate: float | None = None,
) -> Assignment:
  """Assign clients to the nearest prototype: FedEmbed-Prototype, section 3.3.2.

  First they pull their embedding towards the prototypes of the types they like
  and away from another prototype, sampled for each example (Eq. 1; Algorithm 1,
  lines 9 and 10). Prototypical clients do not: they belong to their
  sub-population, and pull its prototype towards their embedding.

  Args:
    parts: The parts of the model.
    margin: alpha of Eq. 1, in squared distance.
    steps: Steps on all of a client's examples. With 0, a client joins the
      prototype nearest to its embedding as formed before, so that only
      prototypical clients use their likes.
    optimizer: The optimizer of these steps; SGD with rate 0.1 by default.
    forming: How clients form their embedding before, by
      `FedEmbedVariables.shared_loss`; not at all by default.
    client_learning_rate: The fraction of the way from a prototype to its
      embedding that a prototypical client sends.
    server_learning_rate: Rate of plain gradient descent on the prototypes by
      the aggregated moves; with None the server's optimizer moves them.
  """
  distances, sub_population = _distances(parts), _known(parts)
  is_prototypical = _told(
    parts.is_prototypical, 'is_prototypical', 'whether they are prototypical'
  )
  triplet = triplet_loss(parts, margin)
  liked_type = _told(parts.liked_type, 'liked_type', 'what they like')

  def of_others(client: ClientContext) -> tf.Tensor:
    batch = batch_of(client)
    loss = tf.where(is_prototypical(batch.y), 0.0, triplet(client))
    return batch.mean(loss, among=liked_type(batch.y) >= 0)

  def to_own(client: ClientContext) -> tf.Tensor:
    labels, number = batch_of(client).y, client.model.num_groups
    own = tf.one_hot(sub_population(labels)[0], number)
    own = tf.where(is_prototypical(labels)[0], own, 0.0)
    return 0.5 * tf.reduce_sum(own * distances(client))

  def choose(client: ClientContext) -> tf.Tensor:
    labels = client.examples['y']
    return tf.where(
      is_prototypical(labels)[0],
      tf.cast(sub_population(labels)[0], tf.int32),
      nearest.choose(client),
    )

  nearest = groups.nearest(parts.embedding, parts.prototypes)
  pull = Phase(
    train=(LOCAL,),
    variable_filter=parts.embedding,
    terms=(of_others,),
    use_model_loss=False,
    optimizer=optimizer or sgd(0.1),
    batch_size=None,
    epochs=max(steps, 1),
    max_steps=steps,
  )
  return Assignment(
    groups.Assign(choose),
    before=(*_formed(parts, forming), pull),
    after=(prototype_phase(parts, to_own, client_learning_rate),),
    server_optimizers=prototype_optimizers(parts, server_learning_rate),
  )


def by_map(
  parts: FedEmbedVariables,
  *,
  forming: Phase | None = None,
  client_learning_rate: float = 0.1,
  server_learning_rate: float | None = None,
  radius: float = 1.0,
  rows: int = 1,
  follow_nearest: bool = False,
) -> Assignment:
  """Assign clients to the nearest node of a self-organizing map: FedEmbed-SOM.

  Each client pulls the nearest node and its neighbours on a lattice towards its
  embedding by Kohonen's rule, and the server averages these moves like all
  others: the batch form of the map, which can be noised. Heads follow the
  clients from node to node, for which clients send how they moved.

  Args:
    parts: The parts of the model; its prototypes are the nodes.
    forming: As for `by_prototype`.
    client_learning_rate: The fraction of the way that a node moves.
    server_learning_rate: Rate of plain gradient descent on the nodes by the
      aggregated moves; 1 applies their mean over all clients of the cohort, few
      of which may have moved a node. With None the server's optimizer moves
      them; an adaptive one does not move them to their clients.
    radius: Standard deviation of the neighbourhood, in nodes. At infinity each
      client moves all nodes equally; at 0 only the nearest.
    rows: Rows of the lattice, with `K / rows` nodes each.
    follow_nearest: Whether each node makes the move of the single client that
      is nearest to it, as section 3.3.1 prints; with None for the server's rate
      all of it. No noise covers this.
  """
  nearest = groups.nearest(parts.embedding, parts.prototypes)
  joined = Assignment(nearest, _formed(parts, forming), reassign=nearest)
  if follow_nearest:
    near = groups.neighbourhood(radius, rows)
    rate = 1.0 if server_learning_rate is None else server_learning_rate
    moves = _following_nearest(parts, near, rate * client_learning_rate)
    return joined._replace(statistics=(moves,))
  pull = map_loss(parts, radius, rows)
  return joined._replace(
    after=(prototype_phase(parts, pull, client_learning_rate),),
    server_optimizers=prototype_optimizers(parts, server_learning_rate),
  )


def prototype_optimizers(
  parts: FedEmbedVariables, rate: float | None
) -> dict[str, Optimizer]:
  """Return the server optimizer of the prototypes, for `Assignment`.

  Args:
    parts: The parts of the model.
    rate: The rate of plain gradient descent; None for no separate optimizer.
  """
  return {} if rate is None else {parts.prototypes: sgd(rate)}


def embedding_phase(parts: FedEmbedVariables, how: Phase) -> Phase:
  """Return the phase in which clients form their embedding by the shared heads.

  Args:
    parts: The parts of the model.
    how: The phase's optimizer, batches and epochs.
  """
  how = phases.changed(how, train=(LOCAL,), measured=False)
  if how.variable_filter is not None or how.loss is not None:
    raise phases.PhaseError(
      f'{how}: which variables form an embedding, and by which loss, follows '
      'from `FedEmbedVariables`. Leave variable_filter and loss out.'
    )
  loss = parts.shared_loss or parts.global_loss
  return phases.changed(how, variable_filter=parts.embedding, loss=loss)


def _formed(parts: FedEmbedVariables, how: Phase | None) -> tuple[Phase, ...]:
  return (embedding_phase(parts, how),) if how else ()


def prototype_phase(
  parts: FedEmbedVariables, term: phases.Term, rate: float
) -> Phase:
  """Return the phase in which clients compute their moves of the prototypes.

  Args:
    parts: The parts of the model.
    term: The term that they minimize.
    rate: Rate of their single step.
  """
  return Phase(
    train=(GLOBAL,),
    variable_filter=parts.prototypes,
    terms=(term,),
    use_model_loss=False,
    optimizer=sgd(rate),
    batch_size=None,
  )


def triplet_loss(
  parts: FedEmbedVariables, margin: float
) -> Callable[[ClientContext], tf.Tensor]:
  """Return Eq. 1: `max(0, |e_u - e_p|^2 - |e_u - e_n|^2 + margin)`, `[batch]`.

  The prototype p is that of the type of a liked example, and n is sampled from
  all others. Examples that the client does not like have none: their 0 is left
  out of means.

  Args:
    parts: The parts of the model.
    margin: alpha.
  """
  distances = _distances(parts)
  liked_type = _told(parts.liked_type, 'liked_type', 'what they like')

  def loss(client: ClientContext) -> tf.Tensor:
    liked = liked_type(batch_of(client).y)
    number = client.model.num_groups
    draws = random_bits.uniform(client.seed, [tf.shape(liked)[0], number])
    own = tf.one_hot(liked, number)
    other = tf.one_hot(tf.argmax(tf.where(own > 0, -1.0, draws), -1), number)
    gap = tf.reduce_sum((own - other) * distances(client), -1)
    return tf.where(liked < 0, 0.0, tf.nn.relu(gap + margin))

  return loss


def map_loss(
  parts: FedEmbedVariables, radius: float, rows: int = 1
) -> phases.Term:
  """Return half the squared distances to all nodes, weighted by neighbourhood.

  Its gradient at a node is Kohonen's step back, `neighbourhood * (node - e)`.

  Args:
    parts: The parts of the model.
    radius: Standard deviation of the neighbourhood, in nodes.
    rows: Rows of the lattice.
  """
  near = groups.neighbourhood(radius, rows)
  distances_of = _distances(parts)

  def loss(client: ClientContext) -> tf.Tensor:
    distances = distances_of(client)
    return 0.5 * tf.reduce_sum(near(distances) * distances)

  return loss


def _following_nearest(
  parts: FedEmbedVariables, near: Callable[[tf.Tensor], tf.Tensor], rate: float
) -> Statistic:
  """Return the statistic by which each node follows the client nearest to it.

  Clients send how near they are to each node and how it would move, and the
  move of the nearest client is applied: FedEmbed's section 3.3.1.
  """
  nodes = parts.prototypes

  def moves(client: ClientContext) -> dict[str, tf.Tensor]:
    way = client.weight(LOCAL, parts.embedding) - client.weight(GLOBAL, nodes)
    distances = tf.reduce_sum(tf.square(way), -1)
    # Clients that do not count send zeros, which are never the best.
    scores = 1.0 / (1.0 + distances)
    return collections.OrderedDict(
      scores=scores, moves=rate * near(distances)[:, tf.newaxis] * way
    )

  def update(server: Server, best: Any) -> Server:
    moved = server.weights[GLOBAL][nodes] + best['moves']
    return server.with_solved({nodes: moved}, server.state, tf.constant(True))

  return Statistic('nodes', moves, join=BestMovesFactory(), update=update)


def _distances(
  parts: FedEmbedVariables,
) -> Callable[[ClientContext], tf.Tensor]:
  """Return the squared distances `[K]` of an embedding to all prototypes."""
  if not parts.prototypes:
    raise groups.GroupError(
      'Clients are to be assigned by prototypes. Say in '
      '`FedEmbedVariables(prototypes=...)` which variable of the model holds '
      'them.'
    )
  return lambda client: groups.squared_distances(
    client.weight(LOCAL, parts.embedding),
    client.weight(GLOBAL, parts.prototypes),
  )


def _known(parts: FedEmbedVariables) -> Any:
  return _told(parts.sub_population, 'sub_population', 'their sub-population')


def _told(read: Any, name: str, what: str) -> Any:
  if not read:
    raise groups.GroupError(
      f'Clients are to know {what}. Say in `FedEmbedVariables({name}=...)` how '
      'it is read from their labels.'
    )
  return read
