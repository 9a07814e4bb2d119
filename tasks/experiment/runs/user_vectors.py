"""Vectors of users for TensorBoard's embedding projector.

A user's vector is its client state, its row in a table at the server, or what
it reconstructs from all of its examples.
"""

from collections.abc import Mapping
import os
import pathlib
import re
from typing import Any

from absl import logging
import numpy as np

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.trainable import Trainable
from tff_partial import tiers
from tff_partial.training import metrics_log
from tff_partial.training import programs
from tff_partial.training import results
from tff_partial.training import sampling
from tff_partial.training.client_store import state_codec

VECTORS_FILE, NAMES_FILE = 'user_vectors.tsv', 'users.tsv'
# The most numbers that a browser shows.
_MOST_NUMBERS = 5_000_000


def own_vector(
  remembered: Mapping[str, Any], pattern: str
) -> np.ndarray | None:
  """Concatenate a client's state to one vector.

  Args:
    remembered: Its arrays, by name.
    pattern: A regular expression that selects names; '' for all.

  Returns:
    Floats `[size]`; None if no floating-point array is selected.
  """
  own = [
    np.ravel(leaf)
    for name, leaf in remembered.items()
    if np.asarray(leaf).dtype.kind == 'f' and re.search(pattern, name)
  ]
  return np.concatenate(own) if own else None


class Projector:
  """A writer of a run's user vectors for TensorBoard's projector."""

  def __init__(self, trainable: Trainable, task: tasks_lib.Task, number: int):
    """Find where the vectors of the first `number` training users are.

    Raises:
      OptionError: If clients have no local weights, or have many users each.
    """
    if task.keeps_tables:
      raise OptionError(
        f'--projector={number}: a client of --task={task.name} has many users, '
        'in tables of its own. Leave the flag out.'
      )
    self._trainable, self._task, self._number = trainable, task, number
    in_table = trainable.user_form == tasks_lib.TABLE and bool(task.attribute)
    is_kept = not trainable.process.is_stateless or in_table
    self._rebuilt = None if is_kept else trainable.personal()

  def write(
    self,
    trained: programs.TrainingResult,
    folder: str | os.PathLike[str],
    seed: int,
  ) -> None:
    """Write vectors and names where TensorBoard finds them."""
    vectors = self._vectors(trained, seed)
    numbers = sum(row.size for row in vectors.values())
    if not vectors or numbers > _MOST_NUMBERS:
      logging.warning(
        'No vectors are written for the projector: %d users have %d numbers.',
        *(len(vectors), numbers),
      )
      return
    title, known = self._task.attribute or None, self._task.attributes
    write(pathlib.Path(folder) / metrics_log.TENSORBOARD, vectors, title, known)

  def _vectors(
    self, trained: programs.TrainingResult, seed: int
  ) -> dict[str, np.ndarray]:
    """Read or reconstruct the users' vectors, of the best round."""
    spec = self._trainable.process.example_spec
    clients = self._task.clients(tasks_lib.TRAIN, spec)
    users = clients.client_ids[: self._number]
    found: Mapping[str, np.ndarray | None] = {}
    if self._rebuilt is not None:
      found = self._rebuild(self._rebuilt, trained, users, seed)
    elif trained.best_client_store is not None:
      look_up = trained.best_client_store.client
      pattern = self._task.own_weights
      found = {user: own_vector(look_up(user) or {}, pattern) for user in users}
    else:
      rows = self._task.vectors_at_server(trained.best_weights)
      found = {user: rows.get(user) for user in users}
    return {user: row for user, row in found.items() if row is not None}

  def _rebuild(
    self,
    evaluation: Any,
    trained: programs.TrainingResult,
    users: Any,
    seed: int,
  ) -> dict[str, np.ndarray | None]:
    """Reconstruct users' local weights from all their examples."""
    clients = self._task.clients(tasks_lib.TRAIN, evaluation.example_spec)
    seeds = sampling.client_seeds(users, seed, 'evaluation')
    kept = state_codec.first_states(evaluation.initialize_client, seeds)
    cohort = clients.cohort(users, seeds)
    weights = results.weights_of(evaluation.model, trained.best_weights)
    local = evaluation.model.specs(tiers.LOCAL)
    found = {}
    for user, own, value in zip(users, kept, cohort, strict=True):
      personal = dict(evaluation.personalise(weights, own, value))
      found[user] = own_vector({name: personal[name] for name in local}, '')
    return found


def write(
  folder: pathlib.Path,
  vectors: Mapping[str, np.ndarray],
  attribute: str | None = None,
  values: Mapping[str, Any] | None = None,
) -> None:
  """Write `user_vectors.tsv`, `users.tsv` and the projector's configuration.

  Args:
    folder: The folder of TensorBoard's events.
    vectors: User to floats `[size]`.
    attribute: The heading of an attribute of users; or None.
    values: User to the attribute's value, for users who have one.
  """
  from tensorboard.plugins import projector

  folder.mkdir(parents=True, exist_ok=True)
  rows = list(vectors.values())
  np.savetxt(folder / VECTORS_FILE, rows, fmt='%.7g', delimiter='\t')
  names = [[user] for user in vectors]
  if attribute is not None:
    # TensorBoard reads a heading only if there are several columns.
    names = [[user, str((values or {}).get(user, ''))] for user in vectors]
    names.insert(0, ['user', attribute])
  # White space would end a cell.
  lines = ['\t'.join(' '.join(x.split()) for x in cells) for cells in names]
  (folder / NAMES_FILE).write_text('\n'.join(lines) + '\n', encoding='utf-8')
  config = projector.ProjectorConfig()
  config.embeddings.add(
    tensor_name='users', tensor_path=VECTORS_FILE, metadata_path=NAMES_FILE
  )
  projector.visualize_embeddings(str(folder), config)
