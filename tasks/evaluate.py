"""Measures a trained model again, or makes the model of one user.

`python -m tasks.evaluate --output_dir=OUT` measures the test clients. With
`--user=42 --top_n=10` it names the ten best items for user 42, and with
`--user=42 --save_model=42.keras` it saves that user's own Keras model. The
flags of the run are read from OUT/flags.txt; flags given here win.
"""

from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from absl import flags

from tasks import algorithms
from tasks import movielens
from tasks import runs
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tff_partial.training import personal_models
from tff_partial.training import programs

FLAGS = flags.FLAGS
_RUN = runs.run_flags()

flags.DEFINE_enum(
  'weights', 'best', ['best', 'last'], 'Of which round the weights are.'
)
flags.DEFINE_string(
  'part',
  tasks_lib.TEST,
  'Whom to measure: train, validation, test, or a name under `test` in '
  'result.json.',
)
flags.DEFINE_string('user', None, 'Make the own model of this user instead.')
flags.DEFINE_integer(
  'top_n', 10, 'How many items to recommend to the user.', lower_bound=1
)
flags.DEFINE_string(
  'save_model',
  None,
  "Save the user's model to this file, which ends in .keras, instead of "
  'recommending items.',
)


def with_flags_of_the_run(arguments: Sequence[str]) -> list[str]:
  """Puts the flags of a trained run before those of the command line.

  Args:
    arguments: The command line, the program's name first.

  Raises:
    OptionError: If no run is named or found.
  """
  if any(a.lstrip('-').startswith('help') for a in arguments[1:]):
    return list(arguments)
  given = runs.flag_from(arguments, 'output_dir')
  if given is None:
    raise OptionError('--output_dir: name the folder of a trained run.')
  folder = runs.Folder(given)
  if not folder.flags_file.exists():
    raise OptionError(
      f'--output_dir={given}: there is no run here, since there is no '
      f'{runs.FLAGS_FILE}. Train one with `python -m tasks.train`.'
    )
  return [arguments[0], f'--flagfile={folder.flags_file}', *arguments[1:]]


def _examinees(task: tasks_lib.Task) -> tasks_lib.EvaluationClients:
  """Finds who is to be measured.

  Raises:
    OptionError: If there is no such part.
  """
  first, *_ = task.tests.values()
  known = {
    tasks_lib.TRAIN: tasks_lib.EvaluationClients(tasks_lib.TRAIN, True),
    tasks_lib.VALIDATION: task.validation,
    tasks_lib.TEST: first,
    **task.tests,
  }
  if FLAGS.part not in known:
    raise OptionError(
      f'--part={FLAGS.part}: there is no such part, but {", ".join(known)}.'
    )
  return known[FLAGS.part]


def _serve_user(
  task: tasks_lib.Task,
  trainable: algorithms.Trainable,
  saved: programs.Saved,
  number: int | None,
) -> None:
  """Makes a user's own model, and saves it or ranks items by it.

  Args:
    task: The task.
    trainable: The algorithm.
    saved: The weights to begin with.
    number: Of which round they are.

  Raises:
    OptionError: If there is no such user, or nothing that can be done for it.
  """
  file = FLAGS.save_model
  if file is None and not isinstance(task, movielens.MovieLens):
    raise OptionError(
      f'--user={FLAGS.user}: the task {task.name} recommends nothing. Save the '
      "user's model with --save_model=FILE.keras, or use --task=movielens."
    )
  if file is not None and not file.endswith('.keras'):
    raise OptionError(
      f'--save_model={file}: name a file that ends in .keras, the format in '
      'which Keras saves a whole model.'
    )
  personal = trainable.personal()
  keras_model = personal_models.personalise(
    saved,
    tasks_lib.one_user(task, FLAGS.user, personal.example_spec),
    FLAGS.user,
    evaluation=personal,
    seed=FLAGS.seed,
  )
  if file is not None:
    try:
      keras_model.save(file)
    except OSError as error:
      raise OptionError(
        f'--save_model={file}: {error.strerror or error}.'
      ) from None
    print(f'Saved the model of user {FLAGS.user}, of round {number}: {file}')
  elif isinstance(task, movielens.MovieLens):
    found = movielens.recommend(task, keras_model, FLAGS.user, FLAGS.top_n)
    print(f'For user {FLAGS.user}, by the weights of round {number}:')
    for place, item in enumerate(found, 1):
      print(f'{place:4}. {item.rating:.2f}  {item.title}')


def main() -> int | None:
  """Loads the weights of a run and measures clients, or serves one user."""
  runs.quiet_libraries()
  folder = runs.Folder(FLAGS.output_dir)
  done = folder.read_result() or {}
  task = _RUN.task()
  with runs.runtime(done.get('jit_choices')):
    trainable = _RUN.trainable(task)
    saved = programs.load(trainable.process, folder.path)
    number = saved.best_round
    if FLAGS.weights == 'last':
      number = saved.rounds
      saved = dataclasses.replace(
        saved,
        best_weights=saved.last_weights,
        best_client_store=saved.client_store,
      )
    if FLAGS.user is not None:
      _serve_user(task, trainable, saved, number)
      return None
    measured: dict[str, Any] = programs.evaluate(
      trainable.evaluation_set(_examinees(task)),
      saved.best_weights,
      FLAGS.seed,
      saved.best_client_store,
    )
  measured = {'round': number, 'part': FLAGS.part, **runs.finite(measured)}
  print(json.dumps(measured, indent=2))
  return None


if __name__ == '__main__':
  runs.run_main(main, with_flags_of_the_run)
