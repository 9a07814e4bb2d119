"""Trains a task with an algorithm; run it again to go on where it was killed.

`python -m tasks.train --flagfile=RECIPE --data_dir=DIR --output_dir=OUT`, where
a recipe is one of `tasks/recipes/*.flags`, and flags given beside it win.
"""

import time
from typing import Any, NoReturn

from absl import flags

from tasks import privacy_flags
from tasks import runs
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tff_partial.training import callbacks
from tff_partial.training import programs

FLAGS = flags.FLAGS
_RUN = runs.run_flags()


def main() -> int | None:
  """Trains, measures the test clients, and writes the result."""
  started = time.perf_counter()
  runs.quiet_libraries()
  if not FLAGS.output_dir:
    raise OptionError('--output_dir: name a folder for what the run writes.')
  folder = runs.Folder(FLAGS.output_dir)
  folder.claim(_RUN.values())
  done = folder.read_result()
  if done is not None and done['rounds'] > FLAGS.rounds:
    raise OptionError(
      f'--rounds={FLAGS.rounds}: {folder.path} holds a run of '
      f'{done["rounds"]} rounds. Ask for as many or more, or choose another '
      '--output_dir.'
    )
  if done is not None and (
    done['diverged']
    or done['rounds'] == FLAGS.rounds
    or done.get('ended_by')  # Runs of older versions do not have it.
  ):
    print(f'{folder.path} holds this run already; delete it to run it anew.')
    print(table(done))
    if done['diverged']:
      raise_divergence(done)
    return None
  task = _RUN.task()
  with runs.runtime() as context:
    trainable = _RUN.trainable(task)
    clients: dict[str, Any] = {tasks_lib.TRAIN: trainable.clients()}
    validation = trainable.evaluation_set(task.validation)
    tests = {
      name: trainable.evaluation_set(whom) for name, whom in task.tests.items()
    }
    clients[tasks_lib.VALIDATION] = validation.clients
    clients.update(
      (task.tests[name].part, test.clients) for name, test in tests.items()
    )
    trained = programs.train(
      trainable.process,
      clients[tasks_lib.TRAIN],
      rounds=FLAGS.rounds,
      clients_per_round=trainable.clients_per_round,
      seed=FLAGS.seed,
      oversample=FLAGS.oversample,
      dropout_rate=FLAGS.dropout_rate,
      validation=validation,
      evaluate_every=FLAGS.evaluate_every,
      checkpoint_every=FLAGS.checkpoint_every,
      select=programs.Selection(task.selection_metric, task.higher_is_better),
      stop=programs.StoppingRule(factor=FLAGS.divergence_factor),
      callbacks=_early_stopping(task),
      output_dir=str(folder.path),
      privacy=trainable.ledger,
      diagnostics=FLAGS.diagnostics,
      tensorboard=FLAGS.tensorboard,
      show_progress=runs.shows_progress(),
    )

    def tested(weights: Any, remembered: Any) -> dict[str, Any]:
      return {
        name: programs.evaluate(test, weights, FLAGS.seed, remembered)
        for name, test in tests.items()
      }

    last = tested(trained.weights, trained.client_store)
    best = last
    if trained.best_round != trained.rounds:
      best = tested(trained.best_weights, trained.best_client_store)
    result = runs.finite(
      {
        'task': FLAGS.task,
        'algorithm': FLAGS.algorithm,
        'seed': FLAGS.seed,
        'rounds': trained.rounds,
        'clients_per_round': trainable.clients_per_round,
        'runtime': FLAGS.runtime,
        'jit': FLAGS.jit,
        'jit_choices': dict(getattr(context, 'choices', {})),
        'diverged': trained.diverged,
        'ended_by': trained.ended_by,
        'data': {
          **task.counts,
          'clients': {part: len(p) for part, p in clients.items()},
          'clients_filtered': {
            part: p.num_filtered for part, p in clients.items()
          },
        },
        'train': trained.train,
        'validation': {
          **(trained.validation or {}),
          'best_round': trained.best_round,
        },
        'test': last,
        'best': {
          'round': trained.best_round,
          'validation': trained.best_validation,
          'test': best,
        },
        'communication': runs.communication(trainable.process),
        'privacy': trained.privacy
        and privacy_flags.labelled(trained.privacy, task.learned_from_training),
        'seconds': {
          **trained.seconds,
          'total': time.perf_counter() - started,
        },
        'peak_rss_mb': runs.peak_memory_mb(),
      }
    )
  folder.write_result(result)
  print(table(result))
  if trained.ended_by:
    print(f'Ended after round {trained.rounds} by {trained.ended_by}.')
  print(f'Written to {folder.path}.')
  if trained.diverged:
    raise_divergence(result)
  return None


def _early_stopping(task: tasks_lib.Task) -> list[callbacks.Callback]:
  """What ends the run early, by the metric that chooses the best round."""
  if FLAGS.early_stopping_patience is None:
    return []
  return [
    callbacks.EarlyStopping(
      FLAGS.early_stopping_patience,
      task.selection_metric,
      task.higher_is_better,
      FLAGS.early_stopping_min_delta,
    )
  ]


def raise_divergence(result: dict[str, Any]) -> NoReturn:
  """Ends a run that diverged with advice."""
  train, validation = result['train'], result['validation']
  in_training = ''
  if train:  # A private run does not say.
    lost = train['num_not_finite']
    in_training = (
      f'the training loss was {float(train["loss"]):.4g}, {lost} of '
      f'{lost + train["num_clients"]} clients had no finite loss, and '
    )
  raise programs.ProgramError(
    f'The run diverged: at round {result["rounds"]} {in_training}the '
    f'validation loss was {float(validation["loss"]):.4g}. Try --clip_norm=1, '
    'a smaller learning rate, or another --seed, in another --output_dir; the '
    f'best round so far is in {runs.RESULT_FILE}.'
  )


def table(result: dict[str, Any]) -> str:
  """The pooled metrics of a result as a small table, and what they cost."""
  best = result['best']
  rows = [(f'validation, round {result["rounds"]}', result['validation'])]
  for name, last in result['test'].items():
    rows += [
      (f'test ({name}), round {result["rounds"]}', last),
      (
        f'test ({name}), best round {best["round"] or "-"}',
        best['test'][name],
      ),
    ]
  names = [
    name
    for name in rows[1][1]
    if name != 'per_client' and not name.startswith('num_')
  ]
  width = max(len(label) for label, _ in rows)
  lines = [' ' * width + ''.join(f'{name:>12}' for name in names)]
  for label, metrics in rows:
    # JSON has no infinity, so such a number is a text.
    values = [float(metrics[name]) for name in names]
    lines.append(
      f'{label:<{width}}'
      + ''.join(f'{v:>12.4{"f" if abs(v) < 1e6 else "g"}}' for v in values)
    )
  if result['privacy']:
    lines.append(privacy_flags.describe(result['privacy']))
  return '\n'.join(lines)


if __name__ == '__main__':
  runs.run_main(main)
