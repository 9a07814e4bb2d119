"""FedRep (Collins et al., ICML 2021), Algorithm 1.

The model's local variables are the head, its global ones the representation.
It is FedAlt with many steps on the head. Deviations: each client initializes
its head itself; clients are weighted by their examples unless
`client_weighting` says otherwise. With `personalise`, new clients train their
head before an evaluation, as in the paper.
"""

from tff_partial.composition import Aggregation
from tff_partial.model import models
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_rep(
  model: models.PartialModel,
  *,
  head: Phase | None = None,
  representation: Phase | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedRep: train heads, then the representation.

  Args:
    model: The model; without local variables, this is FedAvg.
    head: How the head is trained while the representation is fixed;
      `Phase(epochs=10)` by default, with the examples of `representation`.
    representation: How the representation is trained while the head is fixed;
      `Phase()` by default, with the examples of `head`.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_rep(
    ...   model, head=Phase(epochs=10), representation=Phase()
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  personal, shared = partial_training.together(
    head, representation, Phase(epochs=10), Phase()
  )
  return partial_training.build_alternating(
    model,
    personal=personal,
    shared=shared,
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_fed_rep_eval = partial_training.build_evaluation
