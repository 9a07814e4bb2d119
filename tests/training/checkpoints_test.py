"""Laws of checkpoints: what was saved comes back, whatever befalls a file."""

import asyncio
import collections
import errno
import inspect
import os
import pathlib
import shutil
import signal
import sys
import threading

from absl import logging
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import typing_extensions

from tff_partial import errors
from tff_partial._environment import require_tff
from tff_partial.training import checkpoints
from tff_partial.training.errors import RunError

_STATE = tff.learning.templates.LearningAlgorithmState


def _progress(number: int, size: int = 3, dtype=np.float32, **notes):
  """A checkpoint with all kinds of containers that a state has."""
  weights = tff.learning.models.ModelWeights(
    collections.OrderedDict(
      GLOBAL=collections.OrderedDict(
        kernel=np.full([size, 2], number / 7, dtype),
        bias=np.array([0.1, -0.0], dtype),
      )
    ),
    collections.OrderedDict(),
  )
  return checkpoints.Progress(
    number,
    _STATE(
      weights,
      (),
      collections.OrderedDict(round=np.int32(number)),
      (np.float32(np.inf), np.float32(np.nan)),
      collections.OrderedDict(learning_rate=np.float32(0.5)),
    ),
    weights,
    checkpoints.encode({'number': number, **notes}),
    checkpoints.compress(f'round\n{number}\n'),
  )


def _kinds(progress: checkpoints.Progress) -> checkpoints.Progress:
  """What a process that has such checkpoints asks for."""
  return tf.nest.map_structure(tf.type_spec_from_value, progress)


def _flat(progress: checkpoints.Progress) -> list[bytes]:
  """Every number of a checkpoint, bit by bit."""
  parts = tff.structure.flatten(
    tff.structure.from_container(
      (progress.state, progress.best_weights, progress.notes), recursive=True
    )
  )
  return [np.asarray(part).tobytes() for part in parts]


@pytest.fixture(name='loop')
def fixture_loop():
  loop = checkpoints.EventLoop()
  yield loop
  loop.close()


@pytest.fixture(name='saved')
def fixture_saved(tmp_path, loop):
  saved = checkpoints.Checkpoints(tmp_path / 'checkpoints', loop)
  yield saved
  saved.close()


@pytest.fixture(scope='module', name='two')
def fixture_two(tmp_path_factory):
  """A folder with the checkpoints of rounds 4 and 6; copy it to change it."""
  folder = tmp_path_factory.mktemp('two')
  loop = checkpoints.EventLoop()
  saved = checkpoints.Checkpoints(folder / 'checkpoints', loop)
  for number in (4, 6):
    saved.save(_progress(number))
  saved.close()
  loop.close()
  return folder / 'checkpoints'


@pytest.fixture(name='copied')
def fixture_copied(two, tmp_path, loop):
  shutil.copytree(two, tmp_path / 'checkpoints')
  saved = checkpoints.Checkpoints(tmp_path / 'checkpoints', loop)
  yield saved
  saved.close()


def _names(folder: pathlib.Path) -> list[str]:
  return sorted(path.name for path in (folder / 'checkpoints').iterdir())


# ---- saving and loading ------------------------------------------------------


def test_what_is_saved_comes_back_bit_by_bit(saved):
  progress = _progress(5, best_round=None, metric=0.1 + 0.2, bad=float('nan'))
  saved.save(progress)
  found = saved.latest(_kinds(_progress(0)))
  assert int(found.round) == 5
  assert _flat(found) == _flat(progress)
  assert isinstance(found.state, _STATE)
  assert checkpoints.decode(found.notes)['metric'] == 0.1 + 0.2
  assert checkpoints.decompress(found.table) == 'round\n5\n'


def test_nobody_but_the_owner_can_read_them(saved, tmp_path):
  saved.save(_progress(5))
  paths = [tmp_path, *tmp_path.rglob('*')]
  assert len(paths) > 5
  for path in paths:
    assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.slow
def test_two_are_kept(saved, tmp_path):
  for number in (2, 4, 10, 12):
    saved.save(_progress(number))
  assert _names(tmp_path) == ['round_10', 'round_12']
  assert int(saved.latest(_kinds(_progress(0))).round) == 12


# ---- damage ------------------------------------------------------------------


def _truncate(checkpoint: pathlib.Path, name: str, share: float) -> None:
  (path,) = checkpoint.rglob(name)
  data = path.read_bytes()
  path.write_bytes(data[: int(len(data) * share)])


def _flip_a_bit(checkpoint: pathlib.Path) -> None:
  (path,) = checkpoint.rglob('variables.data*')
  data = bytearray(path.read_bytes())
  data[5] ^= 1
  path.write_bytes(data)


_DAMAGES = {
  'data cut off': lambda c: _truncate(c, 'variables.data*', 0.5),
  'data empty': lambda c: _truncate(c, 'variables.data*', 0.0),
  'a bit of the data flipped': _flip_a_bit,
  'index cut off': lambda c: _truncate(c, 'variables.index', 0.5),
  'variables missing': lambda c: shutil.rmtree(c / 'variables'),
  'folder empty': lambda c: (shutil.rmtree(c), c.mkdir()),
  'a file in its place': lambda c: (shutil.rmtree(c), c.write_text('no')),
}


@pytest.mark.parametrize('damage', _DAMAGES)
def test_the_one_before_a_damaged_one_is_used(copied, tmp_path, damage, caplog):
  _DAMAGES[damage](tmp_path / 'checkpoints' / 'round_6')

  with caplog.at_level(logging.WARNING):
    found = copied.latest(_kinds(_progress(0)))

  assert int(found.round) == 4
  assert _flat(found) == _flat(_progress(4))
  assert 'round_6' in caplog.text
  assert 'going on from round 4' in caplog.text
  # Set aside, not thrown away, and out of the way of the next save.
  assert _names(tmp_path) == ['damaged_round_6', 'round_4']
  copied.save(_progress(6))
  assert int(copied.latest(_kinds(_progress(0))).round) == 6


def test_if_all_are_damaged_it_is_said_and_nothing_is_touched(copied, tmp_path):
  for number in (4, 6):
    _truncate(
      tmp_path / 'checkpoints' / f'round_{number}', 'variables.index', 0.3
    )
  with pytest.raises(RunError) as caught:
    copied.latest(_kinds(_progress(0)))
  message = str(caught.value)
  for part in (str(tmp_path), 'round_4', 'round_6', 'delete'):
    assert part in message
  assert isinstance(caught.value, errors.UserError)
  assert _names(tmp_path) == ['round_4', 'round_6']


@pytest.mark.parametrize(
  'other, expected',
  [
    (_progress(0, size=4), r'shape \(3, 2\) where this run has \(4, 2\)'),
    (_progress(0, dtype=np.int32), 'of type float32 where this run has int32'),
    (
      _progress(0)._replace(best_weights=(np.float32(0),)),
      'numbers in another structure',
    ),
    (
      _progress(0)._replace(state=collections.OrderedDict(a=np.float32(0))),
      r'another structure \(no state/a\)',
    ),
  ],
)
def test_one_of_another_model_is_refused(copied, tmp_path, other, expected):
  with pytest.raises(RunError, match=expected) as caught:
    copied.latest(_kinds(other))
  assert str(tmp_path / 'checkpoints' / 'round_6') in str(caught.value)
  assert _names(tmp_path) == ['round_4', 'round_6']


# ---- what others have prepared -----------------------------------------------


class _Prepared(tf.Module):
  """A SavedModel as TFF writes it, whose function also writes a file."""

  def __init__(self, progress: checkpoints.Progress, file: pathlib.Path):
    super().__init__()
    self._value = tf.nest.map_structure(tf.Variable, progress)
    self._file = str(file)

  @tf.function(input_signature=())
  def __call__(self):
    tf.io.write_file(self._file, 'it ran')
    return self._value


def test_nothing_runs_that_a_checkpoint_holds(copied, tmp_path):
  checkpoint, file = tmp_path / 'checkpoints' / 'round_6', tmp_path / 'written'
  shutil.rmtree(checkpoint)
  tf.saved_model.save(_Prepared(_progress(6), file), str(checkpoint))

  found = copied.latest(_kinds(_progress(0)))

  assert _flat(found) == _flat(_progress(6))  # Its numbers are numbers.
  assert not file.exists()
  tf.saved_model.load(str(checkpoint))()
  assert file.read_text() == 'it ran'


def test_no_memory_is_taken_for_numbers_that_are_not_there(
  copied, tmp_path, caplog
):
  copied.save(_progress(8, text='x' * 100_000))
  _truncate(tmp_path / 'checkpoints' / 'round_8', 'variables.data*', 0.0)
  assert int(copied.latest(_kinds(_progress(0))).round) == 6
  assert 'bytes of numbers in' in caplog.text


# ---- kills -------------------------------------------------------------------


def test_what_a_killed_save_left_is_removed(two, tmp_path, loop):
  shutil.copytree(two, tmp_path / 'checkpoints')
  # TFF writes into such a folder, and renames it when it is whole.
  half = tmp_path / 'checkpoints' / 'round_8_temp1234'
  shutil.copytree(two / 'round_6', half)
  _truncate(half, 'variables.data*', 0.5)
  saved = checkpoints.Checkpoints(tmp_path / 'checkpoints', loop)
  assert _names(tmp_path) == ['round_4', 'round_6']
  assert int(saved.latest(_kinds(_progress(0))).round) == 6
  saved.close()


# ---- folders that cannot be written ------------------------------------------


def test_a_folder_that_cannot_be_made_is_named(tmp_path, loop):
  file = tmp_path / 'file'
  file.write_text('')
  with pytest.raises(RunError, match='Not a directory') as c:
    checkpoints.Checkpoints(file / 'checkpoints', loop)
  assert str(file) in str(c.value)


@pytest.mark.slow
@pytest.mark.parametrize(
  'error',
  [
    OSError(errno.ENOSPC, 'No space left on device'),
    tf.errors.ResourceExhaustedError(None, None, 'No space left on device'),
  ],
)
def test_a_full_disk_keeps_the_last_one(saved, tmp_path, monkeypatch, error):
  saved.save(_progress(2))
  real = tf.saved_model.save

  def fail(module, path, **options):
    real(module, path, **options)
    raise error

  with monkeypatch.context() as patch:
    patch.setattr(tf.saved_model, 'save', fail)
    with pytest.raises(RunError) as caught:
      saved.save(_progress(4))
  message = str(caught.value)
  for part in ('round 4', str(tmp_path), 'No space left', 'make room'):
    assert part in message
  assert _names(tmp_path) == ['round_2']
  assert int(saved.latest(_kinds(_progress(0))).round) == 2
  saved.save(_progress(4))
  assert int(saved.latest(_kinds(_progress(0))).round) == 4


# ---- the event loop ----------------------------------------------------------


def test_closing_waits_for_what_an_interrupt_left_unfinished():
  loop = checkpoints.EventLoop()
  finished = []
  may_finish = threading.Event()

  def slowly():
    may_finish.wait()
    finished.append('file')

  async def save():
    await asyncio.get_running_loop().run_in_executor(None, slowly)
    finished.append('save')

  timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
  timer.start()
  with pytest.raises(KeyboardInterrupt):
    loop.run(save())
  assert not finished
  threading.Timer(0.2, may_finish.set).start()
  loop.close()
  assert finished == ['file', 'save']


def test_the_newest_checkpoint_is_found(tmp_path):
  assert checkpoints.newest_round(tmp_path / 'missing') == 0
  for name in ('round_9', 'round_10', 'round_11_temp7', 'damaged_round_12'):
    (tmp_path / name).mkdir()
  assert checkpoints.newest_round(tmp_path) == 10


class _LooksAsSince46(type):
  """How protocols of typing-extensions look at objects since 4.6."""

  def __instancecheck__(cls, instance):
    inspect.getattr_static(instance, 'nobody_has_this')


@pytest.mark.skipif(
  sys.version_info >= (3, 12),
  reason='Later TensorFlows bear every typing-extensions.',
)
def test_a_typing_extensions_that_breaks_tensorflow_is_named(
  tmp_path, loop, monkeypatch
):
  assert require_tff.problem_of_checkpoints() is None
  monkeypatch.setattr(
    typing_extensions,
    'runtime_checkable',
    lambda protocol: _LooksAsSince46('Anything', (), {}),
  )
  # Before a run has begun, and not in forty frames after some rounds.
  with pytest.raises(RunError, match="pip install 'typing-extensions<4.6'"):
    checkpoints.Checkpoints(tmp_path / 'new', loop)
  assert not list(tmp_path.iterdir())
