"""Folders of runs: flags, result, and table of rounds."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import dataclasses
import io
import json
import os
import pathlib
from typing import Any

import pandas as pd

from tff_partial.analysis.errors import AnalysisError
from tff_partial.training import files

FLAGS_FILE = 'flags.txt'
# Before the name and value of an option that has no flag of its own.
_SET = '--set='
RESULT_FILE = 'result.json'
# In the folder of a sweep: lines of the folder of a run that failed, a tab, and
# the reason.
FAILED_FILE = 'failed.txt'
# There, too: a line for each run of the sweep, with the name of its folder.
PLANNED_FILE = 'planned.txt'

# States of a run. Only runs that are done count in means.
DONE, DIVERGED, UNFINISHED = 'done', 'diverged', 'unfinished'
FAILED = 'failed'
LOST = (DIVERGED, UNFINISHED, FAILED)

# Parts of a result that may be missing.
_PARTS = ('best', 'communication', 'data', 'privacy')

# How to get a table back, which checkpoints hold, too.
_WRITTEN_AGAIN = (
  f'For a lost one, delete {RESULT_FILE} beside it, and run the training '
  'command again: it writes both.'
)

# The name of a run's folder, for use like a flag that distinguishes runs.
FOLDER = 'folder'
# Flags that do not distinguish runs: seeds and divisions of the data make
# repetitions, and the others change no result.
_SEED, _DIVISION = _REPETITIONS = 'seed', 'user_model_repeat'
_OUTPUTS = {'output_dir', 'progress', 'projector', 'tensorboard'}
_SILENT = {*_REPETITIONS, *_OUTPUTS, 'data_dir', 'download'}
# Flags whose values need no name in a label.
_SELF_EXPLAINING = (FOLDER, 'task', 'algorithm')


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """One run of a program, done or not.

  Attributes:
    folder: Its output folder.
    name: The folder's path below the one that was searched.
    flags: The flags that were set, by name.
    result: Its result, or None if it has none. A run that was asked for more
      rounds has its former result until it ends.
    failure: Why it failed in a sweep; None if it did not.
    damage: What is wrong with a result that was cut off, if it was.
  """

  folder: pathlib.Path
  name: str
  flags: Mapping[str, str]
  result: Mapping[str, Any] | None
  failure: str | None = None
  damage: str | None = None

  @property
  def state(self) -> str:
    """The state of the run: DONE, or one of LOST."""
    result = self.result
    if result is not None and result.get('diverged'):
      return DIVERGED
    if result is None or self._goes_on(result):
      return UNFINISHED if self.failure is None else FAILED
    return DONE

  def _goes_on(self, result: Mapping[str, Any]) -> bool:
    """Return True if a result is of fewer rounds than the flags now ask for."""
    rounds, asked = result.get('rounds'), self.flags.get('rounds', '')
    # Runs of older versions do not say whether they ended early.
    return (
      isinstance(rounds, int)
      and asked.isdecimal()
      and rounds < int(asked)
      and not result.get('ended_by', True)
    )

  @property
  def data(self) -> str | None:
    """The name of the data that it read; None if unknown."""
    counts = (self.result or {}).get('data') or {}
    return counts.get('name', counts.get('corpus'))

  @property
  def seed(self) -> str:
    """The seed, and a division if one is set; empty if unknown."""
    seed = (self.result or {}).get(_SEED, self.flags.get(_SEED, ''))
    division = self.flags.get(_DIVISION)
    return f'{seed}, division {division}' if division else str(seed)

  def setting(self, name: str) -> str:
    """Return the value of a flag, or for FOLDER the folder without its seed."""
    if name != FOLDER:
      return self.flags.get(name, '')
    parts = [
      part
      for part in self.name.split(',')
      if part.partition('=')[0] not in _REPETITIONS
    ]
    return ','.join(parts) or self.flags.get('algorithm', self.folder.name)

  def spent(self) -> tuple[float, float] | None:
    """Return epsilon and delta of the rounds so far; None if not private."""
    found: list[Any] = [(self.result or {}).get('privacy') or {}]
    # A run with a result may be training more rounds.
    with contextlib.suppress(AnalysisError):  # Maybe there is no round yet.
      rows = self.table().filter(regex='^privacy/').iloc[-1:]
      rows.columns = rows.columns.str.removeprefix('privacy/')
      found += rows.to_dict('records')
    found = [f for f in found if 'epsilon' in f]
    costs = [(float(f['epsilon']), float(f['delta'])) for f in found]
    return max(costs, default=None)

  def table(self) -> pd.DataFrame:
    """Read the complete lines of the table of rounds; its index is the round.

    Raises:
      AnalysisError: If the file is missing or not such a table.
    """
    path = self.folder / files.METRICS_FILE
    if not path.exists():
      raise AnalysisError(
        f'{path}: there is no table of rounds. Give a folder that a run wrote '
        f'to. {_WRITTEN_AGAIN}'
      )
    text = path.read_text(encoding='utf-8', errors='replace')
    # A run in progress may have written half a line.
    text = text[: text.rfind('\n') + 1]
    try:
      frame = pd.read_csv(io.StringIO(text))
      return frame.set_index(files.ROUND)
    except (KeyError, ValueError) as error:
      raise AnalysisError(
        f'{path}: not a table with a row a round ({error}). Move it away. '
        f'{_WRITTEN_AGAIN}'
      ) from error


def read_flag_lines(path: str | os.PathLike[str]) -> dict[str, str]:
  """Return the lines of a flagfile by the names of the flags."""
  lines = {}
  text = pathlib.Path(path).read_text(encoding='utf-8', errors='replace')
  for line in text.splitlines():
    if line.startswith('--'):
      name = line.removeprefix(_SET).removeprefix('--').partition('=')[0]
      lines[name] = line
    elif line.startswith('# ') and line.endswith(' is not set'):
      lines[line.split()[1]] = line
  return lines


def find(folders: Iterable[str | os.PathLike[str]]) -> list[RunFolder]:
  """Find all runs in and below some folders, also behind links, sorted by path.

  Raises:
    AnalysisError: If a folder does not exist or holds no run, or if the result
      of a run cannot be read.
  """
  found: dict[pathlib.Path, RunFolder] = {}
  for name in folders:
    root = pathlib.Path(name)
    if not root.is_dir():
      raise AnalysisError(
        f'{root}: there is no such folder. Give one with runs in it or below.'
      )
    places = _places(root)
    if not places:
      raise AnalysisError(
        f'{root}: there is no run here or below, since there is no '
        f'{RESULT_FILE} and no {FLAGS_FILE}. Train one first.'
      )
    failures = _failures(root)
    for place in places:
      run = _read(place, root)
      run = dataclasses.replace(run, failure=failures.get(run.name))
      found.setdefault(place.resolve(), run)
  return list(found.values())


def _places(root: pathlib.Path) -> list[pathlib.Path]:
  """Return the folders with a file of a run, sorted, each once."""
  found, walked = [], set()
  for name, inner, names in os.walk(root, followlinks=True):
    inner.sort()
    if (real := os.path.realpath(name)) in walked:
      inner.clear()
    elif not {FLAGS_FILE, RESULT_FILE, files.METRICS_FILE}.isdisjoint(names):
      found.append(pathlib.Path(name))
    walked.add(real)
  return sorted(found)


def find_absent(folders: Iterable[str | os.PathLike[str]]) -> list[RunFolder]:
  """Find the runs of sweeps that failed or ended before they wrote anything."""
  found = []
  for root in map(pathlib.Path, folders):
    failures = _failures(root)
    for name in dict.fromkeys((*_lines(root / PLANNED_FILE), *failures)):
      if not (root / name / FLAGS_FILE).exists():
        found.append(RunFolder(root / name, name, {}, None, failures.get(name)))
  return found


def _failures(root: pathlib.Path) -> dict[str, str]:
  """Return the folders of runs that failed in a sweep, with the reasons."""
  lines = (line.partition('\t') for line in _lines(root / FAILED_FILE))
  return {name: why for name, _, why in lines}


def _lines(path: pathlib.Path) -> list[str]:
  """Return the lines of a file of a sweep; none if there is no such file."""
  if not path.exists():
    return []
  return path.read_text(encoding='utf-8', errors='replace').splitlines()


def _read(folder: pathlib.Path, root: pathlib.Path) -> RunFolder:
  flags_file = folder / FLAGS_FILE
  lines = read_flag_lines(flags_file) if flags_file.exists() else {}
  flags = {
    name: line.removeprefix(_SET).partition('=')[2]
    for name, line in lines.items()
    if line.startswith('--')
  }
  name = str(folder.relative_to(root)) if folder != root else ''
  path, result, damage = folder / RESULT_FILE, None, None
  if path.exists():
    try:
      result = json.loads(path.read_text(encoding='utf-8'))
      if not isinstance(result['test'], dict):
        raise ValueError('it measures no test clients')
      parts = [result.get(name) or {} for name in _PARTS]
      if not all(
        isinstance(p, dict) for p in (*result['test'].values(), *parts)
      ):
        raise ValueError('parts of it have no names')
    except json.JSONDecodeError as error:
      damage = (
        f'its {RESULT_FILE} is not JSON, {error}: delete the file and run the '
        'training command again'
      )
    except (KeyError, RecursionError, TypeError, ValueError) as error:
      raise AnalysisError(
        f'{path}: not the result of a run ({error}). Delete this file and run '
        'the training command again.'
      ) from error
  return RunFolder(folder, name, flags, result, damage=damage)


@dataclasses.dataclass(frozen=True)
class Setting:
  """Runs that differ only in their seeds.

  Attributes:
    values: The values that distinguish them from other runs, by flag name.
    runs: One run per seed.
  """

  values: Mapping[str, str]
  runs: Sequence[RunFolder]

  @property
  def label(self) -> str:
    """A short string of the values."""
    return label(self.values) or self.runs[0].setting(FOLDER)

  def ended(self, state: str) -> list[RunFolder]:
    """Return the runs with this state."""
    return [run for run in self.runs if run.state == state]


def settings(
  runs: Sequence[RunFolder], by: Sequence[str] = ()
) -> list[Setting]:
  """Group runs that differ only in their seed.

  Args:
    runs: The runs.
    by: Names of flags, or FOLDER, that distinguish settings; by default all
      flags that differ between the runs.

  Returns:
    The settings, sorted: numbers numerically and strings alphabetically.

  Raises:
    AnalysisError: If `by` would mix runs that differ otherwise, if no run has
      such a flag, or if a setting has a seed twice or runs of different data.
  """
  names = {name for run in runs for name in run.flags} - _SILENT
  differing = sorted(
    name for name in names if len({run.setting(name) for run in runs}) > 1
  )
  unknown = [n for n in by if n not in names and n != FOLDER]
  if unknown:
    raise AnalysisError(
      f'No run has a flag {unknown[0]!r} to tell runs apart by. These differ: '
      f'{", ".join(differing) or "none"}.'
    )
  chosen = list(by) or differing
  groups: dict[tuple[str, ...], list[RunFolder]] = {}
  for run in runs:
    groups.setdefault(tuple(run.setting(n) for n in chosen), []).append(run)
  for members in groups.values():
    seeds: dict[str, RunFolder] = {}
    for run in members:
      for name in differing:
        there, here = members[0].setting(name), run.setting(name)
        if there != here:
          raise AnalysisError(
            f'{members[0].folder} and {run.folder} would make one row, but '
            f'differ in {name}: {there or "unset"!r} and {here or "unset"!r}. '
            f'Tell runs apart by {name}, too.'
          )
      if None not in (of := (members[0].data, run.data)) and len(set(of)) > 1:
        raise AnalysisError(
          f'{members[0].folder} and {run.folder} would make one row, but read '
          f'different data: {of[0]} and {of[1]}. Name the data of runs by '
          '--data_set, or report them one by one.'
        )
      twin = seeds.setdefault(run.seed, run)
      if twin is not run:
        raise AnalysisError(
          f'{twin.folder} and {run.folder} are the same setting with the same '
          f'seed {run.seed or "(none)"}, which must not count twice. Move one '
          'of them away.'
        )
  return [
    Setting(dict(zip(chosen, values, strict=True)), groups[values])
    for values in sorted(groups, key=lambda values: [*map(order, values)])
  ]


def label(values: Mapping[str, str]) -> str:
  """Format the values that distinguish a setting as a short string."""
  return ', '.join(
    value if name in _SELF_EXPLAINING else f'{name}={value or "unset"}'
    for name, value in values.items()
  )


def order(value: str) -> tuple[int, float, str]:
  """Return a sort key that puts numbers, in their order, before strings."""
  try:
    return (0, float(value), value)
  except ValueError:
    return (1, 0.0, value)
