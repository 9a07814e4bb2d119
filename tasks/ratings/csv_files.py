"""Ratings from a CSV file, one per line, read strictly."""

from collections.abc import Sequence
import dataclasses
import decimal
import difflib
import os
import pathlib
import re

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.files import tables as files_tables
from tasks.ratings.options import Csv
from tasks.ratings.options import DROP
from tasks.ratings.options import REFUSE
from tasks.ratings.tables import Table

# Usual column names, in lower case and without punctuation.
_USUAL = {
  'user': ('user', 'userid', 'username', 'member', 'customer', 'reader'),
  'item': (
    *('item', 'itemid', 'movie', 'movieid', 'film', 'filmid', 'book', 'bookid'),
    *('product', 'productid'),
  ),
  'rating': ('rating', 'ratings', 'score', 'stars'),
  'time': ('timestamp', 'time', 'date', 'datetime'),
}
_REPAIR = 'Repair the file, or name another one with --csv=FILE.'
_NO_FILE = (
  'Name a CSV file of ratings, with a line of column names and then a line a '
  'rating, with --csv=FILE, or use invented ratings with --data=synthetic.'
)


def read(csv: Csv) -> Table:
  """Read a file of ratings.

  Args:
    csv: The file and its columns.

  Raises:
    DataError: If there is no such file or column, or a line is damaged; names
      file and line.
  """
  if not csv.file:
    raise DataError(f'Ratings: no file is named. {_NO_FILE}')
  path = pathlib.Path(os.path.expanduser(csv.file))
  if not path.is_file():
    problem = 'it is no file' if path.exists() else 'there is no such file'
    raise DataError(f'--csv={path}: {problem}. {_NO_FILE}')
  separator = '\t' if csv.separator in ('tab', '\\t') else csv.separator
  found = files_tables.read(path, remedy=_REPAIR, separator=separator)
  columns = _columns(csv, path, found.texts.columns.tolist())
  texts = found.texts[list(columns.values())]
  texts.columns = pd.Index(columns)
  found, left_out = _whole(csv, dataclasses.replace(found, texts=texts))
  if found.texts.empty:
    raise DataError(
      f'{path}: there are no ratings below the line of column names. {_NO_FILE}'
    )
  frame = pd.DataFrame(
    {name: _sorted(found.texts[name]) for name in ('user', 'item')}
  )
  frame['rating'] = found.values(
    'rating',
    files_tables.NUMBER,
    'a number that is not too large',
    _small_numbers,
    'Repair the line, or name another column with --csv_rating.',
  )
  if 'time' in columns:
    # The first one decides.
    first = found.texts['time'].iloc[0]
    is_number = re.fullmatch(files_tables.NUMBER, first)
    times = found.values(
      'time',
      # Pandas also reads `now` and `today`.
      files_tables.NUMBER if is_number else r'[0-9][\x00-\x7f]*',
      'a number or a date like 2001-02-03 04:05:06',
      _whole_or_not if is_number else _dates,
      'Repair the line, write dates with the year first, and all or none with '
      'an offset from UTC, or name another column with --csv_time.',
    )
    frame['time'] = np.unique(times.to_numpy(), return_inverse=True)[1]
  return Table(path.name, frame, columns, left_out)


def _columns(
  csv: Csv, path: pathlib.Path, header: Sequence[str]
) -> dict[str, str]:
  """Return the columns by their meaning."""
  columns: dict[str, str] = {}
  for what, usual in _USUAL.items():
    given = getattr(csv, what)
    found = [
      name
      for name in header
      if name == given
      or (given is None and re.sub('[^a-z0-9]', '', name.lower()) in usual)
    ]
    if not found and given is None and what == 'time':
      continue
    problem = ''
    if len(found) != 1:
      problem = f'{len(found) or "no"} columns could be the {what}'
      if given is not None:
        problem = f'{len(found) or "no"} columns have the name {given!r}'
    elif found[0] in columns.values():
      problem = f'column {found[0]!r} cannot be the {what}, too'
    if problem:
      meant = difflib.get_close_matches(str(given), header, 1)
      hint = f' Did you mean {meant[0]!r}?' if meant and not found else ''
      raise DataError(
        f'{path}: {problem}. Name another one with --csv_{what}=COLUMN; the '
        f'columns are {", ".join(map(repr, header)):.500}.{hint}'
      )
    columns[what] = found[0]
  if 'time' not in columns and len(header) > len(columns):
    logging.warning(
      '%s: no column is read as the time, so that the order of lines stands '
      'for it. --csv_time=COLUMN names one; read are %s, not read %s.',
      *(path, columns, [c for c in header if c not in columns.values()]),
    )
  return columns


def _whole(
  csv: Csv, found: files_tables.TextTable
) -> tuple[files_tables.TextTable, dict[str, int]]:
  """Return the lines that lack nothing, and how many were dropped, by why."""
  left_out, texts = {}, found.texts
  for name in texts:
    is_empty = texts[name] == ''
    if is_empty.any() and csv.missing == REFUSE:
      raise found.refusal(
        is_empty.idxmax(),
        f'there is no {name}',
        f'Repair the line, or drop such lines with --csv_missing={DROP}.',
      )
    if is_empty.any():
      left_out[f'lines that lack the {name}'] = int(is_empty.sum())
      texts = texts[~is_empty]
  return dataclasses.replace(found, texts=texts), left_out


def _sorted(texts: pd.Series) -> pd.Series:
  """Sort the categories, without those of dropped lines."""
  used = texts.cat.remove_unused_categories()
  return used.cat.reorder_categories(sorted(used.cat.categories))


def _small_numbers(texts: pd.Series) -> pd.Series:
  found = texts.astype(np.float64)
  # Beyond that, squared errors exceed the range of floats.
  return found.where(found.abs() < 1e9)


def _whole_or_not(texts: pd.Series) -> pd.Series:
  """Return numbers of which different ones differ, however long they are."""
  try:
    found = pd.to_numeric(texts)
  except ValueError:  # Integers of more than 64 bits.
    found = texts
  # Integers are exact, but beyond 2**53 not beside fractions.
  if found.dtype == object or (found.dtype.kind == 'f' and not found.is_unique):
    # NaN, as of a wrong number, if an exponent has too many digits.
    context = decimal.Context(traps=[])
    return texts.map(lambda text: decimal.Decimal(text, context))
  return found


def _dates(texts: pd.Series) -> pd.Series:
  found = pd.to_datetime(texts, errors='coerce', utc=True, format='ISO8601')
  # Pandas gives a time without an offset from UTC that of an earlier one.
  has_offset = texts.str.contains(r'(?:Z|[+-]\d\d:?\d\d)$')
  return found.where(has_offset == has_offset.iloc[0])
