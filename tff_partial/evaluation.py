"""Evaluation: clients personalise the model, then measure it.

The pooled metrics count every example alike. The metrics of each client stay
placed at clients until a program, in a simulation, gathers and summarizes them.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, NamedTuple, TypedDict

import numpy as np
import tensorflow_federated as tff

from tff_partial import client_state
from tff_partial import client_work
from tff_partial import phases
from tff_partial import tiers
from tff_partial.data import examples
from tff_partial.data import splits
from tff_partial.model import keras_metrics
from tff_partial.model import models
from tff_partial.model import tracing

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
    personalise: `(ModelWeights, C, D -> weights by name)`, likewise: the
      trainable weights of the client's own model, which it would use.
    model: The model that is measured.
    example_spec: What an example consists of; pack data with it.
  """

  evaluate: tff.Computation
  initialize_client: tff.Computation
  measure: tff.Computation
  personalise: tff.Computation
  model: models.PartialModel
  example_spec: examples.ExampleSpec

  def __repr__(self) -> str:
    """The model that is measured."""
    lines = (f'  {line}' for line in repr(self.model).splitlines())
    return '\n'.join(['Evaluation', *lines])


def build_evaluation(
  model: models.PartialModel,
  *,
  work: phases.Work,
  client_state: client_state.ClientState = client_state.stateless,
) -> Evaluation:
  """Each client runs phases, of which at least one measures; nothing is kept.

  Args:
    model: The model to measure.
    work: Phases that personalise and measure.
    client_state: What clients remember as the evaluation begins; nothing by
      default.

  Raises:
    CompositionError: If no phase measures, or if the model has groups.
  """
  does = client_work.ClientWork(model, client_state, work, 'evaluation')
  if does.follows_rounds:
    raise client_work.CompositionError(
      'A phase of the evaluation has epochs that follow the rounds, but an '
      'evaluation is in no round. Give a number of epochs.'
    )
  server_type, kept_type, client_type = does.types
  finalizers = client_work.metric_finalizers(model)

  def run_and_measure(*args: Any) -> Any:
    states = client_work.unfinalized_metrics(does.run(*args))
    values = collections.OrderedDict(
      (name, finalize(states[name])) for name, finalize in finalizers.items()
    )
    return states, values

  def run_and_keep(*args: Any) -> Any:
    weights = does.run(*args).weights
    *_, measured = [p for p in phases.flat(does.work) if p.measured]
    return collections.OrderedDict(
      (name, tensor)
      for named in measured.read(weights).values()
      for name, tensor in named.items()
    )

  def for_a_client(run: Callable[..., Any]) -> tff.Computation:
    traced = tracing.traced(run, *does.specs)

    @tff.tensorflow.computation(*does.types)
    def computation(weights: Any, kept: Any, client: Any) -> Any:
      return traced(weights.trainable, weights.non_trainable, kept, client)

    return computation

  measure = for_a_client(run_and_measure)
  pool = tff.learning.metrics.sum_then_finalize(
    finalizers, measure.type_signature.result[0]
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
    evaluate,
    does.initialize_client,
    measure,
    for_a_client(run_and_keep),
    model,
    does.example_spec,
  )


class Measuring(TypedDict, total=False):
  """What builders of evaluations hand on to `build_query_evaluation`."""

  personalise: phases.Phase | None
  split: splits.Split | None
  measure_batch_size: int


def build_query_evaluation(
  model: models.PartialModel,
  *,
  client_state: client_state.ClientState = client_state.stateless,
  train: tuple[str, ...] = (),
  reads: tiers.Reads | None = None,
  terms: tuple[phases.Term, ...] = (),
  personalise: phases.Phase | None = None,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> Evaluation:
  """Clients personalise on their support set, and are measured on the query.

  Args:
    model: The model to measure.
    client_state: What clients remember as the evaluation begins; nothing by
      default.
    train: What is a client's own, which `personalise` trains.
    reads: Which weights the model reads. If PERSONAL is trained, the client's
      copy of the global ones by default.
    terms: Losses to add when personalising.
    personalise: How clients personalise; not at all by default.
    split: Support and query set. The two halves by default if clients
      personalise, and otherwise everything.
    measure_batch_size: Examples measured at a time; changes no result.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  support, query = split or (splits.halves() if personalise else splits.same())
  if reads is None and tiers.PERSONAL in train:
    reads = tiers.personal_copy
  measure = phases.Phase(
    train=(),
    on=query,
    batch_size=measure_batch_size,
    reads=reads,
    measured=True,
  )
  work = [measure]
  if personalise:
    before = dataclasses.replace(
      personalise,
      train=train,
      on=support,
      reads=reads,
      terms=(*personalise.terms, *terms),
      measured=False,
    )
    work = [before, measure]
  return build_evaluation(model, client_state=client_state, work=work)


def summarize(per_client: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Describes how a metric differs from client to client.

  Args:
    per_client: Each client's metrics, as `evaluate` returns them. Clients
      without measured examples are left out.

  Returns:
    Metric name to its mean, standard deviation and quantiles over the clients
    where it is defined, and under `num_undefined` how many others there are, if
    there are any.
  """
  return {
    name: _summarized(values)
    for name, values in over_clients(per_client).items()
  }


def _summarized(values: np.ndarray) -> dict[str, float]:
  """The distribution of a metric, without what is no number."""
  defined = values[~np.isnan(values)]
  summary: dict[str, float] = {}
  if len(defined) < len(values):
    summary['num_undefined'] = len(values) - len(defined)
  if defined.size:
    summary.update(mean=float(defined.mean()), std=float(defined.std()))
    summary.update(
      (label, float(np.quantile(defined, q))) for label, q in QUANTILES.items()
    )
  return summary


def over_clients(per_client: Sequence[Any]) -> dict[str, np.ndarray]:
  """Gathers the values of each metric over clients.

  Args:
    per_client: As for `summarize`. Clients without measured examples are left
      out.

  Returns:
    Metric name to floats `[clients]`; no number where a client's examples leave
    the metric undefined.
  """
  measured = [client for client in per_client if client['num_clients'] > 0]
  return {
    name: np.array([client[name] for client in measured], np.float64)
    for name in (measured[0] if measured else {})
    if name not in keras_metrics.COUNTS
  }
