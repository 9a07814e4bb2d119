"""Measures new users against the number of examples that they have given.

`tff-partial new_users --output_dir=OUT --support=0,1,2,5,10` has users who
took no part in training personalise on their first examples, for each of these
numbers, and measures them on what comes after the largest (or after `--after`).
It writes OUT/new_users.csv, and OUT/new_users.png with the metric that chooses
the best round. If the task has predictors that know only the labels of the same
examples, their values are shown, too.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import with_flags_of_the_run
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial import analysis
from tff_partial.training import files

if TYPE_CHECKING:
  from tasks.task import EvaluationClients
  from tff_partial.data import splits
  from tff_partial.evaluation import Evaluation

_FILE, _PICTURE = 'new_users.csv', 'new_users.png'
_WHO, _SUPPORT = 'who', 'support'
_SIZE = re.compile('[0-9]{1,9}')
# The field of a task's options, and its flag.
_HELD_OUT = {
  'protocol': '--protocol=unseen',
  'held_out_share': '--held_out_share=0.2',
}


@dataclasses.dataclass(frozen=True)
class Support(Options):
  """Options of how many examples new users give."""

  support: tuple[str, ...] = option(
    ('0', '1', '2', '5', '10'), 'Numbers of examples that a new user has given.'
  )
  after: int | None = option(
    None,
    'Measure on the examples after this many; by default the largest number of '
    '--support. Users who have no more are left out.',
    at_least=0,
  )


def _sizes(asked: Support) -> list[int]:
  """Return the numbers of `--support` in ascending order."""
  if not asked.support or not all(map(_SIZE.fullmatch, asked.support)):
    raise OptionError(
      f'--support={",".join(asked.support):.80}: expected numbers from 0, such '
      'as 0,1,10.'
    )
  sizes = sorted({int(text) for text in asked.support})
  if asked.after is not None and sizes[-1] > asked.after:
    raise OptionError(
      f'--after={asked.after}: --support has {sizes[-1]} examples, which would '
      'be both learned from and measured.'
    )
  return sizes


def _advice(task: Options) -> str:
  """Return what holds users out, among a task's options."""
  for name, flag in _HELD_OUT.items():
    if hasattr(task, name):
      return f'Train with {flag}.'
  return 'No option of its task holds users out.'


def main(config: Config, output: Output, asked: Support) -> None:
  import pandas as pd

  from tasks.experiment.runs.running import reopened

  sizes = _sizes(asked)
  after = sizes[-1] if asked.after is None else asked.after
  path = pathlib.Path(str(output.output_dir))
  files.refuse_read_only(path)
  rows = []
  with reopened(config, output.output_dir) as (task, trainable, saved):
    new = {name: who for name, who in task.tests.items() if not who.seen}
    if not new:
      raise OptionError(
        f'--output_dir={output.output_dir}: all users of this run took part in '
        f'training. {_advice(config.task)}'
      )
    for name, who in new.items():

      def build(split: splits.Split, of: EvaluationClients = who) -> Evaluation:
        return trainable.evaluation(dataclasses.replace(of, split=split))

      spec = build(tff_partial.splits.first(sizes[-1], after)).example_spec
      measured = tff_partial.measure_by_support(
        build,
        saved.best_weights,
        task.clients(who.part, spec),
        sizes,
        query_from=after,
        seed=config.seed,
        server_state=saved.best_server_state,
      )
      if not any(map(tff_partial.evaluation.num_measured, measured.values())):
        raise OptionError(
          f'--after={after}: of the users {name!r} none has so many examples '
          'and one to be measured on. Give a smaller number.'
        )
      for size, metrics in measured.items():
        pooled = {k: v for k, v in metrics.items() if k != 'per_client'}
        rows.append({_WHO: name, _SUPPORT: size, **pooled})
  metric = task.selection_metric
  for size in sizes:
    for predictor, found in task.from_labels_alone(size, after).items():
      rows += [
        {_WHO: f'{name}, {predictor}', _SUPPORT: size, metric: found[name]}
        for name in new
        if name in found
      ]
  frame = pd.DataFrame(rows)
  print(frame.pivot(index=_WHO, columns=_SUPPORT, values=metric).to_string())
  files.write_whole(path / _FILE, frame.to_csv(index=False))
  analysis.curves.draw_over_support(
    {
      str(who): dict(zip(part[_SUPPORT], part[metric], strict=True))
      for who, part in frame.groupby(_WHO, sort=False)
    },
    path / _PICTURE,
    metric=metric,
  )
  print(f'Written to {path}: {_FILE}, {_PICTURE}.')


PROGRAM = Program(main, (Config(), Output(), Support()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
