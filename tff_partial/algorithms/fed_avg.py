"""FedAvg (McMahan et al., AISTATS 2017), Algorithm 1.

Nothing is local: a model with local variables is refused, since they would not
be trained. If each user has a row of a table at the server (footnote 4 of the
FedRecon paper), that is FedAvg on a model which reads the user's index; see
`centralized.number_clients`.

Deviation: clients process their examples in order unless `training` shuffles;
the paper uses random batches.
"""

import dataclasses
from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import compose
from tff_partial.composition import Joining
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL


def build_fed_avg(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedAvg: train the global weights, and average them at the server.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = algorithms.build_fed_avg(whole, training=Phase(epochs=2))

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[dataclasses.replace(training, train=(GLOBAL,), measured=True)],
    **joining,
  )


def build_fed_avg_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the global weights.

  It is for seen and for new clients. Others that train one model for all are
  measured alike.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = algorithms.build_fed_avg_eval(whole)
  """
  return evaluation.build_query_evaluation(model, **measuring)
