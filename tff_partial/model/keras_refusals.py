"""Refusals of unsupported Keras models, with advice."""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

import tensorflow as tf

from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError

# Prefixes of operations that change a variable, and that read a lookup table.
ASSIGNMENTS = (
  'AssignVariableOp',
  'AssignAddVariableOp',
  'AssignSubVariableOp',
  'ResourceScatter',
  'ResourceApply',
)
GIVE = (
  'Give trained values with `initial_weights` instead of loading them in the '
  'builder.'
)
_HALF = ('float16', 'bfloat16')
_LOOKUPS = ('LookupTableFind',)


def _responsible(name: str, layers: Sequence[tf.keras.layers.Layer]) -> str:
  """Describe the layer whose scope holds an operation or variable."""
  # The innermost layer comes last.
  for part in reversed(name.split(':')[0].split('/')):
    for layer in layers:
      if layer.name == part:
        return f'Layer {layer.name!r} ({type(layer).__name__})'
  return f'The operation {name!r}'


@contextlib.contextmanager
def explaining() -> Iterator[None]:
  """Add advice to errors that Keras raises."""
  try:
    yield
  except RuntimeError as error:
    if str(error).startswith(('Cannot get value', 'numpy()')):
      raise ModelError(
        f'Weights have no values while a model is built. {GIVE}'
      ) from error
    if '.adapt' not in str(error):
      raise
    raise ModelError(_adapted('A layer')) from error
  except tf.errors.OperatorNotAllowedInGraphError as error:
    raise ModelError(
      f'The model cannot be traced: {tracing.reason(error)} Decide with '
      '`tf.where` or `tf.cond`.'
    ) from error


@contextlib.contextmanager
def explaining_tensors() -> Iterator[None]:
  """Explain errors of a model that is called on tensors, not variables."""
  try:
    yield
  except ModelError:
    raise
  except Exception as error:
    raise ModelError(
      'The model can be called with its variables, but not with tensors in '
      f'their place: {tracing.reason(error)} Make weights with '
      '`self.add_weight`, and do no more in `call` than read them.'
    ) from error


def _adapted(what: str) -> str:
  """Return advice on normalization that adapts to data."""
  return (
    f'{what} waits for `adapt`, which cannot be called while a model is built '
    'and changes variables that are not trained. Adapt a layer before, and '
    'let it read an `Input`, or give its numbers to the one that the callable '
    'makes: '
    '`tf.keras.layers.Normalization(mean=adapted.mean, '
    'variance=adapted.variance)`.'
  )


def refuse_open_shapes(inputs: Any) -> None:
  """Refuse inputs of unknown shape, except for their length."""
  for spec in tf.nest.flatten(inputs):
    shape = tf.TensorShape(spec.shape)
    if not (shape[1:] if shape.rank else shape).is_fully_defined():
      raise ModelError(
        f'An input has the shape {list(spec.shape)}, but examples are packed '
        'in arrays of one shape, except for the first axis. Say how long they '
        'are, for instance `tf.keras.Input([50])`, and pad them, for instance '
        'with `tf.keras.utils.pad_sequences`.'
      )


def refuse_no_specs(**given: Any) -> None:
  """Refuse descriptions of an example that are no specs, such as a type."""
  for name, specs in given.items():
    for spec in tf.nest.flatten(specs):
      if spec is not None and not isinstance(spec, tf.TensorSpec):
        raise ModelError(
          f'{name}={specs!r}: describe those of one example, such as '
          f'`{name}=tf.TensorSpec([], tf.float32)`.'
        )


def refuse_joining(what: str, computed: Any, inputs: Any) -> None:
  """Refuse a function whose results for an example depend on the others.

  Args:
    what: The function, for the message.
    computed: Its results for a batch of open size.
    inputs: What they are computed from, placeholders.
  """
  joining = tracing.first_joining(
    tf.nest.flatten(computed), tf.nest.flatten(inputs)
  )
  if joining is not None:
    raise ModelError(
      f'{what}: the operation {joining.name!r} ({joining.type}) computes with '
      'all examples of a batch, and so with padded ones. Leave the first '
      'axis as it is, for instance with `axis=-1`.'
    )


def is_kind_of(layer: tf.keras.layers.Layer, name: str) -> bool:
  """Return true if a layer is of a Keras 2 or 3 class, or derived from it."""
  return any(
    kind.__name__ == name
    and kind.__module__.split('.')[0] in ('keras', 'tf_keras')
    for kind in type(layer).__mro__
  )


def refuse_kind(layer: tf.keras.layers.Layer) -> None:
  """Refuse layers that would fail without a useful message."""
  if is_kind_of(layer, 'SpectralNormalization'):
    raise ModelError(
      f'Layer {layer.name!r} (SpectralNormalization) changes its weights while '
      'it trains, which a federated client cannot share. Regularize the '
      'weights instead, for instance with '
      "`kernel_regularizer='orthogonal_regularizer'`."
    )
  if is_kind_of(layer, 'Normalization'):
    if layer.input_mean is None:
      raise ModelError(_adapted(f'Layer {layer.name!r}'))


def refuse_updates(name: str) -> None:
  """Refuse a variable that a layer changes, named `layer/variable`."""
  raise ModelError(
    f'A layer changes its variable {name!r} while it trains. Say where it is '
    "kept: `from_keras(state='averaged')`, 'local' or 'frozen'. Or use a layer "
    'without such state: `GroupNormalization` or `LayerNormalization` instead '
    'of batch normalization.'
  )


def refuse_lookups(graph: Any, layers: Sequence[tf.keras.layers.Layer]) -> None:
  """Refuse a model that reads lookup tables."""
  refuse_operations(
    graph,
    _LOOKUPS,
    layers,
    'looks its inputs up in a table, which a pure function cannot hold. Let it '
    'stand first, as the only reader of an `Input`, from where `from_keras` '
    'lifts it; or map strings to integers before you pack the examples, with '
    '`tff_partial.Vocabulary` or `from_pandas(..., encode=[...])`, or use '
    '`tf.keras.layers.Hashing`, which needs no table.',
  )


def refuse_layer(layer: tf.keras.layers.Layer) -> None:
  """Refuse a layer whose computation is not a pure function of examples."""
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
  if not layer.weights:
    return
  if layer.variable_dtype in _HALF:
    raise ModelError(
      f'Layer {layer.name!r} has weights of {layer.variable_dtype}, in which '
      'small steps are lost by rounding. Use the dtype policy mixed_bfloat16 '
      'or mixed_float16, whose weights are of float32.'
    )


def refuse_operations(
  graph: Any,
  kinds: tuple[str, ...],
  layers: Sequence[tf.keras.layers.Layer],
  complaint: str,
) -> None:
  """Refuse the first layer with an operation of one of these kinds."""
  for name, kind in tracing.operations(graph):
    if kind.startswith(kinds):
      raise ModelError(f'{_responsible(name, layers)} {complaint}')
