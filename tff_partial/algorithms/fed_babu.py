"""FedBABU (Oh et al., ICLR 2022), Algorithm 1.

The model's local variables are the head, its global ones the body. All clients
have the same randomly initialized head, which is fixed while the body is
trained.
"""

from tff_partial import evaluation
from tff_partial.client_state import frozen_init
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fed_babu(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedBABU: train the body under a fixed head, the same for all.

  Args:
    model: The model; without local variables, this is FedAvg.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_babu(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=frozen_init,
    work=[partial_training.trained(training)],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_fed_babu_eval(
  model: models.PartialModel,
  *,
  personalise: Phase = Phase(),
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with body and head tuned by each client.

  It does not need client state, so it also measures new clients.

  Args:
    model: The model.
    personalise: How clients tune. The paper compares the full model, the body
      and the head: choose by variable names, `variable_filter=...`.
    split: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_babu_eval(
    ...   model, personalise=Phase(epochs=5)
    ... )
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=frozen_init,
    train=(GLOBAL, LOCAL),
    personalise=personalise,
    split=split,
  )
