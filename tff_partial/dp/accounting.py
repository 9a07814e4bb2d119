"""Privacy cost of a run, and the noise that a privacy budget requires.

dp-accounting computes costs of a user's whole participation in a run, as
(epsilon, delta)-differential privacy of all that is released in all rounds. The
sampling of clients determines the neighbouring datasets, whether sampling
amplifies privacy, and the method of accounting:

| sampling | neighbours | counted by |
|---|---|---|
| `PoissonSampling` | one user more or less | privacy loss distributions |
| `FixedSizeSampling` | one user replaced | Renyi divergences |
| `EveryRound` | one user replaced | privacy loss distributions |
| `EveryUpdate` | one client's updates replaced | privacy loss distributions |
| `OncePerTree` | one user silent | Renyi divergences |

A noise multiplier is the noise's standard deviation in clips. Adding or
removing a user moves a sum by one clip, replacing one by two, which halves the
effective noise multiplier. "One user more or less" holds only for independent
draws: in a cohort of fixed size, an added user takes another's place. All
numbers are upper bounds.
"""

from collections.abc import Sequence
import math

import scipy.optimize

from tff_partial.dp.samplings import check
from tff_partial.dp.samplings import check_delta
from tff_partial.dp.samplings import count
from tff_partial.dp.samplings import EveryUpdate
from tff_partial.dp.samplings import Sampling
from tff_partial.errors import PrivacyError

# Relative precision of calibrated noise multipliers.
_PRECISION = 1e-4
# Noise too large to be useful; the search for an epsilon ends there.
_MOST_NOISE = 1e4


def epsilon(
  noise_multiplier: float,
  sampling: Sampling,
  rounds: int,
  delta: float,
  once: Sequence[float] = (),
  size: float | None = None,
) -> float:
  """Compute the epsilon of a whole run; infinity without noise.

  Args:
    noise_multiplier: Standard deviation of a round's noise in clips.
    sampling: The sampling of clients for a round.
    rounds: Number of rounds.
    delta: The delta of the guarantee.
    once: Noise multipliers of one-time releases about all users.
    size: An upper limit of epsilon, for a single computation with the steps for
      that size, which saves time. If None, computes in coarse steps first and
      then, if epsilon is small, in finer ones.

  Raises:
    PrivacyError: If an argument is invalid.
  """
  check_delta(delta)
  if not rounds and not once:
    return 0.0
  if not noise_multiplier and rounds:
    return math.inf
  what = (noise_multiplier, sampling, rounds, delta, tuple(once))
  last = sampling.loss_step(math.inf if size is None else size)
  found = count(last, *what)
  # Finer steps up to twice the size, so that no target is narrowly missed.
  while size is None and (step := sampling.loss_step(found / 2.0)) < last:
    found, last = count(step, *what), step
  return found


def local_epsilon(
  noise_multiplier: float, participations: int, delta: float
) -> float:
  """Compute a client's epsilon with `local_noise.LocalNoise`.

  Args:
    noise_multiplier: Standard deviation of the noise in clips.
    participations: Number of updates that the client sends.
    delta: The delta of the guarantee.
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
  """Find the smallest noise multiplier that keeps epsilon within a target.

  Args:
    target_epsilon: The largest epsilon of the whole run.
    sampling: The sampling of clients for a round.
    rounds: Number of rounds.
    delta: The delta of the guarantee.
    once: Noise multipliers of one-time releases about all users, which are
      paid for first.
    largest_noise_multiplier: An exclusive upper limit; see `privacy`.

  Raises:
    PrivacyError: If an argument is invalid, or no noise suffices.
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
  # From below in coarse steps: fine steps are slow for a large epsilon.
  high = min(1.0, most)
  while (
    cost(high, math.inf if high < most else target_epsilon) > target_epsilon
  ):
    if high >= most:
      nearest = epsilon(most, sampling, rounds, delta, once)
      raise PrivacyError(
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
