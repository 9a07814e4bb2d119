"""PFedKM as in FedEmbed's Table 1: k-means over the users' gradients.

After Tang et al. (2021): the heads of a shared encoder belong to clusters of
clients, and k-means over the clients' gradients finds the clusters. A client
computes the gradient of the whole model, at the weights that all clients of the
round received, joins the nearest center, and trains the encoder and the head of
that cluster. So that all gradients are of the same model, the encoder has one
more head, which all clients share.

`gradients=HEAD` is ours and not the paper's: it clusters the gradient of only a
linear head that is zero for all clients, a few numbers that depend on little
but the client's likes.

Deviations: k-means takes one step per round, from the centers of the previous
round and over only the cohort, instead of a full run over all users. So centers
are weights at the server like others, clients send how they would move them,
and the server need not see a single client's gradient.
"""

import tensorflow as tf

from tff_partial import assignments
from tff_partial import client_state
from tff_partial import contexts
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import phases
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import server_optimizers
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP
from tff_partial.tiers import LOCAL

# Clustered gradients: of the whole model, or of only a linear head.
MODEL, HEAD = 'model', 'head'
# Key of a client's negative gradient.
_STEP = 'step'

# A client remembers only its cluster, for analysis. The linear head is never
# trained.
_CLIENT_STATE = {
  MODEL: client_state.remember_group(client_state.stateless),
  HEAD: client_state.remember_group(client_state.frozen_init),
}
_TIER = {MODEL: GLOBAL, HEAD: LOCAL}


def _clusters(
  parts: assignments.FedEmbedVariables,
  gradients: str,
  rate: float,
  on: splits.Part = splits.everything(),
) -> tuple[tuple[contexts.Compute, groups.Assign], Phase]:
  """Return a client's choice before it trains, and its moves of the centers."""
  if gradients not in _TIER:
    raise groups.GroupError(
      f'gradients={gradients!r} is none of {list(_TIER)}.'
    )

  def step(client: ClientContext) -> tf.Tensor:
    """Return the negative gradient of the clustered tier, as a vector."""
    found = client.gradients(_TIER[gradients], loss=parts.global_loss)
    step = -tf.concat(
      [
        tf.reshape(tensor, [-1])
        for name, tensor in found.items()
        if name != parts.prototypes
      ],
      0,
    )
    size = client.weight(GLOBAL, parts.prototypes).shape[-1]
    if step.shape[0] != size:
      raise groups.GroupError(
        f'{parts.prototypes!r} holds centers of {size} numbers, but the '
        f'gradient of the other {_TIER[gradients]} variables has '
        f'{step.shape[0]}.'
      )
    return step

  def distances(client: ClientContext) -> tf.Tensor:
    return groups.squared_distances(
      client.computed[_STEP], client.weight(GLOBAL, parts.prototypes)
    )

  def nearest(client: ClientContext) -> tf.Tensor:
    return tf.argmin(distances(client), output_type=tf.int32)

  def to_nearest(client: ClientContext) -> tf.Tensor:
    return 0.5 * tf.gather(distances(client), client.group)

  return (
    (contexts.Compute(_STEP, step, on), groups.Assign(nearest, on)),
    phases.placed(assignments.prototype_phase(parts, to_nearest, rate), on),
  )


def build_p_fed_km(
  model: models.PartialModel,
  *,
  parts: assignments.FedEmbedVariables,
  gradients: str = MODEL,
  training: Phase = Phase(),
  client_learning_rate: float = 1.0,
  server_learning_rate: float | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build PFedKM: cluster clients by gradient, train the cluster's head.

  Args:
    model: The model, whose `group` is the head of a cluster. With MODEL it has
      another head that all clients share, and its loss trains both. With HEAD
      its local variable is a linear head that is zero for all clients and never
      trained.
    parts: `prototypes` are the centers, `global_loss` the loss of the shared or
      of the linear head, whose gradient is clustered.
    gradients: MODEL or HEAD, the variables of the gradient.
    training: How clients train the encoder and the head of their cluster.
    client_learning_rate: The fraction of the way to its gradient that a client
      moves the center.
    server_learning_rate: Rate of plain gradient descent on the centers by the
      aggregated moves; with None the server's optimizer moves them.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_p_fed_km(centers, parts=of_centers)

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  on = changed(training).on
  choice, moves = _clusters(parts, gradients, client_learning_rate, on)
  return compose(
    model,
    client_state=_CLIENT_STATE[gradients],
    work=[
      *choice,
      changed(
        training,
        train=(GLOBAL, GROUP),
        variable_filter=(
          f'(?!{parts.prototypes}$)({training.variable_filter or ".*"})'
        ),
        measured=True,
      ),
      moves,
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizers.by_name(
      assignments.prototype_optimizers(parts, server_learning_rate),
      server_optimizer or sgd(1.0),
    ),
  )


def build_p_fed_km_eval(
  model: models.PartialModel,
  *,
  parts: assignments.FedEmbedVariables,
  gradients: str = MODEL,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with the head of the cluster of clients' gradients.

  Args:
    model: The model.
    parts: The parts of the model.
    gradients: MODEL or HEAD, as in training.
    split: Support set, for the gradient, and query set; the two halves by
      default.

  Example:
    >>> evaluation = baselines.build_p_fed_km_eval(centers, parts=of_centers)

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  choice, _ = _clusters(parts, gradients, 0.0)
  return evaluation.build_query_evaluation(
    model, client_state=_CLIENT_STATE[gradients], before=choice, split=split
  )
