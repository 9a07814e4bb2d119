"""Properties of optimizers, and names of them in error messages."""

from collections.abc import Mapping
import numbers
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

Optimizer: TypeAlias = tff.learning.optimizers.Optimizer

_SGD = tff.learning.optimizers.build_sgdm(1.0)
# Name of a Keras optimizer to the builder of the same optimizer in TFF.
_BUILDERS = {
  'sgd': 'build_sgdm',
  'adagrad': 'build_adagrad',
  'adam': 'build_adam',
  'adamw': 'build_adamw',
  'rmsprop': 'build_rmsprop',
}


def instead_of(given: Any) -> str:
  """Name the TFF optimizer to use instead of another object.

  Args:
    given: The given object, such as an optimizer's name, or a Keras optimizer.

  Returns:
    The end of an error message.
  """
  rate: Any = 0.1
  kind = given if isinstance(given, type) else type(given)
  name = given if isinstance(given, str) else kind.__name__
  if hasattr(given, 'get_config') and kind is not given:  # One of Keras's.
    rate = given.get_config().get('learning_rate', rate)
  rate = f'{rate:.6g}' if isinstance(rate, numbers.Real) else 'learning_rate'
  builder = _BUILDERS.get(name.lower(), 'build_sgdm')
  found = repr(given) if isinstance(given, str) else name
  return (
    'one of `tff.learning.optimizers`, for example '
    f'`tff.learning.optimizers.{builder}({rate})`; found {found}.'
  )


def is_plain_descent(optimizer: Optimizer) -> bool:
  """Return True if a step is just `weights - learning_rate * gradients`.

  Then a step on some rows of a table needs only these rows.
  """
  if type(optimizer) is not type(_SGD):
    return False  # It may use other rows, or the whole gradient.
  with tf.init_scope():
    state = optimizer.initialize(tf.TensorSpec([2], tf.float32))
  return set(state) == {'learning_rate'}  # No momentum.


def is_scheduled(optimizer: Optimizer) -> bool:
  """Return True if TFF's `schedule_learning_rate` made the optimizer."""
  schedule = tff.learning.optimizers.schedule_learning_rate
  return type(optimizer) is type(schedule(_SGD, lambda step: 1.0))


def _settings(optimizer: Optimizer) -> Mapping[str, Any]:
  """Return the hyperparameters of an optimizer, by name."""
  with tf.init_scope():
    state = optimizer.initialize(tf.TensorSpec([1], tf.float32))
    return optimizer.get_hparams(state)


def has_rate(optimizer: Optimizer) -> bool:
  """Return True if the optimizer has a learning rate that can be set."""
  return tff.learning.optimizers.LEARNING_RATE_KEY in _settings(optimizer)


def rate_of(optimizer: Optimizer) -> float:
  """Return the learning rate of an optimizer that has one."""
  return float(_settings(optimizer)[tff.learning.optimizers.LEARNING_RATE_KEY])


def in_words(setting: Any) -> str:
  """Return a setting of a phase as a short text.

  Args:
    setting: The setting.
  """
  if isinstance(setting, Mapping):
    said = (f'{key!r}: {in_words(value)}' for key, value in setting.items())
    return f'{{{", ".join(said)}}}'
  if isinstance(setting, tuple):
    return f'({", ".join(map(in_words, setting))})'
  if isinstance(setting, tff.learning.optimizers.Optimizer):
    name = type(setting).__name__.strip('_')
    try:
      rates = {k: float(v) for k, v in _settings(setting).items()}
    except Exception:  # An optimizer may have any state, for any weights.
      return name
    said = (f'{rate}={value:.6g}' for rate, value in rates.items())
    return f'{name}({", ".join(said)})'
  if callable(setting):
    return getattr(setting, '__qualname__', type(setting).__name__)
  return repr(setting)
