"""Laws of programs whose clients remember: server and clients stay in step."""

import collections
import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import commands
from tests.support import small_runs
from tests.support.commands import repeatable_rows
import tff_partial
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import composition
from tff_partial import errors
from tff_partial import evaluation
from tff_partial import phases
from tff_partial import tiers
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import privacy_plans
from tff_partial.exchange import messages
from tff_partial.runtimes.cohort_runtime import sharding
from tff_partial.training import checkpoints
from tff_partial.training import evaluation_sets
from tff_partial.training import metrics_log
from tff_partial.training import programs
from tff_partial.training import sampling
from tff_partial.training.client_store import client_store
from tff_partial.training.client_store import sqlite_backend
from tff_partial.training.errors import ProgramError

_BOTH = (tiers.GLOBAL, tiers.LOCAL)


def make_world() -> small_runs.World:
  """User vectors that are remembered, and measured as they are."""
  model = small_runs.build_model()
  return small_runs.World(
    composition.compose(
      model,
      work=[phases.Phase(_BOTH, optimizer=phases.sgd(0.3), measured=True)],
      client_state=client_state.persist_local,
      aggregation=Aggregation(aggregator=tff.learning.robust_aggregator()),
      server_optimizer=tff.learning.optimizers.build_adam(0.1),
    ),
    evaluation.build_evaluation(
      model,
      client_state=client_state.persist_local,
      work=[phases.Phase(train=(), measured=True)],
    ),
    remembering=True,
  )


pytestmark = pytest.mark.usefixtures('in_cohorts')


@pytest.fixture(scope='module', name='world')
def fixture_world():
  return make_world()


@pytest.fixture(scope='module', name='whole')
def fixture_whole(world, tmp_path_factory):
  """The result of a run that nobody interrupted, and its folder."""
  folder = tmp_path_factory.mktemp('whole')
  return world.train(output_dir=folder), folder


def _assert_same(world: small_runs.World, result: Any, other: Any) -> None:
  """Two runs ended with the same numbers, those that clients keep included."""
  small_runs.assert_same(result, other)
  ids = world.clients.client_ids
  for name in ('client_store', 'best_client_store'):
    one, two = (list(getattr(run, name).read(ids)) for run in (result, other))
    assert small_runs.flat(one) == small_runs.flat(two), name


# ---- what clients remember ---------------------------------------------------


def _by_hand(world: small_runs.World, rounds: int) -> tuple[Any, Any]:
  """The same training with a dict of states; returns the server's and these."""
  ids = world.clients.client_ids
  seeds = sampling.client_seeds(ids, 0, 'first state')
  first = world.process.initialize_client
  kept = {c: first(seed) for c, seed in zip(ids, seeds, strict=True)}
  sampler = sampling.CohortSampler(ids, 4, 0)
  state = world.process.initialize()
  for number in range(1, rounds + 1):
    cohort = sampler.cohort(number)
    clients = world.clients.cohort(cohort, sampler.seeds(number, cohort))
    output = world.process.next(state, [kept[c] for c in cohort], clients)
    state = output.state
    kept.update(zip(cohort, output.client_states, strict=True))
  return state, [kept[c] for c in ids]


@pytest.mark.slow
def test_clients_get_what_they_left(world, whole):
  result, _ = whole
  state, kept = _by_hand(world, small_runs.ROUNDS)
  assert small_runs.flat(result.state) == small_runs.flat(state)
  states = list(result.client_store.read(world.clients.client_ids))
  assert small_runs.flat(states) == small_runs.flat(kept)


@pytest.mark.slow
def test_without_a_folder_they_remember_as_well(world, whole):
  result = world.train()
  _assert_same(world, result, whole[0])
  assert result.client_store.path is None


# ---- a run that is killed goes on --------------------------------------------


def test_what_a_run_leaves(whole):
  result, folder = whole
  left = sorted(path.name for path in folder.iterdir())
  assert left == ['checkpoints', 'clients', 'metrics.csv']
  (kept,) = (folder / 'clients').iterdir()
  assert kept.name == sqlite_backend.FILE
  assert result.client_store.rounds == [3, 6, 7]


@pytest.mark.slow
def test_a_store_that_fills_memory_is_saved(
  world, whole, tmp_path, monkeypatch
):
  monkeypatch.setattr(client_store, '_FULL_BYTES', 0)
  result = world.train(output_dir=tmp_path, checkpoint_every=100)
  _assert_same(world, result, whole[0])
  assert result.client_store.rounds[-3:] == [5, 6, 7]


# The table is replaced by one with columns. The store saves before the server
# does, three times; TFF renames each checkpoint when it is whole.
_MOMENTS: dict[str, tuple[Any, str, int, bool]] = {
  'before there is a table': (os, 'replace', 1, True),
  'before there is a row': (os, 'replace', 1, False),
  'before the first save': (sqlite_backend.Versions, 'save', 1, True),
  'in the first transaction': (sqlite_backend.Versions, '_prune', 1, True),
  'between clients and server': (sqlite_backend.Versions, 'save', 1, False),
  'in the second transaction': (sqlite_backend.Versions, '_prune', 2, True),
  'later between the two': (sqlite_backend.Versions, 'save', 2, False),
  'in the server': (tf.saved_model, 'save', 2, False),
  'after both': (checkpoints.Checkpoints, 'save', 2, False),
  'in the middle of a round': (client_store.ClientStore, 'write', 5, True),
  'between two rounds': (client_store.ClientStore, 'write', 5, False),
  'before the first checkpoint': (tf.saved_model, 'save', 1, True),
  'in the first checkpoint': (tf.saved_model, 'save', 1, False),
  'before a row': (metrics_log.Records, 'release', 4, True),
  'between row and save': (metrics_log.Records, 'release', 6, False),
  'before an old one is removed': (tf.io.gfile, 'rename', 3, False),
  'at the end': (sqlite_backend.Versions, 'save', 3, False),
  'after the last save': (checkpoints.Checkpoints, 'save', 3, False),
}


@pytest.mark.slow
@pytest.mark.parametrize('moment', _MOMENTS)
def test_killed_at_a_bad_moment(world, whole, tmp_path, monkeypatch, moment):
  result, folder = whole
  owner, name, at, before = _MOMENTS[moment]
  with small_runs.killed(owner, name, at, monkeypatch, before=before):
    world.train(output_dir=tmp_path)
  _assert_same(world, world.train(output_dir=tmp_path), result)
  assert repeatable_rows(tmp_path) == repeatable_rows(folder)
  left = sorted(path.name for path in (tmp_path / 'checkpoints').iterdir())
  # An old one goes when another is saved, and after the last round none is.
  stays = ['round_3'] * (moment == 'before an old one is removed')
  assert left == [*stays, 'round_6', 'round_7']


# Trains in a process of its own, in which something happens to a function.
_TRAIN = """
import os, signal, sys
from tests.training import stateful_programs_test as tests

calls = []
real = tests.{owner}.{name}
def meddle(*arguments):
  calls.append(arguments)
  if len(calls) == {at}:
    os.kill(os.getpid(), signal.SIGKILL)
  return real(*arguments)
tests.{owner}.{name} = meddle
with tests.tff_partial.runtimes.cohort(jit=False):
  tests.make_world().train(output_dir=sys.argv[1])
"""


def _program(
  owner: str, name: str, at: int, folder: pathlib.Path
) -> contextlib.AbstractContextManager:
  code = _TRAIN.format(owner=owner, name=name, at=at)
  return commands.started([sys.executable, '-c', code, str(folder)])


@pytest.mark.slow
def test_sigkill_leaves_server_and_clients_in_step(world, whole, tmp_path):
  # In a transaction; and after it, before the server's checkpoint.
  kills = {
    'clients': ('sqlite_backend.Versions', '_prune', 2),
    'server': ('checkpoints.Checkpoints', 'save', 2),
  }
  with contextlib.ExitStack() as stack:
    programs_killed = [
      stack.enter_context(_program(*kill, tmp_path / name))
      for name, kill in kills.items()
    ]
    for program in programs_killed:
      outcome = program.finish()
      assert outcome.status == -signal.SIGKILL, outcome
  for name in kills:
    folder = tmp_path / name
    assert checkpoints.newest_round(folder / 'checkpoints') == 3
    # To look at what is left is no reason to change it.
    assert programs.load(world.process, folder).client_store.round == 3
    _assert_same(world, world.train(output_dir=folder), whole[0])
    assert repeatable_rows(folder) == repeatable_rows(whole[1])


@pytest.mark.slow
def test_a_private_round_is_not_repeated_without_its_clients(tmp_path):
  plan = privacy_plans.plan(
    clipping_lib.FixedClip(0.5),
    noise_multiplier=1.0,
    delta=1e-3,
    population=12,
    clients_per_round=4,
    rounds=small_runs.ROUNDS,
  )
  model = small_runs.build_model()
  training = phases.Phase((tiers.GLOBAL, tiers.LOCAL))
  private = small_runs.World(
    algorithms.build_furl(
      model,
      training=training,
      aggregation=Aggregation(
        aggregator=plan.mean(),
        client_weighting=messages.ClientWeighting.UNIFORM,
      ),
    ),
    algorithms.build_furl_eval(model),
    remembering=True,
  )
  settings = {
    'output_dir': tmp_path,
    'privacy': privacy_plans.PrivacyLedger(plan),
    'validation': None,
  }
  private.killed(6, **settings)
  # Round 3 was saved, 4 and 5 were published, and round 6 never ended.
  with contextlib.closing(
    sqlite_backend.Versions(tmp_path / programs.CLIENTS_FOLDER)
  ) as versions:
    gone = next(c for c in private.clients.client_ids if versions.versions(c))
    assert versions.delete(gone) and versions.about('deletions') == 1
    assert not versions.delete('nobody') and versions.about('deletions') == 1
  before = (tmp_path / 'metrics.csv').read_bytes()
  with pytest.raises(
    ProgramError, match='after round 3 was saved, and rounds up to 5'
  ):
    private.train(**settings)
  assert (tmp_path / 'metrics.csv').read_bytes() == before


# ---- exams and the best round ------------------------------------------------


@pytest.mark.slow
def test_the_best_round_has_its_clients(world, tmp_path):
  select = programs.Selection('loss', higher_is_better=True)
  settings = {'rounds': 15, 'select': select}
  result = world.train(output_dir=tmp_path, **settings)
  best = result.best_round
  assert best == 3  # The worst, by which it is chosen here.
  saved = programs.load(world.process, tmp_path)
  for found in (result, saved, world.train(**settings)):
    measured = world.measure(found.best_weights, found.best_client_store)
    assert measured == result.best_validation
  last = world.measure(saved.last_weights, saved.client_store)
  assert last == result.validation
  mixed = world.measure(saved.best_weights, saved.client_store)
  assert mixed['loss'] != result.best_validation['loss']


@pytest.mark.slow
def test_a_new_best_round_is_saved_with_its_clients(world, tmp_path):
  """The store can lead to the best round alone if it was saved there."""
  select = programs.Selection('loss', higher_is_better=True)
  settings = {'rounds': 8, 'select': select, 'checkpoint_every': 100}
  folder = tmp_path / 'killed'
  world.killed(8, output_dir=folder, **settings)
  saved = sorted(path.name for path in (folder / 'checkpoints').iterdir())
  assert saved == ['round_3']  # The best; round 6 was measured and not saved.
  result = world.train(output_dir=folder, **settings)
  assert result.best_round == 3
  measured = world.measure(result.best_weights, result.best_client_store)
  assert measured == result.best_validation
  small_runs.assert_same(result, world.train(**settings))


@pytest.mark.slow
def test_a_run_with_more_rounds_finds_the_clients_of_an_earlier_best(
  world, tmp_path, monkeypatch
):
  def train(rounds, *better, **settings):
    script = iter(better)
    monkeypatch.setattr(
      programs.Selection, 'is_better', lambda *_: next(script)
    )
    return world.train(rounds=rounds, evaluate_every=2, **settings)

  # Rounds 2, 4 and 5, the last; then 6 and 7.
  short = train(5, True, False, True, output_dir=tmp_path)
  assert short.best_round == 5
  longer = train(7, False, False, output_dir=tmp_path)
  whole = train(7, True, False, False, False)
  small_runs.assert_same(longer, whole)
  assert longer.best_round == 2
  known = [
    run.best_client_store.read(world.clients.client_ids)
    for run in (longer, whole)
  ]
  assert small_runs.flat(known[0].stacked) == small_runs.flat(known[1].stacked)


@pytest.mark.slow
def test_seen_users_know_more_than_new_ones(world, caplog):
  result = world.train(rounds=60, evaluate_every=60)
  evaluation_sets._warn.cache_clear()  # It warns once.
  exam = world.validation
  seen = programs.evaluate(
    exam, result.weights, client_store=result.client_store
  )
  begin_anew = programs.EvaluationSet(exam.evaluation, exam.clients)
  # A result is its best round, here the last one, with what clients remember.
  assert seen == programs.evaluate(exam, result)
  assert 'is not read' not in caplog.text
  assert 'random local weights' not in caplog.text
  new = programs.evaluate(
    begin_anew, result.weights, client_store=result.client_store
  )
  assert '`client_store` is not read' in caplog.text
  assert 'random local weights that nothing has trained' in caplog.text
  assert new == programs.evaluate(begin_anew, result.weights)
  assert new == programs.evaluate(begin_anew, result)
  assert seen['num_examples'] == new['num_examples']
  assert seen['loss'] < 0.5 * new['loss']
  assert 'never took part' not in caplog.text
  result.client_store.delete(exam.clients.client_ids[0])
  programs.evaluate(exam, result.weights, client_store=result.client_store)
  assert '1 of 12 clients never took part in training' in caplog.text


def test_an_exam_reads_memory_shard_by_shard(world, whole, monkeypatch):
  result, _ = whole
  exam = world.validation
  expected = programs.evaluate(
    exam, result.weights, client_store=result.client_store
  )
  read, most = type(result.client_store).read, []

  def count(store, client_ids):
    most.append(len(client_ids))
    return read(store, client_ids)

  monkeypatch.setattr(type(result.client_store), 'read', count)
  monkeypatch.setattr(sharding, '_CLIENTS_PER_SHARD', 2)
  with tff_partial.runtimes.cohort():
    found = programs.evaluate(
      exam, result.weights, client_store=result.client_store
    )
  size = len(exam.clients.client_ids)
  assert sum(most) == size
  assert max(most) <= 3 < size
  assert found.keys() == expected.keys()
  np.testing.assert_allclose(
    [v for k, v in found.items() if k != 'per_client'],
    [v for k, v in expected.items() if k != 'per_client'],
    rtol=1e-5,
  )


@pytest.fixture(scope='module', name='forgetful')
def fixture_forgetful(world):
  """An evaluation that takes nothing that clients remember."""
  return tff_partial.algorithms.build_fed_recon_eval(
    world.process.model, personalise=phases.Phase(max_steps=1)
  )


def test_what_an_exam_cannot_have_is_refused(world, forgetful, whole, tmp_path):
  weights = whole[0].weights
  with pytest.raises(ProgramError, match='no client store to read'):
    programs.evaluate(world.validation, weights)
  exam = programs.EvaluationSet(forgetful, world.clients, remembering=True)
  for work in (
    lambda: programs.evaluate(
      exam, weights, client_store=whole[0].client_store
    ),
    lambda: world.train(validation=exam, output_dir=tmp_path),
  ):
    with pytest.raises(ProgramError, match='evaluation takes <>'):
      work()
  assert not list(tmp_path.iterdir())


# ---- stores that are given, or missing ---------------------------------------


@pytest.mark.slow
def test_others_are_no_validation_to_go_on_with(world, tmp_path):
  world.train(output_dir=tmp_path, rounds=1)
  new = dataclasses.replace(world.validation, remembering=False)
  with pytest.raises(
    ProgramError, match='validation remembering was True and is now'
  ):
    world.train(output_dir=tmp_path, validation=new)


@pytest.mark.slow
def test_a_store_may_lie_elsewhere(world, whole, tmp_path, caplog):
  store = client_store.ClientStore(
    world.process.initialize_client, folder=tmp_path / 'elsewhere'
  )
  out = tmp_path / 'out'
  for ends_at in (5, 0):
    clients = small_runs.Spy(world.clients, ends_at)
    with contextlib.suppress(small_runs.Killed):
      result = world.train(output_dir=out, client_store=store, clients=clients)
  _assert_same(world, result, whole[0])
  assert not (out / 'clients').exists()
  # Its weights can be loaded; the rest is where it was put.
  saved = programs.load(world.process, out)
  assert saved.client_store is saved.best_client_store is None
  assert f'{out}/clients: there is no folder of what clients' in caplog.text
  store.close()


def test_clients_may_remember_something_before_the_first_round(world):
  store = client_store.ClientStore(world.process.initialize_client)
  ids = world.clients.client_ids
  twos = tf.nest.map_structure(lambda leaf: leaf * 0 + 2, store.read(ids)[0])
  store.write(ids, [twos] * len(ids))
  store.save(0)
  result = world.train(client_store=store, rounds=1, validation=None)
  first = sampling.CohortSampler(ids, 4, 0).cohort(1)
  for client in ids:
    is_two = small_runs.flat(store.read([client])[0]) == small_runs.flat(twos)
    assert is_two == (client not in first)
  assert result.client_store is store


@pytest.mark.slow
def test_a_store_of_another_run_is_refused(world, tmp_path):
  initialize = world.process.initialize_client
  small = tff.tensorflow.computation(
    lambda seed: collections.OrderedDict(x=tf.cast(seed, tf.float32)),
    tff.TensorType(np.int32, [2]),
  )
  out = tmp_path / 'out'
  used = world.train(rounds=2).client_store
  for given, folder, expected in [
    (client_store.ClientStore(small), None, 'states of the type <x=float32'),
    (client_store.ClientStore(initialize, seed=1), None, 'seed 1, the run ha'),
    (client_store.ClientStore(initialize), out, 'in memory, so that the run'),
    (used, None, 'states of round 2'),
  ]:
    with pytest.raises(ProgramError, match=expected):
      world.train(client_store=given, output_dir=folder)
  forgetful = composition.compose(
    world.process.model,
    work=[phases.Phase(_BOTH, measured=True)],
    client_state=client_state.stateless,
    aggregation=Aggregation(aggregator=tff.aggregators.MeanFactory()),
    server_optimizer=phases.sgd(1.0),
  )
  with pytest.raises(ProgramError, match='remember nothing'):
    programs.train(
      forgetful, world.clients, rounds=1, clients_per_round=1, client_store=used
    )
  assert not list(tmp_path.iterdir())
  # Those who remember nothing have no store.
  out = tmp_path / 'forgetful'
  result = programs.train(
    forgetful, world.clients, rounds=1, clients_per_round=1, output_dir=out
  )
  assert result.client_store is result.best_client_store is None
  assert not (out / 'clients').exists()


@pytest.mark.slow
def test_a_run_whose_clients_were_lost_is_refused(world, whole, tmp_path):
  copy = tmp_path / 'copy'
  shutil.copytree(whole[1], copy)
  before = (copy / 'metrics.csv').read_bytes()
  with pytest.raises(errors.UserError, match='seed was 0 and is now 1'):
    world.train(output_dir=copy, rounds=9, seed=1)
  shutil.rmtree(copy / 'clients')
  with pytest.raises(errors.UserError, match=r'round 7, .* rounds \[\] only'):
    world.train(output_dir=copy, rounds=9)
  assert (copy / 'metrics.csv').read_bytes() == before


def test_a_store_is_free_when_the_run_is_over(world, whole):
  with pytest.raises(client_store.ClientStoreError, match='its run is over'):
    whole[0].client_store.delete('train 1')
  sqlite_backend.Versions(whole[1] / 'clients').close()
