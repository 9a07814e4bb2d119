"""What a run writes down for people: a table, TensorBoard events, a bar.

A row is on its way to the disk when `release` returns, so that nothing needs
closing and a kill loses nothing. TFF's release managers promise as much, but
they read the table's header anew for each row and call TensorFlow for each
number: 5 ms, while a round may take 10 ms.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import numbers
import os
import pathlib
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial import checkpoints
from tff_partial import errors

METRICS_FILE = 'metrics.csv'
ROUND = 'round'
# What TensorBoard shows as a curve.
_CURVE = tf.compat.v1.SummaryMetadata(
  plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name='scalars')
)


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
    *,
    last_round: int,
    tensorboard: bool,
  ):
    """Opens the records; rounds after `last_round` are forgotten.

    Args:
      folder: The run's folder.
      last_round: The round from which the run goes on, 0 for a new run.
      tensorboard: Whether to write TensorBoard events.

    Raises:
      RecordError: If the folder cannot be written, or `metrics.csv` is not
        the table of a run.
    """
    self._folder = pathlib.Path(folder)
    self._path = self._folder / METRICS_FILE
    self._events: tf.summary.SummaryWriter | None = None
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._columns = _forget_rounds_after(self._path, last_round)
      if tensorboard:
        self._events = tf.summary.create_file_writer(
          str(self._folder / 'tensorboard')
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
    try:
      self._add_row({ROUND: round_number, **row})
      if self._events is not None:
        with self._events.as_default():
          tf.summary.experimental.write_raw_pb(
            _curves(row), tf.constant(round_number, tf.int64)
          )
        self._events.flush()
    except (OSError, tf.errors.OpError) as error:
      raise RecordError(
        f'Round {round_number} cannot be recorded in {self._folder}: '
        f'{checkpoints.first_line(error)} Make room and run the same command '
        'again to go on from the last checkpoint.'
      ) from error

  def _add_row(self, row: Mapping[str, Any]) -> None:
    new = sorted(row.keys() - set(self._columns))
    if new:
      blank = [''] * len(new)
      rows = [cells + blank for cells in _rows(self._path)[1:]]
      self._columns = [*self._columns, *new]
      _replace(self._path, [self._columns, *rows])
    with self._path.open('a', newline='') as file:
      csv.DictWriter(file, self._columns).writerow(row)


def _curves(row: Mapping[str, Any]) -> bytes:
  """The numbers of a row as TensorBoard wants them."""
  summary = tf.compat.v1.Summary()
  for name, number in row.items():
    if not isinstance(number, str):
      value = summary.value.add(tag=name, metadata=_CURVE)
      value.tensor.dtype = tf.float32.as_datatype_enum
      value.tensor.tensor_shape.SetInParent()
      value.tensor.float_val.append(number)
  return summary.SerializeToString()


def _rows(path: pathlib.Path) -> list[list[str]]:
  """The cells of a table, header included, whole lines only."""
  with path.open(newline='', encoding='utf-8', errors='replace') as file:
    text = file.read()
  return list(csv.reader(io.StringIO(text[: text.rfind('\n') + 1])))


def _replace(path: pathlib.Path, rows: Iterable[Sequence[str]]) -> None:
  """Writes a table anew; a kill leaves the old one or the new one."""
  temporary = path.with_suffix('.tmp')
  with temporary.open('w', newline='') as file:
    csv.writer(file).writerows(rows)
  os.replace(temporary, path)


def _forget_rounds_after(path: pathlib.Path, last_round: int) -> list[str]:
  """Cuts the table back to what the checkpoint knows; returns its header."""
  path.with_suffix('.tmp').unlink(missing_ok=True)
  rows = _rows(path) if path.exists() else []
  header = rows[0] if rows else [ROUND]
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
  if rows and len(kept) <= last_round:
    logging.warning(
      '%s lacks %d of %d rounds.', path, last_round + 1 - len(kept), last_round
    )
  if len(kept) < 2:
    kept = [[ROUND]]
  _replace(path, kept)
  return kept[0]


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
