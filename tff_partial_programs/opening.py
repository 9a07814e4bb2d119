"""The first line of a run, printed before TensorFlow is imported.

That import is too slow to wait for. So this module parses the command line
itself, with the names, choices and defaults of flags that `python -m
tests.help_texts` wrote. It leaves what it cannot parse to the program, which
parses everything again.
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
# An unknown flag at least this similar to one of ours is taken for a typo, not
# for a flag of a library; likewise the choice of a flag.
_NEAR = 0.85
_FLAGFILE = 'flagfile'
_TRUE = ('true', 't', '1')
# Names of a run's result and checkpoints.
_RESULT, _CHECKPOINT = 'result.json', re.compile(r'round_(\d+)')


@dataclasses.dataclass(frozen=True)
class Noted:
  """A flag of `train`, read from `FLAGS_FILE`.

  Attributes:
    default: Its default, or None.
    choices: All allowed values, if they are few.
    is_truth: True for a boolean, which takes no value, or is `--noNAME`.
  """

  default: Any
  choices: tuple[str, ...]
  is_truth: bool


def noted() -> dict[str, Noted]:
  """Read the flags of `train`, by name."""
  text = FLAGS_FILE.read_text(encoding='utf-8')
  return {
    name: Noted(said['default'], tuple(said['choices']), said['is_truth'])
    for name, said in json.loads(text).items()
  }


class FlagError(ValueError):
  """Raised for a flag that is certainly misspelt."""


def given(
  arguments: Sequence[str], known: Mapping[str, Noted]
) -> dict[str, str]:
  """Parse the flags of a command line, and of the files that it names.

  Args:
    arguments: The command line, without the program's name.
    known: The flags that exist.

  Returns:
    The last value of each flag, as a string.

  Raises:
    FlagError: If a name or a choice is certainly misspelt.
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
    # What resembles none may be new, and the program knows it.
    choices = known[name].choices
    near = difflib.get_close_matches(value, choices, 1, _NEAR)
    if near and value not in choices:
      raise FlagError(f'--{name}={value}: {spelling.choose(value, choices)}')
    values[name] = value
  return values


def _pairs(
  arguments: list[str], known: Mapping[str, Noted]
) -> Iterator[tuple[str, str]]:
  """Yield the names and values of flags, in order."""
  while arguments:
    argument = arguments.pop(0)
    if argument == '--' or not argument.startswith('-'):
      return  # absl stops here, too.
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
  """Return the flags of a file."""
  text = pathlib.Path(path).expanduser().read_text(encoding='utf-8')
  lines = (line.strip() for line in text.splitlines())
  return [line for line in lines if line.startswith('-')]


def sentence(arguments: Sequence[str]) -> str:
  """Return a sentence that says what `train` is about to do.

  Args:
    arguments: Its command line, without the program's name.

  Returns:
    The sentence; without an output folder empty, except for a dry run.

  Raises:
    FlagError: If a flag is certainly misspelt.
    OSError: If a flagfile, or the output folder, cannot be read.
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
  clients = value('clients_per_round')
  what = (
    f'{value("task")} by {value("algorithm")}{invented}: {value("rounds")} '
    f'rounds of {"all" if clients == "0" else clients} clients, measured every '
    f'{value("evaluate_every")}; {private}'
  )
  if is_true('dry_run'):
    return f'{what}a plan alone, nothing is written.'
  folder = value('output_dir')
  return folder and f'{what}into {folder}, {state(folder)}.'


def state(folder: str) -> str:
  """Describe how far the run in a folder is.

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
  """Print what `train` is about to do, or exit if a flag is misspelt.

  Args:
    arguments: Its command line, without the program's name.

  Raises:
    SystemExit: If a flag is certainly misspelt.
  """
  try:
    said = sentence(arguments)
  except FlagError as error:
    sys.stderr.write(f'error: {error}\n')
    raise SystemExit(1) from None
  except (OSError, UnicodeDecodeError, RecursionError):
    return  # The program will report the error.
  if said:
    sys.stdout.write(f'{said}\n')
    sys.stdout.flush()
