"""Laws of programs: a run is a function of its arguments, whatever happens."""

import asyncio
import csv
import json
import logging
import math
import os
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

import tff_partial
from tff_partial import checkpoints
from tff_partial import client_state
from tff_partial import errors
from tff_partial import examples
from tff_partial import phases
from tff_partial import processes
from tff_partial import programs
from tff_partial import records
from tff_partial import sampling
from tff_partial import tiers

_ITEMS = 7
_ROUNDS = 7
_SETTINGS = {'rounds': _ROUNDS, 'clients_per_round': 4, 'evaluate_every': 3}
_RECONSTRUCTION: dict[str, Any] = {
  'reconstruction_steps': 2,
  'reconstruction_optimizer': phases.sgd(0.3),
}


# ---- a small world -----------------------------------------------------------


def _build_model() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(_ITEMS, 2, name='items')(item)
  rating = tf.keras.layers.Dense(1, use_bias=False, name='user')(vector)
  return tf.keras.Model(item, rating)


def _pack(
  spec: examples.ExampleSpec, names: str, number: int, scale: float = 1.0
) -> examples.Population:
  random = np.random.default_rng(5)
  vectors = random.normal(size=[_ITEMS, 2])
  clients = {}
  for place in range(number):
    items = random.integers(0, _ITEMS, 5 + place % 4).astype(np.int32)
    ratings = vectors[items] @ random.normal(1.0, 0.3, [2, 1]) * scale
    clients[f'{names} {place}'] = {'x': items, 'y': ratings.astype(np.float32)}
  return examples.pack(clients, spec)


class World:
  """A process, clients to train with, and clients to measure.

  Attributes:
    process: The process.
    clients: Who takes part.
    validation: An exam of other clients.
  """

  def __init__(self, **options: Any):
    model = tff_partial.from_keras(
      _build_model,
      local='user',
      loss=tf.keras.losses.MeanSquaredError(),
      metrics=lambda: [tf.keras.metrics.MeanAbsoluteError(name='mae')],
    )
    self.process = tff_partial.algorithms.build_fed_recon(
      model, update_optimizer=phases.sgd(0.5), **_RECONSTRUCTION, **options
    )
    self.clients = _pack(self.process.example_spec, 'train', 12)
    measure = tff_partial.algorithms.build_fed_recon_eval(
      model, **_RECONSTRUCTION
    )
    self.validation = programs.Exam(
      measure, _pack(measure.example_spec, 'validation', 5)
    )

  def train(self, **settings: Any) -> programs.TrainingResult:
    """Trains with the usual settings, or with other ones."""
    settings = {
      'validation': self.validation,
      'clients': self.clients,
      **_SETTINGS,
      **settings,
    }
    return programs.train(
      self.process, settings.pop('clients'), tensorboard=False, **settings
    )


@pytest.fixture(scope='module', autouse=True, name='runtime')
def fixture_runtime():
  with tff_partial.runtimes.cohort(jit=False) as context:
    yield context


@pytest.fixture(scope='module', name='plain')
def fixture_plain():
  return World()


@pytest.fixture(scope='module', name='world')
def fixture_world():
  """A process of which every part has a state that changes in each round."""
  return World(
    aggregator=tff.learning.robust_aggregator(),
    server_optimizer=tff.learning.optimizers.build_adam(0.1),
  )


@pytest.fixture(scope='module', name='whole')
def fixture_whole(world, tmp_path_factory):
  """The result of a run that nobody interrupted, and its folder."""
  folder = tmp_path_factory.mktemp('whole')
  return world.train(output_dir=folder), folder


def _flat(structure: Any) -> list[bytes]:
  """Every number of a structure, bit by bit."""
  parts = tff.structure.flatten(
    tff.structure.from_container(structure, recursive=True)
  )
  return [np.asarray(part).tobytes() for part in parts]


def _rows(folder: pathlib.Path) -> list[dict[str, str]]:
  """The table of metrics without what is never the same."""
  with (folder / 'metrics.csv').open(newline='') as file:
    return [
      {
        name: value
        for name, value in row.items()
        if not name.startswith(('seconds_', 'peak_'))
      }
      for row in csv.DictReader(file)
    ]


def _assert_same(
  result: programs.TrainingResult, other: programs.TrainingResult
) -> None:
  for name in ('state', 'weights', 'best_weights'):
    assert _flat(getattr(result, name)) == _flat(getattr(other, name)), name
  for name in ('best_round', 'validation', 'best_validation', 'train'):
    # As texts, in which one NaN equals another.
    assert str(getattr(result, name)) == str(getattr(other, name)), name
  assert (result.rounds, result.diverged) == (other.rounds, other.diverged)


# ---- a run is a function of its arguments ------------------------------------


def test_the_same_call_gives_the_same_numbers(world, whole, tmp_path):
  result, folder = whole
  again = world.train(output_dir=tmp_path)
  _assert_same(result, again)
  assert _rows(folder) == _rows(tmp_path)


def test_another_seed_gives_other_numbers(world, whole, tmp_path):
  result, folder = whole
  other = world.train(output_dir=tmp_path, seed=1)
  assert _flat(other.weights) != _flat(result.weights)
  assert _rows(folder) != _rows(tmp_path)


def test_without_a_folder_nothing_is_written(
  world, whole, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  _assert_same(world.train(), whole[0])
  assert not list(tmp_path.iterdir())


def test_a_run_may_start_inside_a_running_loop(world, whole, tmp_path):
  async def in_a_notebook():
    return world.train(output_dir=tmp_path)

  _assert_same(asyncio.run(in_a_notebook()), whole[0])


def test_what_a_run_writes(whole):
  result, folder = whole
  assert sorted(p.name for p in folder.iterdir()) == [
    'checkpoints',
    'metrics.csv',
  ]
  rows = _rows(folder)
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


def test_a_run_learns(plain):
  first = plain.train(rounds=1)
  result = plain.train(rounds=60, evaluate_every=60)
  assert result.validation['loss'] < 0.5 * first.validation['loss']


# ---- a run that is killed goes on --------------------------------------------


class _Killed(BaseException):
  """Nothing catches it, like SIGKILL."""


class _Spy:
  """Clients that note who was asked for, and may end the run."""

  def __init__(self, clients: examples.ClientSource, ends_at: int = 0):
    self._clients = clients
    self._ends_at = ends_at
    self.example_spec = clients.example_spec
    self.client_ids = clients.client_ids
    self.cohorts: list[tuple[str, ...]] = []

  def cohort(self, client_ids, seeds):
    self.cohorts.append(tuple(client_ids))
    if len(self.cohorts) == self._ends_at:
      raise _Killed()
    return self._clients.cohort(client_ids, seeds)


def _kill(
  owner: Any, name: str, at: int, monkeypatch: Any, *, before: bool
) -> None:
  """Ends the run in a call of a function, before or after it does its work."""
  real, calls = getattr(owner, name), []

  def wrapped(*arguments: Any, **options: Any) -> Any:
    calls.append(arguments)
    if len(calls) == at and before:
      raise _Killed()
    result = real(*arguments, **options)
    if len(calls) == at:
      raise _Killed()
    return result

  monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize('at', [1, 3, 4, 5, 7])
def test_killed_in_any_round(world, whole, tmp_path, at):
  result, folder = whole
  with pytest.raises(_Killed):
    world.train(output_dir=tmp_path, clients=_Spy(world.clients, at))
  clients = _Spy(world.clients)
  _assert_same(world.train(output_dir=tmp_path, clients=clients), result)
  assert _rows(tmp_path) == _rows(folder)
  # It went on from the last checkpoint and did not begin anew.
  assert len(clients.cohorts) == _ROUNDS - (at - 1) // 3 * 3


# TFF renames the table twice, and then each checkpoint when it is whole.
_MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
  'before there is a table': (tf.io.gfile, 'rename', 1, True),
  'before there is a row': (tf.io.gfile, 'rename', 2, True),
  'before the first save': (tf.saved_model, 'save', 1, True),
  'in the first save': (tf.saved_model, 'save', 1, False),
  'in the last save': (tf.saved_model, 'save', 3, False),
  'before an old one is removed': (tf.io.gfile, 'rename', 5, False),
  'before a row': (records.Records, 'release', 4, True),
  'between row and save': (records.Records, 'release', 6, False),
  'after the last save': (checkpoints.Checkpoints, 'save', 3, False),
}


@pytest.mark.parametrize('moment', _MOMENTS)
def test_killed_at_a_bad_moment(world, whole, tmp_path, monkeypatch, moment):
  result, folder = whole
  owner, name, at, before = _MOMENTS[moment]
  with monkeypatch.context() as patch:
    _kill(owner, name, at, patch, before=before)
    with pytest.raises(_Killed):
      world.train(output_dir=tmp_path)
  _assert_same(world.train(output_dir=tmp_path), result)
  assert _rows(tmp_path) == _rows(folder)
  assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == [
    'round_6',
    'round_7',
  ]


def test_killed_again_and_again(world, whole, tmp_path):
  result, folder = whole
  for ends_at in (5, 3):
    with pytest.raises(_Killed):
      world.train(output_dir=tmp_path, clients=_Spy(world.clients, ends_at))
    # What a kill in the middle of a line leaves.
    with (tmp_path / 'metrics.csv').open('a') as file:
      file.write('5,0.1')
  _assert_same(world.train(output_dir=tmp_path), result)
  assert _rows(tmp_path) == _rows(folder)


def test_a_truncated_checkpoint_costs_a_few_rounds(
  world, whole, tmp_path, caplog
):
  result, folder = whole
  with pytest.raises(_Killed):
    world.train(output_dir=tmp_path, clients=_Spy(world.clients, 7))
  (data,) = (tmp_path / 'checkpoints' / 'round_6').rglob('variables.data*')
  os.truncate(data, data.stat().st_size // 2)
  clients = _Spy(world.clients)
  with caplog.at_level(logging.WARNING):
    _assert_same(world.train(output_dir=tmp_path, clients=clients), result)
  assert 'going on from round 3' in caplog.text
  assert len(clients.cohorts) == _ROUNDS - 3
  assert _rows(tmp_path) == _rows(folder)


def test_a_run_that_is_done_is_not_done_again(world, whole, tmp_path):
  result, folder = whole
  copy = tmp_path / 'copy'
  shutil.copytree(folder, copy)
  clients = _Spy(world.clients)
  for rounds in (_ROUNDS, _ROUNDS - 3):
    again = world.train(output_dir=copy, clients=clients, rounds=rounds)
    _assert_same(again, result)
  assert not clients.cohorts
  assert _rows(copy) == _rows(folder)


def test_more_rounds_go_on(world, whole, tmp_path):
  result, folder = whole
  world.train(output_dir=tmp_path, rounds=3)
  more = world.train(output_dir=tmp_path)
  _assert_same(more, result)
  assert _rows(tmp_path) == _rows(folder)


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


def test_another_process_is_refused(plain, world, tmp_path):
  plain.train(output_dir=tmp_path, rounds=2)
  before = (tmp_path / 'metrics.csv').read_bytes()
  with pytest.raises(checkpoints.CheckpointError, match='another model'):
    world.train(output_dir=tmp_path)
  assert (tmp_path / 'metrics.csv').read_bytes() == before
  plain.train(output_dir=tmp_path, rounds=3)


def test_two_runs_cannot_share_a_folder(world, tmp_path):
  with pytest.raises(checkpoints.CheckpointError, match='another process'):

    class Intruder(_Spy):
      def cohort(self, client_ids, seeds):
        world.train(output_dir=tmp_path)

    world.train(output_dir=tmp_path, clients=Intruder(world.clients))
  world.train(output_dir=tmp_path, rounds=1)


# ---- cohorts -----------------------------------------------------------------


def test_cohorts_are_those_of_the_sampler(world):
  clients = _Spy(world.clients)
  world.train(clients=clients, oversample=1.5, dropout_rate=0.4, seed=3)
  sampler = sampling.CohortSampler(world.clients.client_ids, 4, 3, 1.5, 0.4)
  rounds = range(1, _ROUNDS + 1)
  assert clients.cohorts == [tuple(sampler.cohort(n)) for n in rounds]
  assert len({len(cohort) for cohort in clients.cohorts}) > 1


def test_the_rows_count_who_took_part(world, tmp_path):
  world.train(output_dir=tmp_path, dropout_rate=0.4, seed=3)
  sampler = sampling.CohortSampler(world.clients.client_ids, 4, 3, 1.0, 0.4)
  assert [int(row['num_clients']) for row in _rows(tmp_path)] == [
    len(sampler.cohort(number)) for number in range(1, _ROUNDS + 1)
  ]


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
  weights = [_flat(result.weights) for result in results]
  assert weights[0] == weights[1] == weights[2] != weights[3]
  assert [row['num_clients'] for row in _rows(tmp_path)] == list('1001')
  assert not any(result.diverged for result in results)


def test_a_run_whose_clients_never_answer_ends(plain):
  result = plain.train(dropout_rate=0.999999, rounds=12)
  first = plain.process.get_model_weights(plain.process.initialize())
  assert _flat(result.weights) == _flat(first)
  assert result.rounds == 12
  assert not result.diverged


# ---- the best round ----------------------------------------------------------


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
    for row in _rows(tmp_path)
    if row[f'validation_{metric}']
  }
  choose = max if higher_is_better else min
  assert result.best_round == choose(measured, key=measured.__getitem__)
  assert result.best_validation[metric] == measured[result.best_round]
  assert (
    programs.evaluate(world.validation, result.best_weights)
    == result.best_validation
  )
  assert (
    programs.evaluate(world.validation, result.weights) == result.validation
  )
  until = world.train(rounds=result.best_round)
  assert _flat(until.weights) == _flat(result.best_weights)


def test_without_validation_the_last_round_is_the_best(world):
  result = world.train(validation=None)
  assert result.best_round is None
  assert result.validation is None
  assert _flat(result.best_weights) == _flat(result.weights)


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
def test_what_is_an_explosion(loss, lost, first, expected):
  train = {'loss': loss, 'num_not_finite': lost}
  assert programs.StoppingRule().has_exploded(train, first, 10) == expected


class _Changing(_Spy):
  """Clients that have other examples from some round on."""

  def __init__(self, before: Any, after: Any, last: int):
    super().__init__(before)
    self._after = after
    self._last = last

  def cohort(self, client_ids, seeds):
    if len(self.cohorts) == self._last:
      self._clients = self._after
    return super().cohort(client_ids, seeds)


# Ratings of this size leave losses finite for a while, or not at all.
@pytest.mark.parametrize('scale, patience', [(10.0, 2), (1e30, 5)])
def test_a_run_that_explodes_is_stopped(plain, tmp_path, scale, patience):
  spec = plain.process.example_spec
  other = _pack(spec, 'train', 12, scale)
  clients = _Changing(plain.clients, other, 7)
  settings = {'rounds': 100, 'stop': programs.StoppingRule(rounds=patience)}
  result = plain.train(output_dir=tmp_path, clients=clients, **settings)
  assert result.diverged
  rows = _rows(tmp_path)
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
  # The best round was before, and what it left can be used.
  assert result.best_round in (3, 6)
  assert math.isfinite(result.best_validation['loss'])
  # The same call does not go on training.
  again = plain.train(output_dir=tmp_path, **settings)
  _assert_same(again, result)
  assert len(_rows(tmp_path)) == 7 + patience


def test_a_run_that_never_had_a_finite_loss_is_stopped(plain, tmp_path):
  spec = plain.process.example_spec
  clients = _pack(spec, 'train', 12, 1e30)
  result = plain.train(output_dir=tmp_path, rounds=100, clients=clients)
  assert result.diverged
  assert result.rounds == 5
  weights = plain.process.get_model_weights(plain.process.initialize())
  assert _flat(result.weights) == _flat(weights)


def test_a_run_that_ends_exploded_has_diverged(plain):
  other = _pack(plain.process.example_spec, 'train', 12, 10.0)
  clients = _Changing(plain.clients, other, 5)
  result = plain.train(clients=clients)
  assert result.rounds == _ROUNDS
  assert result.diverged
  assert result.best_round == 3


def test_where_nobody_can_be_measured_there_is_no_metric(plain):
  weights = plain.process.get_model_weights(plain.process.initialize())
  weights = tf.nest.map_structure(lambda w: w * np.nan, weights)
  measured = programs.evaluate(plain.validation, weights)
  assert math.isnan(measured['loss'])
  assert math.isnan(measured['mae'])
  assert (measured['num_clients'], measured['num_not_finite']) == (0, 5)
  assert measured['per_client'] == {}


def test_a_bad_round_alone_is_forgiven(world, monkeypatch):
  exploded = iter([True] * 4 + [False] + [True] * 4 + [False] * 20)
  monkeypatch.setattr(
    programs.StoppingRule, 'has_exploded', lambda *_: next(exploded)
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
      programs.Exam(exam.evaluation, _Only(exam.clients, client)), weights
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

  def __init__(self, clients: examples.ClientSource, client_id: str):
    self.client_ids = (client_id,)
    self.example_spec = clients.example_spec
    self.cohort = clients.cohort


# ---- loading -----------------------------------------------------------------


def test_a_trained_run_can_be_loaded(world, whole):
  result, folder = whole
  saved = programs.load(world.process, folder)
  assert saved.round == result.rounds
  assert saved.best_round == result.best_round
  assert _flat(saved.last_weights) == _flat(result.weights)
  assert _flat(saved.best_weights) == _flat(result.best_weights)
  assert isinstance(saved.last_weights, tff.learning.models.ModelWeights)


def test_loading_does_not_disturb_a_run_under_way(world, tmp_path):
  class Reader(_Spy):
    def cohort(self, client_ids, seeds):
      cohort = super().cohort(client_ids, seeds)
      if len(self.cohorts) == 7:
        (tmp_path / 'checkpoints' / 'round_7_temp1').mkdir()
        assert programs.load(world.process, tmp_path).round == 6
        assert (tmp_path / 'checkpoints' / 'round_7_temp1').exists()
      return cohort

  world.train(output_dir=tmp_path, clients=Reader(world.clients))


def test_where_nothing_was_trained_nothing_is_loaded(plain, world, tmp_path):
  with pytest.raises(checkpoints.CheckpointError, match='Train first') as c:
    programs.load(world.process, tmp_path / 'missing')
  assert 'missing' in str(c.value)
  assert not list(tmp_path.iterdir())
  plain.train(output_dir=tmp_path, rounds=1)
  with pytest.raises(checkpoints.CheckpointError, match='another model'):
    programs.load(world.process, tmp_path)


# ---- mistakes are said before the first round --------------------------------


@pytest.mark.parametrize(
  'settings, expected',
  [
    ({'rounds': 0}, 'rounds must be positive, found 0'),
    ({'evaluate_every': 0}, 'evaluate_every must be positive, found 0'),
    ({'clients_per_round': 13}, 'asks 13 clients .* population has 12'),
    ({'oversample': 4.0}, 'asks 16 clients .* population has 12'),
    ({'dropout_rate': 1.5}, 'dropout_rate=1.5'),
    (
      {'select': programs.Selection('rsme')},
      r"no metric 'rsme' .*\['loss', 'mae'",
    ),
  ],
)
def test_impossible_runs_are_refused_at_once(
  world, tmp_path, settings, expected
):
  clients = _Spy(world.clients)
  with pytest.raises(errors.UserError, match=expected):
    world.train(output_dir=tmp_path, clients=clients, **settings)
  assert not clients.cohorts
  assert not list(tmp_path.iterdir())


def test_clients_that_remember_are_refused(plain):
  process = processes.compose(
    plain.process.model,
    work=[phases.Phase(train=(tiers.GLOBAL, tiers.LOCAL), measured=True)],
    memory=client_state.keep_local,
    aggregator=tff.aggregators.MeanFactory(),
    server_optimizer=phases.sgd(1.0),
  )
  with pytest.raises(programs.ProgramError, match='remember something'):
    programs.train(process, plain.clients, rounds=1, clients_per_round=1)


# ---- the bar -----------------------------------------------------------------


def test_the_bar_stays_out_of_the_output(world, capsys):
  world.train(show_progress=True)
  shown = capsys.readouterr()
  assert shown.out == ''
  assert '7/7' in shown.err
  assert 'validation_loss=' in shown.err
  world.train()
  assert capsys.readouterr() == ('', '')
