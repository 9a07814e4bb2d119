"""FedRep (Collins et al., ICML 2021), Algorithm 1.

The model's local variables are the head, its global ones the representation.
It is FedAlt with many steps on the head. Deviations: each client initializes
its head itself; clients are weighted by their examples unless
`client_weighting` says otherwise.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_rep(
  model: models.PartialModel,
  *,
  head: Phase = Phase(epochs=10),
  representation: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedRep: train heads, then the representation.

  Args:
    model: The model; without local variables, this is FedAvg.
    head: How the head is trained while the representation is fixed.
    representation: How the representation is trained while the head is fixed.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_rep(
    ...   model, head=Phase(epochs=10), representation=Phase()
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_alternating(
    model, personal=head, shared=representation, **joining
  )


def build_fed_rep_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the heads that clients remember.

  With `personalise`, the head is trained before while the representation stays
  fixed, as in the paper for new clients.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_rep_eval(model)
  """
  return partial_training.build_evaluation(model, **measuring)
