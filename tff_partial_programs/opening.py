"""Says what a run is about to do, before TensorFlow is imported.

That import takes longer than a person wants to wait for the first word. So this
reads the command line by itself, with the names, choices and defaults of flags
that `python -m tests.help_texts` noted. What it cannot read it leaves to the
program, which reads everything again, and properly.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import difflib
import json
import pathlib
import re
import sys
from typing import Any

from tff_partial_programs import recipes
from tff_partial_programs import spelling

FLAGS_FILE = pathlib.Path(__file__).resolve().parent / 'help' / 'flags.json'
# A name that is as near as this to one of ours is no flag of a library.
_NEAR = 0.85
_FLAGFILE = 'flagfile'
_TRUE = ('true', 't', '1')
# What a run leaves in its folder.
_RESULT, _CHECKPOINT = 'result.json', re.compile(r'round_(\d+)')


@dataclasses.dataclass(frozen=True)
class Noted:
  """What was noted of a flag of `train`.

  Attributes:
    default: Its default, or None.
    choices: All values that it may have, if these are few.
    is_truth: Whether it is given without a value, or as `--noNAME`.
  """

  default: Any
  choices: tuple[str, ...]
  is_truth: bool


def noted() -> dict[str, Noted]:
  """The flags of `train`, by their names."""
  text = FLAGS_FILE.read_text(encoding='utf-8')
  return {
    name: Noted(said['default'], tuple(said['choices']), said['is_truth'])
    for name, said in json.loads(text).items()
  }


class FlagError(ValueError):
  """Raised for a flag that is surely misspelt."""


def given(
  arguments: Sequence[str], known: Mapping[str, Noted]
) -> dict[str, str]:
  """Read flags off a command line, and off the files that it names.

  Args:
    arguments: The command line, without the program's name.
    known: The flags that there are.

  Returns:
    The last value of each flag, as a text.

  Raises:
    FlagError: If a name or a choice is surely misspelt.
    OSError: If a file cannot be read.
  """
  values = {}
  try:
    arguments = recipes.expand(arguments)
  except recipes.RecipeError as error:
    raise FlagError(str(error)) from None
  for name, value in _pairs(arguments, known):
    if name not in known:
      if difflib.get_close_matches(name, [*known, recipes.FLAG], 1, _NEAR):
        raise FlagError(
          f'--{name}: there is no such flag.'
          f'{spelling.hint(name, [*known, recipes.FLAG], "--")}'
        )
      continue
    choices = known[name].choices
    if choices and value not in choices:
      raise FlagError(f'--{name}={value}: {spelling.choose(value, choices)}')
    values[name] = value
  return values


def _pairs(
  arguments: list[str], known: Mapping[str, Noted]
) -> Iterator[tuple[str, str]]:
  """The names and values of flags, in their order."""
  while arguments:
    argument = arguments.pop(0)
    if argument == '--' or not argument.startswith('-'):
      return  # absl reads no further, either.
    name, equals, value = argument.lstrip('-').partition('=')
    is_denied = name.startswith('no') and name[2:] in known and not equals
    if is_denied and known[name[2:]].is_truth:
      name, value = name[2:], 'false'
    elif not equals and name in known and known[name].is_truth:
      value = 'true'
    elif not equals and (name in known or name == _FLAGFILE) and arguments:
      value = arguments.pop(0)
    if name == _FLAGFILE:
      yield from _pairs(_lines(value), known)
    else:
      yield name, value


def _lines(path: str) -> list[str]:
  """The flags of a file."""
  text = pathlib.Path(path).expanduser().read_text(encoding='utf-8')
  lines = (line.strip() for line in text.splitlines())
  return [line for line in lines if line.startswith('-')]


def sentence(arguments: Sequence[str]) -> str:
  """Says in a sentence what `train` is about to do.

  Args:
    arguments: Its command line, without the program's name.

  Returns:
    The sentence; nothing where no output folder is named.

  Raises:
    FlagError: If a flag is surely misspelt.
    OSError: If a file of flags, or the output folder, cannot be read.
  """
  known = noted()
  chosen = given(arguments, known)

  def value(name: str) -> str:
    default = known[name].default
    return chosen.get(name, '' if default is None else str(default))

  def is_true(name: str) -> bool:
    return value(name).lower() in _TRUE

  invented = ', invented data' if value('data') == 'synthetic' else ''
  private = ''
  if value('target_epsilon'):
    private = (
      f'private, epsilon {value("target_epsilon")} at delta {value("delta")}; '
    )
  elif value('noise_multiplier'):
    private = f'private, noise multiplier {value("noise_multiplier")}; '
  what = (
    f'{value("task")} by {value("algorithm")}{invented}: {value("rounds")} '
    f'rounds of {value("clients_per_round")} clients, measured every '
    f'{value("evaluate_every")}; {private}'
  )
  if is_true('dry_run'):
    return f'{what}a plan alone, nothing is written.'
  folder = value('output_dir')
  return folder and f'{what}into {folder}, {state(folder)}.'


def state(folder: str) -> str:
  """Says how far the run in a folder is.

  Args:
    folder: The output folder, which need not exist.

  Raises:
    OSError: If it cannot be read.
  """
  path = pathlib.Path(folder)
  if (path / _RESULT).exists():
    try:
      rounds = json.loads((path / _RESULT).read_text('utf-8'))['rounds']
    except (ValueError, KeyError, TypeError, RecursionError):
      return 'whose result cannot be read'
    return f'which has the result of {rounds} rounds'
  saved = path / 'checkpoints'
  found = [
    int(name[1])
    for each in (saved.iterdir() if saved.is_dir() else ())
    if (name := _CHECKPOINT.fullmatch(each.name))
  ]
  if any(found):
    return f'going on after round {max(found)}'
  return 'a new run'


def say(arguments: Sequence[str]) -> None:
  """Print what `train` is about to do, or ends it where a flag is misspelt.

  Args:
    arguments: Its command line, without the program's name.

  Raises:
    SystemExit: If a flag is surely misspelt.
  """
  try:
    said = sentence(arguments)
  except FlagError as error:
    sys.stderr.write(f'error: {error}\n')
    raise SystemExit(1) from None
  except (OSError, UnicodeDecodeError, RecursionError):
    return  # The program will say why.
  if said:
    sys.stdout.write(f'{said}\n')
    sys.stdout.flush()
