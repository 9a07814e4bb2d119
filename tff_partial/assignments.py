"""How clients come to the sub-population whose head they use.

The ways of FedEmbed's section 3.3: they know it, they join the nearest of the
known prototypes, or the nearest node of a self-organizing map.

Deviations: Eq. 1 has the usual hinge. Prototypes learn from the same triplet
loss as the embeddings: the paper says only that they are updated along with the
global model.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple, TypedDict

import tensorflow as tf

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import models
from tff_partial import phases
from tff_partial import splits
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


@dataclasses.dataclass(frozen=True)
class Parts:
  """Which variables and outputs of a model play which part.

  The model's own loss is that of the sub-population's head and of the type
  head. Its outputs may be of any structure.

  Attributes:
    embedding: Name of the personal embedding, a LOCAL variable `[size]`.
    global_head: Regular expression over whole names of the variables of the
      global head.
    global_loss: Its loss: labels and outputs of a batch to one an example.
    prototypes: Name of the vectors of a `layers.Prototypes`, a GLOBAL variable
      `[K, size]`; '' if the model has none.
    nearness: A model's outputs to the two outputs of that layer.
    sub_population: Labels of a batch to the number of the client's true
      sub-population, from 0, which it knows.
  """

  embedding: str
  global_head: str
  global_loss: models.LossFn
  prototypes: str = ''
  nearness: Callable[[Any], tuple[tf.Tensor, tf.Tensor]] | None = None
  sub_population: Callable[[Any], tf.Tensor] | None = None


class Assignment(NamedTuple):
  """How clients come to their sub-population, section 3.3.

  Attributes:
    assign: Chooses the head; None if each client has a head of its own.
    before: Phases that come before.
    after: Phases that come after all training.
    rematch: How clients would choose their head after the round, if heads are
      to follow them.
  """

  assign: groups.Assign | None
  before: tuple[Phase, ...] = ()
  after: tuple[Phase, ...] = ()
  rematch: groups.Assign | None = None


# Each client has a head of its own, a LOCAL one: FedEmbed-Personal.
OWN_HEAD = Assignment(None)


def by_type(parts: Parts) -> Assignment:
  """Each client knows its sub-population: FedEmbed-Type."""
  sub_population = _known(parts)
  return Assignment(groups.by_attribute(lambda held: sub_population(held['y'])))


def by_prototype(
  parts: Parts,
  *,
  margin: float = 1.0,
  steps: int = 10,
  optimizer: Optimizer | None = None,
  move_prototypes: bool = True,
) -> Assignment:
  """Clients join the nearest prototype: FedEmbed-Prototype, section 3.3.2.

  First they draw their embedding to the prototype of what they like and away
  from one other, which is drawn for each example (Eq. 1; Algorithm 1, lines 9
  and 10).

  Args:
    parts: The parts of the model.
    margin: alpha of Eq. 1, in squared distance.
    steps: Steps on all of a client's examples.
    optimizer: Takes them; SGD with rate 0.1.
    move_prototypes: Whether the client's copies of the prototypes move as well;
      how they moved is sent.
  """
  train = (GLOBAL, LOCAL) if move_prototypes else (LOCAL,)
  only = '|'.join([*([parts.prototypes] * move_prototypes), parts.embedding])
  pull = Phase(
    train=train,
    only=only,
    loss=triplet_loss(parts, margin),
    optimizer=optimizer or sgd(0.1),
    batch_size=None,
    epochs=max(steps, 1),
    max_steps=steps,
  )
  return Assignment(
    groups.nearest(parts.embedding, parts.prototypes), before=(pull,)
  )


def by_map(
  parts: Parts, *, rate: float = 0.1, radius: float = 1.0, rows: int = 1
) -> Assignment:
  """Clients join the nearest node of a self-organizing map: FedEmbed-SOM.

  Each client draws the nodes towards its embedding, the nearest one and its
  neighbours on a lattice by Kohonen's rule, and the server averages these moves
  as it does all others: the batch form of the map, which noise can cover.
  `aggregators.smallest` joins them as section 3.3.1 says: at an infinite
  radius, where clients send a share of the way from each node to their
  embedding, the nearest client's is the shortest. Heads follow the clients from
  node to node, for which clients say how they moved.

  Args:
    parts: The parts of the model; its prototypes are the nodes.
    rate: Which share of the way a node goes.
    radius: Standard deviation of the neighbourhood, in nodes. At infinity each
      client moves all nodes alike; at 0 only the nearest.
    rows: Rows of the lattice; of `K / rows` nodes each.
  """
  nearest = groups.nearest(parts.embedding, parts.prototypes)
  return Assignment(
    nearest,
    rematch=nearest,
    after=(
      Phase(
        train=(GLOBAL,),
        only=parts.prototypes,
        loss=map_loss(parts, radius, rows),
        optimizer=sgd(rate),
        batch_size=None,
      ),
    ),
  )


def triplet_loss(parts: Parts, margin: float) -> models.LossFn:
  """Eq. 1: `max(0, |e_u - e_p|^2 - |e_u - e_n|^2 + margin)`.

  Args:
    parts: The parts of the model.
    margin: alpha.
  """
  nearness, sub_population = _nearness(parts), _known(parts)

  def loss(labels: Any, outputs: Any) -> tf.Tensor:
    distances, draws = nearness(outputs)
    number = distances.shape[-1]
    own = tf.one_hot(sub_population(labels), number)
    other = tf.one_hot(
      tf.argmax(tf.where(own > 0, draws.dtype.min, draws), -1), number
    )
    gap = tf.reduce_sum((own - other) * distances, -1)
    return tf.nn.relu(gap + margin)

  return loss


def map_loss(parts: Parts, radius: float, rows: int = 1) -> models.LossFn:
  """Half the squared distances to all nodes, by how near they are to the best.

  Its gradient in a node is Kohonen's step back, `neighbourhood * (node - e)`.

  Args:
    parts: The parts of the model.
    radius: Standard deviation of the neighbourhood, in nodes.
    rows: Rows of the lattice.
  """
  nearness = _nearness(parts)

  def loss(labels: Any, outputs: Any) -> tf.Tensor:
    del labels
    distances, _ = nearness(outputs)
    number = distances.shape[-1]
    best = tf.argmin(distances, -1, output_type=tf.int32)
    if not radius:
      weights = tf.one_hot(best, number)
    else:
      place = tf.range(number)
      columns = -(-number // rows)
      lattice = tf.stack([place // columns, place % columns], -1)
      steps = tf.gather(lattice, best)[:, tf.newaxis] - lattice
      squares = tf.cast(tf.reduce_sum(tf.square(steps), -1), tf.float32)
      weights = tf.exp(-squares / (2.0 * radius**2))
    return 0.5 * tf.reduce_sum(weights * distances, -1)

  return loss


def _nearness(parts: Parts) -> Any:
  if not (parts.prototypes and parts.nearness):
    raise groups.GroupError(
      'Clients are to be assigned by prototypes. Say in `Parts` which variable '
      'of the model holds them, and which of its outputs how near they are.'
    )
  return parts.nearness


def _known(parts: Parts) -> Any:
  if not parts.sub_population:
    raise groups.GroupError(
      'Clients are to know their sub-population. Say in `Parts` how it is read '
      'from their labels.'
    )
  return parts.sub_population


class Measuring(TypedDict, total=False):
  """Whom an evaluation measures: what `build_evaluation` takes."""

  split: splits.Split | None
  measure_batch_size: int


def work(
  assignment: Assignment, training: phases.Work, on: splits.Part | None = None
) -> phases.Work:
  """The work of a client that comes to its sub-population, then trains.

  Args:
    assignment: How it does.
    training: What it does then.
    on: The examples by which it does, if not those of the assignment's phases.
  """

  def placed(phases: tuple[Phase, ...]) -> list[Phase]:
    return [dataclasses.replace(p, on=on or p.on) for p in phases]

  chosen = [assignment.assign] if assignment.assign else []
  return [
    *placed(assignment.before),
    *chosen,
    *training,
    *placed(assignment.after),
  ]


def build_evaluation(
  model: models.PartialModel,
  memory: client_state.Memory,
  assignment: Assignment,
  *,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Clients come to their sub-population by the support set; query is measured.

  Args:
    model: The model.
    memory: What clients remember.
    assignment: How they come to their sub-population.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; changes no result.
  """
  support, query = split or splits.halves()
  measure = Phase(
    train=(), on=query, batch_size=measure_batch_size, measured=True
  )
  before = work(assignment._replace(after=()), [], support)
  return evaluation.build_evaluation(
    model, memory=memory, work=[*before, measure]
  )
