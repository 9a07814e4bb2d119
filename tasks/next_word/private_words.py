"""A vocabulary under user-level differential privacy.

The mechanism is a Gaussian histogram with a threshold (partition selection over
an open domain: there is no public list of possible words).

*   Neighbours: corpora that differ by one user, with all its sentences.
*   A user counts once for each of at most m words: its most frequent ones. Ties
    are broken pseudorandomly, by the user's name, so that different users leave
    out different words.
*   Sensitivity: a user changes at most m counts by 1 each, so the vector of
    counts by at most sqrt(m) in the L2 norm. Each count gets normal noise of
    standard deviation noise_multiplier * sqrt(m).
*   Threshold: words whose noised count is below it are never released. A word
    that no other user has is counted once. The threshold is so high that all of
    a user's at most m such words stay below it, except with probability
    `delta`.

Given that they do, the release is the Gaussian mechanism over the words of the
others. So if that is (epsilon, delta_1)-private, the vocabulary is (epsilon,
delta_1 + delta)-private; a ledger pays for the noise and reserves `delta` from
its own delta. Words, their order and their number follow from the noised counts
alone, so they cost nothing more. Each further draw does cost: so fewer words
than requested are no error, and a run keeps its `Draw`, from which every
program takes the words. Which users train, and their number, is public, as
elsewhere.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import hashlib
import math
from typing import Any, Self

from absl import logging
import numpy as np
import pandas as pd
import scipy.stats
import tensorflow as tf

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import words as words_lib
from tasks.next_word.sentences import Sentences
from tff_partial import random_bits
from tff_partial.dp import dp_queries
from tff_partial.dp import private_rows

# Noised counts are rounded, perhaps upwards, to a grid at least this fine, in
# standard deviations.
_GRID = 2.0**-20
# Odd multiplier that mixes bits.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class NoisyThreshold:
  """Noise and threshold of the mechanism.

  Attributes:
    words_per_user: m, the maximum number of words that a user counts for.
    noise_multiplier: Standard deviation of the noise in units of the
      sensitivity, sqrt(m); 0 for no noise and no threshold, which protects no
      one.
    delta: Probability that a word of a single user may be released.
  """

  words_per_user: int
  noise_multiplier: float
  delta: float

  @property
  def stddev(self) -> float:
    """Standard deviation of the noise of each count, in users."""
    return self.noise_multiplier * math.sqrt(self.words_per_user)

  @property
  def threshold(self) -> float:
    """Lowest noised count, in users, of a released word."""
    if not self.noise_multiplier:
      return 1.0
    # All of m words stay below with probability 1 - delta, each one with its
    # m-th root. In logarithms, since 1 - tail cannot represent small tails.
    tail = -math.expm1(math.log1p(-self.delta) / self.words_per_user)
    quantile = float(scipy.stats.norm.isf(tail))
    return 1.0 + self.stddev * (quantile + _GRID)

  def check(self, num_users: int) -> None:
    """Raise an error if the mechanism is unsuitable for a number of users.

    Args:
      num_users: Number of users that take part.

    Raises:
      OptionError: If `delta` allows publishing one of them, or there are fewer
        users than the threshold.
    """
    if self.delta * num_users >= 1.0:
      raise OptionError(
        f'delta: {self.delta:.3g} would allow publishing one user of '
        f'{num_users}. Give less than {1.0 / num_users:.3g}.'
      )
    if self.threshold > num_users:
      raise OptionError(
        f'A word is told if {self.threshold:.1f} users have it, but only '
        f'{num_users} take part. Give a larger epsilon or less noise, fewer '
        'words of a user, or more users.'
      )


@dataclasses.dataclass(frozen=True)
class Draw:
  """The drawn words and the terms of the draw, which a run keeps.

  Attributes:
    terms: The terms of the draw: numbers by their names.
    counted: The fingerprint of the counts that the noise was added to.
    noise: The seed of the noise, two integers, which must stay secret.
    words: The words by descending noised count; perhaps none.
  """

  terms: Mapping[str, float | None]
  counted: str
  noise: tuple[int, ...]
  words: tuple[str, ...]

  def to_json(self) -> dict[str, Any]:
    """Return a JSON-compatible mapping for `from_json`."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, kept: Mapping[str, Any]) -> Self:
    """Restore a draw from the result of `to_json`.

    Args:
      kept: The mapping.

    Raises:
      OptionError: If it is not such a mapping.
    """
    try:
      terms, counted = dict(kept['terms']), str(kept['counted'])
      noise, words = (tuple(kept[name]) for name in ('noise', 'words'))
      if all(isinstance(word, str) for word in words):
        return cls(terms, counted, noise, words)
    except (KeyError, TypeError, ValueError):
      pass
    raise OptionError(
      'What is kept of the release is no vocabulary that was drawn with noise. '
      'Give the flags of the run that released it, or choose another folder.'
    )

  def check(
    self, terms: Mapping[str, float | None], counted: str | None
  ) -> None:
    """Raise an error if the words would be drawn under other terms.

    Args:
      terms: Terms of the draw now.
      counted: Fingerprint of the counts, or None to skip its comparison.

    Raises:
      OptionError: With the difference and a remedy.
    """
    remedy = (
      'To draw again would be one more release of the same users. Give the '
      'same to go on with it, or choose another folder.'
    )
    for name in {**self.terms, **terms}:
      before, now = self.terms.get(name), terms.get(name)
      if before != now:
        raise OptionError(
          f'The vocabulary was released with {name}={before}, and is asked for '
          f'with {name}={now}. {remedy}'
        )
    if counted not in (None, self.counted):
      raise OptionError(
        'The vocabulary was released of other users or other sentences than '
        f'those that train now. {remedy}'
      )


def draw(
  sentences: Sentences,
  users: Collection[int],
  size: int,
  mechanism: NoisyThreshold,
  *,
  noise_seed: int | None = None,
  simulated_users: int | None = None,
) -> Draw:
  """Draw the words with the largest noised numbers of users; log nothing.

  Args:
    sentences: A corpus.
    users: The training users: positions in `sentences.authors`.
    size: V, the maximum number of words; only words above the threshold count.
    mechanism: Its noise and threshold.
    noise_seed: Seed of the noise in a simulation, which gives no protection
      from anyone who knows it. By default the operating system draws it.
    simulated_users: Scales counts as if so many users took part, to simulate a
      larger population.

  Raises:
    OptionError: If `delta` allows publishing a user, or there are fewer users
      than the threshold.
  """
  num_users = simulated_users or len(users)
  mechanism.check(num_users)
  counts = bounded_counts(sentences, users, mechanism.words_per_user)
  seed = private_rows.seed_maker(noise_seed, 'vocabulary')().numpy()
  scale = num_users / max(len(users), 1)
  noised = tf.constant(scale * counts.to_numpy(), tf.double)
  if mechanism.stddev:
    noise = mechanism.stddev * dp_queries.standard_normal(seed, noised.shape)
    noised = dp_queries.on_grid(noised + noise, mechanism.stddev)
  noised = noised.numpy()
  passes = noised >= mechanism.threshold
  number = int(passes.sum())
  chosen: tuple[str, ...] = ()
  if number:
    told = pd.Series(noised, counts.index)[passes]
    # The number of buckets does not affect the draw.
    chosen = words_lib.choose(told, sentences, min(size, number), 1).words
  return Draw(
    terms(size, mechanism, num_users, noise_seed),
    _fingerprint(counts),
    tuple(seed.tolist()),
    chosen,
  )


def terms(
  size: int, mechanism: NoisyThreshold, num_users: int, noise_seed: int | None
) -> dict[str, float | None]:
  """Return the terms of a draw, as in `Draw`."""
  return {
    'vocabulary_size': size,
    **dataclasses.asdict(mechanism),
    'users': num_users,
    'noise_seed': noise_seed,
  }


def learn(
  sentences: Sentences,
  users: Collection[int],
  size: int,
  mechanism: NoisyThreshold,
  *,
  buckets: int = 1,
  noise_seed: int | None = None,
  simulated_users: int | None = None,
  kept: Mapping[str, Any] | None = None,
  keep: Callable[[Mapping[str, Any]], None] | None = None,
) -> words_lib.Words:
  """Draw words, or restore drawn ones, and make them a vocabulary.

  Args:
    kept: The earlier argument of `keep`; nothing is drawn.
    keep: Called with a new draw in JSON-compatible form, before anything is
      logged. If given together with `kept`, checks that this is from the same
      sentences.

  Raises:
    OptionError: As `draw`, or if the words were drawn otherwise.
    DataError: If no word passes the threshold.
  """
  num_users = simulated_users or len(users)
  if kept is None:
    drawn = draw(
      sentences,
      users,
      size,
      mechanism,
      noise_seed=noise_seed,
      simulated_users=simulated_users,
    )
    if keep is not None:
      keep(drawn.to_json())
  else:
    drawn, counted = Draw.from_json(kept), None
    if keep is not None:
      counted = _fingerprint(
        bounded_counts(sentences, users, mechanism.words_per_user)
      )
    drawn.check(terms(size, mechanism, num_users, noise_seed), counted)
  number = len(drawn.words)
  if not number:
    raise DataError(
      f'{sentences.name}: no word passes the threshold of '
      f'{mechanism.threshold:.1f} users. Give a larger epsilon or less noise, '
      'or more users, in another folder. What was drawn is paid for.'
    )
  if number < size and kept is None:
    logging.warning(
      '%s: %d words pass the threshold of %.1f users, %d were wanted.',
      *(sentences.name, number, mechanism.threshold, size),
    )
  return words_lib.Words(drawn.words, buckets)


def stand_in(size: int, buckets: int) -> words_lib.Words:
  """Return placeholder words, as many as a release can have."""
  # No tokenizer leaves a space in a token.
  return words_lib.Words(tuple(f'word {n}' for n in range(size)), buckets)


def bounded_counts(
  sentences: Sentences, users: Collection[int], words_per_user: int
) -> pd.Series:
  """Count the users of words, each user for a bounded number of words.

  Args:
    sentences: A corpus.
    users: The users to count: positions in `sentences.authors`.
    words_per_user: For how many words, its most frequent ones.
  """
  names = [sentences.authors[user] for user in users]
  salts = random_bits.derive_each(('words of a user',), names)
  salts = salts.view(np.uint64)[:, 0]

  def of_user(user: int, salt: np.uint64) -> tuple[np.ndarray, np.ndarray]:
    prints, often = np.unique(sentences.of_user(user), return_counts=True)
    chance = (prints ^ salt) * _MIX
    order = np.lexsort((chance, -often))[:words_per_user]
    return prints[order], np.ones(len(order), np.int64)

  return words_lib.add_up(map(of_user, users, salts))


def _fingerprint(counts: pd.Series) -> str:
  """Return a fingerprint of counts that is the same in every process."""
  prints, numbers = counts.index.to_numpy(), counts.to_numpy()
  return hashlib.sha256(prints.tobytes() + numbers.tobytes()).hexdigest()
