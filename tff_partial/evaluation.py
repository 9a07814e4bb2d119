"""Evaluation: clients personalise the model, then measure it.

The pooled metrics count every example alike. The metrics of each client stay
placed at clients until a program, in a simulation, gathers and summarizes them.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import client_state
from tff_partial import examples
from tff_partial import keras_functions
from tff_partial import models
from tff_partial import phases
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import tiers

QUANTILES = {'p10': 0.1, 'p50': 0.5, 'p90': 0.9}


class EvaluationOutput(NamedTuple):
  """What an evaluation returns.

  Attributes:
    metrics: Pooled over all examples of all clients, at the server.
    per_client: Each client's own metrics, at clients.
  """

  metrics: Any
  per_client: Any


class Evaluation(NamedTuple):
  """An evaluation as a computation.

  Attributes:
    evaluate: `(ModelWeights@SERVER, C@CLIENTS, D@CLIENTS) -> (metrics=M@SERVER,
      per_client=P@CLIENTS)`.
    initialize_client: `(int32[2] -> C)`: what a client remembers that never
      took part.
    measure: `(ModelWeights, C, D -> (states of metrics, metrics))`, for one
      client and not placed.
    personalise: `(ModelWeights, C, D -> local weights)`, likewise: what the
      client itself would run.
    model: The model that is measured.
    example_spec: What an example consists of; pack data with it.
  """

  evaluate: tff.Computation
  initialize_client: tff.Computation
  measure: tff.Computation
  personalise: tff.Computation
  model: models.PartialModel
  example_spec: examples.ExampleSpec


def build_evaluation(
  model: models.PartialModel,
  *,
  memory: client_state.Memory,
  work: Sequence[phases.Phase],
) -> Evaluation:
  """Each client runs phases, of which at least one measures; nothing is kept.

  Args:
    model: The model to measure.
    memory: What clients remember as the evaluation begins.
    work: Phases that personalise and measure.

  Raises:
    CompositionError: If no phase measures, or if the model has groups.
  """
  if not any(phase.measured for phase in work):
    raise processes.CompositionError('No phase of the evaluation is measured.')
  processes.refuse_groups(model)
  shared_specs, frozen_specs = processes.weights_specs(model)
  example_spec = processes.example_spec_of(model, work)
  client_specs = examples.client_spec(example_spec)
  first_memory = processes.traced(
    lambda seed: memory.first(model, seed), random_bits.SEED_SPEC
  )
  kept_specs = tf.nest.map_structure(
    lambda t: tf.TensorSpec(t.shape, t.dtype), first_memory.structured_outputs
  )

  def run(shared: Any, frozen: Any, kept: Any, client: Any) -> phases.Worked:
    seed = client['seed']
    local = memory.recall(model, kept, random_bits.fold_in(seed, 'local'))
    return phases.run(
      work,
      model,
      tiers.join(shared, {tiers.LOCAL: local} if local else {}),
      frozen,
      client['examples'],
      client['count'],
      seed,
    )

  def run_and_measure(shared: Any, frozen: Any, kept: Any, client: Any) -> Any:
    worked = run(shared, frozen, kept, client)
    states = processes.unfinalized_metrics(worked)
    values = collections.OrderedDict(
      (name, finalize(states[name]))
      for name, finalize in processes.metric_finalizers(model).items()
    )
    return states, values

  specs = (shared_specs, frozen_specs, kept_specs, client_specs)
  measure_client = processes.traced(run_and_measure, *specs)
  personalise_client = processes.traced(
    lambda *args: run(*args).weights.get(
      tiers.LOCAL, collections.OrderedDict()
    ),
    *specs,
  )
  server_type = processes.weights_type(model)

  @tff.tensorflow.computation(processes.type_of(random_bits.SEED_SPEC))
  def initialize_client(seed: Any) -> Any:
    return first_memory(seed)

  kept_type = initialize_client.type_signature.result
  client_type = processes.type_of(client_specs)

  @tff.tensorflow.computation(server_type, kept_type, client_type)
  def measure(weights: Any, kept: Any, client: Any) -> Any:
    return measure_client(
      weights.trainable, weights.non_trainable, kept, client
    )

  @tff.tensorflow.computation(server_type, kept_type, client_type)
  def personalise(weights: Any, kept: Any, client: Any) -> Any:
    return personalise_client(
      weights.trainable, weights.non_trainable, kept, client
    )

  pool = tff.learning.metrics.sum_then_finalize(
    processes.metric_finalizers(model), measure.type_signature.result[0]
  )

  @tff.federated_computation(
    tff.FederatedType(server_type, tff.SERVER),
    tff.FederatedType(kept_type, tff.CLIENTS),
    tff.FederatedType(client_type, tff.CLIENTS),
  )
  def evaluate(weights: Any, client_states: Any, clients: Any) -> Any:
    states, values = tff.federated_map(
      measure,
      (tff.federated_broadcast(weights), client_states, clients),
    )
    return EvaluationOutput(pool(states), values)

  return Evaluation(
    evaluate, initialize_client, measure, personalise, model, example_spec
  )


def summarize(per_client: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Describes how a metric differs from client to client.

  Args:
    per_client: Each client's metrics, as `evaluate` returns them. Clients
      without measured examples are left out.

  Returns:
    Metric name to its mean, standard deviation and quantiles over clients.
  """
  measured = [client for client in per_client if client['num_clients'] > 0]
  names = [
    name
    for name in (measured[0] if measured else {})
    if name not in keras_functions.COUNTS
  ]
  summary = {}
  for name in names:
    values = np.array([client[name] for client in measured], np.float64)
    summary[name] = {'mean': float(values.mean()), 'std': float(values.std())}
    summary[name].update(
      (label, float(np.quantile(values, q))) for label, q in QUANTILES.items()
    )
  return summary
