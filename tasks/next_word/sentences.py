"""Sentences by many authors, mostly kept on disk.

`gather` reads messages one after another and keeps the fingerprints of their
tokens (`tokenising`) in temporary files, so that a corpus may be larger than
memory: only some bytes a sentence, and the authors' names, grow with it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import NamedTuple, TypeVar

from absl import logging
import numpy as np

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.next_word import tokenising
from tasks.next_word.on_disk import GrowingArray
from tasks.next_word.on_disk import Lexicon
from tff_partial import random_bits

_T = TypeVar('_T')

# Time of messages that have none.
NO_TIME = -1

# Characters to tokenise at once, and sentences to sort at once.
_BLOCK, _ROWS = 2**20, 2**16
# Tokens to process together.
_BATCH = 2**20


class Message(NamedTuple):
  """A text by an author at one time, of any number of sentences.

  Attributes:
    author: The author's name.
    time: Seconds since 1970, or NO_TIME.
    text: The text.
  """

  author: str
  time: int
  text: str


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits on the authors and sentences that are used.

  Attributes:
    max_tokens: Maximum tokens of a sentence; the rest of a longer one is
      dropped, except that characters are cut into several sentences.
    min_sentences: Authors with fewer sentences are left out.
    max_sentences: Maximum of an author, the first in time; None for all.
    max_users: Number of authors to draw; None for all.
    seed: Draws them.
  """

  max_tokens: int = 20
  min_sentences: int = 1
  max_sentences: int | None = 1024
  max_users: int | None = None
  seed: int = 0

  def __post_init__(self) -> None:
    """Raise an error for limits that leave no author."""
    if self.max_sentences and self.max_sentences < self.min_sentences:
      raise OptionError(
        f'--max_examples={self.max_sentences}: no author has at most '
        f'{self.max_sentences} sentences and at least {self.min_sentences}. '
        'Raise it, or lower --min_examples.'
      )

  def draw(self, authors: Sequence[str]) -> Sequence[str]:
    """Draw at most `max_users` of the authors, sorted."""
    ordered = sorted(authors)
    if self.max_users is None or len(ordered) <= self.max_users:
      return ordered
    generator = random_bits.generator('next word', self.seed, 'users')
    chosen = generator.permutation(len(ordered))[: self.max_users]
    return [ordered[place] for place in sorted(chosen.tolist())]


@dataclasses.dataclass(frozen=True, eq=False)
class Sentences:
  """Sentences, sorted by author, then time; ties keep the files' order.

  Attributes:
    name: The corpus.
    authors: The authors' names, sorted.
    bounds: int64 `[authors + 1]`: author i has the sentences bounds[i] to
      bounds[i + 1].
    time: int64 `[sentences]`, seconds since 1970, or NO_TIME.
    offsets: int64 `[sentences + 1]`: sentence j has the tokens offsets[j] to
      offsets[j + 1].
    tokens: uint64 `[tokens]`: the tokens' fingerprints, in a file.
    lexicon: Maps fingerprints to words.
    max_tokens: Maximum number of tokens of a sentence.
    left_out: Number of sentences left out, by reason.
    ends: `[authors]`: `of_user` and `batches` leave out an author's sentences
      from this one on; None for no sentence.
  """

  name: str
  authors: tuple[str, ...]
  bounds: np.ndarray
  time: np.ndarray
  offsets: np.ndarray
  tokens: np.ndarray
  lexicon: Lexicon
  max_tokens: int
  left_out: Mapping[str, int]
  ends: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.time)

  def between(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of consecutive sentences.

    Args:
      first: The first sentence.
      last: The end of the range, exclusive.

    Returns:
      Fingerprints of all their tokens, uint64 `[tokens]`, and the number of
      tokens of each sentence, int64 `[sentences]`.
    """
    offsets = self.offsets[first : last + 1]
    return self.tokens[offsets[0] : offsets[-1]], np.diff(offsets)

  def of_user(self, user: int) -> np.ndarray:
    """Return the tokens of one author, up to `ends`, uint64 `[tokens]`."""
    ends = self.bounds[1:] if self.ends is None else self.ends
    return self.between(self.bounds[user], ends[user])[0]

  def batches(self, users: Iterable[int]) -> Iterator[np.ndarray]:
    """Yield the tokens of some authors at a time.

    Args:
      users: Positions in `authors`.

    Yields:
      uint64 `[tokens]`, of bounded length.
    """
    tokens = map(self.of_user, users)
    for held in in_batches(tokens, len, _BATCH):
      yield np.concatenate(held)


def in_batches(
  items: Iterable[_T], size_of: Callable[[_T], int], most: int
) -> Iterator[list[_T]]:
  """Yield lists of items until their sizes add up to a bound, and the rest.

  Args:
    items: The items.
    size_of: Returns the size of an item.
    most: The bound.
  """
  held: list[_T] = []
  size = 0
  for item in items:
    held.append(item)
    size += size_of(item)
    if size >= most:
      yield held
      held, size = [], 0
  if held:
    yield held


def gather(
  name: str, messages: Iterable[Message], rule: tokenising.Rule, limits: Limits
) -> Sentences:
  """Cut messages into sentences and sort these, in one pass over messages.

  Args:
    name: The corpus.
    messages: In any order; those of one author and second keep their order.
    rule: Rule for tokens and sentences.
    limits: Limits on what is used.

  Raises:
    DataError: If no author is left, or temporary files cannot be written.
  """
  codes: dict[str, int] = {}
  lexicon = Lexicon()
  tokeniser = tokenising.Tokeniser(rule, lexicon)
  tokens, time = GrowingArray(np.uint64), GrowingArray(np.int64)
  author, length = GrowingArray(np.int32), GrowingArray(np.int32)
  for block in in_batches(messages, lambda one: len(one.text) + 1, _BLOCK):
    cut = tokeniser.cut([each.text for each in block], limits.max_tokens)
    of_text = [codes.setdefault(each.author, len(codes)) for each in block]
    tokens.extend(cut.tokens)
    length.extend(cut.lengths)
    author.extend(np.array(of_text, np.int32)[cut.text])
    time.extend(np.array([each.time for each in block], np.int64)[cut.text])
  names = list(codes)
  whose, times, lengths = author.finish(), time.finish(), length.finish()
  counts = np.bincount(whose, minlength=len(names))
  kept, left_out = _choose(name, names, counts, limits)
  # Alphabetical position of the authors' names; -1 for those left out.
  rank = np.full(len(counts), -1, np.int32)
  rank[kept] = np.arange(len(kept))
  whose = rank[whose]
  order = np.lexsort((times, whose))[np.count_nonzero(whose < 0) :]
  sizes = counts[kept]
  if limits.max_sentences is not None:
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = order[np.arange(len(order)) - first < limits.max_sentences]
    sizes = np.minimum(sizes, limits.max_sentences)
    left_out['sentence_too_late'] = int(sum(counts[kept]) - sum(sizes))
  for reason, number in left_out.items():
    if number:
      logging.info('%s: %d sentences left out: %s.', name, number, reason)
  return Sentences(
    name=name,
    authors=tuple(names[code] for code in kept),
    bounds=np.concatenate([[0], np.cumsum(sizes)]),
    time=times[order],
    offsets=np.concatenate([[0], np.cumsum(lengths[order], dtype=np.int64)]),
    tokens=_in_order(tokens.finish(), lengths, order),
    lexicon=lexicon,
    max_tokens=limits.max_tokens,
    left_out={reason: n for reason, n in left_out.items() if n},
  )


def _in_order(
  tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray
) -> np.ndarray:
  """Write the tokens of sentences in another order, some at a time."""
  ends = np.cumsum(lengths, dtype=np.int64)
  written = GrowingArray(np.uint64)
  for begin in range(0, len(order), _ROWS):
    rows = order[begin : begin + _ROWS]
    length = lengths[rows].astype(np.int64)
    last = np.cumsum(length)
    places = np.repeat(ends[rows] - last, length) + np.arange(last[-1])
    written.extend(tokens[places])
  return written.finish()


def _choose(
  name: str, names: Sequence[str], counts: np.ndarray, limits: Limits
) -> tuple[np.ndarray, dict[str, int]]:
  """Choose authors, int64 `[kept]` in the order of their names."""
  is_large = counts >= max(limits.min_sentences, 1)
  large = [names[code] for code in np.flatnonzero(is_large)]
  if not large:
    raise DataError(
      f'{name}: none of {len(names)} authors has the {limits.min_sentences} '
      'sentences that it takes. Lower --min_examples, or give more data.'
    )
  code_of = {names[code]: code for code in range(len(names))}
  kept = np.array([code_of[each] for each in limits.draw(large)], np.int64)
  return kept, {
    'author_too_small': int(counts[~is_large].sum()),
    'author_not_drawn': int(counts[is_large].sum() - counts[kept].sum()),
  }
