"""Checkpoints: everything that a run needs to go on as if never interrupted."""

import asyncio
import json
import os
import pathlib
import shutil
import threading
from collections.abc import Coroutine
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import errors

_Result = TypeVar('_Result')
_PREFIX = 'round_'


class CheckpointError(errors.UserError, RuntimeError):
  """Raised for a checkpoint that cannot be read, written or continued."""


class Progress(NamedTuple):
  """The state of a run after a round.

  Attributes:
    round: Rounds done.
    state: The process's state at the server.
    best_weights: The weights at the best evaluation so far.
    notes: JSON text of all else: the best round and its metric, the history
      that stopping looks at, the runtime's choices.
  """

  round: Any
  state: Any
  best_weights: Any
  notes: Any


class EventLoop:
  """Runs TFF's asynchronous managers for synchronous code, notebooks included.

  A notebook has a running loop already, so this one has its own thread.
  """

  def __init__(self) -> None:
    """Starts the thread."""
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
    self._thread.start()

  def run(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Waits for a coroutine and returns its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

  def close(self) -> None:
    """Ends the thread."""
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


class Checkpoints:
  """Saves and finds the checkpoints of a run in a folder."""

  def __init__(self, folder: str | os.PathLike[str], loop: EventLoop):
    """Makes the folder if there is none.

    Args:
      folder: Where the checkpoints are.
      loop: Runs the state manager.

    Raises:
      CheckpointError: If the folder cannot be written.
    """
    self._folder = pathlib.Path(folder)
    self._loop = loop
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      # What a kill in the middle of a save leaves behind.
      for left_over in self._folder.glob(f'{_PREFIX}*_temp*'):
        shutil.rmtree(left_over, ignore_errors=True)
      self._manager = tff.program.FileProgramStateManager(
        str(self._folder), prefix=_PREFIX, keep_total=2, keep_first=False
      )
    except OSError as error:
      raise CheckpointError(
        f'Cannot write checkpoints to {self._folder}: {error.strerror}. Choose '
        'another folder or make room.'
      ) from error

  def save(self, progress: Progress) -> None:
    """Writes a checkpoint; a kill at any moment leaves the last whole one.

    Raises:
      CheckpointError: If it cannot be written, such as on a full disk. What
        was written before is kept.
    """
    version = int(progress.round)
    try:
      if version in (self._loop.run(self._manager.get_versions()) or []):
        return
      self._loop.run(self._manager.save(progress, version))
    except (OSError, tf.errors.OpError) as error:
      raise CheckpointError(
        f'The checkpoint of round {version} cannot be written to '
        f'{self._folder}: {_first_line(error)} The last whole one is kept; '
        'make room and run the same command again to go on from it.'
      ) from error

  def latest(self, like: Progress) -> Progress | None:
    """Reads the newest checkpoint, or returns None if there is none.

    Args:
      like: A value of the same structure.

    Raises:
      CheckpointError: If the newest one is damaged or from another process.
    """
    versions = self._loop.run(self._manager.get_versions())
    return self.load(versions[-1], like) if versions else None

  def load(self, version: int, like: Progress) -> Progress:
    """Reads the checkpoint of one round; see `latest`."""
    where = self._folder / f'{_PREFIX}{version}'
    try:
      found = self._loop.run(self._manager.load(version, like))
    except Exception as error:  # Any damage of a file surfaces differently.
      raise CheckpointError(
        f'The checkpoint {where} cannot be read: {_first_line(error)} Delete '
        'this folder to go on from the one before it, or choose another '
        'output folder to begin anew.'
      ) from error
    # The notes are a text of any length.
    expected = _shapes((like.state, like.best_weights))
    actual = _shapes((found.state, found.best_weights))
    if expected != actual:
      raise CheckpointError(
        f'The checkpoint {where} is of another model or algorithm: it holds '
        f'{_difference(actual, expected)}. Choose another output folder.'
      )
    return found


def _first_line(error: BaseException) -> str:
  """The first line of a message, as a sentence."""
  lines = str(error).strip().splitlines()
  text = lines[0] if lines else type(error).__name__
  return text if text.endswith('.') else f'{text}.'


def _shapes(value: Any) -> list[tuple[tuple[int, ...], str]]:
  """Shapes and types of all numbers in a checkpoint."""
  leaves = tff.structure.flatten(
    tff.structure.from_container(_plain(value), recursive=True)
  )
  return [(np.shape(leaf), np.asarray(leaf).dtype.kind) for leaf in leaves]


def _plain(value: Any) -> Any:
  """Containers of any kind as tuples, so that two structures compare."""
  if isinstance(value, tff.structure.Struct):
    return tuple(_plain(part) for part in value)
  if hasattr(type(value), '__attrs_attrs__'):
    names = [a.name for a in type(value).__attrs_attrs__]
    return tuple(_plain(getattr(value, name)) for name in names)
  if isinstance(value, dict):
    return tuple(_plain(part) for part in value.values())
  if isinstance(value, (list, tuple)):
    return tuple(_plain(part) for part in value)
  return value


def _difference(actual: list[Any], expected: list[Any]) -> str:
  """Names the first difference between two lists of shapes."""
  for found, wanted in zip(actual, expected, strict=False):
    if found != wanted:
      return f'numbers of shape {found[0]} where this run has {wanted[0]}'
  return f'{len(actual)} values where this run has {len(expected)}'


def encode(notes: Any) -> np.ndarray:
  """Packs JSON values into an array that a checkpoint can hold."""
  return np.frombuffer(json.dumps(notes, sort_keys=True).encode(), np.uint8)


def decode(notes: Any) -> Any:
  """Unpacks what `encode` packed."""
  return json.loads(np.asarray(notes, np.uint8).tobytes().decode())
