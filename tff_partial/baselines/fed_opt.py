"""FedAdam and FedYogi (Reddi et al., ICLR 2021), Algorithm 2.

Deviations: the optimizers are TFF's, which correct the bias of both moments;
the algorithm as printed does not. The second moment of TFF's Adam begins with
zero, where the paper begins with tau squared or more. Measured like FedAvg.
"""

import dataclasses
from typing import Unpack

import tensorflow_federated as tff

from tff_partial.composition import Averaging
from tff_partial.composition import compose
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.tiers import GLOBAL


def build_fed_adam(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  learning_rate: float = 0.01,
  beta_1: float = 0.9,
  beta_2: float = 0.99,
  tau: float = 1e-3,
  **averaging: Unpack[Averaging],
) -> PartialProcess:
  """Clients train the global weights; the server takes their mean to Adam.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    learning_rate: eta of the paper, at the server.
    beta_1: Decay of the first moment.
    beta_2: Decay of the second moment.
    tau: Degree of adaptivity.
    **averaging: How updates are averaged, as for `compose`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[dataclasses.replace(training, train=(GLOBAL,), measured=True)],
    server_optimizer=tff.learning.optimizers.build_adam(
      learning_rate, beta_1, beta_2, tau
    ),
    **averaging,
  )


def build_fed_yogi(
  model: models.PartialModel,
  *,
  training: Phase = Phase(),
  learning_rate: float = 0.01,
  beta_1: float = 0.9,
  beta_2: float = 0.99,
  tau: float = 1e-3,
  **averaging: Unpack[Averaging],
) -> PartialProcess:
  """Clients train the global weights; the server takes their mean to Yogi.

  Args:
    model: The model, without local variables.
    training: How a client trains: optimizer, batches, epochs.
    learning_rate: eta of the paper, at the server.
    beta_1: Decay of the first moment.
    beta_2: Decay of the second moment, which begins with `tau` squared.
    tau: Degree of adaptivity.
    **averaging: How updates are averaged, as for `compose`.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  return compose(
    model,
    work=[dataclasses.replace(training, train=(GLOBAL,), measured=True)],
    server_optimizer=tff.learning.optimizers.build_yogi(
      learning_rate, beta_1, beta_2, tau, initial_preconditioner_value=tau**2
    ),
    **averaging,
  )
