"""Check of models of sequences of open length: padding must not matter.

A layer that mixes steps, such as a convolution, reads what follows a sequence
unless it knows the mask. So a model is tried on the same sequences, padded to
two lengths: its predictions have to be the same, and its steps masked.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.data import examples
from tff_partial.data import lengths
from tff_partial.model import keras_3
from tff_partial.model import keras_analysis
from tff_partial.model import tracing
from tff_partial.model.keras_functions import mask_of
from tff_partial.model.keras_variables import ModelError
from tff_partial.model.states import ModelFunctions

# Steps of each sequence that is tried, and the lengths that they are padded to.
_STEPS = np.array([8] * 14 + [3, 1])
_SHORT, _LONG = 8, 13
# Between predictions of the same, whose sums may be in another order.
_TOLERANCE = 1e-4
# Rows of tables that a client sizes.
_ROWS = 8
_REMEDY = 'Or pad all sequences to one length, `Input([50])`.'


def check(model: Any, functions: ModelFunctions) -> None:
  """Check that a model computes the same however far sequences are padded.

  Args:
    model: A `PartialModel`; nothing is done if all its shapes are known.
    functions: Its functions.

  Raises:
    ModelError: If padding changes predictions or statistics, if predictions for
      steps have no mask, or another axis than the first is open.
  """
  specs = model.example_spec
  everything = tf.nest.flatten([*specs.values(), model.prediction_spec])
  if not lengths.are_open(everything):
    return
  if not lengths.are_open(specs['x']) or any(
    spec.shape.rank is None or None in spec.shape[1:].as_list()
    for spec in everything
  ):
    raise ModelError(
      'Only the first axis of an example may be open, and only if that of an '
      f'input is: one prediction is {model.prediction_spec} of {specs!r}. '
      'Give the others a size.'
    )
  random = np.random.default_rng(0)
  with tf.init_scope():
    keras = functions.filled(_values(model, random))
    _refuse_statistics(keras, model)
    short = _inputs(specs, random)
    tried = (
      short,
      examples.map_fields(
        lambda spec, array: (
          lengths.cut_or_padded(array, _LONG)
          if lengths.is_open(spec)
          else array
        ),
        specs['x'],
        short,
      ),
    )
    found = [tf.nest.flatten(_called(keras, x)) for x in tried]

    def changes(part: Any) -> bool:
      return not _same(*(part(x, training=False) for x in tried))

    def unmasks(part: Any) -> bool:
      return _is_open(part) and mask_of(part(short, training=False)) is None

    if not all(map(_same, *found)):
      raise ModelError(
        f'{_first(keras, changes)} computes something else if more '
        'padding follows a sequence. Take layers that leave masked steps out, '
        'after `Embedding(mask_zero=True)` or `Masking()`. ' + _REMEDY
      )
    if not all(map(_masked, *found)):
      raise ModelError(
        f'{_first(keras, unmasks)} gives steps of padding no mask, so that '
        'they would count in losses and metrics. Begin with '
        '`Embedding(mask_zero=True)` or `Masking()`, and let own layers set '
        '`supports_masking = True`. ' + _REMEDY
      )


def _called(keras: Any, inputs: Any) -> Any:
  """Call a Keras model, and explain errors."""
  try:
    return keras(inputs, training=False)
  except (ValueError, TypeError, tf.errors.OpError) as error:
    raise ModelError(
      'The model, whose inputs have an open length, cannot be called on '
      f'sequences of {_SHORT} or {_LONG} steps: {tracing.reason(error)} '
      f'{_REMEDY}'
    ) from error


def _values(model: Any, random: np.random.Generator) -> dict[str, np.ndarray]:
  """Draw a value for each variable: zeros would hide what a layer does."""
  first = dict(model.frozen_weights())
  for tier in model.tiers:
    first.update(model.initial_weights(tier, tf.constant([0, 0])))
  values = {}
  for variable in model.variables:
    shape = [_ROWS if n is None else n for n in variable.shape]
    value = first[variable.name].numpy()
    if variable.is_client_sized:
      value = np.zeros(shape, value.dtype)
    if variable.trainable:
      value = value + 0.1 * random.normal(size=shape).astype(value.dtype)
    values[variable.name] = value
  return values


def _inputs(
  specs: examples.ExampleSpec, random: np.random.Generator
) -> Mapping[str, Any]:
  """Draw sequences, with zeros after their steps."""
  sizes = [limits.size for ids in specs.ids.values() for limits in ids]
  limit = min([_ROWS, *(size for size in sizes if size)])

  def draw(spec: tf.TensorSpec) -> np.ndarray:
    shape = [len(_STEPS), *(_SHORT if n is None else n for n in spec.shape)]
    drawn: np.ndarray = random.normal(size=shape)
    if spec.dtype.is_integer:
      drawn = random.integers(1, max(limit, 2), shape)
    if lengths.is_open(spec):
      real = np.arange(_SHORT) < _STEPS[:, np.newaxis]
      drawn = drawn * real.reshape([*real.shape, *[1] * (len(shape) - 2)])
    return drawn.astype(spec.dtype.as_numpy_dtype)

  return examples.map_fields(draw, specs['x'])


def _same(short: tf.Tensor, long: tf.Tensor) -> bool:
  """Compare predictions, or what a layer computes, at real steps."""
  short, long = np.asarray(short), np.asarray(long)
  if short.shape != long.shape:
    if (short.shape[1], long.shape[1]) != (_SHORT, _LONG):
      return False
    real = np.arange(_SHORT) < _STEPS[:, np.newaxis]
    short, long = short[real], long[:, :_SHORT][real]
  return np.allclose(short, long, _TOLERANCE, _TOLERANCE * np.abs(short).max())


def _masked(short: tf.Tensor, long: tf.Tensor) -> bool:
  """Return True if exactly the real steps of open predictions are masked in."""
  if short.shape == long.shape:
    return True
  masks = mask_of(short), mask_of(long)
  return all(
    mask is not None
    and np.array_equal(mask, np.arange(mask.shape[1]) < _STEPS[:, np.newaxis])
    for mask in masks
  )


def _layers(keras: Any) -> Iterator[Any]:
  """Yield the layers of a functional model that have one output, in order."""
  graph = keras_3.graph_of(keras)
  if getattr(graph, '_nodes_by_depth', None):
    # In Keras 3, sums and the like of tensors are no layers.
    for layer in getattr(graph, 'operations', graph.layers):
      outputs = [
        tf.nest.flatten(node.outputs)
        for node in layer._inbound_nodes
        if not node.is_input
      ]
      if list(map(len, outputs)) == [1]:
        yield layer


def _is_open(layer: Any) -> bool:
  """Return True if a layer or model has an output of open length."""
  return None in list(layer.output.shape)[1:]


def _named(layer: Any) -> str:
  return f'Layer {layer.name!r} ({type(layer).__name__})'


def _refuse_statistics(keras: Any, model: Any) -> None:
  """Refuse layers that compute statistics over steps in training."""
  holders = {n for v in model.variables if v.is_state for n in v.layers}
  for layer in _layers(keras):
    if layer.name in holders and _is_open(layer):
      raise ModelError(
        f'{_named(layer)} computes statistics over steps in training, and so '
        "of padding. Take LayerNormalization, or `state='frozen'`. " + _REMEDY
      )


def _first(keras: Any, is_wrong: Callable[[Any], bool]) -> str:
  """Name the first layer such that the part of a model up to it is wrong."""
  for layer in _layers(keras):
    inputs = keras_analysis.input_tensors(keras)
    part = keras_3.module_of(keras).Model(inputs, layer.output)
    if is_wrong(part):
      return _named(layer)
  return 'The model'
