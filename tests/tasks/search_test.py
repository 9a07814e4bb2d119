"""A search: what it may vary, which trials it runs, and how it goes on."""

from collections.abc import Sequence
import json
import math
import os
import pathlib
import shutil
import signal
import sys
import time
from typing import Any
from unittest import mock

import optuna
import pytest

from tasks import report
from tasks import sweep
from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line import program as program_lib
from tasks.searching import plan as plans
from tasks.searching import reporting
from tasks.searching import trials
from tests.support import commands
from tests.support import run_folders
from tests.support.commands import run_here
from tff_partial.training import files

_RATE = 'update_learning_rate'
_BASE = ('--data=synthetic', '--rounds=90', '--evaluate_every=10')
_PRIVATE = ('--noise_multiplier=1', '--noise_seed=0')


class Killed(Exception):
  """Stands for a kill: nothing after it is done."""


class Trainer:
  """Trains nothing, but writes the result of a run.

  The loss is the square of how far the rate is from 0.1, in powers of ten, and
  1 / rounds.

  Attributes:
    runs: The number of the trial, and the rounds, of each run.
    dies_at: Is killed in this run, from 0.
    status: How runs end.
    epsilon: What a round costs; None if runs are not private.
    num_lost: Validation clients whose loss is not finite.
  """

  def __init__(self, dies_at: int | None = None):
    self.runs: list[tuple[int, int]] = []
    self.dies_at = dies_at
    self.status = 0
    self.epsilon: float | None = None
    self.num_lost = 0

  def __call__(self, arguments: Sequence[str]) -> int:
    given = dict(a.removeprefix('--').split('=', 1) for a in arguments)
    folder, rounds = pathlib.Path(given['output_dir']), int(given['rounds'])
    if len(self.runs) == self.dies_at:
      self.dies_at = None
      raise Killed
    self.runs.append((int(folder.name.removeprefix('trial_')), rounds))
    if self.status:
      return self.status
    rate = float(given[_RATE])
    loss = (math.log10(rate) + 1) ** 2 + 1 / rounds
    measured = {'loss': loss, 'rmse': loss**0.5, 'num_clients': 3}
    measured['num_not_finite'] = self.num_lost
    result: dict[str, Any] = {
      'rounds': rounds,
      'diverged': rate > 5,
      'train': None,
      'validation': {**measured, 'best_round': rounds},
      'test': {'unseen': measured},
      'best': {'round': rounds, 'test': {'unseen': measured}},
    }
    if self.epsilon is not None:
      result['privacy'] = {'epsilon': self.epsilon * rounds, 'delta': 1e-5}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'result.json').write_text(json.dumps(result))
    return int(rate > 5)


def _plan(*base: str, **chosen: Any) -> plans.Plan:
  chosen = {'search': (f'{_RATE}=log:0.001:1',), 'trials': 8, **chosen}
  return plans.make(plans.Search(**chosen), base or _BASE)


def _tried(study: Any) -> list[Any]:
  return [
    (t.number, t.state.name, t.params, t.intermediate_values)
    for t in study.trials
  ]


# ---- what is varied ----------------------------------------------------------


@pytest.mark.parametrize(
  ('text', 'allowed'),
  [
    ('float:-1:2.5', lambda v: isinstance(v, float) and -1 <= v <= 2.5),
    ('log:0.01:1', lambda v: isinstance(v, float) and 0.01 <= v <= 1),
    ('int:3:5', lambda v: isinstance(v, int) and 3 <= v <= 5),
    ('logint:1:100', lambda v: isinstance(v, int) and 1 <= v <= 100),
    ('choice:x,y', {'x', 'y'}.__contains__),
  ],
)
def test_values_are_drawn_as_asked_for(text, allowed):
  suggest = _plan(search=(f'seed={text}',)).parameters['seed']
  study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
  drawn = [suggest(study.ask()) for _ in range(20)]
  assert all(map(allowed, drawn)) and len(set(drawn)) >= 2


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('update_learnin_rate=log:1:2', 'Did you mean update_learning_rate?'),
    ('rounds=int:1:9', '--rounds is for the search to set'),
    ('seed=between:1:2', 'expected flag=float:LOW:HIGH'),
    ('seed=int:1:x', 'give two numbers after int:'),
    ('seed=int:2:1', 'the lower one first'),
    ('seed=log:0:1', 'and above 0'),
    ('split=choice:halves', 'two different values'),
  ],
)
def test_what_cannot_be_varied_is_refused(text, said):
  with pytest.raises(OptionError) as refused:
    _plan(search=(text,))
  assert text in str(refused.value) and said in str(refused.value)


# ---- what it is for ----------------------------------------------------------


@pytest.mark.parametrize(
  ('metric', 'name', 'direction'),
  [
    ('loss', 'loss', 'minimize'),
    ('validation.rmse', 'rmse', 'minimize'),
    ('validation_accuracy', 'accuracy', 'maximize'),
    ('validation/f1', 'f1', 'maximize'),
  ],
)
def test_a_metric_of_the_validation_clients(metric, name, direction):
  plan = _plan(metric=metric)
  assert (plan.metric, plan.direction) == (name, direction)


def test_rungs_are_apart_by_a_factor():
  assert plans.rungs(900, None, 3) == [100, 300, 900]
  assert plans.rungs(900, 200, 2) == [200, 400, 800, 900]
  assert plans.rungs(2, None, 3) == [1, 2]
  assert plans.rungs(900, None, 3, is_pruned=False) == [900]
  with pytest.raises(OptionError, match='--first_rung=901: runs have 900'):
    plans.rungs(900, 901, 3)


def test_planned_noise_leaves_no_run_to_be_continued():
  private = (*_BASE, '--target_epsilon=8', '--noise_seed=0')
  assert _plan(*private).rungs == [90]
  with pytest.raises(OptionError, match='--pruner=halving: .*--target_epsilon'):
    _plan(*private, pruner='halving')
  with pytest.raises(OptionError, match='--first_rung=2: no run ends early'):
    _plan(*private, first_rung=2)


# ---- trials ------------------------------------------------------------------


def test_a_search_finds_the_best_rate(tmp_path):
  train = Trainer()
  study = trials.run(_plan(trials=16), tmp_path, train)
  assert math.log10(study.best_params[_RATE]) == pytest.approx(-1, abs=0.3)
  states = [trial.state.name for trial in study.trials]
  assert len(states) == 16 and {'COMPLETE', 'PRUNED'} == set(states)
  # Each begins with ten rounds; those that are kept go on, and at most one is
  # not the best third.
  assert train.runs[:3] == [(0, 10), (0, 30), (0, 90)]
  assert sum(rounds == 10 for _, rounds in train.runs) == 16
  assert sum(rounds == 90 for _, rounds in train.runs) < 8


def test_the_median_ends_runs_too(tmp_path):
  train = Trainer()
  plan = _plan(trials=12, pruner='median')
  study = trials.run(plan, tmp_path, train)
  states = [trial.state.name for trial in study.trials]
  assert states[:4] == ['COMPLETE'] * 4 and 'PRUNED' in states[4:]


@pytest.mark.parametrize(
  'dies_at', [*(pytest.param(at, marks=pytest.mark.slow) for at in (0, 1)), 5]
)
def test_a_killed_search_goes_on_alike(tmp_path, dies_at):
  plan = _plan(trials=6)
  whole = Trainer()
  expected = _tried(trials.run(plan, tmp_path / 'whole', whole))
  killed = Trainer(dies_at)
  with pytest.raises(Killed):
    trials.run(plan, tmp_path / 'killed', killed)
  study = trials.run(plan, tmp_path / 'killed', killed)
  assert _tried(study) == expected
  # What was measured before the kill is not measured again.
  assert killed.runs == whole.runs


def test_a_kill_before_a_decision_changes_nothing(tmp_path, monkeypatch):
  plan = _plan(trials=6)
  expected = _tried(trials.run(plan, tmp_path / 'whole', Trainer()))
  with monkeypatch.context() as patched:
    die = mock.Mock(side_effect=Killed)
    patched.setattr(optuna.trial.Trial, 'should_prune', die)
    with pytest.raises(Killed):
      trials.run(plan, tmp_path / 'killed', Trainer())
  study = trials.run(plan, tmp_path / 'killed', Trainer())
  assert _tried(study) == expected


def test_half_a_line_of_a_journal_was_never_written(tmp_path, monkeypatch):
  plan = _plan(trials=3)
  expected = _tried(trials.run(plan, tmp_path / 'whole', Trainer()))
  monkeypatch.chdir(tmp_path)
  trials.run(_plan(trials=1), pathlib.Path('full'), Trainer())
  with open('full/search.journal', 'a') as journal:
    journal.write('{"op_code":4,"wor')
  # The killed owner of this lock cannot remove it.
  os.symlink('full/search.journal', 'full/search.journal.lock')
  study = trials.run(plan, pathlib.Path('full'), Trainer())
  assert _tried(study) == _tried(trials.load(pathlib.Path('full'))) == expected


def test_more_trials_go_on(tmp_path):
  trials.run(_plan(trials=3), tmp_path, Trainer())
  more = Trainer()
  study = trials.run(_plan(trials=5), tmp_path, more)
  assert len(study.trials) == 5
  assert {number for number, _ in more.runs} == {3, 4}


def test_another_search_does_not_go_on_there(tmp_path):
  trials.run(_plan(trials=1), tmp_path, Trainer())
  with pytest.raises(OptionError, match='metric=loss, now it is rmse'):
    trials.run(_plan(metric='rmse'), tmp_path, Trainer())
  with pytest.raises(OptionError, match='clients_per_round=100, now it is 7'):
    plan = _plan(*_BASE, '--clients_per_round=7')
    trials.run(plan, tmp_path, Trainer())


def test_a_run_that_was_interrupted_stays_unfinished(tmp_path):
  train = Trainer()
  train.status = 128 + signal.SIGTERM
  with pytest.raises(OptionError, match='interrupted .*same command again'):
    trials.run(_plan(trials=2), tmp_path, train)
  train.status = 0
  study = trials.run(_plan(trials=2), tmp_path, train)
  assert [trial.number for trial in study.trials] == [0, 1]


def test_runs_that_diverge_or_fail_are_noted(tmp_path):
  plan = _plan(search=(f'{_RATE}=log:6:9',), trials=2)
  study = trials.run(plan, tmp_path / 'diverged', Trainer())
  table = reporting.frame(study)
  assert list(table['state']) == ['diverged', 'diverged']
  train = Trainer()
  train.num_lost = 1  # Without the worst clients a loss is too good.
  study = trials.run(_plan(trials=2), tmp_path / 'lost', train)
  assert list(reporting.frame(study)['state']) == ['diverged', 'diverged']
  train = Trainer()
  train.status = 1
  study = trials.run(_plan(trials=2), tmp_path / 'failed', train)
  assert list(reporting.frame(study)['state']) == ['failed', 'failed']
  # The disk was full, and is not any more; but first the search is killed.
  train.status = 128 + signal.SIGTERM
  with pytest.raises(OptionError, match='interrupted'):
    trials.run(_plan(trials=2), tmp_path / 'failed', train)
  table = reporting.frame(trials.load(tmp_path / 'failed'))
  assert list(table['state']) == ['unfinished', 'failed']
  train.status = 0
  study = trials.run(_plan(trials=2), tmp_path / 'failed', train)
  assert list(reporting.frame(study)['state']) == ['finished', 'ended early']
  assert _tried(study) == _tried(trials.run(_plan(trials=2), tmp_path, train))


def test_a_trial_whose_metric_is_undefined_is_never_the_best(tmp_path):
  class Undefined(Trainer):
    def __call__(self, arguments):
      status = super().__call__(arguments)
      path = tmp_path / 'trial_0001' / 'result.json'
      if self.runs[-1][0] == 1:
        result = json.loads(path.read_text())
        result['validation']['rmse'] = 'nan'
        path.write_text(json.dumps(result))
      return status

  plan = _plan(metric='validation.rmse', trials=3)
  study = trials.run(plan, tmp_path, Undefined())
  first, undefined, last = study.trials
  assert 'rmse is undefined' in undefined.user_attrs[trials.WHY]
  assert study.best_trial.number in (first.number, last.number)


def test_values_that_do_not_go_together_are_not_run(tmp_path):
  # No client solves for what it sends.
  search = ('update_optimizer=choice:exact,exact:ridge=2',)
  train = Trainer()
  study = trials.run(_plan(search=search, trials=2), tmp_path, train)
  assert not train.runs
  assert 'are solved for' in study.trials[0].user_attrs[trials.WHY]


@pytest.mark.parametrize(
  ('text', 'said'),
  [
    ('jit=choice:auto,no', 'can have no. --jit=no: choose'),
    ('batch_size=int:-1:9', 'give at least 1'),
    ('batch_size=float:1:9', '1.0'),
    ('server_optimizer=choice:sgd,adm', 'adm'),
  ],
)
def test_impossible_values_are_found_before_trials(tmp_path, text, said):
  # Only one of the two algorithms reads the other flag.
  others = 'penalty=log:0.1:1', 'algorithm=choice:fed_recon,ditto'
  trials.check(_plan(search=others))
  searches = (f'--search={one}' for one in (*others, text))
  here = 'sweep', f'--sweep_dir={tmp_path}', *searches
  commands.is_for_users(run_here(*here, '--', *_BASE), said)
  assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('metric', 'said'),
  [
    ('validation.f1', 'measured by loss, rmse'),
    ('best_round', 'measured by loss, rmse'),
    ('test.rmse', 'validation clients alone'),
  ],
)
def test_a_metric_that_validation_has_not_is_refused(tmp_path, metric, said):
  with pytest.raises(OptionError, match=said):
    trials.run(_plan(metric=metric), tmp_path, Trainer())


def test_a_folder_that_cannot_be_written_is_of_its_flag(tmp_path):
  trials.run(_plan(trials=1), tmp_path, Trainer())
  for program, *flags in (
    ('report', f'--sweep_dir={tmp_path}', '--report_dir=/proc/out'),
    ('sweep', '--sweep_dir=/proc/out', f'--search={_RATE}=log:0.1:1', '--'),
  ):
    outcome = run_here(program, *flags, *_BASE[: flags.count('--')])
    (place,) = (flag for flag in flags if '/proc' in flag)
    flag = place.partition('=')[0]
    commands.is_for_users(outcome, '/proc/out', f'Choose another {flag}.')


# ---- the report --------------------------------------------------------------


@pytest.mark.slow
def test_the_report_has_the_best_and_what_mattered(tmp_path):
  plan = _plan(
    search=(f'{_RATE}=log:0.001:1', 'dropout_rate=float:0:0.5'),
    trials=20,
    pruner='never',
  )
  study = trials.run(plan, tmp_path, Trainer())
  text = reporting.report(tmp_path, tmp_path)
  best = study.best_trial
  assert f'The best of 20 trials is {best.number}' in text
  assert f'--{_RATE}={best.params[_RATE]}' in text
  assert 'Its test clients (unseen): loss ' in text
  shares = reporting.importances(study)
  # The trainer looks at the rate alone.
  assert shares[2].startswith(f'- {_RATE}: ') and len(shares) == 4
  assert len((tmp_path / 'trials.csv').read_text().splitlines()) == 21
  outcome = run_here('report', f'--sweep_dir={tmp_path}')
  assert outcome.status == 0 and text in outcome.output
  for flag in ('--of=best', '--y=rmse'):
    outcome = run_here('report', f'--sweep_dir={tmp_path}', flag)
    commands.is_for_users(outcome, flag)
  # Of a result that was cut off, the rest is reported.
  cut = trials.folder(tmp_path, best.number) / 'result.json'
  cut.write_text('{')
  said = reporting.report(tmp_path, tmp_path)
  assert f'--{_RATE}={best.params[_RATE]}' in said
  assert f'WARNING: what its test clients measured: {cut}, line 1' in said


def test_options_without_a_flag_are_named_as_they_are_set(tmp_path):
  searched = f'{_RATE}=log:0.1:1', 'through_solution=choice:true,false'
  trials.run(_plan(search=searched, trials=1), tmp_path, Trainer())
  said = reporting.report(tmp_path, tmp_path)
  assert ' --set=through_solution=' in said


def test_what_private_trials_cost_is_summed(tmp_path):
  train = Trainer()
  train.epsilon = 0.1
  plan = _plan(*_BASE, *_PRIVATE, trials=3, pruner='never')
  study = trials.run(plan, tmp_path, train)
  # Three of 90 rounds.
  said = reporting.report(tmp_path, tmp_path)
  assert '3 private trials on the same users cost epsilon 27 at delta' in said
  assert 'epsilon' in reporting.frame(study)


def test_failed_and_unfinished_trials_cost_what_they_spent(tmp_path):
  train = Trainer()
  train.epsilon, train.status = 0.1, 1
  plan = _plan(*_BASE, *_PRIVATE, trials=2, pruner='never')
  head = 'round,privacy/epsilon,privacy/delta\n'
  for number, rows in enumerate(('1,1.5,1e-5\n', '1,1.5,1e-5\n2,2.5,1e-5\n')):
    folder = trials.folder(tmp_path, number)
    folder.mkdir()
    (folder / 'metrics.csv').write_text(head + rows)
  trials.run(plan, tmp_path, train)
  said = reporting.report(tmp_path, tmp_path)
  assert '2 private trials on the same users cost epsilon 4 at delta' in said
  # A trial that goes on after its first rung.
  result = '{"test": {}, "privacy": {"epsilon": 1, "delta": 1e-5}}'
  (folder / 'result.json').write_text(result)
  assert reporting.report(tmp_path, tmp_path) == said
  for number in range(2):
    shutil.rmtree(trials.folder(tmp_path, number))
  assert 'private trials' not in reporting.report(tmp_path, tmp_path)


# ---- the program -------------------------------------------------------------


def test_private_searches_are_warned_of(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_run', lambda *_: 130)
  searched = f'{_RATE}=log:0.1:1', 'target_epsilon=choice:2,8,4'
  for number, (text, given) in enumerate(zip(searched, '81', strict=True)):
    outcome = run_here(
      'sweep',
      *(f'--sweep_dir={tmp_path / str(number)}', f'--search={text}'),
      *('--trials=5', '--', f'--target_epsilon={given}', '--data=synthetic'),
    )
    assert '8 at delta 1e-05, together up to epsilon 40' in outcome.output
    commands.is_for_users(outcome, 'interrupted')
  noise = plans.Search(search=('noise_multiplier=log:0.1:1',))
  assert plans.make(noise, ['--data=synthetic']).config.privacy.is_on


def test_private_grids_are_warned_of(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_run', lambda *_: 1)

  def said(*grid: str, given: tuple[str, ...] = ()) -> str:
    outcome = run_here(
      *('sweep', f'--sweep_dir={tmp_path}', *grid, '--'),
      *('--data=synthetic', *given),
    )
    return outcome.output

  seeds = '--grid=seed=0,1,2'
  assert (
    'each of the 3 runs costs the same users epsilon 8 at delta 1e-05, '
    'together up to epsilon 24 at delta 3e-05 by their sum'
  ) in said(seeds, given=('--target_epsilon=8',))
  # 3 * (2 + 4), and what is refused costs nothing.
  assert 'each of the 6 runs costs the same users what its flags say, ' in (
    varied := said(seeds, '--grid=target_epsilon=2,4,x')
  )
  assert 'together up to epsilon 18 at delta 6e-05' in varied
  assert 'they add up' in said(seeds, given=('--noise_multiplier=1',))
  assert 'WARNING' not in said(seeds)


def test_users_of_other_data_are_others():
  private = [
    command_line.parse(['--target_epsilon=8', *data])
    for data in (['--data_set=ml-1m'], ['--data_set=ml-100k'], [])
  ]
  small, large = sweep.cost(private, 'runs', 'sweep')
  # Data without a name may be any.
  assert 'each of the 2 runs of movielens: ml-100k costs' in small
  assert 'each of the 2 runs of movielens: ml-1m costs' in large
  assert 'together up to epsilon 16 ' in large


def test_a_sweep_warns_once_of_what_was_written(tmp_path, monkeypatch, caplog):
  started = []
  monkeypatch.setattr(
    sweep.subprocess,
    'run',
    lambda command, env, **_: started.append((command, env)) or mock.Mock(),
  )
  written = ('--support_share=0.3', '--split=same', '--reconstruction_steps=3')
  run_here(
    *('sweep', f'--sweep_dir={tmp_path}', '--grid=seed=0,1', '--'),
    *('--recipe=mnist_preference_global', f'--data_dir={tmp_path}', *written),
  )
  assert caplog.messages == [
    '--support_share=0.3: left out, as --split=same follows.',
    '--reconstruction_steps has no effect: fed_avg trains no local weights, '
    'nor do its evaluations.',
  ]
  # Its runs do not, although their command lines have the recipe's flags.
  monkeypatch.setattr(program_lib, '_end_with_sweep', lambda: None)
  for (_, _, _, *arguments), environment in started[:2]:
    for name in set(environment) - set(os.environ):
      monkeypatch.setenv(name, environment[name])
    outcome = run_here('train', *arguments)
    commands.is_for_users(outcome, str(tmp_path))
  assert len(caplog.messages) == 2


def test_a_grid_is_checked_before_its_first_run(tmp_path, monkeypatch):
  started = []

  def trained(binary: str, *arguments: str) -> int:
    started.append((binary, *arguments))
    return int('--batch_size=9' in arguments)  # One fails, as of missing data.

  monkeypatch.setattr(sweep, '_run', trained)
  here = 'sweep', f'--sweep_dir={tmp_path}'
  outcome = run_here(*here, '--grid=batch_size=5,0,9', '--', '--data=synthetic')
  warning = 'WARNING: batch_size=0 is not run: --batch_size=0: '
  assert outcome.output.startswith(warning)
  binaries = [binary for binary, *_ in started]
  assert binaries == ['tasks.train', 'tasks.train', 'tasks.report']
  commands.is_for_users(outcome, '2 of 3 runs failed')
  run_folders.write(tmp_path, 'batch_size=5')
  monkeypatch.undo()
  zero, nine = (tmp_path / f'batch_size={size}' for size in (0, 9))
  zero = f'- {zero}: failed (--batch_size=0: give at least 1.)\n'
  nine = f'- {nine}: failed (exit status 1, see its messages)\n'

  def table() -> str:
    report.main(report.Report(sweep_dir=(str(tmp_path),)))
    return (tmp_path / 'table.md').read_text()

  assert table().endswith(f'In no mean:\n\n{zero}{nine}')
  # It may have failed after its folder was made.
  run_folders.write(tmp_path, 'batch_size=9', seed=1, ended=False)
  assert '| 1, 1 failed |' in table()
  assert table().endswith(f'In no mean:\n\n{nine}{zero}')
  # Nothing at all is started where every run is refused.
  commands.is_for_users(run_here(*here, '--grid=round=1,2'), 'rounds')


def test_a_sweep_whose_report_fails_fails(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_run', lambda binary, *_: 'report' in binary)
  flags = '--grid=batch_size=5', '--', '--data=synthetic'
  assert run_here('sweep', f'--sweep_dir={tmp_path}', *flags).status == 1


def test_which_runs_failed_is_written_at_once(tmp_path, monkeypatch):
  file = tmp_path / 'failed.txt'
  file.write_text('batch_size=9\tof a sweep before\n')
  written = []

  def trained(binary: str, *arguments: str) -> int:
    written.append(file.read_text())
    return int('--batch_size=5' in arguments)

  monkeypatch.setattr(sweep, '_run', trained)
  grid = '--grid=batch_size=5,9'
  run_here('sweep', f'--sweep_dir={tmp_path}', grid, '--', '--data=synthetic')
  failed = 'batch_size=5\texit status 1, see its messages\n'
  assert written == ['', failed, failed]


def _seeds(folder: pathlib.Path) -> commands.Outcome:
  """Sweep over two seeds."""
  here = f'--sweep_dir={folder}', '--grid=seed=0,1'
  return run_here('sweep', *here, '--', '--data=synthetic')


def test_the_report_of_half_a_sweep_says_what_is_missing(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_run', mock.Mock(side_effect=[0, Killed]))
  with pytest.raises(Killed):
    _seeds(tmp_path)
  run_folders.write(tmp_path, 'seed=0')
  report.main(report.Report(sweep_dir=(str(tmp_path),)))
  table = (tmp_path / 'table.md').read_text()
  assert table.endswith(f'In no mean:\n\n- {tmp_path / "seed=1"}: unfinished\n')


def test_a_damaged_result_does_not_end_a_sweep(tmp_path, monkeypatch):
  (tmp_path / 'seed=0').mkdir()
  (tmp_path / 'seed=0' / 'result.json').write_text('{"rounds')
  trained = mock.Mock(side_effect=[1, 0, 0])
  monkeypatch.setattr(sweep, '_run', trained)
  commands.is_for_users(_seeds(tmp_path), '1 of 2 runs failed', 'seed=0.')
  assert trained.call_count == 3


def test_a_folder_of_runs_is_of_one_sweep_or_search(tmp_path, monkeypatch):
  monkeypatch.setattr(sweep, '_run', lambda *_: 0)
  grid, searched = tmp_path / 'grid', tmp_path / 'searched'
  assert _seeds(grid).status == 0
  lock = files.locked(grid)
  commands.is_for_users(_seeds(grid), f'{grid}: another process is training')
  os.close(lock)
  trials.run(_plan(trials=1), searched, Trainer())
  commands.is_for_users(_seeds(searched), f'{searched}: the folder holds a sea')
  here = f'--sweep_dir={grid}', f'--search={_RATE}=log:0.1:1', '--', *_BASE
  commands.is_for_users(run_here('sweep', *here), f'{grid}: the folder holds')
  assert not (grid / plans.JOURNAL).exists()


def test_flags_of_the_runs_of_a_sweep_follow_two_dashes(tmp_path):
  flags = tmp_path / 'a.flags'
  flags.write_text('--task=movielens\n')
  for argument in (f'--flagfile={flags}', '--recipe=demo'):
    with pytest.raises(OptionError, match=f'follow `--`: .* -- {argument}$'):
      sweep.take_rest(['sweep', '--grid=seed=0,1', argument])
    rest = sweep.take_rest(['sweep', '--grid=seed=0,1', '--', argument])
    assert rest == ['sweep', '--grid=seed=0,1']
  flags.write_text('--grid=seed=0,1\n')
  assert sweep.take_rest([f'--flagfile={flags}']) == [f'--flagfile={flags}']
  for ignored in (['--', '--output_dir=a'], ['--grid=output_dir=a,b']):
    with pytest.raises(OptionError, match='its own folder below --sweep_dir'):
      sweep.take_rest(ignored)


def test_a_search_without_optuna_says_what_to_type(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'optuna', None)
  with pytest.raises(OptionError, match='pip install optuna'):
    trials.run(_plan(), tmp_path, Trainer())


def test_another_file_is_no_journal(tmp_path):
  (tmp_path / plans.JOURNAL).write_text('no journal\n')
  with pytest.raises(OptionError, match='no journal of a search'):
    trials.run(_plan(), tmp_path, Trainer())


# ---- real runs ---------------------------------------------------------------


def _command(folder: pathlib.Path) -> list[str]:
  return commands.command(
    'sweep',
    *(f'--sweep_dir={folder}', '--trials=2', '--metric=validation.rmse'),
    *('--first_rung=2', f'--search={_RATE}=log:0.01:1'),
    *('--', *commands.SMALL, '--set=tensorboard=false'),
  )


def test_a_run_whose_sweep_was_killed_before_it_began_ends(monkeypatch):
  # Another process may have the sweep's number now.
  monkeypatch.setenv(command_line.OF_SWEEP, str(os.getpid()))
  monkeypatch.setattr(program_lib.ctypes, 'CDLL', mock.Mock())
  with pytest.raises(SystemExit):
    program_lib._end_with_sweep()


@pytest.mark.slow
def test_no_run_outlives_its_killed_sweep(tmp_path):
  folder = f'--sweep_dir={tmp_path}'
  long = '--grid=seed=0', '--', *commands.SMALL, '--rounds=1000000'
  with commands.started(commands.command('sweep', folder, *long)) as program:
    patience = time.monotonic() + 600
    while not (tmp_path / 'seed=0').exists() and time.monotonic() < patience:
      time.sleep(0.1)
    program.process.kill()
    assert (tmp_path / 'seed=0').exists() and program.all_ended(5)


@pytest.mark.slow
def test_a_search_is_killed_and_goes_on(tmp_path):
  """Sweep and run are killed in the second trial."""
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  with commands.started(_command(killed)) as program:
    table = killed / 'trial_0001' / 'metrics.csv'
    commands.wait_for_rounds(table, 1, program)
    for process in program.alive():
      process.kill()
    program.process.wait()
  found = {}
  for folder in (killed, whole):
    outcome = commands.run_program(_command(folder))
    assert outcome.status == 0, outcome
    assert 'The best of 2 trials is ' in outcome.output
    found[folder] = trials.load(folder)
  assert _tried(found[killed]) == _tried(found[whole])
  rungs = [sorted(t.intermediate_values) for t in found[whole].trials]
  # The first is the best so far at each rung: 2 and 6 of six rounds.
  assert rungs[0] == [2, 6] and all(each in ([2], [2, 6]) for each in rungs)
  for trial in found[whole].trials:
    rows = [
      commands.repeatable_rows(trials.folder(folder, trial.number))
      for folder in (killed, whole)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == rungs[trial.number][-1]
