"""Private runs of HPFL as a user asks for them: by flags."""

from collections.abc import Iterator
import functools
from typing import Any

import numpy as np
import pytest

from tasks.errors import OptionError
from tasks.experiment import Config
from tasks.experiment import from_recipe
from tasks.experiment import run
from tasks.experiment.config import TASKS
from tasks.experiment.trainable import Trainable
from tasks.task import Data
from tests.support import commands
from tests.support import small_schools
from tff_partial.dp import mechanisms

_PRIVATE: dict[str, Any] = {
  'data': 'synthetic',
  'rounds': 2,
  'clients_per_round': 3,
  'reconstruction_epochs': 1,
  'jit': 'false',
  'target_epsilon': 8.0,
  'delta': 1e-3,
  'clip': 0.1,  # So few schools leave an adaptive one no room.
  'hpfl_drafts': 'sums',
  'hpfl_num_centers': 2,
}


@pytest.fixture(scope='module', autouse=True)
def fixture_small_data() -> Iterator[None]:
  with small_schools.instead():
    yield


def _config(**flags: Any) -> Config:
  return from_recipe('assist_hpfl').with_flags({**_PRIVATE, **flags})


@functools.cache
def _task() -> Any:
  return TASKS['assist']().load(Data(data='synthetic'), 0)


@pytest.mark.slow
def test_hpfl_says_what_it_promises_to_a_school() -> None:
  result = run(_config(noise_seed=1))
  said = result.report['privacy']
  assert 7.9 < said['epsilon'] <= 8.0
  assert (said['sampling'], said['dp']) == ('poisson', 'central')
  assert said['population'] == 3  # Schools, not their 25 users.
  assert said['simulation'] is True
  assert said['noise_stddev'] > 0.0
  assert f'epsilon {said["epsilon"]:.4g} at delta 0.001' in str(result)
  assert result.report['train'] == {}  # Nothing exact of the cohorts.
  seen = result.report['test']['seen']
  assert np.isfinite(seen['rmse'])
  # Accuracies and tables stay with the schools.
  assert result.trained is not None
  kept = result.trained.client_store.client('2')
  assert kept['held/accuracy/on_each'].shape == (4,)
  assert kept['num_rows/user/embeddings'] == 12
  held = result.trained.state.client_work['server']
  assert set(held) == {'threshold', 'centers'}
  for centers in held['centers'].values():
    assert centers['rows'].shape == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'where'),
  [
    ({}, mechanisms.CENTRAL),
    # Without drafts it does not matter how they would be made.
    (
      {
        'algorithm': 'hpfl_k',
        'hpfl_drafts': 'centers',
        'hpfl_num_centers': None,
      },
      mechanisms.CENTRAL,
    ),
    ({'algorithm': 'hpfl_r'}, mechanisms.CENTRAL),
    ({'dp': 'local'}, mechanisms.LOCAL),
  ],
  ids=['hpfl', 'hpfl_k', 'hpfl_r', 'local'],
)
def test_what_the_plan_says_is_built(flags: dict[str, Any], where: str) -> None:
  trainable = Trainable(_config(**flags), _task())
  mechanism = trainable.process.mechanism
  assert mechanism is not None and trainable.ledger is not None
  assert mechanism.where == where
  trainable.ledger.check(mechanism)


@pytest.mark.parametrize(
  ('flags', 'expected'),
  [
    (
      {'hpfl_drafts': 'centers'},
      '--hpfl_drafts=centers: clients send centers of their rows as they are, '
      'which is not covered by --target_epsilon and --noise_multiplier. Use '
      '--hpfl_drafts=sums, or --algorithm=hpfl_k, which has no drafts.',
    ),
    (
      {'hpfl_num_centers': None},
      '--hpfl_num_centers=None: how many global centers there are would follow '
      'from the exact numbers of users and items of all clients, which is not '
      'covered by --target_epsilon and --noise_multiplier. Give a number, such '
      'as --hpfl_num_centers=10.',
    ),
    ({'hpfl_num_centers': 0}, '--hpfl_num_centers=0: give at least 1'),
    ({'client_weighting': 'examples'}, '--client_weighting=uniform'),
    ({'aggregator': 'robust'}, '--set=aggregator=robust'),
  ],
)
def test_what_is_exact_is_refused(flags: dict[str, Any], expected: str) -> None:
  for algorithm in ('hpfl', 'hpfl_r'):
    with pytest.raises(OptionError) as caught:
      _config(algorithm=algorithm, **flags)
    assert expected in str(caught.value)


def test_the_binary_says_which_flag_to_change(tmp_path: Any) -> None:
  outcome = commands.run_here(
    'train',
    '--flagfile=tasks/recipes/assist_hpfl.flags',
    '--data=synthetic',
    '--target_epsilon=8',
    f'--output_dir={tmp_path}',
  )
  commands.is_for_users(outcome, 'Use --hpfl_drafts=sums')
