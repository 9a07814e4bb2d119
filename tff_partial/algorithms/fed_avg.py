"""FedAvg (McMahan et al., AISTATS 2017), Algorithm 1.

Nothing is local: a model with local variables is refused, since they would not
be trained. If each user has a row of a table at the server (footnote 4 of the
FedRecon paper), that is FedAvg on a model which reads the user's index; see
`centralized.number_clients`.

Deviation: clients process their examples in order unless `training` shuffles;
the paper uses random batches.
"""

import dataclasses

from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL


def build_fed_avg(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedAvg: train the global weights, and average them at the server.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_avg(whole, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[dataclasses.replace(training, train=(GLOBAL,), measured=True)],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_fed_avg_eval = partial_training.build_evaluation
