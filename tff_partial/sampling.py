"""Which clients take part in a round, as a pure function of the round.

A cohort is drawn without replacement. As in section 7 of the FedRecon paper,
more clients than needed can be asked, of whom some drop out before they answer.
"""

from collections.abc import Sequence
import dataclasses
import math

import numpy as np
import tensorflow_federated as tff

from tff_partial import errors
from tff_partial import random_bits


class SamplingError(errors.UserError, ValueError):
  """Raised for a cohort that cannot be drawn."""


@dataclasses.dataclass(frozen=True)
class CohortSampler:
  """Draws the cohort of every round.

  Attributes:
    client_ids: The population, in a fixed order.
    clients_per_round: How many clients' updates a round shall join.
    seed: The run's seed.
    oversample: How many times as many clients are asked, at least 1.
    dropout_rate: The probability that a client that was asked does not answer.
      The first `clients_per_round` that do are the cohort; it is smaller if
      fewer do.
  """

  client_ids: Sequence[str]
  clients_per_round: int
  seed: int
  oversample: float = 1.0
  dropout_rate: float = 0.0

  def __post_init__(self) -> None:
    """Checks the numbers against the population."""
    if self.clients_per_round < 1:
      raise SamplingError(
        f'clients_per_round={self.clients_per_round}: a round joins at least '
        'one client. Give 1 or more.'
      )
    if not (math.isfinite(self.oversample) and self.oversample >= 1.0):
      raise SamplingError(
        f'oversample={self.oversample}: a round asks at least the clients that '
        'it joins. Give 1 or more.'
      )
    if not 0.0 <= self.dropout_rate < 1.0:
      raise SamplingError(
        f'dropout_rate={self.dropout_rate}: this is no probability below 1. '
        'Give 0 or more, and less than 1.'
      )
    if self.num_asked > len(self.client_ids):
      raise SamplingError(
        f'A round asks {self.num_asked} clients (clients_per_round='
        f'{self.clients_per_round}, oversample={self.oversample}) but the '
        f'population has {len(self.client_ids)}. Lower one of them.'
      )

  @property
  def num_asked(self) -> int:
    """How many clients a round asks."""
    # 100 times 1.1 is a little more than 110 in floating point.
    return math.ceil(self.clients_per_round * self.oversample - 1e-9)

  def cohort(self, round_number: int) -> list[str]:
    """Returns the ids of the clients whose updates a round joins.

    Args:
      round_number: The number of the round.
    """
    sample = tff.simulation.build_uniform_sampling_fn(
      range(len(self.client_ids)),
      replace=False,
      random_seed=int(random_bits.derive(self.seed, 'cohort')[0]) & 0x7FFFFFFF,
    )
    asked = [
      self.client_ids[int(i)] for i in sample(round_number, self.num_asked)
    ]
    if self.dropout_rate:
      asked = [c for c in asked if self._answers(c, round_number)]
    return asked[: self.clients_per_round]

  def _answers(self, client_id: str, round_number: int) -> bool:
    """Whether a client answers in a round, whoever else is asked."""
    drawn = random_bits.derive(self.seed, 'dropout', round_number, client_id)
    return drawn.view(np.uint32)[0] >= self.dropout_rate * 2.0**32

  def seeds(self, round_number: int, client_ids: Sequence[str]) -> np.ndarray:
    """Returns the seeds of some clients in a round, int32 `[clients, 2]`.

    A client's seed does not depend on who else was drawn.
    """
    return client_seeds(client_ids, self.seed, round_number)


def client_seeds(client_ids: Sequence[str], *words: int | str) -> np.ndarray:
  """Derives a seed for each client from some words and its id."""
  seeds = [random_bits.derive(*words, client) for client in client_ids]
  return np.stack(seeds) if seeds else np.zeros([0, 2], np.int32)
