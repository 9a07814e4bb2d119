"""Tables of results of runs: one row per setting, one column per metric.

Values are means over the seeds that are done; none where one of them has no
value. Runs that diverged or have not ended are counted in the row and named
below the table.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from tff_partial.analysis import figures
from tff_partial.analysis import run_folders
from tff_partial.analysis import spreadsheets
from tff_partial.analysis.errors import AnalysisError

# The weights to report: those of the last round, or of the round that was best
# on the validation clients.
LAST, BEST = 'last', 'best'


def deviation_of(metric: str) -> str:
  """Return the name of the column of a metric's standard deviation."""
  return f'{metric}_std'


@dataclasses.dataclass(frozen=True, eq=False)
class ResultTable:
  """Means and deviations over seeds.

  Attributes:
    settings: Names of the columns that distinguish rows.
    metrics: Names of the columns of means; each has a standard deviation of the
      same name with the suffix `_std` (of a sample; none of a single run).
    frame: These columns and the numbers of runs: `seeds` in the means,
      `diverged`, `unfinished` and `failed` in none.
    lost: The runs that are in no mean.
  """

  settings: tuple[str, ...]
  metrics: tuple[str, ...]
  frame: pd.DataFrame
  lost: tuple[run_folders.RunFolder, ...]

  def to_csv(self) -> str:
    """Format the table as CSV, with numbers in full precision."""
    return spreadsheets.escaped_frame(self.frame).to_csv(index=False)

  def to_markdown(self) -> str:
    """Format the table as Markdown, followed by the lost runs."""
    texts = self.frame[[*self.settings, 'seeds', *self.metrics]].astype(object)
    for name in self.settings:
      texts[name] = texts[name].replace('', '-')
    for name in self.metrics:
      texts[name] = [
        _with_deviation(*row)
        for row in self.frame[[name, deviation_of(name), 'seeds']].to_numpy()
      ]
    for state in run_folders.LOST:
      texts['seeds'] = [
        f'{seeds}, {number} {state}' if number else f'{seeds}'
        for seeds, number in zip(texts['seeds'], self.frame[state], strict=True)
      ]
    lines = [markdown(texts, num_left=len(self.settings))]
    if self.lost:
      lines += ['', 'In no mean:', '']
      lines += map(lost_line, self.lost)
    return '\n'.join(lines)


def lost_line(run: run_folders.RunFolder) -> str:
  """Describe a run that is in no mean, as an item of a list."""
  reason = run.failure or run.damage
  why = f' ({reason})' if reason else ''
  return f'- {run.folder}: {run.state}{why}'


def markdown(texts: pd.DataFrame, num_left: int | None = None) -> str:
  """Format a table of strings as Markdown.

  Args:
    texts: The cells.
    num_left: How many columns are aligned to the left, before those aligned to
      the right; all by default.
  """
  width = len(texts.columns)
  num_left = width if num_left is None else num_left
  lines = [
    '| ' + ' | '.join(str(cell).replace('|', r'\|') for cell in row) + ' |'
    for row in (list(texts), *texts.to_numpy().tolist())
  ]
  lines.insert(1, '|' + '---|' * num_left + '---:|' * (width - num_left))
  return '\n'.join(lines)


def gather(
  settings: Sequence[run_folders.Setting],
  *,
  of: str = LAST,
  metrics: Sequence[str] = (),
) -> ResultTable:
  """Make a table of the results of runs.

  Args:
    settings: The settings from `run_folders.settings`.
    of: LAST or BEST round.
    metrics: Columns: metrics of the test clients, or numbers elsewhere in
      `result.json` by their path, such as `seconds/total`; by default all the
      former, and epsilon if there is one.

  Raises:
    AnalysisError: If no run has measured such a metric.
  """
  measured = {
    id(run): _metrics(run, of)
    for setting in settings
    for run in setting.runs
    if run.result is not None
  }
  known = {name: None for values in measured.values() for name in values}
  unknown = [name for name in metrics if name not in known]
  if unknown:
    raise AnalysisError(
      f'No run has measured {unknown[0]!r}. Use a path, such as seconds/total, '
      f'in result.json, or one of {", ".join(filter(_is_default, known))}.'
    )
  metrics = metrics or [name for name in known if _is_default(name)]
  rows = []
  for setting in settings:
    done = [measured[id(run)] for run in setting.ended(run_folders.DONE)]
    values = pd.DataFrame(done, columns=list(metrics), dtype=float)
    deviations = values.std(skipna=False)
    if len(values) > 1:  # Also infinities, such as epsilon without noise.
      deviations = deviations.mask(values.eq(values.iloc[0]).all(), 0.0)
    row = {
      **setting.values,
      'seeds': len(done),
      **{state: len(setting.ended(state)) for state in run_folders.LOST},
    }
    for name in metrics:
      row[name] = values[name].mean(skipna=False)
      row[deviation_of(name)] = deviations[name]
    rows.append(row)
  return ResultTable(
    tuple(settings[0].values),
    tuple(metrics),
    pd.DataFrame(rows),
    tuple(
      run
      for setting in settings
      for run in setting.runs
      if run.state != run_folders.DONE
    ),
  )


def draw_over(
  table: ResultTable, x: str, y: str, path: str | os.PathLike[str]
) -> pathlib.Path:
  """Draw a metric over a setting, with a line for each value of all others.

  Args:
    table: The results of the runs.
    x: The setting, in even steps from its smallest to its largest value.
    y: The metric; bars are standard deviations over seeds. Where no run is
      done, a cross is drawn at the bottom.
    path: The PNG file to write.

  Raises:
    AnalysisError: If the table has no such setting or metric.
  """
  for name, known in ((x, table.settings), (y, table.metrics)):
    if name not in known:
      raise AnalysisError(
        f'The table has no {name!r}; it has {", ".join(known) or "nothing"}.'
      )
  others = [name for name in table.settings if name != x]
  ascending = sorted(set(table.frame[x]), key=run_folders.order)
  labels = [
    run_folders.label({name: row[name] for name in others})
    for row in table.frame.to_dict('records')
  ]
  values = table.frame.rename(columns={y: 'mean', deviation_of(y): 'std'})
  lines = values.set_index(x)[['mean', 'std']].groupby(
    np.array(labels), sort=False
  )
  return figures.draw_even(
    {str(label): line for label, line in lines},
    ascending,
    path,
    x=x.replace('_', ' '),
    metric=y,
    # Lines between names would be meaningless.
    joined=all(run_folders.order(value)[0] == 0 for value in ascending),
  )


def _metrics(run: run_folders.RunFolder, of: str) -> dict[str, float]:
  """Return all numbers of a result: test metrics by name, others by path."""
  result: Mapping[str, Any] = run.result or {}
  best = result.get('best') or {}
  evaluation_sets = result['test'] if of == LAST else best.get('test')
  # Without a best round, a run leaves the last one's metrics there.
  is_last = best.get('round', 0) is None and run.state == run_folders.DONE
  if not evaluation_sets or (of == BEST and is_last):
    raise AnalysisError(
      f'{run.folder}: no best round was chosen. Report the last one.'
    )
  # Several evaluation sets, such as seen and unseen users, need names.
  found = {
    f'{evaluation_set} {name}' if len(evaluation_sets) > 1 else name: number
    for evaluation_set, measured in evaluation_sets.items()
    for name, number in _numbers(measured)
    if '/' not in name
  }
  found.update((name, n) for name, n in _numbers(result) if '/' in name)
  return found


def _numbers(tree: Any, path: str = '') -> Iterator[tuple[str, float]]:
  """Yield all numbers in a result by path; infinities are strings in JSON."""
  if isinstance(tree, Mapping):
    for name, part in tree.items():
      yield from _numbers(part, f'{path}/{name}' if path else name)
  elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
    yield path, float(tree)
  elif tree in ('nan', 'inf', '-inf'):
    yield path, float(tree)


def _is_default(name: str) -> bool:
  """Return True if a table has this column by default."""
  if '/' in name:
    return name == 'privacy/epsilon'
  return not name.split()[-1].startswith('num_')


def _with_deviation(mean: float, deviation: float, seeds: int) -> str:
  """Format a mean with four decimals, or by digits if it is large or small."""
  if not seeds or math.isnan(mean):
    return '-'
  style = '.4f' if abs(mean) < 1e4 else '.6g'
  if 0.0 < abs(mean) < 1e-3:
    style = '.4g'
  text = f'{mean:{style}}'
  return f'{text} ± {deviation:{style}}' if seeds > 1 else text
