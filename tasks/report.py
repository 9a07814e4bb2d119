"""Gathers the results of runs into a table and a figure.

  python -m tasks.report --sweep_dir=OUT
  python -m tasks.report --sweep_dir=OUT --x=reconstruction_steps --y=accuracy

Runs that differ only in their seed make one row: means and deviations over the
seeds that did not diverge.
"""

import collections
from collections.abc import Mapping
import math
import pathlib
from typing import Any

from absl import flags
import pandas as pd

from tasks import runs
from tasks.errors import OptionError

FLAGS = flags.FLAGS

flags.DEFINE_string('sweep_dir', None, 'Folder with the folders of runs.')
flags.DEFINE_enum(
  'of', 'last', ['last', 'best'], 'Report the last round or the best one.'
)
flags.DEFINE_string('x', None, 'Draw a figure over this flag.')
flags.DEFINE_string('y', 'accuracy', 'The metric of the figure.')

# Flags that do not tell runs apart.
_IGNORED = ('seed', 'output_dir', 'data_dir', 'progress', 'tensorboard')


def gather(root: pathlib.Path) -> pd.DataFrame:
  """Reads all runs below a folder, one row each.

  Args:
    root: The folder.

  Returns:
    Columns for the flags that differ between runs, `seed`, `diverged`, and the
    pooled test metrics of the last round and, with the prefix `best_`, of the
    best one.

  Raises:
    OptionError: If there is no result.
  """
  rows = []
  for path in sorted(root.rglob(runs.RESULT_FILE)):
    folder = runs.Folder(str(path.parent))
    result = folder.read_result()
    lines = runs.read_flag_lines(folder.flags_file)
    if result is None:
      continue
    row: dict[str, Any] = {
      name: line.partition('=')[2] if '=' in line else ''
      for name, line in lines.items()
      if name not in _IGNORED
    }
    row['seed'] = result['seed']
    row['diverged'] = result['diverged']
    (last,) = result['test'].values()
    (best,) = result['best']['test'].values()
    row.update(_metrics(last, ''))
    row.update(_metrics(best, 'best_'))
    rows.append(row)
  if not rows:
    raise OptionError(
      f'--sweep_dir={root}: there is no {runs.RESULT_FILE} below this folder.'
    )
  frame = pd.DataFrame(rows)
  constant = [
    name
    for name in frame.columns
    if name in lines and frame[name].nunique(dropna=False) == 1
  ]
  return frame.drop(columns=constant)


def _metrics(measured: Mapping[str, Any], prefix: str) -> dict[str, float]:
  return {
    f'{prefix}{name}': float(value)
    for name, value in measured.items()
    if name != 'per_client' and not name.startswith('num_')
  }


def summarize(frame: pd.DataFrame, prefix: str) -> pd.DataFrame:
  """Means and deviations over seeds.

  Args:
    frame: What `gather` returns.
    prefix: '' for the last round, 'best_' for the best one.

  Returns:
    A row for each combination of flags: them, `seeds`, `diverged`, and for each
    metric its mean and, with the suffix `_std`, its deviation.
  """
  metrics = [
    name
    for name in frame.columns
    if f'best_{name}' in frame.columns or name.startswith('best_')
  ]
  chosen = [
    name for name in metrics if name.startswith('best_') == bool(prefix)
  ]
  keys = [
    name for name in frame.columns if name not in (*metrics, 'seed', 'diverged')
  ]
  groups: dict[tuple[Any, ...], list[Any]] = collections.defaultdict(list)
  for row in frame.to_dict('records'):
    groups[tuple(row[key] for key in keys)].append(row)
  rows = []
  for values, members in groups.items():
    kept = pd.DataFrame([m for m in members if not m['diverged']])
    row = dict(zip(keys, values, strict=True))
    row['seeds'] = len(members)
    row['diverged'] = len(members) - len(kept)
    for name in chosen:
      column = kept[name] if len(kept) else pd.Series(dtype=float)
      row[name.removeprefix(prefix)] = column.mean()
      row[f'{name.removeprefix(prefix)}_std'] = column.std(ddof=0)
    rows.append(row)
  table = pd.DataFrame(rows)
  numeric = [key for key in keys if _is_numeric(table[key])]
  return table.astype(dict.fromkeys(numeric, float)).sort_values(
    keys, ignore_index=True
  )


def _is_numeric(column: pd.Series) -> bool:
  return bool(pd.to_numeric(column, errors='coerce').notna().all())


def to_markdown(table: pd.DataFrame) -> str:
  """The table as Markdown, deviations beside their means."""
  names = [n for n in table.columns if not str(n).endswith('_std')]
  lines = [
    '| ' + ' | '.join(map(str, names)) + ' |',
    '|' + '---|' * len(names),
  ]
  for row in table.to_dict('records'):
    cells = []
    for name in names:
      value, deviation = row[name], row.get(f'{name}_std')
      if deviation is not None:
        cells.append(f'{value:.4f} ± {deviation:.4f}')
      elif isinstance(value, float) and math.isfinite(value):
        cells.append(f'{value:g}')
      else:
        cells.append(str(value))
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def draw(table: pd.DataFrame, x: str, y: str, path: pathlib.Path) -> None:
  """Draws a metric over a flag, with the deviation over seeds as bars.

  Raises:
    OptionError: If the table has no such column.
  """
  import matplotlib

  matplotlib.use('Agg')
  from matplotlib import pyplot

  for flag, name in (('x', x), ('y', y)):
    if name not in table.columns:
      raise OptionError(
        f'--{flag}={name}: the table has no such column; it has '
        f'{list(table.columns)}.'
      )
  figure, axes = pyplot.subplots(figsize=(5, 3.5))
  axes.errorbar(
    [f'{value:g}' for value in table[x]],
    table[y],
    table[f'{y}_std'],
    marker='o',
    capsize=3,
  )
  axes.set_xlabel(x.replace('_', ' '))
  axes.set_ylabel(y)
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.3)
  figure.tight_layout()
  figure.savefig(path, dpi=150)
  pyplot.close(figure)


def main() -> int | None:
  """Prints the table and writes it, and the figure if one is asked for."""
  runs.quiet_libraries()
  if not FLAGS.sweep_dir:
    raise OptionError('--sweep_dir: name the folder of the runs.')
  root = pathlib.Path(FLAGS.sweep_dir)
  table = summarize(gather(root), 'best_' if FLAGS.of == 'best' else '')
  text = to_markdown(table)
  print(text)
  written = [root / 'report.md', root / 'report.csv']
  runs.write_whole(written[0], text + '\n')
  runs.write_whole(written[1], table.to_csv(index=False))
  if FLAGS.x:
    written.append(root / f'{FLAGS.y}_over_{FLAGS.x}.png')
    draw(table, FLAGS.x, FLAGS.y, written[-1])
  print('Written: ' + ', '.join(map(str, written)) + '.')
  return None


if __name__ == '__main__':
  runs.run_main(main)
