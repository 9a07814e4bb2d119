"""Purely local training: each client trains alone.

The baseline of every paper on personalization. All clients start from the same
global weights.
"""

from tff_partial.client_state import persist_personal
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.templates import partial_training
from tff_partial.tiers import LOCAL
from tff_partial.tiers import PERSONAL


def build_local_only(
  model: models.PartialModel, *, training: Phase = Phase()
) -> PartialProcess:
  """Build local training: clients keep their models and send nothing.

  Args:
    model: The model, with or without local variables.
    training: How a client trains: optimizer, batches, epochs.

  Example:
    >>> process = baselines.build_local_only(whole)

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    client_state=persist_personal,
    work=[partial_training.trained(training, train=(PERSONAL, LOCAL))],
  )


build_local_only_eval = partial_training.build_personal_evaluation
