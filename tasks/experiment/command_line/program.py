"""Start, flags, and exit of a command-line program.

Errors that a user can fix print one paragraph and exit with status 1; no child
process outlives them.
"""

from collections.abc import Callable, Sequence
import ctypes
import dataclasses
import logging as python_logging
import os
import signal
import sys
import tempfile
from typing import Any

from absl import app
from absl import logging

from tasks.errors import OptionError
from tasks.experiment.command_line import flags
from tasks.experiment.command_line.arguments import expand
from tasks.experiment.command_line.arguments import OF_SWEEP
from tasks.options import Options
from tff_partial import errors
from tff_partial.training import files
from tff_partial_programs import recipes

# Of Linux's prctl: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of the command line.

  Attributes:
    main: Does the work, given the options; returns the exit status, or None. It
      imports TensorFlow itself, so that help and errors do not wait for it.
    options: Defaults of the options, in the order in which `main` takes them.
    complete: Completes the command line before it is parsed.
  """

  main: Callable[..., int | None]
  options: tuple[Options, ...]
  complete: Callable[[Sequence[str]], list[str]] = list

  def run(self) -> None:
    """Run the program on the command line of this process, and exit."""
    _end_with_sweep()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
      sys.exit(_guarded(self._start))
    finally:
      signal.signal(signal.SIGTERM, before)

  def _start(self) -> int | None:
    for options in self.options:
      flags.define(options)
    flags.show_in_help(sys.argv[0], self.options)
    name, *arguments = self.complete(sys.argv)
    app.run(self._parsed, [name, *expand(arguments)])
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
    try:
      tempfile.gettempdir()
    except FileNotFoundError as error:  # It would fail far inside TensorFlow.
      raise OptionError(
        f'{error.strerror}. Make room there, or name another by $TMPDIR.'
      ) from None
    return self.main(
      *(flags.read(each, beside=self.options) for each in self.options)
    )


def _guarded(work: Callable[[], int | None]) -> int | None:
  try:
    return work()
  except (errors.UserError, recipes.RecipeError) as error:
    message = str(error)
  except BrokenPipeError:
    # The reader has gone. Python would report an error at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except OSError as error:
    if error.filename is None and error.errno not in files.FULL:
      raise
    place = flags.of_folder(error.filename)
    message = (
      f'{error.filename or "output"}: {error.strerror}. '
      f'{files.choose_another(error, place)} What was written before is kept.'
    )
  except KeyboardInterrupt:
    return _say_interrupted(signal.SIGINT)
  except _Terminated:
    return _say_interrupted(signal.SIGTERM)
  print(f'error: {message}', file=sys.stderr)
  return 1


def _end_with_sweep() -> None:
  """Have the kernel end this process if the sweep that started it is killed."""
  sweep = os.environ.get(OF_SWEEP)
  if sweep is None:
    return
  if sys.platform == 'linux':
    kill = ctypes.c_ulong(signal.SIGKILL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, kill)
  if os.getppid() != int(sweep):  # It was killed before.
    sys.exit(128 + signal.SIGKILL)


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
