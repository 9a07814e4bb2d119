"""Logs of ASSISTments 2009-2010, joined with each student's teacher.

The file is a table with a header. A row is one skill of one attempt: an attempt
at a problem of three skills is three consecutive rows that differ only in the
skill. `load` joins them into one record with three attributes; only then does a
record have 1.20 attributes on average, as in the paper's Table 1.
"""

import os
import pathlib

from absl import logging
import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.files import tables
from tasks.user_modeling import records

FILE = 'assist2009_with_teacher.csv'
_REMEDY = 'Correct the line, or fetch the file again.'
_REMEDY_NO_DATA = (
  'Put it there, name another folder with --data_dir or $TFF_PARTIAL_DATA_DIR, '
  'or use invented data with --data=synthetic, which needs no files.'
)

# To what a value looks like, and how that is called.
_COLUMNS = {
  **dict.fromkeys(
    ('user_id', 'position', 'problem_id', 'skill', 'teacher_id'),
    (tables.WHOLE, 'a whole number from 0 up'),
  ),
  'correct': ('[01]', '0 or 1'),
  'skill_name': ('.+', 'a name in one line'),
}


def load(
  folder: str | os.PathLike[str],
  *,
  min_users: int = 5,
  min_records_per_user: float = 5.0,
) -> records.Records:
  """Read ASSISTments: clients are teachers, answers are 0 or 1.

  Args:
    folder: Holds `FILE`, or a folder `assistments` that does.
    min_users: Teachers with fewer students are left out (HPFL, section 5.1).
    min_records_per_user: Teachers whose students have fewer records on average
      are left out, too.

  Raises:
    DataError: If the file is missing or damaged, or nothing is left of it.
  """
  table = read(_find(folder))
  attempts = _join_skills(table)
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
  logs = tables.read(path, remedy=_REMEDY, must_end=True)
  _check_header(logs)
  if logs.texts.empty:
    raise logs.refusal(2, 'the table has no rows')
  table = pd.DataFrame(
    {
      column: logs.values(column, pattern, expected)
      for column, (pattern, expected) in _COLUMNS.items()
    }
  ).astype({name: np.int64 for name in _COLUMNS if name != 'skill_name'})
  _refuse_contradictions(logs, table)
  table = table.sort_values(['user_id', 'position'], kind='stable')
  return table.reset_index(drop=True)


def _find(folder: str | os.PathLike[str]) -> pathlib.Path:
  if not os.fspath(folder):
    raise DataError(f'{FILE}: no data folder is named. {_REMEDY_NO_DATA}')
  root = pathlib.Path(os.path.expanduser(folder))
  for path in (root / 'assistments' / FILE, root / FILE):
    if os.path.isfile(path):
      return path
  raise DataError(
    f'{root}: there is no file {FILE} in the folder or in its sub-folder '
    f"'assistments'. {_REMEDY_NO_DATA}"
  )


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


def _check_header(logs: tables.TextTable) -> None:
  """Check that each column is there exactly once."""
  header = logs.texts.columns.tolist()
  for column in _COLUMNS:
    times = header.count(column)
    if times != 1:
      found = 'is missing' if not times else f'is there {times} times'
      raise logs.refusal(
        1,
        f'the column {column!r} {found}; the header is '
        f'{",".join(header)[:120]!r}, and needed are {", ".join(_COLUMNS)}',
      )


def _refuse_contradictions(logs: tables.TextTable, table: pd.DataFrame) -> None:
  """Compare each row with the first one that it must agree with."""
  for keys, column, what in (
    (['user_id'], 'teacher_id', 'a student has one teacher'),
    (['skill'], 'skill_name', 'a skill has one name'),
    (['user_id', 'position'], 'problem_id', 'a position has one problem'),
    (['user_id', 'position'], 'correct', 'a position has one answer'),
  ):
    first = table.groupby(keys)[column].transform('first')
    differs = table[column] != first
    if differs.any():
      line = differs.idxmax()
      whose = ' and '.join(f'{key} {table[key][line]}' for key in keys)
      raise logs.refusal(
        line,
        f'{what}, but {whose} has the {column} {table[column][line]!s} here '
        f'and {first[line]!s} before',
      )
  again = table.duplicated(['user_id', 'position', 'skill'])
  if again.any():
    raise logs.refusal(
      again.idxmax(),
      'the same user_id, position and skill are there a second time',
    )
