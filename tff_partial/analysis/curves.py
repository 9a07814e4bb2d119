"""Learning curves of several runs in one figure.

Runs that differ only in their seed make one line: their mean, in a band of one
standard deviation to either side. A run that diverged or has not ended counts
in no mean; it is drawn separately as a thin line with a cross at its end.

`of_result` draws one run, from the result of `train`.
"""

from collections.abc import Mapping, Sequence
import math
import os
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tff_partial.analysis import figures
from tff_partial.analysis import run_folders
from tff_partial.analysis.errors import AnalysisError
from tff_partial.dp import privacy
from tff_partial.training import results

# The longest lines whose points are marked.
_FEW_POINTS = 30

# Horizontal axes of a curve.
ROUNDS, PARAMETERS, BYTES = 'rounds', 'parameters', 'bytes'
OVER = (ROUNDS, PARAMETERS, BYTES)

# Columns of clients that load the model and send something: those that do not
# count send zeros.
_JOINED = ('num_clients', 'num_not_finite', 'num_without_query')
_VALIDATION, _OF_VALIDATION = 'validation_', 'validation'
_EPSILON = 'privacy/epsilon'
_PANELS_A_ROW = 3


class Trace(NamedTuple):
  """The values of a metric in one run.

  Attributes:
    values: Floats by round; rounds without a value are left out.
    state: The run's state: DONE, or one of LOST of `run_folders`.
  """

  values: pd.Series
  state: str = run_folders.DONE


def read(run: run_folders.RunFolder, metric: str) -> Trace:
  """Read a metric from a run's table of rounds.

  Args:
    run: The run.
    metric: A column, such as `loss` or `validation_rmse`.

  Raises:
    AnalysisError: If the table has no such column, or the column is empty.
  """
  has_ended = run.result is not None
  try:
    frame = run.table()
    if metric not in frame.columns:
      raise AnalysisError(
        f'{run.folder}: there is no metric {metric!r} in the table of rounds, '
        f'which has {", ".join(frame.columns)}.'
      )
  except AnalysisError:
    if has_ended:
      raise
    # It may have stopped before its first round.
    return Trace(pd.Series(dtype=float), run.state)
  values = pd.to_numeric(frame[metric], errors='coerce').astype(float)
  values = values[np.isfinite(values)]
  if run.state == run_folders.DONE and values.empty:
    raise AnalysisError(
      f'{run.folder}: metric {metric!r} was measured in no round. Choose '
      'another one.'
    )
  return Trace(values, run.state)


def over_traffic(
  traces: Sequence[Trace], runs: Sequence[run_folders.RunFolder], what: str
) -> list[Trace]:
  """Replace the rounds of traces by the total traffic until then.

  Args:
    traces: A trace by round for each run.
    runs: The runs, which differ only in their seed.
    what: PARAMETERS or BYTES, loaded and sent by all clients together. If
      clients send rows of tables, bytes are those of rows.

  Returns:
    The traces of the runs that have ended, maybe none; all use the runs' mean
    traffic per round, so that they can be averaged.

  Raises:
    AnalysisError: If a run did not count what its clients load and send.
  """
  ended = [
    (trace, _traffic(run, what))
    for trace, run in zip(traces, runs, strict=True)
    if run.result is not None
  ]
  if not ended:
    return []
  a_round = np.mean([traffic for _, traffic in ended])
  return [
    trace._replace(values=trace.values.set_axis(trace.values.index * a_round))
    for trace, _ in ended
  ]


def _traffic(run: run_folders.RunFolder, what: str) -> float:
  """Return the traffic of all clients of a round, averaged over rounds."""
  counted = (run.result or {}).get('communication')
  table = run.table()
  if counted is None or 'num_clients' not in table:
    raise AnalysisError(
      f'{run.folder}: the run does not say what its clients load and send. '
      'Draw its curve over rounds.'
    )
  if counted.get('upload_not_counted'):
    raise AnalysisError(
      f'{run.folder}: what clients send differs in size and was not counted '
      f'({", ".join(counted["upload_not_counted"])}). Draw its curve over '
      'rounds.'
    )
  up = counted[f'upload_{what}']
  if what == BYTES:
    up = counted.get('upload_bytes_by_rows', up)
  joined = float(table.filter(items=_JOINED).sum(axis=1).mean())
  # More are asked in a run with --oversample or --dropout_rate.
  asked = (run.result or {}).get('clients_asked', joined)
  return float(asked * counted[f'download_{what}'] + joined * up)


def default_metric(settings: Sequence[run_folders.Setting]) -> str:
  """Return the metric drawn by default: of validation clients, or the loss.

  All runs that have ended have it: the loss, if those of their tasks differ.
  """
  tables = [
    run.table()
    for setting in settings
    for run in setting.runs
    if run.result is not None
  ]
  names = list(map(str, tables[0])) if tables else []
  # A private run has no training loss.
  for kind in ('validation_(?!loss|num_)', 'loss$', 'validation_loss$'):
    for name in names:
      if re.match(kind, name) and all(name in table for table in tables):
        return name
  return 'loss'


def mean_and_deviation(traces: Sequence[Trace]) -> tuple[pd.Series, pd.Series]:
  """Average repetitions at the rounds that all of them measured.

  Args:
    traces: One trace per seed; at least one.

  Returns:
    The mean and the standard deviation (of a sample; 0 for a single trace), by
    round.
  """
  joined = pd.concat([trace.values for trace in traces], axis=1, join='inner')
  return joined.mean(axis=1), joined.std(axis=1).fillna(0.0)


def draw(
  lines: Mapping[str, Sequence[Trace]],
  path: str | os.PathLike[str],
  *,
  metric: str,
  over: str = ROUNDS,
) -> pathlib.Path:
  """Draw learning curves, with a legend.

  Args:
    lines: Label to its repetitions.
    path: The PNG file to write.
    metric: The metric, for the vertical axis.
    over: The horizontal axis of `lines`, one of OVER.

  Raises:
    AnalysisError: If there is nothing to draw.
  """
  figure = figures.new(8.0, 4.6)
  axes = figure.add_subplot()
  figures.tidy(axes)
  heights: list[float] = []
  for number, (label, traces) in enumerate(lines.items()):
    look = figures.style(number)
    done = [t for t in traces if t.state == run_folders.DONE]
    lost = [t.values for t in traces if t.state != run_folders.DONE]
    broken = [values for values in lost if len(values)]
    for values in broken:
      axes.plot(values, linewidth=0.8, alpha=0.8, **look)
      axes.plot(values.iloc[-1:], marker='x', ms=7, color=look['color'])
    if done:
      line = _draw_mean(axes, label, done, metric, look)
      heights.extend(line.to_numpy().ravel())
    if done or broken:
      axes.plot([], [], label=label + _note(traces), **look)
  if not axes.lines:
    raise AnalysisError(
      f'{path}: there is no round of any run to draw. Train some rounds first.'
    )
  if heights and np.isfinite(heights).all():
    # Diverged runs must not flatten the others.
    low, high = min(heights), max(heights)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)
  axes.set_xlabel(
    'round' if over == ROUNDS else f'{over} loaded and sent by all clients',
    color=figures.INK,
  )
  axes.set_ylabel(figures.axis_name(metric), color=figures.INK)
  figures.add_legend(axes)
  return figures.save(figure, path)


def _draw_mean(
  axes: Any, label: str, done: Sequence[Trace], metric: str, look: Any
) -> pd.DataFrame:
  """Draw repetitions; return mean and ends of the band, by round."""
  mean, deviation = mean_and_deviation(done)
  if mean.empty:
    raise AnalysisError(
      f'{label}: its runs have no round in common at which {metric} was '
      'measured. Draw runs that were evaluated in the same rounds.'
    )
  line = pd.DataFrame(
    {'mean': mean, 'low': mean - deviation, 'high': mean + deviation}
  )
  marker = 'o' if len(mean) <= _FEW_POINTS else ''
  axes.plot(mean, linewidth=1.8, marker=marker, ms=3.5, **look)
  if len(done) > 1:
    axes.fill_between(
      line.index,
      line['low'],
      line['high'],
      color=look['color'],
      alpha=0.16,
      linewidth=0,
    )
  return line


def draw_over_support(
  lines: Mapping[str, Mapping[int, float]],
  path: str | os.PathLike[str],
  *,
  metric: str,
) -> pathlib.Path:
  """Draw a metric of new users over the number of their examples.

  Sizes are drawn at equal distances, since a few more examples matter little if
  there are many.

  Args:
    lines: Label of users or predictor to size of the support set to metric.
    path: The PNG file to write.
    metric: The metric's name.

  Raises:
    AnalysisError: If there is nothing to draw.
  """
  sizes = sorted({size for line in lines.values() for size in line})
  if not sizes:
    raise AnalysisError('There is nothing to draw: give at least one size.')
  return figures.draw_even(
    {
      label: pd.DataFrame({'mean': pd.Series(line), 'std': math.nan})
      for label, line in lines.items()
    },
    sizes,
    path,
    x='examples of a new user',
    metric=metric,
  )


def of_result(
  result: results.TrainingResult, metrics: Sequence[str] | None = None
) -> figures.Figure:
  """Draw one run: a panel per metric, with training and validation.

  Args:
    result: The result of `train`.
    metrics: Metrics that get a panel, such as `loss` or `seconds_round`; by
      default the loss, all other validation metrics, and epsilon if the run is
      private.

  Returns:
    A figure, which a notebook displays.

  Raises:
    AnalysisError: If a metric was measured in no round.
  """
  frame = pd.DataFrame.from_records(result.history, index='round')
  lines = _lines(frame)
  chosen = _default_panels(lines) if metrics is None else list(metrics)
  unknown = [metric for metric in chosen if metric not in lines]
  if unknown or not chosen:
    raise AnalysisError(
      f'There is nothing to draw of {", ".join(unknown) or "the run"}: choose '
      f'metrics that it measured, which are {", ".join(lines) or "none"}.'
    )
  columns = min(len(chosen), _PANELS_A_ROW)
  rows = -(-len(chosen) // columns)
  figure = figures.new(4.2 * columns, 3.1 * rows)
  panels = list(figure.subplots(rows, columns, squeeze=False).flat)
  for axes in panels[len(chosen) :]:
    axes.set_visible(False)
  for axes, metric in zip(panels, chosen, strict=False):
    figures.tidy(axes)
    for name, values in lines[metric].items():
      marker = 'o' if len(values) <= _FEW_POINTS else ''
      look = figures.style(int(name == _OF_VALIDATION))
      axes.plot(
        values, label=name, linewidth=1.5, marker=marker, ms=3.5, **look
      )
    if result.best_round is not None:
      axes.axvline(
        result.best_round,
        label='best round',
        color=figures.FAINT,
        linewidth=1,
        linestyle=(0, (4, 3)),
      )
    axes.set_xlabel('round', color=figures.INK)
    axes.set_ylabel(figures.axis_name(metric), color=figures.INK)
    axes.legend(frameon=False, fontsize=9)
  return figure


def _lines(frame: pd.DataFrame) -> dict[str, dict[str, pd.Series]]:
  """Split a table into lines: metric to training and validation clients.

  Rounds without a value are left out.

  Args:
    frame: Columns of `metrics.csv` by round.
  """
  lines: dict[str, dict[str, pd.Series]] = {}
  for column in frame:
    values = frame[column].astype(float)
    values = values[np.isfinite(values)]
    if values.empty:
      continue
    name = str(column).removesuffix(privacy.NOT_PRIVATE)
    who = _OF_VALIDATION if name.startswith(_VALIDATION) else 'training'
    if name != column:
      who += ', not private'
    lines.setdefault(name.removeprefix(_VALIDATION), {})[who] = values
  return lines


def _default_panels(lines: Mapping[str, Mapping[str, pd.Series]]) -> list[str]:
  """Return the metrics that get a panel by default."""
  validated = [
    metric
    for metric, by_whom in lines.items()
    if _OF_VALIDATION in by_whom
    and metric != 'loss'
    and not metric.startswith('num_')
  ]
  return [
    *(['loss'] if 'loss' in lines else []),
    *validated,
    *([_EPSILON] if _EPSILON in lines else []),
  ]


def _note(traces: Sequence[Trace]) -> str:
  """Return a label's note: how many runs it has, and how many were lost."""
  done = sum(t.state == run_folders.DONE for t in traces)
  parts = [f'{done} seeds'] if done > 1 else []
  for state in run_folders.LOST:
    number = sum(t.state == state for t in traces)
    if number:
      parts.append(f'{number} {state}')
  return f' ({", ".join(parts)})' if parts else ''
