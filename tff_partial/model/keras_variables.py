"""Keras's requests for variables, answered with tensors.

A Keras model or metric is rebuilt while a function is traced. Its requests for
variables are answered with the function's arguments.
"""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import tensorflow as tf

from tff_partial import errors


class ModelError(errors.UserError, ValueError):
  """Raised for a Keras model that cannot be used; suggests a remedy."""


@contextlib.contextmanager
def answering_variables(
  creator: Callable[..., Any],
) -> Iterator[None]:
  """Make variables by `creator(next_creator, **request)` within the context.

  Keras creates variables in the current graph or, within a function that is
  traced eagerly, outside of it. Both call `creator`.
  """
  with tf.init_scope():
    outer = tf.compat.v1.get_default_graph()
  with contextlib.ExitStack() as stack:
    if outer is not tf.compat.v1.get_default_graph():
      stack.enter_context(outer._variable_creator_scope(creator))
    stack.enter_context(tf.variable_creator_scope(creator))
    yield


class StateTensor:
  """A tensor that looks like a Keras variable."""

  def __init__(self, value: tf.Tensor, name: str):
    self._value = value
    self.name = name
    self.trainable = False
    self._save_slice_info = None

  def value(self) -> tf.Tensor:
    """Return the tensor that was assigned last."""
    return self._value

  read_value = value

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

  def __getattr__(self, name: str) -> Any:
    return getattr(self.__dict__['_value'], name)

  def __getitem__(self, key: Any) -> tf.Tensor:
    return self._value[key]


def stand_in(request: dict[str, Any]) -> StateTensor:
  """Replace a variable that is not a weight, such as a step counter."""
  value = request.get('initial_value')
  value = value() if callable(value) else value
  value = tf.convert_to_tensor(value, request.get('dtype'))
  return StateTensor(value, str(request.get('name')))


def _operator(name: str) -> Callable[..., Any]:
  def apply(self: StateTensor, *others: Any) -> Any:
    return getattr(self._value, name)(*others)

  return apply


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {'__getitem__', '__eq__'}:
  if hasattr(tf.Tensor, _name) and _name != '__ne__':
    setattr(StateTensor, _name, _operator(_name))

tf.register_tensor_conversion_function(
  StateTensor,
  lambda value, dtype=None, name=None, as_ref=False: tf.convert_to_tensor(
    value.value(), dtype, name=name
  ),
)
