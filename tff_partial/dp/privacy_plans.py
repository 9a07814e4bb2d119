"""Privacy plans of runs, and ledgers of the privacy spent so far."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

from absl import logging
import dp_accounting
import numpy as np

from tff_partial.dp import accounting
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import mechanisms
from tff_partial.dp import noise_norms
from tff_partial.dp import privacy
from tff_partial.dp import samplings
from tff_partial.errors import PrivacyError

# Number of rounds at which the ledger computes privacy loss distributions, with
# the step for epsilons this many times the plan's.
_COUNTED_ROUNDS, _COARSENESS = 5, 10.0


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
  """The guarantee of a run that follows the plan.

  Attributes:
    epsilon: Epsilon of the whole run.
    delta: The delta of the guarantee.
    noise_multiplier: Noise multiplier of each round, all parts together.
    rounds: Number of planned rounds.
    sampling: The sampling of clients for a round.
    population: Number of clients in the population.
    clients_per_round: Expected number of clients in a round.
    clipping: Clipping of an update.
    once: Noise multipliers of one-time releases.
    once_delta: Share of delta for one-time releases.
    num_weights: Number of elements of an update, if given.
  """

  epsilon: float
  delta: float
  noise_multiplier: float
  rounds: int
  sampling: samplings.Sampling
  population: int
  clients_per_round: int
  clipping: clipping_lib.Clippings
  once: tuple[float, ...]
  once_delta: float = 0.0
  num_weights: int | Mapping[str, int] | None = dataclasses.field(
    default=None, repr=False, compare=False
  )

  @property
  def delta_of_noise(self) -> float:
    """The rest of delta, for all noise."""
    return self.delta - self.once_delta

  def mean(
    self, *, noise_seed: int | None = None, diagnostics: bool = False
  ) -> privacy.PrivateFactory:
    """Make the aggregator that follows the plan.

    Args:
      noise_seed: Makes a simulation with reproducible noise. By default each
        process has a secret seed from the operating system.
      diagnostics: True for exact measurements, which are not private.
    """
    return privacy.private_mean(
      self.clipping,
      noise_multiplier=self.noise_multiplier,
      clients_per_round=self.clients_per_round,
      noise_seed=noise_seed,
      diagnostics=diagnostics,
    )

  def local_noise(
    self, *, noise_seed: int | None = None
  ) -> local_noise.LocalNoise:
    """Make the clients' noise, if the plan is one of local noise.

    Args:
      noise_seed: Makes a simulation's noise reproducible. By default it follows
        from the clients' seeds alone, which must be secret.

    Raises:
      PrivacyError: If the plan is one of central noise.
    """
    if not self.is_local:
      raise PrivacyError(
        'Local noise takes a plan with '
        f'sampling={samplings.EveryUpdate.name!r}, found '
        f'{self.sampling.name!r}.'
      )
    clip = self.clipping.clip  # type: ignore[union-attr]  # See samplings.by_name.
    return local_noise.LocalNoise(clip, self.noise_multiplier, noise_seed)

  @property
  def is_local(self) -> bool:
    """True if each client adds noise, false if the server does."""
    return isinstance(self.sampling, samplings.EveryUpdate)

  def noise_norm(
    self, num_weights: int | Mapping[str, int]
  ) -> noise_norms.NoiseNorm:
    """Compute the norm of the noise in a round's mean update.

    Args:
      num_weights: Number of elements of an update; by part, if the clipping is.

    Raises:
      PrivacyError: If the parts do not match those of the clipping.
    """
    return noise_norms.of_mean(self, num_weights)

  def __str__(self) -> str:
    """Describe the run's cost, and its noise relative to the update."""
    ones: int | Mapping[str, int] = 1
    if isinstance(self.clipping, Mapping):
      ones = dict.fromkeys(self.clipping, 1)
    of_one = self.noise_norm(ones).ratio
    lines = [
      f'epsilon {self.epsilon:.4g} at delta {self.delta:.3g} after '
      f'{self.rounds} rounds, noise multiplier {self.noise_multiplier:.4g}, '
      f'{self.sampling.name} sampling'
    ]
    if self.num_weights is not None:
      lines.append(f'noise: {self.noise_norm(self.num_weights)}')
    elif of_one:
      each = ' in each part' if isinstance(self.clipping, Mapping) else ''
      lines.append(
        'noise: as long as the largest mean update at '
        f'{of_one**-2:.3g} weights{each}, and with more of them longer'
      )
    return '\n'.join(lines)

  @property
  def mechanism(self) -> mechanisms.Mechanism:
    """The mechanism that a process must have to be counted by this plan."""
    if self.is_local:
      return self.local_noise().mechanism
    return self.mean().mechanism

  @property
  def terms(self) -> str:
    """Terms that must stay the same during a run: all but its length."""
    return repr(dataclasses.replace(self, epsilon=0.0, rounds=0))


def plan(
  clipping: clipping_lib.Clippings,
  *,
  delta: float,
  population: int,
  clients_per_round: int,
  rounds: int,
  target_epsilon: float | None = None,
  noise_multiplier: float | None = None,
  sampling: str = samplings.PoissonSampling.name,
  once: Sequence[float] = (),
  once_delta: float = 0.0,
  num_weights: int | Mapping[str, int] | None = None,
) -> PrivacyPlan:
  """Plan a run: find the noise for an epsilon, or the epsilon of a noise.

  Args:
    clipping: Clipping of an update: joint, or by part with the names of tiers.
    delta: The delta of the guarantee; below 1 / population.
    population: Number of users. It is public.
    clients_per_round: Number of clients in a round, possibly expected.
    rounds: Number of rounds.
    target_epsilon: The largest epsilon of the run, or None.
    noise_multiplier: Given instead of a target. Zero for a run without privacy.
    sampling: One of `samplings.NAMES`; must match the actual sampling.
    once: Noise multipliers of one-time releases about all users, such as a mean
      that was computed before training.
    once_delta: Part of `delta`: the probability that these fail altogether, as
      a threshold does.
    num_weights: Number of elements of an update; by part, if the clipping is.
      With it, `print(plan)` shows the norm of the noise, and a warning is
      logged if the noise drowns the updates.

  Raises:
    PrivacyError: If an argument is invalid, or no noise suffices.
  """
  samplings.check_delta(delta)
  kind = samplings.by_name(sampling, clipping, population, clients_per_round)
  _check_delta(delta, once_delta, population)
  samplings.check(
    0 < rounds < math.inf and rounds == int(rounds),
    'A number of rounds must be a positive integer',
    rounds,
  )
  spent = (kind, rounds, delta - once_delta, tuple(once))
  if target_epsilon is not None and noise_multiplier is None:
    most = clipping_lib.largest_noise_multiplier(clipping, clients_per_round)
    noise_multiplier = accounting.calibrate(target_epsilon, *spent, most)
  elif target_epsilon is not None or noise_multiplier is None:
    raise PrivacyError(
      'Give either `target_epsilon` or `noise_multiplier`, found '
      f'{target_epsilon} and {noise_multiplier}.'
    )
  samplings.check(
    0.0 <= noise_multiplier < math.inf,
    'A noise multiplier must not be negative or infinite',
    noise_multiplier,
  )
  planned = PrivacyPlan(
    accounting.epsilon(noise_multiplier, *spent, size=target_epsilon),
    delta,
    noise_multiplier,
    rounds,
    kind,
    population,
    clients_per_round,
    clipping,
    tuple(once),
    once_delta,
    num_weights,
  )
  planned.mean()  # Raises an error if the aggregator is impossible.
  if num_weights is not None:
    norm = planned.noise_norm(num_weights)
    if norm.is_hopeless:
      logging.warning('Noise of %s. %s', norm, norm.warning)
  return planned


def _check_delta(delta: float, once_delta: float, population: int) -> None:
  """Check the delta of a guarantee and its share for one-time releases."""
  if delta * population >= 1.0:
    raise PrivacyError(
      f'`delta` must be below 1 / population, {1.0 / population:.3g}: '
      f'{delta:.3g} would allow publishing one of the {population} users.'
    )
  samplings.check(
    0.0 <= once_delta < delta,
    f'What is released once must leave something of delta, {delta:.3g}, so '
    '`once_delta` must be at least 0 and less',
    once_delta,
  )


class PrivacyLedger:
  """The privacy spent of a plan, cheaply computed for each round.

  Renyi divergences add up, so they are computed once for a round. Where privacy
  loss distributions are tighter, they are computed at only five rounds, and
  also hold for earlier ones. Both are upper bounds; the last is the plan's.
  """

  def __init__(
    self, plan: PrivacyPlan, *, simulation: bool = False, released: str = ''
  ):
    """Store the plan.

    Args:
      plan: The plan of the run.
      simulation: True if a seed of the noise or of the sampling is known, or if
        the population is not the plan's; epsilon is then the cost that the run
        would otherwise have.
      released: The fingerprint of the one-time releases before the first round,
        which `plan` counts as `once`. A run resumes only with the same ones.
    """
    self.plan = plan
    self.simulation = simulation
    self.released = released

  def check(self, mechanism: mechanisms.Mechanism | None) -> None:
    """Refuse a process that does not follow the plan.

    Args:
      mechanism: The process's `PartialProcess.mechanism`.

    Raises:
      PrivacyError: If it is None, another one, or one with reproducible
        noise although the ledger is not for a simulation.
    """
    planned = self.plan.mechanism
    if mechanism is None:
      raise PrivacyError(
        'The ledger would count noise that the process does not add: its '
        'updates are joined without it, or by an aggregator that does not say '
        'what it does. Build the process with '
        'aggregation=Aggregation(plan.mean()) (for local noise, with '
        'postprocess_update=plan.local_noise()), or train without a ledger.'
      )
    for field in dataclasses.fields(mechanisms.Mechanism):
      found, expected = (
        getattr(one, field.name) for one in (mechanism, planned)
      )
      if field.name != 'is_simulation' and found != expected:
        raise PrivacyError(
          'The ledger would count other noise than the process adds: its plan '
          f'has {field.name}={expected}, the process has {found}. Build the '
          'process with what this plan makes.'
        )
    if mechanism.is_simulation and not self.simulation:
      raise PrivacyError(
        'The noise of this process follows from `noise_seed`: anyone who knows '
        'it sees through the noise. Make the ledger with simulation=True, or '
        'leave the seed out.'
      )

  def _counted(self, rounds: int) -> float:
    plan = self.plan
    if rounds == plan.rounds:
      return plan.epsilon
    return accounting.epsilon(
      plan.noise_multiplier,
      plan.sampling,
      rounds,
      plan.delta_of_noise,
      plan.once,
      size=_COARSENESS * plan.epsilon,
    )

  @functools.cached_property
  def _renyi(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Orders, and divergences of the one-time releases and of a round."""
    plan, divergences = self.plan, []
    for rounds in (0, 1):
      accountant = plan.sampling.renyi_accountant()
      happened = samplings.event(
        plan.noise_multiplier, plan.sampling, rounds, plan.once
      )
      divergences.append(accountant.compose(happened).rdp)
    return accountant.orders, divergences[0], divergences[1] - divergences[0]

  def epsilon(self, rounds: int) -> float:
    """Return the epsilon spent after some rounds, maybe more than planned."""
    plan = self.plan
    is_tree = isinstance(plan.sampling, samplings.OncePerTree)
    if is_tree or not (rounds and plan.noise_multiplier):
      return self._counted(rounds)
    orders, once, each = self._renyi
    bound, _ = dp_accounting.rdp.compute_epsilon(
      orders, once + rounds * each, plan.delta_of_noise
    )
    if isinstance(plan.sampling, samplings.LossDistributionSampling):
      step = -(-plan.rounds // _COUNTED_ROUNDS)
      later = -(-rounds // step) * step
      if rounds <= plan.rounds:
        later = min(later, plan.rounds)
      bound = min(bound, self._counted(later))
    return float(bound)

  def columns(self, rounds: int) -> dict[str, float]:
    """Return a run's privacy after some rounds, for the table of metrics."""
    return {
      'privacy/epsilon': self.epsilon(rounds),
      'privacy/delta': self.plan.delta,
      'privacy/noise_multiplier': self.plan.noise_multiplier,
    }

  def report(
    self, rounds: int, assumed_public: Iterable[str] = (), **measured: Any
  ) -> dict[str, Any]:
    """Return a run's privacy, for `result.json`.

    Args:
      rounds: Rounds of the run so far.
      assumed_public: Anything besides the number of clients that came from
        their data without noise, such as a vocabulary.
      **measured: Further entries, such as the clip.
    """
    plan = self.plan
    return {
      'epsilon': self.epsilon(rounds),
      'delta': plan.delta,
      'noise_multiplier': plan.noise_multiplier,
      'sampling': plan.sampling.name,
      'neighbours': plan.sampling.neighbours,
      'rounds': rounds,
      'population': plan.population,
      'clients_per_round': plan.clients_per_round,
      'simulation': self.simulation,
      'assumed_public': ['population', *assumed_public],
      **measured,
    }
