"""Tables of texts, such as CSV files, read by pandas and checked by columns.

A damaged value is never skipped or repaired: an error names its line.
"""

from collections.abc import Callable, Hashable, Sequence
import contextlib
import csv
import dataclasses
import functools
import io
import pathlib
import re
from typing import Any

import numpy as np
import pandas as pd

from tasks.errors import DataError

# Regular expressions of values. Python also reads `1_0` as 10, digits of other
# scripts, and `inf`.
WHOLE = '[0-9]{1,18}'
NUMBER = r'[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?'

_SEPARATORS = (b',', b';', b'\t', b'|')


@dataclasses.dataclass(frozen=True, eq=False)
class TextTable:
  """The columns of a file.

  Attributes:
    path: The file.
    texts: Texts without spaces around them, as categories, some of which no
      line has, or whole numbers. The index has the numbers of lines; all that
      stands in quotes counts as one.
    remedy: Ends messages about damaged lines.
  """

  path: pathlib.Path
  texts: pd.DataFrame
  remedy: str

  def values(
    self,
    column: str,
    pattern: str,
    expected: str,
    parse: Callable[[pd.Series], pd.Series] = lambda texts: texts,
    remedy: str = '',
  ) -> pd.Series:
    """Parse a column.

    Args:
      column: Its name.
      pattern: A regular expression that matches all correct texts.
      expected: Says in a message what a value should be.
      parse: Returns the values of different texts that match, NaN or NaT for a
        wrong one. By default the values are the texts.
      remedy: Replaces that of the table.

    Raises:
      DataError: If a value is wrong; names the first such line.
    """
    used = self.texts[column]
    if used.dtype == np.int64:
      return used
    texts = pd.Series(used.cat.categories, dtype=object)
    match = re.compile(pattern).fullmatch
    parsed = parse(texts[[bool(match(text)) for text in texts]])
    parsed = parsed[parsed.notna()]
    places = np.full(len(texts), -1)
    places[parsed.index] = np.arange(len(parsed))
    found = places[used.cat.codes]
    if (found < 0).any():
      line = used.index[int(found.argmin())]
      raise self.refusal(
        line,
        f'{column!r} should be {expected}, found {used[line]!r:.40}',
        remedy,
      )
    return pd.Series(parsed.to_numpy()[found], used.index)

  def refusal(
    self, line: Hashable, problem: str, remedy: str = ''
  ) -> DataError:
    """Make the error for a damaged line."""
    return DataError(
      f'{self.path}, line {line}: {problem}. {remedy or self.remedy}'
    )


def read(
  path: pathlib.Path,
  *,
  remedy: str,
  names: Sequence[str] = (),
  separator: str | None = ',',
  must_end: bool = False,
  whole: Sequence[int] = (),
) -> TextTable:
  """Read a file; lines without anything are no rows.

  Args:
    path: The file, in UTF-8.
    remedy: Ends messages about a damaged file or line.
    names: Names of the columns of a file without a header, where quotes are
      characters like all others, and which may be in Latin-1. By default the
      first line names them.
    separator: What stands between values; None for what the first line has most
      of.
    must_end: True if a last line without a line end is damaged.
    whole: Places of columns of which all values should be `WHOLE`. They are
      read as numbers, several times faster, if they are.

  Raises:
    DataError: If the file cannot be read, or a line has too many values.
  """
  encoding, header = 'utf-8-sig', 0 if names else 1
  try:
    data = path.read_bytes()
    if b'\0' in data:
      raise ValueError('it has zero bytes, as no text has')
    if must_end and data and not data.endswith(b'\n'):
      line = data.count(b'\n') + 1
      raise ValueError(f'it is cut off in line {line}, which has no line end')
    if names:
      try:
        data.decode()
      except UnicodeDecodeError:
        encoding = 'latin-1'
    one = separator and separator.encode()
    if not one:
      one = max(_SEPARATORS, key=data.partition(b'\n')[0].count)
    data, one = _with_short_separators(data, one)
    parse: Any = functools.partial(
      pd.read_csv,
      sep=one.decode(),
      header=None,
      low_memory=False,
      na_filter=False,
      skip_blank_lines=False,
      skipinitialspace=True,
      quoting=csv.QUOTE_NONE if names else csv.QUOTE_MINIMAL,
      encoding=encoding,
    )
    first = parse(io.BytesIO(data), dtype=str, nrows=1)
    if names and first.shape[1] != len(names):
      raise ValueError(f'line 1 has no {len(names)} values')
    table = None
    if whole and b'+' not in data:
      # A damaged line is an error, of which the texts tell which it is.
      with contextlib.suppress(ValueError):
        table = _with_numbers(parse, data, first.columns, whole, header)
    if table is None:
      table = parse(io.BytesIO(data), dtype=str).iloc[header:]
  except pd.errors.EmptyDataError:
    raise DataError(f'{path}: the file is empty. {remedy}') from None
  except (OSError, ValueError) as error:
    problem = getattr(error, 'strerror', None) or str(error).strip()
    if isinstance(error, UnicodeDecodeError):
      problem += '; save it as UTF-8'
    if names and not isinstance(error, OSError):
      problem += f'; a line is {(separator or ",").join(names)}'
    raise DataError(f'{path}: cannot be read ({problem}). {remedy}') from None
  table.index += 1
  columns = [_categories(table[place]) for place in table]
  texts = pd.concat(columns, axis=1)
  texts.columns = pd.Index(names or [str(x).strip() for x in first.iloc[0]])
  is_blank = np.logical_and.reduce([column == '' for column in columns])
  return TextTable(path, texts[~is_blank], remedy)


def _with_short_separators(data: bytes, one: bytes) -> tuple[bytes, bytes]:
  """Return a file with separators of one byte, and that byte.

  The fast parser knows no longer ones.
  """
  if len(one) == 1:
    return data, one
  last, short = one[-1:], b'\x1f'
  if one + last in data:  # A value that ends with the separator's last byte.
    ends = b'(?<!%b)%b(?!%b)' % tuple(map(re.escape, (last, one + last, last)))
    data = re.sub(ends, last + short, data)
  return data.replace(one, short), short


def _with_numbers(
  parse: Callable[..., pd.DataFrame],
  data: bytes,
  columns: pd.Index,
  whole: Sequence[int],
  header: int,
) -> pd.DataFrame:
  """Parse all but the header, with numbers, which must be `WHOLE`."""
  kinds = dict.fromkeys(columns, str) | dict.fromkeys(whole, np.int64)
  table = parse(io.BytesIO(data), dtype=kinds, skiprows=header)
  numbers = table[list(whole)].to_numpy()
  if (
    len(table.columns) != len(columns)
    or not ((numbers >= 0) & (numbers < 10**18)).all()
  ):
    raise ValueError
  table.index += header
  return table


def _categories(column: pd.Series) -> pd.Series:
  if column.dtype == np.int64:
    return column
  codes: Any
  codes, texts = pd.factorize(column)
  stripped = pd.Index([text.strip() for text in texts], dtype=object)
  if not stripped.is_unique:
    numbers, stripped = pd.factorize(stripped)
    codes = numbers[codes]
  return pd.Series(pd.Categorical.from_codes(codes, stripped), column.index)
