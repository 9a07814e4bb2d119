"""Keras 3 models as pure functions: tensors in place of their variables.

A model's variables are made once, and a stateless scope, as in
`Model.stateless_call`, substitutes tensors for them. Draws of layers and
initializers follow from a seed, as with Keras 2 (see `seeded_draws.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.model import keras_3
from tff_partial.model import keras_analysis
from tff_partial.model import keras_filling
from tff_partial.model import keras_refusals
from tff_partial.model import seeded_draws
from tff_partial.model import tracing
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import in_float32
from tff_partial.model.keras_variables import ModelError

_Build = Callable[[], Any]


class Keras3Functions:
  """A Keras 3 model as pure functions.

  Attributes:
    spec: Its variables, layers, inputs and outputs.
  """

  def __init__(self, build: _Build, inputs: Any):
    """Build the model; `inputs` are those of `from_keras`.

    Raises:
      ModelError: If the model cannot be a pure function.
    """
    backend = keras_3.module().backend.backend()
    if backend != 'tensorflow':
      raise ModelError(
        f'The model is one of Keras 3 with the backend {backend}. Clients '
        'compute with TensorFlow: set `KERAS_BACKEND=tensorflow` before keras '
        'is imported.'
      )
    self._build = build
    self._model, inputs, self._made = _made(build, inputs)
    self._layers = layers = keras_analysis.layers_of(self._model)
    for layer in layers:
      keras_refusals.refuse_kind(layer)
      keras_refusals.refuse_layer(layer)
    names = [_name(v, self._model) for v in self._model.weights]
    self._names = dict(zip(map(id, self._model.weights), names, strict=True))
    # Counters of draws and of steps, which the model does not read.
    self._constants = {
      id(v): v.numpy()
      for v in self._model.variables
      if id(v) not in self._names
    }
    variables = self._variables(layers)
    outputs, self._changed = self._called(variables, inputs)
    self.spec = keras_analysis.spec_of(variables, layers, inputs, outputs)

  def changed(self) -> frozenset[str]:
    """Return the names of the variables that layers change in training."""
    return self._changed

  def with_variables(
    self, variables: Sequence[VariableSpec]
  ) -> 'Keras3Functions':
    """Return the same functions, of variables with a treatment of state."""
    found = copy.copy(self)
    found.spec = self.spec._replace(variables=tuple(variables))
    frozen = {v.name for v in variables if v.state and not v.is_state}
    for layer in self._layers:
      keras_analysis.freeze_states(
        layer, lambda v: self._names.get(id(v)) in frozen
      )
    return found

  def _variables(self, layers: Sequence[Any]) -> tuple[VariableSpec, ...]:
    """Describe the weights of the model, in order of creation."""
    positions = {id(v): i for i, v in enumerate(self._model.weights)}
    found = []
    for request, (variable, initializer) in enumerate(self._made.created):
      if id(variable) not in positions:
        continue
      name = self._names[id(variable)]
      if getattr(variable, 'constraint', None) is not None:
        raise ModelError(keras_analysis.CONSTRAINED.format(name=name))
      is_assigned = id(variable) in self._made.assigned
      is_given = is_assigned or not callable(initializer)
      value = variable.numpy() if is_given else None
      found.append(
        VariableSpec(
          name,
          keras_analysis.owners(variable, layers),
          tuple(variable.shape),
          tf.as_dtype(variable.dtype),
          bool(variable.trainable),
          positions[id(variable)],
          request,
          _first_value(initializer, variable, value),
          value,
          is_assigned,
        )
      )
    missing = sorted(set(self._names.values()) - {v.name for v in found})
    if missing:
      raise ModelError(keras_analysis.MADE_BEFORE.format(names=missing))
    return tuple(found)

  def _called(
    self, variables: Sequence[VariableSpec], inputs: Any
  ) -> tuple[Any, frozenset[str]]:
    """Call the model in training mode, in a graph that is never run.

    Returns:
      Its outputs, and the names of the variables that it changes.
    """
    with tf.__internal__.FuncGraph('analyse').as_default() as graph:
      outputs, _, updates = self.call(
        {v.name: tf.compat.v1.placeholder(v.dtype, v.shape) for v in variables},
        tf.nest.map_structure(tracing.placeholder, inputs),
        training=True,
        seed=tf.compat.v1.placeholder(tf.int32, [2]),
      )
    keras_refusals.refuse_lookups(graph, self._layers)
    return outputs, frozenset(updates)

  def call(
    self,
    tensors: Mapping[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Call the model on tensors; return predictions, losses and new states.

    Raises:
      ModelError: If a layer changes variables that are not its weights, or
        draws numbers that cannot follow from a seed.
    """
    given = [
      (variable, tf.convert_to_tensor(self._value(variable, tensors)))
      for variable in self._model.variables
    ]
    options: dict[str, Any] = {}
    if self._model._call_has_training_arg:
      options['training'] = training
    with (
      keras_3.drawing(seed),
      keras_3.module().StatelessScope(given, collect_losses=True) as scope,
    ):
      outputs = self._model(inputs, **options)
      losses = list(self._model.losses)
    outputs, losses = in_float32((outputs, losses))
    updates = {}
    for variable, value in given:
      new = scope.get_current_value(variable)
      if new is value:
        continue
      if id(variable) not in self._names or variable.trainable:
        keras_refusals.refuse_updates(variable.path)
      updates[self._names[id(variable)]] = tf.convert_to_tensor(new)
    return outputs, losses, updates

  def _value(self, variable: Any, tensors: Mapping[str, tf.Tensor]) -> Any:
    if id(variable) in self._names:
      return tensors[self._names[id(variable)]]
    return self._constants[id(variable)]

  def filled(self, values: Mapping[str, Any]) -> Any:
    """Make another model and give its variables values, by name.

    Raises:
      ModelError: If a value has the wrong shape.
    """
    model, _, _ = _made(self._build, self.spec.inputs)
    specs = {spec.name: spec for spec in self.spec.variables}
    for variable in model.weights:
      name = _name(variable, model)
      variable.assign(keras_filling.checked(specs[name], values[name]))
    return model


class _Created:
  """Variables that building a model makes, in order.

  Attributes:
    created: Each variable with its initializer or first value.
    assigned: Ids of those that were assigned to after they were made.
  """

  def __init__(self) -> None:
    self.created: list[tuple[Any, Any]] = []
    self.assigned: set[int] = set()

  @contextlib.contextmanager
  def noting(self) -> Iterator[None]:
    """Record the variables that are made or assigned within the context."""
    kind = keras_3.module().Variable
    init, assign = kind.__init__, kind.assign

    def note_init(
      variable: Any, initializer: Any, *args: Any, **options: Any
    ) -> None:
      init(variable, initializer, *args, **options)
      self.created.append((variable, initializer))

    def note_assign(variable: Any, value: Any) -> Any:
      self.assigned.add(id(variable))
      return assign(variable, value)

    with keras_3.replaced(kind, '__init__', note_init):
      with keras_3.replaced(kind, 'assign', note_assign):
        yield


def _made(build: _Build, inputs: Any) -> tuple[Any, Any, _Created]:
  """Build a model with all its variables; return its inputs, too."""
  created = _Created()
  with tf.init_scope(), keras_3.fresh_names(), created.noting():
    model = build()
    if inputs is None:
      inputs = keras_analysis.declared_inputs(model)
    inputs = keras_analysis.without_lists(inputs)
    keras_refusals.refuse_open_shapes(inputs)
    if not model.built or not getattr(model, 'inputs', None):
      model(tracing.one_example(inputs))
      created.assigned.clear()  # State of random generators and the like.
  return model, inputs, created


def _name(variable: Any, model: Any) -> str:
  """Return `layer/variable`, without the model's own name."""
  return variable.path.removeprefix(f'{model.name}/')


def _first_value(
  initializer: Any, variable: Any, value: np.ndarray | None
) -> Callable[[tf.Tensor], tf.Tensor]:
  """Return a pure function from a seed to a variable's first value."""
  if value is not None:
    return lambda seed: tf.constant(value)
  shape, dtype = tuple(variable.shape), variable.dtype
  own_seed = getattr(initializer, '_init_seed', None)

  def initialize(seed: tf.Tensor) -> tf.Tensor:
    if isinstance(own_seed, int):
      seed = seeded_draws.seed_of(own_seed)
    with keras_3.drawing(seed):
      drawn = tf.convert_to_tensor(initializer(shape, dtype=dtype))
    return tf.ensure_shape(tf.cast(drawn, dtype), shape)

  return initialize
