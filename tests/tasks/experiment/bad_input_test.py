"""Every kind of bad input ends with one paragraph: thing, place and remedy."""

import json
import pathlib
import resource
import shutil
import tempfile

import psutil
import pytest
import tensorflow as tf

from tasks.experiment.command_line.arguments import parse
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import Folder
from tests.support import commands
from tests.support.commands import is_for_users
from tests.support.commands import run_here
from tests.support.commands import train_small
import tff_partial
from tff_partial import errors


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


def _damage(path: pathlib.Path) -> None:
  """Takes a field from the seventh line."""
  path.write_text(
    path.read_text().replace('1::7::4::978307', '1::7::978307', 1)
  )


@pytest.mark.parametrize(
  'change, expected',
  [
    (
      _damage,
      ('ratings.dat, line 7', "'rating' should be", "'978307'", '--download'),
    ),
    (
      lambda path: path.write_text('1::1::3::97\n2::1::3::97\n'),
      ('2 users cannot be divided', 'more users'),
    ),
  ],
)
def test_damaged_data(tmp_path, change, expected):
  change(_write_data(tmp_path / 'data' / 'movielens' / 'ml-1m'))
  outcome = run_here(
    'train', f'--data_dir={tmp_path}/data', f'--output_dir={tmp_path}/out'
  )
  is_for_users(outcome, *expected)


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (
      ['--data_dir='],
      ['no data folder is named', '--data_dir', 'TFF_PARTIAL', 'synthetic'],
    ),
    (['--data_dir={here}/missing'], ['{here}/missing', 'does not exist']),
    (['--data_dir={here}'], ['{here}', 'no MovieLens ratings', '--download']),
    (['--data_dir={here}', '--data_set=ml-2m'], ["'ml-2m'", 'ml-1m']),
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
    *('train', '--data=synthetic', '--support_share=2'),
    f'--output_dir={tmp_path}/out',
  )
  is_for_users(again, '--support_share')


# ---- flags -------------------------------------------------------------------


@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--raunds=3'], ['Unknown command line flag', 'raunds', 'rounds']),
    (['--runtime=cluster'], ['runtime', 'cluster', 'cohort', 'native']),
    (['--rounds=ten'], ['--rounds=ten', 'int()']),
    (['--rounds=-1'], ['--rounds=-1', 'at least 1']),
    (['--l2=nan'], ['--l2=nan', 'finite']),
    (['--dropout_rate=1.5'], ['--dropout_rate=1.5', 'at most 1']),
    (['--flagfile={here}/bad.flags'], ['Unknown command line flag', 'colour']),
    (['--flagfile={here}/latin.flags'], ['latin.flags: the file is not text']),
    (['movielens'], ["['movielens']", '--']),
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
    (['--jit=true', '--runtime=native'], ['--jit=true', '--runtime=cohort']),
  ],
)
def test_bad_flags(tmp_path, arguments, expected):
  (tmp_path / 'bad.flags').write_text('--rounds=3\n--colour=red\n')
  (tmp_path / 'latin.flags').write_bytes(b'# Caf\xe9\n')
  outcome = run_here(
    'train',
    '--data=synthetic',
    f'--output_dir={tmp_path}/out',
    *(argument.format(here=tmp_path) for argument in arguments),
  )
  is_for_users(outcome, *(part.format(here=tmp_path) for part in expected))


@pytest.mark.parametrize(
  ('given', 'said'),
  [
    (
      ['--recipe=mnist_preference_global', '--reconstruction_epochs', '9'],
      True,
    ),
    (['--recipe=mnist_preference_global'], False),  # It sets it.
    (['--recipe=emnist_fed_rep', '--reconstruction_epochs=9'], False),
    # New users reconstruct, beside a table of those who took part.
    (['--recipe=movielens_centralized', '--reconstruction_epochs=9'], False),
    (
      ['--task=assist', '--algorithm=fed_avg', '--reconstruction_epochs=9'],
      False,
    ),
  ],
)
def test_a_written_flag_without_effect_is_noted(tmp_path, caplog, given, said):
  out = f'--output_dir={tmp_path}/out'
  run_here('train', *given, f'--data_dir={tmp_path}/none', out)
  noted = '--reconstruction_epochs has no effect: fed_avg trains no local'
  assert (noted in caplog.text) == said


# ---- folders -----------------------------------------------------------------


@pytest.mark.parametrize('name', ['train', 'evaluate'])
def test_no_folder(name):
  is_for_users(run_here(name, '--data=synthetic'), '--output_dir', 'folder')


@pytest.mark.parametrize('place', ['file', 'file/below', 'file/far/below'])
def test_a_file_where_a_folder_should_be(tmp_path, place):
  (tmp_path / 'file').write_text('mine')
  out = f'--output_dir={tmp_path / place}'
  outcome = run_here('train', '--data=synthetic', out)
  is_for_users(outcome, str(tmp_path / 'file'), '--output_dir')
  assert (tmp_path / 'file').read_text() == 'mine'


def test_a_folder_that_cannot_be_written():
  # Nobody may make folders there, whoever he is.
  outcome = run_here('train', '--data=synthetic', '--output_dir=/proc/out')
  is_for_users(outcome, '/proc/out', 'another --output_dir')


@pytest.mark.parametrize('name', ['train', 'evaluate'])
def test_a_folder_whose_name_is_too_long(tmp_path, name):
  outcome = run_here(name, f'--output_dir={tmp_path / ("a" * 300)}')
  is_for_users(outcome, str(tmp_path), 'name too long', 'Choose another')


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
  others = '--seed=1', '--l2=0.5', '--biases', '--rounds=9'
  outcome = train_small(copy, *others)
  is_for_users(
    *(outcome, str(copy), '--seed=0 there, --seed=1 now', 'another folder'),
    '--l2=0.0 there, --l2=0.5 now',
    '--biases=false there, --biases=true now',
  )
  assert '--rounds' not in outcome.errors
  assert commands.files(copy) == before


def test_fewer_rounds_than_are_done(tmp_path):
  # Reports and other programs would take the new number for that of the result.
  config, output = parse(commands.SMALL), Output(output_dir=str(tmp_path))
  Folder(str(tmp_path)).claim({**config.flags(), **output.flags()}, set())
  test = {'test': {'unseen': {'loss': 1.0}}}
  done = {'rounds': 6, 'diverged': False, 'train': {}, **test}
  done = {**done, 'validation': {'loss': 1.0}, 'best': {'round': None, **test}}
  Folder(str(tmp_path)).write_result(done)
  before = commands.files(tmp_path)
  outcome = train_small(tmp_path, '--rounds=5')
  is_for_users(outcome, '--rounds=5', f'{tmp_path} holds a run of 6 rounds')
  assert commands.files(tmp_path) == before


def test_a_folder_in_which_another_process_trains(tmp_path):
  # As a process that is still reading its data: there is nothing but flags.
  first = Folder(str(tmp_path))
  first.claim({**Config().flags(), **Output().flags()}, set())
  before = commands.files(tmp_path)
  assert list(before) == ['flags.txt']
  for seed in (0, 1):
    outcome = train_small(tmp_path, f'--seed={seed}')
    is_for_users(outcome, str(tmp_path), 'another process is training')
  assert commands.files(tmp_path) == before
  del first
  # It is free again, and its run had not begun.
  nowhere = tmp_path / 'nowhere'
  outcome = train_small(tmp_path, '--data=real', f'--data_dir={nowhere}')
  is_for_users(outcome, str(nowhere))
  assert commands.files(tmp_path) != before


@pytest.mark.parametrize(
  'text, expected',
  [
    ('', ['line 1', 'not JSON']),
    ('[]', ['line 1', 'not the result of a run']),
    ('{"rounds": ' + '9' * 5_000 + '}', ['line 1', 'no reader of JSON']),
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


def test_a_result_without_its_metrics(copy):
  path = copy / 'result.json'
  result = json.loads(path.read_text())
  del result['best']['test']['unseen']['rmse']
  path.write_text(json.dumps(result))
  outcome = train_small(copy)
  is_for_users(outcome, f'{path}, line 1', 'not the result of a run')


def test_a_disk_that_is_full_from_the_beginning(tmp_path):
  # No file can grow larger than 500 bytes.
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
  try:
    outcome = train_small(tmp_path / 'out')
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  is_for_users(outcome, f'{tmp_path}/out/flags.txt', 'too large', 'make room')
  assert not list((tmp_path / 'out').iterdir())


def test_a_machine_without_room_for_temporary_files(tmp_path, monkeypatch):
  def full() -> str:
    raise FileNotFoundError(2, "No usable temporary directory in ['/tmp']")

  monkeypatch.setattr(tempfile, 'gettempdir', full)
  outcome = train_small(tmp_path / 'out')
  is_for_users(outcome, "No usable temporary directory in ['/tmp']", '$TMPDIR')


def test_a_folder_in_the_place_of_a_file(tmp_path):
  (tmp_path / 'flags.txt').mkdir()
  outcome = train_small(tmp_path)
  is_for_users(outcome, f'{tmp_path}/flags.txt: Is a directory.')
  assert 'make room' not in outcome.errors


# ---- evaluate ----------------------------------------------------------------


def test_evaluate_where_nothing_was_trained(tmp_path):
  for folder in (tmp_path, tmp_path / 'missing'):
    outcome = run_here('evaluate', f'--output_dir={folder}')
    is_for_users(outcome, str(folder), 'flags.txt', 'tff-partial train')
  assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
  'arguments, expected',
  [
    (['--user=Anna'], ["no user 'Anna'", '1 to 600']),
    (['--top_n=0'], ['--top_n=0', 'at least 1']),
    (['--part=half'], ['part', 'half', 'validation']),
    (['--weights=first'], ['weights', 'first', 'last']),
    (['--calibrate=80'], ['--calibrate=80', 'at most 1']),
    (['--save_model=a.keras'], ['--save_model=a.keras', '--user']),
    (['--user=1', '--calibrate=0.8'], ['--calibrate=0.8', '--user']),
    (['--calibrate=0.8', '--part=validation'], ['--calibrate=0.8', 'in any']),
  ],
)
def test_evaluate_what_is_not_there(arguments, expected):
  folder = commands.trained().folder
  outcome = run_here('evaluate', f'--output_dir={folder}', *arguments)
  is_for_users(outcome, *expected)


def test_evaluate_reads_the_flags_of_the_last_folder(copy, tmp_path):
  (copy / 'flags.txt').write_text('--colour=red\n')
  nowhere = tmp_path / 'nowhere'
  for flags in (
    [f'--output_dir={copy}'],
    [f'--output_dir={nowhere}', f'-output_dir={copy}'],
    [f'--output_dir={nowhere}', '--output_dir', str(copy)],
  ):
    outcome = run_here('evaluate', *flags)
    is_for_users(outcome, f'{copy}/flags.txt, line 1', '--colour=red')


# ---- whole programs ----------------------------------------------------------


@pytest.mark.slow
def test_a_program_ends_likewise(tmp_path):
  """One of all these as the user sees it, with nothing kept of this process."""
  path = _write_data(tmp_path / 'ml-1m')
  _damage(path)
  flags = f'--data_dir={tmp_path}', f'--output_dir={tmp_path}/out'
  outcome = commands.run_program(commands.command('train', *flags))
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
    tff_partial.algorithms.build_fed_als,
    tff_partial.algorithms.build_fed_ials,
  ],
)
@pytest.mark.parametrize('given', [_build_model, _build_model()])
def test_a_model_of_keras_in_place_of_ours(build, given):
  with pytest.raises(errors.UserError) as caught:
    build(given)
  for part in (type(given).__name__, 'tff_partial.from_keras(build, loss='):
    assert part in str(caught.value)
