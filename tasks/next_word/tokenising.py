"""Division of texts into sentences and tokens, in blocks of many texts.

A token is kept as its fingerprint (`on_disk`), 64 bits that are the same on
every machine. So memory does not grow with the number of distinct words: their
letters go to a file, the lexicon, from which those of a vocabulary are read
afterwards.

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
import re
from typing import NamedTuple

import numpy as np

from tasks.next_word.on_disk import Lexicon

# These end a sentence and a text, and occur in no text. No word has such a
# fingerprint.
_END_OF_SENTENCE, _END_OF_TEXT = '\0', '\1'
_ENDS = {_END_OF_SENTENCE: 0, _END_OF_TEXT: 1}
_MARK = re.compile('[\0\1]')
# Maximum number of cached words; then the cache is cleared.
_MOST_KNOWN = 2**19


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
