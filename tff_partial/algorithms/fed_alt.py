"""FedAlt (Pillutla et al., ICML 2022), with LocalAlt as the local update.

The paper's v are the local variables, its u the global ones. Deviations: each
client initializes its v itself, where the paper starts from a pretrained model;
clients are weighted by their examples unless `client_weighting` says otherwise.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_alt(
  model: models.PartialModel,
  *,
  personal: Phase = Phase(),
  shared: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedAlt: train personal parameters first, then shared ones.

  Args:
    model: The model; without local variables, this is FedAvg.
    personal: How v is trained while u is fixed: tau_v steps with gamma_v.
    shared: How u is trained while v is fixed: tau_u steps with gamma_u.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_alt(
    ...   model, personal=Phase(epochs=5), shared=Phase()
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_alternating(
    model, personal=personal, shared=shared, **joining
  )


def build_fed_alt_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the personal parameters that clients remember.

  With `personalise`, these are tuned before while the shared ones stay fixed,
  as in the final step of the paper's experiments; new clients need it.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_alt_eval(model)
  """
  return partial_training.build_evaluation(model, **measuring)
