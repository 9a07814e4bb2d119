"""The report of a search: best trial, all trials, importance of flags."""

from collections.abc import Sequence
import math
import pathlib
from typing import Any

import pandas as pd

from tasks.experiment.run.folder import Folder
from tasks.searching import plan as plans
from tasks.searching import studies
from tasks.searching import trials as trials_lib
from tff_partial.analysis import spreadsheets

TRIALS_FILE, REPORT_FILE = 'trials.csv', 'search.md'
# The fewest finished trials from which importances are computed.
_ENOUGH = 4
_STATES = {
  'COMPLETE': 'finished',
  'PRUNED': 'ended early',
  'FAIL': 'failed',
  'RUNNING': 'unfinished',
}


def is_search(folder: pathlib.Path) -> bool:
  """Return True if a folder holds a search.

  Args:
    folder: The folder of a sweep.
  """
  return (folder / studies.JOURNAL).exists()


def frame(study: studies.Study) -> pd.DataFrame:
  """Return the trials of a search, one row each, by number.

  Args:
    study: The search.

  Returns:
    Number, state, rounds, the last measured metric, the values of the flags,
    and epsilon if there is one.
  """
  metric = study.settings['metric']
  rows = []
  for trial in study.trials():
    values = trial.intermediate_values
    last = max(values, default=0)
    state = _STATES.get(trial.state.name, trial.state.name)
    why = trial.user_attrs.get(trials_lib.WHY)
    row = {
      'trial': trial.number,
      'state': 'diverged' if why == trials_lib.DIVERGED else state,
      'rounds': last,
      metric: values.get(last, math.nan),
      **trial.params,
    }
    if trials_lib.EPSILON in trial.user_attrs:
      row['epsilon'] = trial.user_attrs[trials_lib.EPSILON]
    rows.append(row)
  return pd.DataFrame(rows)


def importances(study: studies.Study) -> dict[str, float] | str:
  """Compute how much of the metric each flag explains, by Optuna's fANOVA.

  Args:
    study: The search.

  Returns:
    Flag to a share of 1, the largest first; or why there is no result.
  """
  library = studies.optuna()
  finished = [t for t in study.trials() if t.state.name == 'COMPLETE']
  values = {trial.value for trial in finished}
  if len(finished) < _ENOUGH or len(values) < 2:
    return (
      f'{len(finished)} finished trials say nothing of what matters; it takes '
      f'{_ENOUGH} or more that differ.'
    )
  found = library.importance.get_param_importances(
    study.study,
    evaluator=library.importance.FanovaImportanceEvaluator(seed=0),
  )
  return {name: float(share) for name, share in found.items()}


def spent(study: studies.Study) -> str:
  """Describe the privacy cost of a search; '' if no run is private.

  Args:
    study: The search.
  """
  costs = [
    (attrs[trials_lib.EPSILON], attrs[trials_lib.DELTA])
    for attrs in (trial.user_attrs for trial in study.trials())
    if trials_lib.EPSILON in attrs
  ]
  return together(costs, 'trials')


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
  """Describe a search, and write `trials.csv` and `search.md`.

  Args:
    folder: The folder of the sweep.
    output: Where to write.

  Returns:
    The text.
  """
  study = studies.Study(folder)
  table = frame(study)
  lines = [*_best(folder, study), '', _markdown(table), '']
  found = importances(study)
  if isinstance(found, str):
    lines.append(found)
  else:
    metric = study.settings['metric']
    lines += [f'Share of the differences in {metric} that each flag explains:']
    lines += ['', *(f'- {name}: {share:.2f}' for name, share in found.items())]
  cost = spent(study)
  lines += ['', cost] if cost else []
  text = '\n'.join(lines)
  output.mkdir(parents=True, exist_ok=True)
  spreadsheets.escaped_frame(table).to_csv(output / TRIALS_FILE, index=False)
  (output / REPORT_FILE).write_text(text + '\n', encoding='utf-8')
  return text


def _best(folder: pathlib.Path, study: studies.Study) -> list[str]:
  """Describe the best trial, with its flags to copy."""
  finished = [t for t in study.trials() if t.state.name == 'COMPLETE']
  settings = study.settings
  metric = settings['metric']
  if not finished:
    return ['No trial is finished yet.']
  sign = 1.0 if settings['direction'] == plans.MINIMIZE else -1.0
  best = min(finished, key=lambda t: (sign * t.value, t.number))
  path = trials_lib.trial_folder(folder, best.number)
  lines = [
    f'The best of {len(study.trials())} trials is {best.number}, with a '
    f'validation {metric} of {best.value:.4g}:',
    '',
    '  ' + ' '.join(f'--{n}={v}' for n, v in best.params.items()),
    '',
    f'It is in {path}.',
  ]
  result = Folder(str(path)).read_result()
  if result is not None:
    lines += [
      f'Its test clients ({name}): {_numbers(measured)}.'
      for name, measured in result['test'].items()
    ]
  return lines


def _numbers(measured: dict[str, Any]) -> str:
  return ', '.join(
    f'{name} {float(value):.4g}'
    for name, value in measured.items()
    if name != 'per_client' and not name.startswith('num_')
  )


def _markdown(table: pd.DataFrame) -> str:
  """Format the trials as a Markdown table."""
  names = list(table.columns)
  lines = ['| ' + ' | '.join(names) + ' |', '|' + '---|' * len(names)]
  for row in table.to_dict('records'):
    cells = (_cell(row[name]) for name in names)
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def _cell(value: Any) -> str:
  if isinstance(value, float):
    return '-' if math.isnan(value) else f'{value:.4g}'
  return str(value)
