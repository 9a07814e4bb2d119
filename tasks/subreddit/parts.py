"""Division of documents into training, validation, test and newcomers."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from tasks.errors import OptionError
from tasks.subreddit import data as subreddit_data
from tasks.subreddit import histories
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION

# Test documents of authors who write in several classes, for whom an author's
# majority class is not always right.
MIXED = 'mixed'
# Documents of held-out authors, and of those who write in several classes.
NEW, NEW_MIXED = 'new', 'new_mixed'

_FRACTIONS = (0.8, 0.1, 0.1)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """Positions of documents by part.

  Attributes:
    documents: All documents.
    rows: Positions of documents by part; those of one author are consecutive,
      in the author's order.
  """

  documents: subreddit_data.Documents
  rows: dict[str, np.ndarray]

  def __getitem__(self, part: str) -> np.ndarray:
    if part not in self.rows:
      raise OptionError(f'part: {part!r} is none of {", ".join(self.rows)}.')
    return self.rows[part]

  def by_author(self, rows: np.ndarray) -> list[np.ndarray]:
    """Cut positions of documents by author."""
    author = self.documents.author[rows]
    pieces = np.split(rows, np.flatnonzero(np.diff(author)) + 1)
    return [own for own in pieces if len(own)]

  def describe(self) -> dict[str, dict[str, int]]:
    """Count documents and authors of each part."""
    return {
      part: {
        'documents': len(rows),
        'authors': len(np.unique(self.documents.author[rows])),
      }
      for part, rows in self.rows.items()
    }

  def first(self, part: str, number: int) -> np.ndarray:
    """Return the positions of each author's first documents in a part."""
    return _together([own[:number] for own in self.by_author(self[part])])

  def after(self, part: str, number: int) -> np.ndarray:
    """Return the positions of all but each author's first documents."""
    return _together([own[number:] for own in self.by_author(self[part])])


def divide(
  documents: subreddit_data.Documents,
  *,
  by_time: bool = False,
  held_out_share: float = 0.0,
  seed: int = 0,
) -> Parts:
  """Divide each author's documents 80/10/10, and hold some authors out.

  Args:
    documents: All documents.
    by_time: True to order an author's documents by time, else randomly.
    held_out_share: Share of the authors who take no part in training.
    seed: Determines the order and the held-out authors.
  """
  is_new = histories.hold_out(documents, held_out_share, seed)
  orders = list(histories.author_orders(documents, by_time=by_time, seed=seed))
  divided = histories.divide_orders(
    [order for order, new in zip(orders, is_new, strict=True) if not new],
    _FRACTIONS,
  )
  rows = dict(zip((TRAIN, VALIDATION, TEST), divided, strict=True))
  rows[NEW] = _together(
    [order for order, new in zip(orders, is_new, strict=True) if new]
  )
  is_mixed = documents.has_several_labels
  for mixed, part in ((MIXED, TEST), (NEW_MIXED, NEW)):
    rows[mixed] = rows[part][is_mixed[documents.author[rows[part]]]]
  return Parts(documents, rows)


def _together(places: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int64), *places])
