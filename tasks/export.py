"""Exports a trained model as files with which devices serve their users.

`tff-partial export --output_dir=OUT --to=FOLDER` writes a SavedModel and a
TFLite file of the run's best weights: they predict, and rebuild what is a
user's own from its examples. Then it compares them with the simulation on some
test clients, and prints how large and how fast they are here. The flags of the
run are read from OUT/flags.txt; flags given here win.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.command_line.program import Program
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.run.folder import Folder
from tasks.experiment.run.folder import with_flags_of_the_run
from tasks.experiment.run.running import executing
from tasks.experiment.run.running import load
from tasks.experiment.trainable import Trainable
from tasks.options import option
from tasks.options import Options
from tff_partial import evaluation as evaluation_lib
from tff_partial import phases
from tff_partial import tiers
from tff_partial.data import cohorts
from tff_partial.exporting import exports
from tff_partial.exporting import running
from tff_partial.exporting import serving
from tff_partial.model import models
from tff_partial.training import evaluation_sets
from tff_partial.training import programs
from tff_partial.training.client_store import state_codec

_CALLS = 30  # Number of calls whose median time is reported.


@dataclasses.dataclass(frozen=True)
class Export(Options):
  """Options of what to export, and where."""

  to: str | None = option(None, 'A new folder to write to.')
  formats: tuple[str, ...] = option(
    exports.FORMATS, 'Which files: saved_model, tflite.'
  )
  num_support: int | None = option(
    None,
    'How many examples of a user there is room for; by default as many as any '
    'test client has.',
    at_least=1,
  )
  num_predicted: int | None = option(
    None,
    'How many examples predictions are made for at once; any number by '
    'default. TFLite needs a number for recurrent layers.',
    at_least=1,
  )
  weighted: bool = option(
    False, "Whether what is a user's own is rebuilt by weights of examples."
  )
  compared: int = option(
    3, 'How many test clients to compare with the simulation.', at_least=1
  )


class Served(NamedTuple):
  """The parts of a run that devices get.

  Attributes:
    evaluation: Reconstructs users' local weights; None if there are none.
    model: The model.
    weights: The weights at the server after the best round.
  """

  evaluation: evaluation_lib.Evaluation | None
  model: models.PartialModel
  weights: Any


class _Client(NamedTuple):
  """A client of the simulation.

  Attributes:
    support: The inputs of `reconstruct`.
    x: Its inputs, `[examples, ...]`, by name.
    own: Its local weights, by the names of the export.
    predictions: The predictions of its own model.
  """

  support: dict[str, np.ndarray]
  x: dict[str, np.ndarray]
  own: dict[str, np.ndarray]
  predictions: dict[str, np.ndarray]


class _Row(NamedTuple):
  """Measurements of one format; times in milliseconds."""

  size: int
  predict: float
  reconstruct: float | None
  local: float | None
  predictions: float


class _Simulation:
  """The simulation of test clients, to compare with."""

  def __init__(self, of_run: Served, exported: exports.Exported):
    """Take what all clients have in common.

    Args:
      of_run: The parts of the run that devices get.
      exported: The written export.
    """
    self._evaluation, self._model, self._weights = of_run
    model = of_run.model
    self._exported = exported
    self._fields = {
      name: serving.Fields(model.example_spec[name], name)
      for name in ('x', 'y', 'weight')
    }
    self._predictions = serving.Fields(model.prediction_spec, 'predictions')

  def client(self, value: Mapping[str, Any]) -> _Client:
    """Simulate one client.

    Args:
      value: Its examples, count and seed.
    """
    count = min(int(value['count']), self._exported.num_support)
    examples = collections.OrderedDict(
      (
        name,
        tf.nest.map_structure(lambda a: a[:count], value['examples'][name]),
      )
      for name in self._model.example_spec
    )
    flat = {n: f.flat(examples[n]) for n, f in self._fields.items()}
    held: dict[str, Any] = {}
    if self._evaluation is not None:
      (kept,) = state_codec.first_states(
        self._evaluation.initialize_client, self._exported.seed[np.newaxis]
      )
      client = collections.OrderedDict(
        examples=examples, count=np.int32(count), seed=self._exported.seed
      )
      held = dict(self._evaluation.personalise(self._weights, kept, client))
    own_model = self._model.to_keras(self._weights, held)
    predicted = own_model(examples['x'], training=False)
    wanted = self._exported.signatures.get(serving.RECONSTRUCT, {'inputs': {}})
    support = {
      name: running.padded(array, self._exported.num_support)
      for field in flat.values()
      for name, array in field.items()
      if name in wanted['inputs']
    }
    return _Client(
      {**support, serving.COUNT: np.asarray(count, np.int32)},
      {name: np.asarray(array) for name, array in flat['x'].items()},
      {
        name: np.asarray(held[variable])
        for name, variable in self._exported.local.items()
      },
      self._predictions.flat(tf.nest.map_structure(np.asarray, predicted)),
    )


def _milliseconds(call: Callable[[], Any]) -> float:
  """Return the median time of a call, after a first one to warm up."""
  call()
  times = []
  for _ in range(_CALLS):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return 1e3 * float(np.median(times))


def _predicted(
  device: Mapping[str, running.Runner],
  client: _Client,
  own: Mapping[str, np.ndarray],
  size: int | None,
) -> dict[str, np.ndarray]:
  """Predict all examples of a client, in batches if a size is given."""
  (number, *_) = (len(array) for array in client.x.values())
  turns = []
  for start in range(0, number, size or number):
    x = {
      name: running.padded(array[start:], size or number)
      for name, array in client.x.items()
    }
    turns.append(device[serving.PREDICT](**x, **own))
  return {
    name: np.concatenate([turn[name] for turn in turns])[:number]
    for name in turns[0]
  }


def _largest(
  found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> float:
  """Return the largest absolute difference."""
  return max(
    (float(np.abs(found[n] - expected[n]).max()) for n in expected), default=0.0
  )


def _measure(
  exported: exports.Exported,
  name: str,
  clients: Sequence[_Client],
  size: int | None,
) -> _Row:
  """Run one format for some clients.

  Args:
    exported: The written export.
    name: The format.
    clients: The clients in the simulation; the first one is timed.
    size: The number of examples per prediction, or None for any number.
  """
  device = running.load(exported.paths[name])
  reconstruct = device.get(serving.RECONSTRUCT)
  local, predictions = [], []
  for client in clients:
    own: Mapping[str, np.ndarray] = client.own
    if reconstruct is not None:
      own = reconstruct(**client.support)
      local.append(_largest(own, client.own))
    predicted = _predicted(device, client, own, size)
    predictions.append(_largest(predicted, client.predictions))
  first = clients[0]
  one = {
    name: running.padded(array[:1], size or 1)
    for name, array in first.x.items()
  }
  return _Row(
    exported.sizes()[name],
    _milliseconds(lambda: device[serving.PREDICT](**one, **first.own)),
    _milliseconds(lambda: reconstruct(**first.support))
    if reconstruct
    else None,
    max(local, default=None),
    max(predictions),
  )


def _table(rows: Mapping[str, _Row]) -> str:
  """Format a line for each exported format."""
  titles = ('format', 'kB', 'predict', 'reconstruct', 'local', 'predictions')
  lines = [titles]
  for name, row in rows.items():
    lines.append(
      (
        name,
        f'{row.size / 1e3:.0f}',
        f'{row.predict:.2f} ms',
        '-' if row.reconstruct is None else f'{row.reconstruct:.2f} ms',
        '-' if row.local is None else f'{row.local:.1e}',
        f'{row.predictions:.1e}',
      )
    )
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n'.join('  '.join(map(str.rjust, line, widths)) for line in lines)


def served(trainable: Trainable, saved: programs.Saved) -> Served:
  """Take from a run the parts that devices get.

  Args:
    trainable: The algorithm.
    saved: The trained weights.

  Raises:
    OptionError: If its clients also predict with something outside the model.
  """
  trainable.check_is_a_model()
  model, evaluation = trainable.process.model, None
  if tiers.LOCAL in model.tiers:
    evaluation = trainable.personal()
    model = evaluation.model
  weights = evaluation_sets.weights_of(model, saved.best_weights)
  return Served(evaluation, model, weights)


def write(
  config: Config,
  task: tasks_lib.Task,
  of_run: Served,
  folder: str | pathlib.Path,
  formats: Sequence[str],
  num_support: int,
  **options: Any,
) -> exports.Exported:
  """Write a run's model, and its task's vocabularies if it has some.

  Args:
    config: The experiment.
    task: Its task.
    of_run: The parts of the run to write.
    folder: A new folder, or an empty one.
    formats: The formats to write.
    num_support: The most support examples of a user.
    **options: Further arguments of `exports.export`, which names its errors.
  """
  return exports.export(
    of_run.model,
    of_run.weights,
    folder,
    formats,
    reconstruction=_reconstruction(config),
    num_support=num_support,
    seed=config.seed,
    vocabularies=getattr(task, 'vocabularies', None),
    **options,
  )


def _reconstruction(config: Config) -> phases.Phase:
  """Return the phase in which users reconstruct local weights."""
  personal = config.how.personal
  if personal is None:
    return phases.Phase()
  return config.local.when_measured(personal(config.local))


def main(config: Config, output: Output, chosen: Export) -> None:
  """Export the best weights of a run, and compare with the simulation."""
  if not chosen.to:
    raise OptionError('--to: name a new folder to write to.')
  folder = Folder(str(output.output_dir))
  done = folder.read_result() or {}
  task = load(config, folder)
  with executing(config.runtime, done.get('jit_choices')):
    trainable = Trainable(config, task)
    saved = trainable.saved(folder.path)
    of_run = served(trainable, saved)
    spec = (of_run.evaluation or of_run.model).example_spec
    clients = task.clients(tasks_lib.TEST, spec)
    num_support = chosen.num_support or most_examples(clients)
    exported = write(
      config,
      task,
      of_run,
      chosen.to,
      chosen.formats,
      num_support,
      num_predicted=chosen.num_predicted,
      weighted=chosen.weighted,
    )
    simulation = _Simulation(of_run, exported)
    ids = clients.client_ids[: chosen.compared]
    compared = [simulation.client(value) for value in _cohort(clients, ids)]
    rows = {
      name: _measure(exported, name, compared, chosen.num_predicted)
      for name in exported.paths
    }
  print(
    f'Exported round {saved.best_round} to {exported.folder}, with room for '
    f'{num_support} support examples.\n{_table(rows)}\n'
    f'Median times of {_CALLS} calls on this machine, to predict one example '
    'and to reconstruct one\nuser; largest deviations of local weights and of '
    f'predictions from the simulation, over\n{len(compared)} test clients.'
  )
  if not exported.local:
    print('The model has no local weights: there is nothing to reconstruct.')


def _cohort(clients: cohorts.ClientSource, ids: Sequence[str]) -> Sequence[Any]:
  return clients.cohort(ids, np.zeros([len(ids), 2], np.int32))


def most_examples(clients: cohorts.ClientSource) -> int:
  """Return the number of examples of the largest client."""
  # One by one, since they may not fit into memory together.
  return max(
    int(value['count'])
    for each in clients.client_ids
    for value in _cohort(clients, [each])
  )


PROGRAM = Program(main, (Config(), Output(), Export()), with_flags_of_the_run)

if __name__ == '__main__':
  PROGRAM.run()
