"""A private vocabulary is drawn once, kept, and read by every program."""

import functools
import json
import pathlib
import shutil
from unittest import mock

import pytest

from tasks.experiment.runs.folder import Folder
from tasks.experiment.runs.folder import RELEASED_FILE
from tasks.next_word import private_words
from tasks.next_word import synthetic
from tests.support import commands
from tests.support.commands import run_here
from tests.support.commands import run_well

# 42 of 60 authors train. 50 words are wanted, and of some 60 more than 40 pass.
_PRIVATE = (
  '--flagfile=tasks/recipes/next_word_fed_recon.flags',
  *('--data=synthetic', '--clients_per_round=8', '--evaluate_every=1'),
  *('--next_word_vocabulary_size=50', '--next_word_buckets=5'),
  *('--set=next_word_max_tokens=8', '--next_word_embedding=4'),
  *('--lstm_units=4', '--set=next_word_projection=4', '--jit=false'),
  *('--client_weighting=uniform', '--noise_multiplier=0.5', '--delta=0.02'),
  '--next_word_vocabulary_noise=0.3',
  '--set=next_word_vocabulary_delta=0.01',
  '--set=next_word_words_per_user=30',
)


@pytest.fixture(scope='module', autouse=True)
def fixture_few_sentences():
  with pytest.MonkeyPatch.context() as patch:
    few = functools.partial(synthetic.generate, 60, 8)
    patch.setattr(synthetic, 'generate', few)
    yield


@pytest.fixture(scope='module', name='draws')
def fixture_draws():
  """Counts the draws of vocabularies."""
  draws = mock.Mock(side_effect=private_words.draw)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(private_words, 'draw', draws)
    yield draws


@pytest.fixture(scope='module', name='trained')
def fixture_trained(draws, tmp_path_factory):
  """The folder of a run of one round whose noise nobody knows."""
  folder = tmp_path_factory.mktemp('trained') / 'out'
  before = draws.call_count
  run_well('train', *_PRIVATE, '--rounds=1', f'--output_dir={folder}')
  assert draws.call_count == before + 1
  return folder


@pytest.fixture(name='copy')
def fixture_copy(trained, tmp_path):
  folder = tmp_path / 'out'
  shutil.copytree(trained, folder)
  return folder


def _words(folder: pathlib.Path) -> list[str]:
  return (Folder(str(folder)).read_released() or {})['words']


@pytest.mark.slow
def test_words_are_kept_for_the_owner_alone(trained):
  path = trained / RELEASED_FILE
  assert path.stat().st_mode & 0o777 == 0o600
  kept = json.loads(path.read_text())['released']
  assert {'terms', 'counted', 'noise', 'words'} == set(kept)
  assert kept['terms']['noise_multiplier'] == 0.3
  vocabulary = commands.result(trained)['data']['vocabulary']
  assert vocabulary == len(kept['words']) > 20


@pytest.mark.slow
def test_every_program_reads_the_words(trained, draws, tmp_path):
  before = draws.call_count
  result = commands.result(trained)
  outcome = run_well('evaluate', f'--output_dir={trained}')
  measured = json.loads(outcome.output)
  assert measured['loss'] == result['best']['test']['unseen']['loss']
  for name, *flags in (
    ('new_users', '--support=1'),
    ('export', f'--to={tmp_path / "export"}', '--formats=saved_model'),
  ):
    run_well(name, f'--output_dir={trained}', *flags)
  assert draws.call_count == before


@pytest.mark.slow
def test_a_run_whose_noise_nobody_knows_goes_on(copy, draws):
  before, words = draws.call_count, _words(copy)
  outcome = run_well('train', *_PRIVATE, '--rounds=2', f'--output_dir={copy}')
  assert 'validation, round 2' in outcome.output
  assert draws.call_count == before and _words(copy) == words


@pytest.mark.slow
def test_without_the_words_no_program_goes_on(copy, draws):
  before = draws.call_count
  (copy / RELEASED_FILE).unlink()
  for name, *flags in (
    ('evaluate',),
    ('users',),
    ('new_users',),
    ('export', '--to=export'),
    ('train', *_PRIVATE, '--rounds=2'),
    ('train', *_PRIVATE, '--rounds=2', '--dry_run'),
    ('audit', *_PRIVATE, '--rounds=2', '--canaries=8'),
  ):
    outcome = run_here(name, *flags, f'--output_dir={copy}')
    commands.is_for_users(outcome, f'{RELEASED_FILE}: there is no such file')
  assert draws.call_count == before


@pytest.mark.slow
@pytest.mark.parametrize(
  ('flags', 'said'),
  [
    (('--delta=0.05',), 'must be below 1 / population'),
    (('--delta=0.009',), 'What is released once must leave something'),
    (('--clients_per_round=43',), '43'),
    (('--next_word_vocabulary_noise=50',), 'A word is told if'),
    (('--user_form=table',), '--user_form=table'),
  ],
)
def test_a_start_that_is_refused_draws_nothing(tmp_path, draws, flags, said):
  before = draws.call_count
  outcome = run_here('train', *_PRIVATE, *flags, f'--output_dir={tmp_path}/out')
  commands.is_for_users(outcome, said)
  assert draws.call_count == before
  assert not (tmp_path / 'out' / RELEASED_FILE).exists()


@pytest.mark.slow
def test_a_plan_draws_nothing(draws):
  before = draws.call_count
  outcome = run_here('train', *_PRIVATE, '--rounds=1', '--dry_run')
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  assert 'release: drawn when the run begins' in outcome.output
  assert draws.call_count == before


@pytest.mark.slow
def test_nothing_is_said_of_words_unkept(tmp_path, monkeypatch, caplog):
  full = OSError(28, 'No space left on device', RELEASED_FILE)
  monkeypatch.setattr(Folder, 'keep_released', mock.Mock(side_effect=full))
  outcome = run_here('train', *_PRIVATE, f'--output_dir={tmp_path}/out')
  commands.is_for_users(outcome, RELEASED_FILE, 'No space left')
  assert 'pass the threshold' not in caplog.text


@pytest.mark.slow
def test_a_simulation_draws_the_same_words_again(tmp_path, draws):
  """So a folder of an older version, which did not keep them, goes on."""
  out = f'--output_dir={tmp_path}/out'
  seeded = (*_PRIVATE, '--noise_seed=3')
  assert run_here('train', *seeded, '--rounds=1', out).status == 0
  before, words = draws.call_count, _words(tmp_path / 'out')
  (tmp_path / 'out' / RELEASED_FILE).unlink()
  result = commands.result(tmp_path / 'out')
  measured = json.loads(run_here('evaluate', out).output)
  assert measured['loss'] == result['best']['test']['unseen']['loss']
  assert run_here('train', *seeded, '--rounds=2', out).status == 0
  assert draws.call_count == before + 2
  assert _words(tmp_path / 'out') == words
