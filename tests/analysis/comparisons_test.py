"""Comparisons of methods over seeds: what a reader can redo by hand."""

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from scipy import stats
import tensorflow as tf

import tff_partial
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import sgd
from tff_partial.analysis import comparing
from tff_partial.analysis.comparisons import Comparison
from tff_partial.analysis.errors import AnalysisError
from tff_partial.data import splits
from tff_partial.training.errors import ProgramError


def _invented(higher_is_better=True) -> Comparison:
  """Two methods, three seeds and twenty clients; the second is better by .1."""
  draw = np.random.default_rng(0)
  runs, clients, history = [], [], []
  for seed in range(3):
    of_first = draw.uniform(0, 0.5, 20)
    for method, gain in (('one', 0.0), ('other', 0.1)):
      own = of_first + gain
      if method == 'other':
        own[:5] -= 0.3  # A quarter of the clients are worse off.
      run = {'method': method, 'seed': seed}
      names = [f'c{k}' for k in range(20)]
      clients.append(pd.DataFrame({'client': names, 'accuracy': own, **run}))
      runs.append({**run, 'accuracy': 0.5 + gain + 0.01 * seed * (1 + gain)})
      history += [{**run, 'round': k, 'loss': 1 / k} for k in (1, 2)]
  costs = {'download_bytes': 2_000, 'upload_bytes': 1_000, 'seconds_round': 0.5}
  costs |= {'setting': '', 'num_settings': 1}
  return Comparison(
    'accuracy',
    higher_is_better,
    pd.DataFrame(runs).assign(diverged=False, best_round=None, **costs),
    pd.concat(clients, ignore_index=True),
    pd.DataFrame(history),
  )


def test_summary_by_hand() -> None:
  found = _invented()
  table = found.table()
  assert list(table.index) == ['one', 'other']
  assert table.loc['one', 'mean'] == pytest.approx(0.51)
  assert table.loc['one', 'std'] == pytest.approx(0.01)
  # Student's t with two degrees of freedom: 4.303.
  assert table.loc['one', 'ci95'] == pytest.approx(4.3027 * 0.01 / 3**0.5, 1e-4)
  assert table.loc['other', 'difference'] == pytest.approx(0.101)
  expected = stats.ttest_1samp([0.1, 0.101, 0.102], 0).pvalue
  assert table.loc['other', 'p'] == pytest.approx(expected)
  assert np.isnan(table.loc['one', 'hurt'])
  assert table.loc['other', 'hurt'] == pytest.approx(0.25)
  assert '0.611 ± 0.011' in repr(found)
  own = found.clients[found.clients['method'] == 'one']
  worst = own.groupby('seed')['accuracy'].apply(lambda x: np.sort(x)[:2].mean())
  assert table.loc['one', 'worst_decile'] == pytest.approx(worst.mean())


def test_lower_may_be_better() -> None:
  found = _invented(higher_is_better=False)
  assert found.table().loc['other', 'hurt'] == pytest.approx(0.75)
  assert '**0.510 ± 0.010**' in found.to_markdown()


def test_table_as_text() -> None:
  found = _invented()
  one, other = found.to_markdown().splitlines()[2:]
  assert one.startswith('| one | 0.510 ± 0.010 |  | ')
  assert other.startswith('| other | **0.611 ± 0.011** | +0.101 (p = ')
  assert '| 25% | 1.0 | 0.50 |' in other
  latex = found.to_latex()
  assert r'\textbf{0.611 $\pm$ 0.011}' in latex and r'25\%' in latex
  assert latex.count(r'\\') == 3


def test_rounding_makes_no_difference_and_hides_none() -> None:
  runs = _invented().runs.query('seed < 2')
  # In float32, as Keras measures: the other is better by 0.0005 both times.
  measured = np.float32([0.0012, 0.0017, 0.0085, 0.009]).astype(float)
  runs = runs.assign(accuracy=measured)
  found = dataclasses.replace(_invented(), runs=runs)
  assert np.isnan(found.table().loc['other', 'p'])
  assert '| +0.00050 |' in found.to_markdown()


def test_names_with_signs_stay_in_their_cell() -> None:
  found = _invented()
  for frame in (found.runs, found.clients):
    frame['method'] = frame['method'].replace('one', r'a|b_{\c}^2~$1')
  assert r'| a\|b_{\c}^2~$1 | 0.510' in found.to_markdown()
  said = r'a|b\_\{\textbackslash{}c\}\textasciicircum{}2\textasciitilde{}\$1 & '
  assert f'{said}0.510' in found.to_latex()


def test_a_run_without_a_number_is_in_no_mean_and_counted() -> None:
  found = _invented()
  lost = (found.runs['method'] == 'other') & (found.runs['seed'] == 2)
  found.runs.loc[lost, ['accuracy', 'diverged']] = [np.nan, True]
  row = found.table().loc['other']
  assert row['diverged'] == 1 and row['mean'] == pytest.approx(0.6055)
  assert '**0.605 ± 0.008** (1 diverged)' in found.to_markdown()
  found.runs.loc[lost, 'diverged'] = False  # Such as the AUC of one class.
  assert '**0.605 ± 0.008** (1 undefined)' in found.to_markdown()


def test_curves_are_of_what_was_recorded_by_runs_that_did_not_diverge() -> None:
  found = _invented()
  for frame, column, value in (
    (found.history, 'loss', 1e6),
    (found.runs, 'diverged', True),
  ):
    lost = (frame['method'] == 'other') & (frame['seed'] == 2)
    frame.loc[lost, column] = value
  axes = found.draw('loss').axes[0]
  assert axes.get_xlabel() == 'round'
  labels = ['one', 'other (1 diverged)']
  for line, label in zip(axes.lines, labels, strict=True):
    assert line.get_label() == label
    np.testing.assert_array_equal(line.get_ydata(), [1.0, 0.5])
  with pytest.raises(AnalysisError, match=r"'price'. Choose one of \['loss'\]"):
    _invented().draw('price')


_X = np.random.default_rng(0).normal(size=[4, 10, 2]).astype(np.float32)
_DATA = {f'c{k}': {'x': x, 'y': x[:, :1] * k} for k, x in enumerate(_X)}


_LOSS = {'metric': 'loss', 'higher_is_better': False}


def _pack(spec):
  return tff_partial.pack(_DATA, spec)


def _method(build, measure):
  def of_seed(seed):
    model = tff_partial.from_keras(
      lambda: tf.keras.Sequential(
        [tf.keras.Input([2]), tf.keras.layers.Dense(1, name='own')]
      ),
      loss='mse',
      seed=seed,
    )
    return build(model, training=Phase(optimizer=sgd(0.1))), measure(model)

  return of_seed


@pytest.mark.slow
def test_methods_are_trained_and_tested(tmp_path, caplog) -> None:
  """A run that was stopped goes on: the same numbers, of all methods."""
  methods = {
    'FedAvg': _method(algorithms.build_fed_avg, algorithms.build_fed_avg_eval),
    'Ditto (own)': _method(
      lambda model, training: algorithms.build_ditto(
        model, training=training, personal=training
      ),
      algorithms.build_ditto_eval,
    ),
  }

  def compare(rounds, folder):
    return tff_partial.compare(
      methods,
      _pack,
      rounds=rounds,
      clients_per_round=4,
      seeds=[0, 1],
      output_dir=tmp_path / folder,
      show_progress=False,
      **_LOSS,
    )

  compare(3, 'parts')
  parts, whole = compare(6, 'parts'), compare(6, 'whole')
  pd.testing.assert_series_equal(parts.runs['loss'], whole.runs['loss'])
  pd.testing.assert_frame_equal(parts.clients, whole.clients)
  assert (tmp_path / 'parts' / 'ditto_own' / 'seed_1').is_dir()
  assert len(whole.clients) == 2 * 2 * 4
  table = whole.table()
  assert table['difference']['Ditto (own)'] < 0
  assert table['upload_bytes']['FedAvg'] == 12
  assert not caplog.records
  assert (compare(6, 'whole').runs['seconds_round'] > 0).all()
  methods['Ditto (own)'] = _method(
    algorithms.build_fed_avg,
    lambda model: algorithms.build_fed_avg_eval(model, split=splits.first(4)),
  )
  compare(1, 'unlike')
  assert '40 by FedAvg, 24 by Ditto (own)' in caplog.text


def _at(rate, made):
  """FedAvg at a rate, that notes its seeds."""

  def build(model, training):
    del training
    return algorithms.build_fed_avg(model, training=Phase(optimizer=sgd(rate)))

  of_seed = _method(build, algorithms.build_fed_avg_eval)

  def noted(seed):
    made.append(seed)
    return of_seed(seed)

  return noted


@pytest.mark.slow
def test_the_best_setting_by_validation_is_repeated(tmp_path, caplog) -> None:
  """Labels of the tests are negated: there the worst setting has least loss."""
  seeds: dict[float, list[int]] = {0.001: [], 0.1: [], 1e4: []}
  methods = {
    'FedAvg': _at(0.001, []),
    'tuned': {f'rate {rate}': _at(rate, seeds[rate]) for rate in seeds},
  }

  def negated(spec):
    held = {k: {'x': of['x'], 'y': -of['y']} for k, of in _DATA.items()}
    return tff_partial.pack(held, spec)

  found = tff_partial.compare(
    methods,
    _pack,
    rounds=4,
    clients_per_round=4,
    validation=_pack,
    test=negated,
    evaluate_every=2,
    output_dir=tmp_path,
    **_LOSS,
  )
  assert seeds == {0.001: [0], 0.1: [0, 1, 2], 1e4: [0]}
  assert '1 of FedAvg, 3 of tuned' in caplog.text
  assert (tmp_path / 'tuned' / 'rate_0_1' / 'seed_2').is_dir()
  table = found.table()
  assert table['mean']['tuned'] > table['mean']['FedAvg']
  assert '| rate 0.1 (of 3) |' in found.to_markdown()


@pytest.mark.parametrize(
  ('counted', 'up'),
  [
    ({'upload_not_counted': ['d']}, np.nan),
    ({'upload_bytes_by_rows': 2.5}, 2.5),
    ({'upload_bytes_by_rows': 2.5, 'upload_not_counted': ['d']}, np.nan),
  ],
)
def test_bytes_are_of_what_is_counted(monkeypatch, counted, up) -> None:
  sent = {'download_bytes': 8, 'upload_bytes': 4, **counted}
  monkeypatch.setattr(comparing, 'communication', lambda *_: sent)
  result = mock.MagicMock(history=[{'seconds_round': 1.0}])
  costs = comparing._costs(comparing._Run(None, None, result))
  assert costs['download_bytes'] == 8
  np.testing.assert_equal(costs['upload_bytes'], up)


def _one_method(
  metric='loss', build_eval=algorithms.build_fine_tuning_eval, **settings
) -> tuple[Comparison, Any, Any]:
  """One run of seed 1, with its process and its evaluation."""
  made = []
  tune = Phase(optimizer=sgd(0.1), batch_size=1, shuffle=True)

  def method(seed):
    build = _method(
      algorithms.build_fed_avg,
      lambda model: build_eval(model, personalise=tune, **settings),
    )
    made.extend(build(seed))
    return made

  sizes = {**_LOSS, 'metric': metric, 'rounds': 1, 'clients_per_round': 2}
  found = tff_partial.compare({'tuned': method}, _pack, seeds=[1], **sizes)
  return found, *made


def test_a_metric_that_is_not_one_number_is_refused_before_training() -> None:
  with pytest.raises(ProgramError, match="no metric 'price' of one number"):
    _one_method('price')


def test_a_process_that_should_measure_is_refused_before_training() -> None:
  def build(model, personalise):
    return algorithms.build_fed_avg(model, training=personalise)

  with pytest.raises(ProgramError, match=r'EvaluationSet\(evaluation=\)'):
    _one_method(build_eval=build)


@pytest.mark.slow
def test_a_run_whose_test_loses_most_clients_has_diverged() -> None:
  """The mean over the few that are left would be of other clients."""

  def tuned(model):
    phase = Phase(optimizer=sgd(1e3), epochs=60)
    return algorithms.build_fine_tuning_eval(model, personalise=phase)

  found = tff_partial.compare(
    {'too fast': _method(algorithms.build_fed_avg, tuned)},
    _pack,
    rounds=1,
    clients_per_round=4,
    seeds=[0],
    **_LOSS,
  )
  assert found.runs['diverged'].all() and found.runs['loss'].isna().all()
  assert found.clients.empty


@pytest.mark.slow
def test_clients_are_tested_with_the_seed_of_the_run() -> None:
  found, process, evaluation = _one_method()
  clients = tff_partial.pack(_DATA, evaluation.example_spec)
  weights = tff_partial.train(
    process, clients, rounds=1, clients_per_round=2, seed=1
  ).weights
  tests = tff_partial.EvaluationSet(evaluation, clients)
  zero, one = (
    tff_partial.evaluate(tests, weights, seed=seed) for seed in (0, 1)
  )
  assert zero['loss'] != one['loss'] == found.runs['loss'][0]


@pytest.mark.slow
def test_where_no_client_is_measured_there_is_no_number() -> None:
  found, *_ = _one_method(split=splits.first(99))
  assert np.isnan(found.table().loc['tuned', 'mean'])
  assert found.runs['num_examples'][0] == 0 and not len(found.clients)


@pytest.mark.parametrize(
  ('given', 'problem'),
  [
    ({'seeds': 2}, 'seeds: expected a list such as .* found a int'),
    ({'methods': [print]}, 'methods: expected functions by name, .* a list'),
    ({'methods': {'a': (1, 2)}}, r"methods\['a'\]: expected `lambda seed: "),
    ({'methods': {'a': {'b': 1}}}, r"methods\['a'\]\['b'\]: expected `lambda "),
    (
      {'methods': {'a': {'b': print, 'c': print}}},
      'Give `validation`, clients',
    ),
    ({'test': pd.DataFrame()}, 'test: expected `lambda spec: .* a DataFrame'),
  ],
)
def test_values_in_place_of_functions_are_refused(given, problem):
  settings = {'methods': {'a': print}, 'clients': print, **_LOSS, **given}
  with pytest.raises(AnalysisError, match=problem):
    tff_partial.compare(rounds=1, clients_per_round=1, **settings)


@pytest.mark.parametrize(
  ('names', 'seeds', 'problem'),
  [
    ([], [0], 'at least one method'),
    (['Global'], [0, 1, 0], r'seeds=\[0, 1, 0\]: give each seed once'),
    (['Global', 'Global+'], [0], "'Global', 'Global\\+' would .* 'global'"),
  ],
)
def test_what_cannot_be_compared_is_refused(names, seeds, problem, tmp_path):
  settings = {**_LOSS, 'rounds': 1, 'clients_per_round': 1, 'seeds': seeds}
  with pytest.raises(AnalysisError, match=problem):
    tff_partial.compare(
      dict.fromkeys(names), lambda spec: None, output_dir=tmp_path, **settings
    )
