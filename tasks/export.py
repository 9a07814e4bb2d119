"""Exports a trained model as files that predict on users' devices.

`tff-partial export --output_dir=OUT --to=FOLDER` writes a SavedModel and a
TFLite file of the run's best weights: they predict, and reconstruct a user's
local weights from its examples. Then it compares them with the simulation on
some test clients, and prints their sizes and their times on this machine. The
flags of the run are read from OUT/flags.txt; flags given here win.
"""

import dataclasses

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import with_flags_of_the_run
from tasks.options import option
from tasks.options import Options
from tasks.shared_options import FORMATS


@dataclasses.dataclass(frozen=True)
class Export(Options):
  """Options of what to export, and where."""

  to: str | None = option(None, 'New or empty folder to write to.')
  formats: tuple[str, ...] = option(
    FORMATS, 'Formats to write: saved_model, tflite.'
  )
  num_support: int | None = option(
    None,
    'Room for examples of a user; by default the most that a test client has.',
    at_least=1,
  )
  num_predicted: int | None = option(
    None,
    'How many examples are predicted at once; by default any number. TFLite '
    'needs a number for recurrent layers.',
    at_least=1,
  )
  weighted: bool = option(
    False,
    "Whether examples have weights when a user's local weights are rebuilt.",
  )
  compared: int = option(
    3, 'How many test clients to compare with the simulation.', at_least=1
  )


def main(config: Config, output: Output, chosen: Export) -> None:
  from tasks.experiment.runs import devices
  from tasks.experiment.runs.running import reopened

  if not chosen.to:
    raise OptionError('--to: name a new folder to write to.')
  with reopened(config, output.output_dir) as (task, trainable, saved):
    of_run = devices.served(trainable, saved)
    spec = (of_run.evaluation or of_run.model).example_spec
    clients = task.clients(tasks_lib.TEST, spec)
    num_support = chosen.num_support or devices.most_examples(clients)
    exported = devices.write(
      task,
      of_run,
      chosen.to,
      chosen.formats,
      num_support,
      config.seed,
      num_predicted=chosen.num_predicted,
      weighted=chosen.weighted,
    )
    ids = clients.client_ids[: chosen.compared]
    compared = [
      devices.simulated(of_run, exported, value)
      for value in devices.cohort(clients, ids)
    ]
    rows = {
      name: devices.measure(exported, name, compared, chosen.num_predicted)
      for name in exported.paths
    }
  print(
    f'Exported round {saved.best_round} to {exported.folder}, with room for '
    f'{num_support} support examples.\n{devices.table(rows)}\n'
    f'Median times of {devices.CALLS} calls on this machine, to predict one '
    'example and to reconstruct one\nuser; largest deviations of local weights '
    'and of predictions from the simulation, over\n'
    f'{len(compared)} test clients.'
  )
  if not exported.local:
    print('The model has no local weights: there is nothing to reconstruct.')


PROGRAM = Program(main, (Config(), Output(), Export()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
