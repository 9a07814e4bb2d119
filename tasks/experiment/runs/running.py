"""Run of an experiment: training, evaluation of test clients, and result."""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import pathlib
import resource
import sys
import time
from typing import Any, NamedTuple

import psutil

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.config import Config
from tasks.experiment.config import Runtime
from tasks.experiment.options import privacy as privacy_lib
from tasks.experiment.options.loop import Output
from tasks.experiment.runs import measuring
from tasks.experiment.runs import releasing
from tasks.experiment.runs import user_vectors
from tasks.experiment.runs.folder import finite
from tasks.experiment.runs.folder import Folder
from tasks.experiment.runs.result import Result
from tasks.experiment.trainable import Trainable
from tff_partial import runtimes
from tff_partial.analysis.communication import communication
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import metrics_log
from tff_partial.training import programs
from tff_partial.training import sampling

_JIT: dict[str, Any] = {'auto': 'auto', 'true': True, 'false': False}


def load(
  config: Config, release: tasks_lib.Release | Folder | None = None
) -> tasks_lib.Task:
  """Load the data of an experiment and make its task.

  Where many clients train in parallel, TensorFlow is limited to one thread per
  kernel before it starts any. A single client with all examples uses all cores.

  Args:
    config: The experiment.
    release: How the task makes its noisy release; or the folder of the run that
      made it. By default it is drawn and kept nowhere.

  Raises:
    DataError: If the data are missing or damaged.
    OptionError: If what the run released is missing or damaged.
  """
  if config.runtime.runtime != 'native' and not config.how.is_central:
    runtimes.cores_for_clients()
  if not isinstance(release, tasks_lib.Release):
    release = releasing.of_run(config, release)
  return config.task.load(config.data, config.seed, release)


@contextlib.contextmanager
def executing(
  runtime: Runtime, choices: Mapping[str, bool] | None = None
) -> Iterator[Any]:
  """Execute computations with the runtime of an experiment, in the context.

  Args:
    runtime: The options of the runtime.
    choices: Choices of `--jit=auto` in an earlier process, to repeat them.
  """
  jit = _JIT[runtime.jit]
  context: Any
  match runtime.runtime:
    case 'native':
      context = runtimes.native()
    case 'ray':
      context = runtimes.ray(
        runtime.ray_address,
        runtime.ray_workers,
        jit=jit,
        choices=choices,
        folder=runtime.ray_folder,
      )
    case _:
      context = runtimes.cohort(jit=jit, choices=choices)
  with context:
    yield context


@contextlib.contextmanager
def reopened(
  config: Config, path: str | None
) -> Iterator[tuple[tasks_lib.Task, Trainable, programs.Saved]]:
  """Load a trained run, whose runtime executes computations in the context.

  Raises:
    UserError: If the run, its data or what it released is missing or damaged.
  """
  folder = Folder(str(path))
  done = folder.read_result() or {}
  task = load(config, folder)
  with executing(config.runtime, done.get('jit_choices')):
    trainable = Trainable(config, task)
    yield task, trainable, trainable.saved(folder.path)


def run(
  config: Config,
  output: Output = Output(),
  callbacks: Sequence[callbacks_lib.Callback] = (),
) -> Result:
  """Train, evaluate the test clients, and return the result.

  Args:
    config: The experiment.
    output: Where to write. A run of the same experiment in the folder is
      resumed; without a folder, nothing is written.
    callbacks: Called in order after each round; see `training.callbacks`.

  Raises:
    UserError: If the data, the options or the folder do not go together.
  """
  started = time.perf_counter()
  folder = None
  if output.output_dir is not None:
    folder = Folder(output.output_dir)
    done = _claim(folder, config, output)
    if done is not None:
      return Result(done)
  report, trained = _run(config, output, callbacks, folder)
  total = time.perf_counter() - started
  report['seconds'] = {**report['seconds'], 'total': total}
  if output.tensorboard and output.output_dir is not None:
    numbers = {
      f'test/{name}/{metric}': float(value)
      for name, measured in report['test'].items()
      for metric, value in measured.items()
      if isinstance(value, (int, float))
    }
    metrics_log.add_curves(output.output_dir, numbers, report['rounds'])
  report = finite(report)
  if folder is not None:
    folder.write_result(report)
  return Result(report, trained)


class Prepared(NamedTuple):
  """Everything that the rounds of an experiment need.

  Attributes:
    trainable: The algorithm.
    clients: The clients to train with.
    validation: The evaluation set that chooses the best round, or None.
    tests: Those that are measured after the last round.
    projector: Writes users' vectors, or None.
    callbacks: Called after each round.
  """

  trainable: Trainable
  clients: Any
  validation: Any = None
  tests: Mapping[str, programs.EvaluationSet] = {}
  projector: user_vectors.Projector | None = None
  callbacks: Sequence[callbacks_lib.Callback] = ()

  def arguments(self, config: Config, output: Output) -> dict[str, Any]:
    """Return the arguments of `train` that are checked before the rounds."""
    return {
      'process': self.trainable.process,
      'clients': self.clients,
      'rounds': config.loop.rounds,
      'clients_per_round': self.trainable.clients_per_round,
      'seed': config.seed,
      'oversample': config.loop.oversample,
      'dropout_rate': config.loop.dropout_rate,
      'validation': self.validation,
      'evaluate_every': config.loop.evaluate_every,
      'checkpoint_every': output.checkpoint_every,
      'select': self.trainable.selection if self.validation else None,
      'callbacks': self.callbacks,
      'privacy': self.trainable.accounting,
    }

  def train(self, config: Config, output: Output) -> programs.TrainingResult:
    return programs.train(
      **self.arguments(config, output),
      output_dir=output.output_dir,
      diagnostics=config.privacy.diagnostics,
      tensorboard=output.tensorboard,
      show_progress=output.shows_progress,
    )


def prepare(
  config: Config,
  output: Output,
  callbacks: Sequence[callbacks_lib.Callback],
  task: tasks_lib.Task,
) -> Prepared:
  trainable = Trainable(config, task)
  projector = None
  if output.projector and output.output_dir is not None:
    projector = user_vectors.Projector(trainable, task, output.projector)
  return Prepared(
    trainable,
    trainable.clients(),
    trainable.evaluation_set(task.validation),
    {
      name: trainable.evaluation_set(measured)
      for name, measured in task.tests.items()
    },
    projector,
    [*config.loop.callbacks(trainable.selection), *callbacks],
  )


def _run(
  config: Config,
  output: Output,
  callbacks: Sequence[callbacks_lib.Callback],
  folder: Folder | None,
) -> tuple[dict[str, Any], programs.TrainingResult]:
  """Train and evaluate; return the content of `result.json` and the weights."""
  task = load(config, releasing.at_start(config, folder))
  with executing(config.runtime) as context:
    prepared = prepare(config, output, callbacks, task)
    if releasing.is_due(config, folder):
      # Check everything with a placeholder before the draw.
      programs.check(**prepared.arguments(config, output))
      task = releasing.drawn(config, folder, task)
      prepared = prepare(config, output, callbacks, task)
    trainable, clients, validation, tests, projector, _ = prepared
    trained = prepared.train(config, output)
    measured = _measured(task, trained, tests, config.seed)
    if projector is not None:
      projector.write(trained, str(output.output_dir), config.seed)
  packed: dict[str, Any] = {
    tasks_lib.TRAIN: clients,
    tasks_lib.VALIDATION: validation.clients,
    **{task.tests[name].part: test.clients for name, test in tests.items()},
  }
  return {
    'config': config.to_json(),
    'task': config.task.name,
    'algorithm': config.algorithm,
    'seed': config.seed,
    'rounds': trained.rounds,
    'clients_per_round': trainable.clients_per_round,
    'clients_asked': sampling.num_asked(
      trainable.clients_per_round, config.loop.oversample
    ),
    'runtime': config.runtime.runtime,
    'jit': config.runtime.jit,
    'diverged': trained.diverged,
    'ended_by': trained.ended_by,
    'communication': communication(
      trainable.process,
      # The rows that clients send are private, and no noise would hide them.
      clients if trainable.ledger is None else (),
    ),
    'jit_choices': dict(getattr(context, 'choices', {})),
    'data': {
      **task.counts,
      'clients': {part: len(p) for part, p in packed.items()},
      'clients_filtered': {part: p.num_filtered for part, p in packed.items()},
    },
    **measured,
    'privacy': trained.privacy
    and privacy_lib.labelled(
      trained.privacy,
      config.privacy,
      [
        *task.learned_from_training,
        *config.hyperparameters.first_weights.public,
      ],
    ),
    'seconds': trained.seconds,
    'peak_rss_mb': peak_memory_mb(),
  }, trained


def _claim(
  folder: Folder, config: Config, output: Output
) -> dict[str, Any] | None:
  """Lock a folder; return the result if the whole run is in it."""
  values = {**config.flags(), **output.flags()}
  may_change = config.may_change() | output.may_change()
  folder.take()
  folder.check(values, may_change)
  done = folder.read_result()
  if done is not None and done['rounds'] > config.loop.rounds:
    raise OptionError(
      f'--rounds={config.loop.rounds}: {folder.path} holds a run of '
      f'{done["rounds"]} rounds. Ask for as many or more, or choose another '
      '--output_dir.'
    )
  folder.claim(values, may_change)
  if done is None:
    return None
  is_whole = (
    done['diverged']
    or done['rounds'] == config.loop.rounds
    or done.get('ended_by')  # Missing in runs of older versions.
  )
  return done if is_whole else None


def _measured(
  task: tasks_lib.Task,
  trained: programs.TrainingResult,
  tests: Mapping[str, programs.EvaluationSet],
  seed: int,
) -> dict[str, Any]:
  """Return the metrics of the last weights and of the best ones."""

  def tested(weights: Any, remembered: Any, held: Any) -> dict[str, Any]:
    return {
      name: measuring.evaluate(
        task, test, weights, seed, remembered, trained.diverged, held
      )
      for name, test in tests.items()
    }

  last = tested(trained.weights, trained.client_store, trained.server_state)
  best = last
  if trained.best_round != trained.rounds:
    best = tested(
      trained.best_weights, trained.best_client_store, trained.best_server_state
    )
  return {
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
  }


def peak_memory_mb() -> float:
  """Return the peak memory, in MB, of this process and its live children."""
  kilobytes = 1024 if sys.platform == 'darwin' else 1  # Others use kilobytes.
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 / kilobytes
  for child in psutil.Process().children(recursive=True):
    with contextlib.suppress(OSError, psutil.Error, StopIteration):
      status = pathlib.Path(f'/proc/{child.pid}/status').read_text()
      line = next(x for x in status.splitlines() if x.startswith('VmHWM'))
      peak += int(line.split()[1]) / 1024
  return round(peak, 1)
