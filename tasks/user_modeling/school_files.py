"""Reads the two schools that the authors of HPFL published with their code.

`train/0.json` and `test/0.json` are the same school. A file for training is a
list of answers, one for tests a list of users with their answers. All answers
are to exercises of one knowledge code, so the schools show that a program runs,
and no more.
"""

from collections.abc import Iterator
import json
import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from tasks.errors import DataError
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.user_modeling import data_files
from tasks.user_modeling import parts
from tasks.user_modeling import records

_PLACES = ('hpfl_reference/data', 'hpfl_reference', 'data', '')
_REMEDY = 'Correct it, or fetch the file again.'


class _Answer(NamedTuple):
  """One answer as the files have it."""

  part: int
  school: str
  user: int
  exercise: int
  codes: tuple[int, ...]
  score: int


def load(
  folder: str | os.PathLike[str],
) -> tuple[records.Records, np.ndarray]:
  """Read the schools with the split that was published with them.

  Clients are schools. Their exercises are taken for the same where their
  numbers are, as both schools have 190 of them. A user of each school has no
  record to train on.

  Args:
    folder: Holds the folders `train` and `test`, or `hpfl_reference/data` does.

  Returns:
    The records, and the part of each, int8 `[records]`, a place in
    `parts.PARTS`.

  Raises:
    DataError: If a file is missing, damaged or has no counterpart.
  """
  train = data_files.find(folder, _PLACES, TRAIN)
  schools = sorted(path.stem for path in train.glob('*.json'))
  if not schools:
    raise DataError(
      f'{train}: there is no file *.json. Fetch the folder again, or name '
      'another one with --data_dir.'
    )
  answers: list[_Answer] = []
  for school in schools:
    for part in (TRAIN, TEST):
      path = train.parent / part / f'{school}.json'
      answers.extend(_answers(path, part, school))
  pairs = sorted({(a.exercise, code) for a in answers for code in a.codes})
  exercises, codes = np.array(pairs).T
  built = records.build(
    'schools',
    client=np.array([answer.school for answer in answers]),
    user=np.array([answer.user for answer in answers]),
    item=np.array([answer.exercise for answer in answers]),
    answer=np.array([answer.score for answer in answers]),
    tags=records.Tags(
      exercises, codes, {code: f'code {code}' for _, code in pairs}
    ),
    scale=(0.0, 1.0),
  )
  part_of = np.array([answer.part for answer in answers], np.int8)
  return built, part_of[built.place]


def _answers(path: pathlib.Path, part: str, school: str) -> Iterator[_Answer]:
  """Yield the answers of one file."""
  code = parts.PARTS.index(part)
  for number, entry in enumerate(_entries(path), start=1):
    where = f'{path}, entry {number}'
    user = _number(_field(entry, 'user_id', where), 'user_id', where)
    if part == TRAIN:
      yield _answer(code, school, user, entry, where)
      continue
    logs = _field(entry, 'logs', where)
    if not isinstance(logs, list):
      raise _unexpected(where, 'logs', 'a list', logs)
    for place, log in enumerate(logs, start=1):
      yield _answer(code, school, user, log, f'{where}, log {place}')


def _entries(path: pathlib.Path) -> list[Any]:
  data = data_files.read(path)
  try:
    entries = json.loads(data)
  except json.JSONDecodeError as error:
    raise data_files.damaged(
      path, error.lineno, f'the file is not JSON ({error.msg})'
    ) from error
  except (ValueError, RecursionError) as error:
    raise DataError(f'{path}: is not JSON ({error}). {_REMEDY}') from error
  if not isinstance(entries, list) or not entries:
    raise DataError(f'{path}: should be a list that is not empty. {_REMEDY}')
  return entries


def _answer(
  part: int, school: str, user: int, entry: Any, where: str
) -> _Answer:
  exercise = _number(_field(entry, 'exer_id', where), 'exer_id', where)
  score = _field(entry, 'score', where)
  if isinstance(score, bool) or score not in (0, 1):
    raise _unexpected(where, 'score', '0 or 1', score)
  codes = _field(entry, 'knowledge_code', where)
  if not isinstance(codes, list) or not codes:
    raise _unexpected(where, 'knowledge_code', 'a list of numbers', codes)
  known = tuple(_number(code, 'knowledge_code', where) for code in codes)
  return _Answer(part, school, user, exercise, known, int(score))


def _field(entry: Any, name: str, where: str) -> Any:
  if not isinstance(entry, dict) or name not in entry:
    raise DataError(f'{where}: the field {name!r} is missing. {_REMEDY}')
  return entry[name]


def _number(value: Any, name: str, where: str) -> int:
  if (
    isinstance(value, bool)
    or not isinstance(value, int)
    or not 0 <= value < 2**62
  ):
    raise _unexpected(where, name, 'a whole number from 0 up', value)
  return value


def _unexpected(where: str, name: str, wanted: str, value: Any) -> DataError:
  return DataError(
    f'{where}: {name} should be {wanted}, found {json.dumps(value)[:60]}. '
    f'{_REMEDY}'
  )
