"""Federated Reconstruction (Singhal et al., NeurIPS 2021), Algorithm 1.

Each client reconstructs its local weights from scratch on its support set while
the global weights are frozen, then trains the global weights on its query set
while the local ones are frozen. Only the update of the global weights leaves
the client.

Deviations: a client with too few examples for a query set has the weight zero,
and a client whose update is not finite does not count. A client's weight is
`|D_q|` as in the paper, even if `update.max_steps` leaves some of the query set
unused; TFF's own `build_fed_recon` counts the examples of the steps taken.
Otherwise the two give the same weights.
"""

from tff_partial import evaluation
from tff_partial import phases
from tff_partial.client_state import stateless
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL


def build_fed_recon(
  model: models.PartialModel,
  *,
  split: splits.Split | None = None,
  reconstruct: Phase = Phase(),
  update: Phase | None = None,
  joint: bool = False,
  through_solution: bool = False,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build FedRecon: reconstruct local weights, then train the global ones.

  Args:
    model: The model, with or without local variables.
    split: Support and query set; the two halves by default.
    reconstruct: How local weights are reconstructed on the support set.
    update: How global weights are trained on the query set; by default
      `Phase()` with the batch size of `reconstruct`.
    joint: True if the update also trains the local weights, together with the
      global ones.
    through_solution: True if gradients of global weights pass through the
      reconstruction, which is then an `Exact` solve before each update step.
      By default reconstructed weights are constants, as in the paper.
    aggregation: How the server aggregates updates; by default their mean,
      weighted by `|D_q|`.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_fed_recon(
    ...   model, reconstruct=Phase(optimizer=sgd(0.1), epochs=5)
    ... )

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  support, query = splits.given_or(split, splits.halves())
  solve = changed(
    phases.placed(reconstruct, support), train=(LOCAL,), measured=False
  )
  update = update or Phase(batch_size=solve.batch_size)
  return compose(
    model,
    client_state=stateless,
    work=[
      solve,
      changed(
        phases.placed(update, query),
        train=(GLOBAL, LOCAL) if joint else (GLOBAL,),
        measured=True,
        through=solve if through_solution else None,
      ),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


def build_fed_recon_eval(
  model: models.PartialModel,
  *,
  personalise: Phase = Phase(),
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with reconstructed local weights.

  ReconEval of section 4.1, which does not need client state: it also measures
  clients that were never seen in training.

  Args:
    model: The model.
    personalise: How local weights are reconstructed.
    split: Support and query set; the two halves by default.

  Example:
    >>> evaluation = algorithms.build_fed_recon_eval(
    ...   model, personalise=Phase(optimizer=sgd(0.1), epochs=5)
    ... )

  Raises:
    PhaseError: If the arguments do not fit together.
  """
  return evaluation.build_query_evaluation(
    model, train=(LOCAL,), personalise=personalise, split=split
  )


def build_fed_recon_fine_tuning_eval(
  model: models.PartialModel,
  *,
  personalise: Phase,
  tune: Phase,
  split: splits.Split | None = None,
) -> evaluation.Evaluation:
  """Build an evaluation with reconstructed local and fine-tuned global weights.

  Section 5.2, "FedRecon followed by fine-tuning": both on the support set, one
  after the other. Tuned weights stay with the client.

  Args:
    model: The model.
    personalise: How local weights are reconstructed.
    tune: How global weights are tuned, all of them or those that it names.
    split: Support and query set; the two halves by default.

  Example:
    >>> evaluation = algorithms.build_fed_recon_fine_tuning_eval(
    ...   model, personalise=Phase(epochs=5), tune=Phase(optimizer=sgd(0.01))
    ... )

  Raises:
    PhaseError: If a phase names no variable that it could train.
  """
  return evaluation.build_query_evaluation(
    model,
    client_state=stateless,
    before=[
      changed(phase, train=(tier,), measured=False)
      for phase, tier in ((personalise, LOCAL), (tune, GLOBAL))
    ],
    split=split,
  )
