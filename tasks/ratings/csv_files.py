"""Ratings from a CSV file, one per line, read strictly.

A malformed line is never skipped or repaired silently: the reader stops and
names file and line, or drops and counts lines on request.
"""

import array
import collections
from collections.abc import Iterator, Sequence
import csv
import dataclasses
import os
import pathlib
from typing import Any, ClassVar, TextIO

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.files import bounded_lines
from tasks.files import numbers
from tasks.options import option
from tasks.options import Options
from tasks.ratings import columns as columns_lib
from tasks.ratings.tables import Table

REFUSE, DROP = 'refuse', 'drop'

# In characters; a file without line ends would be in memory as a whole.
_LONGEST_LINE = 1 << 20
_SEPARATORS = (',', ';', '\t', '|')
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
    separator = self.separator or _guessed_separator(path)
    if separator in ('tab', '\\t'):
      separator = '\t'
    lines = _lines(path, separator)
    _, header = next(lines, (0, []))
    header = [name.strip() for name in header]
    if not header:
      raise DataError(f'{path}: the file is empty. {_NO_FILE}')
    columns = self._columns(path, header)
    return _Reader(path, header, columns, self.missing == DROP).read(lines)

  def _columns(
    self, path: pathlib.Path, header: Sequence[str]
  ) -> dict[str, str]:
    """Return the columns by their meaning."""
    columns = {}
    for what in columns_lib.USUAL:
      given = getattr(self, what)
      found = (
        columns_lib.guessed(path, header, what)
        if given is None
        else columns_lib.named(path, header, what, given)
      )
      if found is not None:
        columns[what] = found
    for column, times in collections.Counter(columns.values()).items():
      if times > 1:
        both = [what for what, name in columns.items() if name == column]
        raise DataError(
          f'{path}: column {column!r} cannot be both {" and ".join(both)}. '
          f'Name others with --csv_{both[0]} and --csv_{both[1]}; the columns '
          f'are {columns_lib.listed(header)}.'
        )
    logging.info('%s: reads the columns %s.', path, columns)
    return columns


def _guessed_separator(path: pathlib.Path) -> str:
  """Return the most frequent separator of the first line, or a comma."""
  with _opened(path) as file:
    try:
      first = file.readline(_LONGEST_LINE)
    except UnicodeDecodeError:
      raise _no_text(path) from None
  return max(_SEPARATORS, key=first.count)


def _opened(path: pathlib.Path) -> Any:
  try:
    # Skips the byte order mark that some programs write.
    return path.open(encoding='utf-8-sig', newline='')
  except OSError as error:
    raise DataError(f'--csv={path}: {error.strerror or error}.') from None


def _lines(
  path: pathlib.Path, separator: str
) -> Iterator[tuple[int, list[str]]]:
  """Yield the fields of non-empty lines, with line numbers.

  Raises:
    DataError: If the file is no CSV in UTF-8.
  """
  with _opened(path) as file:
    lines = csv.reader(
      _short(path, file),
      delimiter=separator,
      skipinitialspace=True,
      strict=True,
    )
    try:
      for fields in lines:
        if fields:
          yield lines.line_num, fields
    except UnicodeDecodeError:
      raise _no_text(path) from None
    except csv.Error as error:
      raise DataError(
        f'{path}, line {lines.line_num}: no CSV ({error}). Repair the line.'
      ) from None


def _short(path: pathlib.Path, file: TextIO) -> Iterator[str]:
  """Yield the lines of a file, with an error for one that is too long."""
  lines = bounded_lines.read(
    path, file, _LONGEST_LINE, 'characters', '. Repair the line.'
  )
  return (line for _, line in lines)


def _no_text(path: pathlib.Path) -> DataError:
  """Make the error for a file that is not UTF-8."""
  where = f'{path}'
  with path.open('rb') as file:
    for number, line in enumerate(file, 1):
      try:
        line.decode()
      except UnicodeDecodeError as error:
        where += f', line {number}: byte 0x{line[error.start]:02x}'
        break
  return DataError(f'{where} is no UTF-8. Save the file as UTF-8.')


class _Numbered:
  """Texts numbered in the order of their first occurrence."""

  def __init__(self) -> None:
    self._number_of: dict[str, int] = {}
    self.numbers = array.array('q')

  def add(self, text: str) -> None:
    known = self._number_of
    self.numbers.append(known.setdefault(text, len(known)))

  def sorted(self) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the texts, sorted, and the position of each line's text."""
    texts = sorted(self._number_of)
    place_of = np.empty(len(texts), np.int64)
    for place, text in enumerate(texts):
      place_of[self._number_of[text]] = place
    return tuple(texts), place_of[np.asarray(self.numbers, np.int64)]


class _Reader:
  """Reader that collects the ratings of a file."""

  def __init__(
    self,
    path: pathlib.Path,
    header: Sequence[str],
    columns: dict[str, str],
    drops: bool,
  ):
    """Start without ratings.

    Args:
      path: The file.
      header: The names of its columns.
      columns: The columns by their meaning.
      drops: True to drop lines that lack a value.
    """
    self._path = path
    self._columns = columns
    self._drops = drops
    self._width = len(header)
    self._places = {what: header.index(n) for what, n in columns.items()}
    self._users, self._items = _Numbered(), _Numbered()
    self._ratings = array.array('d')
    self._times: list[str] = []
    self._line_numbers = array.array('q')
    self._number_of: dict[str, float] = {}

  def read(self, lines: Iterator[tuple[int, list[str]]]) -> Table:
    """Read all lines.

    Args:
      lines: Line numbers and fields.

    Raises:
      DataError: If a line is damaged.
    """
    lacking: collections.Counter[str] = collections.Counter()
    for line, fields in lines:
      if len(fields) != self._width:
        raise self._damaged(
          line,
          f'{len(fields)} values instead of {self._width}',
          'Repair the line; a value that holds the separator stands in quotes.',
        )
      values = {what: fields[p].strip() for what, p in self._places.items()}
      empty = [what for what, value in values.items() if not value]
      if empty and not self._drops:
        raise self._damaged(
          line,
          f'no value in the column {self._columns[empty[0]]!r}',
          f'Repair the line, or drop such lines with --csv_missing={DROP}.',
        )
      if empty:
        lacking[f'lines that lack the {empty[0]}'] += 1
        continue
      self._add(line, values)
    if not self._ratings:
      raise DataError(
        f'{self._path}: there are no ratings below the line of column names. '
        f'{_NO_FILE}'
      )
    users, user = self._users.sorted()
    items, item = self._items.sorted()
    return Table(
      name=os.path.basename(self._path),
      users=users,
      items=items,
      user=user,
      item=item,
      rating=np.asarray(self._ratings, np.float64),
      time=self._read_times() if 'time' in self._columns else None,
      columns=self._columns,
      left_out=dict(lacking),
    )

  def _add(self, line: int, values: dict[str, str]) -> None:
    text = values['rating']
    if text not in self._number_of:
      self._number_of[text] = self._number(line, text)
    self._users.add(values['user'])
    self._items.add(values['item'])
    self._ratings.append(self._number_of[text])
    self._line_numbers.append(line)
    if 'time' in values:
      self._times.append(values['time'])

  def _number(self, line: int, text: str) -> float:
    number = numbers.number(text)
    # Beyond that, squared errors exceed the range of floats.
    if not abs(number) < 1e9:
      raise self._damaged(
        line,
        f'the rating {text!r:.40} in the column {self._columns["rating"]!r} is '
        'no number, or too large',
        'Repair the line, or name another column with --csv_rating.',
      )
    return number

  def _read_times(self) -> np.ndarray:
    """Return the ranks of the times; equal times have equal ranks."""
    times = pd.Series(self._times)
    found = times.map(numbers.number)
    if found.notna().all():
      # Integers beyond 2**53 differ, too.
      found = pd.to_numeric(times)
    elif pd.isna(found[0]):
      found = pd.to_datetime(
        times.where(times.map(str.isascii)),
        errors='coerce',
        utc=True,
        format='ISO8601',
      )
    if found.isna().any():
      place = int(np.flatnonzero(found.isna())[0])
      raise self._damaged(
        self._line_numbers[place],
        f'the time {times[place]!r:.40} in the column '
        f'{self._columns["time"]!r} is no number and no date like 2001-02-03 '
        '04:05:06',
        'Repair the line, or name another column with --csv_time.',
      )
    return np.unique(found.to_numpy(), return_inverse=True)[1]

  def _damaged(self, line: int, problem: str, remedy: str) -> DataError:
    return DataError(f'{self._path}, line {line}: {problem}. {remedy}')
