"""Division of documents into training, validation, test and newcomers."""

from collections.abc import Sequence
import dataclasses

import numpy as np

from tasks import task
from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.subreddit import data as subreddit_data

# Test documents of authors who write in several classes, for whom an author's
# majority class is not always right.
MIXED = 'mixed'
# Documents of held-out authors, and of those who write in several classes.
NEW, NEW_MIXED = 'new', 'new_mixed'

# Where each part ends, as a share of an author's documents.
_ENDS = np.cumsum((0.8, 0.1, 0.1))


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentParts:
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
) -> DocumentParts:
  """Divide each author's documents 80/10/10, and hold some authors out.

  Of an author's n documents, a part ends at n times the summed shares up to it,
  rounded down: 76 documents become 60, 8 and 8. The first part has at least one
  document of every author; other parts may have none.

  Args:
    documents: All documents.
    by_time: True to order an author's documents by time, else randomly.
    held_out_share: Share of the authors who take no part in training.
    seed: Determines the order and the held-out authors.

  Raises:
    DataError: If no author is left for training.
  """
  number = len(documents.authors)
  num_new = round(held_out_share * number)
  if num_new >= number:
    raise DataError(
      f'A share of {held_out_share} of {number} authors cannot be held out: at '
      'least one must be left to train with.'
    )
  chance = subreddit_data.generator(seed, 'hold out')
  is_new = np.isin(np.arange(number), chance.permutation(number)[:num_new])
  divided: list[list[np.ndarray]] = [[] for _ in _ENDS]
  new: list[np.ndarray] = []
  bounds = np.searchsorted(documents.author, np.arange(number + 1))
  for author, name in enumerate(documents.authors):
    order = np.arange(*bounds[author : author + 2])
    if not by_time:
      order = subreddit_data.generator(seed, 'split', name).permutation(order)
    if is_new[author]:
      new.append(order)
      continue
    # The small number keeps a product such as 0.7 * 10 from falling below 7.
    ends = np.maximum(np.floor(len(order) * _ENDS + 1e-6).astype(int), 1)
    for pieces, piece in zip(divided, np.split(order, ends[:-1]), strict=True):
      pieces.append(piece)
  parts = (task.TRAIN, task.VALIDATION, task.TEST, NEW)
  rows = {
    part: _together(pieces)
    for part, pieces in zip(parts, [*divided, new], strict=True)
  }
  is_mixed = documents.has_several_labels
  for mixed, part in ((MIXED, task.TEST), (NEW_MIXED, NEW)):
    rows[mixed] = rows[part][is_mixed[documents.author[rows[part]]]]
  return DocumentParts(documents, rows)


def places_in_history(
  documents: subreddit_data.Documents, known: np.ndarray
) -> np.ndarray:
  """Return relative times of documents among their author's known ones.

  Args:
    documents: All documents.
    known: Positions of the known documents.

  Returns:
    float32 `[documents]`: 0 for an author's first known document and earlier
    ones, 1 for its last one and later ones, and in between by rank.
  """
  known = np.sort(known)
  rows = np.arange(len(documents))
  author = documents.author[known]
  first = np.searchsorted(author, documents.author)
  last = np.searchsorted(author, documents.author, side='right') - 1
  number = np.searchsorted(known, rows) - np.where(np.isin(rows, known), 0, 0.5)
  place = (number - first) / np.maximum(last - first, 1)
  return np.clip(place, 0.0, 1.0).astype(np.float32)


def _together(places: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int64), *places])
