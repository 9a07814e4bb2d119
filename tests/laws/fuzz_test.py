"""Damage at random: what is damaged is read or refused in words, never worse.

All draws follow from fixed seeds, so that a case that fails fails again.
"""

import collections
from collections.abc import Callable, Iterator
import contextlib
import gzip
import json
import math
import pathlib
import signal
from typing import Any, NamedTuple
import wave
import zlib

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.experiment.command_line import flags as run_flags
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs import running
from tasks.experiment.runs.folder import Folder
from tasks.files import idx_files
from tasks.movielens import data as movielens_data
from tasks.movielens import files as movielens_files
from tasks.preference import speech_recordings
from tasks.subreddit import data as subreddit_data
from tests.support import commands
from tff_partial import errors
from tff_partial.analysis import curves
from tff_partial.analysis import run_folders
from tff_partial.data import examples
from tff_partial.data import frames
from tff_partial.training import checkpoints
from tff_partial.training import files
from tff_partial.training import metrics_log
from tff_partial.training.client_store import sqlite_backend

# What nobody expects in the middle of a file.
_STRANGE = (
  *(b'9' * 5_000, b'-1', b'0', b'NaN', b'-Infinity', b'1e999', b'1e-999'),
  *(b'18446744073709551616', b'\x00', b'\xff\xfe', b'\xef\xbb\xbf', b'\\ud800'),
  *(b'\\u0000', b'\n', b'\r', b'\n\n', b'"', b"'", b',', b'::', b'{'),
  *(b'[' * 2_000, b'null', b'true', b'""', b'#', b'--', b'%s{}'),
  *('\U0001f600\u200d\U0001f525'.encode(), '\u202e\u0627\u0644'.encode()),
  *(b'a' + '\u0301'.encode() * 300, b'x' * 1_000_000),
)
_SECONDS = 60  # Of a case: all take less than one.


def _mutated(data: bytes, draw: np.random.Generator) -> bytes:
  """Some bytes, damaged in one to three ways."""
  for _ in range(draw.integers(1, 4)):
    begin = int(draw.integers(len(data) + 1))
    end = min(begin + int(draw.choice([0, 1, 1, 2, 4, 30])), len(data))
    inserted: bytes = draw.choice(
      np.array(
        [
          b'',
          _STRANGE[draw.integers(len(_STRANGE))],
          _STRANGE[draw.integers(len(_STRANGE))],
          draw.bytes(end - begin),
          draw.bytes(end - begin),
          data[begin : begin + 40],
        ],
        object,
      )
    )
    kind = draw.integers(12)
    if kind == 0:
      data = data[:begin]
    elif kind == 1:
      data += inserted
    elif kind == 2 and begin < len(data):
      flipped = bytes([data[begin] ^ (1 << int(draw.integers(8)))])
      data = data[:begin] + flipped + data[begin + 1 :]
    else:
      data = data[:begin] + inserted + data[end:]
  return data


@contextlib.contextmanager
def _patience() -> Iterator[None]:
  """Ends what hangs."""

  def give_up(*_: Any) -> None:
    raise TimeoutError(f'Still at it after {_SECONDS} seconds.')

  before = signal.signal(signal.SIGALRM, give_up)
  signal.alarm(_SECONDS)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _is_for_users(message: str) -> None:
  assert message
  assert 'Traceback' not in message
  assert '\n\n' not in message
  assert 'set_int_max_str_digits' not in message
  assert len(message) < 2_500, message


# ---- readers -----------------------------------------------------------------


class _Reader(NamedTuple):
  """Writes files and returns those to damage; reads and checks them."""

  write: Callable[[pathlib.Path], list[pathlib.Path]]
  read: Callable[[pathlib.Path], Any]


def _movielens(name: str) -> _Reader:
  layout = movielens_files.DATA_SETS[name]

  def write(folder: pathlib.Path) -> list[pathlib.Path]:
    ratings = [
      layout.ratings.separator.join(
        [str(user), str(item), '4', str(user * 100 + item)]
      )
      for user in range(1, 5)
      for item in range(user, 9)
    ]
    separator = layout.items.separator
    rest = [*[''] * 3, *['0'] * 19] if name == 'ml-100k' else ['']
    items = [
      separator.join([str(item), f'Film {item}', *rest]) for item in range(1, 9)
    ]
    if layout.ratings.header:
      ratings.insert(0, layout.ratings.header)
      items.insert(0, layout.items.header)
    lines = {layout.ratings.name: ratings, layout.items.name: items}
    if layout.users:
      fields = ['25', 'F'] if name == 'ml-100k' else ['F', '25']
      lines[layout.users.name] = [
        separator.join([str(user), *fields, '7', '90210'])
        for user in range(1, 5)
      ]
    for file, text in lines.items():
      (folder / file).write_text('\n'.join(text) + '\n')
    return [folder / file for file in lines]

  def read(folder: pathlib.Path) -> None:
    ratings = movielens_data.load(folder)
    lowest, highest = ratings.scale
    frame = ratings.frame
    assert frame['rating'].between(lowest, highest).all()
    assert frame['item_id'].between(0, ratings.num_items - 1).all()
    assert (frame[['user_id', 'timestamp']] >= 0).all(axis=None)
    assert all(title.strip() for title in ratings.item_titles)

  return _Reader(write, read)


def _idx(name: str) -> _Reader:
  def write(folder: pathlib.Path) -> list[pathlib.Path]:
    data = bytes([0, 0, 8, 2, 0, 0, 0, 5, 0, 0, 0, 40]) + bytes(200)
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith('gz') else data)
    return [path]

  def read(folder: pathlib.Path) -> None:
    found = idx_files.read(folder, 'images', [None, 40], np.uint8, 'Fetch it.')
    assert found.shape[1] == 40

  return _Reader(write, read)


def _write_wav(folder: pathlib.Path) -> list[pathlib.Path]:
  paths = [folder / f'7_{speaker}_0.wav' for speaker in ('ada', 'bob')]
  for path in paths:
    with wave.open(str(path), 'wb') as file:
      file.setnchannels(1)
      file.setsampwidth(2)
      file.setframerate(8_000)
      file.writeframes(bytes(range(200)))
  return paths


def _read_wav(folder: pathlib.Path) -> None:
  corpus = speech_recordings.load(folder)
  assert corpus.rate >= 4_000
  assert corpus.speakers == ['ada', 'bob']
  for recording in corpus.recordings:
    assert len(recording.samples)
    assert np.abs(recording.samples).max() <= 1


def _documents(task: str, ending: str) -> _Reader:
  def write(folder: pathlib.Path) -> list[pathlib.Path]:
    path = folder / f'a.jsonl{ending}'
    lines = [
      json.dumps(
        {'author': f'ann{n % 3}', 'subreddit': 'ab'[n % 2], 'body': f'No. {n}'}
        | {'user': f'ann{n % 3}', 'label': n % 2, 'text': f'No. {n} \u00fc'}
        | {'created_utc': n, 'time': n}
      )
      for n in range(12)
    ]
    data = ('\n'.join(lines) + '\n').encode()
    path.write_bytes(gzip.compress(data) if ending else data)
    return [path]

  def read(folder: pathlib.Path) -> None:
    documents = subreddit_data.load(task, folder)
    assert (documents.time >= 0).all()
    assert (documents.label < len(documents.labels)).all()
    assert documents.author.max() < len(documents.authors)
    assert all(map(str.encode, documents.authors))
    assert all(isinstance(text, str) and text for text in documents.texts)

  return _Reader(write, read)


_CLIENTS = [f'client {number}' for number in range(30)]


def _write_store(folder: pathlib.Path) -> list[pathlib.Path]:
  versions = sqlite_backend.Versions(folder)
  versions.describe(layout='[]', seed='3')
  for number in (2, 4, 6):
    some = _CLIENTS[number : 5 * number]
    versions.save(number, 2, [(c, bytes([number] * 70)) for c in some])
  versions.close()
  return [folder / sqlite_backend.FILE]


def _read_store(folder: pathlib.Path) -> None:
  with contextlib.closing(
    sqlite_backend.Versions(folder, writable=False)
  ) as versions:
    assert (versions.about('layout'), versions.about('seed')) == ('[]', '3')
    assert versions.rounds() == [2, 4, 6]
    expected: list[bytes | None] = [None] * len(_CLIENTS)
    for number in (2, 4, 6):
      some = slice(number, 5 * number)
      expected[some] = [bytes([number] * 70)] * len(expected[some])
      assert versions.read(_CLIENTS, number) == expected


def _progress(number: int) -> checkpoints.Progress:
  state = {'vectors': np.full([20, 3], number / 7, np.float32)}
  notes = checkpoints.encode({'best_round': number})
  table = checkpoints.compress(f'round\n{number}\n')
  return checkpoints.Progress(number, state, state, notes, table)


@contextlib.contextmanager
def _checkpoints(folder: pathlib.Path, writable: bool) -> Iterator[Any]:
  loop = checkpoints.EventLoop()
  try:
    opened = checkpoints.Checkpoints(folder, loop, writable=writable)
    yield opened
    opened.close()
  finally:
    loop.close()


def _write_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
  with _checkpoints(folder, True) as opened:
    opened.save(_progress(2))
    opened.save(_progress(4))
  return [p for p in sorted((folder / 'round_4').rglob('*')) if p.is_file()]


def _read_checkpoints(folder: pathlib.Path) -> None:
  with _checkpoints(folder, False) as opened:
    kinds = tf.nest.map_structure(tf.type_spec_from_value, _progress(0))
    found = opened.latest(kinds)
  # Or the one before, if the damage was noticed.
  number = int(found.round)
  assert number in (2, 4)
  tf.nest.map_structure(np.testing.assert_array_equal, found, _progress(number))


def _write_metrics(folder: pathlib.Path) -> list[pathlib.Path]:
  table = metrics_log.Records(folder, saved=None, tensorboard=False)
  for number in range(1, 7):
    if number == 5:
      (folder / 'saved').write_text(table.text, newline='')
    validation = {'validation_rmse': 1 / number} if number % 2 == 0 else {}
    table.release({'loss': 2 / number, **validation}, number)
  return [folder / files.METRICS_FILE]


def _read_metrics(folder: pathlib.Path) -> None:
  refused = None
  try:
    curves.read(run_folders.find([folder])[0], 'loss')
  except errors.UserError as error:
    refused = error
  saved = (folder / 'saved').read_bytes().decode()
  table = metrics_log.Records(folder, saved=saved, tensorboard=False)
  assert table.text == saved
  assert (folder / files.METRICS_FILE).read_bytes().decode() == saved
  if refused:
    raise refused


# A run that is done, as `tasks.train` leaves it.
_RESULT = {
  'task': 'movielens',
  'algorithm': 'fed_recon',
  'seed': 0,
  'rounds': 6,
  'diverged': False,
  'train': {'loss': 1.0, 'num_clients': 5, 'num_not_finite': 0},
  'validation': {'loss': 1.1, 'rmse': 1.05, 'best_round': 4},
  'test': {'unseen': {'loss': 1.2, 'rmse': 1.1}},
  'best': {
    'round': 4,
    'validation': {'loss': 1.0, 'rmse': 1.0},
    'test': {'unseen': {'loss': 1.2, 'rmse': 1.1}},
  },
  'privacy': None,
}


class _StoppedError(errors.UserError):
  """Instead of a run that would take time."""


def _train(folder: pathlib.Path, *arguments: str) -> commands.Outcome:
  outcome = commands.train_small(folder, *arguments)
  if outcome.status:
    commands.is_for_users(outcome)
  else:
    assert 'nan' not in outcome.output
  return outcome


def _write_run(folder: pathlib.Path) -> list[pathlib.Path]:
  (folder / run_folders.RESULT_FILE).unlink(missing_ok=True)
  (folder / run_folders.FLAGS_FILE).unlink(missing_ok=True)
  _train(folder)
  Folder(str(folder)).write_result(_RESULT)
  assert 'holds this run already' in _train(folder).output
  return [folder / run_folders.FLAGS_FILE, folder / run_folders.RESULT_FILE]


def _read_run(folder: pathlib.Path) -> None:
  outcome = _train(folder)
  with contextlib.suppress(errors.UserError):
    settings = run_folders.settings(run_folders.find([folder]))
    assert all(setting.label for setting in settings)
  if outcome.status:
    raise errors.UserError(outcome.errors)


_READERS = {
  'ml-1m': _movielens('ml-1m'),
  'ml-100k': _movielens('ml-100k'),
  'ml-latest-small': _movielens('ml-latest-small'),
  'idx': _idx('images'),
  'idx packed': _idx('images.gz'),
  'wav': _Reader(_write_wav, _read_wav),
  'comments': _documents('subreddit', ''),
  'messages': _documents('sticker', ''),
  'messages packed': _documents('sticker', '.gz'),
  'client store': _Reader(_write_store, _read_store),
  'checkpoints': _Reader(_write_checkpoints, _read_checkpoints),
  'metrics': _Reader(_write_metrics, _read_metrics),
  'flags and result': _Reader(_write_run, _read_run),
}


@pytest.fixture(name='no_training')
def fixture_no_training(monkeypatch):
  """Ends `tasks.train` where it would begin to work."""

  def stop(config: Config, *_: Any) -> None:
    local = config.local
    for build in (local.joint_phase, local.local_phase, local.build_split):
      build()
    config.server.aggregation(10)
    config.server.build_optimizer()
    raise _StoppedError('stopped before training')

  monkeypatch.setattr(running, 'Trainable', stop)


@pytest.mark.parametrize('cases', [3, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize('name', _READERS)
@pytest.mark.usefixtures('no_training')
def test_damaged_files(tmp_path, name, cases):
  reader = _READERS[name]
  paths = reader.write(tmp_path)
  reader.read(tmp_path)
  whole = {path: path.read_bytes() for path in paths}
  draw = np.random.default_rng(zlib.crc32(name.encode()))
  refused = 0
  for case in range(cases):
    path = paths[case % len(paths)]
    path.write_bytes(_mutated(whole[path], draw))
    try:
      with _patience():
        reader.read(tmp_path)
    except errors.UserError as error:
      _is_for_users(str(error))
      refused += 1
    except Exception as error:
      raise AssertionError(
        f'Case {case} of {name}: {path.name} holds '
        f'{path.read_bytes()[:3_000]!r}'
      ) from error
    for each, data in whole.items():
      each.write_bytes(data)
  assert refused or cases < 10 or name == 'checkpoints'


# ---- data frames -------------------------------------------------------------

_SPEC = collections.OrderedDict(
  x=tf.TensorSpec([], tf.int32),
  y=tf.TensorSpec([1], tf.float32),
  weight=examples.WEIGHT_SPEC,
)
_CELLS = (
  *(0, -1, 2.5, math.nan, math.inf, 1e300, 2**31, 2**63, 10**5_000, True, None),
  *('', '1', 'x' * 100_000, '\ud800', b'\x00', 1j, [1, 2], (), {'a': 1}),
  *(np.float16(1), np.array([1.0]), np.datetime64('2020-01-01'), pd.NA, pd.NaT),
  pd.Timedelta('1s'),
)


@pytest.mark.parametrize(
  'cases', [20, pytest.param(400, marks=pytest.mark.slow)]
)
def test_strange_data_frames(cases):
  draw = np.random.default_rng(3)
  outcomes = set()
  for _ in range(cases):
    columns: dict[str, list[Any]] = {
      'who': ['ann', 'ann', 'bob', 'cat'],
      'item': [0, 1, 2, 3],
      'rating': [1.0, 2.0, 3.0, 4.0],
      'weight': [1.0, 1.0, 0.5, 2.0],
    }
    name = str(draw.choice(list(columns)))
    cell = _CELLS[draw.integers(len(_CELLS))]
    if draw.random() < 0.3:
      columns[name] = [cell] * 4
    else:
      columns[name][draw.integers(4)] = cell
    # Pandas itself takes no such number for one.
    is_huge = isinstance(cell, int) and cell > 2**64
    frame = pd.DataFrame(columns, dtype=object if is_huge else None)
    try:
      packed = frames.from_pandas(
        frame,
        _SPEC,
        client_id='who',
        inputs='item',
        labels='rating',
        weight='weight',
      )
      assert packed.num_examples == 4, columns
      outcomes.add('packed')
    except errors.UserError as error:
      _is_for_users(str(error))
      outcomes.add('refused')
    except Exception as error:
      raise AssertionError(f'{name}: {examples.shown(cell)}') from error
  assert outcomes == {'packed', 'refused'}


# ---- flags -------------------------------------------------------------------

_VALUES = (
  *('', '0', '1', '-1', '2', '0.5', '1e-300', '1e300', '-0.0', 'nan', 'inf'),
  *('-inf', '1_0', ' 1', '0x10', '\u0661', 'true', 'None', '2147483648'),
  *('9223372036854775808', '9' * 4_000, '9' * 5_000, '\U0001f600', '\u202e'),
  *('\ud800', 'a,b', '%s{}', '--rounds=1'),
)


@pytest.mark.parametrize(
  'cases', [20, pytest.param(200, marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures('no_training')
def test_strange_flags(tmp_path, cases):
  draw = np.random.default_rng(4)
  choices = {**run_flags.define(Config()), **run_flags.define(Output())}
  names = sorted(choices.keys() - {'output_dir', 'task'})
  seen = set()
  for case in range(cases):
    arguments = []
    for name in draw.choice(names, draw.integers(1, 3), replace=False):
      values = [*(choices[name].option.choices or ())] * 3 + list(_VALUES)
      arguments.append(f'--{name}={values[draw.integers(len(values))]}')
    task = str(draw.choice(['movielens', 'movielens', 'sticker', 'emnist']))
    try:
      with _patience():
        outcome = _train(tmp_path / str(case), f'--task={task}', *arguments)
    except Exception as error:
      raise AssertionError(f'Case {case}: {task}, {arguments}') from error
    # Nothing is finished that was not begun.
    assert outcome.status in (1, 2), arguments
    seen.add('stopped before training' in outcome.errors)
  assert seen == {True, False} or cases < 200


def test_a_wrong_message_would_be_noticed(tmp_path):
  """The laws above can fail."""
  with pytest.raises(AssertionError):
    _is_for_users('x' * 3_000)
  with pytest.raises(AssertionError):
    commands.is_for_users(commands.Outcome(1, '', 'Traceback (most recent'))
  (tmp_path / 'mine.txt').touch()
  with pytest.raises(OptionError):
    Folder(str(tmp_path)).claim({}, set())
