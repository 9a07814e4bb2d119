"""CSV files as tables of texts, read strictly.

A damaged line is never skipped or repaired: an error names it.
"""

import array
from collections.abc import Callable, Hashable, Sequence
import csv
import itertools
import pathlib

import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.files import bounded_lines

# In characters; a file without line ends would be in memory as a whole.
_LONGEST_LINE = 1 << 20
_SEPARATORS = (',', ';', '\t', '|')


def read(
  path: pathlib.Path,
  choose: Callable[[list[str]], Sequence[str]],
  separator: str | None = ',',
  remedy: str = 'Repair the line.',
) -> pd.DataFrame:
  """Read columns of a file in UTF-8; lines without anything are no rows.

  Args:
    path: The file, whose first line names the columns.
    choose: Returns the columns to read, given the names of all.
    separator: What stands between values; None for what the first line has most
      of.
    remedy: Ends messages about a damaged line.

  Returns:
    Texts without spaces around them, as categories; the index has the numbers
    of lines.

  Raises:
    DataError: If the file cannot be read or a line is damaged.
  """
  known: list[dict[str, int]] = []
  codes: list[array.array[int]] = []
  numbers = array.array('q')
  try:
    # Skips the byte order mark that some programs write.
    with path.open(encoding='utf-8-sig', newline='') as file:
      texts = (
        text
        for _, text in bounded_lines.read(
          path, file, _LONGEST_LINE, 'characters', f'. {remedy}'
        )
      )
      first = next(texts, '')
      lines = csv.reader(
        itertools.chain([first], texts),
        delimiter=separator or max(_SEPARATORS, key=first.count),
        skipinitialspace=True,
        strict=True,
      )
      rows = filter(None, lines)
      header = [name.strip() for name in next(rows, [])]
      columns = list(choose(header))
      places = [header.index(column) for column in columns]
      known = [{} for _ in columns]
      codes = [array.array('q') for _ in columns]
      for fields in rows:
        if len(fields) != len(header):
          raise damaged(
            path,
            lines.line_num,
            f'{len(fields)} values instead of {len(header)}; a value that '
            'holds the separator stands in quotes',
            remedy,
          )
        numbers.append(lines.line_num)
        for place, number_of, column in zip(places, known, codes, strict=True):
          text = fields[place].strip()
          column.append(number_of.setdefault(text, len(number_of)))
  except OSError as error:
    raise DataError(
      f'{path}: cannot be read ({error.strerror or error}). Change its '
      'permissions, or name another file.'
    ) from None
  except csv.Error as error:
    raise damaged(path, lines.line_num, f'no CSV ({error})', remedy) from None
  return pd.DataFrame(
    {
      name: pd.Categorical.from_codes(
        column, pd.Index(list(texts), dtype=object)
      )
      for name, column, texts in zip(columns, codes, known, strict=True)
    },
    index=np.asarray(numbers, np.int64),
  )


def values(
  path: pathlib.Path,
  column: pd.Series,
  parse: Callable[[pd.Series], pd.Series],
  expected: str,
  remedy: str = 'Repair the line.',
) -> pd.Series:
  """Parse a column of texts.

  Args:
    path: The file, for messages.
    column: A column that was read.
    parse: Returns the values of given texts, and NaN or NaT for a wrong one.
    expected: Says in a message what a value should be.
    remedy: Ends the message.

  Raises:
    DataError: If a value is wrong; names the first such line.
  """
  used = column.cat.remove_unused_categories()
  parsed = parse(pd.Series(used.cat.categories, dtype=object))
  is_wrong = used.cat.codes.isin(np.flatnonzero(parsed.isna()))
  if is_wrong.any():
    line = is_wrong.idxmax()
    raise damaged(
      path,
      line,
      f'{column.name!r} should be {expected}, found {column[line]!r:.40}',
      remedy,
    )
  return pd.Series(parsed.to_numpy()[used.cat.codes], column.index)


def damaged(
  path: pathlib.Path, line: Hashable, problem: str, remedy: str
) -> DataError:
  """Make the error for a damaged line."""
  return DataError(f'{path}, line {line}: {problem}. {remedy}')
