"""PFedKM as FedEmbed's Table 1 has it: k-means over the users' gradients.

After Tang et al. (2021): the heads of a shared encoder belong to clusters of
clients, and k-means over the clients' gradients finds the clusters. A client
computes the gradient of a head that begins at zero for everybody, joins the
nearest center, and trains the encoder and the head of that cluster.

Deviations: k-means goes one step a round, from the centers of the round before
and over the cohort alone, instead of from the beginning over all users at once.
So centers are weights at the server like others, clients send how they would
move them, and nobody need see a single client's gradient. Only the gradient of
a head is clustered, at a point that is the same for all, not that of the whole
model.
"""

import dataclasses
from typing import Unpack

from tff_partial import assignments
from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import compose
from tff_partial.processes import Joining
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP
from tff_partial.tiers import LOCAL

# Nobody remembers a gradient, but which cluster it led to can be looked at.
_MEMORY = client_state.remember_group(client_state.forget)


def _clusters(parts: assignments.Parts, rate: float) -> assignments.Assignment:
  gradient = Phase(
    train=(LOCAL,),
    only=parts.embedding,
    loss=parts.global_loss,
    optimizer=sgd(1.0),
    batch_size=None,
  )
  nearest = assignments.by_map(parts, rate=rate, radius=0.0)
  # Clusters move little by little, and keep their heads.
  return nearest._replace(before=(gradient,), rematch=None)


def build_p_fed_km(
  model: models.PartialModel,
  *,
  parts: assignments.Parts,
  training: Phase = Phase(),
  rate: float = 1.0,
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Clients join the cluster of those with like gradients, and train its head.

  Args:
    model: The model. Its local variable is the negative gradient of a linear
      head, as one step of rate 1 from zero finds it; its `group` is the head.
    parts: `embedding` is that variable, `global_loss` the loss of the linear
      head whose weights it is, `prototypes` the centers.
    training: How clients train the encoder and the head of their cluster.
    rate: Which share of the way to the mean of its members a center goes, times
      their share of the cohort.
    **joining: How the server joins updates, as for `compose`.

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  clusters = _clusters(parts, rate)
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
    **joining,
  )


def build_p_fed_km_eval(
  model: models.PartialModel,
  *,
  parts: assignments.Parts,
  **measuring: Unpack[assignments.Measuring],
) -> evaluation.Evaluation:
  """Clients are measured with the head of the cluster of their gradients.

  Args:
    model: The model.
    parts: Its parts.
    **measuring: As for `assignments.build_evaluation`.
  """
  return assignments.build_evaluation(
    model, _MEMORY, _clusters(parts, 0.0), **measuring
  )
