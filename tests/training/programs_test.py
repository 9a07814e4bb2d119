"""Laws of programs: a run is a function of its arguments, whatever happens."""

import asyncio
from collections.abc import Callable
import json
import math
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import small_runs
from tests.support.commands import files
from tests.support.commands import repeatable_rows
from tests.support.small_clients import real_examples
import tff_partial
from tff_partial import errors
from tff_partial.composition import Aggregation
from tff_partial.data import cohorts
from tff_partial.data import packing
from tff_partial.data import vocabularies
from tff_partial.training import callbacks
from tff_partial.training import checkpoints
from tff_partial.training import evaluation_sets
from tff_partial.training import fingerprints
from tff_partial.training import metrics_log
from tff_partial.training import programs
from tff_partial.training import run_settings
from tff_partial.training import run_state
from tff_partial.training import sampling
from tff_partial.training.errors import ProgramError
from tff_partial.training.errors import RunError


@pytest.fixture(scope='module', autouse=True, name='runtime')
def fixture_runtime():
  with tff_partial.runtimes.cohort(jit=False) as context:
    yield context


@pytest.fixture(scope='module', name='plain')
def fixture_plain():
  return small_runs.reconstruction()


_STATEFUL: dict[str, Any] = {
  'aggregation': Aggregation(tff.learning.robust_aggregator()),
  'server_optimizer': tff.learning.optimizers.build_adam(0.1),
}


@pytest.fixture(scope='module', name='world')
def fixture_world():
  """A process of which every part has a state that changes in each round."""
  return small_runs.reconstruction(**_STATEFUL)


@pytest.fixture(scope='module', name='whole')
def fixture_whole(world, tmp_path_factory):
  """The result of a run that nobody interrupted, and its folder."""
  folder = tmp_path_factory.mktemp('whole')
  return world.train(output_dir=folder), folder


# ---- a run is a function of its arguments ------------------------------------


@pytest.mark.slow
def test_without_a_folder_nothing_is_written(
  world, whole, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  small_runs.assert_same(world.train(), whole[0])
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_may_start_inside_a_running_loop(world, whole, tmp_path):
  async def in_a_notebook():
    return world.train(output_dir=tmp_path)

  small_runs.assert_same(asyncio.run(in_a_notebook()), whole[0])


@pytest.mark.slow
def test_what_a_run_writes(whole):
  result, folder = whole
  left = sorted(path.name for path in folder.iterdir())
  assert left == ['checkpoints', 'metrics.csv']
  rows = repeatable_rows(folder)
  assert [row['round'] for row in rows] == list('1234567')
  header = (folder / 'metrics.csv').read_text().splitlines()[0].split(',')
  assert header[0] == 'round'
  assert 'seconds_round' in header
  assert {'loss', 'mae', 'num_clients', 'num_examples'} < set(header)
  assert all(row['num_clients'] == '4' for row in rows)
  # Validation: every third round, and the last.
  measured = [row['round'] for row in rows if row['validation_mae']]
  assert measured == ['3', '6', '7']
  assert float(rows[-1]['validation_mae']) == result.validation['mae']
  assert float(rows[-1]['loss']) == result.train['loss']
  assert result.rounds == 7
  assert not result.diverged
  assert result.seconds['total'] >= result.seconds['first_round'] > 0
  assert result.seconds['per_round_median'] > 0


# ---- a run that is killed goes on --------------------------------------------


def _saved(folder: Any) -> list[str]:
  return sorted(path.name for path in (folder / 'checkpoints').iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
  ('every', 'at', 'saved', 'repeated'),
  [
    # By default in each round that is evaluated.
    (None, 1, [], 7),
    (None, 3, [], 7),
    (None, 4, ['round_3'], 4),
    (None, 5, ['round_3'], 4),
    (None, 7, ['round_3', 'round_6'], 1),
    (2, 6, ['round_2', 'round_4'], 3),
    (5, 7, ['round_5'], 2),
    (100, 7, [], 7),
  ],
)
def test_killed_in_any_round(
  world, whole, tmp_path, every, at, saved, repeated
):
  result, folder = whole
  world.killed(at, output_dir=tmp_path, checkpoint_every=every)
  assert _saved(tmp_path) == saved
  clients = small_runs.Spy(world.clients)
  again = world.train(
    output_dir=tmp_path, clients=clients, checkpoint_every=every
  )
  small_runs.assert_same(again, result)
  assert repeatable_rows(tmp_path) == repeatable_rows(folder)
  # It went on from the last checkpoint and did not begin anew.
  assert len(clients.cohorts) == repeated


@pytest.mark.slow
def test_the_runtime_chooses_again_what_it_chose(
  world, tmp_path, monkeypatch, runtime
):
  recalled: list[dict[str, bool]] = []
  monkeypatch.setattr(type(runtime), 'choices', {'some loop': True})
  monkeypatch.setattr(runtime, 'recall', recalled.append, raising=False)
  world.train(output_dir=tmp_path, rounds=1)
  assert not recalled
  world.train(output_dir=tmp_path, rounds=2)
  programs.load(world.process, tmp_path)
  assert recalled == [{'some loop': True}] * 2


@pytest.mark.slow
def test_another_process_is_refused(plain, world, tmp_path):
  plain.train(output_dir=tmp_path, rounds=2)
  before = (tmp_path / 'metrics.csv').read_bytes()
  for attempt in (
    lambda: world.train(output_dir=tmp_path),
    lambda: programs.load(world.process, tmp_path),
  ):
    with pytest.raises(RunError, match='another model'):
      attempt()
  assert (tmp_path / 'metrics.csv').read_bytes() == before
  plain.train(output_dir=tmp_path, rounds=3)


def _others(*given: Any) -> Callable[[small_runs.World], dict[str, Any]]:
  """Training with other clients."""
  return lambda world: {
    'clients': small_runs.pack(world.process.example_spec, *given)
  }


@pytest.mark.parametrize(
  ('settings', 'expected'),
  [
    (lambda _: {'seed': 1}, 'seed was 0 and is now 1'),
    (
      lambda _: {'select': programs.Selection('mae')},
      "select was Selection.metric='loss'",
    ),
    (
      _others('train', 11),
      'clients: they were 12 clients and are now 11 clients',
    ),
    (_others('others', 12), 'clients: they are as many, but have other ids'),
    (_others('train', 12, 1.01), "the clients' examples are others"),
    (lambda _: {'validation': None}, 'validation evaluation: there is none'),
  ],
)
def test_another_run_is_refused_and_what_differs_is_named(
  world, whole, tmp_path, settings, expected
):
  _, folder = whole
  copy = tmp_path / 'copy'
  shutil.copytree(folder, copy)
  before = files(copy)
  given = settings(world)
  attempts = [lambda: world.train(output_dir=copy, rounds=9, **given)]
  if list(given) == ['clients']:
    attempts.append(lambda: programs.load(world.process, copy, **given))
  for attempt in attempts:
    with pytest.raises(ProgramError, match=expected) as caught:
      attempt()
    assert str(copy) in str(caught.value)
    assert files(copy) == before


@pytest.mark.slow
def test_another_process_of_the_same_shapes_is_refused(world, whole):
  _, folder = whole
  # With more epochs.
  slower = small_runs.reconstruction(update_epochs=2, **_STATEFUL)
  slower.clients, slower.validation = world.clients, world.validation
  for attempt in (
    lambda: slower.train(output_dir=folder),
    lambda: programs.load(slower.process, folder),
  ):
    with pytest.raises(
      ProgramError,
      match='a phase of the process was epochs 1 and is now epochs 2',
    ):
      attempt()


def test_vocabularies_on_a_full_disk_are_named(world, tmp_path, monkeypatch):
  def full(*_):
    raise OSError(28, 'No space left on device')

  films = {'film': vocabularies.Vocabulary('ab')}
  monkeypatch.setattr(world.clients, 'vocabularies', films)
  monkeypatch.setattr(vocabularies, 'save', full)
  with pytest.raises(RunError, match='Cannot write to .*No space left.* make'):
    world.train(output_dir=tmp_path)


def test_clients_with_other_ids_for_values_are_refused(world, monkeypatch):
  train, held = world.clients, world.validation.clients
  monkeypatch.setattr(
    train, 'vocabularies', {'a': vocabularies.Vocabulary('xy')}
  )
  for values in ('xz', 'y'):
    other = {'a': vocabularies.Vocabulary(values), 'b': None}
    monkeypatch.setattr(held, 'vocabularies', other)
    with pytest.raises(
      vocabularies.VocabularyError, match="Column 'a': .* two v"
    ):
      world.train(rounds=1)


def test_a_folder_says_in_what_order_vectors_have_their_columns(
  world, tmp_path, monkeypatch
):
  train, held = world.clients, world.validation
  monkeypatch.setattr(train, 'columns', {'x': ['age', 'height']})
  world.train(output_dir=tmp_path, rounds=1)
  saved = programs.load(world.process, tmp_path)
  monkeypatch.setattr(held.clients, 'columns', {'x': ['height', 'age']})
  with pytest.raises(vocabularies.VocabularyError, match='x: .* in the order'):
    programs.evaluate(held, saved, client_store=saved.best_client_store)


def test_a_folder_in_use_is_named_before_a_run_begins(
  world, tmp_path, monkeypatch
):
  monkeypatch.setattr(run_state, 'Run', None)
  events = checkpoints.EventLoop()
  held = checkpoints.Checkpoints(tmp_path / 'checkpoints', events)
  with pytest.raises(RunError, match='another process'):
    world.train(output_dir=tmp_path)
  held.close()
  events.close()
  monkeypatch.undo()
  world.train(output_dir=tmp_path, rounds=1)


# ---- cohorts -----------------------------------------------------------------


def test_cohorts_are_those_of_the_sampler(world):
  clients = small_runs.Spy(world.clients)
  world.train(clients=clients, oversample=1.5, dropout_rate=0.4, seed=3)
  sampler = sampling.CohortSampler(world.clients.client_ids, 4, 3, 1.5, 0.4)
  rounds = range(1, small_runs.ROUNDS + 1)
  assert clients.cohorts == [tuple(sampler.cohort(n)) for n in rounds]
  assert len({len(cohort) for cohort in clients.cohorts}) > 1


@pytest.mark.slow
def test_rounds_without_clients_leave_the_weights_alone(plain, tmp_path):
  def sizes(seed: int) -> list[int]:
    sampler = sampling.CohortSampler(
      plain.clients.client_ids, 1, seed, dropout_rate=0.6
    )
    return [len(sampler.cohort(number)) for number in (1, 2, 3, 4)]

  seed = next(seed for seed in range(1000) if sizes(seed) == [1, 0, 0, 1])
  results = [
    plain.train(
      output_dir=tmp_path,
      rounds=rounds,
      seed=seed,
      clients_per_round=1,
      dropout_rate=0.6,
    )
    for rounds in (1, 2, 3, 4)
  ]
  weights = [small_runs.flat(result.weights) for result in results]
  assert weights[0] == weights[1] == weights[2] != weights[3]
  rows = repeatable_rows(tmp_path)
  assert ''.join(row['num_clients'] for row in rows) == '1001'
  assert not any(result.diverged for result in results)


# ---- the best round ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('higher_is_better', [False, True])
@pytest.mark.parametrize('metric', ['loss', 'mae'])
def test_the_best_round_is_kept(world, tmp_path, metric, higher_is_better):
  result = world.train(
    output_dir=tmp_path,
    rounds=12,
    select=programs.Selection(metric, higher_is_better),
  )
  measured = {
    int(row['round']): float(row[f'validation_{metric}'])
    for row in repeatable_rows(tmp_path)
    if row[f'validation_{metric}']
  }
  choose = max if higher_is_better else min
  assert result.best_round == choose(measured, key=measured.__getitem__)
  assert result.best_validation[metric] == measured[result.best_round]
  for weights, expected in (
    (result.best_weights, result.best_validation),
    (result.weights, result.validation),
  ):
    assert programs.evaluate(world.validation, weights) == expected
  until = world.train(rounds=result.best_round)
  assert small_runs.flat(until.weights) == small_runs.flat(result.best_weights)


@pytest.mark.slow
def test_a_run_with_more_rounds_forgets_that_an_earlier_one_was_its_last(
  plain, tmp_path
):
  short = plain.train(output_dir=tmp_path, rounds=7)
  assert short.best_round == 7
  assert small_runs.flat(short.best_weights) == small_runs.flat(short.weights)
  again = plain.train(output_dir=tmp_path, rounds=7)
  small_runs.assert_same(again, short)
  # Without what was measured after round 7, round 8 is the best.
  longer = plain.train(output_dir=tmp_path, rounds=8)
  whole = plain.train(output_dir=tmp_path / 'whole', rounds=8)
  small_runs.assert_same(longer, whole)
  assert longer.best_round == 8
  assert repeatable_rows(tmp_path) == repeatable_rows(tmp_path / 'whole')
  assert longer.history[6].keys() == whole.history[6].keys()


def test_without_validation_the_last_round_is_the_best(world):
  result = world.train(validation=None)
  assert result.best_round is None
  assert result.validation is None
  assert small_runs.flat(result.best_weights) == small_runs.flat(result.weights)


def _measured(rmse: float, lost: int = 0, clients: int = 9) -> dict[str, Any]:
  return {'rmse': rmse, 'num_not_finite': lost, 'num_clients': clients}


@pytest.mark.parametrize(
  'new, best, expected',
  [
    (_measured(0.9), None, True),
    (_measured(0.9), _measured(1.0), True),
    (_measured(1.0), _measured(1.0), False),
    (_measured(1.1), _measured(1.0), False),
    (_measured(math.nan), None, False),
    (_measured(math.nan), _measured(1.0), False),
    (_measured(math.inf), None, False),
    # Clients that were lost count for nothing, so the rest looks better.
    (_measured(0.0, lost=9, clients=0), None, False),
    (_measured(0.5, lost=4, clients=5), _measured(1.0), False),
    (_measured(1.0), _measured(0.5, lost=4, clients=5), True),
    (_measured(0.4, lost=4), _measured(0.5, lost=4), True),
  ],
)
def test_what_is_better(new, best, expected):
  select = programs.Selection('rmse')
  assert select.is_better(new, best) == expected
  if best and not new['num_not_finite'] and not best['num_not_finite']:
    opposite = programs.Selection('rmse', higher_is_better=True)
    assert opposite.is_better(new, best) == (new['rmse'] > best['rmse'])


# ---- runs that diverge -------------------------------------------------------


@pytest.mark.parametrize(
  'loss, lost, first, expected',
  [
    (2.9, 0, 1.0, False),
    (3.1, 0, 1.0, True),
    (math.nan, 0, 1.0, True),
    (math.inf, 0, None, True),
    (5.0, 0, None, False),
    (1.0, 5, 1.0, False),
    (1.0, 6, 1.0, True),
    (0.0, 10, None, True),
    # A loss may be negative, such as a similarity.
    (-0.9, 0, -1.0, False),
    (0.9, 0, -1.0, False),
    (1.1, 0, -1.0, True),
  ],
)
def test_when_a_round_has_diverged(loss, lost, first, expected):
  train = {'loss': loss, 'num_not_finite': lost}
  assert programs.StoppingRule().has_diverged(train, first, 10) == expected


@pytest.mark.parametrize(
  ('losses', 'sizes', 'patience', 'first'),
  [
    # Clients that begin by fitting a head have next to none in round one.
    ((0.1, 2.0, 1.0, 0.9, 6.5, 6.5, 6.5), (9,) * 7, 3, 2.0),
    # With Poisson sampling the first cohorts may be empty.
    ((1.0, 2.0, 3.0, 4.0), (0, 0, 9, 9), 2, 3.0),
  ],
)
def test_what_the_first_loss_is(losses, sizes, patience, first):
  state = run_state.Run.__new__(run_state.Run)
  state.notes, stop = run_state.Notes(), programs.StoppingRule(rounds=patience)
  metrics = {'num_not_finite': 0, 'num_clients': 9}
  for state.round, loss in enumerate(losses, 1):
    size = sizes[state.round - 1]
    state.note_training({'loss': loss, **metrics}, size, stop)
    # The last three of the first run are more than thrice as large.
    assert state.is_over(9, stop) == (state.round == 7)
  assert state.notes.first_loss == first


def test_a_last_round_without_a_finite_client_has_diverged():
  state = run_state.Run.__new__(run_state.Run)
  state.notes, stop = run_state.Notes(), programs.StoppingRule()
  for lost, number in ((9, 0), (8, 1)):
    state.notes.train = {'num_not_finite': lost, 'num_clients': number}
    assert state.has_diverged(stop) == (not number)


class _Changing(small_runs.Spy):
  """Clients that have other examples from some round on."""

  def __init__(self, before: Any, after: Any, last: int):
    super().__init__(before)
    self._after = after
    self._last = last

  def cohort(self, client_ids, seeds):
    if len(self.cohorts) == self._last:
      self._clients = self._after
    return super().cohort(client_ids, seeds)


@pytest.mark.parametrize(
  'rule', [{'rounds': 0}, {'factor': math.nan}, {'share_not_finite': 1.5}]
)
def test_a_rule_that_ends_all_runs_or_none_is_refused(rule):
  with pytest.raises(ProgramError, match='give a factor of 1 or more'):
    programs.StoppingRule(**rule)


def test_an_evaluation_is_not_trained(plain, tmp_path):
  said = 'a process that trains, .*Evaluation'
  measure = plain.validation.evaluation
  with pytest.raises(ProgramError, match=said):
    programs.check(measure, plain.clients, rounds=1, clients_per_round=1)
  with pytest.raises(ProgramError, match='process: .* found a'):
    programs.load(tmp_path, plain.process)


def test_a_selection_without_validation_is_refused(plain):
  with pytest.raises(ProgramError, match='select=.* without validation'):
    plain.train(validation=None, select=programs.Selection('loss'))


@pytest.mark.slow
def test_phases_that_swap_their_numbers_are_others(plain):
  def described(*epochs):
    local = (tff_partial.tiers.LOCAL,)
    model, (one, other) = (
      plain.process.model,
      [tff_partial.Phase(train=local, epochs=number) for number in epochs],
    )
    process = tff_partial.algorithms.build_fed_recon(
      model, reconstruct=one, update=other
    )
    measuring = tff_partial.evaluation.build_evaluation(
      model, work=[one, other, tff_partial.Phase(measured=True)]
    )
    noted = run_settings.of_evaluation(measuring)
    return (
      run_settings.of_process(process),
      {f'validation {name}': value for name, value in noted.items()},
    )

  said = 'a phase of the {} was epochs 1 and is now epochs 3'
  for first, other, of in zip(
    described(1, 3), described(3, 1), ('process', 'validation'), strict=True
  ):
    with pytest.raises(ProgramError, match=said.format(of)):
      run_settings.check(first, other, 'out')
    # Runs of older versions go on, whose fingerprints are others.
    older = {name: text.replace('reads ', 'f') for name, text in first.items()}
    run_settings.check(older, first, 'out')


def test_constants_that_swap_their_places_are_others():
  def described(first, second):
    halve = tff.tensorflow.computation(
      lambda x: (x - first) / second, np.float32
    )
    one = tf.function(lambda x: x + first if x > second else x * second)
    both = tff.tensorflow.computation(
      lambda low, high: {'a': one(low), 'b': one(high) - low},
      (np.float32, np.float32),
    )
    return (
      fingerprints.of_computations(halve),
      fingerprints.of_computations(both),
    )

  before = described(2.0, 3.0)
  assert described(2.0, 3.0) == before
  for old, new in zip(before, described(3.0, 2.0), strict=True):
    assert old != new


def test_results_and_arguments_that_swap_their_places_are_others():
  kinds = np.float32, np.float32
  found = {
    fingerprints.of_computations(tff.tensorflow.computation(of, kinds))
    for of in (
      lambda x, y: (x - y, x * y),
      lambda x, y: (y - x, x * y),
      lambda x, y: (x * y, x - y),
    )
  }
  assert len(found) == 3


# Ratings of this size leave losses finite for a while, or not at all.
@pytest.mark.slow
@pytest.mark.parametrize('scale, patience', [(10.0, 2), (1e30, 5)])
def test_a_run_that_diverges_is_stopped(plain, tmp_path, scale, patience):
  spec = plain.process.example_spec
  other = small_runs.pack(spec, 'train', 12, scale)
  clients = _Changing(plain.clients, other, 7)
  settings = {'rounds': 100, 'stop': programs.StoppingRule(rounds=patience)}
  result = plain.train(output_dir=tmp_path, clients=clients, **settings)
  assert result.diverged
  rows = repeatable_rows(tmp_path)
  assert len(rows) == result.rounds == 7 + patience
  first = float(rows[0]['loss'])
  for row in rows[7:]:
    if scale == 10.0:
      assert float(row['loss']) > 3 * first
      assert row['num_not_finite'] == '0'
    else:
      assert row['num_not_finite'] == '4'
      # Nobody was measured, so that there is no loss, least of all zero.
      assert row['loss'] == row['mae'] == 'nan'
  # What the best round left can be used. It was before, or in a round to which
  # nobody contributed.
  assert result.best_round in ((3, 6) if scale == 10.0 else (3, 6, 9, 12))
  assert math.isfinite(result.best_validation['loss'])
  # The same call does not go on training.
  again = plain.train(output_dir=tmp_path, **settings)
  small_runs.assert_same(again, result)
  assert len(repeatable_rows(tmp_path)) == 7 + patience


@pytest.mark.slow
def test_a_run_that_diverges_tells_why_once(plain, caplog):
  spec = plain.process.example_spec
  # Of twelve clients seven are far off, among them the first of the cohort.
  ids = plain.clients.client_ids
  data = {name: real_examples(plain.clients, name) for name in ids}
  for name in ids[:7]:
    data[name]['y'] = data[name]['y'] * np.float32(1e30)
  clients = small_runs.Spy(packing.pack(data, spec))
  result = plain.train(
    rounds=400,
    clients=clients,
    clients_per_round=12,
    validation=None,
    stop=programs.StoppingRule(rounds=2),
  )
  assert result.rounds == 2
  (told,) = [r.getMessage() for r in caplog.records if 'diverged' in r.message]
  assert told.startswith(
    'The run diverged; it ended after round 2 of 400. In that round 7 of 12 '
    'clients had no finite loss or weights, and the loss was '
  )
  assert 'smaller learning rate' in told and 'aggregators.robust()' in told


@pytest.mark.slow
def test_a_run_that_ends_before_it_is_stopped_is_warned_of(plain, caplog):
  far = small_runs.pack(plain.process.example_spec, 'train', 12, 1e10)
  clients = _Changing(plain.clients, far, 1)
  result = plain.train(rounds=2, clients=clients, validation=None)
  assert not result.diverged and result.train['loss'] > 1e15
  assert 'The loss of the last round was ' in caplog.text


def test_losses_of_the_validation_are_compared_with_each_other(plain):
  """Others' examples may be far worse than those that clients train on."""
  exam = plain.validation
  far = small_runs.pack(exam.evaluation.example_spec, 'validation', 5, 10.0)
  result = plain.train(validation=programs.EvaluationSet(exam.evaluation, far))
  assert result.validation['loss'] > 30 * result.train['loss']
  assert not result.diverged


def test_where_nobody_can_be_measured_there_is_no_metric(plain):
  weights = plain.process.get_model_weights(plain.process.initialize())
  weights = tf.nest.map_structure(lambda w: w * np.nan, weights)
  with pytest.raises(
    ProgramError, match=r"not finite: 14 of 14 numbers of 'items/embeddings'"
  ):
    programs.evaluate(plain.validation, weights)
  measured = evaluation_sets.measure(plain.validation, weights)
  assert math.isnan(measured['loss'])
  assert math.isnan(measured['mae'])
  assert (measured['num_clients'], measured['num_not_finite']) == (0, 5)
  assert measured['per_client'] == {}


def test_a_bad_round_alone_is_forgiven(world, monkeypatch):
  diverged = iter([True] * 4 + [False] + [True] * 4 + [False] * 20)
  monkeypatch.setattr(
    programs.StoppingRule, 'has_diverged', lambda *_: next(diverged)
  )
  result = world.train(rounds=12)
  assert result.rounds == 12
  assert not result.diverged


# ---- measuring ---------------------------------------------------------------


def test_all_clients_of_an_exam_are_measured(world, whole):
  exam, weights = world.validation, whole[0].weights
  measured = programs.evaluate(exam, weights)
  assert measured['num_clients'] == 5
  alone = [
    programs.evaluate(
      programs.EvaluationSet(exam.evaluation, _Only(exam.clients, client)),
      weights,
    )
    for client in exam.clients.client_ids
  ]
  # A client's measurement does not depend on who else is measured.
  maes = [one['mae'] for one in alone]
  counts = [one['num_examples'] for one in alone]
  assert measured['num_examples'] == sum(counts)
  assert measured['mae'] == pytest.approx(np.average(maes, weights=counts))
  spread = measured['per_client']['mae']
  assert set(spread) == {'mean', 'std', 'p10', 'p50', 'p90'}
  assert spread['mean'] == pytest.approx(np.mean(maes))
  assert spread['std'] == pytest.approx(np.std(maes))
  assert spread['p10'] == pytest.approx(np.quantile(maes, 0.1))
  assert programs.evaluate(exam, weights) == measured
  json.dumps(measured, allow_nan=False)


class _Only:
  """One of some clients."""

  def __init__(self, clients: cohorts.ClientSource, client_id: str):
    self.client_ids = (client_id,)
    self.example_spec = clients.example_spec
    self.cohort = clients.cohort


# ---- loading -----------------------------------------------------------------


def test_where_nothing_was_trained_nothing_is_loaded(world, tmp_path):
  with pytest.raises(RunError, match='Train first') as c:
    programs.load(world.process, tmp_path / 'missing')
  assert 'missing' in str(c.value)
  assert not list(tmp_path.iterdir())


# ---- mistakes are said before the first round --------------------------------


@pytest.mark.parametrize(
  'settings, expected',
  [
    ({'rounds': 0}, 'rounds: expected at least 1, found 0'),
    ({'rounds': 1.5}, 'rounds: expected a whole number, found 1.5'),
    ({'checkpoint_every': 0}, 'checkpoint_every: expected at least 1, found 0'),
    ({'callbacks': [1]}, '1 is no callback'),
    ({'clients_per_round': 13}, 'asks 13 clients .* population has 12'),
    (
      {'select': programs.Selection('rsme')},
      r"no metric 'rsme' .*\['loss', 'mae'",
    ),
  ],
)
def test_impossible_runs_are_refused_at_once(
  world, tmp_path, settings, expected
):
  clients = small_runs.Spy(world.clients)
  with pytest.raises(errors.UserError, match=expected):
    world.train(output_dir=tmp_path, clients=clients, **settings)
  assert not clients.cohorts
  assert not list(tmp_path.iterdir())


# ---- callbacks and early stopping --------------------------------------------


@pytest.mark.slow
def test_a_callback_sees_each_round(world, whole, tmp_path):
  seen = []

  def see(result: callbacks.RoundResult) -> None:
    seen.append((result, small_runs.flat(result.weights)))

  result = world.train(output_dir=tmp_path, callbacks=[see])
  small_runs.assert_same(result, whole[0])  # To look changes nothing.
  for each, weights in seen:  # Nor do later rounds.
    assert small_runs.flat(each.weights) == weights
  assert result.ended_by is None
  assert [each.round for each, _ in seen] == [1, 2, 3, 4, 5, 6, 7]
  assert seen[-1][1] == small_runs.flat(result.weights)
  for (each, _), row in zip(seen, repeatable_rows(tmp_path), strict=True):
    told = {name: str(value) for name, value in each.metrics.items()}
    del told['seconds_round']
    assert told == {k: v for k, v in row.items() if v and k != 'round'}
  last = seen[-1][0]
  assert list(last.validations) == [3, 6, 7]
  for name in ('loss', 'mae', 'num_clients', 'num_not_finite'):
    assert last.validations[7][name] == result.validation[name]
    assert last.validations[7][name] == last.metrics[f'validation_{name}']


def _ends_at(number: int) -> callbacks.Callback:
  def enough(result: callbacks.RoundResult) -> bool:
    return result.round == number

  return enough


@pytest.mark.slow
@pytest.mark.parametrize('at', [3, 5])
def test_a_callback_ends_a_run_as_its_last_round_would(world, tmp_path, at):
  short = world.train(output_dir=tmp_path / 'short', rounds=at)
  ended = world.train(output_dir=tmp_path / 'ended', callbacks=[_ends_at(at)])
  small_runs.assert_same(ended, short)
  assert (ended.ended_by, short.ended_by) == ('enough', None)
  one, other = (repeatable_rows(tmp_path / name) for name in ('ended', 'short'))
  assert one == other


@pytest.mark.slow
def test_a_run_that_a_callback_ended_stays_so(world, tmp_path, caplog):
  ended = world.train(output_dir=tmp_path, callbacks=[_ends_at(5)])
  before = files(tmp_path)
  clients = small_runs.Spy(world.clients)
  for callback in (_ends_at(5), _ends_at(6)):
    again = world.train(
      output_dir=tmp_path, clients=clients, callbacks=[callback]
    )
    small_runs.assert_same(again, ended)
    assert again.ended_by == 'enough'
    assert np.isnan(again.seconds['per_round_median'])
  assert not clients.cohorts
  assert files(tmp_path) == before
  assert 'was ended after round 5 by enough' in caplog.text


@pytest.mark.slow
def test_a_killed_run_calls_for_the_rounds_that_it_repeats(world, tmp_path):
  rounds: list[int] = []

  def note(result: callbacks.RoundResult) -> None:
    rounds.append(result.round)

  world.killed(6, output_dir=tmp_path, callbacks=[note])
  world.train(output_dir=tmp_path, callbacks=[note])
  assert rounds == [1, 2, 3, 4, 5, 4, 5, 6, 7]


# The rounds of these runs get better and better, so that "better" is turned.
_STOPPING = callbacks.EarlyStopping(2, 'mae', higher_is_better=True)
_LONG: dict[str, Any] = {'rounds': 30, 'callbacks': [_STOPPING]}


@pytest.fixture(scope='module', name='stopped')
def fixture_stopped(world, tmp_path_factory):
  """A run that was ended early, and its folder."""
  folder = tmp_path_factory.mktemp('stopped')
  return world.train(output_dir=folder, **_LONG), folder


@pytest.mark.slow
@pytest.mark.parametrize('at', [2, 5, 8])
def test_a_killed_run_ends_where_it_would_have(world, stopped, tmp_path, at):
  result, folder = stopped
  world.killed(at, output_dir=tmp_path, **_LONG)
  again = world.train(output_dir=tmp_path, **_LONG)
  small_runs.assert_same(again, result)
  assert again.ended_by == result.ended_by
  assert repeatable_rows(tmp_path) == repeatable_rows(folder)


@pytest.mark.slow
def test_a_short_run_is_not_ended_early(world, monkeypatch):
  # As of a loss that is not finite.
  monkeypatch.setattr(programs.Selection, 'is_better', lambda *_: False)
  stopping = callbacks.EarlyStopping(patience=1)
  ended = [
    world.train(rounds=rounds, callbacks=[stopping]).ended_by
    for rounds in (2, 3)  # A longer run measures after round 3, too.
  ]
  assert ended == [None, repr(stopping)]


# ---- what is printed of a run ------------------------------------------------


def test_a_process_and_a_result_fit_on_a_screen(world, whole):
  result, folder = whole
  first, second, *_ = repr(world.process).splitlines()
  assert first == 'PartialProcess: clients send global and remember nothing'
  shown = 'PartialModel with the loss MeanSquaredError and the metrics mae'
  assert second == f'  {shown}'
  first, *lines = repr(result).splitlines()
  assert first.startswith('TrainingResult after 7 rounds in ')
  assert [line.split(':')[0].strip() for line in lines] == [
    'train',
    'validation',
    f'best validation, round {result.best_round}',
  ]
  assert f'loss {result.train["loss"]:.4g}, mae' in lines[0]
  saved = programs.load(world.process, folder)
  assert repr(saved).startswith('Saved(rounds=7, best_round=')
  assert saved.best_round == result.best_round
  assert small_runs.flat(saved.state) == small_runs.flat(result.state)
  exam = repr(world.validation).splitlines()
  assert exam[0] == 'EvaluationSet of clients that come with nothing'
  assert exam[1:3] == ['  Evaluation', f'  {second}']
  for shown in (repr(result), repr(world.process), repr(world.validation)):
    assert len(shown) < 1000


# ---- the bar -----------------------------------------------------------------


def test_the_bar_stays_out_of_the_output(world, capsys):
  world.train(show_progress=True)
  shown = capsys.readouterr()
  assert shown.out == ''
  assert '7/7' in shown.err
  assert 'validation_loss=' in shown.err
  # Where nothing moves for long.
  first, *_ = shown.err.split('1/7')
  assert 'tracing and compiling, once' in first
  assert 'validation: tracing and compiling, once' in shown.err
  world.train()
  assert capsys.readouterr() == ('', '')


def test_an_interactive_shell_shows_the_bar_without_being_asked(
  monkeypatch, capsys
):
  metrics_log.Bar(7, 0).close()
  assert capsys.readouterr().err == ''
  monkeypatch.setattr(sys, 'ps1', '>>> ', raising=False)  # As Python has it.
  metrics_log.Bar(7, 0).close()
  assert '0/7' in capsys.readouterr().err
  metrics_log.Bar(7, 0, shown=False).close()
  assert capsys.readouterr().err == ''
