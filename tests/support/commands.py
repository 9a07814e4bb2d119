"""Runs the binaries: as a user would, or in this process, which is quicker."""

import atexit
from collections.abc import Callable, Iterator, Mapping
import contextlib
import csv
import functools
import importlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple
import uuid

from absl import app
from absl import flags
from absl import logging
from absl.testing import flagsaver
import psutil

from tasks.experiment.command_line import arguments as arguments_lib
from tasks.experiment.command_line import flags as options_lib
from tasks.searching import grids

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A run of seconds: invented ratings, small everything, nothing to compile.
SMALL = (
  *('--data=synthetic', '--num_factors=4', '--clients_per_round=5'),
  *('--rounds=6', '--evaluate_every=2', '--jit=false'),
)

# A model of documents that is traced in seconds.
TINY_DOCUMENTS = (
  *('--data=synthetic', '--set=max_chars=48', '--set=ngram_lengths=3'),
  *('--set=ngram_buckets=50', '--set=places_per_step=4', '--lstm_units=4'),
  *('--set=char_embedding=4', '--set=user_embedding=5', '--control_points=2'),
)

_MARK = 'TFF_PARTIAL_TEST_MARK'


class Outcome(NamedTuple):
  """How a binary ended.

  Attributes:
    status: The exit status; negative for a signal.
  """

  status: int
  output: str
  errors: str


def run_here(name: str, *arguments: str) -> Outcome:
  """Runs a binary in this process; an exception that it lets pass is raised."""
  program = importlib.import_module(f'tasks.{name}').PROGRAM
  output, errors = io.StringIO(), io.StringIO()
  before, verbosity = sys.argv, logging.get_verbosity()
  sys.argv = [f'tasks/{name}.py', *arguments]
  status = 0
  app.define_help_flags()
  with flagsaver.flagsaver():
    flags.FLAGS.unparse_flags()
    try:
      with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
      ):
        program.run()
    except SystemExit as end:
      status = int(end.code or 0)
    finally:
      sys.argv = before
      logging.set_verbosity(verbosity)
  return Outcome(status, output.getvalue(), errors.getvalue())


def run_well(name: str, *arguments: str) -> Outcome:
  """Runs a binary in this process, which must end well."""
  outcome = run_here(name, *arguments)
  assert outcome.status == 0, outcome
  return outcome


def train_small(
  folder: pathlib.Path, *flags: str, run: Callable[..., Outcome] = run_here
) -> Outcome:
  """Trains in a folder with the flags `SMALL`, and others after them."""
  return run('train', *SMALL, *flags, f'--output_dir={folder}')


class Trained(NamedTuple):
  """A run that nobody interrupted.

  Attributes:
    folder: What it wrote. Copy it to change it.
  """

  folder: pathlib.Path
  outcome: Outcome


@functools.cache
def trained() -> Trained:
  """The run with the flags `SMALL`, which all tests share."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='trained'))
  atexit.register(shutil.rmtree, folder)
  outcome = train_small(folder, run=run_well)
  return Trained(folder, outcome)


def files(folder: pathlib.Path) -> dict[str, bytes]:
  """All files below a folder and what they hold."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }


def python(
  *arguments: str, cwd: pathlib.Path = ROOT, **options: Any
) -> subprocess.CompletedProcess[str]:
  """Runs this Python with arguments, and keeps what it prints."""
  command = [sys.executable, *arguments]
  return subprocess.run(
    command, cwd=cwd, capture_output=True, text=True, **options
  )


def environment(**changes: str | None) -> dict[str, str]:
  """The environment of a program that is started: ours, with changes."""
  variables = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3', **changes}
  return {name: value for name, value in variables.items() if value is not None}


def command(name: str, *arguments: str) -> list[str]:
  """The command that starts a binary."""
  return [sys.executable, '-m', f'tasks.{name}', *arguments]


class Program:
  """A program that was started, and all that it started in turn."""

  def __init__(self, arguments: list[str], variables: Mapping[str, str]):
    """Starts it, in the root of the checkout."""
    self._mark = uuid.uuid4().hex
    self.process = subprocess.Popen(
      arguments,
      cwd=ROOT,
      env={**variables, _MARK: self._mark},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def finish(self, seconds: float = 600) -> Outcome:
    """Waits until nobody holds its pipes any more."""
    output, errors = self.process.communicate(timeout=seconds)
    return Outcome(self.process.returncode, output, errors)

  def alive(self) -> list[psutil.Process]:
    """The program and its offspring that live."""
    found = []
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        if process.environ().get(_MARK) == self._mark:
          if process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found

  def all_ended(self, seconds: float = 60) -> bool:
    """Whether nothing lives any more, or soon does not."""
    patience = time.monotonic() + seconds
    while self.alive() and time.monotonic() < patience:
      time.sleep(0.1)
    return not self.alive()


def wait_for_rounds(table: pathlib.Path, number: int, program: Program) -> None:
  """Waits until a program has so many rounds in its table of metrics."""
  patience = time.monotonic() + 600
  # The first line is the header.
  while not table.exists() or table.read_bytes().count(b'\n') <= number:
    assert time.monotonic() < patience, f'{table} never had {number} rounds.'
    if program.process.poll() is not None:
      raise AssertionError(f'Ended before: {program.finish()}')
    time.sleep(0.01)


@contextlib.contextmanager
def started(arguments: list[str], **changes: str | None) -> Iterator[Program]:
  """A program that does not outlive the `with`."""
  program = Program(arguments, environment(**changes))
  try:
    yield program
  finally:
    for process in program.alive():
      with contextlib.suppress(psutil.Error):
        process.kill()
    program.process.wait()


def run_program(arguments: list[str], **changes: str | None) -> Outcome:
  """Runs a program to its end, and makes sure that nothing of it is left."""
  with started(arguments, **changes) as program:
    outcome = program.finish()
    if not program.all_ended():
      raise AssertionError(f'{program.alive()} outlive {arguments}')
    return outcome


def is_for_users(outcome: Outcome, *expected: str) -> None:
  """Checks that a program ended with one paragraph for users, as expected."""
  message = outcome.errors.strip()
  assert outcome.status in (1, 2), outcome
  assert 'Traceback' not in message, message
  assert '\n\n' not in message, message
  assert message.startswith(('error: ', 'FATAL Flags')), message
  for text in expected:
    assert text in message, f'{text!r} is not in: {message}'


def result(folder: pathlib.Path) -> dict[str, Any]:
  """The result of a run, which every reader of JSON must take."""

  def refuse(constant: str) -> None:
    raise AssertionError(f'{constant} is not JSON')

  text = (folder / 'result.json').read_text()
  return json.loads(text, parse_constant=refuse)


def repeatable_rows(folder: pathlib.Path) -> list[dict[str, str]]:
  """The table of metrics that a run wrote, without what is never the same."""
  with (folder / 'metrics.csv').open(newline='') as file:
    return [
      {
        name: value
        for name, value in row.items()
        if not name.startswith(('seconds_', 'peak_'))
      }
      for row in csv.DictReader(file)
    ]


def parse(program: str, arguments: list[str]) -> None:
  """Read the options of a program, and of the runs that a sweep starts.

  Raises:
    flags.Error: If there is no such flag.
    OptionError: If the options do not go together.
  """
  own, passed_on = arguments, []
  if '--' in arguments:
    place = arguments.index('--')
    own, passed_on = arguments[:place], arguments[place + 1 :]
  options = importlib.import_module(f'tasks.{program}').PROGRAM.options
  values = flags.FlagValues()
  for each in options:
    options_lib.define(each, values)
  _, *rest = values(['', *arguments_lib.expand(own)])
  assert not rest
  for each in options:
    options_lib.read(each, values, options)
  if program == 'sweep':
    grid = [t for of in ('grid', 'tune', 'repeat') for t in values[of].value]
    for run in grids.planned(values['recipes'].value, grid, passed_on).values():
      parse('train', run.arguments)
