"""FedPer (Arivazhagan et al., 2019), Algorithms 1 and 2.

The model's local variables are the personalization layers, its global ones the
base layers. Each client initializes its personalization layers itself.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training


def build_fed_per(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedPer: train all layers together, keep personalization layers.

  Args:
    model: The model; without local variables, this is FedAvg.
    training: How a client trains: optimizer, batches, epochs.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_per(model, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return partial_training.build_simultaneous(
    model, training=training, **joining
  )


def build_fed_per_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the personalization layers that clients remember.

  The paper has no new clients. With `personalise`, they train their own
  personalization layers before.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_per_eval(model)
  """
  return partial_training.build_evaluation(model, **measuring)
