"""Lower bounds of epsilon from an attack's guesses on one run.

Steinke, Nasr and Jagielski 2023, theorem 5.2.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from tff_partial.errors import PrivacyError

# An attack on one run guesses all canaries, half of them, and so on, down to
# this many.
FEWEST_GUESSES = 8


# Larger bounds are not searched for.
_LARGEST_EPSILON = 100.0


class Proof(NamedTuple):
  """The result of an attack on one run.

  Attributes:
    epsilon: A lower bound at the claim's delta; zero if nothing is proved.
    guesses: Number of canaries that were guessed.
    right: Number of right guesses.
  """

  epsilon: float
  guesses: int
  right: int


def _chance(
  canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
  """Bound the probability of that many right guesses if the claim is true.

  Theorem 5.2: given the others, each guess is right with probability at most
  `e^eps / (e^eps + 1)`, up to a term in delta.
  """
  rate = 1.0 / (1.0 + math.exp(-epsilon))
  beyond = float(stats.binom.sf(right - 1, guesses, rate))
  # P[right - i <= W < right] for i = 1, 2, ..., right.
  below = np.cumsum(stats.binom.pmf(np.arange(right)[::-1], guesses, rate))
  steepest = np.max(below / np.arange(1, right + 1), initial=0.0)
  return min(beyond + 2.0 * canaries * delta * float(steepest), 1.0)


def prove(
  scores: np.ndarray,
  present: np.ndarray,
  delta: float,
  confidence: float = 0.95,
) -> Proof:
  """Compute a lower bound of epsilon from the scores of one run.

  The canaries with the highest scores are guessed present, as many with the
  lowest absent. Several numbers of guesses are tried, each with its share of
  the risk.

  Args:
    scores: Scores of the canaries, `[canaries]`.
    present: True for canaries that took part, by independent fair coins, bool
      `[canaries]`.
    delta: The delta of the claim.
    confidence: Probability that the bound is right.

  Raises:
    PrivacyError: If there are too few canaries, or not as many of `present`.
  """
  number, present = len(scores), np.asarray(present, bool)
  if number < FEWEST_GUESSES or len(present) != number:
    raise PrivacyError(
      f'scores, present: expected one of each for {FEWEST_GUESSES} canaries or '
      f'more, found {number} and {len(present)}.'
    )
  order = np.argsort(-scores, kind='stable')
  halves, half = [], number // 2
  while 2 * half >= FEWEST_GUESSES:
    halves.append(half)
    half //= 2
  risk = (1.0 - confidence) / len(halves)
  proofs = []
  for half in halves:
    right = int(present[order[:half]].sum() + (~present[order[-half:]]).sum())
    low, high = 0.0, _LARGEST_EPSILON
    if _chance(number, 2 * half, right, low, delta) < risk:
      while high - low > 1e-6:
        middle = (low + high) / 2.0
        is_refuted = _chance(number, 2 * half, right, middle, delta) < risk
        low, high = (middle, high) if is_refuted else (low, middle)
    proofs.append(Proof(low, 2 * half, right))
  return max(proofs)
