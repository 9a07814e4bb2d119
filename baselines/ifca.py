"""IFCA (Ghosh et al., NeurIPS 2020), Algorithm 1; HypCluster (Mansour et al.).

The server holds K models. In each round a client joins the one that has the
least loss on its examples, and trains it. With `from_keras(group='.*')` all
variables are in groups; others, such as an encoder, may be shared by all
clients (the paper's section 5, weight sharing). HypCluster (2020, Algorithm 3)
is the same.

A copy moves by the mean over its members only, the paper's option of model
averaging; with `Aggregation(mean_of_members=False)` by the mean over all
clients, its option of gradient averaging. The first copies are drawn, each by
itself, or are `from_keras(initial_weights=...)`.

Deviations: members are weighted by their examples unless `client_weighting`
says otherwise; the loss by which clients choose is the model's own, also if
`training.loss` is another.
"""

from tff_partial import client_state
from tff_partial import evaluation
from tff_partial import groups
from tff_partial.assignments import Assignment
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.composition import with_defaults
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import assigned_training
from tff_partial.templates import partial_training
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import GROUP

# Clients remember only their group, for analysis.
_CLIENT_STATE = client_state.remember_group(client_state.stateless)


def build_ifca(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build IFCA: join the copy of least loss, and train it.

  Args:
    model: The model, with groups and without local variables.
    training: How a client trains: optimizer, batches, epochs.
    aggregation: How the server aggregates updates. Private runs need
      `mean_of_members=False`, since numbers of members would be sent exactly.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = baselines.build_ifca(clusters, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError, GroupError: If the arguments do not fit
      together.
  """
  training = partial_training.trained(training, train=(GLOBAL, GROUP))
  aggregation = with_defaults(aggregation, mean_of_members=True)
  return compose(
    model,
    client_state=_CLIENT_STATE,
    work=[groups.least_loss()._replace(on=training.on), training],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_ifca_eval(
  model: models.PartialModel, *, split: splits.Split | None = None
) -> evaluation.Evaluation:
  """Build an evaluation with the copy of least loss on the support set.

  It does not need client state, so it also measures new clients.

  Args:
    model: The model.
    split: Support and query set; the two halves by default.

  Example:
    >>> evaluation = baselines.build_ifca_eval(clusters)

  Raises:
    CompositionError, GroupError: If the model has no groups.
  """
  return assigned_training.build_evaluation(
    model, _CLIENT_STATE, Assignment(groups.least_loss()), split=split
  )
