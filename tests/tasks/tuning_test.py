"""Rows of a sweep: each has the best of the same number of settings."""

import pathlib

import pytest

from tasks import sweep
from tasks.searching import grids
from tests.support import commands
from tests.support import run_folders
from tests.support.commands import run_here

_ROWS = '--grid=algorithm=fed_avg,furl'
_RATE = 'update_learning_rate'
_RATES = f'--tune={_RATE}+reconstruction_learning_rate=0.1,0.2,0.4'
_SEEDS = '--repeat=seed=0,1,2'


@pytest.fixture(name='started')
def fixture_started(monkeypatch):
  """Write results as runs do, the better the nearer the rate is to 0.25."""
  started = []

  def run(binary: str, *arguments: str) -> int:
    started.append((binary, *arguments))
    if binary == 'tasks.report':
      return 0
    given = dict(a.removeprefix('--').split('=', 1) for a in arguments)
    folder, rate = pathlib.Path(given['output_dir']), given[_RATE]
    if rate == '0.9' or given.get('seed') == '9':
      return 1  # It fails, as of missing data.
    error = abs(float(rate) - 0.25)
    validation = {'rmse': error, 'f1': 1 - error, 'perplexity': 'nan'}
    counts = {'num_clients': 3, 'num_not_finite': int(rate == '0.3')}
    best = {'validation': {**validation, **counts}, 'test': {}}
    more = {'best': {'round': 1, **best}, 'diverged': rate == '0.25'}
    if not folder.exists():
      run_folders.write(folder.parent, folder.name, more=more)
    return 0

  monkeypatch.setattr(sweep, '_run', run)
  return started


def _sweep(folder: pathlib.Path, *flags: str, given: tuple[str, ...] = ()):
  here = f'--sweep_dir={folder}', '--metric=rmse'
  return run_here('sweep', *here, *flags, '--', '--data=synthetic', *given)


def _trained(started) -> list[str]:
  """The names of the folders of runs, in their order."""
  last = [a[-1] for a in started if a[0] == 'tasks.train']
  return [pathlib.Path(a.partition('=')[2]).name for a in last]


def test_each_row_repeats_its_best_setting(tmp_path, started):
  outcome = _sweep(tmp_path, _ROWS, _RATES, _SEEDS)
  assert outcome.status == 0
  rates = f'{_RATE}=%s,reconstruction_learning_rate=%s'
  furl = [f'algorithm=furl,{rates % (x, x)}' for x in ('0.1', '0.2', '0.4')]
  average = [f'algorithm=fed_avg,{_RATE}={x}' for x in ('0.1', '0.2', '0.4')]
  tried = [f'{name},seed=0' for name in (*average, *furl)]
  again = [
    f'{name[1]},seed={seed}' for name in (average, furl) for seed in '12'
  ]
  assert _trained(started) == tried + again
  # One of another seed has the same flags but for it.
  (_, *first), (_, *second) = (started[i] for i in (1, 6))
  assert [a for a in second if a not in first][:1] == ['--seed=1']
  assert len(first) == len(second)
  # The report is of the chosen settings, by their best rounds.
  chosen = [tried[1], tried[4], *again]
  assert started[-1] == (
    'tasks.report',
    *(f'--sweep_dir={tmp_path / name}' for name in chosen),
    *(f'--report_dir={tmp_path}', '--of=best'),
  )
  table = (tmp_path / grids.CHOSEN_FILE).read_text()
  assert table in outcome.output
  assert f'| algorithm=fed_avg | 3 | {_RATE}=0.2 | 0.05 |' in table
  # The same command again chooses and trains the same.
  before, started[:] = [*started], []
  assert _sweep(tmp_path, _ROWS, _RATES, _SEEDS).status == 0
  assert started == before


@pytest.mark.parametrize(
  'values, metric, chosen',
  [
    ('0.1,0.2,0.4', 'rmse', f'{_RATE}=0.2 | 0.05'),
    ('0.1,0.2,0.4', 'validation.f1', f'{_RATE}=0.2 | 0.95'),  # The most.
    ('0.1,0.25', 'rmse', f'{_RATE}=0.1 | 0.15'),  # The other diverged.
    ('0.1,0.3', 'rmse', f'{_RATE}=0.1 | 0.15'),  # The other lost a client.
    ('0.1,0.9', 'rmse', f'{_RATE}=0.1 | 0.15'),  # The other failed.
    ('0.1,0.2', 'perplexity', '- | -'),  # Undefined for both.
  ],
)
def test_what_is_chosen(tmp_path, started, values, metric, chosen):
  outcome = _sweep(tmp_path, f'--tune={_RATE}={values}', f'--metric={metric}')
  row = (tmp_path / grids.CHOSEN_FILE).read_text().splitlines()[-1]
  assert row == f'| run | {values.count(",") + 1} | {chosen} |'
  assert outcome.status == int('0.9' in values)
  assert (started[-1][0] == 'tasks.report') == ('=' in chosen)


def test_a_repetition_that_fails_is_left_out_of_the_report(tmp_path, started):
  tune = f'--tune={_RATE}=0.1,0.2'
  outcome = _sweep(tmp_path, tune, '--repeat=seed=0,9,1')
  commands.is_for_users(outcome, '1 of 4 runs failed', 'seed=9')
  name, *folders = started[-1]
  assert name == 'tasks.report'
  assert [pathlib.Path(f).name for f in folders[:-2]] == [
    f'{_RATE}=0.2,seed=0',
    f'{_RATE}=0.2,seed=1',
  ]


def test_private_repetitions_cost_too(tmp_path, started):
  outcome = _sweep(tmp_path, _RATES, _SEEDS, given=('--target_epsilon=8',))
  assert 'each of the 5 runs costs the same users epsilon 8' in outcome.output
  # 1 + 8 + 2, and twice as much as the costliest, which may be the best.
  targets = f'--tune={_RATE}+target_epsilon=1,8,2'
  outcome = _sweep(tmp_path, targets, _SEEDS)
  assert 'together up to epsilon 27 at delta 5e-05' in outcome.output


@pytest.mark.parametrize(
  'flags, said',
  [
    ((_SEEDS,), '--repeat=seed=0,1,2: nothing is chosen by --tune'),
    (('--tune=a',), 'expected flag=value,value,... such as seed=0,1,2, or fl'),
    (('--tune=a+=1',), 'error: a+=1: expected flag=value'),
    (('--grid=seed=1', '--tune=seed+b=2'), 'seed is in the grid twice'),
    ((f'--tune={_RATE}=1', '--trials=3'), 'nothing to search for'),
    (
      (f'--tune={_RATE}=1', f'--search={_RATE}=log:1:2'),
      'with --search there is no grid',
    ),
    ((f'--tune={_RATE}=1', '--metric=test.rmse'), 'at the validation clients'),
    ((f'--tune={_RATE}=1', '--metric=mae'), 'Choose among rmse, f1'),
  ],
)
def test_what_cannot_be_tuned(tmp_path, started, flags, said):
  commands.is_for_users(_sweep(tmp_path, *flags), said)
  assert not started or 'Choose among' in said  # That only a run can say.


def test_runs_without_validation_are_not_chosen_from(tmp_path, started):
  run_folders.write(tmp_path, f'{_RATE}=1')
  outcome = _sweep(tmp_path, f'--tune={_RATE}=1')
  commands.is_for_users(outcome, 'no best round was chosen on validation')
