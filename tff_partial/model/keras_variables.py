"""Keras's requests for variables, answered with tensors.

A Keras model or metric is rebuilt while a function is traced. Its requests for
variables are answered with the function's arguments.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import importlib
from typing import Any

import tensorflow as tf

from tff_partial import errors


class ModelError(errors.UserError, ValueError):
  """Raised for a Keras model that cannot be used; suggests a remedy."""


@contextlib.contextmanager
def answering_variables(creator: Callable[..., Any]) -> Iterator[None]:
  """Make variables by `creator(next_creator, **request)` within the context.

  Keras creates variables in the current graph or, within a function that is
  traced eagerly, outside of it. Both call `creator`, which may return tensors.
  """
  with tf.init_scope():
    outer = tf.compat.v1.get_default_graph()
  with contextlib.ExitStack() as stack:
    if outer is not tf.compat.v1.get_default_graph():
      stack.enter_context(outer._variable_creator_scope(creator))
    stack.enter_context(tf.variable_creator_scope(creator))
    stack.enter_context(_casting_tensors())
    yield


class _TensorLike:
  """A tensor that looks like a Keras variable."""

  def __init__(self, value: tf.Tensor):
    self._value = value

  def value(self) -> tf.Tensor:
    """Return the tensor."""
    return self._value

  def read_value(self) -> tf.Tensor:
    """Return the tensor."""
    return self.value()

  def __tf_tensor__(
    self, dtype: tf.DType | None = None, name: str | None = None
  ) -> tf.Tensor:
    """Return the tensor where TensorFlow wants one."""
    return tf.convert_to_tensor(self.value(), dtype, name=name)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.__dict__['_value'], name)

  def __getitem__(self, key: Any) -> tf.Tensor:
    return self.value()[key]


class StateTensor(_TensorLike):
  """A tensor in place of a variable that layers change."""

  def __init__(self, value: tf.Tensor, name: str):
    super().__init__(value)
    self.name = name
    self.trainable = False
    self._save_slice_info = None

  def assign(self, value: Any, **_: Any) -> tf.Tensor:
    """Replace the tensor."""
    self._value = tf.cast(value, self.dtype)
    return self._value

  def assign_add(self, value: Any, **_: Any) -> tf.Tensor:
    """Add to the tensor."""
    return self.assign(self._value + tf.cast(value, self.dtype))

  def assign_sub(self, value: Any, **_: Any) -> tf.Tensor:
    """Subtract from the tensor."""
    return self.assign(self._value - tf.cast(value, self.dtype))


class _CastTensor(_TensorLike):
  """A tensor of float32 that layers of mixed precision read in their type."""

  def value(self) -> tf.Tensor:
    """Return the tensor, in the type of the layer that is called."""
    dtype = getattr(_autocasting()._autocast_dtype, 'dtype', None)
    return self._value if dtype is None else tf.cast(self._value, dtype)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # Functions read it inside, like a variable.
      raise AttributeError(name)
    return super().__getattr__(name)


@functools.cache
def _autocasting() -> Any:
  """Return Keras's module of variables that cast themselves."""
  package = tf.keras.layers.Layer.__module__.rsplit('.engine', 1)[0]
  return importlib.import_module(f'{package}.mixed_precision.autocast_variable')


@contextlib.contextmanager
def _casting_tensors() -> Iterator[None]:
  """Let layers of mixed precision take tensors in place of variables."""
  module = _autocasting()
  make = module.create_autocast_variable

  def create(variable: Any) -> Any:
    if isinstance(variable, tf.Variable):
      return make(variable)
    is_state = isinstance(variable, StateTensor)
    return variable if is_state else _CastTensor(variable)

  module.create_autocast_variable = create
  try:
    yield
  finally:
    module.create_autocast_variable = make


def keeping_policy(build: Callable[[], Any]) -> Callable[[], Any]:
  """Return a builder that always builds under today's global dtype policy."""
  policy = tf.keras.mixed_precision.global_policy()

  def build_under_policy() -> Any:
    now = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
      return build()
    finally:
      tf.keras.mixed_precision.set_global_policy(now)

  return build_under_policy


def uncast(variable: Any) -> Any:
  """Return the variable that one of mixed precision wraps, or the variable."""
  wraps = isinstance(variable, _autocasting().AutoCastVariable)
  return variable._variable if wraps else variable


def in_float32(values: Any) -> Any:
  """Cast the half precision among a model's outputs or losses to float32."""

  def cast(value: tf.Tensor) -> tf.Tensor:
    if value.dtype not in (tf.bfloat16, tf.float16):
      return value
    found = tf.cast(value, tf.float32)
    if hasattr(value, '_keras_mask'):
      found._keras_mask = value._keras_mask
    return found

  return tf.nest.map_structure(cast, values)


def stand_in(request: dict[str, Any]) -> StateTensor:
  """Replace a variable that is not a weight, such as a step counter."""
  value = request.get('initial_value')
  value = value() if callable(value) else value
  value = tf.convert_to_tensor(value, request.get('dtype'))
  return StateTensor(value, str(request.get('name')))


def _operator(name: str) -> Callable[..., Any]:
  def apply(self: _TensorLike, *others: Any) -> Any:
    return getattr(self.value(), name)(*others)

  return apply


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {'__getitem__', '__eq__'}:
  if hasattr(tf.Tensor, _name) and _name != '__ne__':
    setattr(_TensorLike, _name, _operator(_name))
