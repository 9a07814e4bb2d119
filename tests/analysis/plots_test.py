"""Plots of one run: its history in memory, and the figure drawn of it."""

import dataclasses
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.support import small_runs
from tests.support.commands import repeatable_rows
import tff_partial
from tff_partial import phases
from tff_partial.analysis import curves
from tff_partial.analysis import figures
from tff_partial.analysis.errors import AnalysisError
from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans
from tff_partial.training import metrics_log
from tff_partial.training import programs

pytestmark = pytest.mark.usefixtures('in_cohorts')


def _world(**options: Any) -> small_runs.World:
  model = small_runs.build_model()
  steps = tff_partial.Phase(max_steps=2)
  return small_runs.World(
    tff_partial.algorithms.build_fed_recon(
      model,
      reconstruct=steps,
      update=tff_partial.Phase(optimizer=phases.sgd(0.5)),
      **options,
    ),
    tff_partial.algorithms.build_fed_recon_eval(model, personalise=steps),
  )


@pytest.fixture(scope='module', name='world')
def fixture_world():
  return _world()


@pytest.fixture(scope='module', name='result')
def fixture_result(world):
  """Seven rounds in memory, of which 3, 6 and 7 are validated."""
  return world.train()


def _told(
  result: programs.TrainingResult, rounds: list[dict[str, Any]], best: Any
) -> programs.TrainingResult:
  """A result whose rounds went otherwise."""
  numbered = [
    metrics_log.entry(number, row) for number, row in enumerate(rounds, 1)
  ]
  return dataclasses.replace(result, history=numbered, best_round=best)


def _drawn(figure: figures.Figure) -> dict[str, dict[str, list[list[float]]]]:
  """By the vertical axis' name: each line's label to its points."""
  return {
    axes.get_ylabel(): {
      str(line.get_label()): np.transpose(line.get_data()).tolist()
      for line in axes.lines
    }
    for axes in figure.axes
    if axes.get_visible()
  }


# ---- history -----------------------------------------------------------------


def test_a_table_is_read_as_it_was_written():
  table = 'round,loss,is_odd,rmse\r\n1,0.1,True,\r\n2,nan,False,1e-07\r\n'
  first, second = metrics_log.read(table)
  assert first == {'round': 1, 'loss': 0.1, 'is_odd': True}
  assert math.isnan(second.pop('loss'))
  assert second == {'round': 2, 'is_odd': False, 'rmse': 1e-7}
  assert [type(value) for value in second.values()] == [int, bool, float]
  assert metrics_log.read('') == []


def test_a_run_in_memory_has_a_history(result):
  assert [entry['round'] for entry in result.history] == [1, 2, 3, 4, 5, 6, 7]
  assert result.history[-1]['loss'] == result.train['loss']
  validated = {
    entry['round']: entry['validation_mae']
    for entry in result.history
    if 'validation_mae' in entry
  }
  assert list(validated) == [3, 6, 7]
  assert validated[7] == result.validation['mae']
  assert validated[result.best_round] == result.best_validation['mae']
  assert 'history' not in repr(result)


def test_a_run_that_goes_on_has_its_whole_history(world, result, tmp_path):
  def repeatable(one: programs.TrainingResult) -> list[dict[str, Any]]:
    return [
      {name: v for name, v in entry.items() if not name.startswith('seconds')}
      for entry in one.history
    ]

  world.killed(6, output_dir=tmp_path)
  resumed = world.train(output_dir=tmp_path)
  # Bit for bit, though rounds 1 to 3 were read from the checkpoint's text.
  assert repeatable(resumed) == repeatable(result)
  # So does one in which nothing was left to do.
  again = world.train(output_dir=tmp_path)
  assert list(again.history) == list(resumed.history)
  assert len(repeatable_rows(tmp_path)) == len(again.history)


# ---- the figure --------------------------------------------------------------


def test_a_plot_has_a_panel_for_each_metric_that_was_validated(result):
  told = _told(
    result,
    [
      {'loss': 4.0, 'mae': 2.0, 'num_clients': 4},
      {'loss': 2.0, 'mae': 1.5, 'num_clients': 4, 'validation_loss': 3.0},
      {'loss': 1.0, 'mae': 1.0, 'validation_loss': 2.5, 'validation_mae': 0.5},
    ],
    best=3,
  )
  drawn = _drawn(curves.of_result(told))
  assert list(drawn) == ['loss (mean per example)', 'mae (unit of the labels)']
  loss, mae = drawn.values()
  assert loss['training'] == [[1, 4.0], [2, 2.0], [3, 1.0]]
  assert loss['validation'] == [[2, 3.0], [3, 2.5]]
  assert loss['best round'] == [[3, 0], [3, 1]]  # From foot to head.
  assert mae['training'] == [[1, 2.0], [2, 1.5], [3, 1.0]]
  assert mae['validation'] == [[3, 0.5]]


def test_rounds_without_a_finite_value_are_left_out(result):
  told = _told(
    result, [{'loss': math.nan}, {'loss': 2.0}, {'loss': math.inf}], best=None
  )
  assert _drawn(curves.of_result(told)) == {
    'loss (mean per example)': {'training': [[2, 2.0]]}
  }


def test_metrics_can_be_chosen(result):
  drawn = _drawn(curves.of_result(result, ['num_clients', 'seconds_round']))
  assert list(drawn) == ['num clients', 'seconds round (s)']
  # Four panels take two lines of three, of which two places stay empty.
  figure = curves.of_result(result, ['loss', 'mae', 'loss', 'mae'])
  shown = [axes.get_visible() for axes in figure.axes]
  assert shown == [True, True, True, True, False, False]


def test_a_metric_that_was_not_measured_is_refused(result):
  with pytest.raises(AnalysisError, match='draw of rmse: .*loss, mae, num_'):
    curves.of_result(result, ['loss', 'rmse'])


def test_a_run_without_anything_to_draw_says_what_there_is(result):
  told = _told(result, [{'seconds_round': 0.1}], best=None)
  said = 'draw of the run: .* are seconds_round'
  with pytest.raises(AnalysisError, match=said):
    curves.of_result(told)


# ---- private runs ------------------------------------------------------------


@pytest.mark.slow
def test_a_private_run_has_and_shows_what_it_publishes():
  sizes = {'population': 12, 'clients_per_round': 4, 'rounds': 2}
  plan = privacy_plans.plan(
    clipping.FixedClip(1.0), noise_multiplier=1.0, delta=1e-3, **sizes
  )
  alike = tff_partial.ClientWeighting.UNIFORM
  world = _world(aggregation=tff_partial.Aggregation(plan.mean(), alike))
  ledger = privacy_plans.PrivacyLedger(plan)
  result = world.train(privacy=ledger, rounds=2)
  for entry in result.history:
    assert 'privacy/epsilon' in entry
    assert not {'loss', 'mae', 'num_clients', 'num_examples'} & set(entry)
    assert not [name for name in entry if name.endswith('_not_private')]
  drawn = _drawn(curves.of_result(result))
  assert [list(panel) for panel in drawn.values()] == [
    ['validation', 'best round'],
    ['validation', 'best round'],
    ['training', 'best round'],
  ]
  epsilon = drawn['privacy epsilon (of differential privacy)']
  assert epsilon['training'][-1] == [2, result.privacy['epsilon']]


def test_diagnostics_of_a_private_run_are_drawn_as_what_they_are(result):
  rounds = [{'loss_not_private': 2.0, 'privacy/epsilon': 1.0}]
  drawn = _drawn(curves.of_result(_told(result, rounds, best=None)))
  of_loss = drawn['loss (mean per example)']
  assert of_loss == {'training, not private': [[1, 2.0]]}


@pytest.mark.filterwarnings('error')
def test_long_labels_leave_the_axes_their_width(tmp_path, monkeypatch):
  saved = []
  monkeypatch.setattr(
    figures, 'save', lambda figure, path: saved.append(figure)
  )
  curve = curves.Trace(pd.Series([0.5, 0.4], [1, 2]))
  for label in ('a', 'reconstruction_learning_rate=0.001, ' * 5):
    curves.draw({label: [curve]}, tmp_path / 'curves.png', metric='loss')
    saved[-1].savefig(tmp_path / 'curves.png')
  short, long = (figure.axes[0].get_position().width for figure in saved)
  assert long == short > 0.7
