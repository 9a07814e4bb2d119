"""Options are the same values in Python and on the command line."""

import dataclasses
import json

import numpy as np
import pytest

from tasks.errors import OptionError
from tasks.experiment import Config
from tasks.experiment import from_recipe
from tasks.experiment import Output
from tasks.experiment import run
from tasks.experiment.command_line.arguments import parse
from tasks.experiment.command_line.flags import define
from tasks.experiment.config import TASKS
from tasks.experiment.options.loop import DryRun
from tasks.experiment.options.loop import Loop
from tasks.experiment.options.optimizers import Optimizer
from tasks.experiment.options.server import Server
from tasks.experiment.runs.folder import Folder
from tasks.experiment.runs.folder import with_flags_of_the_run
from tasks.movielens.task import MovieLensOptions
from tasks.subreddit.options import DocumentSizes
from tests.support import commands

_RECIPES = sorted((commands.ROOT / 'tasks' / 'recipes').glob('*.flags'))


@pytest.mark.parametrize('path', _RECIPES, ids=lambda path: path.stem)
def test_a_config_is_read_back_from_its_flags(tmp_path, path):
  config = from_recipe(path)
  folder = Folder(str(tmp_path))
  folder.claim({**config.flags(), **Output('x').flags()}, set())
  assert parse([f'--flagfile={folder.flags_file}']) == config


def _kept(folder, *lines):
  (folder / 'flags.txt').write_text(''.join(f'{line}\n' for line in lines))
  command = ['tasks/evaluate.py', f'--output_dir={folder}']
  program, *kept, given = with_flags_of_the_run(command)
  assert [program, given] == command
  return kept


def test_no_address_is_taken_from_a_folder(tmp_path, caplog):
  kept = _kept(
    *(tmp_path, '--task=emnist', '--runtime=ray'),
    *('--ray_address=ray://example.org:10001', '# ray_workers is not set'),
    *('--set=ray_folder=/tmp/elsewhere', '--output_dir=/tmp/elsewhere'),
    '--clip_norm=0.5',
  )
  assert kept == ['--task=emnist', '--runtime=ray', '--clip_norm=0.5']
  for said in ('line 3', 'ray://example.org:10001', 'if you trust it'):
    assert said in caplog.text


def test_a_flag_that_a_folder_does_not_know_was_not_set_there(tmp_path):
  folder = Folder(str(tmp_path))
  folder.claim({'rounds': 1, 'clip': 1.0}, set())
  (tmp_path / 'result.json').write_text('{}')
  folder.check({'rounds': 1, 'clip': 1.0, 'test_users': None}, set())
  said = 'clip=1.0 there, clip is not set now; test_users is not set there, --'
  with pytest.raises(OptionError, match=said):
    folder.check({'rounds': 1, 'clip': None, 'test_users': 3}, set())


def test_a_value_is_no_call_for_help(tmp_path):
  (tmp_path / 'flags.txt').write_text('--task=emnist\n')
  run = f'--output_dir={tmp_path}'
  for given in (['--user', 'helper'], ['--user=help'], ['help']):
    command = ['tasks/evaluate.py', run, *given]
    assert '--task=emnist' in with_flags_of_the_run(command)
  for asked in ('--help', '-help', '--helpfull', '-?', '--helpshort=true'):
    command = ['tasks/evaluate.py', asked]
    assert with_flags_of_the_run(command) == command


@pytest.mark.parametrize(
  'line',
  [
    '--flagfile=/tmp/more.txt',
    '--save_model=/tmp/a.keras',  # Of `tasks.evaluate`, but not of a run.
    '--profile_file=/tmp/profile',
    '-output_dir=/tmp',
    'os:system',
  ],
)
def test_what_is_no_flag_of_a_run_is_not_taken_either(tmp_path, line):
  with pytest.raises(OptionError, match=f'txt, line 2: {line} is no flag'):
    _kept(tmp_path, '--task=emnist', line)


def test_no_two_choices_of_a_config_share_a_flag():
  for task in TASKS.values():
    names = [choice.flag for choice in Config(task=task()).choices()]
    assert len(set(names)) == len(names) > 80


def test_train_has_no_more_flags_than_a_person_can_read():
  defined = {**define(Config()), **define(Output()), **define(DryRun())}
  assert len(defined) < 120


def test_a_flag_of_several_tasks_has_each_ones_default():
  for task, users in (('emnist', 20), ('mnist_preference', None)):
    assert parse([f'--task={task}']).task.num_users == users
    assert parse([f'--task={task}', '--users=70']).task.num_users == 70
  assert parse(['--task=ratings']).task.biases
  assert not parse(['--task=ratings', '--nobiases']).task.biases


def test_set_sets_what_has_no_flag(tmp_path):
  config = parse(
    """--task=subreddit --set=mlp_units=8,4 --set=mean_of_places=true
    --server_optimizer=yogi:beta_2=0.99:epsilon=1e-4
    --set=early_stopping_min_delta=0.5 --early_stopping_patience=1""".split()
  )
  sizes = DocumentSizes(mlp_units=(8, 4), mean_of_places=True)
  assert config.task.sizes == sizes
  assert config.loop.early_stopping_min_delta == 0.5
  optimizer = config.server.optimizer
  assert optimizer.kind == 'yogi'
  hparams = optimizer.build().get_hparams(optimizer.build().initialize([]))
  assert (hparams['beta_2'], hparams['epsilon']) == (0.99, 1e-4)
  folder = Folder(str(tmp_path))
  folder.claim(config.flags(), set())
  assert parse([f'--flagfile={folder.flags_file}']) == config


def test_flags_change_what_they_name_and_nothing_else():
  config = Config()
  changed = config.with_flags({'update_learning_rate': 2, 'biases': True})
  before = config.local.update
  assert changed.local.update == dataclasses.replace(before, learning_rate=2.0)
  assert changed.task == MovieLensOptions(biases=True)
  back = changed.with_flags({'update_learning_rate': 0.5, 'biases': False})
  assert back == config
  other = config.with_flags({'task': 'emnist', 'model': 'cnn'})
  assert (other.task.name, other.task.model) == ('emnist', 'cnn')


def test_numbers_of_other_kinds_become_pythons():
  # So that flags.txt says the same, however a number was written.
  loop = Loop(rounds=np.int64(4), oversample=2)
  assert type(loop.rounds) is int and type(loop.oversample) is float
  assert loop.flags()['oversample'] == 2.0


@pytest.mark.parametrize(
  ('make', 'expected'),
  [
    (lambda: Loop(rounds=0), '--rounds=0: give at least 1'),
    (lambda: Loop(rounds=2.0), '--rounds=2.0: give a whole number'),
    (lambda: Loop(rounds=True), '--rounds=True: give a whole number'),
    (lambda: Loop(rounds=2**31), 'give a number below 2147483648'),
    (lambda: Loop(oversample=float('inf')), 'give a finite number'),
    (lambda: Loop(dropout_rate=1.5), '--dropout_rate=1.5: give at most 1'),
    (lambda: Server(aggregator='median'), 'choose one of mean, robust'),
    (lambda: Server(clip_norm='1'), '--clip_norm=1: give a number'),
    (lambda: DocumentSizes(mlp_units=[64]), 'give a tuple of whole numbers'),
    (lambda: DocumentSizes(learned_default=1), 'give True or False'),
    (lambda: MovieLensOptions(data_set=1), '--data_set=1: give a text'),
    (lambda: Config(loop=5), 'loop: give a Loop, found 5'),
    (lambda: Config(algorithm='fedavg'), '--algorithm=fedavg: choose one of'),
    (lambda: Config().with_flags({'runds': 3}), 'Did you mean --rounds?'),
    (lambda: Config().with_flags({'task': 'x'}), '--task=x: choose one of'),
    *(
      (lambda kind=kind: Optimizer('update', 'all', optimizer=kind), expected)
      for kind, expected in {
        'adam:momentum=0.9': (
          '--update_optimizer=adam:momentum: adam has no momentum'
        ),
        'adm': '--update_optimizer=adm: choose one of',
        'sgd:momentun=0.9': 'the names are beta_2, epsilon, momentum',
        'sgd:momentum=much': (
          '--update_optimizer=sgd:momentum=much: give numbers'
        ),
      }.items()
    ),
    (
      lambda: Optimizer('server', 'all', optimizer='adam:beta_2=1'),
      '--server_optimizer=adam:beta_2=1: give a number from 0 to below 1.',
    ),
    *(
      (lambda given=given: parse(given.split()), expected)
      for given, expected in {
        '--nolearned_default': '--learned_default: give --set=learned_default=',
        '--set=knn_tokens=3': 'no option of this name',
        '--set=map_radiu=3': 'no option of this name. Did you mean map_radius?',
        '--set=rounds=3': '--set=rounds=3: give --rounds=3',
        '--set=rounds': '--set=rounds: give NAME=VALUE',
        # Of another task than the default one.
        '--task=subreddit --set=max_chars=few': (
          '--set=max_chars=few: give a whole number'
        ),
        '--task=subreddit --set=mlp_units=a': (
          '--set=mlp_units=a: give whole numbers with commas'
        ),
        '--task=emnist --model=lstm': (
          '--model=lstm: choose one of linear, dense, cnn'
        ),
        '--algorithm=fed_als --biases': (
          'biases=True: fed_als always has biases'
        ),
        '--user_attributes': '--user_attributes: only fed_als reads it',
        '--support_share=0.8': '--split=halves has no share to choose. Give',
        '--set=withstood_share=0.3': 'only trimmed_mean, krum, multi_krum',
        '--set=aggregator=krum --client_weighting=targets': 'counts once',
        '--delta=1e-6': '--delta=1e-06: the run is not private',
        '--initial_clip=1': '--initial_clip=1.0: the run is not private',
        '--noise_multiplier=1 --clip=1 --initial_clip=2': 'does not adapt. Le',
        '--data=synthetic --data_set=ml-1m': '--data_set=ml-1m: with',
        '--ray_address=auto': '--ray_address=auto: give it with --runtime=ray',
        '--task=movielens_ranking --algorithm=fed_ials --biases': 'no biases',
        '--task=emnist --users=5 --emnist_partition=writers': '--users=5: each',
        '--task=emnist --set=emnist_alpha=1': '--set=emnist_alpha=1.0: it is',
        '--task=next_word --set=next_word_words_per_user=7': 'exact counts',
        '--csv=a.csv': '--csv=a.csv: the task movielens does not read it. Leav',
        '--set=max_chars=9': 'or give --task=subreddit or sticker.',
        '--runds=3': 'runds',
        'rounds': 'unknown arguments',
      }.items()
    ),
    (lambda: from_recipe('dmo'), 'Did you mean demo?'),
    (lambda: from_recipe('demo', runds=3), 'Did you mean --rounds?'),
  ],
)
def test_impossible_choices_are_refused(make, expected):
  with pytest.raises(OptionError) as caught:
    make()
  assert expected in str(caught.value)


@pytest.mark.slow
def test_python_runs_what_the_program_runs():
  result = run(parse(commands.SMALL))
  written = json.loads((commands.trained().folder / 'result.json').read_text())
  report = json.loads(json.dumps(result.report))
  for measured in ('seconds', 'peak_rss_mb'):
    del written[measured], report[measured]
  assert report == written
  assert 'test (unseen), best round' in str(result)
  assert result.trained is not None and result.trained.rounds == 6
