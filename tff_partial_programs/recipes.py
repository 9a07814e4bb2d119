"""Recipes: flagfiles that come with the programs, found by name.

`--recipe=demo` stands for the flags of `tasks/recipes/demo.flags`, in a clone
and in an installed wheel, from any working folder. This module does not import
TensorFlow.
"""

from collections.abc import Iterator, Sequence
import pathlib

from tff_partial_programs import spelling

FLAG = 'recipe'
_INCLUDES = '--flagfile='


class RecipeError(ValueError):
  """Raised for a recipe that does not exist."""


def root() -> pathlib.Path:
  """Return the folder that `tasks` is imported from."""
  here = pathlib.Path(__file__).resolve().parent
  return here if (here / 'tasks').is_dir() else here.parent


def folder() -> pathlib.Path:
  """Return the folder of the recipes."""
  return root() / 'tasks' / 'recipes'


def path(name: str) -> pathlib.Path:
  """Return the file of a recipe, such as that of 'demo'.

  Raises:
    RecipeError: If there is no recipe of this name.
  """
  found = folder() / f'{name}.flags'
  if not found.is_file():
    known = sorted(each.stem for each in folder().glob('*.flags'))
    raise RecipeError(
      f'There is no recipe {name!r}.{spelling.hint(name, known)} The recipes '
      f'are {", ".join(known)}.'
    )
  return found


def flags_of(file: pathlib.Path) -> Iterator[str]:
  """Yield the flags of a file, with those of the files that it includes.

  Args:
    file: The file. Recipes include each other by paths below `root()`.

  Raises:
    RecipeError: If the file, or one that it includes, does not exist, or has a
      line that is neither a flag nor a comment.
  """
  if not file.is_file():
    raise RecipeError(f'{file}: there is no such file of flags.')
  for line in file.read_text(encoding='utf-8').splitlines():
    line = line.strip()
    if line.startswith(_INCLUDES):
      yield from flags_of(root() / line.removeprefix(_INCLUDES))
    elif line.startswith('-'):
      yield line
    elif line and not line.startswith(('#', '//')):
      raise RecipeError(f'{file}: {line:.80}: flags begin with --.')


def expand(arguments: Sequence[str]) -> list[str]:
  """Replace each `--recipe=NAME` of a command line by the recipe's flags.

  Args:
    arguments: The command line. Arguments after `--` are not changed.

  Raises:
    RecipeError: If there is no recipe of this name.
  """
  pending, expanded = list(arguments), list[str]()
  while pending:
    argument = pending.pop(0)
    if argument == '--':
      return [*expanded, argument, *pending]
    flag, equals, name = argument.partition('=')
    if flag not in (f'--{FLAG}', f'-{FLAG}'):
      expanded.append(argument)
      continue
    if not equals:
      name = pending.pop(0) if pending else ''
    expanded += flags_of(path(name))
  return expanded
