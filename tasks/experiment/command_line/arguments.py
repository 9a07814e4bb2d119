"""Command lines as lists of arguments: recipes, flagfiles, other algorithms."""

from collections.abc import Collection, Sequence
import functools
import os
import pathlib
import sys
from typing import Any

from absl import flags
from absl import logging

from tasks.errors import OptionError
from tasks.experiment.command_line.flags import define
from tasks.experiment.command_line.flags import known
from tasks.experiment.command_line.flags import read
from tasks.experiment.config import Config
from tasks.experiment.methods import algorithms
from tasks.experiment.options.loop import Output
from tasks.experiment.options.training import DECIDING
from tasks.experiment.options.training import unread_beside
from tasks.options import SET
from tff_partial_programs import recipes

_ALGORITHM = '--algorithm='
# Environment variable of the runs of a sweep: the number of its process, which
# warns for all of them, since their flags are also those of recipes.
OF_SWEEP = 'TFF_PARTIAL_OF_SWEEP'


def from_recipe(recipe: str | os.PathLike[str], **changes: Any) -> Config:
  """Read an experiment from a flagfile.

  Args:
    recipe: The file; or the name of one in `tasks/recipes`, such as 'demo'.
    **changes: Values that replace those of the recipe, by flag name.

  Raises:
    OptionError: If there is no such recipe or flag, or a value is impossible.
  """
  path = pathlib.Path(recipe)
  try:
    given = recipes.flags_of(path if path.suffix else recipes.path(str(recipe)))
    return parse(list(given)).with_flags(changes)
  except recipes.RecipeError as error:
    raise OptionError(str(error)) from None


def algorithm_of(arguments: Sequence[str]) -> str:
  """Find the algorithm that an expanded command line chooses."""
  chosen = [a for a in arguments if a.startswith(_ALGORITHM)]
  return chosen[-1].removeprefix(_ALGORITHM) if chosen else Config().algorithm


def without_unread(arguments: Sequence[str], algorithm: str) -> list[str]:
  """Remove what only other algorithms read from an expanded command line."""
  if algorithm not in algorithms.ALGORITHMS:
    return list(arguments)  # The algorithm is refused later.
  return _without(arguments, algorithms.unread(algorithm))


def _without(
  arguments: Sequence[str], flag_names: Collection[str]
) -> list[str]:
  kept = []
  for argument in arguments:
    name = argument.removeprefix(f'--{SET}=').removeprefix('--')
    name = name.partition('=')[0]
    if not {name, name.removeprefix('no')} & set(flag_names):
      kept.append(argument)
  return kept


@functools.cache
def _warn(text: str) -> None:
  """Warn once, however many runs of a sweep have the same flags."""
  logging.warning('%s', text)


def warn_without_effect(config: Config, written: Sequence[str]) -> None:
  """Warn of the flags among those written that change nothing."""
  if OF_SWEEP in os.environ:
    return
  names = {text.lstrip('-').partition('=')[0] for text in _spelled(written)}
  for flag in sorted(config.without_effect() & names):
    _warn(
      f'--{flag} has no effect: {config.algorithm} trains no local weights, '
      'nor do its evaluations.'
    )


def expand(
  arguments: Sequence[str], written: Sequence[str] | None = None
) -> list[str]:
  """Replace recipes and flagfiles by their flags.

  If a later flag overrides the algorithm of a recipe or of a folder's run, the
  flags before it that the new algorithm does not read are dropped. So are flags
  of steps before an exact solve that takes none, the support set's share before
  a split without one, flags of adaptive clipping before a fixed clip, and the
  data set before synthetic data; a warning names those among `written`.

  Args:
    arguments: The command line, without the program's name.
    written: The flags that the user wrote; by default those that this process
      was started with.

  Raises:
    RecipeError: If a named recipe does not exist.
    OptionError: If an option without a flag is given as one.
  """
  expanded = recipes.expand(arguments)
  try:
    expanded = _spelled(
      flags.FLAGS.read_flags_from_files(expanded, force_gnu=False)
    )
  except (flags.Error, OSError):
    return expanded  # absl reports the error when it parses the flags.
  except UnicodeDecodeError as error:
    named = ' '.join(each for each in expanded if 'flagfile' in each)
    raise OptionError(
      f'{named}: the file is not text in UTF-8 ({error.reason} at byte '
      f'{error.start}). Name a file of flags, or save it as UTF-8.'
    ) from None
  _refuse_options(expanded)
  for deciding in DECIDING:
    if places := _places(expanded, f'--{deciding}='):
      before, after = expanded[: places[-1]], expanded[places[-1] :]
      unread = unread_beside({deciding: after[0].partition('=')[2]})
      kept = _without(before, unread)
      for flag in _spelled(sys.argv if written is None else written):
        if flag in before and flag not in kept:
          _warn(f'{flag}: left out, as {after[0]} follows.')
      expanded = [*kept, *after]
  places = _places(expanded, _ALGORITHM)
  if len({expanded[place] for place in places}) < 2:
    return expanded
  before, after = expanded[: places[-1]], expanded[places[-1] :]
  return [*without_unread(before, algorithm_of(after)), *after]


def _spelled(arguments: Sequence[str]) -> list[str]:
  """Spell `--flag value` and `-flag=value` as `--flag=value`, up to `--`."""
  pending, found = list(arguments), list[str]()
  while pending and pending[0] != '--':
    argument = pending.pop(0)
    name, equals, value = argument.lstrip('-').partition('=')
    choice = known().get(name) if argument.startswith('-') else None
    if choice is not None:
      if pending and not equals and choice.kind is not bool:
        equals, value = '=', pending.pop(0)
      argument = f'--{name}{equals}{value}'
    found.append(argument)
  return found + pending


def _places(arguments: Sequence[str], flag: str) -> list[int]:
  return [n for n, given in enumerate(arguments) if given.startswith(flag)]


def _refuse_options(arguments: Sequence[str]) -> None:
  """Refuse options without a flag that are given as flags."""
  for argument in arguments:
    if argument == '--':
      return
    name = argument.lstrip('-').partition('=')[0]
    if not argument.startswith('-') or name in flags.FLAGS:
      continue
    for option in (name, name.removeprefix('no')):
      choice = known().get(option)
      if choice is not None and choice.option.python_only:
        raise OptionError(f'--{option}: give {choice.argument}=VALUE.')


def parse(arguments: Sequence[str]) -> Config:
  """Read an experiment from flags of `tasks.train`, such as `--rounds=10`.

  Raises:
    OptionError: If there is no such flag, or its value is impossible.
  """
  flag_values = flags.FlagValues()
  define(Config(), flag_values)
  define(Output(), flag_values)
  try:
    _, *rest = flag_values(['', *expand(arguments)])
  except (flags.Error, recipes.RecipeError) as error:
    raise OptionError(str(error)) from None
  if rest:
    raise OptionError(f'unknown arguments {rest}; flags begin with --.')
  return read(Config(), flag_values)
