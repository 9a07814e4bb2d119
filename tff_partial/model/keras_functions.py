"""Keras models as pure functions: their variables become arguments.

A model is rebuilt while a function is traced (see `keras_variables.py`). Trace
under eager execution, where Keras behaves as usual; a TFF computation then
calls the traced function. Layers' draws follow from a seed (see
`seeded_draws.py`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import functools
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import random_bits
from tff_partial.model import keras_analysis
from tff_partial.model import keras_filling
from tff_partial.model import keras_refusals
from tff_partial.model import keras_variables
from tff_partial.model import seeded_draws
from tff_partial.model import tracing
from tff_partial.model.keras_analysis import KerasSpec
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import ModelError

_SAME_MODEL = (
  'The callable given to `from_keras` must build the same model every time.'
)


def mask_of(predictions: Any) -> tf.Tensor | None:
  """Return the mask of predictions or losses, if a layer or loss set one."""
  return getattr(predictions, '_keras_mask', None)


class Keras2Functions:
  """A Keras 2 model as pure functions: it is rebuilt on tensors.

  Attributes:
    spec: Its variables, layers, inputs and outputs.
  """

  def __init__(self, build: Callable[[], tf.keras.Model], spec: KerasSpec):
    """Store the builder and the result of `analyse`; build nothing yet."""
    self._build = build
    self.spec = spec

  def changed(self) -> frozenset[str]:
    """Return the names of the variables that layers change in training."""
    candidates = tuple(
      v if v.trainable else v._replace(trainable=True, state='unknown')
      for v in self.spec.variables
    )
    if not any(v.is_state for v in candidates):
      return frozenset()
    with tf.__internal__.FuncGraph('changed').as_default():
      with keras_refusals.explaining_tensors():
        _, _, updates = self.with_variables(candidates).call(
          {
            v.name: tf.compat.v1.placeholder(v.dtype, v.shape)
            for v in candidates
          },
          tf.nest.map_structure(tracing.placeholder, self.spec.inputs),
          training=True,
          seed=tf.compat.v1.placeholder(tf.int32, [2]),
        )
    return frozenset(updates)

  def with_variables(
    self, variables: Sequence[VariableSpec]
  ) -> 'Keras2Functions':
    """Return the same functions, of variables with a treatment of state."""
    spec = self.spec._replace(variables=tuple(variables))
    return Keras2Functions(self._build, spec)

  def call(
    self,
    tensors: dict[str, tf.Tensor],
    inputs: Any,
    *,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
    """Build the model on tensors; return predictions, losses and new states.

    Arguments are as for `PartialModel.call`; `tensors` are of all variables.

    Raises:
      ModelError: If the model asks for other variables than when analysed.
    """
    if tf.executing_eagerly():
      rebuild_on = functools.partial(self.call, training=training)
      return _in_graph(rebuild_on, tensors, inputs, seed)
    wanted = {variable.request: variable for variable in self.spec.variables}
    requests = itertools.count()
    states: dict[str, keras_variables.StateTensor] = {}
    frozen = {v.name for v in self.spec.variables if v.state and not v.is_state}

    def answer(next_creator: Callable[..., Any], **request: Any) -> Any:
      del next_creator  # No variable is made.
      variable = wanted.pop(next(requests), None)
      if variable is None:
        return keras_variables.stand_in(request)
      shape = request.get('shape')
      if shape is not None and not variable.fits(tf.TensorShape(shape)):
        raise ModelError(
          f'The model asks for a variable {request.get("name")!r} of shape '
          f'{shape} where it had {variable.name!r} of shape {variable.shape} '
          f'before. {_SAME_MODEL}'
        )
      tensor = tensors[variable.name]
      if variable.state is not None:
        states[variable.name] = keras_variables.StateTensor(
          tensor, variable.name
        )
        return states[variable.name]
      if variable.value is not None:
        if not variable.is_assigned:
          given = request.get('initial_value')
          _check_value(variable.name, variable.value, given)
        if isinstance(tensor, tf.Tensor):
          _like_a_variable(tensor)
      return tensor

    with keras_variables.answering_variables(answer):
      model = self._build()
      for place, layer in enumerate(keras_analysis.layers_of(model)):
        keras_analysis.freeze_states(layer, lambda v: v.name in frozen)
        if hasattr(layer, '_random_generator'):
          layer._random_generator = seeded_draws.SeededDraws(
            random_bits.fold_in(seed, place)
          )
      for name, state in states.items():
        state.assign(tensors[name])  # Not what `weights=` assigned.
      outputs = model(inputs, training=training)
    _check_variables(model, wanted.values(), states)
    updates = {
      name: state.value()
      for name, state in states.items()
      if name not in frozen and state.value() is not tensors[name]
    }
    return *keras_variables.in_float32((outputs, list(model.losses))), updates

  def filled(self, values: Mapping[str, Any]) -> tf.keras.Model:
    """Make a Keras model and give its variables values, by name.

    Raises:
      ModelError: If a value has the wrong shape.
    """
    made: list[tf.Variable] = []
    by_request = {
      v.request: v for v in self.spec.variables if v.is_client_sized
    }

    def record(next_creator: Callable[..., Any], **request: Any) -> Any:
      sized = by_request.get(len(made))
      if sized is not None:  # As many rows as the client has.
        request['initial_value'] = np.asarray(values[sized.name])
        request['shape'] = None
      made.append(next_creator(**request))
      return made[-1]

    with keras_variables.answering_variables(record):
      keras_model = self._build()
      if not keras_model.built:
        keras_model(tracing.one_example(self.spec.inputs))
    held = {id(keras_variables.uncast(v)) for v in keras_model.variables}
    mine = [v for v in made if id(v) in held]
    for spec, variable in zip(self.spec.variables, mine, strict=True):
      variable.assign(keras_filling.checked(spec, values[spec.name]))
    if by_request:
      _tell_embeddings(keras_model)
    return keras_model


def _tell_embeddings(keras_model: tf.keras.Model) -> None:
  """Set the number of rows of embeddings, which loading a saved model needs."""
  for layer in keras_analysis.layers_of(keras_model):
    if isinstance(layer, tf.keras.layers.Embedding) and layer.built:
      layer.input_dim = layer.embeddings.shape[0]


def _check_variables(
  model: tf.keras.Model,
  missing: Collection[VariableSpec],
  states: Mapping[str, keras_variables.StateTensor],
) -> None:
  """Check that a model was built with the variables that it had before."""
  if missing:
    raise ModelError(
      f'The model no longer asks for the variables {[v.name for v in missing]}.'
      f' {_SAME_MODEL}'
    )
  unknown = [
    v.name
    for v in model.variables
    if isinstance(v, keras_variables.StateTensor)
    and v is not states.get(v.name)
  ]
  if unknown:
    raise ModelError(
      f'The model asks for the variables {unknown}, which it had not before. '
      f'{_SAME_MODEL}'
    )


def _check_value(name: str, value: np.ndarray, given: Any) -> None:
  """Refuse values that are drawn again each time the model is built."""
  if not isinstance(given, (np.ndarray, tf.__internal__.EagerTensor)):
    return
  same = np.asarray(given).astype(value.dtype)
  if not np.array_equal(same, value, equal_nan=value.dtype.kind == 'f'):
    raise ModelError(
      f'Variable {name!r} begins with another value each time that '
      'the model is built. Make it with `self.add_weight(..., '
      "initializer='random_normal')`, whose draws follow from a seed."
    )


def _like_a_variable(tensor: tf.Tensor) -> None:
  """Give a tensor the methods of a variable that a user made.

  Values assigned while the model is built, as by `weights=`, are ignored: the
  tensor started from them.
  """
  tensor.assign = lambda value, *_, **__: value
  tensor.value = tensor.read_value = lambda *_: tensor


def _in_graph(
  rebuild_on: Callable[..., tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]],
  tensors: dict[str, tf.Tensor],
  inputs: Any,
  seed: tf.Tensor,
) -> tuple[Any, list[tf.Tensor], dict[str, tf.Tensor]]:
  """Rebuild a model on eager tensors, which Keras cannot build on.

  Keras needs the names that tensors have in a graph. Each call is traced again:
  eager execution is for inspection.
  """

  def run(tensors: dict[str, tf.Tensor], inputs: Any, seed: tf.Tensor) -> Any:
    found = rebuild_on(tensors, inputs, seed=seed)
    return found, tf.nest.map_structure(mask_of, found[0])

  (outputs, losses, updates), masks = tracing.unconverted(run)(
    dict(tensors), inputs, tf.convert_to_tensor(seed)
  )
  for output, mask in zip(
    tf.nest.flatten(outputs), tf.nest.flatten(masks), strict=True
  ):
    if mask is not None:
      output._keras_mask = mask
  return outputs, losses, updates
