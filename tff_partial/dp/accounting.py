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

from collections.abc import Sequence
import math

import scipy.optimize

from tff_partial.dp.samplings import AccountingError
from tff_partial.dp.samplings import check
from tff_partial.dp.samplings import check_delta
from tff_partial.dp.samplings import count
from tff_partial.dp.samplings import EveryUpdate
from tff_partial.dp.samplings import Sampling

# Noise is calibrated to this relative precision.
_PRECISION = 1e-4
# Noise beyond any use, where the search for an epsilon ends.
_MOST_NOISE = 1e4


class ImpossibleTargetError(AccountingError):
  """Raised when no noise reaches an epsilon; its message says which it can."""


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
  found = count(last, *what)
  # Up to twice the size, so that no target is just missed.
  while size is None and (step := sampling.loss_step(found / 2.0)) < last:
    found, last = count(step, *what), step
  return found


def local_epsilon(
  noise_multiplier: float, participations: int, delta: float
) -> float:
  """The epsilon of one client with local noise (`local_noise.local_noise`).

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
