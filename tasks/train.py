"""Trains a task with an algorithm; run it again to go on where it was killed.

  tff-partial train --recipe=demo
  tff-partial train --recipe=movielens_fed_recon --data_dir=DIR --output_dir=OUT

A recipe is a set of flags, named by task and algorithm; a wrong name lists all.
Flags given after it win, and `--flagfile=FILE` reads those of your own.
With `--dry_run` it says what that would do and cost.
"""

import pathlib

from tasks import ratings_outputs as outputs
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.run import dry_run
from tasks.experiment.run.running import run


def main(config: Config, output: Output, plan: dry_run.DryRun) -> None:
  """Trains, measures the test clients, and prints the result; or plans it."""
  if plan.dry_run:
    for line in dry_run.describe(config, output):
      print(line, flush=True)
    return
  if not output.output_dir:
    raise OptionError('--output_dir: name a folder for what the run writes.')
  result = run(config, output)
  folder = pathlib.Path(output.output_dir)
  if result.trained is None:
    print(f'{folder} holds this run already; delete it to run it anew.')
  print(result)
  if result.trained is not None:
    if result.trained.ended_by:
      rounds, ended_by = result.trained.rounds, result.trained.ended_by
      print(f'Ended after round {rounds} by {ended_by}.')
    print(f'Written to {folder}.')
  result.check()
  outputs.write(config, output)


PROGRAM = Program(main, (Config(), Output(), dry_run.DryRun()))

if __name__ == '__main__':
  PROGRAM.run()
