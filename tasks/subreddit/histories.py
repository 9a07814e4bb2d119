"""Order and division of an author's documents."""

from collections.abc import Iterator, Sequence

import numpy as np

from tasks.errors import DataError
from tasks.subreddit.data import Documents
from tasks.subreddit.data import generator


def places_in_history(documents: Documents, known: np.ndarray) -> np.ndarray:
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


def author_orders(
  documents: Documents, *, by_time: bool, seed: int
) -> Iterator[np.ndarray]:
  """Yield each author's documents, by time or in random order."""
  bounds = np.searchsorted(
    documents.author, np.arange(len(documents.authors) + 1)
  )
  for author, start, end in zip(
    documents.authors, bounds[:-1], bounds[1:], strict=True
  ):
    order = np.arange(start, end)
    if not by_time:
      order = generator(seed, 'split', author).permutation(order)
    yield order


def divide_orders(
  orders: Sequence[np.ndarray], fractions: Sequence[float]
) -> list[np.ndarray]:
  """Divide every author's documents.

  Of an author's n documents, a part ends at n times the summed fractions up to
  it, rounded down: 76 documents become 60, 8 and 8. The first part has at least
  one document of every author; other parts may have none.

  Args:
    orders: Positions of each author's documents, in the order to cut.
    fractions: A share of each author's documents for each part; together 1.

  Returns:
    The positions of documents for each part.

  Raises:
    DataError: If the fractions are no shares that add up to 1.
  """
  if min(fractions) < 0 or abs(sum(fractions) - 1.0) > 1e-6 or not fractions[0]:
    raise DataError(
      f'The shares {tuple(fractions)} do not divide documents: none may be '
      'negative, the first one must be larger than 0, and together they must '
      'be 1.'
    )
  ends = np.cumsum(fractions)
  parts: list[list[np.ndarray]] = [[] for _ in fractions]
  for order in orders:
    # The small number keeps a product such as 0.7 * 10 from falling below 7.
    cuts = np.maximum(np.floor(len(order) * ends[:-1] + 1e-6).astype(int), 1)
    for part, piece in zip(parts, np.split(order, cuts), strict=True):
      part.append(piece)
  return [np.concatenate(part) for part in parts]


def hold_out(documents: Documents, share: float, seed: int) -> np.ndarray:
  """Draw the authors who take no part in training, bool `[authors]`.

  Args:
    documents: All documents.
    share: Share of the authors, rounded to the nearest whole number.
    seed: Seed of the draw.

  Raises:
    DataError: If the share leaves no author for training, or is no share.
  """
  number = len(documents.authors)
  count = round(share * number) if 0 <= share < 1 else number
  if count >= number:
    raise DataError(
      f'A share of {share} of {number} authors cannot be held out: at least '
      'one must be left to train with.'
    )
  held = np.zeros(number, bool)
  held[generator(seed, 'hold out').permutation(number)[:count]] = True
  return held
