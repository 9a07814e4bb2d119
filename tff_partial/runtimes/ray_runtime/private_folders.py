"""Folders for the files of a process, removed when it ends.

Only the user of the process can enter them. A process that is killed leaves its
folder; the next one that makes a folder at the same place removes it. A folder
in use has a lock on a file in it, which the system releases with the process,
even in another container.
"""

import atexit
import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from typing import TextIO

_PREFIX = 'tff_partial.'
# In a folder: its lock, with the name of the machine; and its files, which are
# removed before the lock.
_LOCK, _FILES = 'tff_partial.lock', 'files'
# Open lock files by their folders; closing one releases its lock.
_held: dict[str, TextIO] = {}


def make(parent: str | os.PathLike[str]) -> str:
  """Make a folder, and remove those of processes that were killed.

  If several machines see the parent, only folders of this one are removed: not
  every shared disk shows locks to other machines.

  Returns:
    The path of the folder, in one that only this user can enter.

  Raises:
    OSError: If it cannot be made.
  """
  parent = os.path.abspath(parent)
  with os.scandir(parent) as entries:
    for entry in entries:
      if entry.name.startswith(_PREFIX):
        _remove_if_left(entry)
  # It gets its name once it is locked, so that no other process takes it for
  # abandoned.
  made = tempfile.mkdtemp(prefix=f'.{_PREFIX}', dir=parent)
  os.mkdir(os.path.join(made, _FILES))
  lock = open(os.path.join(made, _LOCK), 'x', encoding='utf-8')
  lock.write(socket.gethostname())
  lock.flush()
  with contextlib.suppress(OSError):  # Then it is never removed.
    _take(lock)
  outer = os.path.join(parent, os.path.basename(made).removeprefix('.'))
  os.rename(made, outer)
  path = os.path.join(outer, _FILES)
  _held[path] = lock
  atexit.register(remove, path)
  return path


def remove(path: str) -> None:
  """Remove a folder that `make` returned, unless that was done."""
  lock = _held.pop(path, None)
  if lock is not None:
    with lock:
      _remove(os.path.dirname(path))


def _take(lock: TextIO) -> None:
  """Lock a file, or raise an OSError if another process holds the lock."""
  fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_if_left(entry: 'os.DirEntry[str]') -> None:
  """Remove a folder whose process has ended; keep any other file."""
  # Folders that cannot be read are not ours.
  with contextlib.suppress(OSError, ValueError):
    if (
      entry.is_dir(follow_symlinks=False)
      and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
    ):
      # Locks of some shared disks need a file that can be written.
      with open(
        os.path.join(entry.path, _LOCK), 'r+', encoding='utf-8'
      ) as lock:
        if lock.read() == socket.gethostname():
          _take(lock)
          _remove(entry.path)


def _remove(outer: str) -> None:
  """Remove a folder; if its files stay, leave it for the next process."""
  files = os.path.join(outer, _FILES)
  shutil.rmtree(files, ignore_errors=True)
  if not os.path.lexists(files):
    shutil.rmtree(outer, ignore_errors=True)
