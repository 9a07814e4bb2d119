"""The folder that a run writes to, and the checks before resuming there."""

import argparse
import collections
from collections.abc import Iterator, Mapping, Sequence, Set
import hashlib
import json
import os
import pathlib
from typing import Any
import weakref

from absl import logging

from tasks.errors import OptionError
from tasks.experiment.command_line import flags
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.options import SET
import tff_partial
from tff_partial.training import files

FLAGS_FILE, RESULT_FILE = 'flags.txt', 'result.json'
# What the run released with noise before its first round.
RELEASED_FILE = 'released.json'

# The most differing flags that a message names.
_MOST_NAMED = 10


class Folder:
  """The output folder of a run."""

  def __init__(self, path: str):
    """Take the path of a folder, which need not exist."""
    self.path = pathlib.Path(path)
    self._lock: weakref.finalize | None = None

  @property
  def flags_file(self) -> pathlib.Path:
    return self.path / FLAGS_FILE

  def take(self) -> None:
    """Make the folder, and keep other processes from training there.

    The folder stays locked as long as this object lives.

    Raises:
      RunError: If another process is training there.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    if self._lock is None:
      self._lock = weakref.finalize(self, os.close, files.locked(self.path))

  def claim(self, values: Mapping[str, Any], may_change: Set[str]) -> None:
    """Lock the folder, compare the flags with those there, and write them.

    Raises:
      OptionError: If the folder holds a run with other flags, or files that do
        not belong to a run.
      RunError: If another process is training there.
    """
    self.take()
    self.check(values, may_change)
    files.write_whole(
      self.flags_file,
      ''.join(_flag_line(name, value) for name, value in values.items()),
    )

  def check(self, values: Mapping[str, Any], may_change: Set[str]) -> None:
    """Refuse a folder in which a run cannot start or resume; write nothing.

    Args:
      values: The values of the run's flags, by name.
      may_change: The flags that may differ from those there.
    """
    if not self.path.exists():
      return
    if self.flags_file.exists():
      if self.has_begun:
        self._compare(values, may_change)
    elif others := sorted(
      path.name
      for path in self.path.iterdir()
      if path.suffix != files.UNFINISHED
    ):
      raise OptionError(
        f'--output_dir={self.path}: the folder holds {others[0]!r} but no '
        f'{FLAGS_FILE}, so it is not the folder of a run. Choose another one.'
      )

  @property
  def has_begun(self) -> bool:
    """True if the folder holds anything that other flags would make wrong."""
    training = tff_partial.training
    table = self.path / files.METRICS_FILE
    saved = self.path / training.programs.CHECKPOINTS_FOLDER
    return (
      (self.path / RESULT_FILE).exists()
      or (saved.is_dir() and any(saved.iterdir()))
      or (table.exists() and table.read_bytes().count(b'\n') > 1)
    )

  def _compare(self, values: Mapping[str, Any], may_change: Set[str]) -> None:
    before = tff_partial.analysis.run_folders.read_flag_lines(self.flags_file)
    now = {
      name: _flag_line(name, value).strip() for name, value in values.items()
    }
    names = sorted({*before, *now} - may_change)
    # A flag that was not known there was not set there.
    unset = {name: _flag_line(name, None).strip() for name in names}
    before, now = {**unset, **before}, {**unset, **now}
    differing = [name for name in names if before[name] != now[name]]
    if differing:
      # A damaged file can hold anything.
      details = '; '.join(
        f'{before[name].removeprefix("# "):.80} there, '
        f'{now[name].removeprefix("# "):.80} now'
        for name in differing[:_MOST_NAMED]
      )
      if len(differing) > _MOST_NAMED:
        details += f'; and {len(differing) - _MOST_NAMED} more'
      raise OptionError(
        f'--output_dir={self.path}: the folder holds a run with other flags: '
        f'{details}. Give the same flags to go on with it, or choose another '
        'folder.'
      )

  def keep_released(self, released: Mapping[str, Any]) -> None:
    """Save what was released before the first round, readable by its owner.

    Args:
      released: A value that JSON can represent.
    """
    described = {'sha256': _sha256(released), 'released': released}
    files.write_whole(
      self.path / RELEASED_FILE, json.dumps(described) + '\n', is_secret=True
    )

  def read_released(self) -> dict[str, Any] | None:
    """Read what `keep_released` wrote; return None if it wrote nothing.

    Raises:
      OptionError: If the file is damaged.
    """
    path = self.path / RELEASED_FILE
    try:
      described = json.loads(path.read_text(encoding='utf-8'))
      released = described['released']
      if described['sha256'] == _sha256(released):
        return dict(released)
    except FileNotFoundError:
      return None
    except (KeyError, RecursionError, TypeError, ValueError):
      pass
    raise OptionError(
      f'{path}: the file is damaged. It holds what the run released with noise '
      'before its first round, which cannot be drawn again. Bring it back from '
      'a copy, or train again in another folder.'
    )

  def write_result(self, result: Mapping[str, Any]) -> None:
    """Write `result.json`, whole or not at all."""
    text = json.dumps(result, indent=2, allow_nan=False)
    files.write_whole(self.path / RESULT_FILE, text + '\n')

  def read_result(self) -> dict[str, Any] | None:
    """Read `result.json` if it is there.

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
        'training command again, which writes it again.'
      )
    return result

  @property
  def has_diverged(self) -> bool:
    """True if the folder holds the result of a run that diverged."""
    try:
      result = self.read_result()
    except OptionError:
      return False
    return bool(result and result['diverged'])


def _is_result(value: Any) -> bool:
  """Return True if a JSON value has all fields of a result that are shown."""
  try:
    tests = value['test']
    shown = {name for metrics in tests.values() for name in metrics}
    shown = {n for n in shown if n != 'per_client' and not n.startswith('num_')}
    for metrics in (
      *tests.values(),
      *(value['best']['test'][name] for name in tests),
    ):
      for name in shown:
        float(metrics[name])
    validation = value['validation']
    # Validation does not have all metrics of the tests.
    for name in {'loss'} | (shown & set(validation)):
      float(validation[name])
    if value['train']:  # Empty in a private run.
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
  """Return a flag as a line of a flagfile: a comment if it is not set."""
  if value is None:
    return f'# {name} is not set\n'
  if isinstance(value, bool):
    value = str(value).lower()
  return f'{flags.argument(name, value)}\n'


def _sha256(value: Any) -> str:
  text = json.dumps(value, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def finite(value: Any) -> Any:
  """Replace infinities and NaNs by strings, since JSON has neither."""
  if isinstance(value, Mapping):
    return collections.OrderedDict((k, finite(v)) for k, v in value.items())
  if isinstance(value, float) and value - value != 0.0:
    return str(value)
  return value


def with_flags_of_the_run(arguments: Sequence[str]) -> list[str]:
  """Put the flags of a trained run before those of the command line.

  The folder may come from another author. So flags that say what to import,
  where to write and which cluster to join are not taken from it, and flags that
  a run does not have are refused.

  Args:
    arguments: The command line, with the program's name first.

  Raises:
    OptionError: If no run is named or found, or its flagfile is not valid.
  """
  names = {a.lstrip('-').partition('=')[0] for a in arguments if a[:1] == '-'}
  if names & _HELP:
    return list(arguments)
  parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  parser.add_argument('--output_dir', '-output_dir', nargs='?')
  given = parser.parse_known_args(arguments[1:])[0].output_dir
  if given is None:
    raise OptionError('--output_dir: name the folder of a trained run.')
  folder = Folder(given)
  if not folder.flags_file.exists():
    raise OptionError(
      f'--output_dir={given}: there is no run here, since there is no '
      f'{FLAGS_FILE}. Train one with `tff-partial train`.'
    )
  return [arguments[0], *_kept_flags(folder.flags_file), *arguments[1:]]


# Flags of absl that show the help.
_HELP = frozenset(('?', 'help', 'helpfull', 'helpshort', 'helpxml'))
# Flags that programs do not take from a run's folder, besides `Output`'s.
_PLACES = ('ray_address', 'ray_folder')


def _kept_flags(path: pathlib.Path) -> Iterator[str]:
  """Yield the flags of a run that decide its numbers."""
  known = {choice.flag for choice in flags.all_choices(Config())}
  left_out = {*Output().flags(), *_PLACES}
  text = path.read_text(encoding='utf-8', errors='replace')
  for number, line in enumerate(text.splitlines(), 1):
    line = line.strip()
    if not line or line.startswith('#'):
      continue
    name = line.removeprefix(f'--{SET}=').removeprefix('--').partition('=')[0]
    if name in left_out:
      if name in _PLACES:
        logging.warning(
          '%s, line %d: %s is not taken from a folder. Give it to this '
          'program, if you trust it.',
          path,
          number,
          line,
        )
    elif line.startswith('--') and name in known:
      yield line
    else:
      raise OptionError(
        f'{path}, line {number}: {line:.80} is no flag of a run. Bring the '
        'file back from a copy, or train in another folder.'
      )
