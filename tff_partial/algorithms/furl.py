"""Federated User Representation Learning, sections 3.4 and 3.5.

The paper calls the global variables federated parameters, and the local ones,
such as the embedding of the client's user, private parameters. A client trains
both jointly, sends the former, and keeps the latter until its next round.

Deviations: a client initializes its private parameters itself; for the paper's
"default value" use a deterministic initializer, or let the clients learn one
(`layers.PrivateVector`). Clients process their examples in order unless
`training` shuffles. A client whose update is not finite does not count and
keeps its state. New users, which the paper leaves to future work, have initial
values; with `personalise`, they train these before an evaluation.
"""

from tff_partial.client_statistics import Statistic
from tff_partial.composition import Aggregation
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_furl(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  private_rule: Statistic | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FURL: train both kinds of parameters jointly, keep private ones.

  With FedAvg at the server, this is equivalent to FedAvg with the private
  parameters of all users at the server: exactly under Eq. 6; under Eq. 7 as if
  each user's were averaged only over their owner.

  Args:
    model: The model; its local variables are the private parameters.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    private_rule: The rule `a_p` of Eq. 3. By default a client keeps its trained
      parameters (Eq. 7); `client_statistics.SCALED_BY_SHARE` is Eq. 6.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_furl(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_simultaneous(
    model,
    training=training,
    statistics=[private_rule] if private_rule else [],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_furl_eval = partial_training.build_evaluation
