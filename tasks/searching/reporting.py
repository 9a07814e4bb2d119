"""The report of a search: best trial, all trials, importance of flags."""

from collections.abc import Sequence
import contextlib
import math
import pathlib
from typing import Any

import pandas as pd

from tasks.errors import OptionError
from tasks.experiment.command_line import flags
from tasks.experiment.runs.folder import Folder
from tasks.searching import plan as plans
from tasks.searching import trials
from tff_partial.analysis import run_folders
from tff_partial.analysis import spreadsheets
from tff_partial.analysis import tables
from tff_partial.analysis.errors import AnalysisError
from tff_partial.training import files

TRIALS_FILE, REPORT_FILE = 'trials.csv', 'search.md'
# The fewest finished trials from which importances are computed.
_ENOUGH = 4
_STATES = {'COMPLETE': 'finished', 'PRUNED': 'ended early'}


def frame(study: Any) -> pd.DataFrame:
  """Return the trials of a search, one row each, by number.

  Returns:
    Number, state, rounds, the last measured metric, the values of the flags,
    and epsilon if there is one.
  """
  metric = study.user_attrs[trials.SETTINGS]['metric']
  rows = []
  for trial in study.trials:
    values = trial.intermediate_values
    last = max(values, default=0)
    state = _STATES.get(trial.state.name, 'unfinished')
    if (trial.user_attrs.get(trials.WHY) or '').startswith(trials.DIVERGED):
      state = 'diverged'
    elif trials.has_failed(trial):
      state = 'failed'
    row = {
      'trial': trial.number,
      'state': state,
      'rounds': last,
      metric: values.get(last, math.nan),
      **trial.params,
    }
    if trials.EPSILON in trial.user_attrs:
      row['epsilon'] = trial.user_attrs[trials.EPSILON]
    rows.append(row)
  return pd.DataFrame(rows)


def importances(study: Any) -> list[str]:
  """Describe how much of the metric each flag explains, by Optuna's fANOVA.

  Returns:
    A line for each flag, the largest share first; or why there is no result.
  """
  library = plans.optuna()
  finished = [t.value for t in study.trials if t.state.name == 'COMPLETE']
  if len(finished) < _ENOUGH or len(set(finished)) < 2:
    return [
      f'{len(finished)} finished trials say nothing of what matters; it takes '
      f'{_ENOUGH} or more that differ.'
    ]
  shares = library.importance.get_param_importances(
    study, evaluator=library.importance.FanovaImportanceEvaluator(seed=0)
  )
  metric = study.user_attrs[trials.SETTINGS]['metric']
  lines = [f'Share of the differences in {metric} that each flag explains:', '']
  return [*lines, *(f'- {name}: {part:.2f}' for name, part in shares.items())]


def together(costs: Sequence[tuple[float, float]], runs: str) -> str:
  """Describe the total cost of private runs on the same users; '' for none.

  Args:
    costs: Epsilon and delta of each run.
    runs: The word for the runs.
  """
  if not costs:
    return ''
  epsilon, delta = (math.fsum(cost) for cost in zip(*costs, strict=True))
  return (
    f'{len(costs)} private {runs} on the same users cost epsilon {epsilon:.4g} '
    f'at delta {delta:.3g} together, by the sum of each (basic composition), '
    'and not the epsilon of the best one alone. What validation clients '
    f'measured, by which {runs} are chosen, is not private at all.'
  )


def report(folder: pathlib.Path, output: pathlib.Path) -> str:
  """Describe a search, and write `trials.csv` and `search.md`."""
  study = trials.load(folder)
  table = frame(study)
  cells = table.apply(lambda column: column.map(_cell))
  lines = [*_best(folder, study), '', tables.markdown(cells), '']
  lines += importances(study)
  spent = [_spent(folder, trial) for trial in study.trials]
  cost = together([each for each in spent if each is not None], 'trials')
  lines += ['', cost] if cost else []
  text = '\n'.join(lines)
  output.mkdir(parents=True, exist_ok=True)
  csv = spreadsheets.escaped_frame(table).to_csv(index=False)
  files.write_whole(output / TRIALS_FILE, csv)
  files.write_whole(output / REPORT_FILE, text + '\n')
  return text


def _spent(folder: pathlib.Path, trial: Any) -> tuple[float, float] | None:
  """Return what a trial spent, ended or not; None if it is not private."""
  with contextlib.suppress(AnalysisError):
    run, *_ = run_folders.find([trials.folder(folder, trial.number)])
    return run.spent()
  # Its folder is away.
  found = trial.user_attrs
  if trials.EPSILON not in found:
    return None
  return found[trials.EPSILON], found[trials.DELTA]


def _best(folder: pathlib.Path, study: Any) -> list[str]:
  """Describe the best trial, with its flags to copy."""
  try:
    best = study.best_trial
  except ValueError:
    return ['No trial is finished yet.']
  path = trials.folder(folder, best.number)
  metric = study.user_attrs[trials.SETTINGS]['metric']
  lines = [
    f'The best of {len(study.trials)} trials is {best.number}, with a '
    f'validation {metric} of {best.value:.4g}:',
    '',
    '  ' + ' '.join(flags.argument(n, v) for n, v in best.params.items()),
    '',
    f'It is in {path}.',
  ]
  try:
    result = Folder(str(path)).read_result() or {}
  except OptionError as error:
    return [*lines, '', f'WARNING: what its test clients measured: {error}']
  for name, measured in result.get('test', {}).items():
    numbers = ', '.join(
      f'{metric} {float(value):.4g}'
      for metric, value in measured.items()
      if metric != 'per_client' and not metric.startswith('num_')
    )
    lines.append(f'Its test clients ({name}): {numbers}.')
  return lines


def _cell(value: Any) -> str:
  if isinstance(value, float):
    return '-' if math.isnan(value) else f'{value:.4g}'
  return str(value)
