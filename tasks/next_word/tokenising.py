"""Division of texts into sentences and tokens, in blocks of many texts.

A token is kept as its fingerprint, 64 bits that are the same on every machine.
So memory does not grow with the number of distinct words: their letters go to a
file, the lexicon, from which those of a vocabulary are read afterwards.

Three rules define tokens:

*   `CHAT`, for what people type: lower case; letters, digits and underscores
    are words, together with apostrophes and hyphens inside them; each other
    mark is a token; so are `<url>` and `@user`. A sentence ends at a line break
    and after one of .!? if a capital letter follows.
*   `SPACED`, for TFF's Stack Overflow, which is already tokenised: a text is a
    sentence, and spaces separate tokens.
*   `CHARACTERS`, for TFF's Shakespeare: each character of a text is a token,
    and a long text is several sentences.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import re
from typing import NamedTuple

import numpy as np

from tasks.next_word.growing_arrays import GrowingArray

# These end a sentence and a text, and occur in no text. No word has such a
# fingerprint.
_END_OF_SENTENCE, _END_OF_TEXT = '\0', '\1'
_ENDS = {_END_OF_SENTENCE: 0, _END_OF_TEXT: 1}
_MARK = re.compile('[\0\1]')
# Maximum number of cached words; then the cache is cleared.
_MOST_KNOWN = 2**19
# Words written to the lexicon at once.
_PAGE = 2**14


@dataclasses.dataclass(frozen=True)
class Rule:
  """Rule for tokens and sentences.

  Attributes:
    token: The pattern of a token.
    sentence_end: The pattern between two sentences of a text; None if a text is
      one sentence.
    lower: True to convert texts to lower case.
    in_pieces: True to cut a sentence that is too long into several; otherwise
      its rest is dropped.
  """

  token: re.Pattern[str]
  sentence_end: re.Pattern[str] | None = None
  lower: bool = False
  in_pieces: bool = False


def _tokens(pattern: str) -> re.Pattern[str]:
  return re.compile(f'{pattern}|{_MARK.pattern}')


CHAT = Rule(
  _tokens(r"\w+(?:['’-]\w+)*|<url>|@user|[^\w\s]"),
  sentence_end=re.compile(r'[\r\n]+|\s(?<=[.!?]\s)\s*(?=[A-Z])'),
  lower=True,
)
SPACED = Rule(_tokens('[^\\s\0\1]+'))
CHARACTERS = Rule(_tokens('[^\0\1]'), in_pieces=True)


def fingerprint(word: str) -> int:
  """Return the portable 64-bit fingerprint of a word, at least 2."""
  digest = hashlib.blake2b(_bytes(word), digest_size=8).digest()
  return max(int.from_bytes(digest, 'little'), len(_ENDS))


def fingerprints(words: Sequence[str]) -> np.ndarray:
  """Return the fingerprints of words, uint64 `[words]`."""
  return np.array([fingerprint(word) for word in words], np.uint64)


class Lexicon:
  """Mapping from fingerprints to words, which are in a file."""

  def __init__(self) -> None:
    self._words: dict[str, int] = {}
    self._letters = GrowingArray(np.uint8)
    self._prints = GrowingArray(np.uint64)
    self._pages: list[tuple[int, int]] = []  # Number of words and of letters.

  def add(self, word: str) -> int:
    """Add a word, perhaps again, and return its fingerprint."""
    self._words[word] = found = fingerprint(word)
    if len(self._words) == _PAGE:
      self._turn()
    return found

  def finish(self) -> None:
    """Write the last words, after which words can be looked up."""
    self._turn()
    self._read_letters = self._letters.finish()
    self._read_prints = self._prints.finish()

  def words_of(self, prints: np.ndarray) -> list[str]:
    """Return the words of fingerprints, in one pass over the file.

    Args:
      prints: uint64 `[words]`, of words that were added.
    """
    found: dict[int, str] = {}
    word = letter = 0
    for number, size in self._pages:
      page = self._read_prints[word : word + number]
      wanted = np.flatnonzero(np.isin(page, prints))
      if len(wanted):
        text = self._read_letters[letter : letter + size].tobytes()
        words = text.decode('utf-8', 'surrogatepass').split(_END_OF_SENTENCE)
        found.update((int(page[place]), words[place]) for place in wanted)
      word, letter = word + number, letter + size
    return [found[each] for each in prints.tolist()]

  def _turn(self) -> None:
    """Write a page."""
    if not self._words:
      return
    text = _bytes(_END_OF_SENTENCE.join(self._words))
    self._letters.extend(np.frombuffer(text, np.uint8))
    self._prints.extend(np.array(list(self._words.values()), np.uint64))
    self._pages.append((len(self._words), len(text)))
    self._words = {}


class Tokenised(NamedTuple):
  """Non-empty sentences of some texts, in order.

  Attributes:
    tokens: Fingerprints of the tokens of all sentences, uint64 `[tokens]`.
    lengths: Number of tokens of each sentence, int64 `[sentences]`.
    text: Position of each sentence's text, int64 `[sentences]`.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  text: np.ndarray


class Tokeniser:
  """Tokeniser of blocks of texts by one rule; fills a lexicon."""

  def __init__(self, rule: Rule, lexicon: Lexicon):
    self._rule = rule
    self._known = _Known(lexicon)

  def cut(self, texts: Sequence[str], max_tokens: int) -> Tokenised:
    """Cut texts into sentences and tokens.

    Args:
      texts: A block of them.
      max_tokens: Maximum tokens of a sentence; see `Rule.in_pieces`.
    """
    if any(end in text for text in texts for end in _ENDS):
      texts = [_MARK.sub(' ', text) for text in texts]
    whole = _END_OF_TEXT.join([*texts, ''])
    if self._rule.sentence_end is not None:
      whole = self._rule.sentence_end.sub(_END_OF_SENTENCE, whole)
    if self._rule.lower:
      whole = whole.lower()
    found = self._rule.token.findall(whole)
    prints = np.fromiter(
      map(self._known.__getitem__, found), np.uint64, len(found)
    )
    is_token = prints >= len(_ENDS)
    ends = np.flatnonzero(~is_token)
    lengths = np.diff(ends, prepend=-1) - 1
    ends_text = prints[ends] == _ENDS[_END_OF_TEXT]
    text = np.cumsum(ends_text) - ends_text
    has_tokens = lengths > 0
    return _limited(
      Tokenised(prints[is_token], lengths[has_tokens], text[has_tokens]),
      max_tokens,
      self._rule.in_pieces,
    )


class _Known(dict[str, int]):
  """Cache of fingerprints of recent words, with the two ends."""

  def __init__(self, lexicon: Lexicon):
    super().__init__(_ENDS)
    self._lexicon = lexicon

  def __missing__(self, word: str) -> int:
    if len(self) >= _MOST_KNOWN:
      self.clear()
      self.update(_ENDS)
    self[word] = found = self._lexicon.add(word)
    return found


def _limited(cut: Tokenised, most: int, in_pieces: bool) -> Tokenised:
  """Drop the rest of long sentences, or cut them into several."""
  tokens, lengths, text = cut
  if in_pieces:
    pieces = -(-lengths // most)
    first = np.cumsum(pieces) - pieces
    place = np.arange(pieces.sum()) - np.repeat(first, pieces)
    left = np.repeat(lengths, pieces) - most * place
    return Tokenised(tokens, np.minimum(left, most), np.repeat(text, pieces))
  start = np.cumsum(lengths) - lengths
  place = np.arange(len(tokens)) - np.repeat(start, lengths)
  return Tokenised(tokens[place < most], np.minimum(lengths, most), text)


def _bytes(text: str) -> bytes:
  """Encode a text in UTF-8; JSON may hold lone surrogates, too."""
  return text.encode('utf-8', 'surrogatepass')
