"""Command-line flags, derived from classes of options.

No other module reads absl's flags.
"""

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, TypeVar

from absl import flags

from tasks.errors import OptionError
from tasks.experiment import config as config_lib
from tasks.experiment.config import Config
from tasks.experiment.options.loop import DryRun
from tasks.experiment.options.loop import Output
from tasks.options import Choice
from tasks.options import Options
from tasks.options import SET
from tff_partial_programs import recipes
from tff_partial_programs import spelling

_Options = TypeVar('_Options', bound=Options)
_SET_TEXT = 'Sets one of these options, which have no flag, as NAME=VALUE'
_RECIPE_TEXT = (
  'Name of a set of flags, such as demo; a wrong name lists all. Flags after '
  'it win. --flagfile=FILE reads flags of your own.'
)


def all_choices(options: Options) -> Iterable[Choice]:
  """Return all choices, including those of tasks that are not chosen.

  A flag of several tasks occurs once, with the values that any of them takes.
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
  return first._replace(option=option)


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
  makers: dict[Any, Any] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple[str, ...]: flags.DEFINE_multi_string
    if said.is_repeated
    else flags.DEFINE_list,
  }
  make = makers.get(choice.kind, flags.DEFINE_string)
  make(choice.flag, default, _text(choice), **where)


def read(
  options: _Options,
  flag_values: flags.FlagValues = flags.FLAGS,
  beside: Sequence[Options] = (),
) -> _Options:
  """Return options with the values of the flags.

  Args:
    options: The defaults.
    flag_values: Where the flags are defined and parsed.
    beside: Other options of the program, which may read the same flags.

  Raises:
    OptionError: If a flag has an impossible value, or belongs to a task that is
      not chosen.
  """
  chosen: Any = options
  if isinstance(options, Config):
    _check_names(flag_values)
    named = {config_lib.TASK: flag_values[config_lib.TASK].value}
    chosen = options.with_flags(named)
    others = (
      c for each in beside if each is not options for c in each.choices()
    )
    _refuse_of_other_tasks(
      named[config_lib.TASK], flag_values, {choice.flag for choice in others}
    )
  return chosen.with_flags(_values(chosen, flag_values))


def _refuse_of_other_tasks(
  chosen: str, flag_values: flags.FlagValues, read: Collection[str]
) -> None:
  """Refuse what is given and only other tasks read, except flags in `read`."""
  readers = collections.defaultdict(list)
  for name, task in config_lib.TASKS.items():
    for choice in task().choices():
      readers[choice.flag].append((name, choice.argument))
  given: dict[str, Any] = dict(_assignments(flag_values))
  for flag, tasks in readers.items():
    if flag in flag_values and flag_values[flag].present:
      given[flag] = flag_values[flag].value
    names = [name for name, _ in tasks]
    if flag in given.keys() - read and chosen not in names:
      raise OptionError(
        f'{tasks[0][1]}={given[flag]!s:.40}: the task {chosen} does not read '
        f'it. Leave it out, or give --task={" or ".join(names)}.'
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
      known_as = known().get(choice.flag, choice)
      if value is None and known_as.option.differs_by_task:
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
    options = known()
    if name not in options:
      python_only = [n for n, c in options.items() if c.option.python_only]
      raise OptionError(
        f'--{SET}={name}={value}: there is no option of this name.'
        f'{spelling.hint(name, python_only)}'
      )
    if not options[name].option.python_only:
      raise OptionError(f'--{SET}={name}={value}: give --{name}={value}.')


@functools.cache
def known() -> dict[str, Choice]:
  """Return all choices of `train`, by name."""
  groups = (Config(), Output())
  return {c.flag: c for options in groups for c in all_choices(options)}


def argument(name: str, value: Any) -> str:
  """Return the argument of a command line that sets an option.

  Args:
    name: The option, by the name of its flag or in `--set`.
    value: The value in the form of a flag.
  """
  choice = known().get(name)
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


def of_folder(path: Any) -> str:
  """Return the flag that names the folder of a path; 'folder' if none does."""
  named, longest = 'folder', 0
  if not isinstance(path, str):
    return named
  place = pathlib.PurePath(path)
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value if name.endswith('_dir') else None
    for given in [value] if isinstance(value, str) else value or ():
      folder = pathlib.PurePath(given)
      is_there = place.is_relative_to(folder) or folder.is_relative_to(place)
      if is_there and len(given) > longest:
        named, longest = f'--{name}', len(given)
  return named


def is_given(name: str) -> bool:
  """Return True if this process was started with a flag."""
  return bool(flags.FLAGS[name].present)
