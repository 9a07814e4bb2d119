"""Records of a run for people: a table, TensorBoard events, a bar.

A row is on its way to the disk when `release` returns, so that nothing needs
closing and a kill loses nothing. TFF's release managers promise the same, but
they reread the table's header for each row and call TensorFlow for each number:
5 ms, while a round may take 10 ms.
"""

import collections
from collections.abc import Mapping
import contextlib
import csv
import io
import numbers
import os
import pathlib
import sys
from typing import Any
import warnings

import numpy as np
import tensorflow as tf

from tff_partial import evaluation
from tff_partial.training import files
from tff_partial.training.errors import RunError

# The folder of TensorBoard's events.
TENSORBOARD = 'tensorboard'
# Marks values that TensorBoard shows as a curve.
_CURVE = tf.compat.v1.SummaryMetadata(
  plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name='scalars')
)


def flatten(metrics: Any) -> collections.OrderedDict[str, Any]:
  """Flatten nested metrics to names `outer/inner`, scalars only."""
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
  """Writer of a row per round to `metrics.csv` and to TensorBoard.

  The checkpoints of a run hold the table, too; a resumed run writes the file
  again from there.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    *,
    saved: str | None,
    tensorboard: bool,
  ):
    """Open the records, and drop rounds after the saved ones.

    Args:
      folder: The run's folder.
      saved: The table's text in the checkpoint from which the run resumes; None
        for a new run.
      tensorboard: True to write TensorBoard events.

    Raises:
      RunError: If the folder cannot be written, or `metrics.csv` is not
        the table of a run.
    """
    self._folder = pathlib.Path(folder)
    self._path = self._folder / files.METRICS_FILE
    self._events: tf.summary.SummaryWriter | None = None
    self._rows = _rows(saved or '') or [[files.ROUND]]
    with files.writing(f'Cannot write to {self._folder}'):
      self._folder.mkdir(parents=True, exist_ok=True)
      self._refuse_other_file()
      files.write_whole(self._path, self.text)
      if tensorboard:
        self._events = tf.summary.create_file_writer(
          str(self._folder / TENSORBOARD)
        )

  @property
  def text(self) -> str:
    """The table so far."""
    text = io.StringIO(newline='')
    csv.writer(text).writerows(self._rows)
    return text.getvalue()

  def _refuse_other_file(self) -> None:
    """Refuse to overwrite a file that is not the table of a run."""
    if not self._path.exists():
      return
    text = self._path.read_text('utf-8', errors='replace')
    header, newline, _ = text.partition('\n')
    # A kill may have truncated the header.
    is_cut = not newline and files.ROUND.startswith(header)
    if not is_cut and header.rstrip().split(',')[0] != files.ROUND:
      raise RunError(
        f'{self._path}, line 1: there is no first column {files.ROUND!r}, so '
        'it is not the table of a run. Move it away or choose another output '
        'folder.'
      )

  def release(self, row: Mapping[str, Any], round_number: int) -> None:
    """Add the row of a round.

    Args:
      row: Column to a number, or to an empty text where there is none.
      round_number: The round.

    Raises:
      RunError: If it cannot be written.
    """
    with self._writing(round_number):
      self._add_row({files.ROUND: round_number, **row})
      self._add_curves(row, round_number)

  def complete(self, values: Mapping[str, Any]) -> None:
    """Fill empty columns of the last row.

    Raises:
      RunError: If it cannot be written.
    """
    columns, cells = self._rows[0], self._rows[-1]
    round_number = int(cells[0])
    for column, value in values.items():
      cells[columns.index(column)] = str(value)
    with self._writing(round_number):
      files.write_whole(self._path, self.text)
      self._add_curves(values, round_number)

  def histograms(
    self, phase: str, values: evaluation.ByClient, round_number: int
  ) -> None:
    """Show the distribution of metrics over clients in TensorBoard.

    Args:
      phase: Name of the clients that were measured.
      values: Metric to client id to value.
      round_number: The round.

    Raises:
      RunError: If they cannot be written.
    """
    if self._events is None:
      return
    with self._writing(round_number), self._events.as_default(round_number):
      for name, of_clients in values.items():
        numbers = np.array(list(of_clients.values()), np.float64)
        finite = numbers[np.isfinite(numbers)]
        if finite.size:
          tf.summary.histogram(f'{phase}_clients/{name}', finite)

  def _writing(
    self, round_number: int
  ) -> contextlib.AbstractContextManager[None]:
    """Report which round could not be recorded, and what to do."""
    return files.writing(
      f'Round {round_number} cannot be recorded in {self._folder}',
      files.to_go_on,
    )

  def _add_curves(self, row: Mapping[str, Any], round_number: int) -> None:
    if self._events is None:
      return
    with self._events.as_default():
      tf.summary.experimental.write_raw_pb(
        _curves(row), tf.constant(round_number, tf.int64)
      )
    self._events.flush()

  def _add_row(self, row: Mapping[str, Any]) -> None:
    columns = self._rows[0]
    new = sorted(row.keys() - set(columns))
    if new:
      columns.extend(new)
      for cells in self._rows[1:]:
        cells.extend([''] * len(new))
      files.write_whole(self._path, self.text)
    cells = [str(row.get(column, '')) for column in columns]
    self._rows.append(cells)
    with self._path.open('a', newline='') as file:
      csv.writer(file).writerow(cells)


def entry(round_number: int, row: Mapping[str, Any]) -> dict[str, Any]:
  """Return a round's number and the columns that have a value."""
  measured = {name: value for name, value in row.items() if value != ''}
  return {'round': round_number, **measured}


def read(table: str) -> list[dict[str, Any]]:
  """Return the entries of all rounds of a table.

  Args:
    table: The text of a `metrics.csv`; empty for a new run.
  """
  rows = csv.DictReader(io.StringIO(table, newline=''))
  return [
    {name: _number(cell) for name, cell in row.items() if cell} for row in rows
  ]


def _number(cell: str) -> Any:
  """Parse a cell into the value that was written."""
  if cell in ('True', 'False'):
    return cell == 'True'
  try:
    return int(cell)
  except ValueError:
    return float(cell)


def by_phase(row: Mapping[str, Any]) -> dict[str, Any]:
  """Name the numbers of a row by the phase of the run: `PHASE/METRIC`.

  TensorBoard and other trackers show metrics of a phase side by side. Empty
  columns are left out.

  Args:
    row: Columns of `metrics.csv` to numbers, such as `loss`, `validation_loss`,
      `seconds_round` and `privacy/epsilon`.

  Returns:
    The numbers by the names `train/loss`, `validation/loss`, `seconds/round`
    and `privacy/epsilon`.
  """
  return {
    _tag(name): number
    for name, number in row.items()
    if not isinstance(number, str)
  }


def _tag(column: str) -> str:
  if '/' in column:
    return column
  for phase in ('validation', 'seconds'):
    if column.startswith(f'{phase}_'):
      return f'{phase}/{column.removeprefix(phase)[1:]}'
  return f'train/{column}'


def add_curves(
  folder: str | os.PathLike[str],
  numbers: Mapping[str, float],
  round_number: int,
) -> None:
  """Add metrics after the last round to a run's TensorBoard events.

  `numbers` is from `PHASE/METRIC` to the number.

  Raises:
    RunError: If they cannot be written.
  """
  with files.writing(f'Cannot write to {folder}'):
    events = tf.summary.create_file_writer(os.path.join(folder, TENSORBOARD))
    with events.as_default(round_number):
      for tag, number in numbers.items():
        tf.summary.scalar(tag, number)
    events.close()


def _curves(row: Mapping[str, Any]) -> bytes:
  """Return the numbers of a row as a TensorBoard summary."""
  summary = tf.compat.v1.Summary()
  for tag, number in by_phase(row).items():
    value = summary.value.add(tag=tag, metadata=_CURVE)
    value.tensor.dtype = tf.float32.as_datatype_enum
    value.tensor.tensor_shape.SetInParent()
    value.tensor.float_val.append(number)
  return summary.SerializeToString()


def _rows(text: str) -> list[list[str]]:
  """Return the cells of a table, header included."""
  return list(csv.reader(io.StringIO(text, newline='')))


def last_round(folder: str | os.PathLike[str]) -> int:
  """Return the last round in the table of a run, or 0."""
  path = pathlib.Path(folder) / files.METRICS_FILE
  if not path.exists():
    return 0
  rows = _rows(path.read_text('utf-8', errors='replace'))
  numbers = [row[0] for row in rows[1:] if row]
  return max(
    (int(n) for n in numbers if n.isdecimal() and len(n) < 9), default=0
  )


class Bar:
  """A progress bar with the current metrics and the remaining time.

  It is a widget in notebooks with ipywidgets, such as Colab.
  """

  def __init__(self, rounds: int, done: int, shown: bool | None = None):
    """Show the bar, unless `shown` is false.

    Args:
      rounds: Number of rounds of the whole run.
      done: Number of rounds already done.
      shown: True to show it; by default in an interactive interpreter, which
        Python and IPython (so notebooks, too) indicate by `sys.ps1`.
    """
    if shown is None:
      shown = hasattr(sys, 'ps1')
    with warnings.catch_warnings():
      # A notebook without ipywidgets gets the bar of a terminal.
      warnings.simplefilter('ignore')
      from tqdm import auto

    self._bar: Any = auto.tqdm(
      total=rounds, initial=done, unit='round', disable=not shown
    )

  def step(self, shown: Mapping[str, float]) -> None:
    """Advance by one round and show some metrics."""
    self._bar.set_postfix(
      {name: f'{value:.4f}' for name, value in shown.items()}, refresh=False
    )
    self._bar.update(1)

  def say(self, text: str) -> None:
    """Show a text until the next step."""
    self._bar.set_postfix_str(text)

  def close(self) -> None:
    """Close the bar, which stays visible."""
    self._bar.close()
