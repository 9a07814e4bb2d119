"""Vocabulary with word numbers, learned from training users.

`Tokens` defines the numbers. A word outside the vocabulary has the number of a
bucket, which follows from its fingerprint: the same word has the same bucket in
every run and on every machine.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from absl import logging
import numpy as np

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import tokenising
from tasks.next_word.sentences import Sentences
from tasks.next_word.tokens import Tokens

# Pairs of words and counts to hold before adding them up.
_HELD = 2**20


class Counts(NamedTuple):
  """Numbers of occurrences of words.

  Attributes:
    prints: Fingerprints of the words, uint64 `[words]`, ascending.
    counts: int64 `[words]`.
  """

  prints: np.ndarray
  counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class Words:
  """A vocabulary.

  Attributes:
    words: The words, by their numbers from 1: the most frequent ones first.
    buckets: Number of buckets for all other words.
  """

  words: tuple[str, ...]
  buckets: int

  def __post_init__(self) -> None:
    """Raise an error for a vocabulary that leaves words without a number.

    Raises:
      OptionError: If there is no word or no bucket.
    """
    if not self.words:
      raise OptionError('A vocabulary needs words, found none.')
    if self.buckets < 1:
      raise OptionError(
        f'{self.buckets} buckets leave no number for words outside the '
        'vocabulary. Give at least 1.'
      )

  @property
  def tokens(self) -> Tokens:
    """Sizes that determine all numbers."""
    return Tokens(len(self.words), self.buckets)

  def numbers(self, prints: np.ndarray) -> np.ndarray:
    """Return the numbers of words.

    Args:
      prints: Their fingerprints, uint64 `[words]`.

    Returns:
      int32 `[words]`: 1 to V for words of the vocabulary, V + 1 to V + B for
      others.
    """
    known, numbers = self._sorted
    places = np.minimum(np.searchsorted(known, prints), len(known) - 1)
    # Python integers would turn these into floats.
    bucket = (prints % np.uint64(self.buckets)).astype(np.int32)
    return np.where(
      known[places] == prints,
      numbers[places],
      bucket + np.int32(self.tokens.first_bucket),
    )

  def encode(
    self, prints: np.ndarray, lengths: np.ndarray, max_tokens: int
  ) -> np.ndarray:
    """Convert sentences to numbers like TFF's next-word task.

    A row is the beginning, the sentence, its end if it has fewer tokens than
    `max_tokens`, and padding. The inputs are all but a row's last number, the
    targets all but its first.

    Args:
      prints: Fingerprints of all tokens, uint64 `[tokens]`.
      lengths: Number of tokens of each sentence, `[sentences]`, at most
        `max_tokens`.
      max_tokens: Maximum tokens of a sentence.

    Returns:
      int32 `[sentences, max_tokens + 1]`.
    """
    ids = self.tokens
    rows = np.full((len(lengths), max_tokens + 1), ids.pad, np.int32)
    rows[:, 0] = ids.begin
    place = np.arange(max_tokens)
    rows[:, 1:][place < lengths[:, np.newaxis]] = self.numbers(prints)
    is_short = np.flatnonzero(lengths < max_tokens)
    rows[is_short, 1 + lengths[is_short]] = ids.end
    return rows

  def decode(self, numbers: Iterable[int]) -> list[str]:
    """Return the words of numbers, or their kind in <>."""
    ids = self.tokens
    special = {ids.pad: '<pad>', ids.begin: '<begin>', ids.end: '<end>'}
    return [
      special.get(number)
      or (
        self.words[number - 1]
        if number < ids.first_bucket
        else f'<other {number - ids.first_bucket}>'
      )
      for number in numbers
    ]

  def coverage(
    self, sentences: Sentences, users: Iterable[int]
  ) -> dict[str, Any]:
    """Count tokens and the share of them in the vocabulary.

    Args:
      sentences: A corpus.
      users: Users whose sentences count: positions in `sentences.authors`.
    """
    number = known = 0
    for tokens in sentences.batches(users):
      number += len(tokens)
      known += int((self.numbers(tokens) < self.tokens.first_bucket).sum())
    return {'tokens': number, 'coverage': known / number if number else 0.0}

  @functools.cached_property
  def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
    """The words' fingerprints, ascending, and their numbers."""
    prints = tokenising.fingerprints(self.words)
    order = np.argsort(prints)
    return prints[order], (order + 1).astype(np.int32)


def learn(
  sentences: Sentences,
  users: Iterable[int],
  size: int,
  buckets: int = 1,
) -> Words:
  """Choose the most frequent words; of equal ones the first by name.

  Args:
    sentences: A corpus.
    users: The training users: positions in `sentences.authors`.
    size: V, the maximum number of words.
    buckets: B, the number of buckets for all others.

  Raises:
    OptionError: If size or buckets leave no number for a word.
    DataError: If there is no word to choose.
  """
  return choose(count(sentences, users), sentences, size, buckets)


def count(sentences: Sentences, users: Iterable[int]) -> Counts:
  """Count the words of users; memory grows only with distinct words."""
  return add_up(
    Counts(*np.unique(tokens, return_counts=True))
    for tokens in sentences.batches(users)
  )


def add_up(parts: Iterable[Counts]) -> Counts:
  """Add counts up, a bounded number of them at a time."""
  total = Counts(np.zeros(0, np.uint64), np.zeros(0, np.int64))
  held: list[Counts] = []
  size = 0
  for part in parts:
    held.append(part)
    size += len(part.prints)
    if size >= _HELD:
      total = _sum([total, *held])
      held, size = [], 0
  return _sum([total, *held])


def choose(
  counts: Counts, sentences: Sentences, size: int, buckets: int
) -> Words:
  """Choose the words with the largest counts; of equal ones by name.

  Args:
    counts: Counts of words, integers or not.
    sentences: The corpus, with its lexicon.
    size: V, the maximum number of words.
    buckets: B.

  Raises:
    OptionError: If size or buckets leave no number for a word.
    DataError: If there is no word to choose.
  """
  if size < 1:
    raise OptionError(
      f'A vocabulary of {size} words knows none. Give at least 1.'
    )
  if not len(counts.prints):
    raise DataError(
      f'{sentences.name}: users in training have no word to learn from. Give '
      'more data.'
    )
  if len(counts.prints) < size:
    logging.warning(
      '%s: there are %d words in training, so that the vocabulary has no %d.',
      *(sentences.name, len(counts.prints), size),
    )
  least = np.sort(counts.counts)[-min(size, len(counts.counts))]
  # Of all words as frequent as the last one, names decide.
  places = np.flatnonzero(counts.counts >= least)
  words = sentences.lexicon.words_of(counts.prints[places])
  ranked = sorted(zip((-counts.counts[places]).tolist(), words, strict=True))
  return Words(tuple(word for _, word in ranked[:size]), buckets)


def _sum(parts: Sequence[Counts]) -> Counts:
  prints = np.concatenate([part.prints for part in parts])
  counts = np.concatenate([part.counts for part in parts])
  order = np.argsort(prints, kind='stable')
  prints = prints[order]
  starts = np.flatnonzero(np.diff(prints, prepend=prints[:1] + 1))
  return Counts(
    prints[starts],
    np.add.reduceat(counts[order], starts) if len(starts) else counts,
  )
