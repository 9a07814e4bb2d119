"""Fields of examples that hold ids, of table rows or of classes."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class IdRange(NamedTuple):
  """Values that a field of ids may hold: 0 to `size` - 1.

  Attributes:
    size: Number of ids; None if each client has as many as it needs.
    what: Description of the ids, for messages: `table 'items' has 500 rows`.
    elements: Indices, in a flattened example, of the elements that are ids; all
      by default.
    ignored: A further value that a field may hold.
    is_local: True if each client has a table of this many rows.
    table: The variable whose rows these are, if `size` is None.
    remedy: Advice on a value outside, in place of that for ids.
    slack: How far from the first and the last id a value lies outside.
      Fractions of ids are truncated, so that -0.5 counts as 0.
  """

  size: int | None
  what: str
  elements: tuple[int, ...] | None = None
  ignored: int | None = None
  is_local: bool = False
  table: str = ''
  remedy: str = ''
  slack: float = 1

  def values(self, array: np.ndarray) -> np.ndarray:
    """Return the elements that are ids, `[examples, ids of each]`."""
    values = array.reshape([len(array), math.prod(array.shape[1:])])
    return values if self.elements is None else values[:, list(self.elements)]

  def first_outside(self, array: np.ndarray) -> tuple[int, Any] | None:
    """Find the first example with a value outside, and that value."""
    values = self.values(array)
    outside = values <= -self.slack
    if self.size is not None:
      outside |= values >= self.size - 1 + self.slack
    if self.ignored is not None:
      outside &= values != self.ignored
    if not outside.any():
      return None
    example, place = np.argwhere(outside)[0]
    return int(example), values[example, place]

  def advice(self, value: Any) -> str:
    """Return advice on a value outside the range."""
    if self.remedy:
      return self.remedy
    if self.size is not None and value >= self.size:
      return (
        'If ids start at 1, let them start at 0; otherwise build it larger.'
      )
    return (
      'Drop rows with missing values, which `cat.codes` makes -1, or fill them.'
    )


# Path of a field, such as `x.item`, to the ranges in which its ids must lie.
Ids: TypeAlias = Mapping[str, tuple[IdRange, ...]]


def client_sized(ids: Ids) -> dict[str, dict[str, tuple[IdRange, ...]]]:
  """Return the tables sized per client, with the fields of their ids."""
  found: dict[str, dict[str, tuple[IdRange, ...]]] = {}
  for path, ranges in ids.items():
    for limits in ranges:
      if limits.table:
        fields = found.setdefault(limits.table, {})
        fields[path] = (*fields.get(path, ()), limits)
  return found
