"""What a run writes down for people: a table, TensorBoard events, a bar."""

import collections
from collections.abc import Mapping
import csv
import io
import numbers
import os
import pathlib
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import checkpoints
from tff_partial import errors

METRICS_FILE = 'metrics.csv'
ROUND = 'round'


class RecordError(errors.UserError, RuntimeError):
  """Raised when the records of a run cannot be written."""


def flatten(metrics: Any) -> collections.OrderedDict[str, Any]:
  """Turns nested metrics into one level, `outer/inner`, scalars only."""
  flat: collections.OrderedDict[str, Any] = collections.OrderedDict()

  def visit(value: Any, path: tuple[str, ...]) -> None:
    if isinstance(value, Mapping):
      for name, part in value.items():
        visit(part, (*path, str(name)))
    elif np.ndim(value) == 0 and isinstance(
      np.asarray(value).item(), numbers.Number
    ):
      flat['/'.join(path)] = np.asarray(value).item()

  visit(metrics, ())
  return flat


class Records:
  """Writes a row per round to `metrics.csv` and to TensorBoard."""

  def __init__(
    self,
    folder: str | os.PathLike[str],
    loop: checkpoints.EventLoop,
    *,
    last_round: int,
    tensorboard: bool,
  ):
    """Opens the records; rounds after `last_round` are forgotten.

    Args:
      folder: The run's folder.
      loop: Runs the release managers.
      last_round: The round from which the run goes on, 0 for a new run.
      tensorboard: Whether to write TensorBoard events.

    Raises:
      RecordError: If the folder cannot be written, or `metrics.csv` is not
        the table of a run.
    """
    self._folder = pathlib.Path(folder)
    self._loop = loop
    path = self._folder / METRICS_FILE
    try:
      # What a kill while the table is replaced leaves behind.
      for left_over in self._folder.glob(f'{METRICS_FILE}_temp*'):
        left_over.unlink()
      _forget_rounds_after(path, last_round)
      self._table = tff.program.CSVFileReleaseManager(
        str(path), key_fieldname=ROUND
      )
      self._events = (
        tff.program.TensorBoardReleaseManager(str(self._folder / 'tensorboard'))
        if tensorboard
        else None
      )
    except (OSError, tf.errors.OpError) as error:
      raise RecordError(
        f'Cannot write to {self._folder}: {checkpoints.first_line(error)} '
        'Choose another folder or make room.'
      ) from error

  def release(self, row: Mapping[str, Any], round_number: int) -> None:
    """Adds the row of a round.

    Args:
      row: Column to a number, or to an empty text where there is none.
      round_number: The round.

    Raises:
      RecordError: If it cannot be written.
    """
    measured = {name: v for name, v in row.items() if not isinstance(v, str)}
    try:
      self._loop.run(self._table.release(dict(row), round_number))
      if self._events is not None:
        self._loop.run(self._events.release(measured, round_number))
    except (OSError, tf.errors.OpError) as error:
      raise RecordError(
        f'Round {round_number} cannot be recorded in {self._folder}: '
        f'{checkpoints.first_line(error)} Make room and run the same command '
        'again to go on from the last checkpoint.'
      ) from error


def _forget_rounds_after(path: pathlib.Path, last_round: int) -> None:
  """Cuts the table back to what the checkpoint knows, whole lines only."""
  if not path.exists():
    return
  with path.open(newline='', encoding='utf-8', errors='replace') as file:
    text = file.read()
  whole = text[: text.rfind('\n') + 1]
  rows = list(csv.reader(io.StringIO(whole)))
  header = rows[0] if rows else []
  if rows and header[:1] != [ROUND]:
    raise RecordError(
      f'{path}, line 1: there is no first column {ROUND!r}, so it is not the '
      'table of a run. Move it away or choose another output folder.'
    )
  kept = [header]
  reached = 0
  for number, row in enumerate(rows[1:], 2):
    if reached >= last_round:
      break
    if len(row) != len(header) or not row[0].isdigit():
      raise RecordError(
        f'{path}, line {number}: expected a round and its numbers in '
        f'{len(header)} columns, found {",".join(row)[:80]!r}. Repair the '
        'line, or move the table away to go on without the rounds in it.'
      )
    reached = int(row[0])
    if reached <= last_round:
      kept.append(row)
  if len(kept) <= last_round:
    logging.warning(
      '%s lacks %d of %d rounds.', path, last_round + 1 - len(kept), last_round
    )
  if len(kept) < 2:
    path.unlink()
    return
  temporary = path.with_suffix('.tmp')
  with temporary.open('w', newline='') as file:
    csv.writer(file).writerows(kept)
  os.replace(temporary, path)


class Bar:
  """A progress bar with the running metric and the time that is left."""

  def __init__(self, rounds: int, done: int, shown: bool):
    """Shows the bar, unless `shown` is false.

    Args:
      rounds: Rounds of the whole run.
      done: Rounds that are done already.
      shown: Whether there is anybody to look at it.
    """
    self._bar: Any = None
    if shown:
      import tqdm

      self._bar = tqdm.tqdm(total=rounds, initial=done, unit='round')

  def step(self, shown: Mapping[str, float]) -> None:
    """Moves on by one round and shows some metrics."""
    if self._bar is not None:
      self._bar.set_postfix(
        {name: f'{value:.4f}' for name, value in shown.items()}, refresh=False
      )
      self._bar.update(1)

  def close(self) -> None:
    """Leaves the bar as it is."""
    if self._bar is not None:
      self._bar.close()
