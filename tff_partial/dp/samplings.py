"""How cohorts are drawn, and what a round of them costs."""

import abc
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import dp_accounting

from tff_partial import errors

# Privacy losses are discretized, and rounded to the side that costs more. These
# are the steps for epsilons up to a size: finer ones take more time and change
# the fourth digit.
_LOSS_STEPS = {math.inf: 1e-2, 20.0: 2e-3, 0.5: 1e-4}


# Renyi orders that take a formula of few terms where clients are sampled
# independently. Without those between, what they count is mostly a few percent
# more, and up to a fifth where noise is small.
_WHOLE_ORDERS = (*range(2, 25), *range(28, 65, 4), 128, 256, 512)


# Renyi orders for cohorts of a fixed size, whose theorem takes long for each.
_FEW_ORDERS = (1.25, 1.5, 1.75, *_WHOLE_ORDERS)


class AccountingError(errors.UserError, ValueError):
  """Raised when nothing can be promised for what is asked."""


def check(is_good: bool, what: str, found: Any) -> None:
  """Raise an error that says what something must be, unless it is that."""
  if not is_good:
    raise AccountingError(f'{what}, found {found}.')


class Sampling(abc.ABC):
  """How clients come into a round.

  Attributes:
    name: For reports.
    neighbours: Which two datasets must look alike, for reports.
    relation: These neighbours, as dp-accounting names them.
    distance: How many clips one user moves a sum by.
    renyi_orders: Which Renyi divergences are counted; None for all that
      dp-accounting counts.
  """

  name: str
  neighbours: str
  relation: dp_accounting.NeighboringRelation
  distance: float = 1.0
  renyi_orders: Sequence[float] | None = None

  @abc.abstractmethod
  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """What happens in all rounds, in dp-accounting's words."""

  def accountant(self, step: float) -> dp_accounting.PrivacyAccountant:
    """A new accountant that knows such events.

    Args:
      step: How finely it counts, as `loss_step` says.
    """
    del step
    return self.renyi_accountant()

  def renyi_accountant(self) -> dp_accounting.rdp.RdpAccountant:
    """A new accountant of Renyi divergences, which knows all samplings."""
    return dp_accounting.rdp.RdpAccountant(self.renyi_orders, self.relation)

  def loss_step(self, size: float) -> float:
    """How finely to count epsilons up to a size; Renyi divergences know one."""
    del size
    return 1.0


class LossDistributionSampling(Sampling):
  """What privacy loss distributions count, as one mechanism of one clip."""

  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  renyi_orders = _WHOLE_ORDERS

  def accountant(self, step: float) -> dp_accounting.PrivacyAccountant:
    """Count by privacy loss distributions."""
    return dp_accounting.pld.PLDAccountant(
      self.relation, value_discretization_interval=step
    )

  def loss_step(self, size: float) -> float:
    """The step for epsilons up to a size."""
    return min(step for most, step in _LOSS_STEPS.items() if size <= most)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(LossDistributionSampling):
  """Every client is in a round with the same probability, independently.

  Attributes:
    probability: That a client is in a round.
  """

  probability: float
  name = 'poisson'
  neighbours = 'one user more or less'

  def __post_init__(self) -> None:
    check(
      0.0 < self.probability <= 1.0,
      'A probability must be above 0 and at most 1',
      self.probability,
    )

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """Independent samples."""
    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.PoissonSampledDpEvent(
        self.probability, dp_accounting.GaussianDpEvent(noise_multiplier)
      ),
      rounds,
    )


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(Sampling):
  """Every round has the same number of clients, drawn without replacement.

  Counted by theorem 27 of Wang, Balle and Kasiviswanathan 2019, which
  dp-accounting has. It is far from tight.

  Attributes:
    population: How many clients there are; this is public.
    clients_per_round: How many are drawn.
  """

  population: int
  clients_per_round: int
  name = 'fixed_size'
  neighbours = 'one user replaced'
  relation = dp_accounting.NeighboringRelation.REPLACE_ONE
  distance = 2.0
  renyi_orders = _FEW_ORDERS

  def __post_init__(self) -> None:
    check(
      0 < self.clients_per_round <= self.population,
      f'Clients in a round must be between 1 and {self.population}',
      self.clients_per_round,
    )

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """Sample without replacement."""
    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.SampledWithoutReplacementDpEvent(
        self.population,
        self.clients_per_round,
        dp_accounting.GaussianDpEvent(noise_multiplier / self.distance),
      ),
      rounds,
    )


@dataclasses.dataclass(frozen=True)
class EveryRound(LossDistributionSampling):
  """A client may be in every round, for whatever reason: chance does not help.

  It is in a round once at most. Cohorts have a fixed size, so neighbours differ
  in who one of the users is: with a user more, each round could have another
  cohort.
  """

  name = 'every_round'
  neighbours = 'one user replaced'
  distance = 2.0

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """No samples."""
    return dp_accounting.SelfComposedDpEvent(
      dp_accounting.GaussianDpEvent(noise_multiplier / self.distance), rounds
    )


@dataclasses.dataclass(frozen=True)
class EveryUpdate(EveryRound):
  """Local privacy: a client's updates look like any others, in each round.

  Two updates may differ by two clips. Chance does not help: who looks at a
  client sees when it sends.
  """

  name = 'local'
  neighbours = "one client's updates replaced"


@dataclasses.dataclass(frozen=True)
class OncePerTree(Sampling):
  """Tree aggregation: a client is in one round of each tree at most.

  Neighbours differ in one user, who sends zeros in one of them.

  Attributes:
    rounds_per_tree: After so many rounds a new tree begins.
  """

  rounds_per_tree: int
  name = 'once_per_tree'
  neighbours = 'one user silent'
  relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

  def __post_init__(self) -> None:
    check(
      self.rounds_per_tree > 0,
      'A tree must have a positive number of rounds',
      self.rounds_per_tree,
    )

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """All whole trees and what was begun."""
    whole, begun = divmod(rounds, self.rounds_per_tree)
    tree = dp_accounting.SingleEpochTreeAggregationDpEvent
    events: list[dp_accounting.DpEvent] = []
    if whole:
      event = tree(noise_multiplier, self.rounds_per_tree)
      events.append(dp_accounting.SelfComposedDpEvent(event, whole))
    if begun:
      events.append(tree(noise_multiplier, begun))
    return dp_accounting.ComposedDpEvent(events)


def joint_noise_multiplier(*parts: float) -> float:
  """The noise multiplier of one mechanism that costs as much as several.

  Args:
    *parts: Noise multipliers of what is released of the same clients.
  """
  if not parts or min(parts) <= 0.0:
    raise AccountingError(
      f'Parts need positive noise multipliers, found {list(parts)}.'
    )
  return sum(part**-2 for part in parts) ** -0.5


def check_delta(delta: float) -> None:
  """Raise an error if delta is no probability between 0 and 1."""
  check(0.0 < delta < 1.0, '`delta` must be between 0 and 1', delta)


def event(
  noise_multiplier: float,
  sampling: Sampling,
  rounds: int,
  once: Sequence[float] = (),
) -> dp_accounting.DpEvent:
  """A whole run in dp-accounting's words.

  Args:
    noise_multiplier: Of each round, all parts together.
    sampling: How clients come into a round.
    rounds: How many there are.
    once: Noise multipliers of what was released once of all clients, such as a
      mean that was computed before training.
  """
  for noise in (noise_multiplier, *once):
    check(noise > 0.0, 'A noise multiplier must be positive', noise)
  check(rounds >= 0, 'A number of rounds must not be negative', rounds)
  events = [
    dp_accounting.GaussianDpEvent(one / sampling.distance) for one in once
  ]
  if rounds:
    events.append(sampling.event(noise_multiplier, rounds))
  return dp_accounting.ComposedDpEvent(events)


@functools.lru_cache(maxsize=64)
def count(
  step: float,
  noise_multiplier: float,
  sampling: Sampling,
  rounds: int,
  delta: float,
  once: tuple[float, ...],
) -> float:
  """The epsilon of a whole run, counted in given steps."""
  happened = event(noise_multiplier, sampling, rounds, once)
  accountant = sampling.accountant(step).compose(happened)
  return float(accountant.get_epsilon(delta))
