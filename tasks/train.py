"""Trains a task with an algorithm; run it again to resume a killed run.

  tff-partial train --recipe=demo
  tff-partial train --recipe=movielens_fed_recon --data_dir=DIR --output_dir=OUT

`--dry_run` prints what the run would do and cost. Options that have no flag
of their own are set by `--set=NAME=VALUE`; --helpfull lists them.
"""

import pathlib
import sys

from tasks.errors import OptionError
from tasks.experiment.command_line import arguments
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import DryRun
from tasks.experiment.options.loop import Output


def main(config: Config, output: Output, plan: DryRun) -> None:
  if not (plan.dry_run or output.output_dir):
    raise OptionError('--output_dir: name a folder for what the run writes.')
  print(_announced(config, output, plan), flush=True)
  arguments.warn_without_effect(config, sys.argv)
  # Slow, since they import TensorFlow.
  from tasks import ratings_outputs
  from tasks.experiment.runs import dry_run
  from tasks.experiment.runs import running

  if plan.dry_run:
    for line in dry_run.describe(config, output):
      print(line, flush=True)
    return
  result = running.run(config, output)
  folder = pathlib.Path(str(output.output_dir))
  if result.trained is None:
    print(f'{folder} holds this run already; delete it to train again.')
  print(result)
  if result.trained is not None:
    if result.trained.ended_by:
      rounds, ended_by = result.trained.rounds, result.trained.ended_by
      print(f'Ended after round {rounds} by {ended_by}.')
    print(f'Written to {folder}.')
  result.check()
  ratings_outputs.write(config, output)


def _announced(config: Config, output: Output, plan: DryRun) -> str:
  """Return a sentence that says what the program is about to do."""
  loop, privacy = config.loop, config.privacy
  invented = ', invented data' if config.data.is_synthetic else ''
  private = ''
  if privacy.target_epsilon is not None:
    private = f'epsilon {privacy.target_epsilon:g} at delta {privacy.delta:g}'
  elif privacy.noise_multiplier is not None:
    private = f'noise multiplier {privacy.noise_multiplier:g}'
  of_whom = f'{loop.clients_per_round or "all"} clients'
  if config.how.is_central:
    of_whom = 'one client with all examples'
  return (
    f'{config.task.name} by {config.algorithm}{invented}: {loop.rounds} rounds '
    f'of {of_whom}, measured every {loop.evaluate_every}; '
    + (f'private, {private}; ' if private else '')
    + (
      'a plan alone, nothing is written.'
      if plan.dry_run
      else f'into {output.output_dir}, {output.state}.'
    )
  )


PROGRAM = Program(main, (Config(), Output(), DryRun()))

if __name__ == '__main__':
  PROGRAM.run()
