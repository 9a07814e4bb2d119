"""The published schools as data of the task assist."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.experiment import from_recipe
from tasks.experiment import run
from tasks.task import Data
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tasks.user_modeling import parts
from tasks.user_modeling import school_files
from tasks.user_modeling.task import AssistOptions

_REAL = pathlib.Path(os.environ.get('TFF_PARTIAL_DATA_DIR') or '/nowhere')
_USERS, _TRAINED, _TESTED = 3, 10, 2


def _answer(exercise: int) -> dict[str, Any]:
  return {'exer_id': exercise, 'knowledge_code': [5], 'score': exercise % 2}


@pytest.fixture(scope='module', name='folder')
def fixture_folder(tmp_path_factory) -> str:
  """Two schools: each user has answered 10 exercises, and 2 for tests."""
  folder = tmp_path_factory.mktemp('data')
  for school in ('0', '1'):
    train = [
      {'user_id': user, **_answer(exercise)}
      for user in range(_USERS)
      for exercise in range(_TRAINED)
    ]
    test = [
      {
        'user_id': user,
        'logs': [_answer(_TRAINED + k) for k in range(_TESTED)],
      }
      for user in range(_USERS)
    ]
    for part, entries in (('train', train), ('test', test)):
      path = folder / 'hpfl_reference' / 'data' / part / f'{school}.json'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(json.dumps(entries))
  return str(folder)


def test_published_tests_are_kept_and_the_others_divided(folder):
  records, published = school_files.load(folder)
  assert len(records) == 2 * _USERS * (_TRAINED + _TESTED)
  codes = parts.divide(records, published=published)
  of_test = parts.PARTS.index(TEST)
  np.testing.assert_array_equal(codes == of_test, published == of_test)
  for client in (0, 1):
    for user in range(_USERS):
      is_own = (records.client == client) & (records.user == user)
      # Of ten that are left one is for validation.
      assert np.bincount(codes[is_own]).tolist() == [9, 1, 2]
  other = parts.divide(records, published=published, repeat=1)
  assert (codes != other).any()
  np.testing.assert_array_equal(other == of_test, published == of_test)


def test_the_task_has_the_schools_for_clients(folder):
  task = AssistOptions(logs='schools').load(Data(data_dir=folder), 0)
  assert task.records.clients == ('0', '1')
  counts = {part: task.counts[part] for part in (TRAIN, VALIDATION, TEST)}
  assert counts == {
    'train': {'records': 54},
    'validation': {'records': 6},
    'test': {'records': 12},
  }
  assert task.kept_tables() == {
    'user/embeddings': (3, 3),
    'item/embeddings': (12, 12),
  }


def test_schools_are_chosen_by_a_flag():
  config = from_recipe('assist_hpfl').with_flags({'assist_logs': 'schools'})
  assert config.task.logs == 'schools'
  assert from_recipe('assist_hpfl').task.logs == 'skill_builder'


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'logs': 'all'}, '--assist_logs=all: choose one of'),
    (
      {'logs': 'schools', 'test_share': 0.3},
      'test_share=0.3: these data come with their own records for tests',
    ),
    (
      {'logs': 'schools', 'validation_share': 0.0},
      'validation: no record is left for it',
    ),
  ],
)
def test_other_choices_are_refused(folder, options, expected):
  with pytest.raises(OptionError) as caught:
    AssistOptions(**options).load(Data(data_dir=folder), 0)
  assert expected in str(caught.value)


def test_missing_schools_are_named(tmp_path):
  with pytest.raises(DataError, match="'train' is missing"):
    AssistOptions(logs='schools').load(Data(data_dir=str(tmp_path)), 0)


@pytest.mark.slow
@pytest.mark.skipif(
  not (_REAL / 'hpfl_reference').is_dir(), reason='needs TFF_PARTIAL_DATA_DIR'
)
def test_hpfl_learns_from_the_published_schools():
  config = from_recipe('assist_hpfl').with_flags(
    {
      'assist_logs': 'schools',
      'clients_per_round': 2,
      'rounds': 1,
      'reconstruction_epochs': 1,
      'jit': 'false',
    }
  )
  report = run(config).report
  assert report['data']['test']['records'] == 515
  # Some of what is published for training chooses the best round.
  train, held_out = (
    report['data'][part]['records'] for part in ('train', 'validation')
  )
  assert train + held_out == 1_829 and 0.08 < held_out / 1_829 < 0.12
  assert np.isfinite(report['test']['seen']['rmse'])
