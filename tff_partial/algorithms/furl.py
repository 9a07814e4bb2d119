"""Federated User Representation Learning, sections 3.4 and 3.5.

The paper calls the global variables federated parameters, and the local ones,
such as the embedding of the client's user, private parameters. A client trains
both jointly, sends the former, and keeps the latter until its next round.

Deviations: a client's first private parameters are drawn by itself; for the
paper's "default value" give them an initializer without chance, or let the
clients learn one (`layers.PrivateVector`). Clients go through their examples in
their order unless `training` shuffles. A client whose update is not finite
counts for nothing and keeps what it had.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.statistics import Statistic
from tff_partial.templates import partial_training


def build_furl(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  private_rule: Statistic | None = None,
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Clients train federated and private parameters jointly; these stay.

  With FedAvg at the server, this trains as FedAvg would if it held the private
  parameters of all users: under Eq. 6 exactly so, under Eq. 7 as if each user's
  were averaged over their owner alone.

  Args:
    model: The model; its local variables are the private parameters.
    training: How a client trains: optimizer, or one for each tier, batches,
      epochs.
    private_rule: The rule `a_p` of Eq. 3. By default a client keeps what its
      training came to (Eq. 7); `statistics.SCALED_BY_SHARE` is Eq. 6.
    **joining: How the server joins updates (Eq. 2), as for `compose`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_simultaneous(
    model,
    training=training,
    statistics=[private_rule] if private_rule else [],
    **joining,
  )


def build_furl_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Users are measured with the private parameters that they remember.

  New users, whom the paper leaves to future work, remember first values. With
  `personalise` they train them on their first examples before, while federated
  parameters stay fixed.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Raises:
    PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_evaluation(model, **measuring)
