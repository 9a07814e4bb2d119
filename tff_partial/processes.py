"""Composes an algorithm's parts into TFF computations.

The type of every process is

    initialize: ( -> S@SERVER)
    next: (S@SERVER, C@CLIENTS, D@CLIENTS)
          -> (state=S@SERVER, client_states=C@CLIENTS, metrics=M@SERVER)

where C is what a client remembers and D its data (see `examples.py`). A local
weight's type occurs in C alone.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import client_state
from tff_partial import client_work
from tff_partial import examples
from tff_partial import groups
from tff_partial import local_training
from tff_partial import models
from tff_partial import phases
from tff_partial import privacy
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial import tracing

ClientWeighting: TypeAlias = tff.learning.ClientWeighting
AggregationFactory: TypeAlias = aggregators.Factory


# (tier to named tensors, the client's seed for it) -> what it sends instead.
BeforeSending: TypeAlias = Callable[[Any, tf.Tensor], Any]
# What a client's phases came to -> how much it counts, zero or more.
ClientWeightFn: TypeAlias = Callable[[local_training.Worked], tf.Tensor]


def sending_seed(seed: tf.Tensor) -> tf.Tensor:
  """The seed that `before_sending` gets, int32 `[2]`, of a client's own."""
  return random_bits.fold_in(seed, 'sending')


class Averaging(TypedDict, total=False):
  """What builders of algorithms hand on to `compose`, where it is described."""

  aggregator: AggregationFactory | None
  client_weighting: ClientWeighting | ClientWeightFn
  before_sending: BeforeSending | None


class Joining(Averaging, total=False):
  """The same, of algorithms whose server may have any optimizer."""

  server_optimizer: phases.Optimizer | None


class ClientStateTypeError(client_work.CompositionError):
  """Raised when a round would change what type of state clients keep."""


class PartialProcessOutput(NamedTuple):
  """What a round returns.

  Attributes:
    state: The server's new state.
    client_states: What each client of the cohort remembers, in its order.
    metrics: Measurements of the round, at the server.
  """

  state: Any
  client_states: Any
  metrics: Any


class PartialProcess(tff.templates.IterativeProcess):
  """A federated algorithm in which a part of the model stays with clients.

  Attributes:
    model: The model that is trained.
    example_spec: What an example of a client consists of; pack data with it.
    sent: The tiers whose updates leave a client.
    mechanism: What makes these updates private, or None.
    work: What a client does in a round; None if it is not known.
  """

  def __init__(
    self,
    initialize_fn: tff.Computation,
    next_fn: tff.Computation,
    *,
    initialize_client: tff.Computation,
    get_model_weights: tff.Computation,
    set_model_weights: tff.Computation,
    model: models.PartialModel,
    example_spec: examples.ExampleSpec,
    sent: Sequence[str],
    mechanism: privacy.Mechanism | None = None,
    work: client_work.ClientWork | None = None,
  ):
    """Checks the types and keeps the computations.

    Args:
      initialize_fn: `( -> S@SERVER)`.
      next_fn: `(S@SERVER, C@CLIENTS, D@CLIENTS) -> (state=S@SERVER,
        client_states=C@CLIENTS, metrics=M@SERVER)`.
      initialize_client: `(int32[2] -> C)`: what a client remembers that never
        took part, from its seed.
      get_model_weights: `(S -> ModelWeights)`.
      set_model_weights: `(S, ModelWeights -> S)`.
      model: The model that is trained.
      example_spec: What an example consists of.
      sent: The tiers whose updates leave a client.
      mechanism: What makes these updates private, or None.
      work: What a client does in a round.

    Raises:
      ClientStateTypeError: If the client states that come out are not what
        goes in.
    """
    super().__init__(initialize_fn, next_fn, next_is_multi_arg=True)
    taken = next_fn.type_signature.parameter[1]
    kept = next_fn.type_signature.result.client_states
    if (
      not isinstance(kept, tff.FederatedType)
      or kept.placement is not tff.CLIENTS
    ):
      raise ClientStateTypeError(
        f'Client states must stay at clients, found {kept}.'
      )
    if not taken.is_assignable_from(kept):
      raise ClientStateTypeError(
        f'A round takes client states of type {taken} and returns {kept}.'
      )
    first = initialize_client.type_signature.result
    if not taken.member.is_assignable_from(first):
      raise ClientStateTypeError(
        f'`initialize_client` makes {first}, a round takes {taken.member}.'
      )
    self.initialize_client = initialize_client
    self.get_model_weights = get_model_weights
    self.set_model_weights = set_model_weights
    self.model = model
    self.example_spec = example_spec
    self.sent = tuple(sent)
    self.mechanism = mechanism
    self.work = work

  @property
  def client_type(self) -> tff.Type:
    """The type D of a client's data."""
    return self.next.type_signature.parameter[2].member

  def __repr__(self) -> str:
    """What leaves a client, what stays with it, and the model."""
    kept = self.next.type_signature.parameter[1].member
    lines = [
      f'{type(self).__name__}: clients send {", ".join(self.sent) or "nothing"}'
      f' and remember {"nothing" if self.is_stateless else kept}',
      *(f'  {line}' for line in repr(self.model).splitlines()),
    ]
    if self.mechanism is not None:
      lines.append(f'  private by {self.mechanism}')
    return '\n'.join(lines)

  @property
  def is_stateless(self) -> bool:
    """Whether clients remember nothing."""
    kept = self.next.type_signature.parameter[1].member
    return isinstance(kept, tff.StructType) and not len(kept)


def _check_joining(aggregator: Any, server_optimizer: Any) -> None:
  if not isinstance(
    aggregator,
    (
      tff.aggregators.WeightedAggregationFactory,
      tff.aggregators.UnweightedAggregationFactory,
    ),
  ):
    raise client_work.CompositionError(
      'The aggregator must be a factory such as `tff.aggregators.MeanFactory()`'
      f', found {type(aggregator).__name__}.'
    )
  if not isinstance(server_optimizer, phases.Optimizer):
    raise client_work.CompositionError(
      'The server optimizer must be one of `tff.learning.optimizers`, found '
      f'{type(server_optimizer).__name__}.'
    )


def _check_privacy(
  aggregator: AggregationFactory,
  before_sending: BeforeSending | None,
  client_weighting: ClientWeighting | ClientWeightFn,
  rule: client_state.PrivateRule | None,
  rematch: groups.Assign | None,
) -> None:
  """Refuses what clients would send beside what gets noise."""
  parts = getattr(aggregator, 'parts', [aggregator])
  central = [getattr(part, 'mechanism', None) for part in parts]
  local = getattr(before_sending, 'mechanism', None)
  if not any(m and m.noise_multiplier for m in [*central, local]):
    return
  beside = []
  if rule is not None:
    beside.append(
      (
        'private_rule',
        'the sum that its `summarize` makes',
        'Leave private_rule out',
      )
    )
  if rematch is not None:
    beside.append(
      (
        'rematch',
        'how many would move between groups',
        'Leave rematch out',
      )
    )
  # A private aggregator takes no weights.
  if local and client_weighting is not ClientWeighting.UNIFORM:
    beside.append(
      (
        'client_weighting',
        'how much they weigh',
        'Pass ClientWeighting.UNIFORM',
      )
    )
  noised = 'clients noise' if local else 'the private aggregator noises'
  for name, sent, remedy in beside:
    raise client_work.CompositionError(
      f'{name}: clients would send {sent}, exactly, beside the updates that '
      f'{noised}, and nobody would account for it. {remedy}, or do without '
      'noise.'
    )


def _mechanism(
  aggregator: AggregationFactory, before_sending: BeforeSending | None
) -> privacy.Mechanism | None:
  """What makes the updates private, if one mechanism does so for all of them.

  What a server does with sums that have noise already, changes nothing.
  """
  for part in (aggregator, before_sending):
    found: privacy.Mechanism | None = getattr(part, 'mechanism', None)
    if found is not None:
      return found
  return None


def _check_local(does: client_work.ClientWork) -> None:
  is_trained = any(tiers.LOCAL in p.train for p in phases.flat(does.work))
  if not (is_trained or does.memory.leaves_local):
    names = list(does.model.specs(tiers.LOCAL))
    if names:
      raise client_work.CompositionError(
        f'The model has local variables, {names}, which no phase trains. Build '
        'it without `local`, or take an algorithm that trains them.'
      )


def _unless_spoilt(is_finite: tf.Tensor, kept: Any, new: Any) -> Any:
  """What a client remembers: the new state, or its old one if that failed."""
  try:
    return tf.nest.map_structure(
      lambda old, new: tf.where(is_finite, new, old), kept, new
    )
  except (TypeError, ValueError) as error:
    raise ClientStateTypeError(
      f'A round takes client states {kept} and returns {new}. What a memory '
      'keeps must look like what it makes first.'
    ) from error


class _Sent(NamedTuple):
  """What a client's work comes to.

  Attributes:
    update: Tier to what the client sends, named tensors.
    ids: Tier and name to the ids of the rows that stand in `update` in place of
      a whole table.
    weight: How much the update counts.
    kept: What the client remembers.
    summary: What its `PrivateRule` adds up.
    group: The client's group, int32.
    metrics: States of metrics.
  """

  update: Any
  ids: Any
  weight: Any
  kept: Any
  summary: Any
  group: Any
  metrics: Any


def _weighed(
  worked: local_training.Worked,
  client_weighting: ClientWeighting | ClientWeightFn,
) -> tuple[local_training.Worked, tf.Tensor]:
  """Says how much a client counts.

  Returns:
    What its phases came to, which is not finite if its weight is no number that
    can weigh, and the weight, float32.
  """
  if client_weighting is ClientWeighting.NUM_EXAMPLES:
    return worked, tf.cast(worked.num_examples, tf.float32)
  if client_weighting is ClientWeighting.UNIFORM:
    return worked, tf.cast(worked.num_examples > 0, tf.float32)
  weight = tf.convert_to_tensor(client_weighting(worked))
  if weight.shape.rank != 0 or not (
    weight.dtype.is_floating or weight.dtype.is_integer
  ):
    raise client_work.CompositionError(
      'client_weighting: a client has one number for a weight, found '
      f'{weight.dtype.name}{weight.shape}.'
    )
  weight = tf.cast(weight, tf.float32)
  can_weigh = tf.logical_and(tf.math.is_finite(weight), weight >= 0.0)
  is_finite = tf.logical_and(worked.is_finite, can_weigh)
  return worked._replace(is_finite=is_finite), weight


def _sending(
  work: client_work.ClientWork,
  sent: Sequence[str],
  client_weighting: ClientWeighting | ClientWeightFn,
  by_rows: bool,
  before_sending: BeforeSending | None,
) -> tff.Computation:
  """Makes `(ModelWeights, C, D -> _Sent)`, for one client.

  If the work follows the rounds, their number comes in behind D.
  """
  rule = work.memory.rule

  def send(
    shared: Any, frozen: Any, kept: Any, client: Any, *round_number: Any
  ) -> _Sent:
    worked = work.run(shared, frozen, kept, client, *round_number)
    worked, weight = _weighed(worked, client_weighting)

    def zero_unless(structure: Any) -> Any:
      return tf.nest.map_structure(
        lambda t: tf.where(worked.is_finite, t, tf.zeros_like(t)), structure
      )

    weight = zero_unless(weight)
    update: Any = collections.OrderedDict()
    ids: Any = collections.OrderedDict()
    for tier in sent:
      received = shared[tier]
      if tier == tiers.GROUP:
        received = groups.copy_of(received, worked.group)
      update[tier] = zero_unless(tiers.delta(received, worked.weights[tier]))
      if tier == tiers.GROUP:
        update[tier] = groups.for_all(
          update[tier], worked.group, work.model.num_groups
        )
      changes = worked.changes if tier == tiers.GLOBAL else {}
      for name, change in zero_unless(changes).items():
        if by_rows:
          update[tier][name] = change.values
          ids.setdefault(tier, collections.OrderedDict())[name] = change.ids
        else:
          table = tf.zeros_like(shared[tier][name])
          update[tier][name] = change.added_to(table)
    if before_sending is not None and update:
      update = before_sending(update, sending_seed(client['seed']))
    if getattr(before_sending, 'mechanism', None) is not None:
      # Whether it had any examples, nobody learns from its weight either.
      weight = tf.ones([])
    summary = rule.summarize(worked, weight) if rule else ()
    return _Sent(
      update,
      ids,
      weight,
      _unless_spoilt(worked.is_finite, kept, work.memory.keep(worked)),
      zero_unless(summary),
      worked.group,
      client_work.unfinalized_metrics(worked),
    )

  if work.follows_rounds:
    round_spec = tf.TensorSpec([], tf.int32)
    traced = tracing.traced(send, *work.specs, round_spec)

    @tff.tensorflow.computation(*work.types, client_work.type_of(round_spec))
    def work_in_round(
      weights: Any, kept: Any, client: Any, round_number: Any
    ) -> Any:
      return traced(
        weights.trainable, weights.non_trainable, kept, client, round_number
      )

    return work_in_round

  traced = tracing.traced(send, *work.specs)

  @tff.tensorflow.computation(*work.types)
  def work_and_send(weights: Any, kept: Any, client: Any) -> Any:
    return traced(weights.trainable, weights.non_trainable, kept, client)

  return work_and_send


def _settling(
  rule: client_state.PrivateRule, kept_type: tff.Type, summary_type: tff.Type
) -> tff.Computation:
  """Makes `(C, C, summary, sum of summaries -> C)`, for one client."""

  @tff.tensorflow.computation(kept_type, kept_type, summary_type, summary_type)
  def settle(before: Any, after: Any, own: Any, total: Any) -> Any:
    return rule.settle(before, after, own, total)

  return settle


def _rematching(
  work: client_work.ClientWork, rematch: groups.Assign, sent_type: tff.Type
) -> tff.Computation:
  """Makes `(ModelWeights, C, D, group, weight -> int32[K, K])`, for a client.

  A one stands in the row of its group and the column of that which it would
  choose by the new weights.
  """

  def would_move(shared: Any, frozen: Any, kept: Any, client: Any) -> Any:
    del frozen
    held = work.recalled(shared, kept, client)
    return rematch.choose(
      groups.Situation(held, client['examples'], client['count'])
    )

  traced = tracing.traced(would_move, *work.specs)
  number = work.model.num_groups

  @tff.tensorflow.computation(*work.types, sent_type.group, sent_type.weight)
  def move(
    weights: Any, kept: Any, client: Any, group: Any, weight: Any
  ) -> Any:
    to = traced(weights.trainable, weights.non_trainable, kept, client)
    row, column = (tf.one_hot(g, number, dtype=tf.int32) for g in (group, to))
    return tf.cast(weight > 0, tf.int32) * tf.tensordot(row, column, axes=0)

  return move


def _following(server_type: tff.Type, number: int) -> tff.Computation:
  """Makes `(ModelWeights, int32[K, K] -> ModelWeights)`, for the server."""
  moves_type = client_work.type_of(tf.TensorSpec([number, number], tf.int32))

  @tff.tensorflow.computation(server_type, moves_type)
  def follow(weights: Any, moves: Any) -> Any:
    weights.trainable[tiers.GROUP] = groups.followed(
      weights.trainable[tiers.GROUP], moves
    )
    return weights

  return follow


class _Joined(NamedTuple):
  """What joining the updates of a round comes to, all at the server.

  Attributes:
    weights: The new weights.
    aggregator: The aggregator's new state.
    finalizer: The server optimizer's new state.
    measurements: Of both, by name.
  """

  weights: Any
  aggregator: Any
  finalizer: Any
  measurements: dict[str, Any]


class _Joining:
  """How the server joins what clients send; it does nothing if that is nothing.

  To be used within a federated computation.
  """

  def __init__(
    self,
    aggregator: Any,
    server_optimizer: phases.Optimizer,
    server_type: tff.Type,
    sent_type: tff.Type,
  ):
    self._aggregation: Any = None
    self._finalizer: Any = None
    self._by_rows = bool(len(sent_type.ids))
    if self._by_rows:
      self._aggregation = aggregator.create_by_rows(
        sent_type.update, sent_type.weight, sent_type.ids, server_type.trainable
      )
    elif len(sent_type.update):
      self._aggregation = aggregators.as_weighted(aggregator).create(
        sent_type.update, sent_type.weight
      )
    if self._aggregation is not None:
      build = tff.learning.templates.build_apply_optimizer_finalizer
      self._finalizer = build(server_optimizer, server_type)

  def initialize(self) -> tuple[Any, Any]:
    """The first states of the aggregator and of the server optimizer."""
    if self._aggregation is None:
      nothing = tff.federated_value((), tff.SERVER)
      return nothing, nothing
    return self._aggregation.initialize(), self._finalizer.initialize()

  def next(self, state: Any, sent: Any) -> _Joined:
    """Joins what was sent and moves the weights by it."""
    if self._aggregation is None:
      return _Joined(
        state.global_model_weights, state.aggregator, state.finalizer, {}
      )
    weight = sent.weight
    if self._by_rows:
      weight = tff.federated_zip(
        collections.OrderedDict(weight=weight, ids=sent.ids)
      )
    joined = self._aggregation.next(state.aggregator, sent.update, weight)
    moved = self._finalizer.next(
      state.finalizer, state.global_model_weights, joined.result
    )
    return _Joined(
      moved.result,
      joined.state,
      moved.state,
      {'aggregator': joined.measurements, 'finalizer': moved.measurements},
    )


def compose(
  model: models.PartialModel,
  *,
  work: phases.Work,
  memory: client_state.Memory = client_state.forget,
  aggregator: AggregationFactory | None = None,
  server_optimizer: phases.Optimizer | None = None,
  client_weighting: ClientWeighting
  | ClientWeightFn = ClientWeighting.NUM_EXAMPLES,
  before_sending: BeforeSending | None = None,
  rematch: groups.Assign | None = None,
) -> PartialProcess:
  """Makes a process in which each client does its work and the server joins it.

  A client whose losses or weights are not all finite counts for nothing: its
  update and its weight are zero and its measurements are left out, but for
  `num_not_finite`; it keeps what it remembered before. A client without
  measured examples has the weight zero. If no phase trains a tier at the
  server, nothing is sent.

  Args:
    model: The model to train.
    work: The phases of a client's round.
    memory: What a client remembers; nothing by default.
    aggregator: How updates are joined, any factory of `tff.aggregators`; the
      mean, weighted as said below. With those of `aggregators.py`, such as this
      one, clients send only the rows of a table that they trained.
    server_optimizer: Takes the joined update for a gradient; SGD with rate 1.
    client_weighting: Whether a client counts by its measured examples or once;
      or a function from what its phases came to, to its weight. A client whose
      weight is negative or no number counts as one that is not finite.
    before_sending: What a client does with its update before it sends it, such
      as `privacy.LocalNoise`. It then sends whole tables.
    rematch: How clients would choose their groups by the joined weights. Each
      group then takes the weights of that from which most of its clients come;
      how many come from where is sent, not what the server's optimizer
      remembers of the weights.

  Raises:
    CompositionError, PhaseError, GroupError: If the parts do not fit together,
      among them a private aggregator and something that would be sent without
      its noise.
  """
  aggregator = aggregator or aggregators.MeanFactory()
  server_optimizer = server_optimizer or phases.sgd(1.0)
  _check_joining(aggregator, server_optimizer)
  _check_privacy(
    aggregator, before_sending, client_weighting, memory.rule, rematch
  )
  does = client_work.ClientWork(model, memory, work, 'round')
  if tiers.GLOBAL not in model.tiers:
    raise client_work.CompositionError(
      'The model has no global variable to train.'
    )
  _check_local(does)
  server_type, kept_type, client_type = does.types
  initial_weights = client_work.initial_weights(model)
  sent = [
    tier
    for tier in does.specs[0]
    if any(tier in phase.train for phase in phases.flat(does.work))
  ]
  work_and_send = _sending(
    does,
    sent,
    client_weighting,
    before_sending is None
    and isinstance(aggregator, aggregators.RowAggregationFactory),
    before_sending,
  )
  sent_type = work_and_send.type_signature.result
  rule = memory.rule
  if rule is not None:
    settle = _settling(rule, kept_type, sent_type.summary)
  if rematch is not None:
    move = _rematching(does, rematch, sent_type)
    follow = _following(server_type, model.num_groups)
  joining = _Joining(aggregator, server_optimizer, server_type, sent_type)
  measure = tff.learning.metrics.sum_then_finalize(
    client_work.metric_finalizers(model), sent_type.metrics
  )
  state_of = tff.learning.templates.LearningAlgorithmState

  @tff.tensorflow.computation
  def first_round() -> Any:
    return collections.OrderedDict(round=tf.constant(0))

  @tff.tensorflow.computation(first_round.type_signature.result)
  def count_round(work_state: Any) -> Any:
    return collections.OrderedDict(round=work_state['round'] + 1)

  @tff.tensorflow.computation(first_round.type_signature.result)
  def round_of(work_state: Any) -> Any:
    return work_state['round']

  @tff.federated_computation
  def initialize() -> Any:
    return tff.federated_zip(
      state_of(
        tff.federated_eval(initial_weights, tff.SERVER),
        tff.federated_value((), tff.SERVER),
        tff.federated_eval(first_round, tff.SERVER),
        *joining.initialize(),
      )
    )

  @tff.federated_computation(
    initialize.type_signature.result,
    tff.FederatedType(kept_type, tff.CLIENTS),
    tff.FederatedType(client_type, tff.CLIENTS),
  )
  def next_fn(state: Any, client_states: Any, clients: Any) -> Any:
    weights = tff.federated_broadcast(state.global_model_weights)
    given = [weights, client_states, clients]
    if does.follows_rounds:
      done = tff.federated_map(round_of, state.client_work)
      given.append(tff.federated_broadcast(done))
    result = tff.federated_map(work_and_send, tuple(given))
    joined = joining.next(state, result)
    new_weights = joined.weights
    if rematch is not None:
      moves = tff.federated_map(
        move,
        (
          tff.federated_broadcast(new_weights),
          result.kept,
          clients,
          result.group,
          result.weight,
        ),
      )
      new_weights = tff.federated_map(
        follow, (new_weights, tff.federated_sum(moves))
      )
    new_state = tff.federated_zip(
      state_of(
        new_weights,
        state.distributor,
        tff.federated_map(count_round, state.client_work),
        joined.aggregator,
        joined.finalizer,
      )
    )
    kept = result.kept
    if rule is not None:
      total = tff.federated_broadcast(tff.federated_sum(result.summary))
      kept = tff.federated_map(
        settle, (client_states, kept, result.summary, total)
      )
    metrics = tff.federated_zip(
      collections.OrderedDict(
        client_work=collections.OrderedDict(train=measure(result.metrics)),
        **joined.measurements,
      )
    )
    return PartialProcessOutput(new_state, kept, metrics)

  state_type = initialize.type_signature.result.member

  @tff.tensorflow.computation(state_type)
  def get_model_weights(state: Any) -> Any:
    return state.global_model_weights

  @tff.tensorflow.computation(state_type, server_type)
  def set_model_weights(state: Any, weights: Any) -> Any:
    return state_of(
      weights,
      state.distributor,
      state.client_work,
      state.aggregator,
      state.finalizer,
    )

  return PartialProcess(
    initialize,
    next_fn,
    initialize_client=does.initialize_client,
    get_model_weights=get_model_weights,
    set_model_weights=set_model_weights,
    model=model,
    example_spec=does.example_spec,
    sent=sent,
    mechanism=_mechanism(aggregator, before_sending),
    work=does,
  )
