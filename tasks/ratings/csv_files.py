"""Ratings from a CSV file, one per line, read strictly."""

from collections.abc import Sequence
import dataclasses
import difflib
import pathlib
import re
from typing import ClassVar

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.files import tables as files_tables
from tasks.options import option
from tasks.options import Options
from tasks.ratings.tables import Table

REFUSE, DROP = 'refuse', 'drop'

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


@dataclasses.dataclass(frozen=True)
class Csv(Options):
  """Options of the ratings file and its columns."""

  title: ClassVar[str] = 'Task ratings'

  file: str | None = option(
    None,
    'CSV file of ratings: a line of column names, and a line a rating.',
    flag='csv',
    may_change=True,
  )
  user: str | None = option(
    None,
    'Column that says who rated; by default one with a usual name, such as '
    'user or userId.',
    flag='csv_user',
  )
  item: str | None = option(
    None,
    'Column that says what was rated; by default one such as item, movieId or '
    'film.',
    flag='csv_item',
  )
  rating: str | None = option(
    None,
    'Column of the ratings; by default one such as rating, score or stars.',
    flag='csv_rating',
  )
  time: str | None = option(
    None,
    'Column of numbers or dates that says when; by default one such as '
    'timestamp or date, or none if there is none.',
    flag='csv_time',
  )
  separator: str | None = option(
    None,
    'What stands between values, such as ; or tab; by default what the first '
    'line has most of.',
    flag='csv_separator',
  )
  missing: str = option(
    REFUSE,
    'What becomes of lines that lack a value: the run is refused with the '
    'number of the first one, or they are dropped and counted.',
    choices=(REFUSE, DROP),
    flag='csv_missing',
  )

  def __post_init__(self) -> None:
    """Raise an error for impossible separators."""
    super().__post_init__()
    separator = self.separator
    if separator is None or separator in ('tab', '\\t'):
      return
    if len(separator) != 1 or separator in '"\r\n':
      raise OptionError(
        f'--csv_separator={separator!s:.20}: give one character, or tab.'
      )

  def read(self) -> Table:
    """Read the file.

    Raises:
      DataError: If there is no such file or column, or a line is damaged; names
        file and line.
    """
    if not self.file:
      raise DataError(f'Ratings: no file is named. {_NO_FILE}')
    path = pathlib.Path(self.file)
    if not path.is_file():
      problem = 'it is no file' if path.exists() else 'there is no such file'
      raise DataError(f'--csv={path}: {problem}. {_NO_FILE}')
    separator = '\t' if self.separator in ('tab', '\\t') else self.separator
    found = files_tables.read(path, remedy=_REPAIR, separator=separator)
    columns = self._columns(path, found.texts.columns.tolist())
    texts = found.texts[list(columns.values())]
    texts.columns = pd.Index(columns)
    found, left_out = self._whole(dataclasses.replace(found, texts=texts))
    if found.texts.empty:
      raise DataError(
        f'{path}: there are no ratings below the line of column names. '
        f'{_NO_FILE}'
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
        files_tables.NUMBER if is_number else r'[\x00-\x7f]+',
        'a number or a date like 2001-02-03 04:05:06',
        _whole_or_not if is_number else _dates,
        'Repair the line, or name another column with --csv_time.',
      )
      frame['time'] = np.unique(times.to_numpy(), return_inverse=True)[1]
    return Table(path.name, frame, columns, left_out)

  def _columns(
    self, path: pathlib.Path, header: Sequence[str]
  ) -> dict[str, str]:
    """Return the columns by their meaning."""
    columns: dict[str, str] = {}
    for what, usual in _USUAL.items():
      given = getattr(self, what)
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
    logging.info('%s: reads the columns %s.', path, columns)
    return columns

  def _whole(
    self, found: files_tables.TextTable
  ) -> tuple[files_tables.TextTable, dict[str, int]]:
    """Return the lines that lack nothing, and how many were dropped, by why."""
    left_out, texts = {}, found.texts
    for name in texts:
      is_empty = texts[name] == ''
      if is_empty.any() and self.missing == REFUSE:
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
  return pd.to_numeric(texts)  # Integers beyond 2**53 differ, too.


def _dates(texts: pd.Series) -> pd.Series:
  return pd.to_datetime(texts, errors='coerce', utc=True, format='ISO8601')
