"""Evaluation sets: all clients of a population personalise and are measured."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

from absl import logging
import numpy as np
import tensorflow_federated as tff

from tff_partial import evaluation
from tff_partial import runtimes
from tff_partial.arguments import spelling
from tff_partial.client import client_work
from tff_partial.data import cohorts
from tff_partial.data import splits
from tff_partial.data import vocabulary_checks
from tff_partial.model import keras_metrics
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import readers
from tff_partial.training import client_errors
from tff_partial.training import metrics_log
from tff_partial.training import results
from tff_partial.training import sampling
from tff_partial.training.client_store import client_rows
from tff_partial.training.client_store import client_store as client_store_lib
from tff_partial.training.client_store import state_codec
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
  """An evaluation and all the clients that take part in it.

  Attributes:
    evaluation: The clients' work.
    clients: The clients; all of them are measured, not a sample.
    remembering: True if clients have their states from training, as seen users;
      those that never took part have initial states. Otherwise all have initial
      states, as unseen users.
  """

  evaluation: evaluation.Evaluation
  clients: cohorts.ClientSource
  remembering: bool = False

  def __post_init__(self) -> None:
    spelling.check_kind(
      *('EvaluationSet(evaluation=)', self.evaluation, evaluation.Evaluation),
      'an evaluation, such as `algorithms.build_fed_recon_eval(model)`',
      ProgramError,
    )

  def __repr__(self) -> str:
    """Describe the clients and their evaluation."""
    comes = 'what they remember' if self.remembering else 'nothing'
    parts = f'{self.evaluation!r}\n{self.clients!r}'.splitlines()
    return '\n'.join(
      [
        f'EvaluationSet of clients that come with {comes}',
        *(f'  {x}' for x in parts),
      ]
    )

  @property
  def metrics(self) -> list[str]:
    """The names of the pooled metrics, of those that are one number."""
    result = self.evaluation.evaluate.type_signature.result
    found = tff.structure.iter_elements(result.metrics.member)
    return [name for name, kind in found if not kind.shape]

  def check_metric(self, name: str) -> None:
    """Refuse a metric that is not among `metrics`."""
    if name not in self.metrics:
      raise ProgramError(
        f'There is no metric {name!r} of one number to compare by. Choose one '
        f'of {self.metrics}.'
      )

  def check(self, remembered: tff.Type | None) -> None:
    """Check that clients have the states that the evaluation takes.

    Args:
      remembered: The type of client states from training; None if they were not
        stored.

    Raises:
      ClientDataError: If the clients cannot be used in the evaluation.
      ProgramError: If the set is `remembering` without such states.
    """
    cohorts.check(self.clients, self.evaluation.example_spec)
    if not self.remembering:
      return
    taken = self.evaluation.initialize_client.type_signature.result
    if remembered is None:
      raise ProgramError(
        'The evaluation set has `remembering=True`, but there is no client '
        'store to read. Pass one, such as `client_store=result.client_store`, '
        'or let `remembering` be False.'
      )
    if not client_work.serves(remembered, taken):
      raise ProgramError(
        'The evaluation set has `remembering=True`, but clients remember '
        f'{remembered}, and the evaluation takes {taken}. Build the '
        'evaluation with the client state of the process, or let '
        '`remembering` be False.'
      )


def check_kind(given: Any) -> None:
  """Refuse what is no evaluation set."""
  spelling.check_kind(
    *('An evaluation set', given, EvaluationSet),
    'clients and how they are measured, `EvaluationSet(evaluation, clients)`',
    ProgramError,
  )


def evaluate(
  evaluation_set: EvaluationSet,
  weights: Any,
  *,
  seed: int = 0,
  client_store: client_store_lib.ClientStates | None = None,
  on_clients: Callable[[evaluation.ByClient], Any] | None = None,
  server_state: Any = None,
) -> dict[str, Any]:
  """Personalise the model at all clients of a set, and measure it there.

  What they learn is discarded.

  Args:
    evaluation_set: The evaluation and its clients.
    weights: A result of `train` or `load`, of which the best round is measured,
      or the model's weights at the server, `ModelWeights`. Those of another
      model are matched by name.
    seed: The run's seed; a client's draws follow from it and its id.
    client_store: Client states, for a set that is `remembering`; others do not
      read it, which causes a warning once. By default those of the result.
    on_clients: Called with each client's values: metric name to client id to
      value, for the measured clients. `pandas.DataFrame` makes a table of it,
      with a row for each client.
    server_state: Server state other than weights, such as
      `result.best_server_state`, for an evaluation whose clients read it; by
      default that of the result.

  Returns:
    Pooled metrics by name, and their distribution under `per_client`. Clients
    whose loss or weights are not finite count only in `num_not_finite`, with a
    warning; those without examples to measure only in `num_without_query`, with
    a warning once.

  Raises:
    ProgramError: If weights are not finite; or if the set is
      `remembering`, and the store is not of its type.
    SettingError: If clients read the server's state, and there is none.
    VocabularyError: If a result's clients were encoded otherwise than these.
  """
  check_kind(evaluation_set)
  if isinstance(weights, results.TrainingResult | results.Saved):
    vocabulary_checks.check_alike(weights, evaluation_set.clients)
    if evaluation_set.remembering and client_store is None:
      client_store = weights.best_client_store
    if server_state is None:
      server_state = weights.best_server_state
    weights = weights.best_weights
  _check_finite(results.weights_of(evaluation_set.evaluation.model, weights))
  reads = evaluation_set.remembering or evaluation_set.evaluation.is_stateless
  if client_store is not None and not reads:
    _warn(
      'evaluate: `client_store` is not read: the evaluation set has '
      '`remembering=False`, so that all its clients are measured as new ones. '
      'For those that took part, pass `remembering=True`.'
    )
  found = measure(
    evaluation_set,
    weights,
    seed=seed,
    client_store=client_store,
    on_clients=on_clients,
    server_state=server_state,
  )
  ids = evaluation_set.clients.client_ids
  if evaluation_set.evaluation.is_of_random_weights and client_store and reads:
    if new := sum(client_store.client(client) is None for client in ids):
      _warn(
        f'{new:,} of {len(ids):,} clients never took part in training: they '
        'are measured with random local weights that nothing has trained.'
      )
  lost = int(found['num_not_finite'])
  if lost:
    logging.warning(
      '%d of %d clients have no finite loss or weights and are left out of the '
      'metrics. Where they train before they are measured, try a smaller '
      'learning rate.',
      *(lost, len(ids)),
    )
  return found


def measure_by_support(
  build: Callable[[splits.Split], evaluation.Evaluation],
  weights: Any,
  clients: cohorts.ClientSource,
  sizes: Sequence[int],
  *,
  query_from: int | None = None,
  seed: int = 0,
  server_state: Any = None,
) -> dict[int, dict[str, Any]]:
  """Measure new users after they personalise on their first examples.

  All sizes are measured on the same query set: the examples after the largest
  support set, or later. Users without any there are left out. For example,

      measure_by_support(
        lambda split: build_furl_eval(model, split=split, personalise=Phase()),
        weights, new_users, sizes=[0, 1, 3, 10])

  Args:
    build: Builds the evaluation for a split, such as an algorithm's own.
    weights: The model's weights at the server, `ModelWeights`.
    clients: Users that took no part in training.
    sizes: Sizes of the support set.
    query_from: The position of the first query example; by default the largest
      size.
    seed: The run's seed; a client's draws follow from it and its id.
    server_state: Server state other than weights, as for `evaluate`.

  Returns:
    Size to the result of `evaluate`: pooled metrics by name,
    and their distribution under `per_client`.

  Raises:
    ClientDataError: If a size is negative, or larger than `query_from`.
  """
  start = max(sizes, default=0) if query_from is None else query_from
  cut = {size: splits.first(size, start) for size in sizes}
  return {
    size: evaluate(
      EvaluationSet(build(split), clients),
      weights,
      seed=seed,
      server_state=server_state,
    )
    for size, split in cut.items()
  }


def _check_finite(weights: client_work.ModelWeights) -> None:
  """Check that the weights are not those of a run that diverged."""
  named = {
    name: tensor
    for tensors in (*weights.trainable.values(), weights.non_trainable)
    for name, tensor in tensors.items()
  }
  for name, tensor in named.items():
    array = np.asarray(tensor)
    if array.dtype.kind not in 'fc':
      continue
    lost = int(array.size - np.isfinite(array).sum())
    if lost:
      raise ProgramError(
        f'The weights are not finite: {lost} of {array.size} numbers of '
        f'{name!r}. The run diverged. Measure the weights of its best round '
        '(`best_weights`), or train with a smaller learning rate.'
      )


@runtimes.ours()
def measure(
  evaluation_set: EvaluationSet,
  weights: Any,
  *,
  seed: int = 0,
  client_store: client_store_lib.ClientStates | None = None,
  on_clients: Callable[[evaluation.ByClient], Any] | None = None,
  server_state: Any = None,
) -> dict[str, Any]:
  """Measure as `evaluate` does, without checks of weights or lost clients.

  Args:
    evaluation_set: The evaluation and its clients.
    weights: The model's weights at the server, `ModelWeights`.
    seed: The run's seed.
    client_store: Client states, for a set that is `remembering`.
    on_clients: Called with each client's values, as by `evaluate`.
    server_state: As for `evaluate`.

  Raises:
    ProgramError: If the set is `remembering`, and the store is not of its
      type.
    SettingError: If clients read the server's state, and there is none.
  """
  evaluation_set.check(client_store and client_store.type)
  measuring = evaluation_set.evaluation
  if not evaluation_set.remembering and measuring.is_of_random_weights:
    _warn(
      'An evaluation measures all its clients as new ones, with random local '
      'weights that nothing has trained. For those that took part, pass '
      '`remembering=True` to `EvaluationSet`; for new ones, build the '
      'evaluation with `personalise=Phase(...)`.'
    )
  kept, cohort = with_memories(evaluation_set, seed, client_store)
  remembered = measuring.initialize_client.type_signature.result
  kept = client_rows.fitted(kept, remembered, cohort)
  with client_errors.naming('Evaluation', cohort):
    measured = measuring.evaluate(
      results.weights_of(measuring.model, weights),
      kept,
      cohort,
      *measuring.beside(server_state),
    )
  result = pooled(measured.metrics)
  counted = evaluation.num_measured(result)
  result['num_without_query'] = len(cohort) - counted
  if counted < len(cohort):
    _warn(
      f'{len(cohort) - counted:,} of {len(cohort):,} clients have no query '
      'examples of a weight above 0, which an evaluation measures: no metric '
      'counts them. Leave them out, or choose another split.'
    )
  result['per_client'] = evaluation.summarize(measured.per_client)
  if on_clients is not None:
    ids = evaluation_set.clients.client_ids
    on_clients(evaluation.by_client(ids, measured.per_client))
  return result


@functools.cache
def _warn(text: str) -> None:
  """Log a warning once, however often clients are evaluated."""
  logging.warning('%s', text)


def with_memories(
  evaluation_set: EvaluationSet,
  seed: int,
  client_store: client_store_lib.ClientStates | None,
) -> tuple[Sequence[Any], cohorts.Cohort]:
  """Return the states of a set's clients, and the clients.

  States are read for a set that is `remembering`.
  """
  ids = evaluation_set.clients.client_ids
  seeds = sampling.client_seeds(ids, seed, 'evaluation')

  def read(places: Sequence[int]) -> client_batch.Columns:
    if client_store is not None and evaluation_set.remembering:
      return client_store.read_as([ids[place] for place in places], kind)
    return state_codec.first_states(
      evaluation_set.evaluation.initialize_client, seeds[places]
    )

  kind = evaluation_set.evaluation.initialize_client.type_signature.result
  if readers.ValueReader(kind).is_static:
    # All clients at once might not fit into memory.
    kept = client_batch.Columns.on_demand(len(ids), read)
  else:
    kept = read(range(len(ids)))
  return kept, evaluation_set.clients.cohort(ids, seeds)


def pooled(metrics: Any) -> dict[str, Any]:
  """Return pooled metrics by name; NaN if no client was measured."""
  flat = metrics_log.flatten(metrics)
  return {
    name: value
    if flat['num_clients'] or name in keras_metrics.COUNTS
    else math.nan
    for name, value in flat.items()
  }
