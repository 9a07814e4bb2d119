"""Columns of a CSV file, by given or usual names."""

from collections.abc import Sequence
import difflib
import pathlib
import re

from tasks.errors import DataError

# Usual column names, in lower case and without punctuation.
USUAL = {
  'user': ('user', 'userid', 'username', 'member', 'customer', 'reader'),
  'item': (
    *('item', 'itemid', 'movie', 'movieid', 'film', 'filmid', 'book', 'bookid'),
    *('product', 'productid'),
  ),
  'rating': ('rating', 'ratings', 'score', 'stars'),
  'time': ('timestamp', 'time', 'date', 'datetime'),
}


def named(
  path: pathlib.Path, header: Sequence[str], what: str, given: str
) -> str:
  """Return a column given by name.

  Args:
    path: The file.
    header: The names of its columns.
    what: Its meaning, such as 'user'.
    given: Its name.

  Raises:
    DataError: If there is no such column, or there are several.
  """
  if given not in header:
    meant = difflib.get_close_matches(given, header, 1)
    hint = f' Did you mean {meant[0]!r}?' if meant else ''
    raise DataError(
      f'--csv_{what}={given}: {path} has no such column, but '
      f'{listed(header)}.{hint}'
    )
  if list(header).count(given) > 1:
    raise DataError(
      f'--csv_{what}={given}: {path} has {list(header).count(given)} columns '
      'of this name. Rename all but one.'
    )
  return given


def guessed(path: pathlib.Path, header: Sequence[str], what: str) -> str | None:
  """Return the only column with a usual name, or None for a missing time.

  Args:
    path: The file.
    header: The names of its columns.
    what: Its meaning, a key of `USUAL`.

  Raises:
    DataError: If there is no such column, or there are several.
  """
  found = [
    name
    for name in header
    if re.sub('[^a-z0-9]', '', name.lower()) in USUAL[what]
  ]
  if len(found) == 1:
    return found[0]
  if not found and what == 'time':
    return None
  problem = f'which column is the {what} cannot be told'
  if found:
    problem = f'{" and ".join(map(repr, found))} both could be the {what}'
  raise DataError(
    f'{path}: {problem}. Name a column with --csv_{what}=COLUMN; the columns '
    f'are {listed(header)}.'
  )


def listed(header: Sequence[str]) -> str:
  """List column names for messages."""
  return f'{", ".join(map(repr, header)):.500}'
