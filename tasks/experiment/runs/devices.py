"""Export of a run's model, and its comparison with the simulation."""

import collections
from collections.abc import Callable, Mapping, Sequence
import pathlib
import timeit
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tasks import task as tasks_lib
from tasks.experiment.trainable import Trainable
from tff_partial import evaluation as evaluation_lib
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.data import cohorts
from tff_partial.exporting import exports
from tff_partial.exporting import running
from tff_partial.exporting import serving
from tff_partial.model import models
from tff_partial.training import programs
from tff_partial.training import results
from tff_partial.training.client_store import state_codec

CALLS = 30  # Number of calls whose median time is reported.


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

  @property
  def reconstruction(self) -> list[phases.Part]:
    """The work by which the evaluation personalises, before it measures."""
    work = self.evaluation.parts.work if self.evaluation else ()
    return [
      part
      for part in work
      if not (isinstance(part, phases.Phase) and part.measured)
    ]


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


def simulated(
  of_run: Served, exported: exports.Exported, value: Mapping[str, Any]
) -> _Client:
  """Simulate one client, to compare with.

  Args:
    of_run: The parts of the run.
    exported: The written export.
    value: The client's examples, count and seed.
  """
  evaluation, model, weights = of_run
  count = min(int(value['count']), exported.num_support)
  examples = collections.OrderedDict(
    (name, tf.nest.map_structure(lambda a: a[:count], value['examples'][name]))
    for name in model.example_spec
  )
  flat = {
    name: serving.Fields(model.example_spec[name], name).flat(examples[name])
    for name in ('x', 'y', 'weight')
  }
  held: dict[str, Any] = {}
  if evaluation is not None:
    # What a client remembers at first is drawn as the device draws it.
    first = random_bits.fold_in(exported.seed, 'local').numpy()
    (kept,) = state_codec.first_states(
      evaluation.initialize_client, first[np.newaxis]
    )
    client = collections.OrderedDict(
      examples=examples, count=np.int32(count), seed=exported.seed
    )
    held = dict(evaluation.personalise(weights, kept, client))
  own_model = model.to_keras(weights, held)
  predicted = own_model(examples['x'], training=False)
  wanted = exported.signatures.get(serving.RECONSTRUCT, {'inputs': {}})
  support = {
    name: running.padded(array, exported.num_support)
    for field in flat.values()
    for name, array in field.items()
    if name in wanted['inputs']
  }
  predictions = serving.Fields(model.prediction_spec, 'predictions')
  return _Client(
    {**support, serving.COUNT: np.asarray(count, np.int32)},
    {name: np.asarray(array) for name, array in flat['x'].items()},
    {
      name: np.asarray(held[variable])
      for name, variable in exported.local.items()
    },
    predictions.flat(tf.nest.map_structure(np.asarray, predicted)),
  )


def _milliseconds(call: Callable[[], Any]) -> float:
  """Return the median time of a call, after a first one to warm up."""
  call()
  return 1e3 * float(np.median(timeit.repeat(call, number=1, repeat=CALLS)))


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
  """Return the largest absolute difference; NaN if one is."""
  differences = [np.abs(found[n] - expected[n]).max() for n in expected]
  return float(np.max(differences, initial=0.0))


def measure(
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
    float(np.max(local)) if local else None,
    float(np.max(predictions)),
  )


def table(rows: Mapping[str, _Row]) -> str:
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

  Raises:
    OptionError: If its clients also predict with something outside the model.
  """
  trainable.check_is_a_model()
  model, evaluation = trainable.process.model, None
  if tiers.LOCAL in model.tiers:
    evaluation = trainable.personal()
    model = evaluation.model
  weights = results.weights_of(model, saved.best_weights)
  return Served(evaluation, model, weights)


def write(
  task: tasks_lib.Task,
  of_run: Served,
  folder: str | pathlib.Path,
  formats: Sequence[str],
  num_support: int,
  seed: int,
  **options: Any,
) -> exports.Exported:
  """Write a run's model, and its task's vocabularies if it has some.

  Args:
    task: The task.
    of_run: The parts of the run to write.
    folder: A new folder, or an empty one.
    formats: The formats to write.
    num_support: The most support examples of a user.
    seed: The run's seed.
    **options: Further arguments of `exports.export`, which names its errors.
  """
  return exports.export(
    of_run.model,
    of_run.weights,
    folder,
    formats,
    reconstruct=of_run.reconstruction,
    num_support=num_support,
    seed=seed,
    vocabularies=getattr(task, 'vocabularies', None),
    **options,
  )


def cohort(clients: cohorts.ClientSource, ids: Sequence[str]) -> Sequence[Any]:
  return clients.cohort(ids, np.zeros([len(ids), 2], np.int32))


def most_examples(clients: cohorts.ClientSource) -> int:
  # One by one, since they may not fit into memory together.
  return max(
    int(value['count'])
    for each in clients.client_ids
    for value in cohort(clients, [each])
  )
