"""Keras objects as pure functions: their variables become arguments.

A Keras model or metric is built afresh while a function is traced, and its
requests for variables are answered with tensors. Trace under eager execution,
where Keras is the Keras that everybody knows; a TFF computation then calls the
traced function. Random draws of Keras's own layers and
initializers are redirected to `random_bits`, so that they follow from a seed
and are the same under every runtime.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_partial import errors
from tff_partial import random_bits


class ModelError(errors.UserError, ValueError):
  """Raised for a Keras model that cannot be used, with a way out."""


@contextlib.contextmanager
def answering_variables(
  creator: Callable[..., Any],
) -> Iterator[None]:
  """Within the context, `creator(next_creator, **request)` makes variables.

  Keras creates variables in the current graph or, within a function that is
  traced eagerly, outside of it. Both ask `creator`.
  """
  with tf.init_scope():
    outer = tf.compat.v1.get_default_graph()
  with contextlib.ExitStack() as stack:
    if outer is not tf.compat.v1.get_default_graph():
      stack.enter_context(outer._variable_creator_scope(creator))
    stack.enter_context(tf.variable_creator_scope(creator))
    yield


def traced(fn: Callable[..., Any], *specs: Any) -> Any:
  """Traces a function under eager execution, without AutoGraph.

  Our functions need no conversion, which would take longer than the tracing.
  Keras by itself converts what users wrote, here as anywhere else.
  """
  outside = tf.__internal__.autograph.control_status_ctx()

  def unconverted(*args: Any) -> Any:
    with outside:  # Where Keras has not been told to convert nothing.
      return fn(*args)

  return tf.function(unconverted, autograph=False).get_concrete_function(*specs)


class SeededDraws:
  """Stands in for Keras's random generator: each draw follows from the seed."""

  RNG_STATELESS = 'stateless'
  RNG_STATEFUL = 'stateful'
  RNG_LEGACY_STATEFUL = 'legacy_stateful'

  def __init__(self, seed: tf.Tensor):
    self._seed = seed
    self._draws = itertools.count()
    self._rng_type = self.RNG_STATELESS

  def _next_seed(self) -> tf.Tensor:
    return random_bits.fold_in(self._seed, next(self._draws))

  def _maybe_init(self) -> None:
    """Keras asks for this before a layer is built; there is nothing to do."""

  def make_legacy_seed(self) -> None:
    """Says that there is no seed of the stateful kind."""

  def make_seed_for_stateless_op(self) -> tf.Tensor:
    """Returns the seed of one draw."""
    return self._next_seed()

  def random_uniform(
    self,
    shape: Any,
    minval: float = 0.0,
    maxval: float | None = None,
    dtype: Any = None,
    nonce: Any = None,
  ) -> tf.Tensor:
    """Draws uniform numbers."""
    del nonce  # One draw never repeats another here.
    high = 1.0 if maxval is None else maxval
    dtype = tf.as_dtype(dtype or tf.keras.backend.floatx())
    return random_bits.uniform(self._next_seed(), shape, minval, high, dtype)

  def random_normal(
    self,
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = None,
    nonce: Any = None,
  ) -> tf.Tensor:
    """Draws normal numbers."""
    del nonce
    dtype = tf.as_dtype(dtype or tf.keras.backend.floatx())
    return random_bits.normal(self._next_seed(), shape, mean, stddev, dtype)

  def truncated_normal(
    self,
    shape: Any,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: Any = None,
    nonce: Any = None,
  ) -> tf.Tensor:
    """Draws normal numbers within two standard deviations."""
    del nonce
    dtype = tf.as_dtype(dtype or tf.keras.backend.floatx())
    return random_bits.truncated_normal(
      self._next_seed(), shape, mean, stddev, dtype
    )

  def dropout(
    self, inputs: tf.Tensor, rate: float, noise_shape: Any = None
  ) -> tf.Tensor:
    """Sets a random share of the inputs to zero and scales up the rest."""
    shape = tf.shape(inputs) if noise_shape is None else noise_shape
    kept = random_bits.uniform(self._next_seed(), shape) >= rate
    return inputs * tf.cast(kept, inputs.dtype) / (1.0 - rate)


class VariableSpec(NamedTuple):
  """One variable of a Keras model.

  Attributes:
    name: Its name in the model, `layer/variable`, unique.
    owners: For each layer that uses it, the names of the layers around that
      layer from the outside in, and its own.
    shape: Its static shape.
    dtype: Its type.
    trainable: Whether training may change it.
    position: Its index among `model.variables`.
    request: Its index among the variables that building the model asks for.
    initialize: From a seed, int32 `[2]`, to a first value.
  """

  name: str
  owners: tuple[tuple[str, ...], ...]
  shape: tuple[int, ...]
  dtype: tf.DType
  trainable: bool
  position: int
  request: int
  initialize: Callable[[tf.Tensor], tf.Tensor]

  @property
  def layers(self) -> tuple[str, ...]:
    """Names of all layers that hold the variable, directly or not."""
    return tuple(dict.fromkeys(name for chain in self.owners for name in chain))


class KerasSpec(NamedTuple):
  """What `analyse` finds out about a Keras model.

  Attributes:
    variables: All variables of the model, in order of creation.
    layers: Names of all layers.
    inputs: Structure of `tf.TensorSpec` of one example's input.
    outputs: Structure of `tf.TensorSpec` of one example's prediction.
  """

  variables: tuple[VariableSpec, ...]
  layers: tuple[str, ...]
  inputs: Any
  outputs: Any


_SAME_MODEL = (
  'The callable given to `from_keras` must build the same model every time.'
)
# Operations that change a variable.
_ASSIGNMENTS = (
  'AssignVariableOp',
  'AssignAddVariableOp',
  'AssignSubVariableOp',
)
_SCATTERS = ('ResourceScatter', 'ResourceApply')
# Operations that draw numbers from hidden state.
_DRAWS = (
  'RandomUniform',
  'RandomUniformInt',
  'RandomStandardNormal',
  'TruncatedNormal',
  'ParameterizedTruncatedNormal',
  'RandomShuffle',
  'RandomGamma',
  'RandomPoisson',
  'RandomPoissonV2',
  'Multinomial',
  'NonDeterministicInts',
  'StatefulUniform',
  'StatefulUniformInt',
  'StatefulUniformFullInt',
  'StatefulStandardNormal',
  'StatefulStandardNormalV2',
  'StatefulTruncatedNormal',
  'StatefulRandomBinomial',
  'RngReadAndSkip',
)


def _initializer_of(initial_value: Any) -> Any:
  """Whoever draws the value in a request for a variable."""
  if isinstance(initial_value, functools.partial):
    initial_value = initial_value.func
  return getattr(initial_value, '__self__', initial_value)


def _first_value(
  request: dict[str, Any], variable: tf.Variable
) -> Callable[[tf.Tensor], tf.Tensor]:
  """A pure function from a seed to the first value of a variable."""
  initial_value = request.get('initial_value')
  if not callable(initial_value):
    # A given value, the same for everybody.
    value = variable.numpy()
    return lambda seed: tf.constant(value)
  initializer = _initializer_of(initial_value)
  draws_it = hasattr(initializer, '_random_generator')
  own_seed = getattr(initializer, 'seed', None)

  def initialize(seed: tf.Tensor) -> tf.Tensor:
    if draws_it:
      if own_seed is not None:
        seed = tf.constant(random_bits.derive('initializer', own_seed))
      initializer._random_generator = SeededDraws(seed)
      initializer._used = False  # Keras warns of a second use without seed.
    value = initial_value()
    return tf.ensure_shape(tf.cast(value, variable.dtype), variable.shape)

  return initialize


def _layers_of(
  layer: tf.keras.layers.Layer,
) -> list[tf.keras.layers.Layer]:
  """All layers inside a model or another layer.

  `submodules` would do, if it did not fail for recurrent layers with dropout.
  """
  return list(layer._flatten_layers(include_self=False))


def _owners(
  variable: tf.Variable, layers: Sequence[tf.keras.layers.Layer]
) -> tuple[tuple[str, ...], ...]:
  """Each layer that uses the variable itself, after the layers around it."""
  holders = [
    layer for layer in layers if any(v is variable for v in layer.variables)
  ]
  inside = {
    id(layer): {id(other) for other in _layers_of(layer)} for layer in holders
  }
  chains = []
  for layer in holders:
    if not any(id(other) in inside[id(layer)] for other in holders):
      around = [h for h in holders if id(layer) in inside[id(h)]]
      around.sort(key=lambda h: -len(inside[id(h)]))
      chains.append(tuple(h.name for h in (*around, layer)))
  return tuple(chains)


def placeholder(spec: tf.TensorSpec) -> tf.Tensor:
  """A tensor of a batch of examples, for tracing."""
  return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape])


def _declared_inputs(model: tf.keras.Model) -> Any:
  """The specs of one example that a built functional model declares."""
  inputs = getattr(model, 'inputs', None)
  if not inputs:
    return None
  named = None
  if isinstance(model.input, dict):
    named = model.input
  elif len(inputs) > 1:
    named = dict(zip(model.input_names, inputs, strict=True))
  if named is None:
    return tf.TensorSpec(inputs[0].shape[1:], inputs[0].dtype)
  return collections.OrderedDict(
    (name, tf.TensorSpec(tensor.shape[1:], tensor.dtype))
    for name, tensor in named.items()
  )


def _responsible(name: str, layers: Sequence[tf.keras.layers.Layer]) -> str:
  """Words for the layer in whose scope an operation or variable stands."""
  # The innermost layer comes last.
  for part in reversed(name.split(':')[0].split('/')):
    for layer in layers:
      if layer.name == part:
        return f'Layer {layer.name!r} ({type(layer).__name__})'
  return f'The operation {name!r}'


def analyse(build: Callable[[], tf.keras.Model], inputs: Any) -> KerasSpec:
  """Builds a Keras model once and finds its variables, inputs and outputs.

  Args:
    build: Makes the model, always with the same variables in the same order.
    inputs: Structure of `tf.TensorSpec` of one example, or None if the model
      declares its inputs.

  Raises:
    ModelError: If the model cannot be a pure function: it updates state in
      training, draws from hidden generators, or was changed after building.
  """
  requests: list[tuple[dict[str, Any], tf.Variable]] = []

  def record(next_creator: Callable[..., Any], **request: Any) -> Any:
    variable = next_creator(**request)
    requests.append((request, variable))
    return variable

  with tf.__internal__.FuncGraph('analyse').as_default() as graph:
    with answering_variables(record):
      model = build()
      if not isinstance(model, tf.keras.Model):
        raise ModelError(
          'The callable given to `from_keras` must return a `tf.keras.Model`, '
          f'it returned {type(model).__name__}.'
        )
      if inputs is None:
        inputs = _declared_inputs(model)
      if inputs is None:
        raise ModelError(
          f'Model {model.name!r} does not say what its inputs are. Pass '
          '`inputs=tf.TensorSpec(shape of one example, dtype)` to '
          '`from_keras`, or begin the model with `tf.keras.Input`.'
        )
      layers = _layers_of(model)
      _refuse_assignments(
        graph,
        layers,
        'changes a variable while the model is built. Give trained values with '
        '`initial_weights` instead of loading them in the builder.',
      )
      outputs = model(tf.nest.map_structure(placeholder, inputs), training=True)
  layers = _layers_of(model)
  _refuse_assignments(
    graph,
    layers,
    'changes its variables while it trains, which a federated client cannot '
    'share. Use a layer without such state: '
    '`tf.keras.layers.GroupNormalization` or `LayerNormalization` instead of '
    'batch normalization.',
  )
  for layer in layers:
    _refuse_layer(layer)
  for request, variable in requests:
    if request.get('constraint') is not None:
      raise ModelError(
        f'Variable {variable.name.split(":")[0]!r} has a constraint, which '
        'nobody would apply: updates of it are averaged and noised. Use a '
        'regularizer, or constrain the weights where the layer reads them.'
      )
  trainable = {id(v) for v in model.trainable_variables}
  positions = {id(v): i for i, v in enumerate(model.variables)}
  names: collections.Counter[str] = collections.Counter()
  made = {id(variable) for _, variable in requests}
  variables = []
  for number, (request, variable) in enumerate(requests):
    if id(variable) not in positions:
      continue
    name = variable.name.split(':')[0]
    names[name] += 1
    if names[name] > 1:
      name = f'{name}_{names[name] - 1}'
    if not variable.shape.is_fully_defined():
      raise ModelError(
        f'Variable {name!r} has no fixed shape ({variable.shape}).'
      )
    variables.append(
      VariableSpec(
        name,
        _owners(variable, layers),
        tuple(variable.shape.as_list()),
        variable.dtype.base_dtype,
        id(variable) in trainable,
        positions[id(variable)],
        number,
        _first_value(request, variable),
      )
    )
  unmade = [v.name for v in model.variables if id(v) not in made]
  if unmade:
    raise ModelError(
      f'The variables {unmade} exist before the model is built. Create every '
      'layer inside the callable that is given to `from_keras`.'
    )
  return KerasSpec(
    tuple(variables),
    tuple(dict.fromkeys(layer.name for layer in layers)),
    inputs,
    tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape[1:], t.dtype), outputs
    ),
  )


def _refuse_layer(layer: tf.keras.layers.Layer) -> None:
  if getattr(layer, 'activity_regularizer', None) is not None:
    raise ModelError(
      f'Layer {layer.name!r} has an activity regularizer, whose value would '
      'depend on padded examples. Regularize its weights instead.'
    )
  generator = getattr(layer, '_random_generator', None)
  if getattr(generator, '_generator', None) is not None:
    raise ModelError(
      f'Layer {layer.name!r} ({type(layer).__name__}) keeps a random '
      'generator, whose state a pure function cannot change. Use layers such '
      'as dropout or noise, and augment examples before you pack them.'
    )
  if layer.weights and layer.compute_dtype != layer.variable_dtype:
    raise ModelError(
      f'Layer {layer.name!r} has weights of {layer.variable_dtype} and '
      f'computes in {layer.compute_dtype}. Mixed precision needs variables, '
      'which a pure function has not. Build the model with the dtype policy '
      'float32.'
    )


def _operations(graph: Any) -> Iterator[tuple[str, str]]:
  """Name and type of the operations of a graph and of its functions."""
  definition = graph.as_graph_def()
  nodes = [definition.node]
  nodes += [function.node_def for function in definition.library.function]
  for node in itertools.chain(*nodes):
    yield node.name, node.op


def _refuse_assignments(
  graph: Any, layers: Sequence[tf.keras.layers.Layer], complaint: str
) -> None:
  for name, kind in _operations(graph):
    if kind in _ASSIGNMENTS or kind.startswith(_SCATTERS):
      raise ModelError(f'{_responsible(name, layers)} {complaint}')


def rebuild(
  build: Callable[[], tf.keras.Model],
  variables: Sequence[VariableSpec],
  tensors: dict[str, tf.Tensor],
  inputs: Any,
  *,
  training: bool,
  seed: tf.Tensor,
) -> tuple[Any, list[tf.Tensor]]:
  """Builds the model on tensors and returns predictions and layers' losses.

  Args:
    build: Makes the model.
    variables: What `analyse` found.
    tensors: Variable name to value.
    inputs: A batch of inputs.
    training: Whether layers such as dropout behave as in training.
    seed: int32 `[2]`; what such layers draw follows from it.

  Raises:
    ModelError: If the model asks for other variables than at its analysis.
  """
  if tf.executing_eagerly():
    return _rebuild_in_graph(build, variables, tensors, inputs, training, seed)
  wanted = {variable.request: variable for variable in variables}
  requests = itertools.count()

  def answer(next_creator: Callable[..., Any], **request: Any) -> Any:
    del next_creator  # No variable is made.
    variable = wanted.pop(next(requests), None)
    if variable is None:
      return _stand_in(request)
    shape = request.get('shape')
    if shape is not None and tuple(tf.TensorShape(shape)) != variable.shape:
      raise ModelError(
        f'The model asks for a variable {request.get("name")!r} of shape '
        f'{shape} where it had {variable.name!r} of shape {variable.shape} '
        f'before. {_SAME_MODEL}'
      )
    return tensors[variable.name]

  with answering_variables(answer):
    model = build()
    for place, layer in enumerate(_layers_of(model)):
      if hasattr(layer, '_random_generator'):
        layer._random_generator = SeededDraws(random_bits.fold_in(seed, place))
    outputs = model(inputs, training=training)
  if wanted:
    raise ModelError(
      'The model no longer asks for the variables '
      f'{[variable.name for variable in wanted.values()]}. {_SAME_MODEL}'
    )
  unknown = [v.name for v in model.variables if isinstance(v, _StateTensor)]
  if unknown:
    raise ModelError(
      f'The model asks for the variables {unknown}, which it had not before. '
      f'{_SAME_MODEL}'
    )
  return outputs, list(model.losses)


def _rebuild_in_graph(
  build: Callable[[], tf.keras.Model],
  variables: Sequence[VariableSpec],
  tensors: dict[str, tf.Tensor],
  inputs: Any,
  training: bool,
  seed: tf.Tensor,
) -> tuple[Any, list[tf.Tensor]]:
  """Does what `rebuild` does, for tensors that Keras cannot build on.

  Keras wants the names that tensors have in a graph. It takes the time of a
  tracing each time: eager execution is for looking at things.
  """

  def run(tensors: dict[str, tf.Tensor], inputs: Any, seed: tf.Tensor) -> Any:
    outputs, losses = rebuild(
      build, variables, tensors, inputs, training=training, seed=seed
    )
    return outputs, losses, tf.nest.map_structure(mask_of, outputs)

  outputs, losses, masks = tf.function(run, autograph=False)(
    dict(tensors), inputs, tf.convert_to_tensor(seed)
  )
  for output, mask in zip(
    tf.nest.flatten(outputs), tf.nest.flatten(masks), strict=True
  ):
    if mask is not None:
      output._keras_mask = mask
  return outputs, losses


def refuse_hidden_draws(graph: Any) -> None:
  """Raises an error if a traced model draws from a hidden generator."""
  for name, kind in _operations(graph):
    if kind in _DRAWS:
      raise ModelError(
        f'The operation {name!r} ({kind}) draws random numbers from hidden '
        "state, so that a run could not be repeated. Use Keras's own "
        "initializers and random layers, created in the model's constructor."
      )


def depends_on(tensors: Sequence[tf.Tensor], sources: Sequence[Any]) -> bool:
  """Says whether any of the tensors is computed from any of the sources."""
  seen = set()
  stack = [t.op for t in tensors if tf.is_tensor(t)]
  wanted = {id(source.op) for source in sources}
  while stack:
    operation = stack.pop()
    if id(operation) in seen:
      continue
    seen.add(id(operation))
    if id(operation) in wanted:
      return True
    stack.extend(tensor.op for tensor in operation.inputs)
  return False


class _StateTensor:
  """Looks like a metric's variable and holds a tensor."""

  def __init__(self, value: tf.Tensor, name: str):
    self._value = value
    self.name = name
    self.trainable = False
    self._save_slice_info = None

  def value(self) -> tf.Tensor:
    return self._value

  read_value = value

  def assign(self, value: Any, **_: Any) -> tf.Tensor:
    self._value = tf.cast(value, self.dtype)
    return self._value

  def assign_add(self, value: Any, **_: Any) -> tf.Tensor:
    return self.assign(self._value + tf.cast(value, self.dtype))

  def assign_sub(self, value: Any, **_: Any) -> tf.Tensor:
    return self.assign(self._value - tf.cast(value, self.dtype))

  def __getattr__(self, name: str) -> Any:
    return getattr(self.__dict__['_value'], name)

  def __getitem__(self, key: Any) -> tf.Tensor:
    return self._value[key]


def _stand_in(request: dict[str, Any]) -> _StateTensor:
  """Takes the place of a variable that is no weight, such as a step counter."""
  value = request.get('initial_value')
  value = value() if callable(value) else value
  value = tf.convert_to_tensor(value, request.get('dtype'))
  return _StateTensor(value, str(request.get('name')))


def _operator(name: str) -> Callable[..., Any]:
  def apply(self: _StateTensor, *others: Any) -> Any:
    return getattr(self._value, name)(*others)

  return apply


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {'__getitem__', '__eq__'}:
  if hasattr(tf.Tensor, _name) and _name != '__ne__':
    setattr(_StateTensor, _name, _operator(_name))

tf.register_tensor_conversion_function(
  _StateTensor,
  lambda value, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(
    value.value(), dtype, name=name
  ),
)


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
  """The method without the graph function that Keras may wrap around it."""
  while hasattr(method, '__original_wrapped__'):
    method = method.__original_wrapped__
  return method


def mask_of(predictions: Any) -> tf.Tensor | None:
  """Which predictions count, if a layer of the model says so, else None."""
  return getattr(predictions, '_keras_mask', None)


def expand(tensor: tf.Tensor, rank: int, what: str) -> tf.Tensor:
  """Gives a tensor the rank of others, of which it has the first axes.

  Raises:
    ModelError: If it has more axes; `what` names the tensor.
  """
  missing = rank - tensor.shape.rank
  if missing < 0:
    raise ModelError(
      f'{what} has {tensor.shape.rank} axes, batch included, where the losses '
      f'have {rank}. A loss function returns one loss per example, or one for '
      'each of its steps if these are weighted or masked.'
    )
  ones = tf.ones([missing], tf.int32)
  return tf.reshape(tensor, tf.concat([tf.shape(tensor), ones], 0))


# One list of tensors a metric.
MetricState = collections.OrderedDict[str, list[tf.Tensor]]

# Measured of every client beside the model's metrics.
LOSS = 'loss'
COUNTS = ('num_examples', 'num_clients', 'num_not_finite')


class PureMetrics:
  """Keras metrics whose variables are arguments, sample weights included.

  The released `tff.learning.metrics.create_functional_metric_fns` drops sample
  weights, without which padding would be measured.
  """

  def __init__(
    self,
    build: Callable[[], Sequence[tf.keras.metrics.Metric]],
    labels: Any,
    predictions: Any,
    weight: tf.TensorSpec,
  ):
    """Looks at the metrics once.

    Args:
      build: Makes the metrics, anew with every call.
      labels: Specs of one example's label.
      predictions: Specs of one example's prediction.
      weight: Spec of one example's weight.

    Raises:
      ModelError: If names repeat, or if a state could not be summed.
    """
    self.build = build
    self._specs = (labels, predictions, weight)
    # In a graph of its own Keras counts metrics without a name from the start,
    # so that they have the same names in every program.
    with tf.__internal__.FuncGraph('metrics').as_default():
      metrics = list(build())
    for metric in metrics:
      if not isinstance(metric, tf.keras.metrics.Metric):
        raise ModelError(
          'The callable given as `metrics` must return a list of Keras '
          f'metrics, found {metric!r} in it.'
        )
    self.names = tuple(metric.name for metric in metrics)
    repeated = [n for n, k in collections.Counter(self.names).items() if k > 1]
    if repeated or {LOSS, *COUNTS} & set(self.names):
      raise ModelError(
        f'Metrics need distinct names other than {[LOSS, *COUNTS]}, found '
        f'{list(self.names)}. Pass `name=` to the metrics.'
      )
    self._initial = collections.OrderedDict(
      (metric.name, self._first_state(metric)) for metric in metrics
    )

  def _first_state(self, metric: tf.keras.metrics.Metric) -> list[np.ndarray]:
    """A metric's state before any example, which padding does not change."""
    with tf.init_scope():
      self._measure_padding(metric)
      state = [variable.numpy() for variable in metric.variables]
    # Zeros are no example, so that what is measured of them may be no number.
    if any(np.nan_to_num(value).any() for value in state):
      raise ModelError(
        f'The state of metric {metric.name!r} does not begin with zeros or is '
        'changed by an example of weight 0, so that it would count padding and '
        'could not be summed over clients. Honour `sample_weight`, and sum.'
      )
    return [np.zeros_like(value) for value in state]

  def _measure_padding(self, metric: tf.keras.metrics.Metric) -> None:
    """Measures an example without weight; some metrics wait for shapes."""
    labels, predictions, weight = tf.nest.map_structure(
      lambda spec: tf.zeros([1, *spec.shape], spec.dtype), self._specs
    )
    _undecorated(metric.update_state)(labels, predictions, sample_weight=weight)

  def initial_state(self) -> MetricState:
    """Returns the metrics' states before any example."""
    return collections.OrderedDict(
      (name, [tf.constant(value) for value in values])
      for name, values in self._initial.items()
    )

  def update(
    self, state: MetricState, labels: Any, predictions: Any, weight: tf.Tensor
  ) -> MetricState:
    """Returns the states after a batch; `weight` is 0 for padding."""
    mask = mask_of(predictions)
    if mask is not None:
      weight = expand(weight, mask.shape.rank, 'The weight of examples')
      weight *= tf.cast(mask, weight.dtype)
    result = collections.OrderedDict()
    for position, name in enumerate(self.names):
      metric, variables = self._metric_on(position, state[name])
      update = _undecorated(metric.update_state)
      update(labels, predictions, sample_weight=weight)
      try:
        result[name] = [tf.identity(v.value()) for v in variables]
      except ValueError as error:
        raise ModelError(
          f'Metric {name!r} assigns its state inside a condition or a loop, '
          'where a pure function cannot. Compute the value there, and assign '
          'it afterwards.'
        ) from error
    return result

  def finalizers(self) -> collections.OrderedDict[str, Any]:
    """Metric name to the function from its state to its value."""
    found = collections.OrderedDict()
    for position, name in enumerate(self.names):
      specs = [
        tf.TensorSpec(value.shape, value.dtype) for value in self._initial[name]
      ]
      with tf.init_scope():
        result = traced(functools.partial(self._result, position), specs)
      found[name] = tf.function(
        lambda state, result=result: result(list(state)), autograph=False
      )
    return found

  def _metric_on(
    self, position: int, state: Sequence[tf.Tensor]
  ) -> tuple[tf.keras.metrics.Metric, list[_StateTensor]]:
    """Builds one metric on tensors, which stand in its variables' order."""

    def answer(next_creator: Callable[..., Any], **request: Any) -> Any:
      del next_creator  # A tensor takes the variable's place.
      return _stand_in(request)

    with answering_variables(answer):
      metric = self.build()[position]
      if len(metric.variables) < len(state):
        self._measure_padding(metric)
    variables = list(metric.variables)
    for variable, tensor in zip(variables, state, strict=True):
      variable._value = tensor
    return metric, variables

  def _result(self, position: int, state: Sequence[tf.Tensor]) -> tf.Tensor:
    metric, _ = self._metric_on(position, state)
    return _undecorated(metric.result)()
