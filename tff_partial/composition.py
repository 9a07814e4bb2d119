"""Composition of an algorithm's parts into a `PartialProcess`.

`compose` follows the order of a round: the broadcast, the client's work and
message (`messages.py`), the server's aggregation and step (`server_update.py`),
and the clients' new state.
"""

import collections
from collections.abc import Sequence
from typing import Any, TypeAlias, TypedDict

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import client_state
from tff_partial import phases
from tff_partial.client import client_work
from tff_partial.exchange import messages
from tff_partial.exchange import server_update
from tff_partial.exchange.composition_checks import check_joining
from tff_partial.exchange.composition_checks import check_members
from tff_partial.exchange.composition_checks import check_privacy
from tff_partial.exchange.composition_checks import check_settling
from tff_partial.exchange.composition_checks import check_statistics
from tff_partial.exchange.composition_checks import check_tiers
from tff_partial.exchange.composition_checks import mechanism
from tff_partial.exchange.composition_checks import mechanisms_of
from tff_partial.exchange.messages import BeforeSending
from tff_partial.exchange.messages import ClientWeightFn
from tff_partial.exchange.messages import ClientWeighting
from tff_partial.model import models
from tff_partial.processes import PartialProcess
from tff_partial.processes import PartialProcessOutput
from tff_partial.statistics import Join
from tff_partial.statistics import MEMBERS
from tff_partial.statistics import Statistic

AggregationFactory: TypeAlias = aggregators.Factory
ServerState: TypeAlias = client_work.ServerState


class Averaging(TypedDict, total=False):
  """Arguments that builders of algorithms pass to `compose`; see there."""

  aggregator: AggregationFactory | None
  client_weighting: ClientWeighting | ClientWeightFn
  before_sending: BeforeSending | None


class Joining(Averaging, total=False):
  """The same, for algorithms whose server may have any optimizer."""

  server_optimizer: phases.Optimizer | None
  mean_of_members: bool


def compose(
  model: models.PartialModel,
  *,
  work: phases.Work,
  client_state: client_state.ClientState = client_state.stateless,
  aggregator: AggregationFactory | None = None,
  server_optimizer: phases.Optimizer | None = None,
  client_weighting: ClientWeighting
  | ClientWeightFn = ClientWeighting.NUM_EXAMPLES,
  before_sending: BeforeSending | None = None,
  mean_of_members: bool = False,
  statistics: Sequence[Statistic] = (),
  server_state: ServerState | None = None,
) -> PartialProcess:
  """Build a process in which clients do the work and the server aggregates.

  A client whose losses or weights are not all finite does not count: its update
  and its weight are zero and its measurements are left out, except for
  `num_not_finite`; it keeps its previous state. A client without measured
  examples has the weight zero. If no phase trains a tier at the server, no
  update is sent.

  Args:
    model: The model to train.
    work: The phases of a client's round.
    client_state: What a client remembers; nothing by default.
    aggregator: Aggregates updates, any factory of `tff.aggregators`; by default
      the mean weighted by `client_weighting`. With factories of
      `aggregators.py`, such as the default, clients send only the rows of a
      table that they trained.
    server_optimizer: Uses the aggregated update as a gradient; SGD with rate 1
      by default.
    client_weighting: Weights clients by measured examples or uniformly; or a
      function from a client's result to its weight. A client whose weight is
      negative or not finite does not count, like one that is not finite.
    before_sending: Transforms a client's update before it is sent, such as
      `local_noise.LocalNoise`. Clients then send whole tables.
    mean_of_members: How far a group's copy moves. By default by its members'
      share of the mean over all clients, as in FedEmbed (Algorithm 1, line 25):
      a small group moves little. If true, by the mean over its members only,
      for which the server learns the total weight of each group's members; not
      possible with noise.
    statistics: What clients send besides their update.
    server_state: Makes the server's state besides weights, which statistics
      update. It is sent to clients, in `ClientContext.server`; also in an
      evaluation that is built with the same function.

  Raises:
    CompositionError, PhaseError, GroupError: If the parts do not fit together,
      including a private aggregator and anything that would be sent without
      its noise.
  """
  aggregator = aggregator or aggregators.MeanFactory()
  server_optimizer = server_optimizer or phases.sgd(1.0)
  check_joining(aggregator, server_optimizer)
  if mean_of_members:
    statistics = [MEMBERS, *statistics]
  check_statistics(statistics, before_sending)
  check_privacy(aggregator, before_sending, client_weighting, statistics)
  client = client_work.ClientWork(model, client_state, work, 'round')
  if mean_of_members:
    check_members(aggregator, client)
  sent_tiers = [
    tier
    for tier in client.specs[0]
    if any(tier in phase.train for phase in phases.flat(client.work))
  ]
  check_tiers(client)
  check_settling(client, statistics)
  by_rows = before_sending is None and isinstance(
    aggregator, aggregators.RowAggregationFactory
  )
  round_ = _Round(
    client,
    messages.Sending(
      sent_tiers,
      client_weighting,
      by_rows,
      before_sending,
      statistics,
    ),
    aggregator,
    server_optimizer,
    server_state,
  )
  return PartialProcess(
    round_.initialize,
    round_.next,
    initialize_client=client.initialize_client,
    get_model_weights=round_.get_model_weights,
    set_model_weights=round_.set_model_weights,
    model=model,
    example_spec=client.example_spec,
    sent=sent_tiers,
    sent_beside=round_.sent_beside,
    loaded_beside=round_.loaded_beside,
    mechanism=mechanism(aggregator, before_sending),
    is_noised=bool(mechanisms_of(aggregator, before_sending)),
    work=client,
    server_state=server_state,
    rows_of=client.tables.names if by_rows else (),
  )


class _Round:
  """Computations of a process.

  Attributes:
    initialize: `( -> S@SERVER)`.
    next: `(S@SERVER, C@CLIENTS, D@CLIENTS) -> PartialProcessOutput`.
    get_model_weights: `(S -> ModelWeights)`.
    set_model_weights: `(S, ModelWeights -> S)`.
    sent_beside: The types of what clients send besides their update, by name.
    loaded_beside: The types of what they receive besides weights, by name.
  """

  def __init__(
    self,
    client: client_work.ClientWork,
    sending: messages.Sending,
    aggregator: AggregationFactory,
    server_optimizer: phases.Optimizer,
    server_state: ServerState | None,
  ):
    self._client = client
    self._server_type, self._kept_type, self._client_type = client.types
    self._first_round = _first_round(client.model, server_state)
    self._work_state = self._first_round.type_signature.result
    self._first_weights = client_work.initial_weights(client.model)
    self._sent = self._specs_of_sent(server_state is not None)
    self._work = sending.messages(client, self._sent)
    message = self._work.type_signature.result
    with_update = [s for s in sending.statistics if s.join is Join.WITH_UPDATE]
    beside = [s for s in sending.statistics if s.join is not Join.WITH_UPDATE]
    late = {
      s.name: messages.after_update(s, client, self._sent)
      for s in beside
      if s.after_update
    }
    types = {
      s.name: (
        late[s.name].type_signature.result
        if s.name in late
        else message.statistics[s.name]
      )
      for s in beside
    }
    self._late = late
    self._updates = server_update.JoinUpdates(
      aggregator, server_optimizer, self._server_type, message, with_update
    )
    self._beside = server_update.JoinStatistics(beside, types)
    joined = {s.name: message.update[s.name] for s in with_update}
    joined.update(self._beside.types)
    self._statistics = sending.statistics
    self._steps = {
      s.name: server_update.updating(
        s.name, s.update, self._server_type, self._work_state, joined[s.name]
      )
      for s in sending.statistics
      if s.update is not None
    }
    self.sent_beside = {
      name: types.get(name, kind) for name, kind in joined.items()
    }
    self.loaded_beside = {name: self._work_state[name] for name in self._sent}
    if late:
      self.loaded_beside['weights after the update'] = self._server_type
    self.loaded_beside.update(
      (f'{s.name}, joined', joined[s.name])
      for s in sending.statistics
      if s.settle is not None
    )
    self._settling = {
      s.name: messages.settling(
        s.settle,
        self._kept_type,
        types.get(s.name, joined[s.name]),
        joined[s.name],
      )
      for s in sending.statistics
      if s.settle is not None
    }
    self._measure = tff.learning.metrics.sum_then_finalize(
      client_work.metric_finalizers(client.model), message.metrics
    )
    self._trace()

  def _specs_of_sent(self, has_state: bool) -> Any:
    """Return the specs of what the server sends besides weights."""
    specs: dict[str, Any] = collections.OrderedDict()
    if self._client.follows_rounds:
      specs['round'] = tf.TensorSpec([], tf.int32)
    if has_state:
      specs['server'] = tff.types.type_to_tf_tensor_specs(
        self._work_state['server']
      )
    return specs

  def _trace(self) -> None:
    """Make the federated computations."""
    state_of = tff.learning.templates.LearningAlgorithmState

    @tff.federated_computation
    def initialize() -> Any:
      aggregator, finalizer = self._updates.initialize()
      if self._beside.has_states:
        aggregator = tff.federated_zip(
          collections.OrderedDict(
            update=aggregator, statistics=self._beside.initialize()
          )
        )
      return tff.federated_zip(
        state_of(
          tff.federated_eval(self._first_weights, tff.SERVER),
          tff.federated_value((), tff.SERVER),
          tff.federated_eval(self._first_round, tff.SERVER),
          aggregator,
          finalizer,
        )
      )

    @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(self._kept_type, tff.CLIENTS),
      tff.FederatedType(self._client_type, tff.CLIENTS),
    )
    def next_fn(state: Any, client_states: Any, clients: Any) -> Any:
      return self._run(state, client_states, clients)

    state_type = initialize.type_signature.result.member

    @tff.tensorflow.computation(state_type)
    def get_model_weights(state: Any) -> Any:
      return state.global_model_weights

    @tff.tensorflow.computation(state_type, self._server_type)
    def set_model_weights(state: Any, weights: Any) -> Any:
      return state_of(
        weights,
        state.distributor,
        state.client_work,
        state.aggregator,
        state.finalizer,
      )

    self.initialize = initialize
    self.next = next_fn
    self.get_model_weights = get_model_weights
    self.set_model_weights = set_model_weights

  def _run(self, state: Any, client_states: Any, clients: Any) -> Any:
    """Run one round, within a federated computation."""
    weights, sent = self._broadcast(
      state.global_model_weights, state.client_work
    )
    beside = [tff.federated_zip(sent)] if sent else []
    message = tff.federated_map(
      self._work, (weights, client_states, clients, *beside)
    )
    joining = state.aggregator
    if self._beside.has_states:
      joining = joining['update']
    members = None
    if MEMBERS in self._statistics:
      members = tff.federated_sum(message.statistics[MEMBERS.name])
    updates = self._updates.next(
      (joining, state.finalizer), state.global_model_weights, message, members
    )
    work_state = tff.federated_map(
      _count_round(self._work_state), state.client_work
    )
    held = updates.weights, work_state
    kept, states = message.kept, collections.OrderedDict()
    for statistic in self._statistics:
      if statistic is MEMBERS:
        continue  # Already used above.
      name = statistic.name
      if name in updates.statistics:
        own, joined = message.update[name], updates.statistics[name]
      else:
        own = (
          self._after_update(name, held, message, clients)
          if name in self._late
          else message.statistics[name]
        )
        before = (
          state.aggregator['statistics'] if self._beside.has_states else {}
        )
        after, joined = self._beside.next(before, name, own)
        if after is not None:
          states[name] = after
      if name in self._steps:
        held = tuple(tff.federated_map(self._steps[name], (*held, joined)))
      if name in self._settling:
        kept = tff.federated_map(
          self._settling[name],
          (client_states, kept, own, tff.federated_broadcast(joined)),
        )
    aggregator = updates.aggregator
    if self._beside.has_states:
      aggregator = tff.federated_zip(
        collections.OrderedDict(update=aggregator, statistics=states)
      )
    new_state = tff.federated_zip(
      tff.learning.templates.LearningAlgorithmState(
        held[0], state.distributor, held[1], aggregator, updates.finalizer
      )
    )
    metrics = tff.federated_zip(
      collections.OrderedDict(
        client_work=collections.OrderedDict(
          train=self._measure(message.metrics)
        ),
        **updates.measurements,
      )
    )
    return PartialProcessOutput(new_state, kept, metrics)

  def _broadcast(self, weights: Any, work_state: Any) -> tuple[Any, Any]:
    """Return the weights at clients, and what else is sent, by name."""
    sent = {
      name: tff.federated_broadcast(
        tff.federated_map(_chosen(self._work_state, name), work_state)
      )
      for name in self._sent
    }
    return tff.federated_broadcast(weights), collections.OrderedDict(sent)

  def _after_update(
    self, name: str, held: Any, message: Any, clients: Any
  ) -> Any:
    """Return what clients compute from the updated weights."""
    weights, beside = self._broadcast(*held)
    beside['group'], beside['weight'] = message.group, message.weight
    return tff.federated_map(
      self._late[name],
      (weights, message.kept, clients, tff.federated_zip(beside)),
    )


def _first_round(
  model: models.PartialModel, server_state: ServerState | None
) -> tff.Computation:
  """Make `( -> (completed rounds[, server state]))`."""
  if server_state is not None:
    first_server_state = client_work.first_server_state(model, server_state)

  @tff.tensorflow.computation
  def first_round() -> Any:
    held = collections.OrderedDict(round=tf.constant(0))
    if server_state is not None:
      held['server'] = first_server_state()
    return held

  return first_round


def _count_round(work_state: tff.Type) -> tff.Computation:
  @tff.tensorflow.computation(work_state)
  def count_round(held: Any) -> Any:
    held['round'] += 1
    return held

  return count_round


def _chosen(work_state: tff.Type, name: str) -> tff.Computation:
  @tff.tensorflow.computation(work_state)
  def choose(held: Any) -> Any:
    return held[name]

  return choose
