"""Start, flags, and exit of a command-line program.

Errors that a user can fix print one paragraph and exit with status 1; no child
process outlives them.
"""

from collections.abc import Callable, Sequence
import dataclasses
import errno
import logging as python_logging
import os
import pathlib
import signal
import sys
from typing import Any

from absl import app
from absl import logging

from tasks import shared_options
from tasks import task as tasks_lib
from tasks.experiment import config as config_lib
from tasks.experiment.command_line import flags
from tasks.experiment.command_line import help_texts
from tasks.experiment.config import Config
from tasks.experiment.config import Runtime
from tasks.experiment.options.loop import Loop
from tasks.experiment.options.loop import Output
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.options.training import LocalTraining
from tasks.options import Choice
from tasks.options import Options
from tff_partial import errors
from tff_partial.runtimes import errors as runtime_errors
from tff_partial.runtimes.native_runtime.worker import NativeRuntimeError
import tff_partial_programs
from tff_partial_programs import recipes


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of the command line.

  Attributes:
    main: Does the work, given the options; returns the exit status, or None.
    options: Defaults of the options, in the order in which `main` takes them.
    complete: Completes the command line before it is parsed.
  """

  main: Callable[..., int | None]
  options: tuple[Options, ...]
  complete: Callable[[Sequence[str]], list[str]] = list

  def run(self) -> None:
    """Run the program on the command line of this process, and exit."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
      sys.exit(_guarded(self._start))
    finally:
      signal.signal(signal.SIGTERM, before)

  def _start(self) -> int | None:
    if tff_partial_programs.asks_for_help(sys.argv[1:]):
      is_full = tff_partial_programs.asks_for_all(sys.argv[1:])
      sys.stdout.write(self.help(full=is_full))
      return None
    for options in self.options:
      flags.define(options)
    name, *arguments = self.complete(sys.argv)
    app.run(self._parsed, [name, *flags.expand(arguments)])
    return None

  def _parsed(self, arguments: Sequence[str]) -> int | None:
    if len(arguments) > 1:
      print(
        f'error: unknown arguments {list(arguments[1:])}; flags begin with --.',
        file=sys.stderr,
      )
      return 1
    return _guarded(self._main)

  def _main(self) -> int | None:
    # Hide messages of libraries that do not concern the run.
    python_logging.getLogger('tensorflow').setLevel(python_logging.ERROR)
    if not flags.is_given('verbosity'):
      logging.set_verbosity(logging.WARNING)
    return self.main(*map(flags.read, self.options))

  def help(self, *, full: bool = False) -> str:
    """Return the text of `--help`, or of `--helpfull`.

    Args:
      full: True to list all flags, even if they do not fit on two screens.
    """
    module = sys.modules[self.main.__module__]
    # `__name__` may be `__main__`.
    name = pathlib.Path(str(module.__file__)).stem
    groups: dict[str, list[Choice]] = {title: [] for title in _TITLES}
    for task in config_lib.TASKS.values():
      groups[task.title] = []
    without_flag: list[Choice] = []
    for options in self.options:
      for choice in flags.all_choices(options):
        if choice.option.python_only:
          without_flag.append(choice)
        else:
          groups.setdefault(choice.title, []).append(choice)
    number = sum(map(len, groups.values()))
    of_config = any(isinstance(options, Config) for options in self.options)
    more = ''
    if of_config and name == 'train' and not full:
      groups = {
        title: [choice for choice in choices if choice.option.is_common]
        for title, choices in groups.items()
      }
      more = (
        f'All {number} flags, and {len(without_flag)} options for '
        '--set=NAME=VALUE: --helpfull.'
      )
    elif name == 'train' and without_flag:
      groups[_WITHOUT_FLAG] = without_flag
    elif of_config and name != 'train':
      # Only the help of train lists all flags.
      title = 'All flags of train, see tff-partial train --helpfull, such as'
      named = [c for c in groups[Output.title] if c.flag == 'output_dir']
      groups = {'': groups[''], title: named}
    return help_texts.of_program(
      name,
      str(module.__doc__),
      {title: choices for title, choices in groups.items() if choices},
      more,
    )


def _guarded(work: Callable[[], int | None]) -> int | None:
  try:
    return work()
  except _FOR_USERS as error:
    message = str(error)
  except BrokenPipeError:
    # The reader has gone. Python would report an error at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    if error.errno not in _FOLDER_ERRORS:
      raise
    message = (
      f'{error.filename or "output"}: {error.strerror}. Choose another '
      '--output_dir or make room; what was written before is kept.'
    )
  except KeyboardInterrupt:
    return _say_interrupted(signal.SIGINT)
  except _Terminated:
    return _say_interrupted(signal.SIGTERM)
  print(f'error: {message}', file=sys.stderr)
  return 1


class _Terminated(SystemExit):
  """Raised by SIGTERM, so that resources are released before the exit."""


def _terminate(number: int, frame: Any) -> None:
  raise _Terminated(128 + number)


def _say_interrupted(number: signal.Signals) -> int:
  """Print how to resume, and return the exit status that shells expect."""
  print(
    f'error: Ended by {number.name}. Run the same command again to go on from '
    'the last checkpoint.',
    file=sys.stderr,
  )
  return 128 + number


# Groups of flags in the order of the help; those of single tasks and algorithms
# follow. The first group is of the program's own flags.
_TITLES = (
  '',
  tasks_lib.Data.title,
  shared_options.TITLE,
  Config.title,
  Loop.title,
  LocalTraining.title,
  Privacy.title,
  Output.title,
  Runtime.title,
)

_WITHOUT_FLAG = (
  'Options that have no flag: --set=NAME=VALUE, which may be repeated'
)

# Errors written for users; those of the runtimes concern flags.
_FOR_USERS = (
  errors.UserError,
  recipes.RecipeError,
  runtime_errors.CohortRuntimeError,
  NativeRuntimeError,
)

_FOLDER_ERRORS = frozenset(
  (
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EFBIG,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
  )
)
