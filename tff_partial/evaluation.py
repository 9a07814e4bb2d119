"""Evaluation: clients personalise the model, then measure it.

The pooled metrics weight all examples equally. Each client's metrics stay
placed at clients until a program, in a simulation, collects and summarizes
them.
"""

import collections
from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import client_state
from tff_partial import contexts
from tff_partial import phases
from tff_partial import processes
from tff_partial import tiers
from tff_partial.client import client_metrics
from tff_partial.client import client_work
from tff_partial.client import local_training
from tff_partial.data import examples
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import keras_metrics
from tff_partial.model import models

# Metric name to client id to the client's value.
ByClient: TypeAlias = Mapping[str, Mapping[str, float]]

QUANTILES = {'p10': 0.1, 'p50': 0.5, 'p90': 0.9}


class EvaluationOutput(NamedTuple):
  """Output of an evaluation.

  Attributes:
    metrics: Pooled over all examples of all clients, at the server.
    per_client: Each client's own metrics, at clients.
  """

  metrics: Any
  per_client: Any


class EvaluationParts(NamedTuple):
  """Arguments of `build_evaluation` besides the model, to build another.

  Attributes:
    work: Phases that personalise and measure.
    client_state: What clients remember from training.
    server_state: Makes the server's state besides weights, or None.
  """

  work: phases.Work
  client_state: client_state.ClientState
  server_state: client_work.ServerState | None


class Evaluation(NamedTuple):
  """An evaluation as TFF computations.

  Attributes:
    evaluate: `(ModelWeights@SERVER, C@CLIENTS, D@CLIENTS) -> (metrics=M@SERVER,
      per_client=P@CLIENTS)`. If clients read the server's state, it is a fourth
      argument, `<server=S>@SERVER`, as `beside` makes it; likewise for
      `measure` and `personalise`.
    initialize_client: `(int32[2] -> C)`: the state of a client that never took
      part.
    measure: `(ModelWeights, C, D -> (states of metrics, metrics))`, for one
      client, without placements.
    personalise: `(ModelWeights, C, D -> weights by name)`, likewise: the
      trainable weights of the client's personal model.
    model: The model that is measured.
    example_spec: The spec of an example; pack data with it.
    parts: What it was built from.
    server_type: Type of the server's state that clients read; None if they read
      none.
  """

  evaluate: tff.Computation
  initialize_client: tff.Computation
  measure: tff.Computation
  personalise: tff.Computation
  model: models.PartialModel
  example_spec: examples.ExampleSpec
  parts: EvaluationParts
  server_type: tff.Type | None = None

  def beside(self, server_state: Any) -> tuple[Any, ...]:
    """Return the arguments of the computations after a client's data.

    Args:
      server_state: The server's state besides weights, such as
        `process.get_server_state(state)` or `result.best_server_state`.

    Returns:
      The server's state in a tuple; an empty one if clients do not read it.

    Raises:
      SettingError: If clients read it, and there is none.
    """
    if self.server_type is None:
      return ()
    if server_state is None:
      raise SettingError(
        "Clients of this evaluation read the server's state, "
        f'{self.server_type}, but there is none. Pass '
        '`server_state=result.best_server_state` of a process with one.'
      )
    return (collections.OrderedDict(server=server_state),)

  @property
  def is_stateless(self) -> bool:
    """True if it reads nothing of what clients remember from training."""
    return processes.is_nothing(self.initialize_client.type_signature.result)

  @property
  def is_of_random_weights(self) -> bool:
    """True if new clients are measured with random weights of their own."""
    parts = self.parts
    trained = [phase.train for phase in phases.all_phases(parts.work)]
    return (
      tiers.LOCAL in {*self.model.tiers}.difference(*trained)
      and not any(isinstance(p, contexts.OverwriteWeights) for p in parts.work)
      and not parts.client_state.is_frozen
      and _draws_local_weights(self.model)
    )

  def __repr__(self) -> str:
    """Return a description of the model that is measured."""
    lines = (f'  {line}' for line in repr(self.model).splitlines())
    return '\n'.join(['Evaluation', *lines])


@functools.lru_cache(maxsize=16)
def _draws_local_weights(model: models.PartialModel) -> bool:
  """Return True if local weights begin with values that clients draw."""
  tables = model.client_tables
  row = dict.fromkeys(tables.names, tf.constant([True]))

  def drawn(seed: tf.Tensor) -> Any:
    first = model.initial_weights(tiers.LOCAL, seed)
    return tables.fit(first, dict.fromkeys(row, 0), row, seed)

  one, other = (drawn(tf.constant([0, last])) for last in (0, 1))
  return any(np.any(one[name] != other[name]) for name in one)


def build_evaluation(
  model: models.PartialModel,
  *,
  work: phases.Work,
  client_state: client_state.ClientState = client_state.stateless,
  server_state: client_work.ServerState | None = None,
) -> Evaluation:
  """Build an evaluation by phases, at least one measured; nothing is kept.

  Args:
    model: The model to measure.
    work: Phases that personalise and measure.
    client_state: What clients remember from training; nothing by default.
    server_state: Makes the server's state besides weights, as for `compose`, if
      clients read it in `ClientContext.server`.

  Raises:
    CompositionError: If no phase is measured, or a phase depends on the round
      or keeps optimizer slots.
  """
  does = client_work.ClientWork(model, client_state, work, 'evaluation')
  if does.follows_rounds:
    raise client_work.CompositionError(
      'A phase of the evaluation has epochs or a rate factor that follow the '
      'rounds, but an evaluation is in no round. Give a number.'
    )
  if does.keeping:
    raise client_work.CompositionError(
      "slots='kept': a phase of an evaluation is to keep what its optimizer "
      'remembers, but an evaluation keeps nothing. Leave `slots` out, or take '
      "'reset'."
    )
  finalizers = client_metrics.metric_finalizers(model)

  def run_and_measure(*args: Any) -> Any:
    with does.begin(*args) as context:
      done = local_training.run(does.work, context, does.tables)
      states = client_metrics.unfinalized_metrics(done)
      values = collections.OrderedDict(
        (name, finalize(states[name])) for name, finalize in finalizers.items()
      )
      # All steps may be masked, and no loss is not the best one.
      loss, number = states[keras_metrics.LOSS]
      values[keras_metrics.LOSS] = tf.where(number > 0, loss / number, np.nan)
      return states, values

  def run_and_keep(*args: Any) -> Any:
    *_, measured = [p for p in phases.all_phases(does.work) if p.measured]
    with does.begin(*args) as context:
      done = local_training.run(does.work, context, does.tables)
      return collections.OrderedDict(
        (name, tensor)
        for named in measured.read(done.weights).values()
        for name, tensor in named.items()
      )

  told: dict[str, Any] = {}
  server_type = None
  if server_state is not None:
    first = client_work.first_server_state(model, server_state)
    server_type = first.type_signature.result
    told['server'] = tff.types.type_to_tf_tensor_specs(server_type)
  measure = does.computation(run_and_measure, told)
  pool = tff.learning.metrics.sum_then_finalize(
    finalizers, measure.type_signature.result[0]
  )

  return Evaluation(
    _for_all(measure, pool),
    does.initialize_client,
    measure,
    does.computation(run_and_keep, told),
    model,
    does.example_spec,
    EvaluationParts(work, client_state, server_state),
    server_type,
  )


def _for_all(
  measure: tff.Computation, pool: tff.Computation
) -> tff.Computation:
  """Make `evaluate` of an `Evaluation` from its `measure`."""
  taken = [
    tff.FederatedType(kind, place)
    for (_, kind), place in zip(
      tff.structure.iter_elements(measure.type_signature.parameter),
      (tff.SERVER, tff.CLIENTS, tff.CLIENTS, tff.SERVER),
      strict=False,
    )
  ]

  def run(weights: Any, *rest: Any) -> EvaluationOutput:
    states, values = tff.federated_map(
      measure, (tff.federated_broadcast(weights), *rest)
    )
    return EvaluationOutput(pool(states), values)

  if len(taken) == 3:

    @tff.federated_computation(*taken)
    def evaluate(weights: Any, client_states: Any, clients: Any) -> Any:
      return run(weights, client_states, clients)

    return evaluate

  @tff.federated_computation(*taken)
  def evaluate_told(
    weights: Any, client_states: Any, clients: Any, beside: Any
  ) -> Any:
    return run(weights, client_states, clients, tff.federated_broadcast(beside))

  return evaluate_told


def build_query_evaluation(
  model: models.PartialModel,
  *,
  client_state: client_state.ClientState = client_state.stateless,
  train: tuple[str, ...] = (),
  weights_fn: tiers.WeightsFn | None = None,
  terms: tuple[phases.Term, ...] = (),
  predict_fn: phases.PredictFn | None = None,
  server_state: client_work.ServerState | None = None,
  before: phases.Work = (),
  personalise: phases.Phase | None = None,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> Evaluation:
  """Build an evaluation: personalise on the support set, measure on the query.

  Args:
    model: The model to measure.
    client_state: What clients remember from training; nothing by default.
    train: The client's own tiers, which `personalise` trains.
    weights_fn: The weights that the model reads. By default, if PERSONAL is
      trained, the client's copy of the global ones.
    terms: Losses to add when personalising.
    predict_fn: Computes predictions that replace the model's.
    server_state: Makes the server's state besides weights, as for `compose`, if
      clients read it.
    before: Work before that on the support set, such as solves and choices.
    personalise: How clients personalise; not at all by default.
    split: Support and query set. By default the two halves if clients
      personalise or work before, and otherwise everything for both.
    measure_batch_size: Examples measured at a time; does not change the result.

  Raises:
    CompositionError, PhaseError: If the arguments do not fit together.
  """
  if personalise is not None and not train:
    raise client_work.CompositionError(
      'personalise: clients would train nothing before they are measured. Say '
      'which tiers they train, such as '
      f'train={phases.changed(personalise).train}.'
    )
  default = splits.halves() if before or personalise else splits.same()
  support, query = splits.given_or(split, default)
  if weights_fn is None and tiers.PERSONAL in train:
    weights_fn = tiers.personal_copy
  measure = phases.Phase(
    train=(),
    on=query,
    batch_size=measure_batch_size,
    weights_fn=weights_fn,
    measured=True,
    predict_fn=predict_fn,
  )
  work = [phases.placed(part, support) for part in before]
  if personalise:
    adapt = phases.changed(
      phases.placed(personalise, support),
      train=train,
      weights_fn=weights_fn,
      terms=(*personalise.terms, *terms),
      measured=False,
    )
    work.append(adapt)
  return build_evaluation(
    model,
    client_state=client_state,
    work=[*work, measure],
    server_state=server_state,
  )


def summarize(per_client: Sequence[Any]) -> dict[str, dict[str, float]]:
  """Summarize the distribution of each metric over clients.

  Args:
    per_client: Each client's metrics, as `evaluate` returns them. Clients
      without measured examples are left out.

  Returns:
    Metric name to its mean, standard deviation and quantiles over the clients
    where it is defined, and under `num_undefined` the number of others, if
    there are any. Metrics that are not one number for a client are left out.
  """
  found = by_client([*map(str, range(len(per_client)))], per_client)
  arrays = {n: np.array([*v.values()], np.float64) for n, v in found.items()}
  return {n: _summarized(v) for n, v in arrays.items() if v.ndim == 1}


def _summarized(values: np.ndarray) -> dict[str, float]:
  """Return the distribution of a metric's values that are not NaN."""
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


def num_measured(metrics: Mapping[str, Any]) -> int:
  """Count the clients that had examples to measure, finite or not.

  Args:
    metrics: Pooled metrics of a round's training, or of an evaluation.
  """
  return int(metrics['num_clients'] + metrics['num_not_finite'])


def by_client(ids: Sequence[str], per_client: Sequence[Any]) -> ByClient:
  """Collect the values of each metric by client.

  Args:
    ids: The clients, `[clients]`.
    per_client: Their metrics, as `evaluate` returns them. Clients without
      measured examples are left out.
  """
  measured = {
    client: metrics
    for client, metrics in zip(ids, per_client, strict=True)
    if metrics['num_clients'] > 0
  }
  names: Mapping[str, Any] = next(iter(measured.values()), {})
  return {
    name: {
      client: np.asarray(metrics[name], np.float64).tolist()
      for client, metrics in measured.items()
    }
    for name in names
    if name not in keras_metrics.COUNTS
  }
