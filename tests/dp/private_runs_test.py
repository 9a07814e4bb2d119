"""Private runs: drawn as planned, counted each round, resumed as they were."""

import copy
import json
import shutil
from typing import Any

import pytest

from tests.support import small_runs
from tests.support.commands import repeatable_rows
from tff_partial.composition import Aggregation
from tff_partial.data import vocabularies
from tff_partial.data.examples import ClientDataError
from tff_partial.dp import accounting
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import local_noise
from tff_partial.dp import privacy
from tff_partial.dp import privacy_plans
from tff_partial.errors import PrivacyError
from tff_partial.exchange import messages
from tff_partial.training import programs
from tff_partial.training import run_state
from tff_partial.training import sampling
from tff_partial.training.errors import ProgramError

_CLIENTS = 12
_SETTINGS: dict[str, Any] = {'clients_per_round': 2}


def _plan(**changed: Any) -> privacy_plans.PrivacyPlan:
  return privacy_plans.plan(
    **{
      'clipping': clipping_lib.AdaptiveClip(0.1, count_stddev=2.0),
      'noise_multiplier': 1.0,
      'delta': 1e-3,
      'population': _CLIENTS,
      'rounds': small_runs.ROUNDS,
      **_SETTINGS,
      **changed,
    }
  )


def _world(**averaging: Any) -> small_runs.World:
  uniform = messages.ClientWeighting.UNIFORM
  return small_runs.reconstruction(
    aggregation=Aggregation(client_weighting=uniform, **averaging)
  )


pytestmark = pytest.mark.usefixtures('in_cohorts')


@pytest.fixture(scope='module', name='world')
def fixture_world():
  """A process whose noise the operating system draws."""
  return _world(aggregator=_plan().mean())


@pytest.fixture(scope='module', name='frank')
def fixture_frank():
  """A simulation that measures what is not private, too."""
  return _world(aggregator=_plan().mean(noise_seed=3, diagnostics=True))


@pytest.fixture(scope='module', name='simulated')
def fixture_simulated():
  """One whose noise anybody can draw again."""
  return _world(aggregator=_plan().mean(noise_seed=3))


def _ledger(**changed: Any) -> privacy_plans.PrivacyLedger:
  simulation = changed.pop('simulation', False)
  return privacy_plans.PrivacyLedger(_plan(**changed), simulation=simulation)


def _train(world: small_runs.World, **settings: Any) -> programs.TrainingResult:
  return world.train(**{'privacy': _ledger(), **_SETTINGS, **settings})


# ---- cohorts -----------------------------------------------------------------


@pytest.mark.slow
def test_a_simulation_draws_poisson_cohorts_by_its_seed(simulated):
  ledger = _ledger(simulation=True)
  clients = small_runs.Spy(simulated.clients)
  result = _train(simulated, privacy=ledger, clients=clients, seed=5)
  sampler = sampling.CohortSampler(
    simulated.clients.client_ids, 2, 5, poisson=True
  )
  rounds = range(1, small_runs.ROUNDS + 1)
  assert clients.cohorts == [tuple(sampler.cohort(n)) for n in rounds]
  assert len({len(cohort) for cohort in clients.cohorts}) > 2
  again = _train(simulated, privacy=ledger, seed=5)
  small_runs.assert_same(result, again)


@pytest.mark.slow
def test_nobody_knows_the_cohorts_of_a_private_run(world):
  spies = [small_runs.Spy(world.clients) for _ in range(2)]
  for spy in spies:
    _train(world, clients=spy)
  assert spies[0].cohorts != spies[1].cohorts


def test_nobody_is_drawn_twice_within_a_tree():
  ids = [str(number) for number in range(23)]
  sampler = sampling.CohortSampler(ids, 4, 0, rounds_per_tree=5)
  trees = [
    [
      client
      for number in range(5)
      for client in sampler.cohort(tree * 5 + number + 1)
    ]
    for tree in range(3)
  ]
  for drawn in trees:
    assert len(set(drawn)) == len(drawn) == 20
  assert trees[0] != trees[1] != trees[2]
  with pytest.raises(ProgramError, match='6 rounds of 4 clients'):
    sampling.CohortSampler(ids, 4, 0, rounds_per_tree=6)


# ---- what a run says ---------------------------------------------------------


@pytest.mark.slow
def test_each_round_and_the_result_say_what_is_spent(simulated, tmp_path):
  ledger = _ledger(simulation=True)
  result = _train(simulated, privacy=ledger, output_dir=tmp_path)
  rows = repeatable_rows(tmp_path)
  spent = [float(row['privacy/epsilon']) for row in rows]
  assert spent == [ledger.epsilon(number) for number in range(1, 8)]
  assert spent == sorted(spent) and spent[-1] == ledger.plan.epsilon
  last = rows[-1]
  assert float(last['privacy/delta']) == 1e-3
  assert float(last['privacy/noise_multiplier']) == 1.0
  for name in ('clip', 'noise_stddev', 'share_clipped', 'signal_to_noise'):
    assert result.privacy[name] == float(last[f'aggregator/{name}'])
  assert result.privacy['epsilon'] == spent[-1]
  assert result.privacy['simulation'] is True
  assert result.privacy['sampling'] == 'poisson'
  # The same from the checkpoint, when nothing is left to do.
  again = _train(simulated, privacy=ledger, output_dir=tmp_path)
  assert again.privacy == result.privacy


@pytest.mark.slow
def test_a_result_says_what_is_taken_to_be_public(simulated):
  ledger = _ledger(simulation=True)
  result = _train(simulated, privacy=ledger, rounds=1)
  assert result.privacy['assumed_public'] == ['population']
  clients = copy.copy(simulated.clients)
  clients.vocabularies = {'film': vocabularies.Vocabulary(['Alien', 'Heat'])}
  result = _train(simulated, privacy=ledger, rounds=1, clients=clients)
  said = result.privacy['assumed_public']
  assert said == ['population', 'vocabulary of film']


@pytest.mark.slow
def test_without_a_ledger_nothing_is_said(simulated):
  result = _train(simulated, privacy='unaccounted', rounds=1)
  assert result.privacy is None
  assert 'privacy: unaccounted, a simulation' in repr(result)


@pytest.mark.slow
def test_what_is_exact_is_said_on_request_alone(frank, tmp_path):
  # Clients came by chance, and nobody is to know how many, or how they did.
  ledger = _ledger(simulation=True)
  silent, open_ = tmp_path / 'silent', tmp_path / 'open'
  result = _train(frank, privacy=ledger, output_dir=silent, rounds=2)
  (row, _) = repeatable_rows(silent)
  assert {name for name in row if not name.startswith('validation_')} == {
    *('round', 'privacy/epsilon', 'privacy/delta', 'privacy/noise_multiplier'),
    *('aggregator/clip', 'aggregator/noise_stddev', 'aggregator/share_clipped'),
    *('aggregator/signal_to_noise', 'finalizer/update_non_finite'),
  }
  assert result.train == {}
  assert not [name for name in result.privacy if 'not_private' in name]
  result = _train(
    frank, privacy=ledger, output_dir=open_, rounds=2, diagnostics=True
  )
  (frank_row, _) = repeatable_rows(open_)
  assert {name for name in frank_row if name not in row} == {
    f'{name}_not_private'
    for name in (
      *('loss', 'mae', 'num_examples', 'num_clients', 'num_not_finite'),
      'aggregator/share_clipped',
    )
  }
  assert result.train['num_clients'] > 0
  assert 'share_clipped_not_private' in result.privacy


@pytest.mark.slow
def test_what_a_run_saves_is_for_its_owner_alone(world, tmp_path):
  _train(world, output_dir=tmp_path, rounds=1)
  saved = [tmp_path / 'checkpoints', *(tmp_path / 'checkpoints').rglob('*')]
  assert len(saved) > 5
  for path in saved:
    assert path.stat().st_mode & 0o077 == 0, path


# ---- a ledger counts what a process does -------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('averaging', 'expected'),
  [
    ({}, 'noise that the process does not add'),
    (
      {'aggregator': _plan(noise_multiplier=0.5).mean()},
      'noise_multiplier=1.0, the process has 0.5',
    ),
    (
      {
        'aggregator': privacy.private_mean(
          clipping_lib.FixedClip(1.0), noise_multiplier=1.0, clients_per_round=2
        )
      },
      r'clipping=AdaptiveClip\(.*, the process has FixedClip\(clip=1.0\)',
    ),
    ({'aggregator': _plan().mean(noise_seed=3)}, 'simulation=True'),
    (
      {'postprocess_update': local_noise.LocalNoise(0.1, 1.0)},
      'where=central, the process has local',
    ),
  ],
)
def test_a_ledger_counts_no_process_that_does_else(averaging, expected):
  world = _world(**averaging)
  with pytest.raises(PrivacyError, match=expected):
    _train(world, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
  'make',
  [
    lambda: {'aggregator': _plan().mean(noise_seed=3)},
    lambda: {
      'aggregator': _plan(
        clipping={'global': clipping_lib.TreeNoise(0.1, 6)},
        sampling='once_per_tree',
      ).mean()
    },
    lambda: {'postprocess_update': local_noise.LocalNoise(0.1, 1.0)},
  ],
  ids=['simulation', 'tree', 'local'],
)
def test_noise_that_nothing_counts_is_refused(make):
  world = _world(**make())
  spy = small_runs.Spy(world.clients)
  with pytest.raises(
    programs.ProgramError, match="nothing would count .*privacy='unaccounted'"
  ):
    _train(world, clients=spy, privacy=None, rounds=9)
  assert not spy.cohorts
  assert _train(world, privacy='unaccounted', rounds=1).privacy is None


@pytest.mark.slow
def test_noise_that_no_ledger_counts_must_be_said():
  world = _world(postprocess_update=local_noise.LaplaceNoise(0.1, 1.0))
  with pytest.raises(
    programs.ProgramError,
    match='No ledger counts Laplace noise, LaplaceNoise.epsilon does',
  ):
    _train(world, privacy=None, rounds=1)
  assert _train(world, privacy='unaccounted', rounds=1).rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize('given', ['unaccounted', 'private'])
def test_what_is_not_private_needs_no_word_for_it(given):
  with pytest.raises(programs.ProgramError, match=given):
    _train(_world(), privacy=given, rounds=1)


def test_a_user_who_is_listed_twice_is_refused():
  with pytest.raises(ClientDataError, match="2 clients have the id 'ann'"):
    sampling.planned(['ann', 'ann'], 2, 0, 1.0, 0.0, _ledger(population=2))


@pytest.mark.slow
def test_more_rounds_than_planned_are_counted_and_told(simulated, caplog):
  ledger = _ledger(rounds=2, simulation=True)
  result = _train(simulated, privacy=ledger, rounds=4)
  assert result.privacy['epsilon'] > ledger.plan.epsilon
  (told,) = [r.message for r in caplog.records if 'planned' in r.message]
  assert told == (
    f'The run has 4 rounds, 2 were planned for epsilon '
    f'{ledger.plan.epsilon:.4g}: all of them cost epsilon '
    f'{result.privacy["epsilon"]:.4g}.'
  )


@pytest.mark.slow
def test_a_ledger_of_local_noise_counts_local_noise(tmp_path):
  plan = _plan(clipping=clipping_lib.FixedClip(0.1), sampling='local')
  ledger = privacy_plans.PrivacyLedger(plan)
  world = _world(postprocess_update=plan.local_noise())
  result = _train(world, privacy=ledger, rounds=2)
  exact = accounting.local_epsilon(1.0, 2, 1e-3)
  assert exact <= result.privacy['epsilon'] < 1.2 * exact
  with pytest.raises(PrivacyError, match='simulation=True'):
    _train(
      _world(postprocess_update=plan.local_noise(noise_seed=1)), privacy=ledger
    )
  with pytest.raises(PrivacyError, match="sampling='local'"):
    _plan().local_noise()


# ---- a run that is killed goes on --------------------------------------------


@pytest.mark.slow
def test_a_private_run_goes_on_with_the_same_secrets(world, tmp_path):
  first, other = tmp_path / 'first', tmp_path / 'other'
  settings = {'privacy': _ledger(), **_SETTINGS}
  # Two rounds are released, long before the first checkpoint is due.
  world.killed(3, output_dir=first, **settings)
  released = repeatable_rows(first)
  assert len(released) == 2
  shutil.copytree(first, other)
  result = _train(world, output_dir=first)
  world.killed(5, output_dir=other, **settings)
  small_runs.assert_same(_train(world, output_dir=other), result)
  rows = repeatable_rows(first)
  assert rows == repeatable_rows(other)
  # What was released once is released again, and no more.
  assert len(rows) == small_runs.ROUNDS
  for before, after in zip(released, rows, strict=False):
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_a_private_run_does_not_begin_without_checkpoints(world, tmp_path):
  settings = {'privacy': _ledger(), **_SETTINGS}
  world.killed(3, output_dir=tmp_path, **settings)
  shutil.rmtree(tmp_path / 'checkpoints')
  before = (tmp_path / 'metrics.csv').read_bytes()
  with pytest.raises(ProgramError, match='2 rounds .* no checkpoint of them'):
    _train(world, output_dir=tmp_path)
  assert (tmp_path / 'metrics.csv').read_bytes() == before


@pytest.mark.slow
def test_secrets_are_in_checkpoints_only(world, tmp_path, monkeypatch):
  secret = 123456789012345678901234567890123456789
  monkeypatch.setattr(run_state.secrets, 'randbits', lambda bits: secret)
  result = _train(world, output_dir=tmp_path, rounds=2)
  assert str(secret) not in json.dumps(result.privacy)
  holding = {
    path.relative_to(tmp_path).parts[0]
    for path in tmp_path.rglob('*')
    if path.is_file() and str(secret).encode() in path.read_bytes()
  }
  assert holding == {'checkpoints'}


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_noise(world, tmp_path):
  _train(world, output_dir=tmp_path, rounds=2)
  with pytest.raises(programs.ProgramError, match='was begun with .*: privacy'):
    _train(world, output_dir=tmp_path, privacy=_ledger(delta=1e-4))
  with pytest.raises(programs.ProgramError, match='now None'):
    _train(world, output_dir=tmp_path, privacy='unaccounted')
  # Nor as something else than it was.
  with pytest.raises(programs.ProgramError, match='is now .* a simulation'):
    _train(world, output_dir=tmp_path, privacy=_ledger(simulation=True))
  # More rounds with the same noise are counted as what they are.
  longer = _train(
    world, output_dir=tmp_path, privacy=_ledger(rounds=3), rounds=9
  )
  assert longer.privacy['epsilon'] == _ledger(rounds=3).epsilon(9)


@pytest.mark.slow
def test_noise_is_not_used_again_on_other_data(world, tmp_path):
  # Whoever has two sums with the same noise knows their exact difference.
  spec = world.process.example_spec
  world.killed(3, output_dir=tmp_path, privacy=_ledger(), **_SETTINGS)
  before = repeatable_rows(tmp_path)
  for others in (
    small_runs.pack(spec, 'train', _CLIENTS, scale=1.01),  # Other labels.
    small_runs.pack(spec, 'train', _CLIENTS - 1),  # One was deleted.
  ):
    ledger = _ledger(population=len(others))
    with pytest.raises(programs.ProgramError, match='was begun with another'):
      _train(world, output_dir=tmp_path, clients=others, privacy=ledger)
  assert repeatable_rows(tmp_path) == before
  _train(world, output_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('planned', 'settings'),
  [({'population': 13}, {}), ({}, {'clients_per_round': 3})],
)
def test_what_was_not_planned_is_refused(world, planned, settings):
  with pytest.raises(programs.ProgramError, match='Plan what is done'):
    _train(world, privacy=_ledger(**planned), **settings)


def test_clients_that_are_not_drawn_at_random_are_refused(world):
  with pytest.raises(
    programs.ProgramError, match='select_clients: the account'
  ):
    _train(world, select_clients=lambda draw: draw.client_ids)
