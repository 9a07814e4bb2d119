"""Recipes as the benchmarks run them, by default the paper's on MovieLens.

Settings come from the recipe's flags file, task and process from `python -m
tasks.train`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np

from benchmarks import measuring
from tasks import errors
from tasks.experiment.command_line import arguments as command_line
from tasks.experiment.config import Config
from tasks.experiment.runs import running
from tasks.experiment.trainable import Trainable
import tff_partial

MOVIELENS = 'movielens_fed_recon'


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Recipe with its data.

  Attributes:
    task: Data and model.
    trainable: Process and evaluation.
    settings: The value of every flag.
    clients: The training clients.
  """

  task: Any
  trainable: Any
  settings: Mapping[str, Any]
  clients: Any

  @property
  def jit(self) -> Any:
    """The argument `jit` of `tff_partial.runtimes.cohort`."""
    return {'true': True, 'false': False}.get(self.settings['jit'], 'auto')

  @property
  def table_bytes(self) -> int:
    """Size of the item vectors in bytes."""
    return 4 * self.task.ratings.num_items * self.settings['num_factors']


def flags_file(name: str = MOVIELENS) -> pathlib.Path:
  """Return the path of a recipe's flags file."""
  return measuring.ROOT / 'tasks' / 'recipes' / f'{name}.flags'


def read(*arguments: str, name: str = MOVIELENS) -> Config:
  """Read the recipe.

  Args:
    *arguments: Further flags of `python -m tasks.train`.
    name: The recipe's name.
  """
  return command_line.parse([f'--flagfile={flags_file(name)}', *arguments])


def load_task(*arguments: str, name: str = MOVIELENS) -> tuple[Config, Any]:
  """Read the recipe and load its task.

  Uses invented data if $TFF_PARTIAL_DATA_DIR names no folder with the real
  ones.

  Args:
    *arguments: Further flags of `python -m tasks.train`.
    name: The recipe's name.
  """
  config = read(*arguments, name=name)
  try:
    return config, running.load(config)
  except errors.DataError as error:
    sys.stderr.write(f'Data are invented, for want of real ones: {error}\n')
    config = config.with_flags({'data': 'synthetic'})
    return config, running.load(config)


def load(*arguments: str, name: str = MOVIELENS) -> Recipe:
  """Load the recipe's task and build its process.

  Args:
    *arguments: Further flags of `python -m tasks.train`.
    name: The recipe's name.
  """
  config, task = load_task(*arguments, name=name)
  trainable = Trainable(config, task)
  clients = task.clients('train', trainable.process.example_spec)
  return Recipe(task, trainable, config.flags(), clients)


def build(model: Any, settings: Mapping[str, Any], **changes: Any) -> Any:
  """Build the recipe's process on a model.

  Args:
    model: A `PartialModel`.
    settings: The settings.
    **changes: Arguments of `build_fed_recon` that differ from the recipe.
  """

  def optimizer(name: str) -> Any:
    return tff_partial.sgd(settings[f'{name}_learning_rate'])

  def steps(name: str) -> tff_partial.Phase:
    return tff_partial.Phase(
      optimizer=optimizer(name),
      batch_size=settings['batch_size'],
      epochs=settings[f'{name}_epochs'],
      max_steps=settings[f'{name}_steps'],
    )

  arguments: dict[str, Any] = {
    'split': tff_partial.splits.alternating(settings['batch_size']),
    'reconstruct': steps('reconstruction'),
    'update': steps('update'),
    'server_optimizer': optimizer('server'),
    **changes,
  }
  return tff_partial.algorithms.build_fed_recon(model, **arguments)


def floors(
  settings: Mapping[str, Any], num_items: int, cohorts: Iterable[Sequence[Any]]
) -> tuple[measuring.Floor, measuring.Floor]:
  """Return lower bounds of a round, on average over some cohorts.

  Args:
    settings: The settings.
    num_items: Rows of the item table.
    cohorts: The values of the clients of each cohort.

  Returns:
    One floor that touches only the rows of the item table that clients use, and
    one in which each client copies the table and subtracts and sums whole
    tables. The second does not apply to clients that send rows.
  """
  size, factors = settings['batch_size'], settings['num_factors']
  row, table = 4 * factors, 4 * factors * num_items
  sparse = dense = measuring.Floor(0, 0)
  number = 0
  for cohort in cohorts:
    number += 1
    for value in cohort:
      count = int(value['count'])
      is_query = np.arange(count) // size % 2 == 1
      query = value['examples']['x'][:count][is_query]
      query = query[: size * settings['update_steps']]
      support = _seen(
        int((~is_query).sum()),
        size,
        settings['reconstruction_epochs'],
        settings['reconstruction_steps'],
      )
      # A prediction, its derivatives and a step take 2 operations per factor
      # each in reconstruction; in the update the derivative is only scaled.
      client = measuring.Floor(
        bytes_moved=support * (row + 12) + len(query) * (2 * row + 12),
        operations=factors * (6 * support + 5 * len(query)),
      )
      # Old row, new row, and the sum read and written.
      changed = len(np.unique(query))
      sparse += client + measuring.Floor(
        4 * row * changed, 3 * factors * changed
      )
      # Copied (read, written), then subtracted and added to the sum with a
      # weight in one pass (old, new and sum read, sum written).
      dense += client + measuring.Floor(6 * table, 3 * table // 4)
  # The server divides the sum and adds it to its weights.
  server = measuring.Floor(4 * table, 2 * table // 4)
  return _mean(sparse, number) + server, _mean(dense, number) + server


def _mean(total: measuring.Floor, number: int) -> measuring.Floor:
  return measuring.Floor(*(part / number for part in total))


def _seen(examples: int, size: int, epochs: int, steps: int) -> int:
  """Return the number of examples seen within limits on epochs and steps."""
  per_epoch = -(-examples // size)
  steps = min(steps, epochs * per_epoch)
  whole, rest = divmod(steps, max(per_epoch, 1))
  return whole * examples + min(rest * size, examples)
