"""A run as the binaries see it: flags, folder, runtime, task and algorithm."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import errno
import functools
import json
import logging as python_logging
import math
import os
import pathlib
import resource
import signal
import sys
import types
from typing import Any
import weakref

from absl import app
from absl import flags
from absl import logging
import psutil
import tensorflow_federated as tff

from tasks import algorithms
from tasks import emnist_flags
from tasks import fed_embed_flags
from tasks import flags as flag_groups
from tasks import help_texts
from tasks import preference_flags
from tasks import privacy_flags
from tasks import subreddit_flags
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.training_flags import TrainingFlags
from tff_partial import errors
from tff_partial import processes
from tff_partial import runtimes
from tff_partial.analysis import run_folders
from tff_partial.dp import privacy_audit
from tff_partial.runtimes import errors as runtime_errors
from tff_partial.runtimes.native import NativeRuntimeError
from tff_partial.training import checkpoints
from tff_partial.training import metrics_log
from tff_partial.training import programs
import tff_partial_programs

FLAGS = flags.FLAGS
FLAGS_FILE = run_folders.FLAGS_FILE
RESULT_FILE = run_folders.RESULT_FILE

_LARGEST_INTEGER = 2**31
_JIT: dict[str, Any] = {'auto': 'auto', 'true': True, 'false': False}


class RunFlags:
  """All flags of a run; see `run_flags`.

  Attributes:
    tasks: Name of each task to its flags.
    names: The names of all flags.
    groups: The same names by what they are for.
  """

  def __init__(self) -> None:
    """Defines the flags of the run, of every task and of every algorithm."""
    self.groups: dict[str, list[str]] = {}
    with self._grouped('Task emnist'):
      self.tasks: dict[str, Any] = {'emnist': emnist_flags.EmnistFlags()}
    with self._grouped('Task movielens'):
      self.tasks['movielens'] = flag_groups.MovieLensFlags()
    with self._grouped('Tasks mnist_preference and speech_preference'):
      self.tasks.update(preference_flags.preference_tasks())
    with self._grouped('Tasks subreddit and sticker'):
      self.tasks.update(subreddit_flags.document_tasks())
    with self._grouped('The run'):
      flags.DEFINE_enum(
        'task', 'movielens', sorted(self.tasks), 'What to learn.'
      )
      flags.DEFINE_enum(
        'algorithm', 'fed_recon', algorithms.names(), 'How to learn it.'
      )
      flag_groups.RunFlags()
    with self._grouped('Data'):
      flag_groups.DataFlags()
    with self._grouped('Training'):
      self._training = TrainingFlags()
    self.names = sorted(name for part in self.groups.values() for name in part)
    for name in self.names:
      is_float = FLAGS[name].flag_type() == 'float'
      if is_float and name not in privacy_flags.MAY_BE_INFINITE:
        flags.register_validator(
          name,
          lambda value: value is None or math.isfinite(value),
          'must be a finite number.',
        )
      if FLAGS[name].flag_type() == 'int':
        flags.register_validator(
          name,
          lambda value: value is None or abs(value) < _LARGEST_INTEGER,
          f'must be below {_LARGEST_INTEGER}.',
        )

  @contextlib.contextmanager
  def _grouped(self, title: str) -> Iterator[None]:
    """Notes the flags that are defined meanwhile under a title."""
    before = set(FLAGS)
    yield
    for name in sorted(set(FLAGS) - before):
      module = FLAGS.find_module_defining_flag(name)
      self.groups.setdefault(_TITLES.get(module, title), []).append(name)

  def help_groups(self, program: str) -> dict[str, list[str]]:
    """Returns the flags that the help of a program names under titles.

    All of them are shown once, for `train`.
    """
    if program == 'train':
      first = {title: self.groups[title] for title in ('The run', 'Data')}
      return {**first, **self.groups}
    title = 'All flags of train, see tff-partial train --help, such as'
    return {title: ['output_dir']}

  def task(self) -> tasks_lib.Task:
    """Loads the task's data, once it is said what TensorFlow's threads are for.

    Whoever trains with everybody's examples is alone, and uses all cores.
    """
    is_central = algorithms.ALGORITHMS[FLAGS.algorithm].is_central
    if FLAGS.runtime == 'cohort' and not is_central:
      runtimes.cores_for_clients()
    self._training.privacy.check()
    return self.tasks[FLAGS.task].get()

  def trainable(
    self,
    task: tasks_lib.Task,
    canaries: privacy_audit.Canaries | None = None,
  ) -> algorithms.Trainable:
    """Builds the algorithm on the task's model.

    Args:
      task: The task.
      canaries: Clients that are to hide among those of the task.
    """
    return algorithms.Trainable(
      algorithms.ALGORITHMS[FLAGS.algorithm],
      task,
      self._training.with_canaries(canaries),
    )

  def values(self) -> dict[str, Any]:
    """The values of all flags of a run."""
    return {name: FLAGS[name].value for name in self.names}


# Flags of these modules are for something of their own.
_TITLES = {
  fed_embed_flags.__name__: 'Algorithms fed_embed_*',
  privacy_flags.__name__: 'Privacy',
}


@functools.cache
def run_flags() -> RunFlags:
  """Returns the flags of a run, which are defined once in a process."""
  return RunFlags()


def flag_from(arguments: Sequence[str], name: str) -> str | None:
  """Finds a flag's value on a command line that is not parsed yet."""
  for place, argument in enumerate(arguments):
    for prefix in (f'--{name}', f'-{name}'):
      if argument.startswith(f'{prefix}='):
        return argument.split('=', 1)[1]
      if argument == prefix and place + 1 < len(arguments):
        return arguments[place + 1]
  return None


def run_main(
  main: Callable[[], int | None],
  complete: Callable[[Sequence[str]], list[str]] = list,
) -> None:
  """Runs a binary's main function; errors for users end in one paragraph.

  The exit status is 1 for an error.

  Args:
    main: Does the work; the flags are parsed.
    complete: Completes the command line before it is parsed.
  """

  def guarded(work: Callable[[], int | None]) -> int | None:
    try:
      return work()
    except _FOR_USERS as error:
      message = str(error)
    except BrokenPipeError:
      # Nobody reads what is printed. Python would complain when it ends.
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

  def parsed(arguments: Sequence[str]) -> int | None:
    if len(arguments) > 1:
      print(
        f'error: unknown arguments {list(arguments[1:])}; flags begin with --.',
        file=sys.stderr,
      )
      return 1
    return guarded(main)

  def start() -> int | None:
    if tff_partial_programs.asks_for_help(sys.argv[1:]):
      sys.stdout.write(help_of(sys.modules[main.__module__]))
      return None
    app.run(parsed, complete(sys.argv))
    return None

  before = signal.signal(signal.SIGTERM, _terminate)
  try:
    sys.exit(guarded(start))
  finally:
    signal.signal(signal.SIGTERM, before)


def help_of(module: types.ModuleType) -> str:
  """What `--help` says of a program.

  Args:
    module: The program; if it has the flags of a run, `_RUN` are those.
  """
  groups = getattr(module, '_RUN', None)
  return help_texts.of_program(
    module,
    {}
    if groups is None
    else groups.help_groups(pathlib.Path(str(module.__file__)).stem),
  )


class _Terminated(SystemExit):
  """The process was asked to end: what holds resources must let go of them."""


def _terminate(number: int, frame: Any) -> None:
  raise _Terminated(128 + number)


def _say_interrupted(number: signal.Signals) -> int:
  """Says how to go on, and returns the exit status that shells expect."""
  print(
    f'error: Ended by {number.name}. Run the same command again to go on from '
    'the last checkpoint.',
    file=sys.stderr,
  )
  return 128 + number


# What is raised to be read; the runtimes name what became of the flags.
_FOR_USERS = (
  errors.UserError,
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


def shows_progress() -> bool:
  """Whether a bar is shown: as `--progress` says, or if somebody looks."""
  return bool(sys.stderr.isatty() if FLAGS.progress is None else FLAGS.progress)


def quiet_libraries() -> None:
  """Keeps what libraries say about themselves out of a run's output."""
  python_logging.getLogger('tensorflow').setLevel(python_logging.ERROR)
  if not FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)


@contextlib.contextmanager
def runtime(choices: Mapping[str, bool] | None = None) -> Any:
  """Within the context, computations run as `--runtime` and `--jit` say.

  Args:
    choices: What `--jit=auto` chose in an earlier process, to choose it again.
  """
  if FLAGS.runtime == 'native':
    if FLAGS.jit == 'true':
      raise OptionError(
        '--jit=true: the native runtime does not compile rounds. Leave the '
        'flag out, or use --runtime=cohort.'
      )
    context: Any = runtimes.native()
  else:
    context = runtimes.cohort(jit=_JIT[FLAGS.jit], choices=choices)
  with context:
    yield context


# Without these, a result says too little to go on with.
_RESULT_FIELDS = frozenset(
  ('rounds', 'diverged', 'train', 'validation', 'test', 'best')
)
# Of flags that differ from those of a run, a message names so many.
_MOST_NAMED = 10
# The suffix of a file that is not written to its end.
_UNFINISHED = '.tmp'


class Folder:
  """The output folder of a run."""

  def __init__(self, path: str):
    """Takes a folder that exists or not."""
    self.path = pathlib.Path(path)
    self._lock: weakref.finalize | None = None

  @property
  def flags_file(self) -> pathlib.Path:
    """The file of the run's flags."""
    return self.path / FLAGS_FILE

  def claim(self, values: Mapping[str, Any]) -> None:
    """Makes the folder and writes the flags, or compares them with those there.

    The folder is this process's alone, for as long as this object lives.

    Raises:
      OptionError: If the folder holds a run with other flags, or something
        that is no run.
      CheckpointError: If another process is training there.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    if self._lock is None:
      self._lock = weakref.finalize(
        self, os.close, checkpoints.locked(self.path)
      )
    if self.flags_file.exists():
      if self._has_begun():
        self._compare(values)
    elif others := sorted(
      path.name for path in self.path.iterdir() if path.suffix != _UNFINISHED
    ):
      raise OptionError(
        f'--output_dir={self.path}: the folder holds {others[0]!r} but no '
        f'{FLAGS_FILE}, so it is not the folder of a run. Choose another one.'
      )
    write_whole(
      self.flags_file,
      ''.join(_flag_line(name, value) for name, value in values.items()),
    )

  def _has_begun(self) -> bool:
    """Whether there is anything that other flags could spoil."""
    table = self.path / metrics_log.METRICS_FILE
    saved = self.path / programs.CHECKPOINTS_FOLDER
    return (
      (self.path / RESULT_FILE).exists()
      or (saved.is_dir() and any(saved.iterdir()))
      or (table.exists() and table.read_bytes().count(b'\n') > 1)
    )

  def _compare(self, values: Mapping[str, Any]) -> None:
    before = run_folders.read_flag_lines(self.flags_file)
    now = {
      name: _flag_line(name, value).strip() for name, value in values.items()
    }
    free = set(flag_groups.FREE_FLAGS)
    if values['target_epsilon'] is not None:
      # More rounds would need more noise, from the first one on.
      free.remove('rounds')
    differing = [
      name
      for name in sorted(set(before) | set(now))
      if name not in free and before.get(name) != now.get(name)
    ]
    if differing:
      # A damaged file can hold anything.
      details = '; '.join(
        f'{before.get(name, f"no {name:.80}"):.80} there, '
        f'{now.get(name, f"no {name:.80}"):.80} now'
        for name in differing[:_MOST_NAMED]
      )
      if len(differing) > _MOST_NAMED:
        details += f'; and {len(differing) - _MOST_NAMED} more'
      raise OptionError(
        f'--output_dir={self.path}: the folder holds a run with other flags: '
        f'{details}. Give the same flags to go on with it, or choose another '
        'folder.'
      )

  def write_result(self, result: Mapping[str, Any]) -> None:
    """Writes `result.json`, whole or not at all."""
    text = json.dumps(result, indent=2, allow_nan=False)
    write_whole(self.path / RESULT_FILE, text + '\n')

  def read_result(self) -> dict[str, Any] | None:
    """Reads `result.json` if it is there.

    Raises:
      OptionError: If it is not what `write_result` wrote.
    """
    path = self.path / RESULT_FILE
    if not path.exists():
      return None
    line = 1
    try:
      result = json.loads(path.read_text(errors='replace'))
      problem = 'it is not the result of a run'
    except json.JSONDecodeError as error:
      result, line, problem = None, error.lineno, f'not JSON ({error.msg})'
    except (ValueError, RecursionError):
      result, problem = None, 'no reader of JSON takes its numbers or lists'
    if not _is_result(result):
      raise OptionError(
        f'{path}, line {line}: {problem}. Delete this file and run the '
        'training command again, which writes it anew.'
      )
    return result


def _is_result(value: Any) -> bool:
  """Whether a value of JSON has all that is shown of a result."""
  if not isinstance(value, dict) or _RESULT_FIELDS - set(value):
    return False
  try:
    tests = value['test']
    shown = {name for metrics in tests.values() for name in metrics}
    shown = {n for n in shown if n != 'per_client' and not n.startswith('num_')}
    for metrics in (
      value['validation'],
      *tests.values(),
      *(value['best']['test'][name] for name in tests),
    ):
      for name in shown:
        float(metrics[name])
    if value['train']:  # A private run does not say.
      for name in ('num_not_finite', 'num_clients'):
        int(value['train'][name])
      float(value['train']['loss'])
    best = value['best']['round']
    return (
      bool(tests)
      and isinstance(value['diverged'], bool)
      and isinstance(value['rounds'], int)
      and (best is None or isinstance(best, int))
      and isinstance(value.get('privacy'), (dict, type(None)))
    )
  except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
    return False


def _flag_line(name: str, value: Any) -> str:
  """A flag as a line of a flagfile; unset ones leave a comment."""
  if value is None:
    return f'# {name} is not set\n'
  if isinstance(value, bool):
    return f'--{name}={str(value).lower()}\n'
  return f'--{name}={value}\n'


def write_whole(path: pathlib.Path, text: str) -> None:
  """Replaces a file so that a kill leaves the old one or the new one."""
  temporary = path.with_name(f'{path.name}{_UNFINISHED}')
  try:
    temporary.write_text(text)
    os.replace(temporary, path)
  except OSError as error:
    with contextlib.suppress(OSError):
      temporary.unlink()
    # An error of writing, other than one of opening, knows no name.
    raise OSError(error.errno, error.strerror, str(path)) from error


def communication(process: processes.PartialProcess) -> dict[str, int]:
  """Bytes that a client loads and sends in a round at most, uncompressed.

  A client whose examples look up few rows of a table may send these alone;
  tables are counted whole.

  Args:
    process: The process; what is not sent is not counted.
  """
  weights_type = process.get_model_weights.type_signature.result
  return {
    'download_bytes': _num_bytes(weights_type),
    'upload_bytes': sum(
      _num_bytes(weights_type.trainable[tier]) for tier in process.sent
    ),
  }


def _num_bytes(type_spec: tff.Type) -> int:
  if isinstance(type_spec, tff.TensorType):
    items = 1
    for dimension in type_spec.shape or ():
      items *= dimension
    return int(items * type_spec.dtype.type().itemsize)
  return sum(_num_bytes(part) for part in type_spec)


def peak_memory_mb() -> float:
  """The most memory that this process and its living children have held."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  for child in psutil.Process().children(recursive=True):
    with contextlib.suppress(OSError, psutil.Error, StopIteration):
      status = pathlib.Path(f'/proc/{child.pid}/status').read_text()
      line = next(x for x in status.splitlines() if x.startswith('VmHWM'))
      peak += int(line.split()[1]) / 1024
  return round(peak, 1)


def finite(value: Any) -> Any:
  """JSON knows no infinity: such numbers become texts."""
  if isinstance(value, Mapping):
    return collections.OrderedDict((k, finite(v)) for k, v in value.items())
  if isinstance(value, float) and value - value != 0.0:
    return str(value)
  return value
