r"""Trains a grid of runs one after another; run it again to go on.

  python -m tasks.sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --grid=reconstruction_steps=0,1,5 -- \
      --flagfile=tasks/recipes/movielens_fed_recon.flags --rounds=2000
  python -m tasks.sweep --sweep_dir=OUT --grid=seed=0,1,2 \
      --recipes=movielens_furl,movielens_ditto

What follows `--` is given to every run of `tasks.train`; it wins over recipes.
Each run has a folder of its own below OUT; those that are done are skipped, one
that was stopped goes on. A run that fails does not stop the others. At the end,
`tasks.report` makes a table of what there is.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import pathlib
import subprocess
import sys

from tasks.errors import OptionError
from tasks.experiment.folder import Folder
from tasks.experiment.program import Program
from tasks.options import option
from tasks.options import Options


@dataclasses.dataclass(frozen=True)
class Sweep(Options):
  """Which runs there are."""

  sweep_dir: str | None = option(None, 'Folder for the folders of the runs.')
  recipes: tuple[str, ...] = option(
    (), 'Names of flagfiles in tasks/recipes, to run each of them.'
  )
  grid: tuple[str, ...] = option(
    (),
    'flag=value,value,...: a flag of tasks.train to vary.',
    is_repeated=True,
  )


RECIPES = pathlib.Path(__file__).parent / 'recipes'

# What follows `--` on the command line.
_passed_on: list[str] = []


def take_rest(arguments: Sequence[str]) -> list[str]:
  """Keeps what follows `--` for the runs and returns the rest."""
  arguments = list(arguments)
  if '--' in arguments:
    place = arguments.index('--')
    _passed_on[:] = arguments[place + 1 :]
    return arguments[:place]
  return arguments


def settings(grid: Sequence[str]) -> Iterator[dict[str, str]]:
  """Yields the value of every varied flag, for each run of a grid.

  Args:
    grid: Texts `flag=value,value,...`.

  Raises:
    OptionError: If a text is not of this form or names a flag twice.
  """
  names, choices = [], []
  for text in grid:
    name, equals, values = text.partition('=')
    if not equals or not name or '' in values.split(','):
      raise OptionError(
        f'--grid={text}: expected flag=value,value,... such as seed=0,1,2.'
      )
    if name in names:
      raise OptionError(f'--grid={text}: {name} is in the grid twice.')
    names.append(name)
    choices.append(values.split(','))
  for chosen in itertools.product(*choices):
    yield dict(zip(names, chosen, strict=True))


def recipe_file(name: str) -> pathlib.Path:
  """Finds a recipe.

  Args:
    name: Its file's name without the ending.

  Raises:
    OptionError: If there is none of this name.
  """
  path = RECIPES / f'{name}.flags'
  if not path.is_file():
    known = sorted(each.stem for each in RECIPES.glob('*.flags'))
    raise OptionError(
      f'--recipes={name}: there is no recipe {path}. Those that there are: '
      f'{", ".join(known)}.'
    )
  return path


def folder_name(recipe: str | None, setting: dict[str, str]) -> str:
  """The name of a run's folder: what is special about the run."""
  parts = [recipe] if recipe else []
  parts += [f'{name}={value}' for name, value in setting.items()]
  return ','.join(parts).replace('/', '_') or 'run'


def _run(binary: str, *arguments: str) -> int:
  """Runs a binary in a process of its own, and returns its exit status."""
  command = [sys.executable, '-m', binary, *arguments]
  return subprocess.run(command, check=False).returncode


def main(sweep: Sweep) -> None:
  """Runs what is not done yet."""
  if not sweep.sweep_dir:
    raise OptionError('--sweep_dir: name a folder for the runs.')
  root = pathlib.Path(sweep.sweep_dir)
  failed = []
  recipes = {name: recipe_file(name) for name in sweep.recipes}
  todo = [
    (recipe, setting)
    for recipe in recipes or [None]
    for setting in settings(sweep.grid)
  ]
  for number, (recipe, setting) in enumerate(todo, 1):
    folder = root / folder_name(recipe, setting)
    print(f'[{number}/{len(todo)}] {folder}', flush=True)
    arguments = [f'--flagfile={recipes[recipe]}'] if recipe else []
    arguments += _passed_on
    arguments += [f'--{name}={value}' for name, value in setting.items()]
    status = _run('tasks.train', *arguments, f'--output_dir={folder}')
    result = Folder(str(folder)).read_result()
    if status and not (result and result['diverged']):
      failed.append(str(folder))
  if len(failed) < len(todo):
    _run('tasks.report', f'--sweep_dir={root}')
  if failed:
    raise OptionError(
      f'{len(failed)} of {len(todo)} runs failed, their messages are above: '
      f'{", ".join(failed)}.'
    )


PROGRAM = Program(main, (Sweep(),), take_rest)

if __name__ == '__main__':
  PROGRAM.run()
