"""FedSim (Pillutla et al., ICML 2022), with LocalSim as the local update.

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


def build_fed_sim(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedSim: train shared and personal parameters simultaneously.

  Args:
    model: The model; without local variables, this is FedAvg.
    training: How a client trains. gamma_u and gamma_v of the paper are
      `optimizer={GLOBAL: sgd(gamma_u), LOCAL: sgd(gamma_v)}`.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_sim(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_simultaneous(
    model, training=training, **joining
  )


def build_fed_sim_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the personal parameters that clients remember.

  With `personalise`, these are tuned before while the shared ones stay fixed,
  as in the final step of the paper's experiments; new clients need it.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_sim_eval(model)
  """
  return partial_training.build_evaluation(model, **measuring)
