"""Characters as numbers, by a vocabulary learned from texts."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from tasks.errors import OptionError

PADDING, UNKNOWN = 0, 1
_FIRST = 2  # The number of the most common character.
_CODE_POINTS = 0x110000


@dataclasses.dataclass(frozen=True)
class Characters:
  """The characters that have their own number.

  Attributes:
    characters: The characters from number 2 on, the most common first.
    size: How many numbers there are, including padding and unknown.
  """

  characters: str
  size: int

  def encode(self, texts: Sequence[str], max_chars: int) -> np.ndarray:
    """Encode the characters of texts, cut or padded at the end."""
    numbers = np.full(
      _CODE_POINTS, UNKNOWN, np.uint8 if self.size <= 256 else np.int32
    )
    numbers[_code_points(self.characters)] = np.arange(
      _FIRST, _FIRST + len(self.characters)
    )
    cut = [text[:max_chars] for text in texts]
    lengths = np.array([len(text) for text in cut], np.int64)
    encoded = np.full((len(cut), max_chars), PADDING, numbers.dtype)
    is_text = np.arange(max_chars) < lengths[:, np.newaxis]
    encoded[is_text] = numbers[_code_points(''.join(cut))]
    return encoded


def learn_vocabulary(texts: Sequence[str], size: int) -> Characters:
  """Choose the most common characters; of equally common ones the lowest."""
  if size <= _FIRST:
    raise OptionError(
      f'vocabulary_size: {size} leaves no number for a character, as 0 pads '
      'and 1 stands for all unknown ones. Give at least 3.'
    )
  points, counts = np.unique(_code_points(''.join(texts)), return_counts=True)
  best = np.argsort(-counts, kind='stable')[: size - _FIRST]
  return Characters(''.join(chr(point) for point in points[best]), size)


def _code_points(text: str) -> np.ndarray:
  """Return the code points of a text; JSON may hold lone surrogates, too."""
  return np.frombuffer(text.encode('utf-32-le', 'surrogatepass'), np.uint32)
