"""Sampling of cohorts, as a pure function of the round.

A cohort is drawn without replacement. As in section 7 of the FedRecon paper,
more clients than needed can be asked, some of which drop out before they
answer. Or each client takes part with the same probability, independently, as
differential privacy assumes: Poisson sampling. `Participation` adds what else
happens to real cohorts: reserves and slow clients (`latency.py`), the time of
day (`availability.py`), and epochs over the population.

`tff.simulation.build_uniform_sampling_fn` promises the same, but goes through
the whole population in each round: 0.3 s for a million clients, while a round
of a hundred takes 0.02 s. NumPy draws them without visiting the others; only
epochs, trees and the time of day go through all.
"""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tff_partial import random_bits
from tff_partial.data import cohorts
from tff_partial.dp import privacy_plans
from tff_partial.dp import samplings
from tff_partial.training.errors import ProgramError
from tff_partial.training.participation import latency as latency_lib
from tff_partial.training.participation.availability import Availability

# Order of clients in rounds, if not by Poisson sampling or by a plan.
UNIFORM, EPOCHS = 'uniform', 'epochs'

_OTHERS_LATENCIES = 'who is joined would depend on how fast others are'


@dataclasses.dataclass(frozen=True)
class Participation:
  """Rules for which clients are asked and awaited, and for partial work.

  The defaults change nothing.

  Attributes:
    order: `UNIFORM`, or `EPOCHS`: each client is asked once before any is asked
      again, in a new order in each epoch. The last cohort of an epoch is the
      remainder.
    extra_clients: Number of clients asked in reserve. Of all that answer, as
      many as the round needs are aggregated: those with the lowest latencies,
      or those drawn first if all latencies are the same.
    latency: Latency of clients.
    partial_work: Share of all clients, the slowest of a round, that process
      only part of their examples; see `latency.partial_work`.
    availability: Availability of clients; None for always. A round with fewer
      available clients than it needs has a smaller cohort. In an epoch, a
      client that is never available while there is room misses its turn.
  """

  order: str = UNIFORM
  extra_clients: int = 0
  latency: latency_lib.Latency = latency_lib.Latency()
  partial_work: float = 0.0
  availability: Availability | None = None

  def __post_init__(self) -> None:
    """Check the numbers."""
    if self.order not in (UNIFORM, EPOCHS):
      raise ProgramError(
        f'order={self.order!r}: choose {UNIFORM!r} or {EPOCHS!r}.'
      )
    if self.extra_clients < 0:
      raise ProgramError(f'extra_clients={self.extra_clients}: give 0 or more.')
    if not 0.0 <= self.partial_work <= 1.0:
      raise ProgramError(
        f'partial_work={self.partial_work}: give a share of the clients, from '
        '0 to 1.'
      )

  def why_not_private(
    self, sampling: samplings.Sampling, oversample: float
  ) -> str | None:
    """Return the reason that breaks a private run's accounting, or None.

    Partial work does not: a client's work depends on no other client, and its
    update is clipped in any case.

    Args:
      sampling: The plan's sampling of clients.
      oversample: Factor by which more clients are asked.
    """
    if self.extra_clients:
      return f'extra_clients={self.extra_clients}: {_OTHERS_LATENCIES}'
    if oversample > 1.0 and self.latency.total_spread:
      return f'oversample={oversample}, {self.latency}: {_OTHERS_LATENCIES}'
    if self.availability is not None:
      return (
        f'{self.availability}: how likely a client is in a round would follow '
        'the time of day'
      )
    is_tree = isinstance(sampling, samplings.OncePerTree)
    if self.order == EPOCHS and not is_tree:
      return (
        f'order={EPOCHS!r}: whether a client can be in a round would follow '
        'from the rounds before'
      )
    return None


@dataclasses.dataclass(frozen=True)
class CohortSampler:
  """Sampler of the cohort of every round.

  Attributes:
    client_ids: The population, in a fixed order.
    clients_per_round: Number of clients whose updates a round aggregates; with
      `poisson`, on average.
    seed: The run's seed.
    oversample: Factor by which more clients are asked, at least 1.
    dropout_rate: Probability that a client that was asked does not answer. The
      first `clients_per_round` that do are the cohort; it is smaller if fewer
      do.
    poisson: True if each client is asked independently with the probability
      `clients_per_round` / population. Then the size of a cohort differs from
      round to round, and may be zero.
    rounds_per_tree: If given, rounds form consecutive blocks of this many, and
      no client is asked twice in a block. Tree aggregation (DP-FTRL) relies on
      that.
    participation: Further rules of participation.
  """

  client_ids: Sequence[str]
  clients_per_round: int
  seed: int
  oversample: float = 1.0
  dropout_rate: float = 0.0
  poisson: bool = False
  rounds_per_tree: int | None = None
  participation: Participation = Participation()

  def __post_init__(self) -> None:
    """Check the numbers against the population."""
    if self.clients_per_round < 1:
      raise ProgramError(
        f'clients_per_round={self.clients_per_round}: a round joins at least '
        'one client. Give 1 or more.'
      )
    if not (math.isfinite(self.oversample) and self.oversample >= 1.0):
      raise ProgramError(
        f'oversample={self.oversample}: a round asks at least the clients that '
        'it joins. Give 1 or more.'
      )
    if not 0.0 <= self.dropout_rate < 1.0:
      raise ProgramError(
        f'dropout_rate={self.dropout_rate}: this is no probability below 1. '
        'Give 0 or more, and less than 1.'
      )
    if self.poisson and self.oversample != 1.0:
      raise ProgramError(
        f'oversample={self.oversample}: with Poisson sampling every client '
        'asked is joined, so none is asked in reserve. Leave it at 1, or give '
        'a larger clients_per_round.'
      )
    if self.poisson and self._is_no_poisson:
      raise ProgramError(
        f'{self.participation}: with Poisson sampling every client is in a '
        'round with the same probability, on its own, so there are no extra '
        'clients, no time of day and no epochs. Leave them out.'
      )
    if self.num_asked * (self.rounds_per_tree or 1) > len(self.client_ids):
      if self.rounds_per_tree:
        raise ProgramError(
          f'{self.rounds_per_tree} rounds of {self.num_asked} clients without '
          'anybody twice need more than the population of '
          f'{len(self.client_ids)}. Lower one of them.'
        )
      raise ProgramError(
        f'A round asks {self.num_asked} clients (clients_per_round='
        f'{self.clients_per_round}, oversample={self.oversample}) but the '
        f'population has {len(self.client_ids)}. Lower one of them.'
      )
    self._check_availability()

  def _check_availability(self) -> None:
    """Refuse a day with too few clients for a round at its worst time."""
    availability = self.participation.availability
    if availability is None:
      return
    population = len(self.client_ids)
    fewest = availability.fewest_expected(population, self.seed)
    if fewest < self.num_asked:
      raise ProgramError(
        f'A round asks {self.num_asked} clients, but at the worst time of the '
        f'day only {fewest:.1f} of {population} are available on average '
        f'({availability}). Lower clients_per_round, or raise the floor or the '
        'spread of the time zones.'
      )

  @property
  def _is_no_poisson(self) -> bool:
    """True if clients are asked differently than in Poisson sampling."""
    how = self.participation
    return (
      how.order != UNIFORM
      or how.extra_clients > 0
      or how.availability is not None
    )

  @property
  def num_asked(self) -> int:
    """The number of clients a round asks; with `poisson`, on average."""
    # 100 times 1.1 is a little more than 110 in floating point.
    wanted = math.ceil(self.clients_per_round * self.oversample - 1e-9)
    return wanted + self.participation.extra_clients

  def cohort(self, round_number: int) -> list[str]:
    """Return the ids of the clients whose updates a round aggregates.

    Their order is random, too.

    Args:
      round_number: The number of the round.
    """
    population, size = len(self.client_ids), self.num_asked
    if self.rounds_per_tree:
      tree, number = divmod(round_number - 1, self.rounds_per_tree)
      order = self._generator('tree', tree).permutation(population)
      return self._joined(order[number * size :][:size], round_number)
    if self.participation.order == EPOCHS:
      return self._joined(self._turn(round_number), round_number)
    generator = self._generator('cohort', round_number)
    if self.poisson:
      # The number of independent draws that succeed; given that number, all
      # sets of clients are equally likely.
      size = generator.binomial(population, size / population)
    availability = self.participation.availability
    if availability is not None:
      (there,) = np.nonzero(
        availability.are_available(population, self.seed, round_number)
      )
      size = min(size, len(there))
      chosen = generator.choice(there, size, replace=False, shuffle=True)
      return self._joined(chosen, round_number)
    places = generator.choice(population, size, replace=False, shuffle=True)
    return self._joined(places, round_number)

  def _generator(self, purpose: str, number: int) -> np.random.Generator:
    seed = random_bits.derive(self.seed, purpose, number)
    return np.random.Generator(np.random.PCG64(seed.view(np.uint32)))

  def _joined(self, places: np.ndarray, round_number: int) -> list[str]:
    """Return those of the asked clients that are aggregated."""
    asked = [self.client_ids[place] for place in places.tolist()]
    if self.dropout_rate:
      asked = [c for c in asked if self._answers(c, round_number)]
    return asked if self.poisson else self._first(asked, round_number)

  def _first(self, answering: list[str], round_number: int) -> list[str]:
    """Return the clients that answer first, in the order of drawing."""
    size, latency = self.clients_per_round, self.participation.latency
    if len(answering) <= size or not latency.total_spread:
      return answering[:size]
    taken = latency.logarithms(answering, self.seed, round_number)
    first = np.sort(np.argsort(taken, kind='stable')[:size])
    return [answering[place] for place in first.tolist()]

  def _turn(self, round_number: int) -> np.ndarray:
    """Return the places of the clients whose turn it is in an epoch."""
    size, population = self.num_asked, len(self.client_ids)
    rounds = -(-population // size)
    epoch, number = divmod(round_number - 1, rounds)
    availability = self.participation.availability
    if number and round_number - 1 in self._waiting:
      waiting, number = self._waiting.pop(round_number - 1), 0
    else:
      waiting = self._generator('epoch', epoch).permutation(population)
    if availability is None:
      return waiting[number * size :][:size]
    asked = waiting[:0]
    for each in range(round_number - number, round_number + 1):
      there = availability.are_available(population, self.seed, each)[waiting]
      is_asked = there & (np.cumsum(there) <= size)
      asked, waiting = waiting[is_asked], waiting[~is_asked]
    self._waiting.clear()
    self._waiting[round_number] = waiting
    return asked

  @functools.cached_property
  def _waiting(self) -> dict[int, np.ndarray]:
    """Clients without a turn in the epoch, after the last round drawn.

    They follow from the seed; kept so as not to redo the epoch's rounds.
    """
    return {}

  def _answers(self, client_id: str, round_number: int) -> bool:
    """Return True if a client answers in a round, whatever the others do."""
    drawn = random_bits.derive(self.seed, 'dropout', round_number, client_id)
    return drawn.view(np.uint32)[0] >= self.dropout_rate * 2.0**32

  def with_partial_work(
    self, cohort: cohorts.Cohort, round_number: int
  ) -> cohorts.Cohort:
    """Return a cohort whose slow clients process only some examples.

    Args:
      cohort: The clients of a round with their examples.
      round_number: The number of the round.
    """
    how = self.participation
    if not how.partial_work:
      return cohort
    are_slow = how.latency.are_slow(
      how.partial_work, cohort.client_ids, self.seed, round_number
    )
    return latency_lib.partial_work(cohort, are_slow, self.seed, round_number)

  def seeds(self, round_number: int, client_ids: Sequence[str]) -> np.ndarray:
    """Return the seeds of some clients in a round, int32 `[clients, 2]`.

    A client's seed does not depend on the other clients.
    """
    return client_seeds(client_ids, self.seed, round_number)


def client_seeds(client_ids: Sequence[str], *words: int | str) -> np.ndarray:
  """Derive a seed for each client from some words and its id."""
  return random_bits.derive_each(words, client_ids)


def planned(
  client_ids: Sequence[str],
  clients_per_round: int,
  seed: int,
  oversample: float,
  dropout_rate: float,
  privacy: privacy_plans.PrivacyLedger | None,
  participation: Participation | None = None,
) -> CohortSampler:
  """Build a sampler, which follows the privacy plan if there is one.

  Args:
    client_ids: The population.
    clients_per_round: Number of clients whose updates a round aggregates.
    seed: Seed of all random draws.
    oversample: Factor by which more clients are asked.
    dropout_rate: Probability that a client does not answer.
    privacy: Ledger of the run's cost, with its plan; or None.
    participation: Further rules of participation.

  Raises:
    ProgramError: If the arguments do not match the plan.
  """
  participation = participation or Participation()
  planned: dict[str, Any] = {}
  if privacy is not None:
    plan = privacy.plan
    if plan.clients_per_round != clients_per_round or (
      plan.population != len(client_ids) and not privacy.simulation
    ):
      raise ProgramError(
        f'The privacy was planned for {plan.clients_per_round} of '
        f'{plan.population} clients, but the run has {clients_per_round} of '
        f'{len(client_ids)}. Plan what is done.'
      )
    reason = participation.why_not_private(plan.sampling, oversample)
    if reason is not None:
      raise ProgramError(
        f'{reason}, which epsilon does not count. Leave it out of a private '
        'run.'
      )
    planned['poisson'] = isinstance(plan.sampling, samplings.PoissonSampling)
    if isinstance(plan.sampling, samplings.OncePerTree):
      planned['rounds_per_tree'] = plan.sampling.rounds_per_tree
  return CohortSampler(
    client_ids,
    clients_per_round,
    seed,
    oversample,
    dropout_rate,
    participation=participation,
    **planned,
  )
