"""Private runs as the user of the binaries sees them."""

import json

import pytest
import tensorflow as tf

from tasks import audit
from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.config import TASKS
from tasks.experiment.runs.running import load
from tasks.task import Data
from tests.support import commands
from tests.support.commands import repeatable_rows
from tests.support.commands import result as read
from tests.support.commands import run_here
from tests.support.commands import run_well
from tests.support.commands import train_small
from tff_partial.dp import dp_queries
from tff_partial.training.errors import ProgramError

_PRIVATE = ('--target_epsilon=8', '--delta=1e-3')
_NOISE = ('--noise_multiplier=0.4', '--delta=1e-3', '--noise_seed=5')


@pytest.fixture(scope='module', name='private')
def fixture_private(tmp_path_factory):
  """A private run of which nobody knows the seeds, and how it ended."""
  folder = tmp_path_factory.mktemp('private')
  return folder, train_small(folder, *_PRIVATE, run=run_well)


# ---- what a private run says -------------------------------------------------


@pytest.mark.slow
def test_a_result_says_what_is_protected_and_what_is_not(private):
  folder, outcome = private
  said = read(folder)['privacy']
  assert 7.9 < said['epsilon'] <= 8.0
  assert said['noise_multiplier'] > 0.1
  how = {'dp': 'central', 'mechanism': 'gaussian', 'sampling': 'poisson'}
  expected = {
    'assumed_public': ['population', 'list of items', 'scale of ratings'],
    'delta': 1e-3,
    'neighbours': 'one user more or less',
    'population': 480,
    'simulation': False,
    'trusted': 'the server, and who can read the checkpoints',
  }
  assert said.items() >= {**how, **expected}.items()
  for name in ('clip', 'share_clipped', 'signal_to_noise', 'noise_stddev'):
    assert said[name] >= 0.0
  assert {'validation', 'test', 'best'} < set(said['not_private'])
  assert 'share_clipped_not_private' not in said
  assert read(folder)['train'] == {}
  rows = repeatable_rows(folder)
  spent = [float(row['privacy/epsilon']) for row in rows]
  assert spent == sorted(spent) and spent[-1] == said['epsilon']
  assert not {'loss', 'num_clients', 'rmse'} & set(rows[0])
  assert f'epsilon {said["epsilon"]:.4g} at delta 0.001' in outcome.output
  assert 'Not private: rounds, diverged, data, validation' in outcome.output
  assert 'SIMULATION' not in outcome.output


@pytest.mark.slow
def test_what_is_exact_is_written_on_request_and_labelled(tmp_path):
  flags = '--rounds=2', '--diagnostics'
  train_small(tmp_path, *_NOISE, *flags, run=run_well)
  (row, _) = repeatable_rows(tmp_path)
  assert int(row['num_clients_not_private']) >= 0
  assert 'loss_not_private' in row
  result = read(tmp_path)
  assert 'train' in result['privacy']['not_private']
  assert 'privacy/share_clipped_not_private' in result['privacy']['not_private']
  assert result['train']['num_clients'] >= 0


@pytest.mark.slow
def test_every_task_says_what_it_learned_before_training():
  # Public, or paid for, or absent: a vocabulary of training texts is neither.
  said = {
    name: task().load(Data(data='synthetic'), seed=0).learned_from_training
    for name, task in TASKS.items()
  }
  of_schools = 'list of attributes', 'median numbers of users and items'
  assert said == {
    'assist': of_schools,
    'emnist': (),
    'mnist_preference': (),
    'movielens': ('list of items', 'scale of ratings'),
    'next_word': ('vocabulary',),
    'ratings': ('list of items', 'scale of ratings'),
    'movielens_ranking': ('list of items',),
    'movielens_hpfl': of_schools,
    'speech_preference': (),
    'sticker': ('vocabulary',),
    'subreddit': ('list of subreddits', 'vocabulary'),
  }


@pytest.mark.slow
def test_more_rounds_of_a_target_would_need_more_noise(private):
  folder, _ = private
  before = commands.files(folder)
  outcome = train_small(folder, *_PRIVATE, '--rounds=8')
  commands.is_for_users(outcome, '--rounds=6 there, --rounds=8 now')
  assert commands.files(folder) == before


@pytest.mark.slow
def test_a_private_run_can_be_measured_again(private):
  folder, _ = private
  outcome = run_well('evaluate', f'--output_dir={folder}', '--weights=last')
  measured = json.loads(outcome.output)
  assert measured['rmse'] == read(folder)['test']['unseen']['rmse']


@pytest.mark.slow
def test_a_simulation_repeats_and_is_labelled(tmp_path):
  folders = [tmp_path / name for name in ('one', 'other')]
  for folder in folders:
    outcome = train_small(folder, *_NOISE, '--rounds=2', run=run_well)
    assert 'A SIMULATION' in outcome.output
    assert read(folder)['privacy']['simulation'] is True
  assert repeatable_rows(folders[0]) == repeatable_rows(folders[1])
  # With the same noise, more rounds are counted as what they are.
  train_small(folder, *_NOISE, '--rounds=4', run=run_well)
  spent = [float(row['privacy/epsilon']) for row in repeatable_rows(folder)]
  assert len(spent) == 4 and spent == sorted(set(spent))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'sampling'),
  [
    (('--dp_mechanism=tree', '--clip=0.5'), 'once_per_tree'),
    (('--dp=local', '--clip=0.5'), 'local'),
    (('--dp_sampling=fixed',), 'fixed_size'),
    (('--clip=0.5', '--algorithm=furl'), 'poisson'),
    (('--algorithm=p_fed_me',), 'poisson'),
    (('--algorithm=fed_sgd',), 'poisson'),
    # At its default rate, Adam follows the noise until nothing is left.
    (('--algorithm=fed_adam', '--server_learning_rate=0.01'), 'poisson'),
  ],
)
def test_other_private_runs(tmp_path, flags, sampling):
  train_small(tmp_path, *_NOISE, *flags, run=run_well)
  said = read(tmp_path)['privacy']
  assert said['sampling'] == sampling
  assert 0.0 < said['epsilon'] < float('inf')
  assert said['clip'] > 0.0


def test_a_tree_does_not_end_with_the_run_which_may_go_on():
  flags = (*commands.SMALL, *_NOISE, '--dp_mechanism=tree', '--clip=0.5')
  runs = [
    command_line.parse([*flags, '--oversample=2', f'--rounds={rounds}'])
    for rounds in (2, 4)
  ]
  first, later = (run.privacy.ledger(480, run.loop).plan for run in runs)
  assert first.terms == later.terms and first.epsilon < later.epsilon
  assert first.sampling.rounds_per_tree == 48


@pytest.mark.slow
def test_parts_of_an_update_have_clips_of_their_own(tmp_path):
  train_small(tmp_path, *_NOISE, '--set=clip_parts=global', run=run_well)
  said = read(tmp_path)['privacy']
  assert said['global/clip'] > 0.0 and 'clip' not in said


# ---- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
  ('flags', 'expected'),
  [
    (('--noise_multiplier=1',), '--target_epsilon=8.0 and --noise_multiplier'),
    (('--target_epsilon=nan',), '--target_epsilon=nan: give a finite number'),
    (('--delta=0.01',), 'below 1 / population'),
    (('--clip=0',), 'clip'),
    (('--client_weighting=examples',), '--client_weighting=uniform'),
    (('--set=aggregator=robust',), '--set=aggregator=robust'),
    (('--centred',), '--public_mean'),
    (('--algorithm=furl', '--set=private_rule=scaled'), 'private_rule=keep'),
    (('--algorithm=fed_embed_som', '--set=map_follows_nearest=true'), 'single'),
    (('--algorithm=centralized',), '--algorithm=centralized'),
    (('--algorithm=fed_proto',), '--algorithm=fed_proto: its clients send'),
    (('--simulated_population=9999',), '--noise_seed'),
    (('--dp=local',), 'Give --clip'),
    (('--dp=local', '--clip=1', '--dp_mechanism=tree'), '--dp=central'),
    (('--dp=local', '--clip=1', '--set=clip_parts=a'), 'clip_parts=a: with'),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in [
        (('--target_epsilon=0.001',), 'the nearest possible is'),
        (('--set=clip_parts=global,group',), "but clients send ['global']"),
        (('--oversample=2',), 'none is asked in reserve'),
      ]
    ),
  ],
)
def test_what_is_not_covered_is_refused(tmp_path, flags, expected):
  outcome = train_small(tmp_path, *_PRIVATE, *flags)
  commands.is_for_users(outcome, expected)


@pytest.mark.parametrize(
  'flag',
  [
    *('--clip=1', '--noise_seed=0', '--dp_sampling=fixed', '--diagnostics'),
    *('--simulated_population=9999', '--dp=local', '--dp_mechanism=tree'),
  ],
)
def test_what_says_nothing_without_a_goal_is_refused(tmp_path, flag):
  outcome = train_small(tmp_path, flag)
  commands.is_for_users(outcome, flag, 'the run is not private')


# ---- an attack on a recipe of one's own --------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('flags', [(), ('--dp=local', '--clip=0.5')])
def test_an_audit_says_what_a_run_proves_about_its_epsilon(tmp_path, flags):
  outcome = run_well(
    *('audit', *commands.SMALL, '--noise_multiplier=1', '--delta=1e-3'),
    *('--clients_per_round=100', '--rounds=3', '--canaries=100'),
    *(*flags, f'--output_dir={tmp_path}'),
  )
  assert 'is not refuted' in outcome.output
  found = json.loads((tmp_path / 'audit.json').read_text())
  assert 0.0 <= found['proved_epsilon'] < found['claimed_epsilon']
  assert found['canaries'] == 100 and 8 <= found['guesses'] <= 100


def test_an_audit_of_real_users_is_said_to_be_one_more_release(tmp_path):
  where = (f'--data_dir={tmp_path}', f'--output_dir={tmp_path / "audit"}')
  outcome = run_here('audit', '--noise_multiplier=1', *where)
  assert 'its epsilon adds to that of any other run' in outcome.output


@pytest.mark.slow
def test_what_an_audit_cannot_watch_is_refused(tmp_path):
  flags = '--algorithm=fed_att', '--dp=local', '--clip=0.5', '--canaries=9'
  outcome = run_here(
    *('audit', *commands.SMALL, '--noise_multiplier=1', '--delta=1e-3'),
    *(*flags, f'--output_dir={tmp_path}'),
  )
  commands.is_for_users(outcome, 'attention changes', 'Audit fed_avg')


@pytest.mark.slow
def test_an_audit_finds_out_a_run_with_too_little_noise(tmp_path, monkeypatch):
  # As if somebody had mistaken a variance for a deviation, or worse.
  monkeypatch.setattr(
    dp_queries, 'standard_normal', lambda _, shape: tf.zeros(shape, tf.double)
  )
  outcome = run_here(
    *('audit', *commands.SMALL, '--noise_multiplier=3', '--clip=0.5'),
    *('--delta=1e-4', '--clients_per_round=290', '--rounds=3'),
    *('--canaries=100', f'--output_dir={tmp_path}'),
  )
  commands.is_for_users(outcome, 'is refuted', 'Do not publish')
  found = json.loads((tmp_path / 'audit.json').read_text())
  assert found['proved_epsilon'] > found['claimed_epsilon']


@pytest.mark.slow
def test_an_audit_draws_cohorts_as_its_run():
  config = command_line.parse(
    [*commands.SMALL, '--noise_multiplier=1', '--clip=0.5', '--oversample=2']
  )
  with pytest.raises(ProgramError, match='oversample=2'):
    audit._attacked(config, load(config), 8)


def _hidden(asked, *arguments):
  config = command_line.parse(
    [*commands.SMALL, '--noise_multiplier=1', '--clip=0.5', *arguments]
  )
  return audit.with_canaries(config, load(config), asked)[1].number


@pytest.mark.slow
def test_an_audit_has_as_many_canaries_as_the_run_can_hide():
  # Each has an element of the update.
  with pytest.raises(OptionError, match='--canaries=100000.* Give .* or fewer'):
    _hidden(100_000, '--delta=1e-6')
  # 480 clients and 19 canaries are fewer than 500.
  with pytest.raises(OptionError, match='--canaries=20.* Give 19 or fewer'):
    _hidden(20, '--delta=2e-3')
  assert _hidden(19, '--delta=2e-3') == 19
  assert _hidden(None, '--delta=2e-3') == 19
  assert _hidden(None, '--delta=1e-6') == 500
