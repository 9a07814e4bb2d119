"""What right guesses of an attack prove about epsilon."""

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

# Thresholds that an attacker tries.
_THRESHOLDS = 64


# An attacker who sees one run tries to guess all canaries, half of them, and so
# on, down to so many.
FEWEST_GUESSES = 8


# No bound above this is looked for.
_LARGEST_EPSILON = 100.0


def _bound(
  detected: int,
  mistaken: int,
  trials: tuple[int, int],
  delta: float,
  risk: float,
) -> float:
  """A lower bound of epsilon from counts of guesses, by Clopper and Pearson.

  Args:
    detected: How many of the first trials were guessed right.
    mistaken: How many of the second trials were guessed wrong.
    trials: How many of each there were.
    delta: Of the claim.
    risk: That the bound is wrong.
  """
  # Both rates are to hold.
  risk /= 2.0
  rate, others = 0.0, 1.0
  if detected:
    rate = stats.beta.ppf(risk, detected, trials[0] - detected + 1)
  if mistaken < trials[1]:
    others = stats.beta.ppf(1.0 - risk, mistaken + 1, trials[1] - mistaken)
  return float(np.log((rate - delta) / others)) if rate > delta else 0.0


def epsilon_lower_bound(
  inside: np.ndarray,
  outside: np.ndarray,
  delta: float,
  confidence: float = 0.95,
) -> float:
  """What epsilon is at least, if an attack scored like this.

  The threshold and the direction of the guess are chosen on one half of the
  scores and counted on the other, so that choosing costs no confidence.

  Args:
    inside: Scores where the canary was present, in random order.
    outside: Scores where it was not.
    delta: Of the claim.
    confidence: That the bound is right.

  Returns:
    A lower bound of epsilon at delta; zero if the attack proves nothing.
  """
  halves = [(inside[::2], outside[::2]), (inside[1::2], outside[1::2])]

  def bound(half: int, threshold: float, above: bool) -> float:
    one, other = halves[half]
    if above:  # Guess that a canary was present if its score is high.
      counts = np.sum(one >= threshold), np.sum(other >= threshold)
    else:  # Guess that it was not if its score is low.
      one, other = other, one
      counts = np.sum(one < threshold), np.sum(other < threshold)
    detected, mistaken = map(int, counts)
    trials = len(one), len(other)
    return _bound(detected, mistaken, trials, delta, 1.0 - confidence)

  tried = np.concatenate(halves[0])
  thresholds = np.quantile(tried, np.linspace(0.0, 1.0, _THRESHOLDS))
  best = max(
    ((threshold, above) for threshold in thresholds for above in (True, False)),
    key=lambda guess: bound(0, *guess),
  )
  return max(bound(1, *best), 0.0)


class Proof(NamedTuple):
  """What the guesses of an attacker prove who saw one run.

  Attributes:
    epsilon: A lower bound at the claim's delta; zero if they prove nothing.
    guesses: How many canaries were guessed.
    right: How many of the guesses were right.
  """

  epsilon: float
  guesses: int
  right: int


def _chance(
  canaries: int, guesses: int, right: int, epsilon: float, delta: float
) -> float:
  """How likely so many right guesses are at most, were the claim true.

  Theorem 5.2: each guess is right with the probability `e^eps / (e^eps + 1)` at
  most, whatever the others are, but for what delta adds.

  Args:
    canaries: How many there were.
    guesses: How many were guessed.
    right: How many of the guesses were right.
    epsilon: That of the claim.
    delta: That of the claim.
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
  """What epsilon is at least, if one run released such scores.

  The canaries with the highest scores are guessed to be present, as many with
  the lowest to be absent. Several numbers of guesses are tried, each at its
  share of the risk.

  Args:
    scores: Of each canary, `[canaries]`.
    present: Whether it was there, by a fair coin of its own, bool `[canaries]`.
    delta: Of the claim.
    confidence: That the bound is right.
  """
  number = len(scores)
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
