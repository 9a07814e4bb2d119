"""Checkpoints: everything that a run needs to resume as if never interrupted.

A checkpoint is a folder that appears whole, under its name, or not at all. If
the newest one was damaged later, the previous one replaces it.
"""

import asyncio
from collections.abc import Coroutine
import json
import os
import pathlib
import shutil
import threading
from typing import Any, NamedTuple, TypeVar
import zlib

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import tiers
from tff_partial._environment import require_tff
from tff_partial.training import files
from tff_partial.training import saved_variables
from tff_partial.training.errors import RunError

_Result = TypeVar('_Result')
_PREFIX = 'round_'
# Notes and tables are of any length.
_PACKED = tf.TensorSpec([None], tf.uint8)


class Progress(NamedTuple):
  """State of a run after a round.

  Attributes:
    round: Number of rounds done.
    state: The process's server state.
    best_weights: The weights at the best evaluation so far.
    notes: JSON text of everything else: the best round and its metric, the
      history that stopping depends on, the runtime's choices.
    table: The table of metrics up to that round, compressed text.
    best_server_state: Server state other than the weights at the best
      evaluation; empty if there is none.
  """

  round: Any
  state: Any
  best_weights: Any
  notes: Any
  table: Any
  best_server_state: Any = ()


class EventLoop:
  """Event loop in a thread, for TFF's asynchronous managers.

  One for a whole run: loops and threads that come and go leave memory behind.
  Synchronous code can use it even in a notebook, which has a loop already.
  """

  def __init__(self) -> None:
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()

  def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Wait for a coroutine and return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

  def close(self) -> None:
    """End the thread, once it has finished what an interrupt left in it."""
    self.run(_finish_others())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


async def _finish_others() -> None:
  """Wait until the loop has no other tasks."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  await asyncio.gather(*others, return_exceptions=True)
  await asyncio.get_running_loop().shutdown_default_executor()


class Checkpoints:
  """Checkpoints of a run in a folder."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    loop: EventLoop,
    *,
    writable: bool = True,
  ):
    """Create the folder if necessary, and keep other processes out of it.

    Args:
      folder: The folder of the checkpoints.
      loop: Runs the state manager.
      writable: False to only read and leave the folder, which must exist,
        unchanged; another process may be writing there.

    Raises:
      RunError: If the folder cannot be written, if another process is
        writing there, or if TensorFlow cannot write checkpoints here.
    """
    if problem := require_tff.problem_of_checkpoints():
      raise RunError(problem)
    self._folder = pathlib.Path(folder)
    self._loop = loop
    self._writable = writable
    self._lock: int | None = None
    with files.writing(f'Cannot write checkpoints to {self._folder}'):
      if writable:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = files.locked(self._folder)
        self._remove_unfinished()
        files.for_owner_only(self._folder)
      self._manager = tff.program.FileProgramStateManager(
        str(self._folder),
        prefix=_PREFIX,
        keep_total=files.NUM_KEPT,
        keep_first=False,
      )

  def close(self) -> None:
    """Let other processes write to the folder."""
    if self._lock is not None:
      os.close(self._lock)
      self._lock = None

  def _remove_unfinished(self) -> None:
    """Remove what a killed or failed save leaves behind."""
    for unfinished in self._folder.glob(f'{_PREFIX}*_temp*'):
      shutil.rmtree(unfinished, ignore_errors=True)

  def save(self, progress: Progress) -> None:
    """Write a checkpoint; a kill at any moment leaves the last whole one.

    Raises:
      RunError: If it cannot be written, such as on a full disk. Earlier
        checkpoints are kept.
    """
    version = int(progress.round)
    what = f'The checkpoint of round {version} cannot be written to'
    try:
      with files.writing(f'{what} {self._folder}', files.to_go_on):
        self._loop.run(self._manager.save(progress, version))
        files.for_owner_only(self._folder)
    except RunError:
      self._remove_unfinished()
      raise

  def latest(self, like: Progress) -> Progress | None:
    """Read the newest whole checkpoint, or return None if there is none.

    Damaged ones are logged and, if writable, set aside.

    Args:
      like: The same structure of `tf.TensorSpec`; `round`, `notes` and `table`
        are ignored.

    Raises:
      RunError: If there are checkpoints and none can be read, or the
        newest is from another process.
    """
    damaged: list[str] = []
    expected = like._replace(
      round=tf.TensorSpec([], tf.int32), notes=_PACKED, table=_PACKED
    )
    for version in reversed(self._loop.run(self._manager.get_versions()) or []):
      where = self._folder / f'{_PREFIX}{version}'
      try:
        found: Progress = saved_variables.read(where, expected)
      except saved_variables.DamagedError as error:
        damaged.append(f'{where.name} ({files.first_line(error)})')
        continue
      except saved_variables.OtherError as error:
        raise RunError(
          f'The checkpoint {where} is of another model or algorithm: it holds '
          f'{error}. Give the flags of the run that wrote it, or choose '
          'another output folder.'
        ) from None
      self._set_aside(damaged, version)
      return found
    if damaged:
      raise RunError(
        f'{self._folder}: no checkpoint can be read: {", ".join(damaged)}. '
        'Bring them back from a copy, delete the whole output folder to begin '
        'anew, or choose another one.'
      )
    return None

  def _set_aside(self, damaged: list[str], version: int) -> None:
    """Rename damaged checkpoints, so that their rounds can be saved again."""
    for described in damaged:
      logging.warning(
        'The checkpoint %s in %s is damaged; going on from round %d.',
        described,
        self._folder,
        version,
      )
      if not self._writable:
        continue
      name = described.split()[0]
      target = self._folder / f'damaged_{name}'
      shutil.rmtree(target, ignore_errors=True)
      os.rename(self._folder / name, target)


def newest_round(folder: pathlib.Path) -> int:
  """Return the round of the newest checkpoint in a folder, or 0 if none."""
  names = (path.name for path in folder.glob(f'{_PREFIX}*'))
  rounds = (name.removeprefix(_PREFIX) for name in names)
  return max((int(number) for number in rounds if number.isdigit()), default=0)


def best_shared_weights(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Read the shared weights of a run's best round by name, of any model.

  They are those of the last round if none was measured.

  Args:
    folder: The folder of the run's checkpoints.

  Raises:
    RunError: If there is no checkpoint, or it is damaged.
  """
  newest = folder / f'{_PREFIX}{newest_round(folder)}'
  if not newest.is_dir():
    raise RunError(
      f'{folder}: there is no checkpoint that can be read. Name the folder of '
      'a trained run.'
    )
  try:
    number, notes = (
      saved_variables.read_group(newest, name)['']
      for name in ('round', 'notes')
    )
    # The best weights are not kept apart if they are the last ones.
    is_last = decode(notes)['best_round'] in (None, int(number))
    where = ('state', 'global_model_weights') if is_last else ('best_weights',)
    return saved_variables.read_group(newest, *where, 'trainable', tiers.GLOBAL)
  except saved_variables.DamagedError as error:
    raise RunError(
      f'{newest}: there is no checkpoint that can be read '
      f'({files.first_line(error)}).'
    ) from error


def encode(notes: Any) -> np.ndarray:
  """Pack JSON values into an array that a checkpoint can hold."""
  return np.frombuffer(json.dumps(notes).encode(), np.uint8)


def decode(notes: Any) -> Any:
  """Unpack what `encode` packed."""
  return json.loads(np.asarray(notes, np.uint8).tobytes().decode())


def compress(text: str) -> np.ndarray:
  """Pack a long text into an array that a checkpoint can hold."""
  return np.frombuffer(zlib.compress(text.encode(), 1), np.uint8)


def decompress(packed: Any) -> str:
  """Unpack what `compress` packed."""
  return zlib.decompress(np.asarray(packed, np.uint8).tobytes()).decode()
