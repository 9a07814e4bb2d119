"""What a run promises, and what it has spent so far."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
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

# At as many rounds the ledger counts privacy loss distributions, as coarsely as
# for epsilons so many times the plan's.
_COUNTED_ROUNDS, _COARSENESS = 5, 10.0


@dataclasses.dataclass(frozen=True)
class PrivacyPlan:
  """What a run promises, for as long as it does what the plan says.

  Attributes:
    epsilon: Of the whole run.
    delta: At which epsilon is meant.
    noise_multiplier: Of each round, all parts together.
    rounds: How many there will be.
    sampling: How clients come into a round.
    population: How many clients there are.
    clients_per_round: As many are expected.
    clipping: How what clients send is clipped.
    shares: Each part's share of what is spent, or None.
    once: Noise multipliers of what is released once.
    once_delta: Share of delta that goes to what is released once.
    num_weights: How many numbers a client sends, if that was said.
  """

  epsilon: float
  delta: float
  noise_multiplier: float
  rounds: int
  sampling: samplings.Sampling
  population: int
  clients_per_round: int
  clipping: clipping_lib.Clippings
  shares: Mapping[str, float] | None
  once: tuple[float, ...]
  once_delta: float = 0.0
  num_weights: int | Mapping[str, int] | None = dataclasses.field(
    default=None, repr=False, compare=False
  )

  @property
  def delta_of_noise(self) -> float:
    """What is left of delta for all noise."""
    return self.delta - self.once_delta

  def mean(
    self, *, noise_seed: int | None = None, diagnostics: bool = False
  ) -> privacy.PrivateFactory:
    """The aggregator that does what the plan says.

    Args:
      noise_seed: Makes a simulation whose noise can be drawn again. By default
        each process has a secret seed from the operating system.
      diagnostics: Whether exact measurements are made, which are not private.
    """
    return privacy.private_mean(
      self.clipping,
      noise_multiplier=self.noise_multiplier,
      clients_per_round=self.clients_per_round,
      shares=self.shares,
      noise_seed=noise_seed,
      diagnostics=diagnostics,
    )

  def local_noise(
    self, *, noise_seed: int | None = None
  ) -> local_noise.LocalNoise:
    """What clients do before they send, if the plan is one of local noise.

    Args:
      noise_seed: Draws the noise of a simulation again. By default it follows
        from the clients' seeds alone, which must be secret.

    Raises:
      AccountingError: If the plan is one of central noise.
    """
    if not self.is_local:
      raise samplings.AccountingError(
        'Local noise takes a plan with '
        f'sampling={samplings.EveryUpdate.name!r}, found '
        f'{self.sampling.name!r}.'
      )
    clip = self.clipping.clip  # type: ignore[union-attr]  # See sampling_of.
    return local_noise.LocalNoise(clip, self.noise_multiplier, noise_seed)

  @property
  def is_local(self) -> bool:
    """Whether each client adds noise, and not the server."""
    return isinstance(self.sampling, samplings.EveryUpdate)

  def noise_norm(
    self, num_weights: int | Mapping[str, int]
  ) -> noise_norms.NoiseNorm:
    """Compute how long the noise of a round's mean update is.

    Args:
      num_weights: How many numbers a client sends; by part, if the clipping is.

    Raises:
      PrivacyError: If the parts are not those of the clipping.
    """
    return noise_norms.of_mean(
      self.clipping,
      self.noise_multiplier,
      self.clients_per_round,
      num_weights,
      shares=self.shares,
      is_local=self.is_local,
    )

  def __str__(self) -> str:
    """What the run costs, and from how many weights on noise prevails."""
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
    """What a process must do to be counted by this plan."""
    is_local = self.is_local
    return mechanisms.Mechanism(
      mechanisms.LOCAL if is_local else mechanisms.CENTRAL,
      self.clipping,
      self.noise_multiplier,
      None if is_local else self.clients_per_round,
      None if is_local else self.shares,
      is_simulation=False,
    )

  @property
  def terms(self) -> str:
    """What must not change while a run lasts, so all but its length."""
    return repr(dataclasses.replace(self, epsilon=0.0, rounds=0))


def sampling_of(
  name: str,
  clipping: clipping_lib.Clippings,
  population: int,
  clients_per_round: int,
) -> samplings.Sampling:
  """The sampling with a name.

  Args:
    name: Of one of the samplings in `accounting`, as in `SAMPLINGS`.
    clipping: How what clients send is clipped; trees know their rounds.
    population: How many clients there are.
    clients_per_round: How many are in a round, or are expected to be.

  Raises:
    AccountingError: If the sampling does not fit the rest.
  """
  samplings.check(
    0 < clients_per_round <= population,
    f'Clients in a round must be between 1 and {population}',
    clients_per_round,
  )
  if isinstance(clipping, Mapping):
    kinds = list(clipping.values())
  else:
    kinds = [clipping]
  trees = [how for how in kinds if isinstance(how, clipping_lib.TreeNoise)]
  if bool(trees) != (name == samplings.OncePerTree.name):
    raise samplings.AccountingError(
      f'Sampling {samplings.OncePerTree.name!r} and TreeNoise need one '
      f'another, found {name!r} and {clipping}.'
    )
  if trees:
    rounds = trees[0].rounds_per_tree
    if rounds * clients_per_round > population:
      raise samplings.AccountingError(
        f'{population} clients cannot fill {rounds} rounds of '
        f'{clients_per_round} without taking part twice in a tree. Give '
        f'TreeNoise {population // clients_per_round} rounds at most.'
      )
    return samplings.OncePerTree(rounds)
  if name == samplings.PoissonSampling.name:
    return samplings.PoissonSampling(clients_per_round / population)
  if name == samplings.FixedSizeSampling.name:
    return samplings.FixedSizeSampling(population, clients_per_round)
  if name == samplings.EveryRound.name:
    return samplings.EveryRound()
  if name == samplings.EveryUpdate.name:
    if not isinstance(clipping, clipping_lib.FixedClip):
      raise samplings.AccountingError(
        f'Sampling {name!r} is for local noise, which needs a FixedClip, as no '
        f'client knows the others, found {clipping}.'
      )
    return samplings.EveryUpdate()
  raise samplings.AccountingError(
    f'Sampling must be one of {SAMPLINGS}, found {name!r}.'
  )


SAMPLINGS = (
  samplings.PoissonSampling.name,
  samplings.FixedSizeSampling.name,
  samplings.EveryRound.name,
  samplings.EveryUpdate.name,
  samplings.OncePerTree.name,
)


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
  shares: Mapping[str, float] | None = None,
  once: Sequence[float] = (),
  once_delta: float = 0.0,
  num_weights: int | Mapping[str, int] | None = None,
) -> PrivacyPlan:
  """Plans a run: the noise for an epsilon, or the epsilon of a noise.

  Args:
    clipping: How the whole of what a client sends is clipped jointly, or how
      each part is: by the name of a tier.
    delta: At which epsilon is meant; below one in the population.
    population: How many users there are. It is public.
    clients_per_round: How many are in a round, or are expected to be.
    rounds: How many rounds there will be.
    target_epsilon: What the run may cost, or None.
    noise_multiplier: What is given instead of a target, or None. Zero for a
      run that costs everything: its epsilon is infinite.
    sampling: One of `SAMPLINGS`: what is really done.
    shares: Each part's share of what is spent; equal ones by default.
    once: Noise multipliers of what is released once of all users, such as a
      mean that was computed before training.
    once_delta: With what probability that may fail altogether, as a threshold
      does; a part of `delta`.
    num_weights: How many numbers a client sends; by part, if the clipping is.
      With it, `print(plan)` says how long the noise is, and a warning where it
      drowns what clients learn.

  Raises:
    AccountingError, PrivacyError: If an argument is impossible.
    ImpossibleTargetError: If no noise is enough.
  """
  samplings.check_delta(delta)
  kind = sampling_of(sampling, clipping, population, clients_per_round)
  if delta * population >= 1.0:
    raise samplings.AccountingError(
      f'`delta` must be below one in the population, {1.0 / population:.3g}: '
      f'publishing one user of {population} would be allowed at {delta:.3g}.'
    )
  samplings.check(
    0.0 <= once_delta < delta,
    f'What is released once must leave something of delta, {delta:.3g}, so '
    '`once_delta` must be at least 0 and less',
    once_delta,
  )
  samplings.check(rounds > 0, 'A number of rounds must be positive', rounds)
  if target_epsilon is not None and noise_multiplier is None:
    noise_multiplier = accounting.calibrate(
      target_epsilon,
      kind,
      rounds,
      delta - once_delta,
      once,
      clipping_lib.largest_noise_multiplier(
        clipping, clients_per_round, shares
      ),
    )
  elif target_epsilon is not None or noise_multiplier is None:
    raise samplings.AccountingError(
      'Give either `target_epsilon` or `noise_multiplier`, found '
      f'{target_epsilon} and {noise_multiplier}.'
    )
  samplings.check(
    noise_multiplier >= 0.0,
    'A noise multiplier must not be negative',
    noise_multiplier,
  )
  planned = PrivacyPlan(
    accounting.epsilon(
      noise_multiplier,
      kind,
      rounds,
      delta - once_delta,
      once,
      size=target_epsilon,
    ),
    delta,
    noise_multiplier,
    rounds,
    kind,
    population,
    clients_per_round,
    clipping,
    shares,
    tuple(once),
    once_delta,
    num_weights,
  )
  planned.mean()  # Which refuses what it cannot do.
  if num_weights is not None:
    norm = planned.noise_norm(num_weights)
    if norm.is_hopeless:
      logging.warning('Noise of %s. %s', norm, norm.warning)
  return planned


class PrivacyLedger:
  """How much of a plan is spent, round by round, at next to no cost.

  Renyi divergences add up, so they are counted once for a round. Where privacy
  loss distributions are less, these are counted at five rounds only, and hold
  for the rounds before, too. Both are upper bounds; the last is the plan's.
  """

  def __init__(
    self, plan: PrivacyPlan, *, simulation: bool = False, released: str = ''
  ):
    """Keep the plan; counts nothing yet.

    Args:
      plan: Of the run.
      simulation: Whether somebody knows a seed of the noise or of the sampling,
        or the population is not that of the plan; epsilon is then what the run
        would cost if that were not so.
      released: The fingerprint of what was released once before the first
        round, which `plan` counts as `once`. A run goes on with the same only.
    """
    self.plan = plan
    self.simulation = simulation
    self.released = released

  def check(self, mechanism: mechanisms.Mechanism | None) -> None:
    """Refuses to count a process that does not do what the plan says.

    Args:
      mechanism: What the process carries, `PartialProcess.mechanism`.

    Raises:
      AccountingError: If it is none, another one, or one whose noise somebody
        can draw again although this is not said to be a simulation.
    """
    planned = self.plan.mechanism
    if mechanism is None:
      raise samplings.AccountingError(
        'The ledger would count noise that the process does not add: its '
        'updates are joined without it, or by an aggregator that does not say '
        'what it does. Build the process with aggregator=plan.mean() (for '
        'local noise, with before_sending=plan.local_noise()), or train '
        'without a ledger.'
      )
    for field in dataclasses.fields(mechanisms.Mechanism):
      found, expected = (
        getattr(one, field.name) for one in (mechanism, planned)
      )
      if field.name != 'is_simulation' and found != expected:
        raise samplings.AccountingError(
          'The ledger would count other noise than the process adds: its plan '
          f'has {field.name}={expected}, the process has {found}. Build the '
          'process with what this plan makes.'
        )
    if mechanism.is_simulation and not self.simulation:
      raise samplings.AccountingError(
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
    """Orders, the divergence of what is released once, and that of a round."""
    plan, divergences = self.plan, []
    for rounds in (0, 1):
      accountant = plan.sampling.renyi_accountant()
      happened = samplings.event(
        plan.noise_multiplier, plan.sampling, rounds, plan.once
      )
      divergences.append(accountant.compose(happened).rdp)
    return accountant.orders, divergences[0], divergences[1] - divergences[0]

  def epsilon(self, rounds: int) -> float:
    """What is spent after so many rounds.

    Args:
      rounds: Of the run so far; it may be longer than was planned.
    """
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
    """What the table of metrics says of a run's privacy after a round.

    Args:
      rounds: Of the run so far.
    """
    return {
      'privacy/epsilon': self.epsilon(rounds),
      'privacy/delta': self.plan.delta,
      'privacy/noise_multiplier': self.plan.noise_multiplier,
    }

  def report(
    self, rounds: int, assumed_public: Iterable[str] = (), **measured: Any
  ) -> dict[str, Any]:
    """What `result.json` says of a run's privacy.

    Args:
      rounds: Of the run so far.
      assumed_public: What beside the number of clients came from their data
        without noise, such as a vocabulary.
      **measured: What else is to be said, such as the clip.
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
