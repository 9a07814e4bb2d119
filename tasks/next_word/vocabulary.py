"""Options of the vocabulary: its size, and its privacy."""

from collections.abc import Collection
import dataclasses
from typing import ClassVar

from tasks.errors import OptionError
from tasks.next_word import private_words
from tasks.next_word import words as words_lib
from tasks.next_word.sentences import Sentences
from tasks.options import detail
from tasks.options import option
from tasks.options import Options
from tasks.task import Release
from tasks.task import Spent


@dataclasses.dataclass(frozen=True)
class VocabularyOptions(Options):
  """Options that choose the words of the vocabulary."""

  title: ClassVar[str] = 'Task next_word'

  vocabulary_size: int = option(
    1000, 'V, how many words have a number of their own.', at_least=1
  )
  buckets: int = option(
    500,
    'How many numbers stand for all other words, each of which always has the '
    'same.',
    at_least=1,
  )
  vocabulary_noise: float | None = option(
    None,
    'Choose the vocabulary by how many users have a word, with noise of this '
    'multiplier and a threshold, so that a private run can pay for it; by '
    'default by exact counts.',
    at_least=0,
  )
  vocabulary_delta: float = detail(
    1e-7,
    'With what probability a word that one user alone has may pass that '
    'threshold; a part of --delta.',
  )
  words_per_user: int = detail(
    100, 'For how many words a user counts there, at most.', at_least=1
  )

  def flag_prefix(self) -> str:
    """Return the prefix of the flags."""
    return 'next_word_'

  def __post_init__(self) -> None:
    """Raise an error for noise that would protect no one.

    Raises:
      OptionError: Names the flag and a remedy.
    """
    super().__post_init__()
    if self.vocabulary_noise == 0.0:
      raise OptionError(
        '--next_word_vocabulary_noise=0: without noise the threshold protects '
        'no one. Give more than 0, or leave the flag out.'
      )
    if not 0.0 < self.vocabulary_delta < 1.0:
      raise OptionError(
        f'--set=next_word_vocabulary_delta={self.vocabulary_delta}: give a '
        'probability above 0 and below 1.'
      )

  @property
  def mechanism(self) -> private_words.NoisyThreshold | None:
    """Mechanism of the release, or None without noise."""
    if self.vocabulary_noise is None:
      return None
    return private_words.NoisyThreshold(
      self.words_per_user, self.vocabulary_noise, self.vocabulary_delta
    )

  @property
  def spent(self) -> Spent:
    """Privacy cost of the vocabulary in a private run."""
    if self.mechanism is None:
      return Spent()
    return Spent((self.mechanism.noise_multiplier,), self.mechanism.delta)

  def learn(
    self, sentences: Sentences, users: Collection[int], release: Release
  ) -> words_lib.Words:
    """Choose the words.

    Args:
      sentences: A corpus.
      users: The training users: positions in `sentences.authors`.
      release: Settings for the release with noise.

    Raises:
      OptionError: If the mechanism is impossible with so many users, or differs
        from an earlier release.
      DataError: If there is no word to choose.
    """
    if self.mechanism is None:
      return words_lib.learn(
        sentences, users, self.vocabulary_size, self.buckets
      )
    if release.kept is None and release.keep is None:
      self.mechanism.check(release.simulated_population or len(users))
      return private_words.stand_in(self.vocabulary_size, self.buckets)
    return private_words.learn(
      sentences,
      users,
      self.vocabulary_size,
      self.mechanism,
      buckets=self.buckets,
      noise_seed=release.noise_seed,
      simulated_users=release.simulated_population,
      kept=release.kept,
      keep=release.keep,
    )
