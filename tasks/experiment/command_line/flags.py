"""Command-line flags, derived from classes of options.

No other module reads absl's flags.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import os
import pathlib
from typing import Any, TypeVar

from absl import flags

from tasks import shared_options
from tasks.errors import OptionError
from tasks.experiment import config as config_lib
from tasks.experiment.config import Config
from tasks.experiment.methods import algorithms
from tasks.experiment.options.loop import DryRun
from tasks.experiment.options.loop import Output
from tasks.options import Choice
from tasks.options import Options
from tasks.options import SET
from tff_partial_programs import recipes
from tff_partial_programs import spelling

_Options = TypeVar('_Options', bound=Options)
_SET_TEXT = 'An option that has no flag of its own: NAME=VALUE; repeatable.'
_RECIPE_TEXT = (
  'A set of flags, named by task and algorithm; a wrong name lists all. Flags '
  'after it win; --flagfile=FILE reads those of your own.'
)


def all_choices(options: Options) -> Iterable[Choice]:
  """Return all choices, including those of tasks that are not chosen.

  A flag of several tasks occurs once, with the values that any of them takes.

  Args:
    options: The options.
  """
  found: dict[str, Choice] = {}
  groups: list[Options] = [options]
  if isinstance(options, Config):
    groups += [task() for task in config_lib.TASKS.values()]
  for group in groups:
    for choice in group.choices():
      found[choice.flag] = _joined(found.get(choice.flag, choice), choice)
  return found.values()


def _joined(first: Choice, second: Choice) -> Choice:
  """Return a choice with the values and defaults of either."""
  ours, theirs = first.option.choices, second.option.choices
  choices = None if ours is None or theirs is None else (*ours, *theirs)
  differs = first.on_command_line != second.on_command_line
  option = dataclasses.replace(
    first.option,
    choices=choices and tuple(dict.fromkeys(choices)),
    differs_by_task=first.option.differs_by_task or differs,
  )
  return dataclasses.replace(first, option=option)


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
  found = {choice.flag: choice for choice in all_choices(options)}
  without_flag = [c for c in found.values() if c.option.python_only]
  for choice in without_flag:
    del found[choice.flag]
  for choice in found.values():
    if choice.flag not in flag_values:
      _define(choice, flag_values)
  if isinstance(options, Config) and recipes.FLAG not in flag_values:
    # `expand` replaces it.
    flags.DEFINE_string(
      recipes.FLAG,
      None,
      _RECIPE_TEXT,
      flag_values=flag_values,
      module_name=Config.title,
    )
  if SET not in flag_values:
    flags.DEFINE_multi_string(SET, [], _SET_TEXT, flag_values=flag_values)
  # The full help shows it.
  flag_values[SET].help += ''.join(
    f'\n{c.flag} ({_shown(c.on_command_line)}): {_text(c)}'
    for c in sorted(without_flag, key=lambda choice: choice.flag)
    if f'\n{c.flag} ' not in flag_values[SET].help
  )
  return found


def _text(choice: Choice) -> str:
  """Return the purpose of an option, and its choices."""
  if choice.option.choices is None:
    return choice.text
  return f'{choice.text} One of {", ".join(choice.option.choices)}.'


def _shown(value: Any) -> str:
  return str(value).lower() if isinstance(value, bool) else str(value)


def show_in_help(program: str, options: Sequence[Options]) -> None:
  """Choose the flags that `--help` shows: of an experiment the common ones.

  Args:
    program: The program, as `sys.argv[0]` names it.
    options: Its options. Those of the run in a folder are not shown.
  """
  has_own = any(not isinstance(each, Config | Output) for each in options)
  is_training = any(isinstance(each, DryRun) for each in options)
  for each in options:
    if isinstance(each, Config) and has_own and not is_training:
      continue
    is_of_run = isinstance(each, Config | Output)
    for choice in all_choices(each):
      is_shown = choice.option.is_common or not is_of_run
      if is_shown and choice.flag in flags.FLAGS:
        flags.FLAGS.register_key_flag_for_module(
          program, flags.FLAGS[choice.flag]
        )
  if is_training:
    flags.FLAGS.register_key_flag_for_module(program, flags.FLAGS[recipes.FLAG])


def _define(choice: Choice, flag_values: flags.FlagValues) -> None:
  """Define one flag. The options, not absl, check its limits."""
  said = choice.option
  default = None if said.differs_by_task else choice.on_command_line
  # By it the full help sorts flags.
  where: dict[str, Any] = {
    'flag_values': flag_values,
    'module_name': choice.title,
  }
  text = _text(choice)
  if said.choices is not None:
    flags.DEFINE(_OneOf(said.choices), choice.flag, default, text, **where)
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
  make(choice.flag, default, text, **where)


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
    _check_names(flag_values)
    named = {config_lib.TASK: flag_values[config_lib.TASK].value}
    chosen = options.with_flags(named)
    for task in config_lib.TASKS.values():
      values = _values(task(), flag_values)
      own = {
        c.flag for c in task().choices() if c.title != shared_options.TITLE
      }
      task().with_flags({name: values[name] for name in own & values.keys()})
    _refuse_of_other_tasks(flag_values[config_lib.TASK].value, flag_values)
  return chosen.with_flags(_values(chosen, flag_values))


def _refuse_of_other_tasks(chosen: str, flag_values: flags.FlagValues) -> None:
  """Refuse a flag that several tasks share, but not the chosen one."""
  readers = collections.defaultdict(list)
  for name, task in config_lib.TASKS.items():
    for choice in task().choices():
      if choice.title == shared_options.TITLE and choice.flag in flag_values:
        readers[choice.flag].append(name)
  for flag, tasks in readers.items():
    if flag_values[flag].present and chosen not in tasks:
      raise OptionError(
        f'--{flag}={flag_values[flag].value!s:.40}: the task {chosen} does not '
        f'read it; {", ".join(tasks)} do. Leave it out.'
      )


def _values(options: Options, flag_values: flags.FlagValues) -> dict[str, Any]:
  """Return the flags' values in the form that options take."""
  found = {}
  texts = dict(_assignments(flag_values))
  for choice in options.choices():
    if choice.option.python_only:
      if choice.flag not in texts:
        continue
      value = _parsed(choice, texts[choice.flag])
    else:
      value = flag_values[choice.flag].value
      if value is None and _differs_by_task(choice):
        continue
    if choice.may_be_none and value == choice.option.for_none:
      value = None
    if choice.kind == tuple[int, ...]:
      value = _whole_numbers(choice, value)
    elif choice.kind == tuple[str, ...]:
      value = tuple(value)
    found[choice.flag] = value
  return found


def _assignments(flag_values: flags.FlagValues) -> Iterator[tuple[str, str]]:
  """Yield the names and values of `--set`."""
  for text in flag_values[SET].value:
    name, equals, value = text.partition('=')
    if not equals:
      raise OptionError(f'--{SET}={text}: give NAME=VALUE.')
    yield name, value


def _check_names(flag_values: flags.FlagValues) -> None:
  """Refuse names in `--set` that no option has."""
  for name, value in _assignments(flag_values):
    known = _known()
    if name not in known:
      python_only = [n for n, c in known.items() if c.option.python_only]
      raise OptionError(
        f'--{SET}={name}={value}: there is no option of this name.'
        f'{spelling.hint(name, python_only)}'
      )
    if not known[name].option.python_only:
      raise OptionError(f'--{SET}={name}={value}: give --{name}={value}.')


@functools.cache
def _known() -> dict[str, Choice]:
  """Return all choices of `train`, by name."""
  groups = (Config(), Output())
  return {c.flag: c for options in groups for c in all_choices(options)}


def _differs_by_task(choice: Choice) -> bool:
  known = _known().get(choice.flag, choice)
  return known.option.differs_by_task


def argument(name: str, value: Any) -> str:
  """Return the argument of a command line that sets an option.

  Args:
    name: The option, by the name of its flag or in `--set`.
    value: The value in the form of a flag.
  """
  choice = _known().get(name)
  return f'{choice.argument if choice else f"--{name}"}={value}'


def _parsed(choice: Choice, text: str) -> Any:
  """Return the value that a text in `--set` stands for."""
  if choice.kind is bool and text in ('true', 'false'):
    return text == 'true'
  if choice.kind == tuple[str, ...]:
    return text.split(',') if text else []
  try:
    return choice.kind(text) if choice.kind in (int, float) else text
  except ValueError:
    return text  # The option refuses it.


def _whole_numbers(choice: Choice, text: str) -> tuple[int, ...]:
  try:
    return tuple(int(number) for number in text.split(',') if text)
  except ValueError:
    raise OptionError(
      f'{choice.argument}={text}: give whole numbers with commas between them, '
      'or nothing.'
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
    name = argument.removeprefix(f'--{SET}=').removeprefix('--')
    name = name.partition('=')[0]
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
    OptionError: If an option without a flag is given as one.
  """
  expanded = recipes.expand(arguments)
  try:
    expanded = flags.FLAGS.read_flags_from_files(expanded, force_gnu=False)
  except (flags.Error, OSError):
    return expanded  # absl reports the error when it parses the flags.
  _refuse_options(expanded)
  places = [
    place for place, a in enumerate(expanded) if a.startswith(_ALGORITHM)
  ]
  if len({expanded[place] for place in places}) < 2:
    return expanded
  before, after = expanded[: places[-1]], expanded[places[-1] :]
  return [*without_unread(before, algorithm_of(after)), *after]


_ALGORITHM = '--algorithm='


def _refuse_options(arguments: Sequence[str]) -> None:
  """Refuse options without a flag that are given as flags."""
  for argument in arguments:
    if argument == '--':
      return
    name = argument.lstrip('-').partition('=')[0]
    if not argument.startswith('-') or name in flags.FLAGS:
      continue
    for option in (name, name.removeprefix('no')):
      choice = _known().get(option)
      if choice is not None and choice.option.python_only:
        raise OptionError(f'--{option}: give {choice.argument}=VALUE.')


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
