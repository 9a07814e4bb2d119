"""Gathers the results of runs into a table, and draws their curves.

  tff-partial report --sweep_dir=OUT
  tff-partial report --sweep_dir=OUT --sweep_dir=MORE --by=algorithm
  tff-partial report --sweep_dir=OUT --x=reconstruction_steps --y=accuracy

Runs that differ only in their seed make one row and one curve. Writes
`table.md`, `table.csv` and `curves.png` (or with --curve_over=bytes
`curves_over_bytes.png`), and with --x a figure of --y over it.
For a search it shows the best trial, all trials and which flags mattered, and
writes `search.md` and `trials.csv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import by_data
from tasks.shared_options import data_name
from tff_partial import analysis
from tff_partial.training import files

if TYPE_CHECKING:
  from tff_partial.analysis import run_folders


@dataclasses.dataclass(frozen=True)
class Report(Options):
  """Options of which runs to gather, and what to show of them."""

  sweep_dir: tuple[str, ...] = option(
    (),
    'Folder with the folders of runs; may be given repeatedly.',
    is_repeated=True,
  )
  report_dir: str | None = option(
    None, 'Folder for the report; by default the first --sweep_dir.'
  )
  by: tuple[str, ...] = option(
    (),
    'Flags that distinguish the rows; by default all that differ. `folder` '
    'stands for the name of the folder.',
  )
  of: str = option(
    'last',
    'Report the last round, or the best one on the validation clients.',
    choices=('last', 'best'),
  )
  metrics: tuple[str, ...] = option(
    (),
    'Columns of the table; by default all metrics of the test clients. Other '
    'numbers of result.json by their path, such as seconds/total.',
  )
  curve: str | None = option(
    None,
    'Metric of the learning curves, a column of metrics.csv; by default the '
    'first validation metric except the loss.',
  )
  curve_over: str = option(
    'rounds',
    'Horizontal axis of the learning curves: rounds, or the parameters or '
    'bytes that all clients have loaded and sent by then.',
    choices=('rounds', 'parameters', 'bytes'),
  )
  x: str | None = option(None, 'Also draw a metric over this flag.')
  y: str | None = option(
    None, 'Metric to draw over --x; by default accuracy, or the first column.'
  )

  def __post_init__(self) -> None:
    """Refuse a metric to draw over nothing."""
    super().__post_init__()
    if self.x is None:
      self.refuse_set(('y',), 'name the flag to draw it over by --x.')


def _spent(runs: Sequence[run_folders.RunFolder]) -> Iterator[str]:
  """Yield the total cost of private runs, for each task and data set.

  Those of a sweep or search, also chosen ones, cost as much as all that it ran.
  """
  from tasks.searching import plan as plans
  from tasks.searching import reporting

  marks = analysis.run_folders.PLANNED_FILE, plans.JOURNAL
  around = {run.folder.parent for run in runs}
  tried = [f for f in around if any((f / mark).exists() for mark in marks)]
  found = analysis.run_folders.find([*(run.folder for run in runs), *tried])
  costs = by_data(
    (run.setting('task'), data_name(run.flags) or run.data or '', cost)
    for run in found
    if (cost := run.spent()) is not None
  )
  for of, same in costs.items():
    yield ': '.join([*filter(None, of), reporting.together(same, 'runs')])


def _unlike(settings: Sequence[run_folders.Setting]) -> Iterator[str]:
  """Yield a line for each seed whose rows were measured on other examples."""
  counts: dict[tuple[str, str, str], dict[int, str]] = {}
  for setting, run in ((s, run) for s in settings for run in s.runs):
    for clients, metrics in (run.result or {'test': {}})['test'].items():
      if 'num_examples' in metrics:
        by = counts.setdefault((run.setting('task'), clients, run.seed), {})
        by.setdefault(metrics['num_examples'], setting.label)
  for (task, clients, seed), of in counts.items():
    if len(of) > 1:
      each = '; '.join(f'{count:,} by {label}' for count, label in of.items())
      yield (
        f'{task}: clients {clients!r} of seed {seed} were not measured on the '
        f'same numbers of examples, so rows do not compare: {each}.'
      )


def main(report: Report) -> None:
  if not report.sweep_dir:
    raise OptionError('--sweep_dir: name a folder of runs.')
  from tasks.searching import plan as plans
  from tasks.searching import reporting

  curves, tables = analysis.curves, analysis.tables
  folder = pathlib.Path(report.report_dir or report.sweep_dir[0])
  searched, *others = map(pathlib.Path, report.sweep_dir)
  if not others and (searched / plans.JOURNAL).exists():
    report.refuse_set(
      set(report.flags()) - {'sweep_dir', 'report_dir'},
      f'{searched} is the folder of a search, whose report has no such choice. '
      'Leave it out, or name the folders of single trials.',
    )
    print(reporting.report(searched, folder))
    names = (reporting.REPORT_FILE, reporting.TRIALS_FILE)
    print('Written: ' + ', '.join(str(folder / name) for name in names) + '.')
    return
  runs = analysis.run_folders.find(report.sweep_dir)
  settings = analysis.run_folders.settings(runs, report.by)
  table = tables.gather(settings, of=report.of, metrics=report.metrics)
  text = table.to_markdown()
  if absent := analysis.run_folders.find_absent(report.sweep_dir):
    title = [] if table.lost else ['', 'In no mean:', '']
    text = '\n'.join([text, *title, *map(tables.lost_line, absent)])
  print(text)
  for line in (*_spent(runs), *_unlike(settings)):
    print(line)
  folder.mkdir(parents=True, exist_ok=True)
  written = [folder / 'table.md', folder / 'table.csv']
  files.write_whole(written[0], text + '\n')
  files.write_whole(written[1], table.to_csv())
  metric = report.curve or curves.default_metric(settings)
  lines = {
    setting.label: [curves.read(run, metric) for run in setting.runs]
    for setting in settings
  }
  figure = 'curves.png'
  if report.curve_over != curves.ROUNDS:
    figure = f'curves_over_{report.curve_over}.png'
    lines = {
      setting.label: curves.over_traffic(
        lines[setting.label], setting.runs, report.curve_over
      )
      for setting in settings
    }
  written.append(
    curves.draw(lines, folder / figure, metric=metric, over=report.curve_over)
  )
  if report.x:
    y = report.y or min(table.metrics, key=lambda name: name != 'accuracy')
    # A metric's path, such as privacy/epsilon, is no path of folders.
    name = f'{y}_over_{report.x}.png'.replace('/', '_')
    path = folder / name
    written.append(tables.draw_over(table, report.x, y, path))
  print('Written: ' + ', '.join(map(str, written)) + '.')


PROGRAM = Program(main, (Report(),))

if __name__ == '__main__':
  PROGRAM.run()
