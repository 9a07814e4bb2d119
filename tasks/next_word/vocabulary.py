"""Choice of the words of the vocabulary, in private runs with noise."""

from collections.abc import Collection

from tasks.next_word import private_words
from tasks.next_word import words as words_lib
from tasks.next_word.options import VocabularyOptions
from tasks.next_word.sentences import Sentences
from tasks.task import Release


def learn(
  options: VocabularyOptions,
  sentences: Sentences,
  users: Collection[int],
  release: Release,
) -> words_lib.Words:
  """Choose the words.

  Args:
    options: The size of the vocabulary, and its privacy.
    sentences: A corpus.
    users: The training users: positions in `sentences.authors`.
    release: Settings for the release with noise.

  Raises:
    OptionError: If the mechanism is impossible with so many users, or differs
      from an earlier release.
    DataError: If there is no word to choose.
  """
  if options.vocabulary_noise is None:
    return words_lib.learn(
      sentences, users, options.vocabulary_size, options.buckets
    )
  mechanism = private_words.NoisyThreshold(
    options.words_per_user, options.vocabulary_noise, options.vocabulary_delta
  )
  if release.kept is None and release.keep is None:
    mechanism.check(release.simulated_population or len(users))
    return private_words.stand_in(options.vocabulary_size, options.buckets)
  return private_words.learn(
    sentences,
    users,
    options.vocabulary_size,
    mechanism,
    buckets=options.buckets,
    noise_seed=release.noise_seed,
    simulated_users=release.simulated_population,
    kept=release.kept,
    keep=release.keep,
  )
