"""What the binaries do, as their user sees it."""

import contextlib
import json
import pathlib
import shutil
import signal
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tasks.experiment import from_recipe
from tests.support import commands
from tests.support.commands import repeatable_rows
from tests.support.commands import result as read
from tests.support.commands import run_here
from tests.support.commands import run_well

_RECIPES = sorted((commands.ROOT / 'tasks' / 'recipes').glob('*.flags'))

# Runs a binary in which something happens to a function. Given after the code:
# the module's name and its flags.
_MEDDLE = """
import os, runpy, signal, sys
import psutil, tensorflow as tf
from tff_partial.training import metrics_log

def die():
  os.kill(os.getpid(), signal.SIGKILL)

{meddle}
module = sys.argv.pop(1)
sys.argv[0] = module
runpy.run_module(module, run_name='__main__', alter_sys=True)
"""

_DIE_WHILE_SAVING = """
save, saves = tf.saved_model.save, []
def meddle(module, path, **options):
  save(module, path, **options)
  saves.append(path)
  if len(saves) == {number}:
    data = os.path.join(path, 'variables', 'variables.data-00000-of-00001')
    os.truncate(data, os.path.getsize(data) // 2)
    die()
tf.saved_model.save = meddle
"""

_DIE_IN_A_ROUND = """
release = metrics_log.Records.release
def meddle(self, row, number):
  if number == {number}:
    with open(self._folder / 'metrics.csv', 'a') as table:
      table.write('{number},0.12')
    die()
  release(self, row, number)
metrics_log.Records.release = meddle
"""

_SAY_MEMORY = """
release = metrics_log.Records.release
def meddle(self, row, number):
  release(self, row, number)
  if number % 5 == 0:
    us = psutil.Process()
    tree = [us, *us.children(recursive=True)]
    print('memory', number, sum(p.memory_info().rss for p in tree))
metrics_log.Records.release = meddle
"""


def _meddled(meddle: str, name: str, *arguments: str) -> list[str]:
  code = _MEDDLE.format(meddle=meddle)
  return [sys.executable, '-c', code, f'tasks.{name}', *arguments]


def _repeatable(folder: pathlib.Path) -> dict[str, Any]:
  """The result of a run without what is never the same."""
  result = read(folder)
  del result['seconds'], result['peak_rss_mb']
  return result


@pytest.fixture(scope='module', name='trained')
def fixture_trained():
  return commands.trained()


# ---- what a run leaves -------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_a_result(trained):
  result = read(trained.folder)
  run = {'task': 'movielens', 'algorithm': 'fed_recon', 'seed': 0, 'rounds': 6}
  asked = {'clients_per_round': 5, 'clients_asked': 5}
  how = {**asked, 'runtime': 'cohort', 'jit': 'false'}
  expected = {**run, **how, 'diverged': False, 'privacy': None}
  assert result.items() >= expected.items()
  assert result['data']['ratings'] == 35_640
  clients = {'train': 480, 'validation': 60, 'test': 60}
  assert result['data']['clients'] == clients
  assert result['validation']['best_round'] == 6
  for measured in (result['validation'], result['test']['unseen']):
    assert measured['num_clients'] == 60
    assert 0 < measured['rmse'] < 5
    assert 0 <= measured['accuracy'] <= 1
    for metric in ('rmse', 'accuracy'):
      said = set(measured['per_client'][metric])
      assert said == {'mean', 'std', 'p10', 'p50', 'p90'}
  assert set(result['test']) == {'unseen'}
  # Two hundred items with four factors, of four bytes each.
  counted = result['communication']
  assert counted.pop('upload_bytes_by_rows') < 3200
  download = {'download_parameters': 800, 'download_bytes': 3200}
  upload = {'upload_parameters': 800, 'upload_bytes': 3200}
  assert counted == {**download, **upload}
  assert set(result['seconds']) >= {'total', 'per_round_median', 'first_round'}
  assert all(seconds > 0 for seconds in result['seconds'].values())
  assert result['peak_rss_mb'] > 100


def test_a_run_leaves_records(trained):
  names = {path.name for path in trained.folder.iterdir()}
  files = {'flags.txt', 'metrics.csv', 'result.json'}
  assert names == {'checkpoints', 'tensorboard', *files}
  header = (trained.folder / 'metrics.csv').read_text().splitlines()[0]
  columns = header.split(',')
  assert columns[0] == 'round'
  assert {'loss', 'rmse', 'accuracy', 'seconds_round'} < set(columns)
  rows = repeatable_rows(trained.folder)
  assert [row['round'] for row in rows] == list('123456')
  result = read(trained.folder)
  assert float(rows[-1]['validation_rmse']) == result['validation']['rmse']
  tags, steps = set(), set()
  for path in (trained.folder / 'tensorboard').iterdir():
    for event in tf.compat.v1.train.summary_iterator(str(path)):
      tags |= {value.tag for value in event.summary.value}
      steps.add(event.step)
  assert tags >= {
    'train/rmse',
    'validation/rmse',
    'validation_clients/rmse',
    'test/unseen/rmse',
  }
  assert steps >= set(range(1, 7))


def test_a_run_prints_a_small_table(trained):
  assert trained.outcome.errors == ''
  first, *lines = trained.outcome.output.splitlines()
  assert first == (
    'movielens by fed_recon, invented data: 6 rounds of 5 clients, measured '
    f'every 2; into {trained.folder}, a new run.'
  )
  assert lines[0].split() == ['loss', 'rmse', 'accuracy']
  measured = [line.split(',')[0] for line in lines[1:4]]
  assert measured == ['validation', 'test (unseen)', 'test (unseen)']
  assert lines[-1] == f'Written to {trained.folder}.'


def test_a_run_that_is_done_is_shown_again(trained):
  before = commands.files(trained.folder)
  again = run_here('train', *commands.SMALL, f'--output_dir={trained.folder}')
  assert again.status == 0
  assert 'holds this run already' in again.output
  table = trained.outcome.output.splitlines()[1:-1]
  assert again.output.splitlines()[2:] == table
  assert commands.files(trained.folder) == before


@pytest.mark.slow
def test_a_run_may_end_early(tmp_path):
  # Nothing is ever so much better.
  command = (
    *('train', *commands.SMALL, f'--output_dir={tmp_path}'),
    *('--early_stopping_patience=1', '--set=early_stopping_min_delta=100'),
    '--checkpoint_every=100',
  )
  outcome = run_well(*command)
  assert 'Ended after round 4 by EarlyStopping(patience=1' in outcome.output
  result = read(tmp_path)
  assert result['rounds'] == 4
  assert result['best']['round'] == 4  # Better, if by less than 100.
  assert "metric='rmse'" in result['ended_by']
  assert [row['round'] for row in repeatable_rows(tmp_path)] == list('1234')
  again = run_here(*command)
  assert 'holds this run already' in again.output


# ---- kills -------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on(trained, tmp_path):
  # In the middle of its second checkpoint; and in its fifth round, in the
  # middle of a line.
  kills = {
    'saving': _DIE_WHILE_SAVING.format(number=2),
    'round': _DIE_IN_A_ROUND.format(number=5),
  }
  flags = 'train', f'--flagfile={trained.folder}/flags.txt', '--rounds=60'
  with contextlib.ExitStack() as stack:
    killed = {}
    for name, meddle in kills.items():
      command = _meddled(meddle, *flags, f'--output_dir={tmp_path / name}')
      killed[name] = stack.enter_context(commands.started(command))
    for program in killed.values():
      outcome = program.finish()
      assert outcome.status == -signal.SIGKILL, outcome
      assert program.all_ended()
  left = {
    name: {path.name for path in (tmp_path / name / 'checkpoints').iterdir()}
    for name in kills
  }
  (unfinished,) = left['saving'] - {'round_2'}
  assert unfinished.startswith('round_4_temp')
  assert left['round'] == {'round_2', 'round_4'}
  assert (tmp_path / 'round/metrics.csv').read_text().endswith('\n5,0.12')
  for name in kills:
    folder = tmp_path / name
    assert not (folder / 'result.json').exists()
    outcome = run_well('train', *commands.SMALL, f'--output_dir={folder}')
    assert repeatable_rows(folder) == repeatable_rows(trained.folder)
    assert _repeatable(folder) == _repeatable(trained.folder)


@pytest.mark.slow
def test_more_rounds_go_on(trained, tmp_path):
  folder = tmp_path / 'out'
  shutil.copytree(trained.folder, folder)
  run_well('train', *commands.SMALL, '--rounds=9', f'--output_dir={folder}')
  rows = repeatable_rows(folder)
  assert [row['round'] for row in rows] == list('123456789')
  assert rows[:6] == repeatable_rows(trained.folder)
  assert read(folder)['rounds'] == 9
  assert '--rounds=9\n' in (folder / 'flags.txt').read_text()


# ---- measuring again ---------------------------------------------------------


@pytest.mark.slow
def test_evaluate_measures_the_same_again(trained):
  before = commands.files(trained.folder)
  result = read(trained.folder)
  for weights, part, expected in (
    ('last', 'test', result['test']['unseen']),
    ('best', 'validation', result['best']['validation']),
  ):
    outcome = run_well(
      *('evaluate', f'--output_dir={trained.folder}'),
      *(f'--weights={weights}', f'--part={part}'),
    )
    measured = json.loads(outcome.output)
    assert measured.pop('round') == 6
    assert measured.pop('part') == part
    assert measured == expected
  assert commands.files(trained.folder) == before


@pytest.mark.slow
def test_evaluate_recommends(trained):
  outcome = run_well(
    'evaluate', f'--output_dir={trained.folder}', '--user=42', '--top_n=7'
  )
  title, *lines = outcome.output.splitlines()
  assert title == 'For user 42, by the weights of round 6:'
  assert [line.split('.')[0].strip() for line in lines] == list('1234567')
  assert all('Film' in line for line in lines)


@pytest.mark.slow
def test_evaluate_saves_the_model_of_one_user(trained, tmp_path, monkeypatch):
  file = tmp_path / '42.keras'
  arguments = (
    *('evaluate', f'--output_dir={trained.folder}', '--user=42'),
    f'--save_model={file}',
  )
  outcome = run_well(*arguments)
  assert f'the model of user 42, of round 6: {file}' in outcome.output
  keras_model = tf.keras.models.load_model(file)
  predicted = keras_model.predict(np.arange(3), verbose=0)
  assert predicted.shape[0] == 3 and np.isfinite(predicted).all()
  assert len(set(predicted.ravel().tolist())) == 3

  def full(model, path):
    pathlib.Path(path).write_text('half of it')
    raise OSError(28, 'No space left on device')

  before = commands.files(tmp_path)
  monkeypatch.setattr(tf.keras.Model, 'save', full)
  commands.is_for_users(run_here(*arguments), str(file), 'No space left')
  assert commands.files(tmp_path) == before


# ---- other settings ----------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_diverges_says_so(tmp_path):
  arguments = (
    *('train', *commands.SMALL, f'--output_dir={tmp_path}'),
    *('--rounds=80', '--update_learning_rate=30'),
  )
  outcome = run_here(*arguments)
  commands.is_for_users(outcome, 'diverged', 'round 7', '--clip_norm')
  assert 'nan' in outcome.output
  result = read(tmp_path)
  assert result['diverged'] is True
  assert result['rounds'] == 7
  assert result['test']['unseen']['rmse'] == 'nan'
  assert result['test']['unseen']['num_not_finite'] == 60
  assert len(repeatable_rows(tmp_path)) == 7
  before = commands.files(tmp_path)
  again = run_here(*arguments)
  assert (again.status, again.errors) == (1, outcome.errors)
  assert commands.files(tmp_path) == before


@pytest.mark.parametrize('path', _RECIPES, ids=lambda path: path.stem)
def test_recipes_are_for_flags_that_exist(path):
  config = from_recipe(path)
  task = config.task
  data = getattr(task, 'edition', getattr(task, 'corpus', 'demo'))
  assert f'{path.stem}_'.startswith((f'{task.name}_', f'{data}_', 'demo_'))
  if path.stem.startswith('movielens_fed_recon'):
    assert config.algorithm == 'fed_recon'
  assert path.read_text().startswith('# ')


# ---- whole programs ----------------------------------------------------------

_ENDLESS = (*commands.SMALL, '--rounds=1000000')
_PROGRAMS: dict[str, tuple[str, ...]] = {
  'SIGINT': _ENDLESS,
  'SIGTERM': (*_ENDLESS, '--runtime=native', '--jit=auto'),
}


@pytest.fixture(scope='module', name='ended')
def fixture_ended(tmp_path_factory):
  """The folder of programs that ran side by side, and how each ended."""
  folder = tmp_path_factory.mktemp('programs')
  started = {}
  with contextlib.ExitStack() as stack:
    for name, arguments in _PROGRAMS.items():
      out = f'--output_dir={folder / name}'
      command = commands.command('train', *arguments, out)
      started[name] = stack.enter_context(commands.started(command))
    for name in _PROGRAMS:
      commands.wait_for_rounds(folder / name / 'metrics.csv', 4, started[name])
      started[name].process.send_signal(signal.Signals[name])
    outcomes = {name: program.finish() for name, program in started.items()}
    left = {name: p.alive() for name, p in started.items() if not p.all_ended()}
    assert not left
  return folder, outcomes


@pytest.mark.slow
@pytest.mark.parametrize('name', _PROGRAMS)
def test_a_signal_ends_a_run_in_good_order(ended, name):
  folder, outcomes = ended
  outcome = outcomes[name]
  assert outcome.status == 128 + signal.Signals[name], outcome
  assert outcome.errors == (
    f'error: Ended by {name}. Run the same command again to go on from the '
    'last checkpoint.\n'
  )
  # No more than what it was about to do.
  assert outcome.output.count('\n') == 1 and 'a new run' in outcome.output
  # What was written before is whole.
  assert len(repeatable_rows(folder / name)) >= 4
  left = {path.name for path in (folder / name / 'checkpoints').iterdir()}
  assert left
  assert all(path.removeprefix('round_').isdigit() for path in left)


# ---- slow --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('name', ['native', 'cohort'])
def test_memory_does_not_grow(tmp_path, name):
  command = _meddled(
    *(_SAY_MEMORY, 'train', '--data=synthetic', '--clients_per_round=20'),
    *('--rounds=350', '--evaluate_every=25', f'--runtime={name}'),
    f'--output_dir={tmp_path}',
  )
  outcome = commands.run_program(command)
  assert outcome.status == 0, outcome
  memory = {
    int(line.split()[1]): int(line.split()[2])
    for line in outcome.output.splitlines()
    if line.startswith('memory')
  }

  def about(number: int) -> float:
    # What a process holds goes up and down a little from round to round.
    return np.median([memory[number - back] for back in (0, 5, 10)])

  assert about(350) < 1.05 * about(60), memory
