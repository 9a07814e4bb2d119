"""Composes an algorithm's parts into TFF computations.

The type of every process is

    initialize: ( -> S@SERVER)
    next: (S@SERVER, C@CLIENTS, D@CLIENTS)
          -> (state=S@SERVER, client_states=C@CLIENTS, metrics=M@SERVER)

where C is what a client remembers and D its data (see `examples.py`). A local
weight's type occurs in C alone.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import client_state
from tff_partial import errors
from tff_partial import examples
from tff_partial import keras_functions
from tff_partial import models
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import splits
from tff_partial import tiers

ModelWeights: TypeAlias = tff.learning.models.ModelWeights
ClientWeighting: TypeAlias = tff.learning.ClientWeighting
AggregationFactory: TypeAlias = (
  tff.aggregators.WeightedAggregationFactory
  | tff.aggregators.UnweightedAggregationFactory
)


class CompositionError(errors.UserError, TypeError):
  """Raised when the parts of an algorithm do not fit together."""


class ClientStateTypeError(CompositionError):
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

  @property
  def client_type(self) -> tff.Type:
    """The type D of a client's data."""
    return self.next.type_signature.parameter[2].member

  @property
  def is_stateless(self) -> bool:
    """Whether clients remember nothing."""
    kept = self.next.type_signature.parameter[1].member
    return isinstance(kept, tff.StructType) and not len(kept)


def weights_at_server(model: models.PartialModel) -> ModelWeights:
  """Draws the first weights at the server, as TFF's container for them."""
  seed = random_bits.derive(model.seed, 'server')
  shared = collections.OrderedDict(
    (tier, model.initial_weights(tier, seed))
    for tier in (tiers.GLOBAL,)
    if tier in model.tiers
  )
  return ModelWeights(shared, model.frozen_weights())


# Traces a function under eager execution, for use in TFF computations.
traced = keras_functions.traced


def type_of(specs: Any) -> tff.Type:
  """The TFF type of a structure of tensor specs."""
  return tff.types.tensorflow_to_type(specs)


def weights_specs(model: models.PartialModel) -> tuple[Any, Any]:
  """Specs of trainable weights at the server by tier, and of frozen ones."""
  shared = collections.OrderedDict(
    (tier, model.specs(tier)) for tier in model.tiers if tier != tiers.LOCAL
  )
  frozen = collections.OrderedDict(
    (v.name, tf.TensorSpec(v.shape, v.dtype))
    for v in model.variables
    if not v.trainable
  )
  return shared, frozen


def weights_type(model: models.PartialModel) -> tff.Type:
  """The type of the weights at the server."""
  shared, frozen = map(type_of, weights_specs(model))
  return tff.StructWithPythonType(
    [('trainable', shared), ('non_trainable', frozen)], ModelWeights
  )


def example_spec_of(
  model: models.PartialModel, work: Sequence[phases.Phase]
) -> examples.ExampleSpec:
  """What an example consists of, for a model and the phases that read it."""
  spec = collections.OrderedDict(model.example_spec)
  spec.update(splits.example_fields(*(phase.on for phase in work)))
  return spec


def metric_finalizers(
  model: models.PartialModel,
) -> collections.OrderedDict[str, Any]:
  """Name to the function that turns a metric's summed state into its value."""
  count = tf.function(lambda state: state[0])
  finalizers = collections.OrderedDict(
    loss=tf.function(lambda state: tf.math.divide_no_nan(state[0], state[1]))
  )
  finalizers.update(model.metrics.finalizers())
  for name in ('num_examples', 'num_clients', 'num_not_finite'):
    finalizers[name] = count
  return finalizers


def unfinalized_metrics(worked: phases.Worked) -> Any:
  """A client's metric states; zeros but for a count if it is not finite."""
  is_finite = worked.is_finite
  counts = worked.num_examples > 0
  states = collections.OrderedDict(loss=worked.loss)
  states.update(worked.metrics)
  states['num_examples'] = [worked.num_examples]
  states['num_clients'] = [tf.cast(counts, tf.int32)]
  states = collections.OrderedDict(
    (name, [tf.where(is_finite, t, tf.zeros_like(t)) for t in tensors])
    for name, tensors in states.items()
  )
  states['num_not_finite'] = [tf.cast(tf.logical_not(is_finite), tf.int32)]
  return states


def refuse_groups(model: models.PartialModel) -> None:
  """Raises an error for a model with variables that nobody would place."""
  if tiers.GROUP in model.tiers:
    raise CompositionError(
      'The model has variables for groups, but the algorithm has no groups. '
      'Build the model without `group`.'
    )


def _check_parts(
  model: models.PartialModel,
  work: Sequence[phases.Phase],
  aggregator: Any,
  server_optimizer: Any,
) -> None:
  refuse_groups(model)
  if tiers.GLOBAL not in model.tiers:
    raise CompositionError('The model has no global variable to train.')
  if not isinstance(
    aggregator,
    (
      tff.aggregators.WeightedAggregationFactory,
      tff.aggregators.UnweightedAggregationFactory,
    ),
  ):
    raise CompositionError(
      'The aggregator must be a factory such as `tff.aggregators.MeanFactory()`'
      f', found {type(aggregator).__name__}.'
    )
  if not isinstance(server_optimizer, phases.Optimizer):
    raise CompositionError(
      'The server optimizer must be one of `tff.learning.optimizers`, found '
      f'{type(server_optimizer).__name__}.'
    )
  if not any(phase.measured for phase in work):
    raise CompositionError(
      'No phase is measured, so that no client would have a weight.'
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


def compose(
  model: models.PartialModel,
  *,
  work: Sequence[phases.Phase],
  memory: client_state.Memory,
  aggregator: AggregationFactory,
  server_optimizer: phases.Optimizer,
  client_weighting: ClientWeighting = ClientWeighting.NUM_EXAMPLES,
) -> PartialProcess:
  """Makes a process in which each client does its work and the server joins it.

  A client whose losses or weights are not all finite counts for nothing: its
  update and its weight are zero and its measurements are left out, but for
  `num_not_finite`; it remembers what it did. A client without measured examples
  has the weight zero.

  Args:
    model: The model to train.
    work: The phases of a client's round.
    memory: What a client remembers.
    aggregator: How updates are joined; any factory of `tff.aggregators`.
    server_optimizer: Takes the joined update for a gradient.
    client_weighting: Whether a client counts by its measured examples or once.

  Raises:
    CompositionError: If the parts do not fit together.
  """
  _check_parts(model, work, aggregator, server_optimizer)
  shared_specs, frozen_specs = weights_specs(model)
  example_spec = example_spec_of(model, work)
  client_specs = examples.client_spec(example_spec)
  seed_spec = random_bits.SEED_SPEC

  first_memory = traced(lambda seed: memory.first(model, seed), seed_spec)
  first_weights = traced(lambda: weights_at_server(model))

  def client_update(shared: Any, frozen: Any, kept: Any, client: Any) -> Any:
    seed = client['seed']
    local = memory.recall(model, kept, random_bits.fold_in(seed, 'local'))
    worked = phases.run(
      work,
      model,
      tiers.join(shared, {tiers.LOCAL: local} if local else {}),
      frozen,
      client['examples'],
      client['count'],
      seed,
    )

    def zero_unless(tensor: tf.Tensor) -> tf.Tensor:
      return tf.where(worked.is_finite, tensor, tf.zeros_like(tensor))

    update = collections.OrderedDict(
      (
        tier,
        collections.OrderedDict(
          (name, zero_unless(tensor))
          for name, tensor in tiers.delta(before, worked.weights[tier]).items()
        ),
      )
      for tier, before in shared.items()
    )
    weight = tf.cast(worked.num_examples, tf.float32)
    if client_weighting is ClientWeighting.UNIFORM:
      weight = tf.cast(worked.num_examples > 0, tf.float32)
    return (
      update,
      zero_unless(weight),
      _unless_spoilt(worked.is_finite, kept, memory.keep(worked)),
      unfinalized_metrics(worked),
    )

  kept_specs = tf.nest.map_structure(
    lambda t: tf.TensorSpec(t.shape, t.dtype), first_memory.structured_outputs
  )
  update_client = traced(
    client_update, shared_specs, frozen_specs, kept_specs, client_specs
  )

  @tff.tensorflow.computation
  def initial_weights() -> Any:
    return first_weights()

  @tff.tensorflow.computation(type_of(seed_spec))
  def initialize_client(seed: Any) -> Any:
    return first_memory(seed)

  kept_type = initialize_client.type_signature.result
  server_type = weights_type(model)

  @tff.tensorflow.computation(server_type, kept_type, type_of(client_specs))
  def client_work(weights: Any, kept: Any, client: Any) -> Any:
    return update_client(weights.trainable, weights.non_trainable, kept, client)

  update_type, weight_type, _, metrics_type = client_work.type_signature.result
  if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory):
    aggregator = tff.aggregators.as_weighted_aggregator(aggregator)
  aggregation = aggregator.create(update_type, weight_type)
  finalizer = tff.learning.templates.build_apply_optimizer_finalizer(
    server_optimizer, server_type
  )
  measure = tff.learning.metrics.sum_then_finalize(
    metric_finalizers(model), metrics_type
  )
  state_of = tff.learning.templates.LearningAlgorithmState

  @tff.tensorflow.computation
  def first_round() -> Any:
    return collections.OrderedDict(round=tf.constant(0))

  @tff.tensorflow.computation(first_round.type_signature.result)
  def count_round(work_state: Any) -> Any:
    return collections.OrderedDict(round=work_state['round'] + 1)

  @tff.federated_computation
  def initialize() -> Any:
    return tff.federated_zip(
      state_of(
        tff.federated_eval(initial_weights, tff.SERVER),
        tff.federated_value((), tff.SERVER),
        tff.federated_eval(first_round, tff.SERVER),
        aggregation.initialize(),
        finalizer.initialize(),
      )
    )

  @tff.federated_computation(
    initialize.type_signature.result,
    tff.FederatedType(kept_type, tff.CLIENTS),
    tff.FederatedType(type_of(client_specs), tff.CLIENTS),
  )
  def next_fn(state: Any, client_states: Any, clients: Any) -> Any:
    weights = tff.federated_broadcast(state.global_model_weights)
    update, weight, kept, client_metrics = tff.federated_map(
      client_work, (weights, client_states, clients)
    )
    joined = aggregation.next(state.aggregator, update, weight)
    moved = finalizer.next(
      state.finalizer, state.global_model_weights, joined.result
    )
    new_state = tff.federated_zip(
      state_of(
        moved.result,
        state.distributor,
        tff.federated_map(count_round, state.client_work),
        joined.state,
        moved.state,
      )
    )
    metrics = tff.federated_zip(
      collections.OrderedDict(
        client_work=collections.OrderedDict(train=measure(client_metrics)),
        aggregator=joined.measurements,
        finalizer=moved.measurements,
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
    initialize_client=initialize_client,
    get_model_weights=get_model_weights,
    set_model_weights=set_model_weights,
    model=model,
    example_spec=example_spec,
  )
