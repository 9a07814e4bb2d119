"""The server's update by the messages of a round."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import aggregators
from tff_partial import groups
from tff_partial import phases
from tff_partial.client import client_work
from tff_partial.client.descent import are_finite
from tff_partial.client_statistics import Join
from tff_partial.client_statistics import Server
from tff_partial.client_statistics import Statistic
from tff_partial.exchange import messages
from tff_partial.model import models
from tff_partial.tiers import GROUP


class Joined(NamedTuple):
  """Result of aggregating the messages of a round, all at the server.

  Attributes:
    weights: The new weights.
    statistics: Name to the aggregated statistic.
    aggregator: The aggregator's new state.
    finalizer: The server optimizer's new state.
    measurements: Measurements of both, by name.
  """

  weights: Any
  statistics: dict[str, Any]
  aggregator: Any
  finalizer: Any
  measurements: dict[str, Any]


class JoinUpdates:
  """Aggregation of clients' messages by one aggregator, and the server's step.

  It does nothing if clients send nothing. Use it within a federated
  computation.
  """

  def __init__(
    self,
    aggregator: Any,
    server_optimizer: phases.Optimizer,
    server_type: tff.Type,
    message_type: tff.Type,
    with_update: Sequence[Statistic],
    model: models.PartialModel,
  ):
    """Make the processes.

    The server optimizer leaves alone the states of the model's layers.
    """
    self._model = model
    self._aggregation: Any = None
    self._finalizer: Any = None
    # If not all tiers at the server are trained: the choice of those that are.
    self._trained: Any = None
    self._with_update = [statistic.name for statistic in with_update]
    update_type = message_type.update
    self._tiers = tiers = [
      name
      for name, _ in tff.structure.iter_elements(update_type)
      if name not in self._with_update
    ]
    self._by_rows = bool(len(message_type.ids))
    if self._by_rows:
      whole = collections.OrderedDict(
        (tier, server_type.trainable[tier]) for tier in tiers
      )
      for name in self._with_update:
        whole[name] = update_type[name]
      self._aggregation = aggregator.create_by_rows(
        update_type, message_type.weight, message_type.ids, tff.to_type(whole)
      )
    elif len(update_type):
      self._aggregation = aggregators.as_weighted(aggregator).create(
        update_type, message_type.weight
      )
    self._chooses: dict[str, tff.Computation] = {}
    if self._aggregation is not None and self._with_update:
      joined = self._aggregation.next.type_signature.result.result.member
      self._chooses = {
        name: _chosen_if_finite(joined, name) for name in self._with_update
      }
    if tiers:
      trained_type = server_type
      if len(tiers) < len(server_type.trainable):
        self._trained = _of_tiers(server_type, tiers)
        trained_type = self._trained.type_signature.result
      build = tff.learning.templates.build_apply_optimizer_finalizer
      self._finalizer = build(
        server_optimizer, trained_type, aggregators.moves_nothing
      )
      trained = tff.structure.iter_elements(trained_type.trainable)
      self._has_states = any(
        model.state & set(tff.structure.name_list(named))
        for _, named in trained
      )

  def initialize(self) -> tuple[Any, Any]:
    """Return the first states of the aggregator and of the server optimizer."""
    nothing = tff.federated_value((), tff.SERVER)
    return (
      self._aggregation.initialize() if self._aggregation else nothing,
      self._finalizer.initialize() if self._finalizer else nothing,
    )

  def next(
    self, state: Any, weights: Any, sent: Any, members: Any = None
  ) -> Joined:
    """Aggregate the messages and update the weights.

    Args:
      state: The states of the aggregator and of the server optimizer.
      weights: The weights.
      sent: The clients' messages.
      members: The total weight of each group's members, if each group's copy
        moves by the mean of its members.
    """
    aggregator, finalizer = state
    if self._aggregation is None:
      return Joined(weights, {}, aggregator, finalizer, {})
    weight = sent.weight
    if self._by_rows:
      weight = tff.federated_zip(
        collections.OrderedDict(weight=weight, ids=sent.ids)
      )
    joined = self._aggregation.next(aggregator, sent.update, weight)
    measurements = {'aggregator': joined.measurements}
    statistics = {
      name: tff.federated_map(choose, joined.result)
      for name, choose in self._chooses.items()
    }
    if self._finalizer is not None:
      update, has_members = joined.result, members is not None
      if members is None:
        members = tff.federated_value((), tff.SERVER)
      if self._chooses or has_members:
        update = _mapped(self._update_of, update, members)
      trained = weights
      if self._trained is not None:
        trained = tff.federated_map(self._trained, weights)
      moved = self._finalizer.next(finalizer, trained, update)
      measurements['finalizer'] = moved.measurements
      finalizer, new = moved.state, moved.result
      if self._trained is not None or has_members or self._has_states:
        new = _mapped(self._settled, weights, update, new, members)
      weights = new
    return Joined(weights, statistics, joined.state, finalizer, measurements)

  def _update_of(self, joined: Any, members: Any) -> Any:
    """Return the update of the weights; for groups that of their members."""
    update = collections.OrderedDict(
      (tier, joined[tier]) for tier in self._tiers
    )
    if tf.is_tensor(members):
      update[GROUP] = groups.members_mean(update[GROUP], members)
    return update

  def _settled(self, weights: Any, update: Any, new: Any, members: Any) -> Any:
    """Return all new weights, given those that the optimizer moved.

    Copies of groups without members rest. States of layers become the mean of
    clients' states, also if a server optimizer moves the weights in another
    way. For variances, clients send how far the mean square around the mean `m`
    that the server has is from the server's variance. Around the new mean `m'`
    it is less by `(m' - m)^2`: the variance of all clients' examples together.
    """
    for tier, named in new.trainable.items():
      moved = update[tier]
      for name in self._model.state & set(named):
        before = weights.trainable[tier][name]
        found = before - moved[name]
        if name in self._model.variances:
          found -= tf.square(moved[self._model.variances[name]])
          # Beside a mean that moved far, rounding could make it negative.
          found = tf.maximum(found, 0.0)
        # Such as a mean of none, which the optimizer rejects, too.
        named[name] = tf.where(are_finite(found), found, before)
    if tf.is_tensor(members):
      new.trainable[GROUP] = groups.with_members(
        weights.trainable[GROUP], new.trainable[GROUP], members
      )
    return client_work.ModelWeights(
      collections.OrderedDict(weights.trainable, **new.trainable),
      weights.non_trainable,
    )


def _mapped(function: Callable[..., Any], *values: Any) -> Any:
  """Map a function of tensors over values at the server."""
  types = [value.type_signature.member for value in values]
  return tff.federated_map(tff.tensorflow.computation(function, *types), values)


def chosen(structure: tff.Type, name: str) -> tff.Computation:
  """Make `(structure -> its element of that name)`."""
  return tff.tensorflow.computation(lambda joined: joined[name], structure)


def _chosen_if_finite(structure: tff.Type, name: str) -> tff.Computation:
  """Make `(structure -> its element)`, or zeros if it is not finite."""
  return tff.tensorflow.computation(
    lambda joined: messages.zero_unless(are_finite(joined[name]))(joined[name]),
    structure,
  )


def _of_tiers(server_type: tff.Type, tiers: Sequence[str]) -> tff.Computation:
  """Make `(ModelWeights -> ModelWeights)`: only those of some tiers."""
  return tff.tensorflow.computation(
    lambda weights: client_work.ModelWeights(
      collections.OrderedDict((t, weights.trainable[t]) for t in tiers),
      weights.non_trainable,
    ),
    server_type,
  )


class Exchange(NamedTuple):
  """Computations that join and use one statistic.

  Attributes:
    statistic: The statistic.
    own_type: The type of a client's value.
    joined_type: The type of the aggregated value.
    second_pass: Computes a client's value after the update; see
      `messages.second_pass`. None if it is sent with the update.
    process: Aggregates it; None for a sum, or with the update.
    update: `(ModelWeights, work state, joined -> (ModelWeights, work state))`.
    settle: `(C, C, own statistic, joined statistic -> C)`, for one client.
  """

  statistic: Statistic
  own_type: tff.Type
  joined_type: tff.Type
  second_pass: tff.Computation | None
  process: tff.templates.AggregationProcess | None
  update: tff.Computation | None
  settle: tff.Computation | None


def exchange(
  statistic: Statistic,
  client: client_work.ClientWork,
  update_type: tff.StructType,
  work_state: tff.Type,
  sent: Mapping[str, Any],
) -> Exchange:
  """Make the exchange of a statistic in a round.

  Args:
    statistic: The statistic.
    client: The clients' work.
    update_type: The type of a `ClientUpdate`.
    work_state: The type of the server's state besides weights.
    sent: Specs of what the server sends besides weights.
  """
  name, second_pass, process = statistic.name, None, None
  server_type, kept_type, _ = client.types
  if statistic.join is Join.WITH_UPDATE:
    own_type = update_type.update[name]
  elif statistic.after_update:
    second_pass = messages.second_pass(statistic, client, sent)
    own_type = second_pass.type_signature.result
  else:
    own_type = update_type.statistics[name]
  if isinstance(statistic.join, Join):
    _check_range(name, own_type)
  joined_type = own_type
  if not isinstance(statistic.join, Join):
    process = statistic.join.create(own_type)
    joined_type = process.next.type_signature.result.result.member
  update = settle = None
  if statistic.update is not None:
    update = _updating(
      name, statistic.update, server_type, work_state, joined_type
    )
  settled = statistic.update_client_state
  if settled is not None:
    settle = tff.tensorflow.computation(
      lambda before, after, own, joined: settled(before, after, own, joined),
      *(kept_type, kept_type, own_type, joined_type),
    )
  return Exchange(
    statistic, own_type, joined_type, second_pass, process, update, settle
  )


def _check_range(name: str, own_type: tff.Type) -> None:
  """Refuse floats whose sum over clients would overflow, or lose clients."""
  dtypes = tff.types.structure_from_tensor_type_tree(
    lambda leaf: tf.as_dtype(leaf.dtype), own_type
  )
  for dtype in tf.nest.flatten(dtypes):
    if dtype in (tf.float16, tf.bfloat16):
      raise client_work.CompositionError(
        f'The statistic {name!r} has numbers of {dtype.name}, which is too '
        'coarse for a sum over clients. Cast them to float32, or join by a '
        'factory of your own.'
      )


def _updating(
  name: str,
  update: Callable[[Server, Any], Server],
  server_type: tff.Type,
  work_type: tff.Type,
  joined_type: tff.Type,
) -> tff.Computation:
  """Make `(ModelWeights, work state, joined -> (ModelWeights, work state))`."""

  @tff.tensorflow.computation(server_type, work_type, joined_type)
  def step(weights: Any, held: Any, joined: Any) -> Any:
    moved = update(Server(weights.trainable, held.get('server')), joined)
    if 'server' in held:
      held['server'] = moved.state
    return (
      client_work.ModelWeights(moved.weights, weights.non_trainable),
      held,
    )

  expected = tff.StructType([server_type, work_type])
  if not expected.is_assignable_from(step.type_signature.result):
    raise client_work.CompositionError(
      f'The statistic {name!r} makes {step.type_signature.result} of '
      f'{expected} at the server. What the server holds must keep its type.'
    )
  return step
