"""Folders of a run: locks, permissions, and errors of the file system."""

from collections.abc import Callable, Iterator
import contextlib
import errno
import os
import pathlib
import re
import shutil
import tempfile

from absl import logging

from tff_partial.training.errors import RunError

# The table of rounds in a run's folder, and its first column.
METRICS_FILE, ROUND = 'metrics.csv', 'round'
# Checkpoints kept: the newest, and one more in case the newest is damaged.
NUM_KEPT = 2
# The suffix of what is not completely written.
UNFINISHED = '.tmp'
# Errors of a full disk, which may name no file.
FULL = frozenset((errno.EDQUOT, errno.EFBIG, errno.ENOSPC))
# {{function_node ...}} before a message, and [Op:...] name: behind it.
_MARKS = re.compile(r'\{\{.*?\}\}|\[Op:\w+\]( name:)?')


def locked(folder: pathlib.Path) -> int:
  """Open a folder and lock it against other processes.

  The lock ends with the process, in whatever way that ends.

  Raises:
    OSError: If nothing can be written there.
    RunError: If another process has locked it.
  """
  refuse_read_only(folder)
  opened = os.open(folder, os.O_RDONLY)
  try:
    import fcntl  # Not everywhere.

    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(opened)
    raise RunError(
      f'{folder}: another process is training in this folder. Wait for it, end '
      'it, or choose another output folder.'
    ) from None
  except (ImportError, OSError):
    pass  # A system, or a file system, without locks.
  return opened


def refuse_read_only(folder: pathlib.Path) -> None:
  """Raise an error of the file system if a folder cannot be written."""
  try:
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:  # It names the file that was tried.
    raise OSError(error.errno, error.strerror, str(folder)) from error


def choose_another(error: BaseException, place: str = 'folder') -> str:
  """Return what to do where nothing can be written."""
  return f'Choose another {place}{" or make room" if _is_full(error) else ""}.'


def to_go_on(error: BaseException) -> str:
  """Return what to do where a run can write no more."""
  first = 'make room' if _is_full(error) else 'mend that'
  again = f'{first} and run the same command again.'
  return f'To go on from the last checkpoint, {again}'


def _is_full(error: BaseException) -> bool:
  """Return True for an error of a full disk, also if TensorFlow raised it."""
  return any(os.strerror(number) in str(error) for number in FULL)


def first_line(error: BaseException) -> str:
  """Return a message's first line as a sentence without TensorFlow's marks."""
  text = _MARKS.sub('', str(error)).strip() or type(error).__name__
  line = text.splitlines()[0]
  return line if line.endswith('.') else f'{line}.'


@contextlib.contextmanager
def writing(
  what: str,
  remedy: Callable[[BaseException], str] = choose_another,
  kind: Callable[[str], Exception] = RunError,
) -> Iterator[None]:
  """Report, by an error of a kind, what cannot be written and what to do."""
  import tensorflow as tf  # Late, since options are declared without it.

  try:
    yield
  except (OSError, tf.errors.OpError) as error:
    raise kind(f'{what}: {first_line(error)} {remedy(error)}') from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield where to write a file of the same name, which then takes its place.

  If writing fails, such as on a full disk, the file that was there stays. What
  a kill leaves is removed when the file is written again.
  """
  scratch = path.with_name(f'.{path.name}{UNFINISHED}')
  shutil.rmtree(scratch, ignore_errors=True)
  try:
    scratch.mkdir(0o700)
    yield scratch / path.name
    os.replace(scratch / path.name, path)
  except OSError as error:
    if error.errno is None:
      raise
    # Unlike an error on opening, one on writing does not name the file.
    raise OSError(error.errno, error.strerror, str(path)) from error
  finally:
    shutil.rmtree(scratch, ignore_errors=True)


def write_whole(
  path: pathlib.Path, text: str, *, is_secret: bool = False
) -> None:
  """Replace a file's text atomically.

  A secret one is readable by its owner, and on the disk when this returns.
  """
  with replacing(path) as made:
    made.touch(0o600 if is_secret else 0o666)
    with made.open('w', encoding='utf-8', newline='') as file:
      file.write(text)
      if is_secret:
        file.flush()
        os.fsync(file.fileno())


def for_owner_only(folder: pathlib.Path) -> None:
  """Let only their owner read a folder and the files below it.

  What a run saves tells more than what it publishes: the seeds of its noise,
  what its clients remember.
  """
  try:
    folder.chmod(0o700)
    for path in folder.rglob('*'):
      path.chmod(0o700 if path.is_dir() else 0o600)
  except OSError as error:
    logging.warning(
      'Others may be able to read %s: %s', folder, first_line(error)
    )
