"""FedSGD (McMahan et al., AISTATS 2017), section 2: FedAvg with E=1, B=inf.

A client's examples are one batch, including padding, so more padding may change
the last bits, unlike with all other methods.
"""

from typing import Unpack

from tff_partial import evaluation
from tff_partial.composition import compose
from tff_partial.composition import Joining
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL


def build_fed_sgd(
  model: models.PartialModel,
  *,
  learning_rate: float = 0.1,
  on: splits.Part = splits.everything(),
  **joining: Unpack[Joining],
) -> PartialProcess:
  """Build FedSGD: each client sends one gradient of all its examples.

  Args:
    model: The model, without local variables.
    learning_rate: eta of the paper. For another optimizer at the server, pass 1
      and the `server_optimizer`, which then applies the mean gradient.
    on: The examples of the gradient.
    **joining: How the server aggregates updates, as for `compose`.

  Example:
    >>> process = baselines.build_fed_sgd(whole, learning_rate=0.1)

  Raises:
    CompositionError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[
      Phase(
        train=(GLOBAL,),
        on=on,
        optimizer=sgd(learning_rate),
        batch_size=None,
        measured=True,
      )
    ],
    **joining,
  )


def build_fed_sgd_eval(
  model: models.PartialModel, **measuring: Unpack[evaluation.Measuring]
) -> evaluation.Evaluation:
  """Build an evaluation with the global weights, as for FedAvg.

  Args:
    model: The model.
    **measuring: As for `evaluation.build_query_evaluation`.

  Example:
    >>> evaluation = baselines.build_fed_sgd_eval(whole)
  """
  return evaluation.build_query_evaluation(model, **measuring)
