"""Ratings from a CSV file, a line a rating, read strictly.

A line that is not as it should be is never skipped or repaired in silence: the
reader stops and names file and line, or drops and counts where that was asked
for.
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

# In characters; without ends of lines a file would be in memory as a whole.
_LONGEST_LINE = 1 << 20
_SEPARATORS = (',', ';', '\t', '|')
_NO_FILE = (
  'Name a CSV file of ratings, with a line of column names and then a line a '
  'rating, with --csv=FILE, or use invented ratings with --data=synthetic.'
)


@dataclasses.dataclass(frozen=True)
class Csv(Options):
  """Where ratings are, and what the columns are called."""

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
    """Refuses separators that cannot be."""
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
      DataError: If there is no such file or column, or a line is damaged; it
        names file and line.
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
    """What to the column that says it."""
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
  """What the first line has most of; the comma if it has none."""
  with _opened(path) as file:
    try:
      first = file.readline(_LONGEST_LINE)
    except UnicodeDecodeError:
      raise _no_text(path) from None
  return max(_SEPARATORS, key=first.count)


def _opened(path: pathlib.Path) -> Any:
  try:
    # A mark of the byte order, as some programs write, is no text.
    return path.open(encoding='utf-8-sig', newline='')
  except OSError as error:
    raise DataError(f'--csv={path}: {error.strerror or error}.') from None


def _lines(
  path: pathlib.Path, separator: str
) -> Iterator[tuple[int, list[str]]]:
  """The lines that are not empty, as fields, each with its number.

  Raises:
    DataError: If the file is no CSV of UTF-8.
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
  """The lines of a file, none of which is longer than one may be."""
  lines = bounded_lines.read(
    path, file, _LONGEST_LINE, 'characters', '. Repair the line.'
  )
  return (line for _, line in lines)


def _no_text(path: pathlib.Path) -> DataError:
  """What is wrong with a file that is no UTF-8."""
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
  """Numbers texts in the order in which they first occur."""

  def __init__(self) -> None:
    self._number_of: dict[str, int] = {}
    self.numbers = array.array('q')

  def add(self, text: str) -> None:
    known = self._number_of
    self.numbers.append(known.setdefault(text, len(known)))

  def sorted(self) -> tuple[tuple[str, ...], np.ndarray]:
    """The texts in their order, and for each line the place of its text."""
    texts = sorted(self._number_of)
    place_of = np.empty(len(texts), np.int64)
    for place, text in enumerate(texts):
      place_of[self._number_of[text]] = place
    return tuple(texts), place_of[np.asarray(self.numbers, np.int64)]


class _Reader:
  """Collects the ratings of a file."""

  def __init__(
    self,
    path: pathlib.Path,
    header: Sequence[str],
    columns: dict[str, str],
    drops: bool,
  ):
    """Begins.

    Args:
      path: The file.
      header: The names of its columns.
      columns: What to the name of its column.
      drops: Whether lines that lack a value are dropped.
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
      lines: Numbers of lines, and their fields.

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
    # Further apart, squares of errors are beyond what numbers can hold.
    if not abs(number) < 1e9:
      raise self._damaged(
        line,
        f'the rating {text!r:.40} in the column {self._columns["rating"]!r} is '
        'no number, or too large',
        'Repair the line, or name another column with --csv_rating.',
      )
    return number

  def _read_times(self) -> np.ndarray:
    """The order of the times: equal ones have equal places."""
    times = pd.Series(self._times)
    found = times.map(numbers.number)
    if found.notna().all():
      # Whole numbers beyond 2**53 differ, too.
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
