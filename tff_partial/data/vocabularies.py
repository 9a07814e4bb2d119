"""Vocabularies: which id stands for which value, such as an item's name."""

from collections.abc import Iterable
import functools
from typing import Any

import numpy as np

from tff_partial import errors


class VocabularyError(errors.UserError, ValueError):
  """Raised for values that a vocabulary cannot encode."""


def _is_missing(value: Any) -> bool:
  """Whether pandas or NumPy take a value for a missing one."""
  if value is None or type(value).__name__ in ('NAType', 'NaTType'):
    return True
  return isinstance(value, float) and value != value


class Vocabulary:
  """Numbers values from 0, in their order.

      items = Vocabulary(frame['item'])
      tf.keras.layers.Embedding(len(items), 16)
      items.encode(['Alien', 'Heat'])
      items.decode([17, 4])

  Attributes:
    values: The distinct values, in the order of their ids.
    unseen: Whether id 0 stands for every value that is not among them, so that
      theirs begin with 1.
  """

  def __init__(self, values: Iterable[Any], *, unseen: bool = False):
    """Collects the distinct values.

    Args:
      values: Values of one type; a column of a data frame, for instance.
      unseen: Whether id 0 stands for every other value.

    Raises:
      VocabularyError: If there are no values, or some are missing or of several
        types.
    """
    distinct = set(values)
    if not distinct or any(map(_is_missing, distinct)):
      raise VocabularyError(
        'A vocabulary takes values of which none is missing, at least one. '
        'Drop or fill missing values first.'
      )
    try:
      self.values = tuple(sorted(distinct))
    except TypeError:
      kinds = sorted({type(value).__name__ for value in distinct})
      raise VocabularyError(
        f'A vocabulary takes values of one type, found {kinds}. Convert them, '
        "for instance with `frame['item'].astype(str)`."
      ) from None
    self.unseen = unseen

  def __len__(self) -> int:
    """How many ids there are."""
    return len(self.values) + self.unseen

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, Vocabulary)
      and self.values == other.values
      and self.unseen == other.unseen
    )

  def __hash__(self) -> int:
    return hash((self.values, self.unseen))

  def __repr__(self) -> str:
    shown = [repr(value) for value in self.values[:3]]
    if len(self.values) > 3:
      shown.append('...')
    unseen = ', unseen=True' if self.unseen else ''
    return f'Vocabulary of {len(self):,} ids ({", ".join(shown)}{unseen})'

  @functools.cached_property
  def _id_of(self) -> dict[Any, int]:
    return {v: i for i, v in enumerate(self.values, int(self.unseen))}

  def encode(self, values: Iterable[Any]) -> np.ndarray:
    """Returns the ids of values, int64; -1 for one that has none."""
    other = 0 if self.unseen else -1
    return np.array([self._id_of.get(v, other) for v in values], np.int64)

  def decode(self, ids: Iterable[int]) -> list[Any]:
    """Returns the values of ids; None for that of all unseen values.

    Raises:
      VocabularyError: For an id that there is not.
    """
    decoded = []
    for number in ids:
      if not 0 <= number < len(self):
        raise VocabularyError(
          f'There is no id {number}; ids are 0 to {len(self) - 1}.'
        )
      place = int(number) - self.unseen
      decoded.append(None if place < 0 else self.values[place])
    return decoded
