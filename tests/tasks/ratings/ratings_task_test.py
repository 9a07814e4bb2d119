"""Ratings of one's own: read strictly, divided, trained, recommended."""

from collections.abc import Sequence
import csv
import json
import logging
import pathlib
import types
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tasks import ratings_outputs as outputs
from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.running import run
from tasks.ratings import csv_files
from tasks.ratings import models as ratings_models
from tasks.ratings import options as ratings_options
from tasks.ratings import tables
from tasks.ratings import task as ratings_task
from tasks.task import Data
from tests.support.small_clients import real_examples
from tff_partial.data import splits
from tff_partial.data import vocabularies
from tff_partial.exporting import running as exported_running
from tff_partial.exporting.errors import ExportError

_TEXT = """user,film,stars,date
bob,Heat,4,2001-02-03
ann,Alien,5,2000-01-01
ann,Heat,2,1999-01-01
bob,"Good, Bad",1,1998-01-01
"""


_HEAD = 'user,item,rating'


def _write(folder: pathlib.Path, text: str | bytes = _TEXT) -> pathlib.Path:
  path = folder / 'stars.csv'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return path


def _read(path: pathlib.Path, **options: Any) -> tables.Table:
  return csv_files.read(csv_files.Csv(str(path), **options))


def _names(table: tables.Table) -> tuple[list[str], ...]:
  """Users and items by name, in order."""
  return tuple(
    table.frame[name].cat.categories.tolist() for name in ('user', 'item')
  )


# ---- files -------------------------------------------------------------------


def test_a_file_may_be_below_the_home_folder(tmp_path, monkeypatch):
  _write(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  assert _read(pathlib.Path('~/stars.csv')).name == 'stars.csv'


def test_names_are_kept_and_columns_are_guessed(tmp_path):
  table = _read(_write(tmp_path))
  names = table.columns['user'], table.columns['item']
  assert names == ('user', 'film')
  assert (table.columns['rating'], table.columns['time']) == ('stars', 'date')
  assert table.name == 'stars.csv'
  assert _names(table) == (['ann', 'bob'], ['Alien', 'Good, Bad', 'Heat'])
  frame = table.frame
  assert frame['user'].tolist() == ['bob', 'ann', 'ann', 'bob']
  assert frame['item'].tolist() == ['Heat', 'Alien', 'Heat', 'Good, Bad']
  assert frame['rating'].tolist() == [4.0, 5.0, 2.0, 1.0]
  assert frame['time'].tolist() == [3, 2, 1, 0]


def test_a_file_without_a_known_time_says_what_is_not_read(tmp_path, caplog):
  lines = 'user,item,rating,when\nann,Heat,3,2001\nbob,Heat,4,2002\n'
  assert 'time' not in _read(_write(tmp_path, lines)).columns
  assert 'the order of lines stands for it' in caplog.text
  assert "not read ['when']" in caplog.text


@pytest.mark.parametrize(
  ('text', 'options'),
  [
    ('userId;movieId;Rating\n007;10;3.5\n7;9;1\n', {}),
    ('\ufeffUser_ID\tBOOK\tScore\r\n007\t10\t3.5\r\n\r\n7\t9\t1\r\n', {}),
    ('score|item|user\n3.5|10|007\n1|9|7\n', {}),
    (
      'who what how\n007 10 3.5\n7 9 1\n',
      {'user': 'who', 'item': 'what', 'rating': 'how', 'separator': ' '},
    ),
    ('user, item, rating\n007, 10, 3.5\n7, 9, 1\n', {'separator': ','}),
  ],
)
def test_other_forms_of_the_same_are_read(tmp_path, text, options):
  table = _read(_write(tmp_path, text), **options)
  # Ids are texts: 007 is not 7, and 10 stands before 9.
  assert _names(table) == (['007', '7'], ['10', '9'])
  assert table.frame['rating'].tolist() == [3.5, 1.0]
  assert 'time' not in table.frame


@pytest.mark.parametrize(
  'times',
  [
    (f'{2**53 + 1}', f'{2**53}', '0.5', '5e-1'),
    (f'{2**64 + 1}', f'{2**64}', '7', '7.0'),
    (f'{2**64 - 1}', '9', '-3', '-3'),
  ],
)
def test_long_numbers_are_times_in_their_order(tmp_path, times):
  rows = ''.join(f'a,{k},1,{time}\n' for k, time in enumerate(times))
  table = _read(_write(tmp_path, f'{_HEAD},time\n{rows}'))
  assert table.frame['time'].tolist() == [2, 1, 0, 0]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', 'stars.csv: the file is empty. .* another one with --csv=FILE'),
    (f'{_HEAD}\na,b,1\na,c\n', 'line 3: there is no rating'),
    (f'{_HEAD}\na,b,1\n\na,c,4,5\n', '3 fields in line 4, saw 4'),
    (
      f'{_HEAD}\na,b,good\n',
      "line 2: 'rating' should be a number .*, found 'good'. .* --csv_rating",
    ),
    (
      f'{_HEAD}\na,b,1\n , c ,4\n',
      'line 3: there is no user. .*--csv_missing=drop',
    ),
    (
      f'{_HEAD},time\na,b,1,3\na,c,2,soon\n',
      "line 3: 'time' should be a number or a date .*, found 'soon'",
    ),
    (
      f'{_HEAD},time\na,b,1,22/09/2021\n',
      "line 2: .* found '22/09/2021'.* the year first",
    ),
    (
      f'{_HEAD},time\na,b,1,2001-02-03\na,c,2,now\n',
      "line 3: 'time' should be a number or a date .*, found 'now'",
    ),
    (
      f'{_HEAD},time\na,b,1,.5\na,c,2,5e-1\na,d,2,1e99999999999999999999\n',
      "line 4: 'time' should be a number or a date .*, found '1e9999",
    ),
    (
      f'{_HEAD},time\na,b,1,2001-02-03T04:05+02:00\na,c,2,2001-02-03 04:05\n',
      "line 3: .* found '2001-02-03 04:05'. .*an offset from UTC",
    ),
    (b'user,item,rating\na,b\xff,1\n', 'byte 0xff .*save it as UTF-8'),
    (f'{_HEAD}\na,"b,1\n', 'EOF inside string starting at row 1'),
    ('user\titem, rating\n', 'no columns could be the user'),
    (
      'user,movie,item,rating\n',
      '2 columns could be the item. Name another one with --csv_item=COLUMN; '
      "the columns are 'user', 'movie', 'item', 'rating'",
    ),
  ],
)
def test_damaged_files_are_refused(tmp_path, text, message):
  with pytest.raises(DataError, match=message):
    _read(_write(tmp_path, text))


def test_a_column_that_is_not_there_is_refused(tmp_path):
  said = (
    "no columns have the name 'star'. .* --csv_rating=COLUMN; the columns "
    "are 'user', 'film', 'stars', 'date'. Did you mean 'stars'"
  )
  with pytest.raises(DataError, match=said):
    _read(_write(tmp_path), rating='star')


@pytest.mark.parametrize(
  ('file', 'message'),
  [
    (None, 'no file is named. .*--csv=FILE, or use .* --data=synthetic'),
    ('none.csv', 'none.csv: there is no such file'),
    ('', 'no file is named'),
    ('.', 'it is no file'),
  ],
)
def test_what_is_no_file_is_refused(tmp_path, file, message):
  path = file and str(tmp_path / file)
  with pytest.raises(DataError, match=message):
    ratings_task.RatingsOptions(csv=csv_files.Csv(path)).load(Data(), 0)


def _load(**options: Any) -> ratings_task.RatingsTask:
  options = ratings_task.RatingsOptions(**options)
  return options.load(Data(data='synthetic'), 0)


def _parse(flags: str) -> Config:
  return command_line.parse(flags.split())


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: csv_files.Csv(separator='::'), '--csv_separator=::: give one'),
    (
      lambda: ratings_options.Ends(export_formats=('onnx',)),
      "--export_formats=onnx: 'onnx' is none of saved_model, tflite",
    ),
    (lambda: _load(public_mean=3.0), 'public_mean=3.0: .* --nocentred'),
    (
      lambda: _load(csv=csv_files.Csv('a.csv')),
      '--csv=a.csv: a run with --data=synthetic reads no file',
    ),
    (
      lambda: _load(csv=csv_files.Csv(rating='stars')),
      '--csv_rating=stars: a run with --data=synthetic reads no file',
    ),
    (
      lambda: _load(ends=ratings_options.Ends(top_n_user='user 12')),
      "no user 'user 12' among the 600 .* Did you mean 'user 0",
    ),
    (
      lambda: _parse('--task=ratings --target_epsilon=8 --delta=1e-5'),
      '--centred=True: .*mean of all training ratings',
    ),
  ],
)
def test_impossible_options_are_refused(make, message):
  with pytest.raises(OptionError, match=message):
    make()


# ---- what of them is taken ---------------------------------------------------


def test_lines_that_lack_values_can_be_dropped_and_are_counted(tmp_path):
  text = 'user,item,rating,time\na,b,1,5\n,c,2,5\na,d,,\na,e,3,5\nb,b,3,\n'
  table = _read(_write(tmp_path, text), missing='drop')
  assert table.frame['rating'].tolist() == [1.0, 3.0]
  assert table.left_out == {
    'lines that lack the user': 1,
    'lines that lack the rating': 1,
    'lines that lack the time': 1,
  }


def test_the_last_of_several_ratings_of_an_item_stays(tmp_path):
  text = 'user,item,rating,time\na,b,1,9\na,b,2,5\na,c,3,5\na,b,4,9\n'
  found = tables.choose(_read(_write(tmp_path, text)))
  # Of item b the latest, and of two of that time the later line.
  assert found.frame['rating'].tolist() == [3.0, 4.0]
  assert found.left_out == {'earlier ratings of the same item': 2}
  path = _write(tmp_path, text.replace('time', 'other'))
  without = tables.choose(_read(path))
  assert without.frame['rating'].tolist() == [3.0, 4.0]
  assert not without.has_times


def test_few_ratings_are_left_out_until_none_has_few(tmp_path, caplog):
  # Without dan's single rating item z has one; without z, cid has one.
  lines = 'ann,x,1 ann,y,5 bob,x,2 bob,y,4 cid,x,3 cid,z,3 dan,z,3'.split()
  table = _read(_write(tmp_path, '\n'.join([_HEAD, *lines, ''])))
  with caplog.at_level(logging.WARNING, 'absl'):
    found = tables.choose(table, min_per_user=2, min_per_item=2)
  assert found.user_names == ('ann', 'bob')
  assert found.item_titles == ('x', 'y')
  assert 'stars.csv: left out 2 users with few ratings' in caplog.text
  few = {'users with few ratings': 2, 'items with few ratings': 1}
  assert found.left_out == few
  with pytest.raises(DataError, match='none of 7 ratings is left, since each'):
    tables.choose(table, min_per_user=4)


def test_ratings_that_are_all_alike_are_refused(tmp_path):
  table = _read(_write(tmp_path, 'user,item,rating\na,b,3\na,c,3\n'))
  with pytest.raises(DataError, match='all ratings are 3, so that there is'):
    tables.choose(table)


@pytest.mark.parametrize(
  ('ratings', 'step'),
  [([1, 2, 5], 1.0), ([0.5, 3.0, 3.5], 0.5), (np.linspace(0, 1, 50), None)],
)
def test_steps_of_ratings(ratings, step):
  number = len(ratings)
  frame = pd.DataFrame(
    {
      'user': pd.Categorical(['a'] * number, ['a', 'b']),
      'item': pd.Categorical(map(str, range(number))),
      'rating': np.array(ratings, np.float64),
    }
  )
  table = tables.Table('made', frame, columns={}, left_out={})
  found = tables.choose(table)
  assert found.step == step
  assert found.left_out == {'users with few ratings': 1}


# ---- the task ----------------------------------------------------------------


@pytest.fixture(scope='module', name='task')
def fixture_task() -> ratings_task.RatingsTask:
  return _load(num_factors=3, max_examples=30)


def test_users_are_divided_and_have_their_names(task):
  parts = [
    task.clients(part, task.model_with('own').example_spec)
    for part in ('train', 'validation', 'test')
  ]
  assert [len(part) for part in parts] == [480, 60, 60]
  names = {name for part in parts for name in part.client_ids}
  assert names == set(task.ratings.user_names)
  assert 'user 0042' in names
  assert task.counts['columns']['item'] == 'item'
  assert task.vocabularies['item'].values == task.ratings.item_titles


def test_a_users_ratings_stand_in_the_order_of_time(task):
  clients = task.clients('test', task.model_with('own').example_spec)
  user = clients.client_ids[0]
  mine = task.rated_by(user).set_index('item_id')['timestamp']
  times = mine[real_examples(clients, user)['x']].to_numpy()
  assert 20 <= len(times) <= 30 and (np.diff(times) >= 0).all()
  # All algorithms are measured on the same newer half.
  names = [subset.name for subset in task.tests['unseen'].split]
  assert names == [subset.name for subset in splits.halves()]


def _best(user: str, titles: Sequence[str], scores: Sequence[float]):
  """The rows of a user who has rated the first item."""
  ratings = types.SimpleNamespace(
    num_items=len(titles), item_titles=titles, scale=(1.0, 5.0)
  )
  task = types.SimpleNamespace(
    ratings=ratings, rated_by=lambda user: pd.DataFrame({'item_id': [0]})
  )
  predictor = types.SimpleNamespace(predict=lambda *_: np.array(scores))
  return list(outputs.best(task, predictor, user, 5))


def test_a_title_is_no_formula():
  title = '=HYPERLINK("http://example.org","a film")'
  (row,) = _best('+ann', ('Heat', title), [3.0, 3.0])
  # A spreadsheet shows the texts, and opens no address.
  assert row == ("'+ann", 1, f"'{title}", '3.0000')


def test_items_beyond_the_scale_are_ranked_before_they_are_clipped():
  rows = _best('ann', ('Heat', 'Jaws', 'Alien'), [9.0, 5.1, 5.4])
  assert [(row.item, row.score) for row in rows] == [
    ('Alien', '5.0000'),
    ('Jaws', '5.0000'),
  ]


def test_ratings_on_any_scale_are_learned_alike():
  """What is four stars on one scale is the extent of another."""
  stars = np.array([1.0, 4.0], np.float32)
  predicted = np.array([2.0, 2.0], np.float32)
  expected = tf.keras.losses.MeanSquaredError()(stars, predicted).numpy()
  for lowest, highest in ((0.0, 100.0), (-1.0, 1.0), (1.0, 5.0)):
    unit = ratings_models.unit_of((lowest, highest))
    loss = ratings_models.SquaredStars(unit)
    rated, said = (lowest + unit * (x - 1) for x in (stars, predicted))
    assert float(loss(rated, said)) == pytest.approx(expected, rel=1e-5)
    again = ratings_models.SquaredStars.from_config(loss.get_config())
    assert again.unit == unit


def test_metrics_by_hand():
  # Errors of 0.2, 1 and, when 7 is clipped to 5, 1.
  labels, predicted = [[4.0], [2.0], [4.0]], [[4.2], [3.0], [7.0]]
  found = {}
  for metric in ratings_models.build_metrics((1.0, 5.0), 1.0):
    metric.update_state(labels, predicted, [1.0, 1.0, 2.0])
    found[metric.name] = float(metric.result())
  assert found == {
    'rmse': pytest.approx(np.sqrt((0.04 + 1 + 2) / 4)),
    'mae': pytest.approx((0.2 + 1 + 2) / 4),
    'accuracy': pytest.approx(1 / 4),
  }
  names = [m.name for m in ratings_models.build_metrics(None, None)]
  assert names == ['rmse', 'mae']


def test_other_forms_of_the_model_and_other_users_are_refused(task):
  said = '--user_form=features: the model of the'
  with pytest.raises(OptionError, match=said):
    task.model_with('features')
  with pytest.raises(OptionError, match="Did you mean 'user 0077'"):
    task.rated_by('user 00077')
  with pytest.raises(OptionError, match="called like 'user 0001'"):
    task.rated_by('alice')


# ---- from a file to a phone --------------------------------------------------


def _taste_file(folder: pathlib.Path) -> pathlib.Path:
  """Forty users from 0 to 100, half of whom like the items of even numbers."""
  random = np.random.default_rng(0)
  lines = ['person,song,points']
  for user in range(40):
    for item in random.choice(16, 12, replace=False):
      likes = (user + item) % 2 == 0
      points = random.integers(70, 101) if likes else random.integers(0, 31)
      lines.append(f'person {user},song {item:02d},{points}')
  path = folder / 'songs.csv'
  path.write_text('\n'.join(lines) + '\n')
  return path


def _config(path: pathlib.Path, *arguments: str) -> Config:
  flags = """--recipe=ratings_fed_recon --csv_user=person --csv_item=song
    --csv_rating=points --clients_per_round=8 --num_factors=2 --rounds=20
    --evaluate_every=20 --jit=false"""
  return command_line.parse([*flags.split(), f'--csv={path}', *arguments])


@pytest.mark.slow
def test_a_file_becomes_a_top_10_and_an_export(tmp_path, capsys):
  path = _taste_file(tmp_path)
  output = Output(str(tmp_path / 'out'), tensorboard=False)
  config = _config(path, '--top_n=3')
  result = run(config, output)
  measured = result.report['test']['unseen']
  # Who always predicts the mean is off by 37.
  assert measured['rmse'] < 20
  assert 'accuracy' not in measured  # These are no few steps.
  outputs.write(config, output)
  assert 'The 3 best items for 40 users' in capsys.readouterr().out
  with (tmp_path / 'out' / 'top_n.csv').open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert list(rows[0]) == ['user', 'rank', 'item', 'score']
  assert len(rows) == 40 * 3
  task = config.task.load(config.data, config.seed)
  good = 0
  for row in rows:
    rated = task.rated_by(row['user'])['item_id']
    assert row['item'] not in {task.ratings.item_titles[i] for i in rated}
    assert 0.0 <= float(row['score']) <= 100.0
    is_liked = (int(row['user'][7:]) + int(row['item'][5:])) % 2 == 0
    good += row['rank'] == '1' and is_liked
  # Of four items that a user has not rated, the best is one it likes, if any.
  assert good >= 34

  folder = tmp_path / 'out' / 'export'
  songs = vocabularies.load(folder)['song']
  assert songs.values == task.ratings.item_titles
  device = exported_running.load(folder / 'model.tflite')
  first = [row for row in rows if row['user'] == 'person 5']
  mine = task.rated_by('person 5')
  room = json.loads((folder / 'signatures.json').read_text())['num_support']
  own = device['reconstruct'](
    x=exported_running.padded(mine['item_id'].to_numpy(), room),
    y=exported_running.padded(mine['rating'].to_numpy(), room),
    count=np.int32(len(mine)),
  )
  scores = device['predict'](
    x=songs.encode([row['item'] for row in first]).astype(np.int32), **own
  )['predictions']
  # Other first values of the user's vector end nearby.
  for row, score in zip(first, scores, strict=True):
    assert np.clip(score, 0, 100) == pytest.approx(float(row['score']), abs=5)

  # The same command again, for one user and without an export.
  again = _config(path, '--set=top_n_user=person 5', '--export_formats=')
  assert run(again, output).trained is None
  outputs.write(again, output)
  with (tmp_path / 'out' / 'top_n.csv').open(newline='') as file:
    (*alone,) = csv.DictReader(file)
  # Four items are left; the first three are those of before.
  assert alone[:3] == first and len(alone) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
  ('algorithm', 'said'),
  [
    ('fed_avg', 'No top_n.csv is written. --algorithm=fed_avg'),
    ('centralized', 'No top_n.csv is written. --algorithm=centralized'),
    ('furl', 'The 10 best items for 40 users'),
  ],
)
def test_other_algorithms_learn_it(tmp_path, capsys, algorithm, said):
  config = _config(
    *(_taste_file(tmp_path), f'--algorithm={algorithm}', '--rounds=2'),
    *('--reconstruction_epochs=1', '--evaluate_every=2', '--export_formats='),
  )
  output = Output(str(tmp_path / 'out'), tensorboard=False)
  report = run(config, output).report
  assert np.isfinite(report['test']['unseen']['mae'])
  outputs.write(config, output)
  assert said in capsys.readouterr().out


def test_an_output_without_room_fails(tmp_path, monkeypatch):
  def full(*_):
    raise ExportError('Nothing was exported.') from OSError(28, 'No space left')

  monkeypatch.setattr(outputs, 'Trainable', mock.Mock())
  monkeypatch.setattr(outputs, '_write_export', full)
  config = _config(_taste_file(tmp_path), '--set=top_n_csv=false')
  with pytest.raises(ExportError):
    outputs.write(config, Output(str(tmp_path)))
