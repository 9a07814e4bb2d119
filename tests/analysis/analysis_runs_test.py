"""Runs as tables and curves: what is averaged, marked and refused."""

import math
import pathlib
from typing import Any

import matplotlib
from matplotlib import image
import numpy as np
import pandas as pd
import pytest

from tasks import report
from tests.support import commands
from tests.support import run_folders as folders
from tff_partial.analysis import curves
from tff_partial.analysis import figures
from tff_partial.analysis import run_folders
from tff_partial.analysis import tables
from tff_partial.analysis.errors import AnalysisError


def _settings(root: pathlib.Path, *by: str) -> list[run_folders.Setting]:
  return run_folders.settings(run_folders.find([root]), by)


def _is_picture(path: pathlib.Path) -> np.ndarray:
  """The pixels of a PNG file that shows something."""
  pixels = image.imread(path)
  assert min(pixels.shape[:2]) > 300
  assert len(np.unique(pixels[..., :3].reshape(-1, 3), axis=0)) > 20
  return pixels


# ---- which runs belong together ----------------------------------------------


def test_runs_that_differ_in_their_seed_are_one_setting(tmp_path):
  for seed in (0, 1):
    for rate in (10.0, 0.5):
      folders.write(tmp_path / 'disk', f'{rate},{seed}', seed=seed, rate=rate)
  (sweep := tmp_path / 'sweep').mkdir()
  (sweep / 'linked').symlink_to(tmp_path / 'disk')
  (sweep / 'circle').symlink_to(sweep)
  settings = _settings(sweep)
  # Numbers in their order, not as texts.
  assert [s.values for s in settings] == [{'rate': '0.5'}, {'rate': '10.0'}]
  assert [s.label for s in settings] == ['rate=0.5', 'rate=10.0']
  assert [[run.seed for run in s.runs] for s in settings] == [['0', '1']] * 2


def test_divisions_of_the_records_are_repetitions(tmp_path):
  for repeat in (0, 1):
    folders.write(tmp_path, f'{repeat}', seed=0, user_model_repeat=repeat)
  (setting,) = _settings(tmp_path)
  found = [run.seed for run in setting.runs]
  assert found == ['0, division 0', '0, division 1']


def test_a_run_alone_is_named_after_its_algorithm(tmp_path):
  (setting,) = _settings(folders.write(tmp_path, 'a'))
  assert setting.label == 'fed_recon'


@pytest.mark.parametrize(
  ('one', 'other', 'said'),
  [
    ({'rate': 1}, {'rate': 2, 'seed': 1}, "differ in rate: '1' and '2'"),
    (
      {'more': {'data': {'name': 'ml-1m'}}},
      {'more': {'data': {'name': 'ml-100k'}}, 'seed': 1},
      'data: ml-1m and ml-100k. Name',
    ),
    ({'seed': 3}, {'seed': 3}, 'same seed 3.*not count twice'),
  ],
)
def test_runs_that_differ_are_not_averaged(tmp_path, one, other, said):
  folders.write(tmp_path, 'a', **one)
  folders.write(tmp_path, 'b', **other)
  with pytest.raises(AnalysisError, match=said):
    _settings(tmp_path, 'algorithm')


def test_missing_and_damaged_folders_are_refused(tmp_path):
  with pytest.raises(AnalysisError, match='no such folder'):
    _settings(tmp_path / 'nowhere')
  with pytest.raises(AnalysisError, match='no run here or below'):
    _settings(tmp_path)
  folder = folders.write(tmp_path, 'a')
  said = 'result.json: not the result of a run'
  texts = '{"test": {"unseen": null}}', '{"test": {"unseen": {}}, "data": 3}'
  for text in texts:
    (folder / 'result.json').write_text(text)
    with pytest.raises(AnalysisError, match=said):
      _settings(tmp_path)


# ---- tables ------------------------------------------------------------------


@pytest.fixture(name='sweep')
def fixture_sweep(tmp_path):
  """Two seeds of one rate; one of another, beside two that were lost."""
  folders.write(tmp_path, 'a0', rate=1, seed=0, rmse=0.8)
  folders.write(tmp_path, 'a1', rate=1, seed=1, rmse=1.0)
  folders.write(tmp_path, 'b0', rate=2, seed=0, rmse=0.7)
  folders.write(tmp_path, 'b1', rate=2, seed=1, rmse='inf', diverged=True)
  folders.write(tmp_path, 'b2', rate=2, seed=2, ended=False)
  folders.write(tmp_path, 'c0', rate=3, seed=0, rmse='nan', diverged=True)
  return tmp_path


def test_a_row_is_a_mean_over_seeds(sweep):
  table = tables.gather(_settings(sweep))
  assert table.settings == ('rate',)
  assert table.metrics == ('rmse',)
  frame = table.frame
  # 0.8 and 1.0 lie 0.1 around their mean: the root of (0.01 + 0.01) / (2 - 1).
  assert frame['rmse'][0] == pytest.approx(0.9)
  assert frame['rmse_std'][0] == pytest.approx(0.02**0.5)
  assert frame['rmse'][1] == pytest.approx(0.7)
  assert math.isnan(frame['rmse'][2])
  assert list(frame['seeds']) == [2, 1, 0]
  assert list(frame['diverged']) == [0, 1, 1]
  assert list(frame['unfinished']) == [0, 1, 0]


def test_a_seed_without_a_value_is_not_left_out_of_a_mean(tmp_path):
  for seed, auc in enumerate((0.7, 'nan', 'nan')):
    folders.write(tmp_path, f'a{seed}', seed=seed, rmse=auc)
  table = tables.gather(_settings(tmp_path))
  assert table.frame[['rmse', 'rmse_std']].isna().all(axis=None)
  assert table.to_markdown().splitlines()[-1].endswith('| 3 | - |')


def test_small_means_keep_their_digits(tmp_path):
  folders.write(tmp_path, 'a', seed=0, rmse=3.14159e-5)
  text = tables.gather(_settings(tmp_path)).to_markdown()
  assert text.endswith('| 1 | 3.142e-05 |')


def test_markdown_marks_what_was_lost(sweep):
  lines = tables.gather(_settings(sweep)).to_markdown().splitlines()
  assert lines[0] == '| rate | seeds | rmse |'
  assert lines[2:5] == [
    '| 1 | 2 | 0.9000 ± 0.1414 |',
    '| 2 | 1, 1 diverged, 1 unfinished | 0.7000 |',
    '| 3 | 0, 1 diverged | - |',
  ]
  assert lines[-3:] == [
    f'- {sweep / "b1"}: diverged',
    f'- {sweep / "b2"}: unfinished',
    f'- {sweep / "c0"}: diverged',
  ]


def test_the_result_of_fewer_rounds_is_in_no_mean(tmp_path):
  """A sweep was given more rounds, and killed in its last runs."""
  for seed, rounds, ended_by in (
    (0, 9, None),
    (1, 4, None),
    (2, 4, 'stopping'),
  ):
    more = {'rounds': rounds, 'ended_by': ended_by}
    of_run = {'seed': seed, 'rmse': float(rounds), 'more': more}
    folder = folders.write(tmp_path, f's{seed}', **of_run)
    with (folder / 'flags.txt').open('a') as file:
      file.write('--rounds=9\n')
  table = tables.gather(_settings(tmp_path))
  assert table.frame[['seeds', 'unfinished', 'rmse']].to_numpy().tolist() == [
    [2, 1, 6.5]
  ]
  assert [run.name for run in table.lost] == ['s1']


def test_csv_holds_the_same_numbers(sweep, tmp_path):
  table = tables.gather(_settings(sweep))
  path = tmp_path / 'table.csv'
  path.write_text(table.to_csv())
  read = pd.read_csv(path)
  assert list(read.columns) == list(table.frame.columns)
  np.testing.assert_allclose(read['rmse'], table.frame['rmse'])


def test_the_last_round_is_not_reported_as_the_best(sweep):
  best = {'round': None, 'test': {'unseen': {'rmse': 0.5}}}
  folders.write(sweep, 'b3', rate=2, seed=3, diverged=True, more={'best': best})
  assert tables.gather(_settings(sweep), of='best').frame['rmse'][0] == 0.5
  folders.write(sweep, 'b4', rate=2, seed=4, more={'best': best})
  with pytest.raises(AnalysisError, match='b4: no best round was chosen'):
    tables.gather(_settings(sweep), of='best')


def test_the_best_round_and_other_numbers_are_reported(sweep):
  settings = _settings(sweep)
  assert tables.gather(settings, of='best').frame['rmse'][0] == 0.5
  table = tables.gather(settings, metrics=['rmse', 'seconds/total'])
  assert table.frame['seconds/total'][0] == 7.5
  with pytest.raises(AnalysisError, match="'auc'.*seconds/total, .*rmse"):
    tables.gather(settings, metrics=['auc'])


def test_epsilon_stands_in_the_table_where_there_is_one(tmp_path):
  private = {'privacy': {'epsilon': 8.0, 'delta': 1e-5}}
  folders.write(tmp_path, 'a', more=private)
  table = tables.gather(_settings(tmp_path))
  assert table.metrics == ('rmse', 'privacy/epsilon')
  assert table.frame['privacy/epsilon'][0] == 8.0


def test_several_exams_are_told_apart(tmp_path):
  exams = {'seen': {'rmse': 0.8}, 'unseen': {'rmse': 0.9}}
  folders.write(tmp_path, 'a', more={'test': exams})
  table = tables.gather(_settings(tmp_path))
  assert table.metrics == ('seen rmse', 'unseen rmse')
  assert list(table.frame.loc[0, list(table.metrics)]) == [0.8, 0.9]


@pytest.mark.slow
def test_a_metric_over_a_setting(sweep, tmp_path):
  table = tables.gather(_settings(sweep))
  path = tables.draw_over(table, 'rate', 'rmse', tmp_path / 'over.png')
  _is_picture(path)
  for x, y in (('speed', 'rmse'), ('rate', 'auc')):
    with pytest.raises(AnalysisError, match='The table has no'):
      tables.draw_over(table, x, y, tmp_path / 'over.png')


# ---- curves ------------------------------------------------------------------


def test_empty_cells_are_no_values(tmp_path):
  (run,) = run_folders.find([folders.write(tmp_path, 'a')])
  read = curves.read(run, 'validation_rmse')
  assert read.values.to_dict() == {2: 1.5, 4: 1.1}


def test_the_band_is_one_deviation_over_common_rounds():
  traces = [
    curves.Trace(pd.Series([1.0, 2.0, 9.0], [1, 2, 3])),
    curves.Trace(pd.Series([3.0, 2.0], [1, 2])),
  ]
  mean, deviation = curves.mean_and_deviation(traces)
  assert mean.to_dict() == {1: 2.0, 2: 2.0}
  assert deviation.to_dict() == {1: pytest.approx(2**0.5), 2: 0.0}


def test_what_cannot_be_read_is_refused(tmp_path):
  folder = folders.write(tmp_path, 'a')
  (run,) = run_folders.find([folder])
  with pytest.raises(AnalysisError, match="no metric 'auc'.*loss"):
    curves.read(run, 'auc')
  (folder / 'metrics.csv').write_text('step,loss\n1,2\n')
  again = 'delete result.json beside it, and run the training'
  said = f'not a table with a row a round.*{again}'
  with pytest.raises(AnalysisError, match=said):
    curves.read(run, 'loss')
  (folder / 'metrics.csv').unlink()
  with pytest.raises(AnalysisError, match=f'no table of rounds.*{again}'):
    curves.read(run, 'loss')


@pytest.mark.slow
def test_curves_are_drawn_and_lost_runs_with_them(tmp_path):
  def line(last: int, state: str = 'done') -> curves.Trace:
    rounds = np.arange(1, last + 1)
    return curves.Trace(pd.Series(1.0 / rounds, rounds), state)

  def draw(name: str, *traces: curves.Trace) -> np.ndarray:
    path = tmp_path / name
    curves.draw({'fed_avg': traces}, path, metric='loss')
    return _is_picture(path)

  backend = matplotlib.get_backend()
  whole = draw('a.png', line(40), line(40))
  again = draw('b.png', line(40), line(40))
  np.testing.assert_array_equal(whole, again)
  lost = draw('c.png', line(40), line(40), line(20, 'diverged'))
  assert whole.shape != lost.shape or (whole != lost).any()
  assert matplotlib.get_backend() == backend
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['a.png', 'b.png', 'c.png']


def test_a_run_that_diverged_does_not_flatten_the_others(tmp_path, monkeypatch):
  seen = []

  def look(axes: Any) -> None:
    seen.append(axes.get_ylim())

  monkeypatch.setattr(figures, 'add_legend', look)
  traces = [
    curves.Trace(pd.Series([2.0, 1.0], [1, 2])),
    curves.Trace(pd.Series([2.0, 1e9], [1, 2]), 'diverged'),
  ]
  curves.draw({'a': traces}, tmp_path / 'a.png', metric='loss')
  ((low, high),) = seen
  assert 0.5 < low < 1.0 < 2.0 < high < 2.5


def _counted(**counted: Any) -> dict[str, Any]:
  download = {'download_parameters': 10, 'download_bytes': 40}
  upload = {'upload_parameters': 5, 'upload_bytes': 20}
  return {'communication': {**download, **upload, **counted}}


def _over(root: pathlib.Path, what: str) -> list[curves.Trace]:
  """Losses of the only setting over what has travelled."""
  (setting,) = _settings(root)
  traces = [curves.read(run, 'loss') for run in setting.runs]
  return curves.over_traffic(traces, setting.runs, what)


_OF_CLIENTS = 'round,loss,num_clients\n1,3.0,4\n2,2.0,6\n4,0.5,5\n'


def test_curves_are_put_over_what_has_travelled(tmp_path):
  for seed, by_rows in enumerate((4.0, 6.0)):
    more = _counted(upload_bytes_by_rows=by_rows)
    name = f'seed={seed}'
    folders.write(tmp_path, name, seed=seed, rounds=_OF_CLIENTS, more=more)
  folders.write(tmp_path, 'seed=2', seed=2, rounds=_OF_CLIENTS, ended=False)
  # Five clients a round load 10 parameters and send 5.
  over = _over(tmp_path, curves.PARAMETERS)
  assert [list(t.values.index) for t in over] == [[75.0, 150.0, 300.0]] * 2
  assert list(over[0].values) == [3.0, 2.0, 0.5]
  # They load 40 bytes, and send rows of 5 in the mean of both.
  over = _over(tmp_path, curves.BYTES)
  assert [list(t.values.index) for t in over] == [[225.0, 450.0, 900.0]] * 2


def test_clients_that_are_not_finite_load_and_send(tmp_path):
  rounds = 'round,loss,num_clients,num_not_finite\n1,3.0,3,1\n2,2.0,5,1\n'
  folders.write(tmp_path, 'run', rounds=rounds, more=_counted())
  (trace,) = _over(tmp_path, curves.PARAMETERS)
  assert list(trace.values.index) == [75.0, 150.0]


def test_clients_load_and_send_whether_they_count_or_are_waited_for(tmp_path):
  # Without query examples they send zeros; of 8 that load, 5 are joined.
  rounds = 'round,loss,num_clients,num_without_query\n1,3.0,5,\n2,2.0,3,2\n'
  more = {**_counted(), 'clients_asked': 8}
  folders.write(tmp_path, 'run', rounds=rounds, more=more)
  (trace,) = _over(tmp_path, curves.PARAMETERS)
  assert list(trace.values.index) == [8 * 10 + 5 * 5, 2 * (8 * 10 + 5 * 5)]


@pytest.mark.filterwarnings('error')
def test_a_setting_without_a_run_that_has_ended_has_no_curve(tmp_path):
  folders.write(tmp_path, 'run', rounds=_OF_CLIENTS, ended=False)
  assert _over(tmp_path, curves.BYTES) == []


@pytest.mark.parametrize(
  ('more', 'message'),
  [
    ({}, 'does not say what its clients load'),
    (_counted(upload_not_counted=['drafts/user']), r'size .*\(drafts/user\)'),
  ],
)
def test_traffic_that_was_not_counted_is_refused(tmp_path, more, message):
  folders.write(tmp_path, 'run', rounds=_OF_CLIENTS, more=more)
  with pytest.raises(AnalysisError, match=message):
    _over(tmp_path, curves.BYTES)


@pytest.mark.parametrize(
  ('metric', 'axis'),
  [
    ('validation_rmse', 'validation rmse (unit of the labels)'),
    ('accuracy', 'accuracy (0 to 1)'),
    ('seconds_round', 'seconds round (s)'),
    ('colour', 'colour'),
  ],
)
def test_axes_say_what_they_count_in(metric, axis):
  assert figures.axis_name(metric) == axis


# ---- the binary --------------------------------------------------------------


@pytest.mark.slow
def test_the_report_is_written(sweep, tmp_path):
  output = tmp_path / 'report'
  folders_of = f'--sweep_dir={sweep}', f'--report_dir={output}'
  command = commands.command('report', *folders_of, '--x=rate', '--y=rmse')
  outcome = commands.run_program(command)
  assert outcome.status == 0, outcome
  names = {'table.md', 'table.csv', 'curves.png', 'rmse_over_rate.png'}
  assert {path.name for path in output.iterdir()} == names
  assert (output / 'table.md').read_text() in outcome.output
  _is_picture(output / 'curves.png')


@pytest.mark.slow
def test_a_figure_of_a_metric_by_its_path_needs_no_folder(sweep, tmp_path):
  chosen = {'metrics': ('seconds/total',), 'x': 'rate'}
  report.main(report.Report(sweep_dir=(str(sweep),), **chosen))
  _is_picture(tmp_path / 'seconds_total_over_rate.png')


def test_the_report_draws_curves_over_bytes(tmp_path):
  folders.write(tmp_path, 'run', rounds=_OF_CLIENTS, more=_counted())
  output = tmp_path / 'report'
  folders_of = {'sweep_dir': (str(tmp_path),), 'report_dir': str(output)}
  report.main(report.Report(**folders_of, curve='loss', curve_over='bytes'))
  _is_picture(output / 'curves_over_bytes.png')
  assert not (output / 'curves.png').exists()


def test_the_report_warns_of_rows_of_other_examples(tmp_path, capsys):
  for rate, count in (1, 604), (2, 604), (3, 1296):
    more = {'test': {'unseen': {'rmse': 1.0, 'num_examples': count}}}
    flags = {'rate': rate, 'task': 'movielens'}
    folders.write(tmp_path, f'rate={rate}', more=more, **flags)
  report.main(report.Report(sweep_dir=(str(tmp_path),)))
  printed = capsys.readouterr().out
  assert "movielens: clients 'unseen' of seed 0 were not measured on" in printed
  assert 'do not compare: 604 by rate=1; 1,296 by rate=3.' in printed
  assert 'do not compare: 604 by rate=1; 604' not in printed


def test_the_report_counts_what_unfinished_private_runs_spent(tmp_path, capsys):
  private = {'privacy': {'epsilon': 8.0, 'delta': 1e-5}}
  folders.write(tmp_path, 'a', more=private, task='movielens')
  head = 'round,validation_rmse,privacy/epsilon,privacy/delta\n'
  killed = {'ended': False, 'task': 'movielens'}
  rows = head + '1,2.0,1.0,1e-05\n2,1.0,3.5,1e-05\n'
  folders.write(tmp_path, 'b', seed=1, rounds=rows, **killed)
  for seed, none in enumerate(('', head), 2):
    folders.write(tmp_path, f'c{seed}', seed=seed, rounds=none, **killed)
  report.main(report.Report(sweep_dir=(str(tmp_path),)))
  (tmp_path / 'planned.txt').touch()  # Of a sweep, of which one run is shown.
  report.main(report.Report(sweep_dir=(str(tmp_path / 'a'),)))
  said = '2 private runs on the same users cost epsilon 11.5 at'
  assert capsys.readouterr().out.count(said) == 2


def test_a_result_that_was_cut_off_is_that_of_an_unfinished_run(sweep, capsys):
  (sweep / 'a1' / 'result.json').write_text('{"seed": 0,')
  report.main(report.Report(sweep_dir=(str(sweep),)))
  table = capsys.readouterr().out
  assert '| 1 | 1, 1 unfinished | 0.8000 |' in table
  assert f'- {sweep / "a1"}: unfinished (its result.json is not JSON,' in table


def test_costs_to_other_users_are_not_added_up(tmp_path, capsys):
  for number, data in enumerate(('a.csv', 'far/b.csv', '/far/b.csv', 'c.csv')):
    spent = {'privacy': {'epsilon': 2.0**number, 'delta': 1e-5}}
    folders.write(tmp_path, str(number), more=spent, task='ratings', csv=data)
  # One of MovieLens 1M, and one that may be of it.
  of_ml = {'data': {'name': 'ml-1m'}, 'privacy': {'epsilon': 5.0, 'delta': 0.0}}
  folders.write(tmp_path, 'm1', more=of_ml, task='movielens')
  rows = 'round,privacy/epsilon,privacy/delta\n1,2.5,0\n'
  folders.write(tmp_path, 'm2', ended=False, rounds=rows, task='movielens')
  report.main(report.Report(sweep_dir=(str(tmp_path),), by=('folder',)))
  printed = capsys.readouterr().out
  assert 'ratings: a.csv: 1 private runs on the same users cost eps' in printed
  assert 'ratings: b.csv: 2 private runs on the same users cost eps' in printed
  assert 'ml-1m: 2 private runs on the same users cost epsilon 7.5 ' in printed


def test_curves_of_other_tasks_are_of_what_all_measured(tmp_path):
  folders.write(tmp_path, 'a', task='movielens')
  rounds = 'round,loss,validation_accuracy\n1,2.0,0.5\n'
  folders.write(tmp_path, 'b', task='emnist', rounds=rounds)
  rounds = 'round,loss,validation_rmse\n1,9.0,nan\n'
  folders.write(tmp_path, 'c', rate=9, rounds=rounds, diverged=True)
  runs = run_folders.find([tmp_path])
  assert curves.default_metric(run_folders.settings(runs)) == 'loss'
  alike = run_folders.settings(runs[::2])
  assert curves.default_metric(alike) == 'validation_rmse'
  assert curves.read(runs[2], 'validation_rmse').values.empty
