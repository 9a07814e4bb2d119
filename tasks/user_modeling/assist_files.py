"""Logs of ASSISTments 2009-2010, joined with each student's teacher.

The file is a table with a header. A row is one skill of one attempt: an attempt
at a problem of three skills is three consecutive rows that differ only in the
skill. `load` joins them into one record with three attributes; only then does a
record have 1.20 attributes on average, as in the paper's Table 1.
"""

import collections
from collections.abc import Sequence
import csv
import io
import os
import pathlib
import re

from absl import logging
import numpy as np
import pandas as pd

from tasks.user_modeling import data_files
from tasks.user_modeling import records
from tasks.user_modeling.data_files import damaged

FILE = 'assist2009_with_teacher.csv'
_PLACES = ('assistments', '')

_NUMBERS = (
  'user_id',
  'position',
  'problem_id',
  'skill',
  'correct',
  'teacher_id',
)
_COLUMNS = (*_NUMBERS, 'skill_name')
_WHOLE_NUMBER = re.compile('[0-9]{1,18}')
_FIRST_LINE = 2  # After the header.


def load(
  folder: str | os.PathLike[str],
  *,
  min_users: int = 5,
  min_records_per_user: float = 5.0,
  join_skills: bool = True,
) -> records.Records:
  """Read ASSISTments: clients are teachers, answers are 0 or 1.

  Args:
    folder: Holds `FILE`, or a folder `assistments` that does.
    min_users: Teachers with fewer students are left out (HPFL, section 5.1).
    min_records_per_user: Teachers whose students have fewer records on average
      are left out, too.
    join_skills: True to join the rows of one attempt into one record. Otherwise
      each row is a record, and an attempt at a problem of three skills counts
      three times; the item has all three attributes either way.

  Raises:
    DataError: If the file is missing or damaged, or nothing is left of it.
  """
  path = data_files.find(folder, _PLACES, FILE)
  table = read(path)
  attempts = _join_skills(table) if join_skills else table
  if join_skills:
    logging.info(
      'assist: %d rows are further skills of %d attempts.',
      len(table) - len(attempts),
      len(attempts),
    )
  skills = table.drop_duplicates('skill')
  return records.build(
    'assist',
    client=attempts['teacher_id'].to_numpy(),
    user=attempts['user_id'].to_numpy(),
    item=attempts['problem_id'].to_numpy(),
    answer=attempts['correct'].to_numpy(),
    tags=records.Tags(
      item=table['problem_id'].to_numpy(),
      attribute=table['skill'].to_numpy(),
      names=dict(zip(skills['skill'], skills['skill_name'], strict=True)),
    ),
    scale=(0.0, 1.0),
    min_users=min_users,
    min_records_per_user=min_records_per_user,
  )


def read(path: pathlib.Path) -> pd.DataFrame:
  """Read the table, sorted by student, then position.

  Returns:
    Columns user_id, position, problem_id, skill, correct and teacher_id (int64)
    and skill_name (str), with the ids of the file.

  Raises:
    DataError: If the file cannot be read, or a line is damaged or contradicts
      another one; names the line.
  """
  data = data_files.read(path)
  header = _header(data, path)
  if not data.endswith(b'\n'):
    raise damaged(
      path,
      data.count(b'\n') + 1,
      'the file stops within this line, which has no line end, so it seems to '
      'be cut off',
    )
  table = _parse_quickly(data)
  if table is None:
    table = _parse_slowly(data, header, path)
  if table.empty:
    raise damaged(path, _FIRST_LINE, 'the table has no rows')
  _refuse_contradictions(table, path)
  table = table.sort_values(['user_id', 'position'], kind='stable')
  return table[list(_COLUMNS)].reset_index(drop=True)


def _join_skills(table: pd.DataFrame) -> pd.DataFrame:
  """Keep one row of each attempt.

  Consecutive rows of the same student, problem and answer are one attempt; a
  repeated skill starts a new attempt.
  """
  same = table[['user_id', 'problem_id']].to_numpy()
  is_new = np.any(same[1:] != same[:-1], axis=1)
  run = np.cumsum(np.concatenate([[True], is_new]))
  rows = pd.DataFrame(
    {'run': run, 'skill': table['skill'], 'correct': table['correct']}
  )
  rows['again'] = rows.groupby(['run', 'skill']).cumcount()
  return table[~rows.duplicated(['run', 'again', 'correct']).to_numpy()]


def _header(data: bytes, path: pathlib.Path) -> list[str]:
  """Return the column names; each required one must occur exactly once."""
  line = data.partition(b'\n')[0].decode('utf-8-sig', 'replace')
  header = next(csv.reader([line]), [])
  for column in _COLUMNS:
    times = header.count(column)
    if times != 1:
      found = 'is missing' if not times else f'is there {times} times'
      raise damaged(
        path,
        1,
        f'the column {column!r} {found}; the header is {line[:120]!r}, and '
        f'needed are {", ".join(_COLUMNS)}',
      )
  return header


def _parse_quickly(data: bytes) -> pd.DataFrame | None:
  """Parse the table if it is certainly valid, else return None."""
  types: collections.defaultdict[str, type] = collections.defaultdict(
    lambda: str, dict.fromkeys(_NUMBERS, np.int64)
  )
  try:
    table = pd.read_csv(
      io.BytesIO(data),
      dtype=types,
      encoding='utf-8-sig',
      keep_default_na=False,
      skip_blank_lines=False,
      low_memory=False,
    )
  except (ValueError, OverflowError):
    return None
  names = {name: name.strip() for name in table['skill_name'].unique()}
  # Rows longer than the header shift, shorter ones end in empty fields, and an
  # open quotation mark swallows the lines after it.
  is_sound = (
    isinstance(table.index, pd.RangeIndex)
    and len(table) == data.count(b'\n') - 1
    and not (table.iloc[:, -1] == '').any()
    and all(names.values())
    and (table[list(_NUMBERS)] >= 0).to_numpy().all()
    and (table['correct'] <= 1).all()
  )
  if not is_sound:
    return None
  return table.assign(skill_name=table['skill_name'].map(names))


def _parse_slowly(
  data: bytes, header: Sequence[str], path: pathlib.Path
) -> pd.DataFrame:
  """Parse line by line and name the first damaged line."""
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    raise damaged(
      path,
      data.count(b'\n', 0, error.start) + 1,
      f'the byte 0x{data[error.start]:02x} is not text in UTF-8',
    ) from error
  reader = csv.reader(io.StringIO(text, newline=''), strict=True)
  next(reader)
  rows = []
  line = _FIRST_LINE
  try:
    for fields in reader:
      if reader.line_num > line:
        raise damaged(path, line, 'a quotation mark is not closed')
      rows.append(_row(dict(zip(header, fields, strict=False)), path, line))
      if len(fields) != len(header):
        raise damaged(
          path, line, f'{len(fields)} fields instead of {len(header)}'
        )
      line += 1
  except csv.Error as error:
    raise damaged(path, line, f'cannot be parsed ({error})') from error
  return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(
    dict.fromkeys(_NUMBERS, np.int64)
  )


def _row(
  fields: dict[str, str], path: pathlib.Path, line: int
) -> tuple[int | str, ...]:
  """Parse one line, or raise an error for it."""
  row: list[int | str] = []
  for column in _NUMBERS:
    field = fields.get(column, '').strip()
    if not _WHOLE_NUMBER.fullmatch(field):
      raise damaged(
        path,
        line,
        f'{column} should be a whole number from 0 up, found {field[:40]!r}',
      )
    row.append(int(field))
  correct = row[_NUMBERS.index('correct')]
  if correct not in (0, 1):
    raise damaged(path, line, f'correct should be 0 or 1, found {correct}')
  name = fields.get('skill_name', '').strip()
  if not name:
    raise damaged(path, line, 'the skill has no name')
  return (*row, name)


def _refuse_contradictions(table: pd.DataFrame, path: pathlib.Path) -> None:
  """Compare each row with the first one that it must agree with."""
  for keys, column, what in (
    (['user_id'], 'teacher_id', 'a student has one teacher'),
    (['skill'], 'skill_name', 'a skill has one name'),
    (['user_id', 'position'], 'problem_id', 'a position has one problem'),
    (['user_id', 'position'], 'correct', 'a position has one answer'),
  ):
    first = table.groupby(keys)[column].transform('first')
    differs = (table[column] != first).to_numpy()
    if differs.any():
      row = int(differs.argmax())
      whose = ' and '.join(f'{key} {table[key].iloc[row]}' for key in keys)
      raise damaged(
        path,
        row + _FIRST_LINE,
        f'{what}, but {whose} has the {column} {table[column].iloc[row]!s} '
        f'here and {first.iloc[row]!s} before',
      )
  again = table.duplicated(['user_id', 'position', 'skill']).to_numpy()
  if again.any():
    raise damaged(
      path,
      int(again.argmax()) + _FIRST_LINE,
      'the same user_id, position and skill are there a second time',
    )
