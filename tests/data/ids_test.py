"""Ids that people have: names, missing values, and items of later days."""

import json
import logging
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tff_partial.data import data_frames
from tff_partial.data import examples
from tff_partial.data import frames
from tff_partial.data import populations
from tff_partial.data import vocabularies
from tff_partial.data.vocabularies import Vocabulary
from tff_partial.training import top_candidates
from tff_partial.training.errors import ProgramError

layers = tf.keras.layers

_SPEC = examples.ExampleSpec(
  {
    'x': tf.TensorSpec([], tf.int32),
    'y': tf.TensorSpec([], tf.float32),
    'weight': examples.WEIGHT_SPEC,
  }
)


def _frame() -> pd.DataFrame:
  """Nine rows: five lack something, and bob has no other row."""
  return pd.DataFrame(
    {
      'user': ['ann', 'bob', 'cid', None, 'ann', 'cid', 'ann', 'cid', 'ann'],
      'film': ['a', 'b', 'c', 'a', None, 'b', 'b', 'a', 'c'],
      'stars': [1.0, np.nan, 3.0, 4.0, np.nan, 5.0, 2.0, 4.0, 3.0],
      'day': pd.to_datetime([None, *['2001-02-03'] * 6, *['2000-01-01'] * 2]),
    }
  )


def _clients(frame: pd.DataFrame, **options: Any) -> populations.Population:
  return frames.from_pandas(
    frame,
    _SPEC,
    **{
      'client_id': 'user',
      'inputs': 'film',
      'labels': 'stars',
      'time': 'day',
      'encode': 'film',
      **options,
    },
  )


# ---- missing values ----------------------------------------------------------


def test_rows_that_lack_values_are_dropped_and_counted(caplog):
  with caplog.at_level(logging.WARNING, 'absl'):
    clients = _clients(_frame(), missing='drop')
  # Of ann stay the rows 8 and 6, of cid 7, 2 and 5, by time.
  assert clients.client_ids == ('ann', 'cid')
  cohort = clients.cohort(['ann', 'cid'], np.zeros([2, 2], np.int32))
  labels = [c['examples']['y'][: int(c['count'])].tolist() for c in cohort]
  assert labels == [[3.0, 2.0], [4.0, 3.0, 5.0]]
  assert clients.dropped == data_frames.Dropped(
    # Row 4 lacks two values.
    num_rows=4,
    lacking={'user': 1, 'film': 1, 'stars': 2, 'day': 1},
    num_clients=1,
  )
  said = (
    "Dropped 4 rows that lack values: 1 no 'user', 1 no 'film', 2 no 'stars', "
    "1 no 'day'; 1 clients had no others"
  )
  assert said in caplog.text
  assert said in repr(clients)


def test_a_column_of_numbers_that_lacked_some_has_the_same_clients():
  """Or what those who took part remember would not be found."""
  frame = _frame().drop(columns=['stars', 'day']).assign(y=0.0)
  frame['user'] = [1, 2, 3, None, 1, 3, 1, 3, 1]
  options = {'labels': 'y', 'time': None}
  clients = _clients(frame, missing='drop', **options)
  whole = frame.dropna().astype({'user': int})
  assert clients.client_ids == ('1', '2', '3')
  assert _clients(whole, **options).client_ids == clients.client_ids


def test_labels_that_lacked_some_are_whole_numbers_again():
  frame = pd.DataFrame({'user': ['a'] * 4, 'x': range(4), 'y': [1, None, 0, 2]})
  spec = {'x': tf.TensorSpec([], tf.int32), 'y': tf.TensorSpec([], tf.int32)}
  read = {'client_id': 'user', 'inputs': 'x', 'labels': 'y', 'missing': 'drop'}
  clients = frames.from_pandas(frame, spec, **read)
  (value,) = clients.cohort(['a'], np.zeros([1, 2], np.int32))
  np.testing.assert_array_equal(value['examples']['y'], [1, 0, 2])
  with pytest.raises(examples.ClientDataError, match=r"`.astype\('int32'\)`"):
    frames.from_pandas(frame.replace(2, 1.5), spec, **read)


def test_columns_that_are_not_read_may_lack_values():
  frame = _frame().drop(columns=['day']).dropna()
  clients = _clients(frame.assign(note=None), time=None)
  assert clients.num_examples == 6
  assert clients.dropped == data_frames.Dropped()
  assert 'Dropped' not in repr(clients)


@pytest.mark.parametrize(
  ('column', 'value'), [('stars', pd.NA), ('film', None), ('day', pd.NaT)]
)
def test_rows_that_lack_values_are_refused_by_default(column, value):
  frame = _frame().dropna().astype({'stars': 'Float64'})
  frame.loc[5, column] = value
  with pytest.raises(
    examples.ClientDataError,
    match=f"Column '{column}' lacks 1 of 5 values, the first in row 5. Drop "
    "these rows, `missing='drop'`, or fill them",
  ):
    _clients(frame)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'missing': 'ignore'}, "missing='ignore': choose 'refuse', which names"),
    (
      {'missing': 'drop', 'labels': 'nothing'},
      'Each of the 9 rows lacks a value in one of the columns',
    ),
  ],
)
def test_impossible_ways_are_refused(options, message):
  with pytest.raises(examples.ClientDataError, match=message):
    _clients(_frame().assign(nothing=np.nan), **options)


@pytest.mark.parametrize(
  ('films', 'known', 'message'),
  [
    ([1, 'a'], None, r"'film': .* one type, found \['int', 'str'\]"),
    ([[1], [2]], None, "'film': .* texts or numbers .*'list'"),
    ([[1], [2]], Vocabulary([1, 2]), "'film': .* texts or numbers .*'list'"),
  ],
)
def test_a_column_that_cannot_be_encoded_is_named(films, known, message):
  frame = pd.DataFrame({'user': ['ann', 'bob'], 'film': films, 'stars': 1.0})
  encode = ['film'] if known is None else {'film': known}
  with pytest.raises(examples.ClientDataError, match=f'Column {message}'):
    frames.from_pandas(
      frame,
      _SPEC,
      client_id='user',
      inputs='film',
      labels='stars',
      encode=encode,
    )


# ---- items that were not there in training -----------------------------------


def _score_of_ids(number: int) -> tf.keras.Model:
  """Predicts for each id the id itself, so that id 0 is the worst."""
  item = tf.keras.Input([], dtype=tf.int32)
  table = layers.Embedding(number, 1, name='table')
  model = tf.keras.Model(item, table(item))
  table.set_weights([np.arange(number, dtype=np.float32)[:, np.newaxis]])
  return model


def test_unseen_items_share_a_place_that_is_never_recommended():
  films = Vocabulary(_frame()['film'].dropna(), unseen=True)
  later = _frame().dropna().replace({'film': {'c': 'Brazil'}})
  clients = _clients(later, encode={'film': films})
  (cid,) = clients.cohort(['cid'], np.zeros([1, 2], np.int32))
  # Brazil has no id of its own: 0. The films a, b and c have 1, 2 and 3.
  assert cid['examples']['x'][:3].tolist() == [1, 0, 2]
  model = _score_of_ids(len(films))
  model.get_layer('table').set_weights(
    [np.array([[9.0], [1.0], [2.0], [3.0]], np.float32)]
  )
  best = top_candidates.top_n(model, films, 3, exclude=['Brazil'])
  assert [choice.candidate for choice in best] == ['c', 'b', 'a']
  with pytest.raises(ProgramError, match='4 of the 3'):
    top_candidates.top_n(model, films, 4)


# ---- files -------------------------------------------------------------------


@pytest.mark.parametrize('unseen', [False, True])
@pytest.mark.parametrize(
  'values',
  [
    ['b', 'a', 'Ünï \u2028', '\ud800', ''],
    [10, -3, 2**70],
    np.array([7, 3], np.int64),
    np.array([0.5, 0.1], np.float32),
    pd.Series(['x', 'y'], dtype='category'),
    [True, False],
  ],
)
def test_a_vocabulary_is_read_back_with_its_types(tmp_path, values, unseen):
  before = Vocabulary(values, unseen=unseen)
  vocabularies.save({'item': before}, tmp_path)
  after = vocabularies.load(tmp_path)['item']
  assert after == before
  assert after.encode(values).tolist() == before.encode(values).tolist()
  kinds = {type(value) for value in after.values}
  assert kinds <= {str, int, float, bool}


def test_a_file_says_which_id_is_whose(tmp_path):
  written = vocabularies.save(
    {'film': Vocabulary('ba', unseen=True), 'shop': Vocabulary([4, 2])},
    tmp_path,
  )
  assert written == tmp_path / 'vocabularies.json'
  assert json.loads(written.read_text()) == {
    'film': {'values': ['a', 'b'], 'unseen': 0},
    'shop': {'values': [2, 4], 'unseen': None},
  }
  for place in (tmp_path, written):
    assert vocabularies.load(place)['shop'].decode([1]) == [4]


@pytest.mark.parametrize(
  'described',
  [
    {'values': ['b', 'a'], 'unseen': None},
    {'values': ['a', 'a'], 'unseen': None},
    {'values': [], 'unseen': 0},
    {'values': ['a'], 'unseen': 1},
    {'values': 'ab', 'unseen': 0},
    None,
  ],
)
def test_damaged_files_are_refused(tmp_path, described):
  (tmp_path / 'vocabularies.json').write_text(json.dumps({'film': described}))
  with pytest.raises(
    vocabularies.VocabularyError,
    match="vocabularies.json: column 'film': This describes no vocabulary",
  ):
    vocabularies.load(tmp_path)


def test_a_run_goes_on_with_the_vocabularies_it_began_with(tmp_path):
  films = {'film': Vocabulary('ab')}
  vocabularies.keep(films, tmp_path / 'run', goes_on=False)
  vocabularies.keep(films, tmp_path / 'run', goes_on=True)
  assert vocabularies.kept_in(tmp_path / 'run') == films
  with pytest.raises(
    vocabularies.VocabularyError, match='the run in this folder has other'
  ):
    vocabularies.keep(
      {'film': Vocabulary('xy')}, tmp_path / 'run', goes_on=True
    )
  numbered = {1: Vocabulary('ab')}  # As a column without a name has a number.
  for goes_on in (False, True):
    vocabularies.keep(numbered, tmp_path / 'numbers', goes_on=goes_on)
  # A new run is free, and one without vocabularies leaves no file.
  vocabularies.keep({'film': Vocabulary('xy')}, tmp_path / 'run', goes_on=False)
  vocabularies.keep({}, tmp_path / 'none', goes_on=False)
  assert not (tmp_path / 'none').exists()
  assert vocabularies.kept_in(tmp_path / 'none') == {}
