"""Gathers the results of runs into a table, and draws their curves.

  python -m tasks.report --sweep_dir=OUT
  python -m tasks.report --sweep_dir=OUT --sweep_dir=MORE --by=algorithm
  python -m tasks.report --sweep_dir=OUT --x=reconstruction_steps --y=accuracy

Runs that differ only in their seed make one row and one curve. Writes
`table.md`, `table.csv` and `curves.png`, and with --x a figure of --y over it.
"""

import pathlib

from absl import flags

from tasks import runs
from tasks.errors import OptionError
from tff_partial.analysis import curves
from tff_partial.analysis import run_folders
from tff_partial.analysis import tables

FLAGS = flags.FLAGS

flags.DEFINE_multi_string(
  'sweep_dir', [], 'Folder with the folders of runs; may be given repeatedly.'
)
flags.DEFINE_string(
  'report_dir', None, 'Folder for the report; by default the first --sweep_dir.'
)
flags.DEFINE_list(
  'by',
  [],
  'Flags that make the rows; by default all that differ. `folder` stands for '
  'the name of the folder.',
)
flags.DEFINE_enum(
  'of',
  tables.LAST,
  [tables.LAST, tables.BEST],
  'Report the last round, or the best one by the validation clients.',
)
flags.DEFINE_list(
  'metrics',
  [],
  'Columns of the table; by default all metrics of the test clients. Other '
  'numbers of result.json by their path, such as seconds/total.',
)
flags.DEFINE_string(
  'curve',
  None,
  'Metric of the learning curves, a column of metrics.csv; by default the '
  'first validation metric but the loss.',
)
flags.DEFINE_integer(
  'smooth', 1, 'Draw means of so many of the last values.', lower_bound=1
)
flags.DEFINE_string('x', None, 'Draw a metric over this flag, too.')
flags.DEFINE_string('y', 'accuracy', 'That metric.')


def main() -> int | None:
  """Prints the table and writes it with the figures."""
  runs.quiet_libraries()
  if not FLAGS.sweep_dir:
    raise OptionError('--sweep_dir: name a folder of runs.')
  folder = pathlib.Path(FLAGS.report_dir or FLAGS.sweep_dir[0])
  settings = run_folders.settings(run_folders.find(FLAGS.sweep_dir), FLAGS.by)
  table = tables.gather(settings, of=FLAGS.of, metrics=FLAGS.metrics)
  text = table.to_markdown()
  print(text)
  folder.mkdir(parents=True, exist_ok=True)
  written = [folder / 'table.md', folder / 'table.csv']
  runs.write_whole(written[0], text + '\n')
  runs.write_whole(written[1], table.to_csv())
  metric = FLAGS.curve or curves.default_metric(settings)
  written.append(
    curves.draw(
      {
        setting.label: [
          curves.read(run, metric, FLAGS.smooth) for run in setting.runs
        ]
        for setting in settings
      },
      folder / 'curves.png',
      metric=metric,
      smooth=FLAGS.smooth,
    )
  )
  if FLAGS.x:
    path = folder / f'{FLAGS.y}_over_{FLAGS.x}.png'
    written.append(tables.draw_over(table, FLAGS.x, FLAGS.y, path))
  print('Written: ' + ', '.join(map(str, written)) + '.')
  return None


if __name__ == '__main__':
  runs.run_main(main)
