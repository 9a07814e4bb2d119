"""Availability of clients by the time of day.

A phone takes part while it charges, is idle and is on an unmetered network,
which is mostly at night; so the clients of a round differ by the hour (Bonawitz
et al. 2019, "Towards Federated Learning at Scale: System Design"; Eichner et
al. 2019, "Semi-Cyclic Stochastic Gradient Descent"). Here a day has several
rounds. Each client keeps a time zone, in which its probability of being
available is a raised cosine,

    floor + (1 - floor) * (1 - cos(2 pi t)) / 2

with t from 0 to 1 in the client's own day: 1 at t = 1/2, and the floor at
t = 0. A client draws one number a day and is available while the probability
exceeds it, so that it comes and goes once a day, as devices do, and not from
round to round.
"""

import dataclasses
import math

import numpy as np

from tff_partial import random_bits
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class Availability:
  """Availability of clients over a day.

  Attributes:
    rounds_per_day: Number of rounds in a day.
    floor: Probability that a client is available at its worst time.
    zone_spread: Share of the day over which the clients' time zones are spread
      evenly: at 1 around the world, so that about as many clients, if different
      ones, are available at any time; at 0 all have the same time.
  """

  rounds_per_day: int
  floor: float = 0.1
  zone_spread: float = 1.0

  def __post_init__(self) -> None:
    """Check the numbers."""
    if self.rounds_per_day < 2:
      raise ProgramError(
        f'rounds_per_day={self.rounds_per_day}: a day of one round has no time '
        'of day. Give 2 or more.'
      )
    for name in ('floor', 'zone_spread'):
      value = getattr(self, name)
      if not 0.0 <= value <= 1.0:
        raise ProgramError(f'{name}={value}: give a share from 0 to 1.')

  def times(self, num_clients: int, seed: int, round_number: int) -> np.ndarray:
    """Return the clients' local times in days, `[clients]`, whole at midnight.

    Args:
      num_clients: Number of clients.
      seed: The run's seed; a client's zone follows from it and the client's
        place.
      round_number: The number of the round.
    """
    zones = random_bits.generator(seed, 'time zone').random(num_clients)
    return round_number / self.rounds_per_day + self.zone_spread * zones

  def probabilities(
    self, num_clients: int, seed: int, round_number: int
  ) -> np.ndarray:
    """Return the clients' probabilities of being available, `[clients]`.

    Args:
      num_clients: Number of clients.
      seed: The run's seed.
      round_number: The number of the round.
    """
    return self._at(self.times(num_clients, seed, round_number))

  def _at(self, times: np.ndarray) -> np.ndarray:
    risen = (1.0 - np.cos(2.0 * math.pi * times)) / 2.0
    return self.floor + (1.0 - self.floor) * risen

  def are_available(
    self, num_clients: int, seed: int, round_number: int
  ) -> np.ndarray:
    """Return which clients are available in a round, bool `[clients]`.

    Args:
      num_clients: Number of clients.
      seed: The run's seed.
      round_number: The number of the round.
    """
    times = self.times(num_clients, seed, round_number)
    days = np.floor(times).astype(np.int64)
    drawn = np.empty([num_clients])
    # Some clients are in a new day, others are not.
    for day in range(int(days.min()), int(days.max()) + 1):
      numbers = random_bits.generator(seed, 'available', day)
      drawn = np.where(days == day, numbers.random(num_clients), drawn)
    return drawn < self._at(times)

  def fewest_expected(self, num_clients: int, seed: int) -> float:
    """Return the expected number of available clients at the worst time.

    Args:
      num_clients: Number of clients.
      seed: The run's seed.
    """
    # Cosines of the same period add up to a cosine.
    angles = 2.0 * math.pi * self.times(num_clients, seed, 0)
    hours = 2.0 * math.pi * np.arange(self.rounds_per_day) / self.rounds_per_day
    summed = (np.exp(1j * angles).sum() * np.exp(1j * hours)).real
    most = float(summed.max())
    return num_clients - (1.0 - self.floor) * (num_clients + most) / 2.0
