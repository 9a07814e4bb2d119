"""MR-MTL (Liu et al., NeurIPS 2022): mean-regularized multi-task learning.

Each client trains a model v of its own, near the mean w of all clients' models,
which is all that the server holds: it minimizes `f(v) + lambda / 2 |v - w|^2`.
It begins each round from its v, where Ditto's clients train the global model
beside it. At lambda 0 this is local training; the paper shows that under noise
the best lambda lies between that and FedAvg.

Deviation: v starts from the first w that the client receives.
"""

import collections

from tff_partial.client_state import persist_trained
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.contexts import OverwriteWeights
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import proximal
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import PERSONAL

_BEGIN_FROM_OWN = OverwriteWeights(
  lambda client: collections.OrderedDict({GLOBAL: client.weights[PERSONAL]})
)


def build_mr_mtl(
  model: models.PartialModel,
  *,
  penalty: float = 1.0,
  training: Phase = Phase(),
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build MR-MTL: train personal models, kept near their mean.

  Args:
    model: The model, without local variables.
    penalty: lambda of the paper.
    training: How v is trained: optimizer, batches, epochs.
    aggregation: How the server aggregates the clients' differences v - w.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_mr_mtl(whole, penalty=0.1)

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  return compose(
    model,
    client_state=persist_trained,
    work=[
      _BEGIN_FROM_OWN,
      partial_training.trained(training, proximal(penalty)),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_mr_mtl_eval = partial_training.build_held_evaluation
