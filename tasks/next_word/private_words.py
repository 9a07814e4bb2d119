"""A vocabulary under differential privacy of whole users.

The mechanism is a Gaussian histogram with a threshold (partition selection over
an open domain: no list of possible words is public).

*   Neighbours: corpora of which one has a user more, with all its sentences.
*   A user counts once for each of at most m words: those that it uses most
    often. Of words that it uses equally often chance decides, which follows
    from its name, so that all users do not leave the same words out.
*   Sensitivity: a user changes at most m counts by 1 each, so that the vector
    of counts moves by at most sqrt(m) in the L2 norm. Each count gets normal
    noise of standard deviation noise_multiplier * sqrt(m).
*   Threshold: words whose noised count is below it are never told. A word that
    no other user has is counted once. The threshold is so high that all of the
    at most m such words of one user stay below it but with probability `delta`.

Given that they do, what is told is the Gaussian mechanism over the words of the
others. So if that is (epsilon, delta_1)-private, the vocabulary is (epsilon,
delta_1 + delta)-private; a ledger pays for `event` and keeps `delta` back from
its own delta. Words, their order and their number follow from the noised counts
alone, so they cost nothing more. To draw anew does cost, whatever for:
therefore fewer words than wanted are no error, and a run keeps its `Draw`, from
which every program takes the words. Who is in training, and how many these are,
is public, as elsewhere.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import hashlib
import math
from typing import Any, NamedTuple, Self

from absl import logging
import dp_accounting
import numpy as np
import scipy.stats
import tensorflow as tf

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import words as words_lib
from tasks.next_word.sentences import Sentences
from tff_partial import random_bits
from tff_partial.dp import accounting
from tff_partial.dp import dp_queries
from tff_partial.dp import private_rows
from tff_partial.dp import samplings

# Noised counts are rounded, perhaps upwards, to a grid at least so fine,
# in standard deviations.
_GRID = 2.0**-20
# All users take part, once; neighbours differ by one user more or less.
_ALL_USERS = samplings.PoissonSampling(1.0)
# An odd number, by which multiplied bits are mixed.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class NoisyThreshold:
  """The mechanism.

  Attributes:
    words_per_user: m, for how many words a user counts at most.
    noise_multiplier: Standard deviation of the noise in units of sqrt(m), by
      which a user moves the counts; 0 for no noise and no threshold, which
      protects no one.
    delta: With what probability a word that one user alone has may be told.
  """

  words_per_user: int
  noise_multiplier: float
  delta: float

  def __post_init__(self) -> None:
    """Refuses what is impossible.

    Raises:
      OptionError: With the name of the number.
    """
    if self.words_per_user < 1:
      raise OptionError(
        f'words_per_user: {self.words_per_user} words of a user would leave '
        'nothing to count. Give at least 1.'
      )
    if not 0 <= self.noise_multiplier < math.inf:
      raise OptionError(
        f'noise_multiplier: {self.noise_multiplier} is no amount of noise. '
        'Give a finite number of at least 0.'
      )
    _check_delta(self.delta)

  @property
  def stddev(self) -> float:
    """Standard deviation of the noise of each count, in users."""
    return self.noise_multiplier * math.sqrt(self.words_per_user)

  @property
  def threshold(self) -> float:
    """Words with lower noised counts, in users, are not told."""
    if not self.noise_multiplier:
      return 1.0
    # All of m words stay below with probability 1 - delta: each one with the
    # m-th root of it. By logarithms, since a tail is smaller than what 1 - tail
    # can say.
    tail = -math.expm1(math.log1p(-self.delta) / self.words_per_user)
    quantile = float(scipy.stats.norm.isf(tail))
    return 1.0 + self.stddev * (quantile + _GRID)

  def check(self, num_users: int) -> None:
    """Refuses a number of users of which nothing can be released so.

    Args:
      num_users: How many take part.

    Raises:
      OptionError: If `delta` allows to publish one of them, or fewer than the
        threshold take part.
    """
    if self.delta * num_users >= 1.0:
      raise OptionError(
        f'delta: {self.delta:.3g} would allow to publish one user of '
        f'{num_users}. Give less than {1.0 / num_users:.3g}.'
      )
    if self.threshold > num_users:
      raise OptionError(
        f'A word is told if {self.threshold:.1f} users have it, but only '
        f'{num_users} take part. Give a larger epsilon or less noise, fewer '
        'words of a user, or more users.'
      )

  @property
  def event(self) -> dp_accounting.DpEvent:
    """What happens to whole users, for a ledger; `delta` comes on top."""
    if not self.noise_multiplier:
      return dp_accounting.NonPrivateDpEvent()
    return dp_accounting.GaussianDpEvent(self.noise_multiplier)

  def epsilon(self, delta: float) -> float:
    """What the vocabulary costs by itself.

    Args:
      delta: At which epsilon is wanted, for noise and threshold together.

    Raises:
      OptionError: If the threshold alone takes all of it.
    """
    if not self.delta < delta < 1:
      raise OptionError(
        f'delta: the threshold takes {self.delta:.3g}, so that {delta:.3g} is '
        'not enough. Give more, but less than 1.'
      )
    if not self.noise_multiplier:
      return math.inf
    return accounting.epsilon(
      self.noise_multiplier, _ALL_USERS, 1, delta - self.delta
    )


class Released(NamedTuple):
  """A vocabulary that may be told, and what it cost.

  Attributes:
    words: The vocabulary.
    mechanism: What was done; pay for its `event` and its `delta`.
    users: How many took part, which is public.
  """

  words: words_lib.Words
  mechanism: NoisyThreshold
  users: int


def calibrate(
  target_epsilon: float, delta: float, words_per_user: int
) -> NoisyThreshold:
  """Find the least noise for a vocabulary that is to be private by itself.

  Half of delta is for the noise, half for the threshold.

  Args:
    target_epsilon: Of the vocabulary, finite and above 0.
    delta: Of the vocabulary, between 0 and 1.
    words_per_user: m.

  Raises:
    AccountingError: If no noise reaches the target; says which is the nearest.
    OptionError: If another number is impossible.
  """
  _check_delta(delta)
  noise_multiplier = accounting.calibrate(
    target_epsilon, _ALL_USERS, rounds=1, delta=delta / 2.0
  )
  return NoisyThreshold(words_per_user, noise_multiplier, delta / 2.0)


@dataclasses.dataclass(frozen=True)
class Draw:
  """What was drawn, and how: a run keeps it, so that it is drawn once.

  Attributes:
    terms: How: numbers by their names.
    counted: The fingerprint of the counts that the noise was added to.
    noise: The seed of the noise, two integers. Who knows it sees through it.
    words: The words, those with the largest noised counts first; perhaps none.
  """

  terms: Mapping[str, float | None]
  counted: str
  noise: tuple[int, ...]
  words: tuple[str, ...]

  def to_json(self) -> dict[str, Any]:
    """Return what JSON can hold, and `from_json` takes."""
    return dataclasses.asdict(self)

  @classmethod
  def from_json(cls, kept: Mapping[str, Any]) -> Self:
    """Make a draw of what `to_json` returned.

    Args:
      kept: That.

    Raises:
      OptionError: If it is something else.
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
    """Refuses to take the words for what would be drawn otherwise.

    Args:
      terms: How they would be drawn.
      counted: The fingerprint of the counts, or None, not to compare it.

    Raises:
      OptionError: With what differs, and what to do.
    """
    remedy = (
      'To draw anew would be one more release of the same users. Give the same '
      'to go on with it, or choose another folder.'
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
  """Draws the words whose noised numbers of users are largest; says nothing.

  Args:
    sentences: A corpus.
    users: Who takes part in training: places in `sentences.authors`.
    size: V, how many words to choose, at most: as many as pass the threshold.
    mechanism: What is done.
    noise_seed: Draws the noise of a simulation, which protects no one from who
      knows it. By default the operating system draws it.
    simulated_users: Counts words as if so many took part, each word with as
      large a share of them; a simulation of more users by those there are.

  Raises:
    OptionError: If `delta` allows to publish a user, or fewer users than the
      threshold take part.
  """
  num_users = simulated_users or len(users)
  mechanism.check(num_users)
  counts = bounded_counts(sentences, users, mechanism.words_per_user)
  seed = private_rows.seed_maker(noise_seed, 'vocabulary')().numpy()
  scale = num_users / max(len(users), 1)
  noised = _noised(scale * counts.counts, mechanism.stddev, seed)
  passes = noised >= mechanism.threshold
  number = int(passes.sum())
  chosen: tuple[str, ...] = ()
  if number:
    told = words_lib.Counts(counts.prints[passes], noised[passes])
    # The number of buckets draws nothing.
    chosen = words_lib.choose(told, sentences, min(size, number), 1).words
  return Draw(
    terms(size, mechanism, num_users, noise_seed),
    _fingerprint(counts),
    tuple(seed.tolist()),
    chosen,
  )


def terms(
  size: int,
  mechanism: NoisyThreshold,
  num_users: int,
  noise_seed: int | None,
) -> dict[str, float | None]:
  """By what words are drawn, as a `Draw` says it.

  Args:
    size: How many words are chosen at most.
    mechanism: What is done.
    num_users: How many take part, or are simulated.
    noise_seed: Draws the noise of a simulation, or None.
  """
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
) -> Released:
  """Draws words, or takes those that were drawn, and makes them a vocabulary.

  Args:
    sentences: A corpus.
    users: Who takes part in training: places in `sentences.authors`.
    size: V, how many words to choose, at most: as many as pass the threshold.
    mechanism: What is done.
    buckets: B, how many numbers stand for all other words.
    noise_seed: As for `draw`.
    simulated_users: As for `draw`.
    kept: What `keep` was given when the words were drawn; nothing is drawn.
    keep: Is given what is drawn, as JSON can hold it, before anything is said.
      Where it is given with `kept`, this must be of the same sentences.

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
  return Released(words_lib.Words(drawn.words, buckets), mechanism, num_users)


def stand_in(size: int, buckets: int) -> words_lib.Words:
  """A vocabulary of no one's words, as large as a release can be.

  Args:
    size: V, how many words there are.
    buckets: B, how many numbers stand for all other words.
  """
  # No tokenizer leaves a space in a token.
  return words_lib.Words(tuple(f'word {n}' for n in range(size)), buckets)


def bounded_counts(
  sentences: Sentences, users: Collection[int], words_per_user: int
) -> words_lib.Counts:
  """Count the users of words, each user for a bounded number of words.

  Args:
    sentences: A corpus.
    users: Who counts: places in `sentences.authors`.
    words_per_user: For how many words a user counts at most: those that it uses
      most often.
  """
  names = [sentences.authors[user] for user in users]
  salts = random_bits.derive_each(('words of a user',), names)
  salts = salts.view(np.uint64)[:, 0]

  def of_user(user: int, salt: np.uint64) -> words_lib.Counts:
    prints, often = np.unique(sentences.of_user(user), return_counts=True)
    chance = (prints ^ salt) * _MIX
    order = np.lexsort((chance, -often))[:words_per_user]
    return words_lib.Counts(prints[order], np.ones(len(order), np.int64))

  return words_lib.add_up(map(of_user, users, salts))


def _fingerprint(counts: words_lib.Counts) -> str:
  """The same for the same counts in every process."""
  held = (np.ascontiguousarray(part).tobytes() for part in counts)
  return hashlib.sha256(b''.join(held)).hexdigest()


def _noised(counts: np.ndarray, stddev: float, seed: np.ndarray) -> np.ndarray:
  """Add noise to counts, float64 `[words]`."""
  values = tf.constant(counts, tf.double)
  if stddev:
    noise = dp_queries.standard_normal(seed, values.shape)
    values = dp_queries.on_grid(values + stddev * noise, stddev)
  return values.numpy()


def _check_delta(delta: float) -> None:
  if not 0 < delta < 1:
    raise OptionError(
      f'delta: {delta} is no probability to go wrong with. Give a number '
      'above 0 and below 1.'
    )
