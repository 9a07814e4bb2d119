"""Folders of a run: locks, permissions, and errors of the file system."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import re
import tempfile

from absl import logging

from tff_partial.training.errors import RunError

# The table of rounds in a run's folder, and its first column.
METRICS_FILE, ROUND = 'metrics.csv', 'round'
# Checkpoints kept: the newest, and one more in case the newest is damaged.
NUM_KEPT = 2
# Errors of a full disk, which may name no file.
FULL = frozenset((errno.EDQUOT, errno.EFBIG, errno.ENOSPC))
# {{function_node ...}} before a message, and [Op:...] name: behind it.
_MARKS = re.compile(r'\{\{.*?\}\}|\[Op:\w+\]( name:)?')


def locked(folder: pathlib.Path) -> int:
  """Open a folder and lock it against other processes.

  The lock ends with the process, in whatever way that ends.

  Raises:
    RunError: If another process has locked it.
  """
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


def choose_another(error: BaseException, place: str = 'folder') -> str:
  """Return what to do where nothing can be written."""
  is_full = getattr(error, 'errno', errno.ENOSPC) in FULL
  return f'Choose another {place}{" or make room" if is_full else ""}.'


def first_line(error: BaseException) -> str:
  """Return a message's first line as a sentence without TensorFlow's marks."""
  text = _MARKS.sub('', str(error)).strip() or type(error).__name__
  line = text.splitlines()[0]
  return line if line.endswith('.') else f'{line}.'


@contextlib.contextmanager
def writing(what: str, remedy: str | None = None) -> Iterator[None]:
  """Report what cannot be written, and what to do about it.

  By default that is to choose another folder.

  Raises:
    RunError: If the file system refuses it.
  """
  import tensorflow as tf  # Late, since options are declared without it.

  try:
    yield
  except (OSError, tf.errors.OpError) as error:
    remedy = remedy or choose_another(error)
    raise RunError(f'{what}: {first_line(error)} {remedy}') from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yield where to write a file of the same name, which then takes its place.

  If writing fails, such as on a full disk, the file that was there stays.
  """
  with tempfile.TemporaryDirectory(dir=path.parent, prefix='.') as scratch:
    made = pathlib.Path(scratch) / path.name
    yield made
    os.replace(made, path)


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
