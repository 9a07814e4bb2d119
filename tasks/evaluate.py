"""Measures a trained model again, or makes the model of one user.

`tff-partial evaluate --output_dir=OUT` measures the test clients. With
`--user=42 --top_n=10` it lists the ten best items for user 42, and with
`--user=42 --save_model=42.keras` it saves that user's own Keras model. The
flags of the run are read from OUT/flags.txt; flags given here win.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs.folder import finite
from tasks.experiment.runs.folder import with_flags_of_the_run
from tasks.options import option
from tasks.options import Options
import tff_partial
from tff_partial.training import files

if TYPE_CHECKING:
  from tasks.experiment.trainable import Trainable
  from tff_partial.training import programs


@dataclasses.dataclass(frozen=True)
class Chosen(Options):
  """Options of the clients to evaluate or to serve, and of the weights."""

  weights: str = option(
    'best', 'Round whose weights are measured.', choices=('best', 'last')
  )
  part: str = option(
    tasks_lib.TEST,
    'Clients to measure: train, validation, test, or a name under `test` in '
    'result.json.',
  )
  calibrate: float | None = option(
    None,
    'Calibrate intervals of this level on the validation clients, and print '
    'their coverage of the measured clients, as `conformal`.',
    at_least=0,
    at_most=1,
  )
  user: str | None = option(
    None, "Make this user's own model instead of measuring clients."
  )
  top_n: int = option(
    10, 'How many items to recommend to the user.', at_least=1
  )
  save_model: str | None = option(
    None,
    "Save the user's model to this file, which ends in .keras, instead of "
    'recommending items.',
  )

  def __post_init__(self) -> None:
    """Refuse intervals of the clients they are fitted to, and idle options."""
    super().__post_init__()
    if self.calibrate is not None and self.part == tasks_lib.VALIDATION:
      raise OptionError(
        f'--calibrate={self.calibrate}: intervals are calibrated on the '
        'validation clients, so that they cover these in any case. Give '
        '--part=test.'
      )
    if self.user is None:
      self.refuse_set(('save_model',), 'name whose model it is by --user.')
    else:
      self.refuse_set(
        ('part', 'calibrate'), 'with --user no clients are measured.'
      )


def _whom(task: tasks_lib.Task, part: str) -> tasks_lib.EvaluationClients:
  first, *_ = task.tests.values()
  known = {
    tasks_lib.TRAIN: tasks_lib.EvaluationClients(tasks_lib.TRAIN, True),
    tasks_lib.VALIDATION: task.validation,
    tasks_lib.TEST: first,
    **task.tests,
  }
  if part not in known:
    raise OptionError(
      f'--part={part}: there is no such part, but {", ".join(known)}.'
    )
  return known[part]


def _serve_user(
  task: tasks_lib.Task,
  trainable: Trainable,
  saved: programs.Saved,
  number: int | None,
  chosen: Chosen,
  seed: int,
) -> None:
  """Make a user's own model, and save it or rank items by it."""
  user, file = str(chosen.user), chosen.save_model
  if file is None and not task.recommends:
    raise OptionError(
      f'--user={user}: the task {task.name} recommends nothing. Save the '
      "user's model with --save_model=FILE.keras, or use --task=movielens."
    )
  if file is not None and not file.endswith('.keras'):
    raise OptionError(
      f'--save_model={file}: name a file that ends in .keras, the format in '
      'which Keras saves a whole model.'
    )
  personal = trainable.personal()
  keras_model = tff_partial.personalise(
    saved,
    task.one_user(user, personal.example_spec),
    user,
    evaluation=personal,
    seed=seed,
  )
  if file is not None:
    with (
      files.writing(f'--save_model={file}'),
      files.replacing(pathlib.Path(file)) as made,
    ):
      keras_model.save(made)
    print(f'Saved the model of user {user}, of round {number}: {file}')
  else:
    found = task.recommend(keras_model, user, chosen.top_n)
    print(f'For user {user}, by the weights of round {number}:')
    for place, item in enumerate(found, 1):
      print(f'{place:4}. {item.score:.2f}  {item.title}')


def main(config: Config, output: Output, chosen: Chosen) -> None:
  """Load the weights of a run, and evaluate clients or serve one user."""
  from tasks.experiment.runs import measuring
  from tasks.experiment.runs.running import reopened
  from tff_partial.training import calibration

  with reopened(config, output.output_dir) as (task, trainable, saved):
    number = saved.best_round
    if chosen.weights == 'last':
      number = saved.rounds
      saved = dataclasses.replace(
        saved,
        best_weights=saved.last_weights,
        best_client_store=saved.client_store,
        best_server_state=trainable.process.get_server_state(saved.state),
      )
    if chosen.user is not None:
      _serve_user(task, trainable, saved, number, chosen, config.seed)
      return
    evaluation_set = trainable.evaluation_set(_whom(task, chosen.part))
    if evaluation_set.remembering and saved.best_client_store is None:
      raise OptionError(
        f'--part={chosen.part}: what these clients remember is not in '
        f'{output.output_dir}/clients. Put the folder back, or train again.'
      )
    measured: dict[str, Any] = measuring.evaluate(
      task,
      evaluation_set,
      saved.best_weights,
      config.seed,
      saved.best_client_store,
      server_state=saved.best_server_state,
    )
    if chosen.calibrate is not None:
      weights, state = saved.best_weights, saved.best_server_state
      known, of = trainable.evaluation_set(task.validation), evaluation_set
      found = calibration.calibrate(
        *(known.evaluation, known.clients, weights),
        seed=config.seed,
        server_state=state,
      )
      counts = calibration.histograms(
        of.evaluation, of.clients, weights, config.seed, state
      )
      measured['conformal'] = {
        'deviations': found.quantile(chosen.calibrate),
        **found.coverage(counts, chosen.calibrate),
      }
  measured = {'round': number, 'part': chosen.part, **finite(measured)}
  print(json.dumps(measured, indent=2))


PROGRAM = Program(main, (Config(), Output(), Chosen()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
