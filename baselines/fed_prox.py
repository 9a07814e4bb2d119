"""FedProx (Li et al., MLSys 2020), Algorithm 2.

It uses `terms.proximal`: the term of TFF 0.87's own FedProx has the opposite
sign and drives clients away from the weights that they received.

Deviation: all clients do the same work, `training`; the paper's stragglers,
which do less, are not simulated.
"""

from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import proximal

# mu, by default.
PENALTY = 0.1


def build_fed_prox(
  model: models.PartialModel,
  *,
  penalty: float = PENALTY,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedProx: train the global weights, kept near the received ones.

  Args:
    model: The model, without local variables.
    penalty: mu of the paper; 0 for FedAvg.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_fed_prox(whole, penalty=0.1)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  return compose(
    model,
    work=[partial_training.trained(training, proximal(penalty))],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_fed_prox_eval = partial_training.build_evaluation
