"""FedSGD (McMahan et al., AISTATS 2017), section 2: FedAvg with E=1, B=inf.

A client's examples are one batch, including padding, so more padding may change
the last bits, unlike with all other methods.
"""

from tff_partial.composition import Aggregation
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_sgd(
  model: models.PartialModel,
  *,
  client_learning_rate: float = 0.1,
  on: splits.Part = splits.everything(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedSGD: each client sends one gradient of all its examples.

  Args:
    model: The model, without local variables.
    client_learning_rate: eta of the paper. For another optimizer at the server,
      pass 1 and the `server_optimizer`, which then applies the mean gradient.
    on: The examples of the gradient.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_fed_sgd(whole, client_learning_rate=0.1)

  Raises:
    CompositionError: If the arguments do not fit together.
  """
  return partial_training.build_global(
    model,
    training=Phase(on=on, optimizer=sgd(client_learning_rate), batch_size=None),
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_fed_sgd_eval = partial_training.build_evaluation
