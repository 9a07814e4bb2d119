"""Command-line flags, derived from classes of options.

No other module reads absl's flags.
"""

from collections.abc import Iterator, Sequence
import os
import pathlib
from typing import Any, TypeVar

from absl import flags

from tasks.errors import OptionError
from tasks.experiment import config as config_lib
from tasks.experiment.config import Config
from tasks.experiment.methods import algorithms
from tasks.experiment.options.loop import Output
from tasks.options import Choice
from tasks.options import Options
from tff_partial_programs import recipes
from tff_partial_programs import spelling

_Options = TypeVar('_Options', bound=Options)


def all_choices(options: Options) -> Iterator[Choice]:
  """Yield all choices, including those of tasks that are not chosen."""
  yield from options.choices()
  if isinstance(options, Config):
    for task in config_lib.TASKS.values():
      yield from task().choices()


def define(
  options: Options, flag_values: flags.FlagValues = flags.FLAGS
) -> dict[str, Choice]:
  """Define a flag for each field of options, with its value as the default.

  Args:
    options: The options.
    flag_values: Where to define the flags. Existing ones are kept.

  Returns:
    The choice of each flag, by name.
  """
  found: dict[str, Choice] = {}
  for choice in all_choices(options):
    found.setdefault(choice.flag, choice)
    if choice.flag not in flag_values:
      _define(choice, flag_values)
  return found


def _define(choice: Choice, flag_values: flags.FlagValues) -> None:
  """Define one flag. The options, not absl, check its limits."""
  said = choice.option
  default = None if said.differs_by_task else choice.on_command_line
  if said.choices is not None:
    flags.DEFINE(
      _OneOf(said.choices),
      choice.flag,
      default,
      choice.text,
      flag_values=flag_values,
    )
    return
  makers: dict[Any, Any] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple[str, ...]: flags.DEFINE_multi_string
    if said.is_repeated
    else flags.DEFINE_list,
  }
  make = makers.get(choice.kind, flags.DEFINE_string)
  make(choice.flag, default, choice.text, flag_values=flag_values)


class _OneOf(flags.EnumParser):
  """An enum parser that suggests the closest value for a mistyped one."""

  def parse(self, argument: str) -> str:
    """Return the value.

    Raises:
      ValueError: If it is not one of the enum's values.
    """
    if argument not in self.enum_values:
      raise ValueError(spelling.choose(argument, self.enum_values))
    return argument


def read(
  options: _Options, flag_values: flags.FlagValues = flags.FLAGS
) -> _Options:
  """Return options with the values of the flags.

  Args:
    options: The defaults.
    flag_values: Where the flags are defined and parsed.

  Raises:
    OptionError: If a flag has an impossible value, even if it belongs to a task
      that is not chosen.
  """
  chosen: Any = options
  if isinstance(options, Config):
    for task in config_lib.TASKS.values():
      task().with_flags(_values(task(), flag_values))
    named = {config_lib.TASK: flag_values[config_lib.TASK].value}
    chosen = options.with_flags(named)
  return chosen.with_flags(_values(chosen, flag_values))


def _values(options: Options, flag_values: flags.FlagValues) -> dict[str, Any]:
  """Return the flags' values in the form that options take."""
  found = {}
  for choice in options.choices():
    value = flag_values[choice.flag].value
    if value is None and choice.option.differs_by_task:
      continue
    if value is not None and value == choice.option.for_none:
      value = None
    if choice.kind == tuple[int, ...]:
      value = _whole_numbers(choice.flag, value)
    elif choice.kind == tuple[str, ...]:
      value = tuple(value)
    found[choice.flag] = value
  return found


def _whole_numbers(flag: str, text: str) -> tuple[int, ...]:
  try:
    return tuple(int(number) for number in text.split(',') if text)
  except ValueError:
    raise OptionError(
      f'--{flag}={text}: give whole numbers with commas between them, or '
      'nothing.'
    ) from None


def is_given(name: str) -> bool:
  """Return True if this process was started with a flag.

  Args:
    name: The flag.
  """
  return bool(flags.FLAGS[name].present)


def from_recipe(recipe: str | os.PathLike[str], **changes: Any) -> Config:
  """Read an experiment from a flagfile.

  Args:
    recipe: The file; or the name of one in `tasks/recipes`, such as 'demo'.
    **changes: Values that replace those of the recipe, by flag name.

  Raises:
    OptionError: If there is no such recipe or flag, or a value is impossible.
  """
  return parse(recipe_flags(recipe)).with_flags(changes)


def recipe_flags(recipe: str | os.PathLike[str]) -> list[str]:
  """Read the flags of a recipe.

  Args:
    recipe: The file; or the name of one in `tasks/recipes`.

  Raises:
    OptionError: If there is no such recipe.
  """
  path = pathlib.Path(recipe)
  try:
    return list(
      recipes.flags_of(path if path.suffix else recipes.path(str(recipe)))
    )
  except recipes.RecipeError as error:
    raise OptionError(str(error)) from None


def algorithm_of(arguments: Sequence[str]) -> str:
  """Find the algorithm that a command line chooses.

  Args:
    arguments: The command line, with recipes and files of flags expanded.
  """
  chosen = [a for a in arguments if a.startswith(_ALGORITHM)]
  return chosen[-1].removeprefix(_ALGORITHM) if chosen else Config().algorithm


def without_unread(arguments: Sequence[str], algorithm: str) -> list[str]:
  """Remove the flags that only other algorithms read.

  Args:
    arguments: A command line, with recipes and files of flags expanded.
    algorithm: The algorithm.
  """
  if algorithm not in algorithms.ALGORITHMS:
    return list(arguments)  # The algorithm is refused later.
  unread = algorithms.unread(algorithm)
  kept = []
  for argument in arguments:
    name = argument.partition('=')[0].removeprefix('--')
    if not {name, name.removeprefix('no')} & unread:
      kept.append(argument)
  return kept


def expand(arguments: Sequence[str]) -> list[str]:
  """Replace recipes and flagfiles by their flags.

  If a later flag overrides the algorithm of a recipe or of a folder's run, the
  flags before it that the new algorithm does not read are dropped.

  Args:
    arguments: The command line, without the program's name.

  Raises:
    RecipeError: If a named recipe does not exist.
  """
  expanded = recipes.expand(arguments)
  try:
    expanded = flags.FLAGS.read_flags_from_files(expanded, force_gnu=False)
  except (flags.Error, OSError):
    return expanded  # absl reports the error when it parses the flags.
  places = [
    place for place, a in enumerate(expanded) if a.startswith(_ALGORITHM)
  ]
  if len({expanded[place] for place in places}) < 2:
    return expanded
  before, after = expanded[: places[-1]], expanded[places[-1] :]
  return [*without_unread(before, algorithm_of(after)), *after]


_ALGORITHM = '--algorithm='


def parse(arguments: Sequence[str]) -> Config:
  """Read an experiment from a command line.

  Args:
    arguments: Flags of `tasks.train`, such as `--rounds=10`.

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
