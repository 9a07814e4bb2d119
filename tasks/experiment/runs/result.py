"""The result of a run, and its table."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from tasks.experiment.methods import algorithms
from tasks.experiment.options import privacy as privacy_lib
from tasks.experiment.runs.folder import RESULT_FILE
from tff_partial import evaluation
from tff_partial.training import programs


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
  """The result of an experiment.

  Attributes:
    report: All measurements, in the form of `result.json`; docs/results.md and
      `str` of this object show most of them.
    trained: The weights and clients' states, of the best round and of the last;
      None if the folder held the whole run already.
  """

  report: Mapping[str, Any]
  trained: programs.TrainingResult | None = None

  def __str__(self) -> str:
    return table(self.report)

  def check(self) -> None:
    """Raise an error with advice if the run diverged."""
    if self.report['diverged']:
      raise programs.ProgramError(_advice(self.report))


def _advice(report: Mapping[str, Any]) -> str:
  train, validation = report['train'], report['validation']
  in_training = ''
  if train:  # Empty in a private run.
    lost = train['num_not_finite']
    in_training = (
      f'the training loss was {float(train["loss"]):.4g}, {lost} of '
      f'{evaluation.num_measured(train)} clients had no finite loss, and '
    )
  unread = algorithms.unread(report['algorithm'])
  can_clip = not report['privacy'] and 'clip_norm' not in unread
  return (
    f'The run diverged: at round {report["rounds"]} {in_training}the '
    f'validation loss was {float(validation["loss"]):.4g}. Try '
    f'{"--clip_norm=1, " if can_clip else ""}a smaller learning rate, or '
    'another --seed, in another --output_dir; the best round so far is in '
    f'{RESULT_FILE}.'
  )


def table(report: Mapping[str, Any]) -> str:
  """Format the pooled metrics of a result as a table, and its privacy."""
  best = report['best']
  rows = [(f'validation, round {report["rounds"]}', report['validation'])]
  for name, last in report['test'].items():
    rows += [
      (f'test ({name}), round {report["rounds"]}', last),
      (f'test ({name}), best round {best["round"] or "-"}', best['test'][name]),
    ]
  names = [
    name
    for name in rows[1][1]
    if name != 'per_client' and not name.startswith('num_')
  ]
  width = max(len(label) for label, _ in rows)
  columns = {name: max(12, len(name) + 2) for name in names}
  lines = [' ' * width + ''.join(f'{n:>{w}}' for n, w in columns.items())]
  for label, metrics in rows:
    cells = (f'{_cell(metrics.get(name)):>{w}}' for name, w in columns.items())
    lines.append(f'{label:<{width}}' + ''.join(cells))
  if report['privacy']:
    lines.append(privacy_lib.describe(report['privacy']))
  return '\n'.join(lines)


def _cell(value: Any) -> str:
  """Format a number of the table, or a string: JSON has no infinity."""
  if value is None:
    return '-'  # Not measured here.
  number = float(value)
  return f'{number:.4{"f" if abs(number) < 1e6 else "g"}}'
