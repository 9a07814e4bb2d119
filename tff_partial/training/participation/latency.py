"""Latencies of clients in a round, and partial work of slow ones.

A server that asks more clients than it needs aggregates those that answer first
(Bonawitz et al. 2019, "Towards Federated Learning at Scale: System Design"), or
it accepts partial work from slow ones (FedProx, Li et al. 2020, section 5.2).
Latencies are simulated here. They have no unit and a median of 1, and their
logarithms are normal:

    latency = exp(speed_spread * client + round_spread * now)

`client` is a standard normal number that a client keeps for the whole run (its
device and its network), `now` one for this round (what else it is doing). Both
follow from the seed and the client's id, whichever other clients are asked.

FedProx lets a straggler do x of E epochs on all its examples. Here it does all
epochs of all phases on the first x of its n examples, with x uniform from 1 to
n: the same share of its steps, but other examples. An algorithm does not
notice, and a compiled round does not change, since the number of a client's
real examples is an input.
"""

from collections.abc import Sequence
import dataclasses
import math
import statistics
from typing import Any

import numpy as np

from tff_partial import random_bits
from tff_partial.data import cohorts
from tff_partial.training.errors import ProgramError

_COUNT = 'count'


@dataclasses.dataclass(frozen=True)
class Latency:
  """The distribution of simulated latencies.

  Attributes:
    speed_spread: Standard deviation of log latency between clients; at 0 all
      clients are equally fast.
    round_spread: Standard deviation of log latency between rounds.
  """

  speed_spread: float = 0.0
  round_spread: float = 0.0

  def __post_init__(self) -> None:
    """Check both spreads."""
    for name in ('speed_spread', 'round_spread'):
      value = getattr(self, name)
      if not (math.isfinite(value) and value >= 0.0):
        raise ProgramError(
          f'{name}={value}: this is no standard deviation. Give 0 or more.'
        )

  @property
  def total_spread(self) -> float:
    """The standard deviation of log latency."""
    return math.hypot(self.speed_spread, self.round_spread)

  def logarithms(
    self, client_ids: Sequence[str], seed: int, round_number: int
  ) -> np.ndarray:
    """Return the log latencies of clients in a round, `[clients]`.

    Args:
      client_ids: The clients.
      seed: The run's seed.
      round_number: The number of the round.
    """
    always = _normal(client_ids, seed, 'speed')
    now = _normal(client_ids, seed, 'latency', round_number)
    return self.speed_spread * always + self.round_spread * now

  def are_slow(
    self,
    share: float,
    client_ids: Sequence[str],
    seed: int,
    round_number: int,
  ) -> np.ndarray:
    """Return which clients are among the slowest share, bool `[clients]`.

    They are compared with the distribution, not with one another, so that
    nothing about a client depends on the others. If all have the same latency,
    slow clients are drawn at random in each round.

    Args:
      share: Share of all clients that are slow in a round on average, from 0 to
        1.
      client_ids: The clients.
      seed: The run's seed.
      round_number: The number of the round.
    """
    if not 0.0 < share < 1.0:
      return np.full([len(client_ids)], share >= 1.0)
    spread = self.total_spread
    one = self if spread else Latency(round_spread=1.0)
    standard = one.logarithms(client_ids, seed, round_number) / (spread or 1.0)
    return standard > statistics.NormalDist().inv_cdf(1.0 - share)


def _normal(client_ids: Sequence[str], *words: int | str) -> np.ndarray:
  """Draw a standard normal number for each client, by Box-Muller."""
  drawn = random_bits.derive_each(words, client_ids).view(np.uint32)
  # Keeps the argument of the logarithm above zero.
  first, second = (drawn + np.array([1.0, 0.0])).T / 2.0**32
  return np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * math.pi * second)


class _Shortened(cohorts.Cohort):
  """A cohort in which some clients have fewer examples in this round."""

  def __init__(self, whole: cohorts.Cohort, counts: np.ndarray):
    groups = []
    for group in whole.groups:
      resident, given = dict(group.resident), dict(group.given)
      resident.pop(_COUNT, None)
      given[_COUNT] = counts[group.positions]
      groups.append(group._replace(resident=resident, given=given))
    super().__init__(whole.client_ids, groups)
    self._whole, self._counts = whole, counts

  def __getitem__(self, position: Any) -> Any:
    if isinstance(position, slice):
      return super().__getitem__(position)
    value = self._whole[position]
    value[_COUNT] = self._counts[position]  # It keeps its place.
    return value


def partial_work(
  cohort: cohorts.Cohort, are_slow: np.ndarray, seed: int, round_number: int
) -> cohorts.Cohort:
  """Leave the slow clients of a round only the first of their examples.

  Their number, uniform from one to all, follows from the seed, the round and
  the client. Examples keep their order; a split into support and query set
  divides those that are left.

  Args:
    cohort: The clients of the round.
    are_slow: bool `[clients]`, True for the slow ones.
    seed: The run's seed.
    round_number: The number of the round.
  """
  counts = np.zeros([len(cohort)], np.int32)
  for group in cohort.groups:
    held = group.given.get(_COUNT)
    if held is None:
      held = group.resident[_COUNT][group.rows]
    counts[group.positions] = held
  drawn = random_bits.derive_each(
    (seed, 'partial work', round_number), cohort.client_ids
  )
  share = drawn.view(np.uint32)[:, 0].astype(np.int64)
  some = np.minimum(1 + (share * counts >> 32), counts)
  return _Shortened(cohort, np.where(are_slow, some, counts).astype(np.int32))
