"""Division of documents into training, validation, test and newcomers."""

from collections.abc import Iterable
import dataclasses

import numpy as np

from tasks import task
from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.subreddit import data as subreddit_data
from tff_partial.data import partitions

# Test documents of authors who write in several classes, for whom an author's
# majority class is not always right.
MIXED = 'mixed'
# Documents of held-out authors, and of those who write in several classes.
NEW, NEW_MIXED = 'new', 'new_mixed'

# Shares of an author's documents in each part.
_SHARES = (0.8, 0.1, 0.1)


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentParts:
  """Positions of documents by part.

  Attributes:
    held: Of each part its authors, by name, and their documents in the author's
      order.
  """

  held: dict[str, partitions.Partition]

  def of_authors(self, part: str) -> partitions.Partition:
    """Return the positions of each author's documents in a part."""
    if part not in self.held:
      raise OptionError(f'part: {part!r} is none of {", ".join(self.held)}.')
    return self.held[part]

  def __getitem__(self, part: str) -> np.ndarray:
    return _together(self.of_authors(part).values())

  def describe(self) -> dict[str, dict[str, int]]:
    return {
      part: {'documents': len(self[part]), 'authors': len(authors)}
      for part, authors in self.held.items()
    }

  def first(self, part: str, number: int) -> np.ndarray:
    """Return the positions of each author's first documents in a part."""
    return _together(own[:number] for own in self.of_authors(part).values())

  def after(self, part: str, number: int) -> np.ndarray:
    """Return the positions of all but each author's first documents."""
    return _together(own[number:] for own in self.of_authors(part).values())


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
  seen: partitions.Partition = {}
  new: partitions.Partition = {}
  bounds = np.searchsorted(documents.author, np.arange(number + 1))
  for author, name in enumerate(documents.authors):
    order = np.arange(*bounds[author : author + 2])
    if not by_time:
      order = subreddit_data.generator(seed, 'split', name).permutation(order)
    (new if is_new[author] else seen)[name] = order
  divided = partitions.split_examples(seen, _SHARES)
  held = {**dict(zip(task.PARTS, divided, strict=True)), NEW: new}
  is_mixed = dict(
    zip(documents.authors, documents.has_several_labels, strict=True)
  )
  for mixed, part in ((MIXED, task.TEST), (NEW_MIXED, NEW)):
    held[mixed] = {name: o for name, o in held[part].items() if is_mixed[name]}
  return DocumentParts(
    {
      part: {name: own for name, own in authors.items() if len(own)}
      for part, authors in held.items()
    }
  )


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


def _together(places: Iterable[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int64), *places])
