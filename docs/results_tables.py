r"""Writes the tables of the pages of results from their data.

Each table is a CSV file in `docs/results/tables`, with a line per row and a
column per number: `C` for a value, `C ±` for its deviation and `C paper` for
the paper's value. The best values of a column whose name ends in an arrow are
bold, and the name of the best row of the first such column. An arrow in the
first column's name stands for all columns. A page names the file in a comment
above the table.

  python docs/results_tables.py          # write the tables into the pages
  python docs/results_tables.py --table=TABLE --row=ROW --sweep_dir=OUT \
    --column='RMSE ↓=rmse' --column='accuracy, % ↑=accuracy'

The latter first takes a row from the runs of a folder, which differ in the
flags of `--over` alone: the seed by default, or `--over=seed,noise_seed`.
"""

import argparse
from collections.abc import Sequence
import math
import pathlib
import re
import sys

import pandas as pd

from tff_partial.analysis import run_folders
from tff_partial.analysis import tables

PAGES = pathlib.Path(__file__).parent / 'results'
DEVIATION, PAPER = ' ±', ' paper'
_ARROWS = {'↓': min, '↑': max}
# A comment that names a file, and the table below it.
_PLACE = re.compile(r'^(<!-- table: (\w+) -->\n\n)((?:\|.*\n)*)\n?', re.M)


def read(name: str, pages: pathlib.Path = PAGES) -> pd.DataFrame:
  """Read the data of a table as texts."""
  path = pages / 'tables' / f'{name}.csv'
  return pd.read_csv(path, dtype=str, keep_default_na=False)


def markdown(frame: pd.DataFrame) -> str:
  """Format a table.

  Args:
    frame: Texts, as `read` returns them; the first column has the rows' names.
  """
  first, *others = frame
  shown = [name for name in others if not name.endswith((DEVIATION, PAPER))]
  texts = pd.DataFrame({first: frame[first]})
  is_named = False
  for name in shown:
    best = _best(frame[name], name[-1:] if name[-1:] in _ARROWS else first[-1:])
    texts[name] = [
      _cell(frame.loc[row], name, is_best=row in best) for row in frame.index
    ]
    if best and not is_named:
      is_named = True
      texts.loc[best, first] = [f'**{row}**' for row in texts.loc[best, first]]
  text = tables.markdown(texts.rename(columns={'row': ''}))
  return re.sub(' +', ' ', text) + '\n'


def _best(values: pd.Series, arrow: str) -> list[int]:
  """Return the lines with the best of some values; none without an arrow."""
  numbers = pd.to_numeric(values, errors='coerce').dropna()
  if arrow not in _ARROWS or numbers.empty:
    return []
  return numbers.index[numbers == _ARROWS[arrow](numbers)].tolist()


def _cell(row: pd.Series, name: str, *, is_best: bool) -> str:
  """Format a value with the paper's value before and its deviation after it."""
  text, deviation = row[name], row.get(name + DEVIATION)
  if text.isdigit() and len(text) > 3:
    text = f'{int(text):,}'
  if deviation:
    text += f' ± {deviation}'
  if is_best:
    text = f'**{text}**'
  paper = row.get(name + PAPER)
  return f'{paper} / {text or "–"}' if paper else text


def write(pages: pathlib.Path = PAGES) -> list[str]:
  """Write all tables into the pages.

  Returns:
    The names of the pages that changed.
  """
  changed = []
  for path in sorted(pages.glob('*.md')):
    text = path.read_text('utf-8')
    new = _PLACE.sub(
      lambda found: f'{found[1]}{markdown(read(found[2], pages))}\n', text
    )
    new = new.rstrip('\n') + '\n'
    if new != text:
      path.write_text(new, 'utf-8')
      changed.append(path.name)
  return changed


def add(
  name: str,
  row: str,
  sweep_dir: str,
  columns: Sequence[str],
  *,
  of: str = 'last',
  over: str = 'seed',
  pages: pathlib.Path = PAGES,
) -> None:
  """Put the results of runs into a table, as a new row or in place of one.

  Args:
    name: The table.
    row: The row's name.
    sweep_dir: The folder of the runs.
    columns: `COLUMN=METRIC`, as `tff-partial report` calls the metric.
    of: The `last` round, or the `best`.
    over: The flags in which runs differ, divided by commas.
    pages: The folder of the pages.

  Raises:
    ValueError: If runs differ in more, or some have not ended.
  """
  pairs = [column.rpartition('=')[::2] for column in columns]
  metrics = list(dict.fromkeys(pair[1] for pair in pairs))
  runs = run_folders.find([sweep_dir])
  differing = set(run_folders.settings(runs)[0].values) - set(over.split(','))
  lost = [str(run.folder) for run in runs if run.state != run_folders.DONE]
  if differing or lost:
    raise ValueError(
      f'{sweep_dir}: expected runs that differ in {over} alone and have a '
      f'result; they differ in {sorted(differing)}, and have none in {lost}.'
    )
  values = pd.concat(
    tables.gather(run_folders.settings([run]), of=of, metrics=metrics).frame
    for run in runs
  )
  frame = read(name, pages)
  frame = frame.set_index(frame.columns[0], verify_integrity=True)
  for column, metric in pairs:
    scale, digits = (100, 1) if ', %' in column else (1, 3)
    mean = values[metric].mean() * scale
    deviation = values[metric].std() * scale
    frame.loc[row, column] = f'{mean:.{digits}f}'
    if not math.isnan(deviation):
      frame.loc[row, column + DEVIATION] = f'{deviation:.{digits}f}'
  # A new deviation stands beside its mean.
  names = [_column(text) for text in frame]
  frame = frame[sorted(frame, key=lambda text: names.index(_column(text)))]
  frame.fillna('').to_csv(pages / 'tables' / f'{name}.csv')
  sys.stdout.write(f'{row}: {len(runs)} runs.\n')


def _column(text: str) -> str:
  """Return the column of a value, of its deviation or of the paper's value."""
  return text.removesuffix(DEVIATION).removesuffix(PAPER)


def main() -> None:
  """Read the arguments, add a row if they name one, and write the pages."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--table', help='the table that gets a row')
  parser.add_argument('--row', help="the row's name")
  parser.add_argument('--sweep_dir', help='the folder of the runs')
  parser.add_argument('--of', default='last', choices=['last', 'best'])
  parser.add_argument('--over', default='seed', help='the flags of the mean')
  parser.add_argument('--column', action='append', help='COLUMN=METRIC')
  options = parser.parse_args()
  if options.table:
    add(
      options.table,
      options.row,
      options.sweep_dir,
      options.column,
      of=options.of,
      over=options.over,
    )
  for name in write():
    sys.stdout.write(f'Written: {name}.\n')


if __name__ == '__main__':
  main()
