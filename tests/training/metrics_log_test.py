"""Laws of a run's records: the table, TensorBoard events, the progress bar."""

import collections
import csv
import errno
import math
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import errors
from tff_partial.training import metrics_log
from tff_partial.training.errors import RunError


@pytest.fixture(name='opened')
def fixture_opened(tmp_path):
  """Opens the records of the run in `tmp_path`, as a checkpoint has them."""

  def open_records(saved=None, tensorboard=False):
    return metrics_log.Records(tmp_path, saved=saved, tensorboard=tensorboard)

  return open_records


def _table(folder: pathlib.Path) -> list[dict[str, str]]:
  with (folder / 'metrics.csv').open(newline='') as file:
    return list(csv.DictReader(file))


def _release(to: metrics_log.Records, *rounds: int) -> list[str]:
  """Adds rows; returns what a checkpoint would hold before and after each."""
  texts = [to.text]
  for number in rounds:
    to.release({'loss': number / 3, 'validation_loss': ''}, number)
    texts.append(to.text)
  return texts


# ---- flat metrics ------------------------------------------------------------


def test_nested_metrics_become_one_level():
  flat = metrics_log.flatten(
    collections.OrderedDict(
      outer=collections.OrderedDict(
        b=np.float32(0.5), a=tf.constant(3), list=[1.0, 2.0], text='no'
      ),
      plain=1,
      vector=np.zeros(3),
      inside=collections.OrderedDict(deeper={'still': True}),
    )
  )
  assert flat == {
    'outer/b': 0.5,
    'outer/a': 3,
    'plain': 1,
    'inside/deeper/still': True,
  }
  assert list(flat) == ['outer/b', 'outer/a', 'plain', 'inside/deeper/still']
  assert type(flat['outer/a']) is int


# ---- the table ---------------------------------------------------------------


def test_a_row_a_round_and_the_round_comes_first(opened, tmp_path):
  table = opened()
  row = {'z': 0.1 + 0.2, 'a/b': 7, 'nothing': '', 'bad': float('nan')}
  for number in (1, 2, 3):
    table.release(row, number)
  rows = _table(tmp_path)
  assert [row['round'] for row in rows] == ['1', '2', '3']
  assert list(rows[0]) == ['round', 'a/b', 'bad', 'nothing', 'z']
  assert float(rows[0]['z']) == 0.1 + 0.2
  assert rows[0]['a/b'] == '7'
  assert rows[0]['nothing'] == ''
  assert math.isnan(float(rows[0]['bad']))


@pytest.mark.parametrize('last_round', [0, 1, 3, 5])
def test_rounds_after_the_checkpoint_are_written_again(
  opened, tmp_path, last_round
):
  texts = _release(opened(), 1, 2, 3, 4, 5)
  before = (tmp_path / 'metrics.csv').read_bytes()
  again = opened(texts[last_round])
  assert len(_table(tmp_path)) == last_round
  _release(again, *range(last_round + 1, 6))
  assert (tmp_path / 'metrics.csv').read_bytes() == before


@pytest.mark.parametrize('left', ['', 'round', 'round\r\n', 'round,lo'])
def test_a_table_without_a_row_starts_again(opened, tmp_path, left):
  path = tmp_path / 'metrics.csv'
  path.write_text(left)
  _release(opened(), 1, 2)
  assert [row['round'] for row in _table(tmp_path)] == ['1', '2']


def test_what_a_kill_left_beside_the_table_is_removed(opened, tmp_path):
  (tmp_path / '.metrics.csv.tmp').mkdir()
  (tmp_path / '.metrics.csv.tmp' / 'metrics.csv').write_text('round,lo')
  (tmp_path / 'mine.csv').write_text('mine')
  _release(opened(), 1)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
    'metrics.csv',
    'mine.csv',
  ]


@pytest.mark.parametrize(
  'change',
  [
    lambda text: '',
    lambda text: ''.join(text.splitlines(keepends=True)[:2]),
    lambda text: text.replace('0.6666666666666666', '0.6'),
    lambda text: text.replace('\r\n2,', '\r\n2,x,y,'),
    lambda text: f'{text}5,many,cells,too many\nthree\n',
  ],
)
def test_a_table_that_was_changed_is_written_again(opened, tmp_path, change):
  path = tmp_path / 'metrics.csv'
  texts = _release(opened(), 1, 2, 3, 4)
  before = path.read_bytes()
  path.write_bytes(change(before.decode()).encode())
  _release(opened(texts[3]), 4)
  assert path.read_bytes() == before


@pytest.mark.parametrize(
  'text',
  ['name,value\na,1\n', '\x00\x01\x02\n\xff', '{"round": 1}\n', '\n\nround\n'],
)
def test_another_file_is_not_overwritten(opened, tmp_path, text):
  path = tmp_path / 'metrics.csv'
  path.write_text(text)
  before = path.read_bytes()
  with pytest.raises(RunError, match='line 1') as caught:
    opened()
  assert str(path) in str(caught.value)
  assert isinstance(caught.value, errors.UserError)
  assert path.read_bytes() == before


def test_a_table_that_cannot_be_written_is_named(opened, tmp_path):
  (tmp_path / 'metrics.csv').mkdir()
  with pytest.raises(RunError, match='Is a directory') as caught:
    opened()
  assert str(caught.value).endswith('Choose another folder.')
  assert str(tmp_path / 'metrics.csv') in str(caught.value)


def test_new_columns_come_behind_the_others(opened, tmp_path):
  table = opened(_release(opened(), 1, 2)[-1])
  table.release({'loss': 1.0, 'b': 2, 'a': 3}, 3)
  table.release({'loss': 1.0, 'validation_loss': 0.5}, 4)
  rows = _table(tmp_path)
  assert list(rows[0]) == ['round', 'loss', 'validation_loss', 'a', 'b']
  assert [row['a'] for row in rows] == ['', '', '3', '']
  assert [row['validation_loss'] for row in rows] == ['', '', '', '0.5']
  assert [row['round'] for row in rows] == list('1234')


@pytest.mark.slow
def test_a_kill_loses_no_row(tmp_path):
  code = f"""
import os, signal
from tff_partial.training import metrics_log
table = metrics_log.Records({str(tmp_path)!r}, saved=None, tensorboard=True)
for number in (1, 2, 3):
  table.release({{'loss': number / 3}}, number)
os.kill(os.getpid(), signal.SIGKILL)
"""
  status = subprocess.run([sys.executable, '-c', code], check=False).returncode
  assert status == -signal.SIGKILL
  assert [row['round'] for row in _table(tmp_path)] == list('123')
  assert set(_events(tmp_path)['train/loss']) == {1, 2, 3}


@pytest.mark.parametrize(
  ('number', 'said'),
  [(errno.ENOSPC, 'No space left'), (errno.EROFS, 'Read-only file system')],
)
def test_a_full_disk_is_said(opened, tmp_path, monkeypatch, number, said):
  table = opened()
  _release(table, 1)

  def fail(*arguments, **options):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(pathlib.Path, 'open', fail)
  with pytest.raises(RunError, match=said) as caught:
    _release(table, 2)
  message = str(caught.value)
  assert ('make room' in message.lower()) == (number == errno.ENOSPC)
  for part in ('Round 2', str(tmp_path), 'same command again'):
    assert part in message


# ---- TensorBoard -------------------------------------------------------------


def _events(folder: pathlib.Path) -> dict[str, dict[int, float]]:
  found = collections.defaultdict(dict)
  for path in sorted((folder / 'tensorboard').iterdir()):
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      for value in event.summary.value:
        found[value.tag][event.step] = float(tf.make_ndarray(value.tensor))
  return dict(found)


def test_tensorboard_has_what_the_table_has(opened, tmp_path):
  table = opened(tensorboard=True)
  _release(table, 1, 2)
  table.release({'loss': 1.0, 'validation_loss': 0.25}, 3)
  events = _events(tmp_path)
  assert events['train/loss'] == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1.0})
  assert events['validation/loss'] == {3: 0.25}


def test_numbers_are_named_by_what_the_run_was_doing():
  row = {'loss': 1.0, 'validation_loss': 2.0, 'validation_rmse': ''}
  row |= {'seconds_round': 0.5, 'privacy/epsilon': 3.0}
  assert metrics_log.by_phase(row) == {
    'train/loss': 1.0,
    'validation/loss': 2.0,
    'seconds/round': 0.5,
    'privacy/epsilon': 3.0,
  }


def test_tensorboard_shows_how_clients_differ(opened, tmp_path):
  table = opened(tensorboard=True)
  values = {'rmse': {'a': 0.5, 'b': 1.5, 'c': np.nan}, 'f1': {'a': np.inf}}
  table.histograms('validation', values, 4)
  table.release({'loss': 1.0}, 4)
  (path,) = (tmp_path / 'tensorboard').iterdir()
  shown = {}
  for event in tf.compat.v1.train.summary_iterator(str(path)):
    for value in event.summary.value:
      if value.tag.startswith('validation_clients'):
        shown[value.tag] = event.step, tf.make_ndarray(value.tensor)
  # Buckets with their ends and counts; what is not finite is in none.
  ((tag, (step, buckets)),) = shown.items()
  assert (tag, step) == ('validation_clients/rmse', 4)
  assert buckets[0, 0] == 0.5 and buckets[-1, 1] == 1.5
  assert buckets[:, 2].sum() == 2.0
  opened().histograms('validation', values, 5)  # Nothing is written.


def test_what_comes_after_the_last_round_is_added(opened, tmp_path):
  _release(opened(tensorboard=True), 1)
  metrics_log.add_curves(tmp_path, {'test/unseen/rmse': 0.5}, 1)
  assert _events(tmp_path)['test/unseen/rmse'] == {1: 0.5}


# ---- the bar -----------------------------------------------------------------


def test_the_bar_shows_metrics_and_time_on_the_error_output(capsys):
  bar = metrics_log.Bar(10, 4, True)
  bar.step({'loss': 1.23456, 'validation_rmse': float('nan')})
  bar.close()
  shown = capsys.readouterr()
  assert shown.out == ''
  assert 'loss=1.2346' in shown.err
  assert 'validation_rmse=nan' in shown.err
  assert '5/10' in shown.err
