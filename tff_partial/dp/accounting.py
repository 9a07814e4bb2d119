"""What a private run costs, and how much noise a budget takes.

Costs are counted by dp-accounting, for a user's whole part in a run, as
(epsilon, delta)-differential privacy of all that is released in all rounds.
How clients come into a round decides which datasets are neighbours, whether
chance helps, and who counts:

| sampling | neighbours | counted by |
|---|---|---|
| `PoissonSampling` | one user more or less | privacy loss distributions |
| `FixedSizeSampling` | one user replaced | Renyi divergences |
| `EveryRound` | one user replaced | privacy loss distributions |
| `EveryUpdate` | one client's updates replaced | privacy loss distributions |
| `OncePerTree` | one user silent | Renyi divergences |

A noise multiplier is the noise's standard deviation in clips. Adding or
removing a user moves a sum by one clip, replacing one by two, so there the
noise multiplier counts half. "One user more or less" holds for independent
draws alone: in a cohort of fixed size, a user more takes the place of another.
All numbers are upper bounds.
"""

import abc
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import dp_accounting
import scipy.optimize

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
# Noise is calibrated to this relative precision.
_PRECISION = 1e-4
# Noise beyond any use, where the search for an epsilon ends.
_MOST_NOISE = 1e4


class AccountingError(errors.UserError, ValueError):
  """Raised when nothing can be promised for what is asked."""


class ImpossibleTargetError(AccountingError):
  """Raised when no noise reaches an epsilon; its message says which it can."""


def check(is_good: bool, what: str, found: Any) -> None:
  """Raises an error that says what something must be, unless it is that."""
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
    """Counts by privacy loss distributions."""
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
    """Samples without replacement."""
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
  """Raises an error if delta is no probability between 0 and 1."""
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
def _count(
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


def epsilon(
  noise_multiplier: float,
  sampling: Sampling,
  rounds: int,
  delta: float,
  once: Sequence[float] = (),
  size: float | None = None,
) -> float:
  """The epsilon of a whole run; infinity without noise.

  Args:
    noise_multiplier: Standard deviation of the noise of a round in clips.
    sampling: How clients come into a round.
    rounds: How many rounds there are.
    delta: At which epsilon is wanted.
    once: Noise multipliers of what is released once of all users besides.
    size: Counts once, in the steps for epsilons up to this size, which saves
      time. If None, counts in coarse steps first and then, if epsilon is small,
      in finer ones.

  Raises:
    AccountingError: If an argument is impossible.
  """
  check_delta(delta)
  if not rounds and not once:
    return 0.0
  if not noise_multiplier and rounds:
    return math.inf
  what = (noise_multiplier, sampling, rounds, delta, tuple(once))
  last = sampling.loss_step(math.inf if size is None else size)
  found = _count(last, *what)
  # Up to twice the size, so that no target is just missed.
  while size is None and (step := sampling.loss_step(found / 2.0)) < last:
    found, last = _count(step, *what), step
  return found


def local_epsilon(
  noise_multiplier: float, participations: int, delta: float
) -> float:
  """The epsilon of one client with local noise (`privacy.local_noise`).

  Args:
    noise_multiplier: Standard deviation of the noise in clips.
    participations: How often the client sends.
    delta: At which epsilon is wanted.
  """
  return epsilon(noise_multiplier, EveryUpdate(), participations, delta)


def calibrate(
  target_epsilon: float,
  sampling: Sampling,
  rounds: int,
  delta: float,
  once: Sequence[float] = (),
  largest_noise_multiplier: float = math.inf,
) -> float:
  """The least noise multiplier whose epsilon is not above the target.

  Args:
    target_epsilon: For the whole run.
    sampling: How clients come into a round.
    rounds: How many rounds there are.
    delta: At which epsilon is meant.
    once: Noise multipliers of what is released once of all users besides; it
      is paid for first.
    largest_noise_multiplier: What must not be reached; see `privacy`.

  Raises:
    AccountingError: If an argument is impossible.
    ImpossibleTargetError: If no noise is enough.
  """
  check_delta(delta)
  check(
    0.0 < target_epsilon < math.inf,
    '`target_epsilon` must be a finite number above zero',
    target_epsilon,
  )
  check(rounds > 0, 'A number of rounds must be positive', rounds)

  def cost(noise: float, size: float = target_epsilon) -> float:
    return epsilon(noise, sampling, rounds, delta, once, size)

  most = min(largest_noise_multiplier * (1.0 - _PRECISION), _MOST_NOISE)
  # From below in coarse steps: a great epsilon takes long to count finely.
  high = min(1.0, most)
  while (
    cost(high, math.inf if high < most else target_epsilon) > target_epsilon
  ):
    if high >= most:
      nearest = epsilon(most, sampling, rounds, delta, once)
      raise ImpossibleTargetError(
        f'Epsilon {target_epsilon:.4g} at delta {delta:.4g} is out of reach; '
        f'the nearest possible is {nearest:.4g}, with the noise multiplier '
        f'{most:.4g}. '
        + (
          'More noise needs a larger `count_stddev` of AdaptiveClip, or '
          'FixedClip.'
          if most < _MOST_NOISE
          else 'What is released once costs too much, or so small an epsilon '
          'cannot be counted.'
        )
      )
    high = min(2.0 * high, most)
  low = high / 2.0
  while cost(low) <= target_epsilon:
    low, high = low / 2.0, low
  precision = _PRECISION * high
  found = scipy.optimize.brentq(
    lambda noise: cost(noise) - target_epsilon, low, high, xtol=precision
  )
  while cost(found) > target_epsilon:
    found += precision
  return float(min(found, high))
