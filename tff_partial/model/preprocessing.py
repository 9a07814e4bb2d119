"""Lookups and adapted normalization that stand first in a Keras model.

`StringLookup`, `IntegerLookup`, `TextVectorization` and `Normalization` that
was adapted hold what they learned of a whole population, in tables and
variables that training does not change. Where such a layer is the only reader
of an `Input`, `from_keras` lifts it off: the rest of the model is trained, and
clients' examples pass through the layer once, when they are packed. Models of
`personalise` and of `PartialModel.to_keras` begin with the layers again.
"""

import collections
from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import json
from typing import Any
import warnings

import numpy as np
import tensorflow as tf

from tff_partial.data import examples
from tff_partial.model import keras_3
from tff_partial.model import keras_analysis
from tff_partial.model import keras_refusals
from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError

_NORMALIZATION = 'Normalization'
_LOOKUPS = ('StringLookup', 'IntegerLookup', 'TextVectorization')
_WHOLE = 'model_with_preprocessing'


class Lifted:
  """A copy of a layer that stood first, with what it had learned.

  Attributes:
    name: The layer's name.
    kind: The name of its class.
    config: Its configuration, which holds its vocabulary or statistics.
    raw: Spec of one example's input as clients have it.
    spec: Spec of one example's input as the trained part reads it.
  """

  def __init__(self, layer: Any, raw: tf.TensorSpec, spec: tf.TensorSpec):
    """Copy a layer.

    Raises:
      ModelError: If it has not been adapted, or its outputs are no numbers of
        one shape.
    """
    self.name, self.raw, self.spec = layer.name, raw, spec
    self.kind = _kind(layer)
    self._class = type(layer)
    self.config = _config(layer, f'Layer {layer.name!r} ({self.kind})', spec)

  def __repr__(self) -> str:
    return f'{self.kind} {self.name!r} of {self.raw.dtype.name}'

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Lifted) and self.described == other.described

  def __hash__(self) -> int:
    return hash(self.described)

  def __getstate__(self) -> dict[str, Any]:
    """Leave out the layer, which is made again from its configuration."""
    kept = ('name', 'kind', 'config', 'raw', 'spec', '_class')
    return {name: getattr(self, name) for name in kept}

  @functools.cached_property
  def described(self) -> str:
    """What the layer does, as JSON; equal for layers that do the same."""
    config = {n: value for n, value in self.config.items() if n != 'name'}
    return json.dumps(
      {'layer': self.kind, 'input': self.raw.dtype.name, **config},
      sort_keys=True,
      default=lambda value: getattr(value, '__qualname__', str(value)),
    )

  @property
  def learned(self) -> str:
    """Name of what it learned, for lists of what is assumed public."""
    what = 'statistics' if self.kind == _NORMALIZATION else 'vocabulary'
    return f'{what} of the layer {self.name}'

  @functools.cached_property
  def layer(self) -> Any:
    """The layer."""
    with tf.init_scope():
      layer = self._class.from_config(self.config)
      if self.kind == _NORMALIZATION:  # Or constants are those of a function.
        layer.build([None, *self.raw.shape])
      return layer

  @functools.cached_property
  def _traced(self) -> Any:
    spec = tf.TensorSpec([None, *self.raw.shape], self.raw.dtype)
    return tracing.traced(self.layer, spec)

  @property
  def vocabulary(self) -> list[Any]:
    """Its values in the order of their ids; empty for a normalization."""
    if self.kind == _NORMALIZATION:
      return []
    return [_text(value) for value in self.layer.get_vocabulary()]

  def encode(
    self, array: Any, where: str, which: Callable[[int], str]
  ) -> np.ndarray:
    """Pass examples of one input through the layer.

    Args:
      array: What clients have, `[examples, ...]`.
      where: Names the input and its client in messages.
      which: Names an example by its index in messages.

    Raises:
      ClientDataError: If the layer cannot read it.
    """
    some = array if isinstance(array, np.ndarray) else array[:1]
    if np.shape(some)[:1] == (0,):  # A string to look up is not to be had.
      shape = [1 if size is None else size for size in self.spec.shape]
      return np.zeros([0, *shape], self.spec.dtype.as_numpy_dtype)
    array = examples.check_array(array, self.raw, where, (), which)
    try:
      return np.asarray(self._traced(tf.constant(array, self.raw.dtype)))
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
      raise examples.ClientDataError(
        f'{where}: the layer {self.name!r} ({self.kind}) cannot read it: '
        f'{tracing.reason(error)}'
      ) from error


class Lifting:
  """A builder of models without the layers that are lifted off.

  Attributes:
    layers: Input, `x` or `x.name`, to the layer that stood first.
  """

  def __init__(self, build: Callable[[], Any], inputs: Any = None):
    """Take the builder of the whole model, and `inputs` of `from_keras`."""
    self._build, self._inputs = build, inputs
    self.layers: dict[str, Lifted] = {}

  def __call__(self) -> Any:
    """Build the whole model, and return the part after the layers."""
    with _numbers_of_rows():
      model = self._build()
    first = _first(model)
    if first and self._inputs is not None:
      raise ModelError(
        f'inputs={self._inputs!r}: the model has an `Input`, whose examples '
        f'pass through layers: {list(first)}. Leave `inputs` out.'
      )
    if first and not self.layers:
      with tf.init_scope():
        self.layers = {
          path: Lifted(node, _spec(before), _spec(after))
          for path, (node, before, after) in first.items()
        }
    return _after(model, first)


def whole(model: Any) -> Any:
  """Return the model that begins with the layers that were lifted off."""
  return vars(model).get(_WHOLE, model)


def without_first_layers(model: Any) -> Any:
  """Return the part of a model that is trained."""
  return _after(model, _first(model))


def changed(
  inputs: Any,
  layers: Mapping[str, Lifted],
  change: Callable[[Lifted, Any], Any],
) -> Any:
  """Change those of a model's inputs that have layers."""
  for path, lifted in layers.items():
    name = path.removeprefix('x').removeprefix('.')
    found = change(lifted, inputs[name] if name else inputs)
    inputs = collections.OrderedDict(inputs, **{name: found}) if name else found
  return inputs


def _kind(layer: Any) -> str:
  """Return the class of a layer that can be lifted, or ''."""
  for kind in (*_LOOKUPS, _NORMALIZATION):
    if keras_refusals.is_kind_of(layer, kind):
      adapts = kind != _NORMALIZATION or layer.input_mean is None
      return kind if adapts else ''
  return ''


def _spec(tensor: Any) -> tf.TensorSpec:
  """Return the spec of one example of a Keras tensor."""
  shape = getattr(tensor, 'shape', None)
  return tf.TensorSpec(None if shape is None else shape[1:], tensor.dtype)


def _first(model: Any) -> dict[str, tuple[Any, Any, Any]]:
  """Find the layers to lift, each with the tensors before and after it."""
  levels = getattr(keras_3.graph_of(model), '_nodes_by_depth', None)
  if not levels or not getattr(model, 'inputs', None):
    return {}
  readers: dict[int, list[Any]] = {}
  for node in (n for level in levels.values() for n in level if not n.is_input):
    read = getattr(node, 'keras_inputs', None) or node.input_tensors
    for tensor in {id(t): t for t in tf.nest.flatten(read)}.values():
      readers.setdefault(id(tensor), []).append(node)
  found = {}
  for path, tensor in examples.leaves(keras_analysis.input_tensors(model), 'x'):
    nodes = readers.get(id(tensor), [])
    layers = [getattr(node, 'operation', None) or node.layer for node in nodes]
    for node, layer in zip(nodes, layers, strict=True):
      if not _kind(layer):
        continue
      if len(nodes) > 1:
        raise ModelError(
          f'The input of layer {layer.name!r} ({_kind(layer)}) is also read by '
          f'{[other.name for other in layers if other is not layer]}. Give it '
          'an `Input` of its own, which clients fill with the same values.'
        )
      found[path] = (layer, tensor, tf.nest.flatten(node.outputs)[0])
  return found


def _after(model: Any, first: Mapping[str, tuple[Any, Any, Any]]) -> Any:
  """Return the part of a model after its first layers, of the same layers."""
  if not first:
    return model
  inputs = examples.map_fields(
    lambda tensor: next(
      (after for _, before, after in first.values() if before is tensor), tensor
    ),
    keras_analysis.input_tensors(model),
  )
  with warnings.catch_warnings():
    # Keras 3 warns that tensors inside of a model have other names.
    warnings.simplefilter('ignore', UserWarning)
    output = keras_3.graph_of(model).output
    rest = keras_3.module_of(model).Model(inputs, output, name=model.name)
  vars(rest)[_WHOLE] = model  # Keras would take an attribute for a layer.
  return rest


def _config(layer: Any, where: str, spec: tf.TensorSpec) -> dict[str, Any]:
  """Return a layer's configuration with what it learned."""
  config = dict(layer.get_config())
  if _kind(layer) == _NORMALIZATION:
    learned = {
      'mean': np.asarray(layer.adapt_mean).tolist(),
      'variance': np.asarray(layer.adapt_variance).tolist(),
    }
    is_empty = not np.any(learned['mean']) and bool(
      np.all(np.equal(learned['variance'], 1))
    )
    given = 'Normalization(mean=..., variance=...)'
  else:
    values = layer.get_vocabulary(include_special_tokens=False)
    learned = {'vocabulary': [_text(value) for value in values]}
    is_empty = not learned['vocabulary']
    given = f'{_kind(layer)}(vocabulary=[...])'
  if is_empty:
    raise ModelError(
      f'{where} was not adapted. Give what it would learn, `{given}`, or call '
      '`adapt` with examples of training clients, outside of the callable, and '
      'use that layer in it.'
    )
  if config.get('output_mode') == 'tf_idf':
    raise ModelError(
      f"{where} has the output mode 'tf_idf', which cannot be lifted off the "
      "model. Use 'count' or 'multi_hot'."
    )
  if spec.dtype in (tf.bfloat16, tf.float16):
    raise ModelError(
      f"{where} returns {spec.dtype.name}, but clients' examples are kept in "
      "float32. Make it with dtype='float32'; what reads it may still compute "
      f'in {spec.dtype.name}.'
    )
  if any(config.get(option) for option in ('ragged', 'sparse', 'invert')):
    raise ModelError(
      f'{where} is one with `ragged`, `sparse` or `invert`, but examples are '
      'packed in dense arrays of numbers. Leave these options out.'
    )
  return {**config, **learned}


def _text(value: Any) -> Any:
  """Return a value of a vocabulary as a Python type."""
  if isinstance(value, bytes):
    return value.decode('utf-8')
  return value.item() if isinstance(value, np.generic) else value


@contextlib.contextmanager
def _numbers_of_rows() -> Iterator[None]:
  """Let `vocabulary_size()` return a number while a model is traced, too."""

  def number(layer: Any, size: Callable[[Any], Any]) -> int:
    with tf.init_scope():
      return int(size(layer))

  with contextlib.ExitStack() as stack:
    for kind in (tf.keras.layers.StringLookup, tf.keras.layers.IntegerLookup):
      stack.enter_context(
        keras_3.replaced(
          kind,
          'vocabulary_size',
          functools.partialmethod(number, size=kind.vocabulary_size),
        )
      )
    yield
