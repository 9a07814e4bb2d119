"""Analysis of a Keras model: its variables, inputs and outputs.

A model is built and called once, in a graph that is never run.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_partial.data import examples
from tff_partial.model import client_tables
from tff_partial.model import keras_refusals
from tff_partial.model import keras_variables
from tff_partial.model import loss_scaling
from tff_partial.model import seeded_draws
from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError

CONSTRAINED = (
  'Variable {name!r} has a constraint, which would not be applied: updates of '
  'it are averaged and noised. Use a regularizer, or constrain the weights '
  'where the layer reads them.'
)
MADE_BEFORE = (
  'The variables {names} exist before the model is built. Create every layer '
  'inside the callable that is given to `from_keras`.'
)
_NO_INPUTS = (
  'Model {name!r} does not say what its inputs are. Pass '
  '`inputs=tf.TensorSpec(shape of one example, dtype)` to `from_keras`, or '
  'begin the model with an `Input` of Keras.'
)


class VariableSpec(NamedTuple):
  """One variable of a Keras model.

  Attributes:
    name: Its name in the model, `layer/variable`, unique.
    owners: For each layer that uses it, the names of the layers around that
      layer from the outside in, then the layer's own.
    shape: Its static shape; the first dimension is None if the table is sized
      per client.
    dtype: Its type.
    trainable: True if training may change it: by gradients, or as a state.
    position: Its index among `model.variables`.
    request: Its index among the variables that building the model asks for.
    initialize: From a seed, int32 `[2]`, to a first value.
    value: The first value that building the model gives it, or None if it draws
      one.
    is_assigned: True if it gets this value after it was made, as by `weights=`.
    draw_rows: From a seed and a number to the first values of that many rows;
      None if it is not a table or has given values.
    state: Treatment of a variable that its layer changes in training, as batch
      normalization changes its moving averages; None for all others.
  """

  name: str
  owners: tuple[tuple[str, ...], ...]
  shape: tuple[int | None, ...]
  dtype: tf.DType
  trainable: bool
  position: int
  request: int
  initialize: Callable[[tf.Tensor], tf.Tensor]
  value: np.ndarray | None = None
  is_assigned: bool = False
  draw_rows: client_tables.DrawRows | None = None
  state: str | None = None

  @property
  def is_state(self) -> bool:
    """True if training changes it, but not by gradients."""
    return self.trainable and self.state is not None

  @property
  def is_client_sized(self) -> bool:
    """True if each client has as many rows of it as it needs."""
    return None in self.shape

  @property
  def size(self) -> int:
    """Number of elements; in one row, if the table is sized per client."""
    return math.prod(n for n in self.shape if n is not None)

  def fits(self, shape: Sequence[int | None]) -> bool:
    """Check a value's shape against the variable's."""
    return tf.TensorShape(self.shape).is_compatible_with(tuple(shape))

  @property
  def layers(self) -> tuple[str, ...]:
    """Names of all layers that hold the variable, directly or indirectly."""
    return tuple(dict.fromkeys(name for chain in self.owners for name in chain))


class KerasSpec(NamedTuple):
  """The findings of `analyse` about a Keras model.

  Attributes:
    variables: All variables of the model, in order of creation.
    layers: Names of all layers.
    inputs: Structure of `tf.TensorSpec` of one example's input.
    outputs: Structure of `tf.TensorSpec` of one example's prediction.
    loss_scale: Multiplies gradients inside the model: see `loss_scaling`.
    constants: Digests of its constant arrays, which each build is to repeat.
  """

  variables: tuple[VariableSpec, ...]
  layers: tuple[str, ...]
  inputs: Any
  outputs: Any
  loss_scale: float
  constants: frozenset[bytes] = frozenset()


def layers_of(layer: tf.keras.layers.Layer) -> list[tf.keras.layers.Layer]:
  """Return all layers inside a model or another layer.

  `submodules` fails for recurrent layers with dropout.
  """
  return list(layer._flatten_layers(include_self=False))


def freeze_states(layer: Any, is_frozen: Callable[[Any], bool]) -> None:
  """Let a layer normalize as in evaluation if its state is frozen.

  Args:
    layer: A layer of Keras 2 or 3.
    is_frozen: Tells for one of its variables if it is a frozen state.
  """
  of_keras_3 = getattr(layer, '_non_trainable_variables', ())
  if any(map(is_frozen, getattr(layer, '_non_trainable_weights', of_keras_3))):
    layer.trainable = False


def owners(
  variable: tf.Variable, layers: Sequence[tf.keras.layers.Layer]
) -> tuple[tuple[str, ...], ...]:
  """Return each layer that uses the variable, after the layers around it."""
  holders = [
    layer
    for layer in layers
    if any(keras_variables.uncast(v) is variable for v in layer.variables)
  ]
  inside = {
    id(layer): {id(other) for other in layers_of(layer)} for layer in holders
  }
  chains = []
  for layer in holders:
    if not any(id(other) in inside[id(layer)] for other in holders):
      around = [h for h in holders if id(layer) in inside[id(h)]]
      around.sort(key=lambda h: -len(inside[id(h)]))
      chains.append(tuple(h.name for h in (*around, layer)))
  return tuple(chains)


def declared_inputs(model: Any) -> Any:
  """Return the input specs of one example that a model declares.

  Raises:
    ModelError: If it declares none.
  """
  return examples.map_fields(
    lambda tensor: tf.TensorSpec(tensor.shape[1:], tensor.dtype),
    input_tensors(model),
  )


def input_tensors(model: Any) -> Any:
  """Return a model's input, or its inputs by name.

  Raises:
    ModelError: If it declares none.
  """
  inputs = getattr(model, 'inputs', None)
  if not inputs:
    raise ModelError(_NO_INPUTS.format(name=model.name))
  named = getattr(model, 'input', None)
  if not isinstance(named, dict):
    if len(inputs) == 1:
      return inputs[0]
    # Keras 2 has names of inputs, and Keras 3 of their tensors.
    names = getattr(model, 'input_names', None) or [t.name for t in inputs]
    named = dict(zip(names, inputs, strict=True))
  return collections.OrderedDict(named)


class _Requests:
  """The variables that building a model asks for, in order.

  Attributes:
    made: Each request with the variable made for it.
    given: Request number to the value given at first, or assigned before any
      call.
    assigned: Request numbers of variables assigned to after they were made.
  """

  def __init__(self) -> None:
    self.made: list[tuple[dict[str, Any], tf.Variable]] = []
    self.given: dict[int, np.ndarray] = {}
    self.assigned: set[int] = set()

  def answer(self, next_creator: Callable[..., Any], **request: Any) -> Any:
    """Make a variable and note its given value."""
    number = len(self.made)
    initial_value = request.get('initial_value')
    if tf.is_tensor(initial_value) and not hasattr(initial_value, 'numpy'):
      # A variable outlives the graph in which its value was computed.
      request['initial_value'] = tracing.value_of(initial_value)
    variable = next_creator(**request)
    self.made.append((request, variable))
    if not callable(initial_value):
      with tf.init_scope():
        self.given[number] = variable.numpy()
    assign = variable.assign

    def note(value: Any, *args: Any, **options: Any) -> Any:
      if not tf.is_tensor(value) or hasattr(value, 'numpy'):
        self.given[number] = np.asarray(value, variable.dtype.as_numpy_dtype)
        self.assigned.add(number)
      return assign(value, *args, **options)

    variable.assign = note  # By `weights=`, among others.
    return variable

  def variables(
    self, model: tf.keras.Model, layers: Sequence[tf.keras.layers.Layer]
  ) -> tuple[VariableSpec, ...]:
    """Return the variables of a model.

    Raises:
      ModelError: If one has a constraint or an open shape, or was made outside
        the builder.
    """
    uncast = keras_variables.uncast
    trainable = {id(uncast(v)) for v in model.trainable_variables}
    positions = {id(uncast(v)): i for i, v in enumerate(model.variables)}
    names: collections.Counter[str] = collections.Counter()
    found = []
    for number, (request, variable) in enumerate(self.made):
      name = variable.name.split(':')[0]
      if request.get('constraint') is not None:
        raise ModelError(CONSTRAINED.format(name=name))
      if id(variable) not in positions:
        continue
      names[name] += 1
      if names[name] > 1:
        name = f'{name}_{names[name] - 1}'
      if not variable.shape.is_fully_defined():
        raise ModelError(
          f'Variable {name!r} has no fixed shape ({variable.shape}).'
        )
      value = self.given.get(number)
      found.append(
        VariableSpec(
          name,
          owners(variable, layers),
          tuple(variable.shape.as_list()),
          variable.dtype.base_dtype,
          id(variable) in trainable,
          positions[id(variable)],
          number,
          _first_value(request, variable, value),
          value,
          number in self.assigned,
          None
          if value is not None or not variable.shape.rank
          else seeded_draws.first_rows(request, variable),
        )
      )
    made = {id(variable) for _, variable in self.made}
    if unmade := [v.name for v in model.variables if id(uncast(v)) not in made]:
      raise ModelError(MADE_BEFORE.format(names=unmade))
    return tuple(found)


def analyse(build: Callable[[], tf.keras.Model], inputs: Any) -> KerasSpec:
  """Build a Keras model once and find its variables, inputs and outputs.

  Args:
    build: Makes the model, always with the same variables in the same order.
    inputs: Structure of `tf.TensorSpec` of one example, or None if the model
      declares its inputs.

  Raises:
    ModelError: If the model cannot be a pure function: it updates state in
      training, draws from hidden generators, or was changed after building.
  """
  requests = _Requests()
  with tf.__internal__.FuncGraph('analyse').as_default() as graph:
    with keras_variables.answering_variables(requests.answer):
      with keras_refusals.explaining():
        model = build()
      if not isinstance(model, tf.keras.Model):
        raise ModelError(
          'The callable given to `from_keras` must return a `tf.keras.Model`, '
          f'it returned {type(model).__name__}.'
        )
      inputs = declared_inputs(model) if inputs is None else inputs
      layers = layers_of(model)
      keras_refusals.refuse_operations(
        graph,
        keras_refusals.ASSIGNMENTS,
        layers,
        f'changes a variable while the model is built. {keras_refusals.GIVE}',
      )
      inputs = without_lists(inputs)
      keras_refusals.refuse_open_shapes(inputs)
      for layer in layers:
        keras_refusals.refuse_kind(layer)
      with keras_refusals.explaining():
        outputs = model(
          tf.nest.map_structure(tracing.placeholder, inputs), training=True
        )
      outputs = keras_variables.in_float32(outputs)
  layers = layers_of(model)
  keras_refusals.refuse_lookups(graph, layers)
  for layer in layers:
    keras_refusals.refuse_layer(layer)
  found = spec_of(requests.variables(model, layers), layers, inputs, outputs)
  return found._replace(constants=tracing.constants_of(graph))


def spec_of(
  variables: tuple[VariableSpec, ...],
  layers: Sequence[Any],
  inputs: Any,
  outputs: Any,
) -> KerasSpec:
  """Describe a model by its variables and layers, and outputs of a batch."""
  return KerasSpec(
    variables,
    tuple(dict.fromkeys(layer.name for layer in layers)),
    inputs,
    tf.nest.map_structure(
      lambda t: tf.TensorSpec(t.shape[1:], t.dtype), outputs
    ),
    loss_scaling.scale_of(layers),
  )


def _first_value(
  request: dict[str, Any], variable: tf.Variable, value: np.ndarray | None
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return a function from a seed to a variable's first value."""
  if value is None:
    return seeded_draws.first_value(request, variable)
  return lambda seed: tf.constant(value)


def without_lists(structure: Any) -> Any:
  """Return a structure with tuples in place of lists."""
  if isinstance(structure, Mapping):
    return collections.OrderedDict(
      (name, without_lists(value)) for name, value in structure.items()
    )
  if isinstance(structure, (list, tuple)):
    return tuple(map(without_lists, structure))
  return structure


def described(what: str, variables: Sequence[VariableSpec]) -> list[str]:
  """Return lines that describe variables: their total size and shapes."""
  total = sum(v.size for v in variables if not v.is_client_sized)
  sized = any(v.is_client_sized for v in variables)
  return [
    f'  {what}: {total:,} parameters'
    f'{", and rows as each client needs them" if sized else ""}',
    *(
      f'    {v.name}: {v.dtype.name} {list(v.shape)}'
      f'{f" ({v.state} state)" if v.state else ""}'
      for v in variables
    ),
  ]
