"""Grids of runs, and the choice of the best setting of each row.

A row is a recipe with values of `--grid`. Its settings, the values of `--tune`,
are trained with the first values of `--repeat`. The setting that is best on the
validation clients is then trained with the others, too.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
import itertools
import os
import pathlib
from typing import NamedTuple

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.command_line import flags
from tasks.searching import plan as plans
from tff_partial import analysis
from tff_partial.training import files

# The table of the settings that were chosen, in the folder of a sweep.
CHOSEN_FILE = 'chosen.md'
# The most bytes of a folder's name on usual disks.
_LONGEST_NAME = 255


class Run(NamedTuple):
  """A run of a grid.

  Attributes:
    recipe: The recipe that varies from run to run; '' if none does.
    setting: The values of the varied flags that it reads, by name.
    arguments: All flags of the run.
  """

  recipe: str
  setting: Mapping[str, str]
  arguments: list[str]

  def name(self, without: Collection[str] = ()) -> str:
    """Name the run after its recipe and varied flags, as its folder is.

    Args:
      without: Flags to leave out, for the name of its row.
    """
    parts = [self.recipe] if self.recipe else []
    parts += [f'{n}={v}' for n, v in self.setting.items() if n not in without]
    return ','.join(parts).replace('/', '_') or 'run'


def _axis(text: str) -> tuple[list[str], list[str]]:
  """Parse `flag=value,value,...` or `flag+flag=value,value,...`."""
  names, equals, values = text.partition('=')
  if not equals or '' in (*names.split('+'), *values.split(',')):
    raise OptionError(
      f'{text}: expected flag=value,value,... such as seed=0,1,2, or '
      'flag+flag=value,value,... for flags that have the same value.'
    )
  return names.split('+'), values.split(',')


def names_of(grid: Sequence[str]) -> list[str]:
  """Return the flags that a grid names."""
  return [name for text in grid for name in _axis(text)[0]]


def settings(grid: Sequence[str]) -> Iterator[dict[str, str]]:
  """Yield the value of every varied flag, for each run of a grid.

  Args:
    grid: Strings `flag=value,value,...`, or of several flags joined by `+`,
      which have the same value.

  Raises:
    OptionError: If a string is not of this form or names a flag twice.
  """
  axes = [_axis(text) for text in grid]
  known: set[str] = set()
  for text, (names, _) in zip(grid, axes, strict=True):
    for name in names:
      if name in known:
        raise OptionError(f'{text}: {name} is in the grid twice.')
      known.add(name)
  for chosen in itertools.product(*(values for _, values in axes)):
    pairs = zip(axes, chosen, strict=True)
    yield {name: value for (names, _), value in pairs for name in names}


def planned(
  names: Sequence[str], grid: Sequence[str], passed_on: Sequence[str]
) -> dict[str, Run]:
  """Plan the runs of a grid.

  Each run leaves out the flags that `expand` drops, varied ones without effect
  and, if they are of several algorithms, those that only other algorithms read.
  Runs that differ only by such a flag become one.

  Args:
    names: Names of recipes, to run each of them.
    grid: Strings as for `settings`.
    passed_on: Arguments of all runs.

  Returns:
    The runs, by the names of their folders.

  Raises:
    OptionError: If a string of the grid is not of this form, varies a flag that
      has no effect in any run, or two runs would share a folder.
  """
  runs = []
  for recipe in names or ['']:
    for setting in settings(grid):
      own = {n: flags.argument(n, value) for n, value in setting.items()}
      arguments = [f'--recipe={recipe}'] if recipe else []
      written = [*passed_on, *own.values()]
      arguments = command_line.expand([*arguments, *written], written)
      runs.append((recipe, setting, own, arguments))
  chosen = {command_line.algorithm_of(arguments) for *_, arguments in runs}
  if len(chosen) > 1:
    for *_, arguments in runs:
      algorithm = command_line.algorithm_of(arguments)
      arguments[:] = command_line.without_unread(arguments, algorithm)
  varied = {*names_of([text for text in grid if ',' in text])}
  idle = [varied & _without_effect(arguments) for *_, arguments in runs]
  for name in sorted(varied.intersection(*idle)):
    raise OptionError(
      f'--{name} has no effect: neither training nor evaluations of '
      f'{" and ".join(sorted(chosen))} train local weights. Leave it out.'
    )
  todo: dict[str, Run] = {}
  for (recipe, setting, own, arguments), unused in zip(runs, idle, strict=True):
    left_out = {own[name] for name in unused}
    arguments = [a for a in arguments if a not in left_out]
    setting = {n: v for n, v in setting.items() if own[n] in arguments}
    run = Run(recipe, setting, arguments)
    name = run.name()
    if todo.setdefault(name, run) != run:
      raise OptionError(
        f'--grid: two runs would share the folder {name}, as / becomes _ '
        'there. Run one of them in another --sweep_dir.'
      )
    if (size := len(os.fsencode(name))) > _LONGEST_NAME:
      raise OptionError(
        f'--grid: the folder {name:.80}... would have a name of {size} bytes, '
        f'and {_LONGEST_NAME} are the most. Vary fewer flags, or give recipes '
        'of their values by --recipes.'
      )
  return todo


def _without_effect(arguments: Sequence[str]) -> frozenset[str]:
  """Return the flags that change nothing in a run; none if it is refused."""
  try:
    return command_line.parse(arguments).without_effect()
  except OptionError:
    return frozenset()


def rows(
  runs: Mapping[str, Run], tuned: Collection[str]
) -> dict[str, list[Run]]:
  """Group runs that differ only in tuned flags, by the names of their rows."""
  found: dict[str, list[Run]] = {}
  for run in runs.values():
    found.setdefault(run.name(tuned), []).append(run)
  return found


def repeated(runs: Iterable[Run], repeat: Sequence[str]) -> dict[str, Run]:
  """Plan repetitions of runs by the names of their folders, without the first.

  `repeat` has strings as for `settings`.
  """
  found = {}
  for run, values in itertools.product(runs, [*settings(repeat)][1:]):
    values = {n: v for n, v in values.items() if n in run.setting}
    own = {
      flags.argument(n, run.setting[n]): flags.argument(n, v)
      for n, v in values.items()
    }
    arguments = [own.get(argument, argument) for argument in run.arguments]
    again = Run(run.recipe, {**run.setting, **values}, arguments)
    found[again.name()] = again
  return found


def choose(
  root: pathlib.Path,
  of_rows: Mapping[str, Sequence[Run]],
  tuned: Collection[str],
  metric: str,
  direction: str,
) -> list[Run]:
  """Choose the setting of each row by the validation clients.

  Each run counts with the round that it chose. Prints the choices of the values
  of `tuned` flags, and writes them to `chosen.md` in the folder of the sweep.
  Rows of which no run is done are left out.

  Raises:
    OptionError: If the runs chose no round, or have no such metric.
  """
  import pandas as pd

  from tff_partial.training import selection

  rule = selection.Selection(metric, direction == plans.MAXIMIZE)
  lines, chosen = [], []
  for row, runs in of_rows.items():
    line = {'row': row, 'settings': len(runs), 'chosen': '-', metric: '-'}
    best: dict[str, float] | None = None
    for run in runs:
      measured = _validation(root / run.name(), metric)
      if measured and rule.is_better(measured, best):
        if best is None:
          chosen.append(run)
        best, chosen[-1] = measured, run
    if best is not None:
      values = {n: v for n, v in chosen[-1].setting.items() if n in tuned}
      line['chosen'] = analysis.run_folders.label(values)
      line[metric] = f'{best[metric]:.4g}'
    lines.append(line)
  table = analysis.tables.markdown(pd.DataFrame(lines))
  print(f'Chosen by the validation clients:\n\n{table}\n', flush=True)
  files.write_whole(root / CHOSEN_FILE, table + '\n')
  return chosen


def _validation(folder: pathlib.Path, metric: str) -> dict[str, float] | None:
  """Return a metric of the chosen round of a done run, and clients' counts."""
  if not (folder / analysis.run_folders.RESULT_FILE).exists():
    return None
  (run,) = analysis.run_folders.find([folder])
  if run.state != analysis.run_folders.DONE:
    return None
  best = (run.result or {}).get('best') or {}
  measured = best.get('validation')
  if measured is None:
    raise OptionError(
      f'{folder}: no best round was chosen on validation clients, by which '
      '--tune chooses. Give the runs such clients, or --grid in its place.'
    )
  names = (metric, 'num_clients', 'num_not_finite')
  if metric not in measured:
    known = ', '.join(n for n, v in measured.items() if n not in names[1:])
    raise OptionError(
      f'--metric={metric}: the validation clients of {folder} have no such '
      f'metric. Choose among {known}.'
    )
  return {name: float(measured[name]) for name in names}
