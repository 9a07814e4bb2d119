"""A tracker that `--hook` names is told of a run."""

import sys

import pytest

from tasks.errors import OptionError
from tasks.experiment.runs import hooks
from tests.support import commands
from tests.support.commands import run_here
from tff_partial.training import callbacks

_MODULE = """
told, closed = [], []

class Tracker:
  def __init__(self, config):
    told.append(config)
  def on_metrics(self, round, metrics):
    told.append((round, metrics))
  def close(self):
    closed.append(True)

def half(config):
  return 3

three = 3
"""


@pytest.fixture(name='module')
def fixture_module(tmp_path, monkeypatch):
  """A module of a user, whose folder Python knows."""
  (tmp_path / 'my_hooks.py').write_text(_MODULE)
  (tmp_path / 'needs_more.py').write_text('import a_tracker_nobody_has\n')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, 'my_hooks', raising=False)
  import my_hooks

  yield my_hooks
  del sys.modules['my_hooks']


def test_a_tracker_is_told_of_rounds_and_closed(module):
  with hooks.opened('my_hooks:Tracker', {'rounds': 2}) as tracker:
    callback = hooks.after_round(tracker)
    row = {'loss': 0.5, 'validation_loss': 0.25}
    ends = callback(callbacks.RoundResult(1, row, {}, lambda: None))
    tracker.on_metrics(2, {'test/unseen/loss': 0.125})
    assert not module.closed
  assert not ends  # It ends no run.
  assert module.told == [
    {'rounds': 2},
    (1, {'train/loss': 0.5, 'validation/loss': 0.25}),
    (2, {'test/unseen/loss': 0.125}),
  ]
  assert module.closed == [True]


def test_a_tracker_is_closed_by_an_error_too(module):
  with pytest.raises(KeyError):
    with hooks.opened('my_hooks:Tracker', {}):
      raise KeyError
  assert module.closed == [True]


def test_without_a_tracker_nobody_is_told():
  with hooks.opened(None, {}) as tracker:
    assert tracker is None


@pytest.mark.parametrize(
  ('name', 'said'),
  [
    ('my_hooks', 'found <module .*Name a module and a function'),
    ('none_such:f', "No module named 'none_such'.* PYTHONPATH"),
    ('needs_more:f', "No module named 'a_tracker_nobody_has'.* install"),
    ('my_hooks:none', "has no attribute 'none'.*Name a module"),
    ('my_hooks:three', 'found 3. Name a module and a function'),
    ('my hooks:three', 'invalid format.*Name a module'),
    ('my_hooks:half', 'int without on_metrics'),
  ],
)
def test_what_is_no_tracker_is_refused(module, name, said):
  with pytest.raises(OptionError, match=said) as refused:
    with hooks.opened(name, {}):
      pass
  assert f'--hook={name}' in str(refused.value)


@pytest.mark.slow
def test_a_run_tells_the_tracker(module, tmp_path):
  outcome = run_here(
    *('train', *commands.SMALL, '--rounds=2', '--hook=my_hooks:Tracker'),
    *(f'--output_dir={tmp_path}/out', '--projector=7'),
  )
  assert outcome.status == 0, outcome
  config, *told = module.told
  assert (config['task'], config['rounds']) == ('movielens', 2)
  assert [number for number, _ in told] == [1, 2, 2]
  assert 'validation/rmse' not in told[0][1] and 'train/rmse' in told[0][1]
  assert 'validation/rmse' in told[1][1] and 'test/unseen/rmse' in told[2][1]
  assert module.closed == [True]
  # Each of seven users has a vector of four numbers, rebuilt.
  folder = tmp_path / 'out' / 'tensorboard'
  vectors = (folder / 'user_vectors.tsv').read_text().splitlines()
  assert [len(line.split('\t')) for line in vectors] == [4] * 7
  assert len(set(vectors)) == 7
  assert len((folder / 'users.tsv').read_text().splitlines()) == 7
  config = (folder / 'projector_config.pbtxt').read_text()
  assert 'tensor_path: "user_vectors.tsv"' in config
