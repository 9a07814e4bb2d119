"""An attack with canaries, to see whether a claimed epsilon can be true.

A canary is a client that sends one number, as large as it can, where nobody
else sends any. Who sees what is released guesses from that number whether the
canary took part. If the guesses are better than an epsilon allows, the claim is
wrong. What the attack proves is a lower bound: an attack that fails proves
nothing.
"""

import numpy as np
from scipy import stats
import tensorflow_federated as tff

# Larger than any clip.
_LOUD = 1e6
# Thresholds that an attacker tries.
_THRESHOLDS = 64


def canary_scores(
  process: tff.templates.AggregationProcess,
  *,
  seed: int,
  rounds: int = 1,
  probability: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
  """Attacks an aggregation, with as many canaries as a vector has elements.

  Each canary has an element of its own. A random half of them is among the
  clients. As the elements' noise is independent, so are the canaries' scores.

  Args:
    process: An unweighted aggregation of vectors, float32 `[canaries]`.
    seed: Of which canaries are present, and when.
    rounds: How many rounds the canaries are clients.
    probability: That a client takes part in a round (Poisson sampling).

  Returns:
    The scores of the canaries that were present, and of those that were not:
    the sum over the rounds of what was released of the canary's element.
  """
  value_type = process.next.type_signature.parameter[1].member
  (size,) = value_type.shape
  random = np.random.default_rng(seed)
  present = random.permutation(size) < size // 2
  state = process.initialize()
  scores = np.zeros(size)
  for _ in range(rounds):
    sampled = present & (random.uniform(size=size) < probability)
    loud = np.float32(_LOUD) * np.eye(size, dtype=np.float32)[sampled]
    output = process.next(state, list(loud))
    state = output.state
    scores += output.result
  return scores[present], scores[~present]


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
