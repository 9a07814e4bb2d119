"""FedEmbed (Silva et al., 2022): personal embeddings and sub-population heads.

A client keeps a personal embedding. Its model reads the embedding and the
example, and has several heads on a shared encoder: one for each sub-population,
of which the client uses its own (GROUP), a global head for the same target, and
a head that predicts the type of the example. Section 3.4 and Algorithm 1:

- the losses of the sub-population's head and the type head train these heads,
  the encoder and the embedding;
- the global head's loss trains this head and, through the encoder, the
  embedding, but not the encoder (end of 3.2), which keeps the embeddings of all
  clients comparable.

Updates of all heads are averaged over all clients of the cohort, with zeros for
heads that a client did not use (line 25), so that the server need not know the
clients' sub-populations, and noise covers all heads equally. A client sends a
summand of this mean: seen by itself, it shows which head is not zero.

Deviations: updates descend, where Algorithm 1 prints a plus sign. A client
takes optimizer steps on the two sets of losses in turn on each batch, where
Algorithm 1 sums gradients at one point; what layers or `training.terms` add for
the embedding itself counts in both steps. For deviations from section 3.3 see
`assignments.py`.
"""

import collections

import tensorflow as tf

from tff_partial import assignments
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import random_bits
from tff_partial.assignments import Assignment
from tff_partial.assignments import FedEmbedVariables
from tff_partial.client_state import persist_local
from tff_partial.client_state import remember_group
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Interleaved
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import assigned_training
from tff_partial.templates import partial_training
from tff_partial.templates import server_optimizers
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP
from tff_partial.tiers import LOCAL


def build_fed_embed(
  model: models.PartialModel,
  *,
  parts: FedEmbedVariables,
  assignment: Assignment,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedEmbed: choose a sub-population, train head, encoder, embedding.

  Args:
    model: The model; the embedding is local, the sub-populations' head is its
      `group`, or also local with `OWN_HEAD`.
    parts: The parts of the model.
    assignment: How clients are assigned their sub-population: one of
      `assignments.py`.
    training: How clients train: optimizer, batches, epochs; its examples also
      decide the assignment. An optimizer of GLOBAL is also that of the
      sub-populations' heads. Weights that an `Exact` of LOCAL solves for come
      before the rest.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_embed(
    ...   heads, parts=parts, assignment=assignment
    ... )

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  _check_unfiltered(training)
  shared, own = training.optimizer_of(GLOBAL), training.optimizer_of(LOCAL)
  training = changed(
    training, optimizer={GLOBAL: shared, GROUP: shared, LOCAL: own}
  )
  tiers = (GLOBAL, GROUP, LOCAL) if assignment.assign else (GLOBAL, LOCAL)
  apart = '|'.join(filter(None, [parts.global_head, parts.prototypes]))
  *solved, heads = partial_training.exact_first(
    training, train=tiers, variable_filter=f'(?!({apart})$).*', measured=True
  )
  *_, global_head = partial_training.exact_first(
    training,
    train=(GLOBAL, LOCAL),
    variable_filter=f'{parts.global_head}|{parts.embedding}',
    loss=parts.global_loss,
  )
  reassign = assignment.reassign
  if reassign:
    reassign = assigned_training.placed(reassign, training.on)
  return compose(
    model,
    client_state=remember_group(persist_local),
    work=assigned_training.work(
      assignment, [*solved, Interleaved((heads, global_head))], training.on
    ),
    statistics=[
      *assignment.statistics,
      *([_following(reassign)] if reassign else []),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizers.by_name(
      assignment.server_optimizers, server_optimizer or sgd(1.0)
    ),
  )


def _following(reassign: groups.Assign) -> Statistic:
  """Make the weights of groups follow their clients, section 3.3.1.

  Clients send from which group to which they would move by the updated weights,
  and each group takes the weights of the group that most of its clients come
  from, but not the state of the server's optimizer for them.
  """

  def moves(client: ClientContext) -> tf.Tensor:
    known = client.on(reassign.on, random_bits.of_parts(client.seed))
    row, column = (
      tf.one_hot(group, client.model.num_groups, dtype=tf.int32)
      for group in (client.group, reassign.choose(known))
    )
    return tf.tensordot(row, column, axes=0)

  def follow(server: Server, moves: tf.Tensor) -> Server:
    weights = collections.OrderedDict(server.weights)
    weights[GROUP] = groups.inherit_weights(weights[GROUP], moves)
    return server._replace(weights=weights)

  return Statistic('moves', moves, update=follow, after_update=True)


def build_fed_embed_eval(
  model: models.PartialModel,
  *,
  parts: FedEmbedVariables,
  assignment: Assignment,
  personalise: Phase | None = None,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the heads of clients' sub-populations.

  Clients choose a head by their support set and the embedding that they
  remember. With `personalise`, for clients that never took part, they first
  train the embedding through the shared heads; with a head of their own, they
  train both.

  Args:
    model: The model.
    parts: The parts of the model.
    assignment: As for `build_fed_embed`.
    personalise: How new clients train their own weights; not at all by default.
    split: Support and query set; the two halves by default.

  Example:
    >>> evaluation = algorithms.build_fed_embed_eval(
    ...   heads, parts=parts, assignment=assignment
    ... )

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  if personalise:
    new = changed(personalise, train=(LOCAL,), measured=False)
    if assignment.assign:
      _check_unfiltered(personalise)
      new = assignments.embedding_phase(parts, personalise)
    assignment = assignment._replace(before=(new, *assignment.before))
  return assigned_training.build_evaluation(
    model, remember_group(persist_local), assignment, split=split
  )


def _check_unfiltered(how: Phase) -> None:
  """Refuse names of variables, which the roles of variables replace."""
  if changed(how).variable_filter is not None:
    raise PhaseError(
      f'variable_filter={how.variable_filter!r}: which variables each loss '
      'trains follows from `FedEmbedVariables`. Leave it out.'
    )
