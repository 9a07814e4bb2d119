"""Evaluation of clients: on their examples, and of their models."""

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from tasks import task as tasks_lib
from tff_partial.data import examples
from tff_partial.training import evaluation_sets
from tff_partial.training import personal_models
from tff_partial.training import programs
from tff_partial.training.client_store import client_store as client_store_lib


def evaluate(
  task: tasks_lib.Task,
  clients: programs.EvaluationSet,
  weights: Any,
  seed: int,
  client_store: client_store_lib.ClientStates | None,
  has_diverged: bool = False,
  server_state: Any = None,
) -> dict[str, Any]:
  """Evaluate clients by all metrics of the task.

  Args:
    has_diverged: True if the run diverged, so that weights need not be finite.

  Returns:
    Pooled metrics by name, and under `per_client` their distribution.
  """
  measure = evaluation_sets.measure if has_diverged else programs.evaluate
  if not clients.remembering:
    client_store = None
  measured = measure(
    clients,
    weights,
    seed=seed,
    client_store=client_store,
    server_state=server_state,
  )
  own = own_models(clients, weights, seed, client_store, server_state)
  return {**measured, **task.measure_models(own)}


def own_models(
  clients: programs.EvaluationSet,
  weights: Any,
  seed: int,
  client_store: client_store_lib.ClientStates | None,
  server_state: Any = None,
) -> Iterator[tasks_lib.OwnModel]:
  """Yield the models that clients are evaluated with, one by one."""
  kept, cohort = evaluation_sets.with_memories(clients, seed, client_store)
  ids = clients.clients.client_ids
  for client, own, value in zip(ids, kept, cohort, strict=True):
    keras_model = personal_models.model_of(
      clients.evaluation, weights, own, value, server_state
    )
    real = slice(int(value['count']))  # Without padding.
    own_examples = examples.map_fields(itemgetter(real), value['examples'])
    yield tasks_lib.OwnModel(client, keras_model, own_examples)
