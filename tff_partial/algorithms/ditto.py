"""Ditto (Li et al., ICML 2021), Algorithm 1 with FedAvg for the global model.

A client remembers a personal model, v, in addition to the global one, w. It
trains both in the rounds in which it takes part. Deviations: v starts from the
first w that the client receives; clients are weighted by their examples unless
`client_weighting` says otherwise.
"""

from tff_partial.client_state import persist_personal
from tff_partial.composition import Aggregation
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import changed
from tff_partial.phases import Optimizer
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.terms import proximal
from tff_partial.tiers import PERSONAL


def build_ditto(
  model: models.PartialModel,
  *,
  penalty: float = 1.0,
  training: Phase | None = None,
  personal: Phase | None = None,
  aggregation: Aggregation = Aggregation(),
  server_optimizer: Optimizer | None = None,
) -> PartialProcess:
  """Build Ditto: train the global model, and a personal one near to it.

  Metrics of training are those of the global model.

  Args:
    model: The model, without local variables.
    penalty: lambda of the paper, which keeps v near the received w; 0 for
      purely local training.
    training: How w is trained; `Phase()` by default.
    personal: How v is trained; likewise. If only one of the two is given, the
      other has its examples.
    aggregation: How the server aggregates updates.
    server_optimizer: Applies aggregated updates; SGD with rate 1 by default.

  Example:
    >>> process = algorithms.build_ditto(
    ...   whole, penalty=0.1, personal=Phase(epochs=2)
    ... )

  Raises:
    CompositionError, PhaseError, SettingError: If the arguments do not fit
      together.
  """
  training, personal = partial_training.together(
    training, personal, Phase(), Phase()
  )
  return compose(
    model,
    client_state=persist_personal,
    work=[
      partial_training.trained(training),
      changed(
        personal,
        train=(PERSONAL,),
        terms=(*personal.terms, proximal(penalty, PERSONAL)),
      ),
    ],
    aggregation=aggregation,
    server_optimizer=server_optimizer,
  )


build_ditto_eval = partial_training.build_held_evaluation
