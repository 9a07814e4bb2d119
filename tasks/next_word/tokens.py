"""Integer ids of the tokens of a sentence.

| token | ids |
|---|---|
| padding | 0 |
| words of the vocabulary | 1 .. V |
| buckets of words outside the vocabulary | V + 1 .. V + B |
| beginning of a sentence | V + B + 1 |
| end of a sentence | V + B + 2 |

Data, models and metrics of next-word prediction share this numbering.
"""

from typing import NamedTuple


class Tokens(NamedTuple):
  """Sizes that determine all ids: words V and out-of-vocabulary buckets B."""

  words: int
  buckets: int

  @property
  def pad(self) -> int:
    """Id that pads short sentences; never a target."""
    return 0

  @property
  def first_bucket(self) -> int:
    """Id of the first out-of-vocabulary bucket."""
    return self.words + 1

  @property
  def begin(self) -> int:
    """Id before the first word of a sentence."""
    return self.words + self.buckets + 1

  @property
  def end(self) -> int:
    """Id after the last word of a sentence."""
    return self.words + self.buckets + 2

  @property
  def total(self) -> int:
    """Number of ids; all are below it."""
    return self.words + self.buckets + 3
