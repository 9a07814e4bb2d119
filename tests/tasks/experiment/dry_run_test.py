"""`--dry_run` says what a run would do and cost, and writes nothing."""

import re

import pytest

from tasks.experiment.runs import dry_run
from tests.support import commands
from tests.support.commands import run_here


def _plan(*arguments: str) -> dict[str, str]:
  outcome = run_here('train', *commands.SMALL, '--dry_run', *arguments)
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  lines = (line.split(':', 1) for line in outcome.output.splitlines()[1:])
  return {title: text.strip() for title, text in lines}


def test_bytes_and_seconds_are_said_for_people():
  # 3,200 bytes for each of five clients in six rounds.
  counted = {'download_bytes': 3200, 'upload_bytes': 3200}
  assert dry_run._bytes(counted, 30, 30) == (
    '3,200 down and 3,200 up for a client in a round; 96 kB down and 96 kB up '
    'in all'
  )
  # Where rows are sent, they are what travels.
  said = dry_run._bytes({**counted, 'upload_bytes_by_rows': 100.0}, 30, 30)
  assert said.endswith('96 kB down and 3 kB up in all')
  assert dry_run._size(2.5e13) == '25 TB' and dry_run._size(999) == '999 B'
  found = [dry_run._time(seconds) for seconds in (3.4, 600, 9000)]
  assert found == ['3 s', '10 min', '2.5 h']


def test_clients_in_reserve_load_the_model():
  counted = {'download_bytes': 10, 'upload_bytes': 5}
  said = dry_run._bytes(counted, loads=8, sends=4)
  assert said.endswith('80 B down and 20 B up in all')


@pytest.mark.slow
def test_a_plan_says_what_a_run_would_do(tmp_path):
  folder = tmp_path / 'out'
  plan = _plan(f'--output_dir={folder}')
  assert not folder.exists()
  assert plan['folder'] == f'{folder}, a new run'
  assert plan['task'] == (
    'movielens: 480 clients to train, 60 to validate, 60 to test (unseen)'
  )
  assert plan['method'].startswith('fed_recon, clients send updates of global')
  assert plan['method'].endswith('remember nothing')
  # The last of two phases.
  assert plan['phase'].startswith('train global on ')
  # Two hundred items with four factors; a user has four.
  assert plan['weights'] == '800 global, 4 local (at each client)'
  assert plan['rounds'] == '6 of 5 clients, validation every 2'
  # Four bytes each; six rounds of five clients.
  assert plan['bytes'].startswith('3,200 down and 3,200 up for a client')
  assert '96 kB down' in plan['bytes']
  assert plan['privacy'] == 'none; the run is not private'
  said = r'about \d+ (s|min), \d+ (s|min) of them before'
  assert re.match(said, plan['seconds'])
  assert 'estimated from 4 rounds' in plan['seconds']


@pytest.mark.slow
@pytest.mark.parametrize('parts', ['', 'global'])
def test_a_plan_of_a_private_run_says_its_epsilon(parts):
  own = '--target_epsilon=8', '--noise_seed=0', f'--set=clip_parts={parts}'
  plan = _plan(*own)
  assert 'folder' not in plan
  (epsilon,) = re.findall(r'^epsilon ([\d.]+) at delta 1e-05', plan['privacy'])
  assert 7.9 < float(epsilon) <= 8.0
  assert plan['privacy'].endswith('A SIMULATION')
  # 800 numbers of five clients: the root of 800 is 28.3.
  noise = r'norm (.*) against 0.1 of the largest mean update: .* times as long'
  (found,) = re.findall(noise, plan['noise'])
  (multiplier,) = re.findall(r'noise multiplier ([\d.]+),', plan['privacy'])
  sum_multiplier = (float(multiplier) ** -2 - 0.5**-2) ** -0.5
  assert float(found) == pytest.approx(0.1 * sum_multiplier * 28.3 / 5, 0.05)


@pytest.mark.slow
def test_a_plan_looks_into_the_folder():
  done = commands.trained()
  before = commands.files(done.folder)
  plan = _plan(f'--output_dir={done.folder}')
  assert plan['folder'].endswith('which has the result of 6 rounds')
  assert commands.files(done.folder) == before
  flags = '--dry_run', '--num_factors=5'
  outcome = commands.train_small(done.folder, *flags)
  commands.is_for_users(outcome, 'other flags', '--num_factors=5 now')


@pytest.mark.slow
@pytest.mark.parametrize('algorithm', ['furl', 'centralized'])
def test_other_algorithms_have_plans(algorithm):
  plan = _plan(f'--algorithm={algorithm}')
  assert plan['method'].startswith(algorithm)
  assert 'seconds' in plan
