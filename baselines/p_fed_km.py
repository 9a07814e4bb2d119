"""PFedKM as FedEmbed's Table 1 has it: k-means over the users' gradients.

After Tang et al. (2021): the heads of a shared encoder belong to clusters of
clients, and k-means over the clients' gradients finds the clusters. A client
computes the gradient of the whole model, at the weights that all clients of the
round received, joins the nearest center, and trains the encoder and the head of
that cluster. So that the gradient is of the same model for everybody, the
encoder has one more head, which all clients share.

`gradients=HEAD` is ours and not the paper's: it clusters the gradient of a
linear head alone that begins at zero for everybody, a few numbers that say
little but what the client likes.

Deviations: k-means goes one step a round, from the centers of the round before
and over the cohort alone, instead of from the beginning over all users at once.
So centers are weights at the server like others, clients send how they would
move them, and nobody need see a single client's gradient.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Unpack

import tensorflow as tf

from tff_partial import assignments
from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import groups
from tff_partial import models
from tff_partial import tiers
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import compose
from tff_partial.processes import Joining
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP
from tff_partial.tiers import LOCAL
from tff_partial.tiers import PERSONAL

# What is clustered: the gradient of the whole model, or of a linear head alone.
MODEL, HEAD = 'model', 'head'

# Nobody remembers a gradient, but which cluster it led to can be looked at.
_MEMORY = client_state.remember_group(client_state.forget)


def _of_head(
  parts: assignments.Parts, rate: float, server_rate: float | None
) -> assignments.Assignment:
  gradient = Phase(
    train=(LOCAL,),
    only=parts.embedding,
    loss=parts.global_loss,
    optimizer=sgd(1.0),
    batch_size=None,
  )
  nearest = assignments.by_map(
    parts, rate=rate, server_rate=server_rate, radius=0.0
  )
  # Clusters move little by little, and keep their heads.
  return nearest._replace(before=(gradient,), rematch=None)


def _of_model(
  parts: assignments.Parts, rate: float, server_rate: float | None
) -> assignments.Assignment:
  centers = parts.prototypes
  gradient = Phase(
    # A copy of what was received, which is a gradient away from it after a step
    # of rate 1.
    train=(PERSONAL,),
    only=f'(?!{centers}$).*',
    loss=parts.global_loss,
    optimizer=sgd(1.0),
    batch_size=None,
  )

  def distances(
    own: tiers.NamedTensors,
    received: tiers.NamedTensors,
    vectors: tf.Tensor,
  ) -> tf.Tensor:
    """Squared distances `[K]` of the negative gradient to the centers."""
    steps = [
      tf.reshape(own[name] - received[name], [-1])
      for name in received
      if name != centers
    ]
    step = tf.stop_gradient(tf.concat(steps, 0))
    if step.shape[0] != vectors.shape[-1]:
      raise groups.GroupError(
        f'{centers!r} holds centers of {vectors.shape[-1]} numbers, but the '
        f'gradient of the other {GLOBAL} variables has {step.shape[0]}.'
      )
    return groups.squared_distances(step, vectors)

  def choose(situation: groups.Situation) -> tf.Tensor:
    shared = situation.weights[GLOBAL]
    own = situation.weights[PERSONAL]
    return tf.argmin(
      distances(own, shared, shared[centers]), output_type=tf.int32
    )

  def to_nearest(
    weights: Mapping[str, tiers.NamedTensors],
    received: Mapping[str, tiers.NamedTensors],
  ) -> tf.Tensor:
    found = distances(
      weights[PERSONAL], received[GLOBAL], weights[GLOBAL][centers]
    )
    return 0.5 * tf.reduce_min(found)

  move = Phase(
    train=(GLOBAL,),
    only=centers,
    terms=(to_nearest,),
    with_loss=False,
    optimizer=sgd(rate),
    batch_size=None,
  )
  return assignments.Assignment(
    groups.Assign(choose),
    before=(gradient,),
    after=(move,),
    server_optimizers=assignments.moved_by(parts, server_rate),
  )


_CLUSTERS = {MODEL: _of_model, HEAD: _of_head}


def build_p_fed_km(
  model: models.PartialModel,
  *,
  parts: assignments.Parts,
  gradients: str = MODEL,
  training: Phase = Phase(),
  rate: float = 1.0,
  server_rate: float | None = None,
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Clients join the cluster of those with like gradients, and train its head.

  Args:
    model: The model, whose `group` is the head of a cluster. With MODEL it has
      another head that all clients share, and its loss trains both. With HEAD
      its local variable is the negative gradient of a linear head, as one step
      of rate 1 from zero finds it.
    parts: `prototypes` are the centers, `global_loss` the loss whose gradient
      is clustered: of the shared head, or of the linear head whose weights
      `embedding` is.
    gradients: MODEL or HEAD: of what.
    training: How clients train the encoder and the head of their cluster.
    rate: Which share of the way to its gradient a client would move the center.
    server_rate: Plain gradient descent with this rate moves the centers by the
      joined moves; None leaves them to the server's optimizer.
    **joining: How the server joins updates, as for `compose`.

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  clusters = _clusters(gradients)(parts, rate, server_rate)
  return compose(
    model,
    memory=_MEMORY,
    work=assignments.work(
      clusters,
      [
        dataclasses.replace(
          training,
          train=(GLOBAL, GROUP),
          only=f'(?!{parts.prototypes}$).*',
          measured=True,
        )
      ],
    ),
    **assignments.joining(clusters, joining),
  )


def build_p_fed_km_eval(
  model: models.PartialModel,
  *,
  parts: assignments.Parts,
  gradients: str = MODEL,
  **measuring: Unpack[assignments.Measuring],
) -> evaluation.Evaluation:
  """Clients are measured with the head of the cluster of their gradients.

  Args:
    model: The model.
    parts: Its parts.
    gradients: MODEL or HEAD, as in training.
    **measuring: As for `assignments.build_evaluation`.

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  clusters = _clusters(gradients)(parts, 0.0, None)
  return assignments.build_evaluation(model, _MEMORY, clusters, **measuring)


def _clusters(gradients: str) -> Callable[..., assignments.Assignment]:
  if gradients not in _CLUSTERS:
    raise groups.GroupError(
      f'gradients={gradients!r} is none of {list(_CLUSTERS)}.'
    )
  return _CLUSTERS[gradients]
