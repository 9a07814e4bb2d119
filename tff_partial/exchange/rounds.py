"""A round of a process: clients' updates, their aggregation, new states."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow_federated as tff

from tff_partial.client import client_metrics
from tff_partial.client import client_work
from tff_partial.client_statistics import MEMBERS
from tff_partial.exchange import server_update
from tff_partial.processes import PartialProcessOutput


class RoundParts(NamedTuple):
  """Computations of which a round consists.

  Attributes:
    client: The clients' work.
    first_round: `( -> (completed rounds[, server state]))`.
    sent: Names of what the server sends besides weights.
    update: `(ModelWeights, C, D[, sent] -> ClientUpdate)`.
    updates: Joins the updates.
    exchanges: Join the statistics.
  """

  client: client_work.ClientWork
  first_round: tff.Computation
  sent: Sequence[str]
  update: tff.Computation
  updates: server_update.JoinUpdates
  exchanges: Sequence[server_update.Exchange]

  @property
  def work_state(self) -> tff.Type:
    """Type of the server's state besides weights."""
    return self.first_round.type_signature.result

  @property
  def has_states(self) -> bool:
    """True if the aggregation of a statistic has a state."""
    return any(one.process is not None for one in self.exchanges)


def initialize(parts: RoundParts) -> tff.Computation:
  """Make `( -> S@SERVER)`."""
  first_weights = client_work.initial_weights(parts.client.model)

  @tff.federated_computation
  def first_state() -> Any:
    aggregator, finalizer = parts.updates.initialize()
    if parts.has_states:
      statistics = collections.OrderedDict(
        (one.statistic.name, one.process.initialize())
        for one in parts.exchanges
        if one.process is not None
      )
      aggregator = tff.federated_zip(
        collections.OrderedDict(update=aggregator, statistics=statistics)
      )
    return tff.federated_zip(
      tff.learning.templates.LearningAlgorithmState(
        tff.federated_eval(first_weights, tff.SERVER),
        tff.federated_value((), tff.SERVER),
        tff.federated_eval(parts.first_round, tff.SERVER),
        aggregator,
        finalizer,
      )
    )

  return first_state


def next_round(parts: RoundParts, state_type: tff.Type) -> tff.Computation:
  """Make `(S@SERVER, C@CLIENTS, D@CLIENTS) -> PartialProcessOutput`."""
  _, kept_type, client_type = parts.client.types
  measure = tff.learning.metrics.sum_then_finalize(
    client_metrics.metric_finalizers(parts.client.model),
    parts.update.type_signature.result.metrics,
  )

  @tff.federated_computation(
    state_type,
    tff.FederatedType(kept_type, tff.CLIENTS),
    tff.FederatedType(client_type, tff.CLIENTS),
  )
  def next_fn(state: Any, client_states: Any, clients: Any) -> Any:
    sent = map_clients(parts, state, client_states, clients)
    new_state, joined, measurements = join(parts, state, sent, clients)
    metrics = collections.OrderedDict(
      client_work=collections.OrderedDict(train=measure(sent.metrics)),
      **measurements,
    )
    return PartialProcessOutput(
      new_state,
      settle(parts, client_states, sent.kept, joined),
      tff.federated_zip(metrics),
    )

  return next_fn


def map_clients(
  parts: RoundParts, state: Any, client_states: Any, clients: Any
) -> Any:
  """Map a client's work in a round over clients."""
  weights, side_channel = _broadcast(
    parts, state.global_model_weights, state.client_work
  )
  beside = [tff.federated_zip(side_channel)] if side_channel else []
  return tff.federated_map(
    parts.update, (weights, client_states, clients, *beside)
  )


def join(
  parts: RoundParts, state: Any, sent: Any, clients: Any
) -> tuple[Any, dict[str, Any], Any]:
  """Aggregate what clients send, and update the server.

  Returns:
    The server's new state, clients' own and joined statistics by name, and
    measurements.
  """
  joining = state.aggregator['update'] if parts.has_states else state.aggregator
  members = None
  if any(one.statistic is MEMBERS for one in parts.exchanges):
    members = tff.federated_sum(sent.statistics[MEMBERS.name])
  moved = parts.updates.next(
    (joining, state.finalizer), state.global_model_weights, sent, members
  )
  server = (
    moved.weights,
    tff.federated_map(_count_round(parts.work_state), state.client_work),
  )
  states, joined = collections.OrderedDict(), {}
  for one in parts.exchanges:
    name = one.statistic.name
    if one.statistic is MEMBERS:
      continue  # Already used above.
    if name in moved.statistics:
      joined[name] = sent.update[name], moved.statistics[name]
    else:
      own = (
        sent.statistics[name]
        if one.second_pass is None
        else _second_pass(parts, one, server, sent, clients)
      )
      if one.process is None:
        joined[name] = own, tff.federated_sum(own)
      else:
        output = one.process.next(state.aggregator['statistics'][name], own)
        states[name], joined[name] = output.state, (own, output.result)
    if one.update is not None:
      server = tuple(tff.federated_map(one.update, (*server, joined[name][1])))
  aggregator = moved.aggregator
  if parts.has_states:
    aggregator = tff.federated_zip(
      collections.OrderedDict(update=aggregator, statistics=states)
    )
  new_state = tff.federated_zip(
    tff.learning.templates.LearningAlgorithmState(
      server[0], state.distributor, server[1], aggregator, moved.finalizer
    )
  )
  return new_state, joined, moved.measurements


def settle(
  parts: RoundParts, client_states: Any, kept: Any, joined: dict[str, Any]
) -> Any:
  """Determine the clients' new states by joined statistics.

  Args:
    parts: The computations of which a round consists.
    client_states: Their states before the round.
    kept: Their states after their work.
    joined: Their own and the joined statistics, by name.
  """
  for one in parts.exchanges:
    if one.settle is not None:
      own, total = joined[one.statistic.name]
      kept = tff.federated_map(
        one.settle, (client_states, kept, own, tff.federated_broadcast(total))
      )
  return kept


def _second_pass(
  parts: RoundParts,
  one: server_update.Exchange,
  server: Any,
  sent: Any,
  clients: Any,
) -> Any:
  """Return what clients compute from the updated weights."""
  weights, side_channel = _broadcast(parts, *server)
  side_channel['group'], side_channel['weight'] = sent.group, sent.weight
  return tff.federated_map(
    one.second_pass,
    (weights, sent.kept, clients, tff.federated_zip(side_channel)),
  )


def _broadcast(
  parts: RoundParts, weights: Any, work_state: Any
) -> tuple[Any, dict[str, Any]]:
  """Return the weights at clients, and what else is sent, by name."""
  side_channel = collections.OrderedDict(
    (
      name,
      tff.federated_broadcast(
        tff.federated_map(
          server_update.chosen(parts.work_state, name), work_state
        )
      ),
    )
    for name in parts.sent
  )
  return tff.federated_broadcast(weights), side_channel


def _count_round(work_state: tff.Type) -> tff.Computation:
  @tff.tensorflow.computation(work_state)
  def count_round(held: Any) -> Any:
    held['round'] += 1
    return held

  return count_round
