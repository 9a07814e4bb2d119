"""Sampling of cohorts, and its privacy cost per round."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import dp_accounting

from tff_partial.dp import clipping as clipping_lib
from tff_partial.errors import PrivacyError

# Privacy losses are discretized and rounded up. These are the steps for
# epsilons up to a size: finer ones take more time and change only the fourth
# digit.
_LOSS_STEPS = {math.inf: 1e-2, 20.0: 2e-3, 0.5: 1e-4}

# Renyi orders with a short formula for independent sampling. Without the orders
# in between, the cost is mostly a few percent higher, and up to a fifth if the
# noise is small.
_WHOLE_ORDERS = (*range(2, 25), *range(28, 65, 4), 128, 256, 512)

# Renyi orders for cohorts of a fixed size, whose theorem is slow to evaluate.
_FEW_ORDERS = (1.25, 1.5, 1.75, *_WHOLE_ORDERS)


def check(is_good: bool, what: str, found: Any) -> None:
  """Raise an error that states a requirement, unless it is met."""
  if not is_good:
    raise PrivacyError(f'{what}, found {found}.')


class Sampling:
  """Sampling of the clients of a round.

  Attributes:
    name: For reports.
    neighbours: Description of neighbouring datasets, for reports.
    relation: These neighbours, as dp-accounting names them.
    distance: Number of clips by which one user moves a sum.
    renyi_orders: Orders of Renyi divergences to compute; None for
      dp-accounting's default.
  """

  name: str
  neighbours: str
  relation: dp_accounting.NeighboringRelation
  distance: float = 1.0
  renyi_orders: Sequence[float] | None = None

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """Return the dp-accounting event of all rounds."""
    noise = dp_accounting.GaussianDpEvent(noise_multiplier / self.distance)
    return dp_accounting.SelfComposedDpEvent(self.of_round(noise), rounds)

  def of_round(self, noise: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Return the event of a round, from that of its noise."""
    return noise

  def accountant(self, step: float) -> dp_accounting.PrivacyAccountant:
    """Make an accountant of such events, with a step of `loss_step`."""
    del step
    return self.renyi_accountant()

  def renyi_accountant(self) -> dp_accounting.rdp.RdpAccountant:
    """Make an accountant of Renyi divergences, which supports all samplings."""
    return dp_accounting.rdp.RdpAccountant(self.renyi_orders, self.relation)

  def loss_step(self, size: float) -> float:
    """Return the step for epsilons up to a size; 1 for Renyi divergences."""
    del size
    return 1.0


class LossDistributionSampling(Sampling):
  """Sampling counted by privacy loss distributions, as one mechanism."""

  relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
  renyi_orders = _WHOLE_ORDERS

  def accountant(self, step: float) -> dp_accounting.PrivacyAccountant:
    """Make an accountant of privacy loss distributions."""
    return dp_accounting.pld.PLDAccountant(
      self.relation, value_discretization_interval=step
    )

  def loss_step(self, size: float) -> float:
    """Return the step for epsilons up to a size."""
    return min(step for most, step in _LOSS_STEPS.items() if size <= most)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(LossDistributionSampling):
  """Each client is in a round independently with the same probability.

  Attributes:
    probability: Probability that a client is in a round.
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

  def of_round(self, noise: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Return the event of an independent sample."""
    return dp_accounting.PoissonSampledDpEvent(self.probability, noise)


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(Sampling):
  """Every round has the same number of clients, drawn without replacement.

  Counted by theorem 27 of Wang, Balle and Kasiviswanathan 2019, which
  dp-accounting implements. It is far from tight.

  Attributes:
    population: Number of clients; it is public.
    clients_per_round: Number of clients drawn.
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
      0 < self.clients_per_round <= self.population
      and float(self.clients_per_round).is_integer(),
      f'Clients in a round must be 1, 2, ... or {self.population}',
      self.clients_per_round,
    )

  def of_round(self, noise: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Return the event of sampling without replacement."""
    return dp_accounting.SampledWithoutReplacementDpEvent(
      self.population, self.clients_per_round, noise
    )


@dataclasses.dataclass(frozen=True)
class EveryRound(LossDistributionSampling):
  """A client may be in every round: sampling does not amplify privacy.

  It is in a round at most once. Cohorts have a fixed size, so neighbours differ
  by a replaced user: with an added user, each round could have another cohort.
  """

  name = 'every_round'
  neighbours = 'one user replaced'
  distance = 2.0


@dataclasses.dataclass(frozen=True)
class EveryUpdate(EveryRound):
  """Local privacy: any two updates of a client look alike, in each round.

  Two updates may differ by two clips. Sampling does not amplify privacy: an
  observer of a client sees when it sends.
  """

  name = 'local'
  neighbours = "one client's updates replaced"


@dataclasses.dataclass(frozen=True)
class OncePerTree(Sampling):
  """Tree aggregation: a client is in at most one round of each tree.

  Neighbours differ in one user, who sends zeros in one of them.

  Attributes:
    rounds_per_tree: Number of rounds after which a new tree starts.
  """

  rounds_per_tree: int
  name = 'once_per_tree'
  neighbours = 'one user silent'
  relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL

  def __post_init__(self) -> None:
    check(
      self.rounds_per_tree > 0 and float(self.rounds_per_tree).is_integer(),
      'A tree must have a positive whole number of rounds',
      self.rounds_per_tree,
    )

  def event(
    self, noise_multiplier: float, rounds: int
  ) -> dp_accounting.DpEvent:
    """Return the event of all complete trees and of the last, partial one."""
    whole, begun = divmod(rounds, self.rounds_per_tree)
    tree = dp_accounting.SingleEpochTreeAggregationDpEvent
    events: list[dp_accounting.DpEvent] = []
    if whole:
      event = tree(noise_multiplier, self.rounds_per_tree)
      events.append(dp_accounting.SelfComposedDpEvent(event, whole))
    if begun:
      events.append(tree(noise_multiplier, begun))
    return dp_accounting.ComposedDpEvent(events)


# Names of the samplings.
NAMES = (
  PoissonSampling.name,
  FixedSizeSampling.name,
  EveryRound.name,
  EveryUpdate.name,
  OncePerTree.name,
)


def by_name(
  name: str,
  clipping: clipping_lib.Clippings,
  population: int,
  clients_per_round: int,
) -> Sampling:
  """Make the sampling with a name.

  Args:
    name: One of `NAMES`.
    clipping: Clipping of an update; trees contain their number of rounds.
    population: Number of clients in the population.
    clients_per_round: Number of clients in a round, possibly expected.

  Raises:
    PrivacyError: If the sampling does not fit the other arguments.
  """
  check(
    0 < clients_per_round <= population,
    f'Clients in a round must be between 1 and {population}',
    clients_per_round,
  )
  kinds = clipping_lib.parts_of(clipping).values()
  trees = [how for how in kinds if isinstance(how, clipping_lib.TreeNoise)]
  if bool(trees) != (name == OncePerTree.name):
    raise PrivacyError(
      f'Sampling {OncePerTree.name!r} and TreeNoise need one another, found '
      f'{name!r} and {clipping}.'
    )
  if trees:
    rounds = trees[0].rounds_per_tree
    if rounds * clients_per_round > population:
      raise PrivacyError(
        f'{population} clients cannot fill {rounds} rounds of '
        f'{clients_per_round} without taking part twice in a tree. Give '
        f'TreeNoise {population // clients_per_round} rounds at most.'
      )
    return OncePerTree(rounds)
  is_fixed = isinstance(clipping, clipping_lib.FixedClip)
  if name == EveryUpdate.name and not is_fixed:
    raise PrivacyError(
      f'Sampling {name!r} is for local noise, which needs a FixedClip, as no '
      f'client knows the others, found {clipping}.'
    )
  if name == PoissonSampling.name:
    return PoissonSampling(clients_per_round / population)
  if name == FixedSizeSampling.name:
    return FixedSizeSampling(population, clients_per_round)
  for kind in (EveryRound, EveryUpdate):
    if name == kind.name:
      return kind()
  raise PrivacyError(f'Sampling must be one of {NAMES}, found {name!r}.')


def check_delta(delta: float) -> None:
  """Raise an error if delta is not strictly between 0 and 1."""
  check(0.0 < delta < 1.0, '`delta` must be between 0 and 1', delta)


def event(
  noise_multiplier: float,
  sampling: Sampling,
  rounds: int,
  once: Sequence[float] = (),
) -> dp_accounting.DpEvent:
  """Return the dp-accounting event of a whole run.

  `once` are noise multipliers of one-time releases about all clients, such as a
  mean that was computed before training.
  """
  own = [('noise_multiplier', noise_multiplier)] if rounds else []
  for name, noise in (*own, *(('once', one) for one in once)):
    clipping_lib.check_positive(noise, name)
  check(
    rounds >= 0 and float(rounds).is_integer(),
    'A number of rounds must be a whole number, and not negative',
    rounds,
  )
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
  """Compute the epsilon of a whole run with a given step."""
  happened = event(noise_multiplier, sampling, rounds, once)
  accountant = sampling.accountant(step).compose(happened)
  return float(accountant.get_epsilon(delta))
