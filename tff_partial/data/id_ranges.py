"""Fields of examples that hold ids: of the rows of tables, of classes."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class IdRange(NamedTuple):
  """What a field may hold that is read as an id: 0 to `size` - 1.

  Attributes:
    size: How many ids there are; None where each client has as many as it
      needs.
    what: Whose ids, for messages: `table 'items' has 500 rows`.
    elements: Which elements of an example are ids, by their place when it is
      flat; all by default.
    ignored: A further value that a field may hold.
    is_local: Whether each client has a table of so many rows.
    table: The variable whose rows these are, where `size` is None.
  """

  size: int | None
  what: str
  elements: tuple[int, ...] | None = None
  ignored: int | None = None
  is_local: bool = False
  table: str = ''

  def values(self, array: np.ndarray) -> np.ndarray:
    """The elements of examples that are ids, `[examples, ids of each]`.

    Args:
      array: Values of the field, `[examples, ...]`.
    """
    values = array.reshape([len(array), math.prod(array.shape[1:])])
    return values if self.elements is None else values[:, list(self.elements)]

  def first_outside(self, array: np.ndarray) -> tuple[int, Any] | None:
    """Find the first example with another value, and that value.

    Args:
      array: Values of the field, `[examples, ...]`.
    """
    values = self.values(array)
    # A fraction is cut off, so that -0.5 is 0.
    outside = values <= -1
    if self.size is not None:
      outside |= values >= self.size
    if self.ignored is not None:
      outside &= values != self.ignored
    if not outside.any():
      return None
    example, place = np.argwhere(outside)[0]
    return int(example), values[example, place]

  def advice(self, value: Any) -> str:
    """Says what to do about a value outside of the range."""
    if self.size is not None and value >= self.size:
      return (
        'If ids start at 1, let them start at 0; otherwise build it larger.'
      )
    return (
      'Drop rows with missing values, which `cat.codes` makes -1, or fill them.'
    )


# Path of a field, such as `x.item`, to the ranges in which its ids must lie.
Ids: TypeAlias = Mapping[str, tuple[IdRange, ...]]


def client_sized(
  ids: Ids,
) -> dict[str, dict[str, tuple[IdRange, ...]]]:
  """The tables that have as many rows as a client needs.

  Args:
    ids: Which fields hold ids.

  Returns:
    Variable name to path of a field to those of its elements that name rows.
  """
  found: dict[str, dict[str, tuple[IdRange, ...]]] = {}
  for path, ranges in ids.items():
    for limits in ranges:
      if limits.table:
        fields = found.setdefault(limits.table, {})
        fields[path] = (*fields.get(path, ()), limits)
  return found
