"""LG-FedAvg (Liang et al., 2020), Algorithm 1.

The model's local variables are the lower layers, which represent a client's own
data; its global ones are the layers above them. So it is FedPer upside down.
Deviations: the representation has only the model's own loss, which may be any;
for new clients see `build_lg_fed_avg_eval`.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_lg_fed_avg(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build LG-FedAvg: train all layers together, keep local representations.

  Args:
    model: The model; without local variables, this is FedAvg. The paper starts
      from a model pretrained by FedAvg: pass `initial_weights` to `from_keras`.
    training: How a client trains: optimizer, batches, epochs.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_lg_fed_avg(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_simultaneous(
    model, training=training, **joining
  )


def build_lg_fed_avg_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the local representations that clients remember.

  For a new client the paper averages the predictions of all clients' models,
  which would send representations from client to client. Instead, with
  `personalise`, it trains its own representation before.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_lg_fed_avg_eval(model)
  """
  return partial_training.build_evaluation(model, **measuring)
