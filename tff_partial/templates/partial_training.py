"""Training of local variables, which are kept, and global ones, which are sent.

They are trained simultaneously, as in FURL, FedPer, FedSim and LG-FedAvg, or in
turn, as in FedAlt and FedRep. The papers differ in the names of the two, in the
part of a model that is local, and in their treatment of new clients.
"""

from collections.abc import Sequence
import dataclasses
from typing import Unpack

from tff_partial import evaluation
from tff_partial import phases
from tff_partial.client_state import persist_local
from tff_partial.client_statistics import Statistic
from tff_partial.composition import compose
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_simultaneous(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  statistics: Sequence[Statistic] = (),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build a process that trains all variables together, and keeps local ones.

  Args:
    model: The model; without local variables, this is FedAvg.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs. Local variables whose optimizer is `Exact` are solved for before
      the others are trained.
    statistics: What clients send besides updates, as for `compose`.
    **joining: How the server aggregates updates, as for `compose`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=persist_local,
    work=phases.exact_first(training, train=(GLOBAL, LOCAL), measured=True),
    statistics=statistics,
    **joining,
  )


def build_alternating(
  model: models.PartialModel,
  *,
  personal: Phase,
  shared: Phase,
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build a process that trains the local variables, then the global ones.

  Args:
    model: The model; without local variables, this is FedAvg.
    personal: How the local variables are trained while the others are fixed.
    shared: How the global variables are trained while the others are fixed.
    **joining: How the server aggregates updates, as for `compose`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=persist_local,
    work=[
      dataclasses.replace(personal, train=(LOCAL,)),
      dataclasses.replace(shared, train=(GLOBAL,), measured=True),
    ],
    **joining,
  )


def build_evaluation(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the local variables that clients remember.

  With `personalise`, they are trained before, while the global ones stay fixed.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Raises:
    PhaseError: If the arguments do not fit together.
  """
  return evaluation.build_query_evaluation(
    model, client_state=persist_local, train=(LOCAL,), **measuring
  )
