"""Every kind of bad input ends with one paragraph: thing, place and remedy."""

from collections.abc import Callable, Iterator
import contextlib
import json
import os
import pathlib
import resource
import shutil
from typing import Any

import psutil
import pytest
import tensorflow as tf

from tasks.experiment.command_line import flags as run_flags
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import Folder
from tests.support import commands
from tests.support.commands import is_for_users
from tests.support.commands import run_here
import tff_partial
from tff_partial import errors
from tff_partial.training import programs


@pytest.fixture(autouse=True, name='no_child_is_left')
def fixture_no_child_is_left():
  before = psutil.Process().children(recursive=True)
  yield
  assert psutil.Process().children(recursive=True) == before


# ---- data --------------------------------------------------------------------


def _write_data(folder: pathlib.Path) -> pathlib.Path:
  """Ratings in the format of MovieLens 1M; returns the file of ratings."""
  folder.mkdir(parents=True)
  (folder / 'movies.dat').write_text(
    ''.join(f'{item}::Film {item} (1999)::Drama\n' for item in range(1, 10))
  )
  (folder / 'users.dat').write_text(
    ''.join(f'{user}::F::25::1::55117\n' for user in range(1, 31))
  )
  path = folder / 'ratings.dat'
  path.write_text(
    ''.join(
      f'{user}::{item}::{1 + (user + item) % 5}::97830{item}\n'
      for user in range(1, 31)
      for item in range(1, 10)
    )
  )
  return path


def _with_line(number: int, line: bytes) -> Callable[[pathlib.Path], None]:
  def change(path: pathlib.Path) -> None:
    lines = path.read_bytes().splitlines()
    lines[number - 1] = line
    path.write_bytes(b'\n'.join(lines) + b'\n')

  return change


# What is done to the file of ratings, and what the message must say.
_DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], tuple[str, ...]]] = {
  'cut off': (
    lambda path: path.write_bytes(path.read_bytes()[:-6]),
    ('ratings.dat: cannot be read', 'cut off in line 270', '--download'),
  ),
  'a field too few': (
    _with_line(7, b'1::7::978307'),
    ('ratings.dat, line 7', "'rating' should be", "'978307'", '--download'),
  ),
  'another separator': (
    _with_line(1, b'1,1,3,978301'),
    ('ratings.dat: cannot be read', 'a line is user_id::item_id::'),
  ),
  'a rating that is no number': (
    _with_line(12, b'2::3::good::978303'),
    ('ratings.dat, line 12', "'rating' should be", "found 'good'"),
  ),
  'a rating that is NaN': (
    _with_line(12, b'2::3::nan::978303'),
    ('ratings.dat, line 12', "'rating' should be", "found 'nan'"),
  ),
  'a rating off the scale': (
    _with_line(12, b'2::3::6::978303'),
    ('ratings.dat, line 12', 'a rating on the scale', "found '6'"),
  ),
  'a user that is no number': (
    _with_line(12, b'Anna::3::4::978303'),
    ('ratings.dat, line 12', "'user_id' should be", "found 'Anna'"),
  ),
  'a rating twice': (
    _with_line(12, b'2::1::4::978303'),
    ('ratings.dat, line 12', 'a second line', 'line 10'),
  ),
  'no text': (
    _with_line(5, b'1::5::\xff::978303'),
    ('ratings.dat, line 5', "found 'ÿ'"),
  ),
  'nothing': (lambda path: path.write_text(''), ('ratings.dat', 'empty')),
  'an item that nobody describes': (
    _with_line(5, b'1::77::3::978305'),
    ('movies.dat', 'item 77'),
  ),
  'its neighbour missing': (
    lambda path: (path.parent / 'movies.dat').unlink(),
    ('movies.dat', 'No such file'),
  ),
  'few users': (
    lambda path: path.write_text('1::1::3::97\n2::1::3::97\n'),
    ('2 users cannot be divided', 'more users'),
  ),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_damaged_data(tmp_path, damage):
  path = _write_data(tmp_path / 'data' / 'movielens' / 'ml-1m')
  change, expected = _DAMAGES[damage]
  change(path)
  outcome = run_here(
    'train', f'--data_dir={tmp_path}/data', f'--output_dir={tmp_path}/out'
  )
  is_for_users(outcome, *expected)


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--data_dir='], ['no data folder is named', '--data_dir', 'synthetic']),
    (['--data_dir={here}/missing'], ['{here}/missing', 'does not exist']),
    (['--data_dir={here}'], ['{here}', 'no MovieLens ratings', '--download']),
    (['--data_dir={here}/file'], ['{here}/file', 'not a folder']),
    (['--data_dir={here}', '--data_set=ml-2m'], ["'ml-2m'", 'ml-1m']),
    (
      ['--data_dir={here}', '--data_set=ml-2m', '--download'],
      ["'ml-2m'", 'ml-1m'],
    ),
  ],
)
def test_missing_data(tmp_path, arguments, expected):
  (tmp_path / 'file').write_text('')
  outcome = run_here(
    'train',
    *(argument.format(here=tmp_path) for argument in arguments),
    f'--output_dir={tmp_path}/out',
  )
  is_for_users(outcome, *(part.format(here=tmp_path) for part in expected))
  # What was typed wrong does not stand in the way of the next attempt.
  again = run_here(
    'train',
    '--data=synthetic',
    '--support_share=2',
    f'--output_dir={tmp_path}/out',
  )
  is_for_users(again, '--support_share')


@pytest.mark.slow
def test_documents_at_their_worst(tmp_path):
  """A run on nothing but what the writers of readers forget."""
  (tmp_path / 'sticker').mkdir()
  texts = [
    '\ud800',
    '\0',
    '\U0001f600' * 3,
    '\u202e\u05e9',
    'a' + '\u0301' * 99,
  ]
  lines = [
    json.dumps(
      {'user': user, 'text': text, 'label': (n + place) % 2, 'time': n}
    )
    for place, user in enumerate(['\0', '\U0001f600', '\u202e', 'x' * 5_000])
    for n, text in enumerate([*texts, 'x' * 1_000_000, *texts, *texts])
  ]
  (tmp_path / 'sticker' / 'a.jsonl').write_text('\n'.join(lines))
  outcome = run_here(
    'train',
    '--task=sticker',
    '--algorithm=furl',
    *commands.TINY_DOCUMENTS,
    '--data=real',
    f'--data_dir={tmp_path}',
    '--min_examples=1',
    '--clients_per_round=3',
    '--rounds=2',
    '--evaluate_every=1',
    '--jit=false',
    f'--output_dir={tmp_path}/out',
  )
  assert (outcome.status, outcome.errors) == (0, ''), outcome
  assert 'nan' not in outcome.output
  # Whoever is called so is found again.
  shown = run_here(
    'clients', f'--output_dir={tmp_path}/out', '--client=\U0001f600'
  )
  assert shown.status == 0 or 'holds nothing of this' in shown.errors, shown


@pytest.mark.slow
def test_no_client_has_enough_examples(tmp_path):
  outcome = run_here(
    'train',
    *commands.SMALL,
    '--min_examples=100000',
    f'--output_dir={tmp_path}',
  )
  is_for_users(outcome, 'None of 480 clients', '100000', 'min_examples')


# ---- flags -------------------------------------------------------------------


@pytest.mark.parametrize(
  'arguments, expected',
  [
    # What absl finds.
    (['--raunds=3'], ['Unknown command line flag', 'raunds', 'rounds']),
    (['--runtime=cluster'], ['runtime', 'cluster', 'cohort', 'native']),
    (['--algorithm=fed_best'], ['algorithm', 'fed_best', 'fed_recon']),
    (['--task=chess'], ['task', 'chess', 'movielens']),
    (['--update_optimizer=lion'], ['update_optimizer', 'lion', 'adagrad']),
    (['--rounds=ten'], ['--rounds=ten', 'int()']),
    (['--rounds=-1'], ['--rounds=-1', 'at least 1']),
    (['--rounds=0'], ['--rounds=0', 'at least 1']),
    (['--batch_size=0'], ['--batch_size=0', 'at least 1']),
    (['--evaluate_every=0'], ['--evaluate_every=0', 'at least 1']),
    (
      ['--early_stopping_patience=0'],
      ['early_stopping_patience=0', 'at least 1'],
    ),
    (
      ['--set=early_stopping_min_delta=0.1'],
      ['--early_stopping_patience', 'both'],
    ),
    (['--l2=-1'], ['--l2=-1', 'at least 0']),
    (['--l2=nan'], ['--l2=nan', 'finite']),
    (['--server_learning_rate=inf'], ['server_learning_rate', 'finite']),
    (
      ['--update_optimizer=sgd:momentum=1.5'],
      ['update_momentum=1.5', 'at most 1'],
    ),
    (['--oversample=0.5'], ['--oversample=0.5', 'at least 1']),
    (['--dropout_rate=1.5'], ['--dropout_rate=1.5', 'at most 1']),
    (['--flagfile={here}/no.flags'], ['flagfile', '{here}/no.flags']),
    (['--flagfile={here}/bad.flags'], ['Unknown command line flag', 'colour']),
    # What the groups of flags find.
    (['movielens'], ["['movielens']", '--']),
    (
      ['--server_optimizer=adam:momentum=0.9'],
      ['--server_optimizer=adam:momentum', 'choose sgd'],
    ),
    (
      ['--update_optimizer=exact'],
      ['--update_optimizer=exact', '--reconstruction_optimizer=exact'],
    ),
    (
      ['--reconstruction_optimizer=exact:ridge=0'],
      ['--reconstruction_optimizer=exact:ridge=0', 'above 0'],
    ),
    (
      ['--reconstruction_optimizer=adam:ridge=2'],
      ['--reconstruction_optimizer=adam:ridge', 'choose exact'],
    ),
    (
      ['--reconstruction_optimizer=exact', '--reconstruction_steps=3'],
      ['--reconstruction_steps=3', 'no steps are taken'],
    ),
    (
      ['--update_optimizer=sgd:epsilon=0.1'],
      ['--update_optimizer', 'sgd has no epsilon', 'adaptive'],
    ),
    (['--clip_norm=1', '--set=aggregator=robust'], ['--clip_norm', 'robust']),
    (['--jit=true', '--runtime=native'], ['--jit=true', '--runtime=cohort']),
    (['--support_share=0'], ['--support_share=0', '--split=same']),
    (['--support_share=1.5', '--split=by_time'], ['--support_share=1.5']),
    (['--max_examples=1'], ['max_examples', 'at least 2']),
  ],
)
def test_bad_flags(tmp_path, arguments, expected):
  (tmp_path / 'bad.flags').write_text('--rounds=3\n--colour=red\n')
  outcome = run_here(
    'train',
    '--data=synthetic',
    f'--output_dir={tmp_path}/out',
    *(argument.format(here=tmp_path) for argument in arguments),
  )
  is_for_users(outcome, *(part.format(here=tmp_path) for part in expected))


_LONG = '9' * 5_000  # More digits than Python reads.


@pytest.mark.slow
def test_a_number_of_5000_digits_is_no_value_of_any_flag(tmp_path):
  numeric = [
    name
    for name, choice in run_flags.define(Config()).items()
    if choice.kind in (int, float) and not choice.option.may_be_infinite
  ]
  assert len(numeric) > 50
  for name in numeric:
    for number in (_LONG, f'-{_LONG}', '9' * 4_000):
      outcome = run_here(
        'train',
        '--data=synthetic',
        f'--{name}={number}',
        f'--output_dir={tmp_path}/out',
      )
      is_for_users(outcome, name)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize('name', ['sizes', 'after'])
def test_numbers_of_new_users_are_numbers(name):
  folder = commands.trained().folder
  for number in (_LONG, '-1', '1.5', '\u00b2', ''):
    flag = 'support' if name == 'sizes' else name
    outcome = run_here(
      'new_users', f'--output_dir={folder}', f'--{flag}={number}'
    )
    is_for_users(outcome, flag)


@pytest.mark.slow
def test_a_cohort_larger_than_the_population(tmp_path):
  outcome = run_here(
    'train',
    *commands.SMALL,
    '--clients_per_round=400',
    '--oversample=1.5',
    f'--output_dir={tmp_path}',
  )
  is_for_users(
    outcome,
    'asks 600 clients',
    'clients_per_round=400',
    'oversample=1.5',
    'population has 480',
  )


# ---- folders -----------------------------------------------------------------


@pytest.mark.parametrize('name', ['train', 'evaluate'])
def test_no_folder(name):
  is_for_users(run_here(name, '--data=synthetic'), '--output_dir', 'folder')


@pytest.mark.parametrize('place', ['file', 'file/below', 'file/far/below'])
def test_a_file_where_a_folder_should_be(tmp_path, place):
  (tmp_path / 'file').write_text('mine')
  outcome = run_here(
    'train', '--data=synthetic', f'--output_dir={tmp_path / place}'
  )
  is_for_users(outcome, str(tmp_path / 'file'), '--output_dir')
  assert (tmp_path / 'file').read_text() == 'mine'


def test_a_folder_that_cannot_be_written():
  # Nobody may make folders there, whoever he is.
  outcome = run_here('train', '--data=synthetic', '--output_dir=/proc/out')
  is_for_users(outcome, '/proc/out', '--output_dir')


def test_a_folder_of_something_else(tmp_path):
  (tmp_path / 'thesis.tex').write_text('mine')
  outcome = run_here('train', '--data=synthetic', f'--output_dir={tmp_path}')
  is_for_users(outcome, str(tmp_path), 'thesis.tex', 'Choose another')
  assert [path.name for path in tmp_path.iterdir()] == ['thesis.tex']


@pytest.fixture(name='copy')
def fixture_copy(tmp_path):
  """A folder of a run, to be changed."""
  trained, folder = commands.trained().folder, tmp_path / 'out'
  shutil.copytree(trained, folder)
  path = folder / 'flags.txt'
  path.write_text(path.read_text().replace(str(trained), str(folder)))
  return folder


@pytest.mark.slow
def test_other_flags_than_those_of_the_run(copy):
  before = commands.files(copy)
  outcome = run_here(
    'train',
    *commands.SMALL,
    '--seed=1',
    '--l2=0.5',
    '--biases',
    '--rounds=9',
    f'--output_dir={copy}',
  )
  is_for_users(
    outcome,
    str(copy),
    '--seed=0 there, --seed=1 now',
    '--l2=0.0 there, --l2=0.5 now',
    '--biases=false there, --biases=true now',
    'another folder',
  )
  assert '--rounds' not in outcome.errors
  assert commands.files(copy) == before


def test_a_folder_in_which_another_process_trains(tmp_path):
  # As a process that is still reading its data: there is nothing but flags.
  first = Folder(str(tmp_path))
  first.claim({**Config().flags(), **Output().flags()}, set())
  before = commands.files(tmp_path)
  assert list(before) == ['flags.txt']
  for seed in (0, 1):
    outcome = run_here(
      'train', *commands.SMALL, f'--seed={seed}', f'--output_dir={tmp_path}'
    )
    is_for_users(outcome, str(tmp_path), 'another process is training')
  assert commands.files(tmp_path) == before
  del first
  # It is free again, and its run had not begun.
  nowhere = tmp_path / 'nowhere'
  outcome = run_here(
    'train',
    *commands.SMALL,
    '--data=real',
    f'--data_dir={nowhere}',
    f'--output_dir={tmp_path}',
  )
  is_for_users(outcome, str(nowhere))
  assert commands.files(tmp_path) != before


@pytest.mark.slow
def test_a_second_program_leaves_the_first_one_alone(tmp_path):
  folder = tmp_path / 'out'
  arguments = (*commands.SMALL, '--rounds=2000', f'--output_dir={folder}')
  with commands.started(commands.command('train', *arguments)) as first:
    commands.wait_for_rounds(folder / 'metrics.csv', 1, first)
    for more in ((), ('--seed=1',)):
      second = run_here('train', *arguments, *more)
      is_for_users(second, str(folder), 'another process is training')
    assert first.process.poll() is None
    outcome = first.finish(seconds=1800)
    assert outcome.status == 0, outcome
  alone = run_here(
    'train', *arguments[:-1], f'--output_dir={tmp_path / "alone"}'
  )
  assert alone.status == 0, alone
  rows = [
    commands.repeatable_rows(tmp_path / name) for name in ('out', 'alone')
  ]
  assert rows[0] == rows[1]
  assert len(rows[0]) == 2000


@pytest.mark.slow
def test_another_models_checkpoint(copy):
  path = copy / 'flags.txt'
  path.write_text(
    path.read_text().replace('--num_factors=4', '--num_factors=5')
  )
  (copy / 'result.json').unlink()
  before = commands.files(copy)
  outcome = run_here(
    'train', *commands.SMALL, '--num_factors=5', f'--output_dir={copy}'
  )
  is_for_users(
    outcome,
    str(copy / 'checkpoints' / 'round_6'),
    'another model',
    '(200, 4)',
    '(200, 5)',
  )
  assert commands.files(copy) == before


@pytest.mark.slow
def test_unreadable_checkpoints(copy):
  for path in copy.rglob('variables.data*'):
    os.truncate(path, 100)
  (copy / 'result.json').unlink()
  before = commands.files(copy)
  outcome = run_here('train', *commands.SMALL, f'--output_dir={copy}')
  is_for_users(
    outcome, str(copy / 'checkpoints'), 'round_4', 'round_6', 'delete'
  )
  assert commands.files(copy) == before


@pytest.mark.slow
def test_a_table_of_something_else(copy):
  (copy / 'metrics.csv').write_text('name,value\nmine,1\n')
  (copy / 'result.json').unlink()
  before = commands.files(copy)
  outcome = run_here('train', *commands.SMALL, f'--output_dir={copy}')
  is_for_users(outcome, f'{copy}/metrics.csv, line 1', "'round'", 'Move it')
  assert commands.files(copy) == before


@pytest.mark.parametrize(
  'text, expected',
  [
    ('', ['line 1', 'not JSON']),
    ('{\n"rounds": 6,\n', ['line 3', 'not JSON']),
    ('[]', ['line 1', 'not the result of a run']),
    ('{"rounds": 6}', ['line 1', 'not the result of a run']),
    ('{"rounds": ' + '9' * 5_000 + '}', ['line 1', 'no reader of JSON']),
    ('[' * 100_000, ['line 1', 'no reader of JSON']),
  ],
)
@pytest.mark.parametrize('name', ['train', 'evaluate'])
def test_a_damaged_result(copy, name, text, expected):
  (copy / 'result.json').write_text(text)
  before = commands.files(copy)
  arguments = commands.SMALL if name == 'train' else ()
  outcome = run_here(name, *arguments, f'--output_dir={copy}')
  is_for_users(outcome, f'{copy}/result.json', 'Delete', *expected)
  assert commands.files(copy) == before


@contextlib.contextmanager
def _little_room(size: int) -> Iterator[None]:
  """No file can grow larger than this."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_result_without_its_metrics(copy):
  path = copy / 'result.json'
  result = json.loads(path.read_text())
  del result['best']['test']['unseen']['rmse']
  path.write_text(json.dumps(result))
  is_for_users(
    run_here('train', *commands.SMALL, f'--output_dir={copy}'),
    f'{path}, line 1',
    'not the result of a run',
  )


def test_a_disk_that_is_full_from_the_beginning(tmp_path):
  with _little_room(500):
    outcome = run_here(
      'train', *commands.SMALL, f'--output_dir={tmp_path / "out"}'
    )
  is_for_users(outcome, f'{tmp_path}/out/flags.txt', 'too large', 'make room')
  assert not list((tmp_path / 'out').iterdir())


# Too little for the events of some rounds, and for a checkpoint.
@pytest.mark.slow
@pytest.mark.parametrize('size, every', [(1_800, 6), (9_000, 2)])
def test_a_disk_that_becomes_full(tmp_path, monkeypatch, size, every):
  train = programs.train

  def train_in_little_room(*arguments, **options):
    with _little_room(size):
      return train(*arguments, **options)

  monkeypatch.setattr(programs, 'train', train_in_little_room)
  outcome = run_here(
    'train',
    *commands.SMALL,
    f'--evaluate_every={every}',
    f'--output_dir={tmp_path}',
  )
  is_for_users(outcome, str(tmp_path), 'too large', 'ake room')
  rounds = (tmp_path / 'metrics.csv').read_text().splitlines()[1:]
  assert [line.split(',')[0] for line in rounds] == (
    list('12345') if every == 6 else list('12')
  )
  assert not list((tmp_path / 'checkpoints').iterdir())


# ---- evaluate ----------------------------------------------------------------


def test_evaluate_where_nothing_was_trained(tmp_path):
  for folder in (tmp_path, tmp_path / 'missing'):
    outcome = run_here('evaluate', f'--output_dir={folder}')
    is_for_users(outcome, str(folder), 'flags.txt', 'tff-partial train')
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_evaluate_before_the_first_checkpoint(copy):
  shutil.rmtree(copy / 'checkpoints')
  outcome = run_here('evaluate', f'--output_dir={copy}')
  is_for_users(outcome, f'{copy}/checkpoints', 'Train first')
  assert not (copy / 'checkpoints').exists()


@pytest.mark.slow
def test_evaluate_with_other_flags():
  folder = commands.trained().folder
  outcome = run_here('evaluate', f'--output_dir={folder}', '--num_factors=9')
  is_for_users(outcome, f'{folder}/checkpoints/round_6', 'another model')


@pytest.mark.slow
@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--user=Anna'], ["no user 'Anna'", '1 to 600']),
    (['--top_n=0'], ['--top_n=0', 'at least 1']),
    (['--part=half'], ['part', 'half', 'validation']),
    (['--weights=first'], ['weights', 'first', 'last']),
  ],
)
def test_evaluate_what_is_not_there(arguments, expected):
  folder = commands.trained().folder
  outcome = run_here('evaluate', f'--output_dir={folder}', *arguments)
  is_for_users(outcome, *expected)


def test_evaluate_with_damaged_flags(copy):
  (copy / 'flags.txt').write_text('--colour=red\n')
  outcome = run_here('evaluate', f'--output_dir={copy}')
  is_for_users(outcome, f'{copy}/flags.txt, line 1', '--colour=red')


# ---- whole programs ----------------------------------------------------------


@pytest.mark.slow
def test_a_program_ends_likewise(tmp_path):
  """One of all these as the user sees it, with nothing kept of this process."""
  path = _write_data(tmp_path / 'ml-1m')
  _with_line(7, b'1::7::978307')(path)
  outcome = commands.run_program(
    commands.command(
      'train', f'--data_dir={tmp_path}', f'--output_dir={tmp_path}/out'
    )
  )
  is_for_users(outcome, f'{path}, line 7', "found '978307'")
  # What it was about to do, before the data were read.
  assert outcome.output.startswith('movielens by fed_recon: 500 rounds')
  assert outcome.output.count('\n') == outcome.errors.count('\n') == 1


# ---- the library -------------------------------------------------------------


def _build_model() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(5, 2, name='items')(item)
  rating = tf.keras.layers.Dense(1, name='user')(vector)
  return tf.keras.Model(item, rating)


@pytest.mark.parametrize(
  'build',
  [
    tff_partial.algorithms.build_fed_recon,
    tff_partial.algorithms.build_fed_recon_eval,
    tff_partial.algorithms.build_furl,
  ],
)
@pytest.mark.parametrize('given', [_build_model, _build_model()])
def test_a_model_of_keras_in_place_of_ours(build, given):
  with pytest.raises(errors.UserError) as caught:
    build(given)
  for part in (type(given).__name__, 'tff_partial.from_keras(build, loss='):
    assert part in str(caught.value)


def test_there_is_no_other_json(copy):
  """What is written can be read by every reader of JSON."""
  text = (copy / 'result.json').read_text()
  assert json.dumps(json.loads(text), indent=2, allow_nan=False) + '\n' == text
