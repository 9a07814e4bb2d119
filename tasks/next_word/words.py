"""Vocabulary with word numbers, learned from training users.

`Tokens` defines the numbers. A word outside the vocabulary has the number of a
bucket, which follows from its fingerprint: the same word has the same bucket in
every run and on every machine. Users are positions in `Sentences.authors`.
"""

from collections.abc import Iterable
import dataclasses
import functools
from typing import Any

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.next_word import on_disk
from tasks.next_word.sentences import in_batches
from tasks.next_word.sentences import Sentences
from tasks.next_word.tokens import Tokens

# Pairs of words and counts to hold before adding them up.
_HELD = 2**20


@dataclasses.dataclass(frozen=True)
class Words:
  """A vocabulary.

  Attributes:
    words: The words, by their numbers from 1: the most frequent ones first.
    buckets: Number of buckets for all other words.
  """

  words: tuple[str, ...]
  buckets: int

  @property
  def tokens(self) -> Tokens:
    """Sizes that determine all numbers."""
    return Tokens(len(self.words), self.buckets)

  def numbers(self, prints: np.ndarray) -> np.ndarray:
    """Return the numbers of words.

    Args:
      prints: Their fingerprints, uint64 `[words]`.

    Returns:
      int32 `[words]`: 1 to V in the vocabulary, V + 1 to V + B outside.
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

  def coverage(
    self, sentences: Sentences, users: Iterable[int]
  ) -> dict[str, Any]:
    """Count the tokens of users and the share of them in the vocabulary."""
    number = known = 0
    for tokens in sentences.batches(users):
      number += len(tokens)
      known += int((self.numbers(tokens) < self.tokens.first_bucket).sum())
    return {'tokens': number, 'coverage': known / number if number else 0.0}

  @functools.cached_property
  def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
    """The words' fingerprints, ascending, and their numbers."""
    prints = on_disk.fingerprints(self.words)
    order = np.argsort(prints)
    return prints[order], (order + 1).astype(np.int32)


def count(sentences: Sentences, users: Iterable[int]) -> pd.Series:
  """Count the words of users; memory grows only with distinct words.

  Returns:
    Counts, int64, by fingerprint, uint64, in ascending order of these.
  """
  return add_up(
    np.unique(tokens, return_counts=True) for tokens in sentences.batches(users)
  )


def add_up(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> pd.Series:
  """Add counts up, a bounded number of them at a time.

  Args:
    parts: Fingerprints of words, each once, and their counts.
  """
  total = pd.Series(np.zeros(0, np.int64), np.zeros(0, np.uint64))
  for held in in_batches(parts, lambda part: len(part[0]), _HELD):
    prints, counts = map(np.concatenate, zip(*held, strict=True))
    joined = pd.concat([total, pd.Series(counts, prints)])
    total = joined.groupby(level=0).sum()
  return total


def choose(
  counts: pd.Series, sentences: Sentences, size: int, buckets: int
) -> Words:
  """Choose the words with the largest counts; of equal ones by name.

  Args:
    counts: Counts of words by fingerprint, integers or not.
    sentences: The corpus, with its lexicon.
    size: V, the maximum number of words.
    buckets: B, the number of buckets for all others.

  Raises:
    DataError: If there is no word to choose.
  """
  if counts.empty:
    raise DataError(
      f'{sentences.name}: there is no word to learn from. Give more data.'
    )
  if len(counts) < size:
    logging.warning(
      '%s: there are %d words in training, so that the vocabulary has no %d.',
      *(sentences.name, len(counts), size),
    )
  # Of all words as frequent as the last one, names decide.
  largest = counts.nlargest(size, keep='all')
  words = sentences.lexicon.words_of(largest.index.to_numpy())
  ranked = sorted(zip((-largest).tolist(), words, strict=True))
  return Words(tuple(word for _, word in ranked[:size]), buckets)
