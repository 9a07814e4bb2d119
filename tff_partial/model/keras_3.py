"""Keras 3 next to Keras 2: telling them apart, and seeding Keras 3's draws.

`tf.keras` is Keras 2 here (see `newer_tensorflow.py`). A model made with
`import keras` is a Keras 3 model, with TensorFlow as its backend (see
`keras_3_models.py`).
"""

from collections.abc import Callable, Iterator
import contextlib
import sys
from typing import Any

import tensorflow as tf

from tff_partial.model import tracing
from tff_partial.model.keras_variables import ModelError
from tff_partial.model.seeded_draws import SeededDraws


def module() -> Any:
  """Return the module `keras`, if a program has imported Keras 3, or None."""
  keras = sys.modules.get('keras')
  version = getattr(keras, '__version__', '')
  return keras if version.startswith('3.') else None


def is_model(value: Any) -> bool:
  """Return true for a Keras 3 model."""
  keras = module()
  return keras is not None and isinstance(value, keras.Model)


def module_of(model: Any) -> Any:
  """Return the Keras whose model this is: Keras 3, or `tf.keras`."""
  return module() if is_model(model) else tf.keras


def graph_of(model: Any) -> Any:
  """Return the functional model that a sequential one of Keras 3 holds."""
  return getattr(model, '_functional', None) or model


def makes_model(build: Callable[[], Any]) -> bool:
  """Return true if a callable makes a Keras 3 model, calling it if needed."""
  if module() is None:
    return False
  try:
    with tf.init_scope(), fresh_names():
      return is_model(build())
  except Exception:
    return False  # The caller builds it again and explains the error.


def as_keras_2(given: Any) -> Any:
  """Convert a Keras 3 metric to the metric of `tf.keras`; return others.

  Raises:
    ModelError: If Keras 2 has no metric of that name and configuration.
  """
  keras = module()
  if keras is None or not isinstance(given, keras.Metric):
    return given
  kind = type(given)
  same = getattr(tf.keras.metrics, kind.__name__, None)
  try:
    if not kind.__module__.startswith('keras.') or same is None:
      raise ValueError('Keras 2 has no such class.')
    config = dict(given.get_config())
    config.pop('dtype', None)
    made = same.from_config(config)
    options = getattr(made, '_fn_kwargs', {})
    for name, value in getattr(given, '_fn_kwargs', {}).items():
      if options.get(name) != value:  # The configuration may lack some.
        raise ValueError(f'It has no {name}={value!r} there.')
  except Exception as error:
    raise ModelError(
      f'The metric {given.name!r} ({kind.__name__}) is one of Keras 3, and '
      f'cannot be made in Keras 2: {tracing.reason(error)} Pass a function of '
      'labels and predictions, or a metric of `tf.keras`.'
    ) from error
  return made


@contextlib.contextmanager
def drawing(seed: tf.Tensor) -> Iterator[None]:
  """Seed Keras 3's draws, so that they are the same in every runtime."""
  source = sys.modules['keras.src.backend'].random
  draws = SeededDraws(seed)

  def dropout(
    inputs: tf.Tensor, rate: float, noise_shape: Any = None, seed: Any = None
  ) -> tf.Tensor:
    del seed
    if noise_shape is not None:
      given = tf.shape(inputs)
      noise_shape = tf.stack(
        [given[i] if n is None else n for i, n in enumerate(noise_shape)]
      )
    return draws.dropout(inputs, rate, noise_shape)

  functions = {
    'uniform': draws.random_uniform,
    'normal': draws.random_normal,
    'truncated_normal': draws.truncated_normal,
    'dropout': dropout,
    **{name: _refused_draw(name) for name in _REFUSED_DRAWS},
  }
  with contextlib.ExitStack() as stack:
    for name, function in functions.items():
      stack.enter_context(replaced(source, name, function))
    yield


_REFUSED_DRAWS = (
  *('beta', 'binomial', 'categorical', 'gamma'),
  *('randint', 'shuffle'),
)


def _refused_draw(name: str) -> Callable[..., Any]:
  def refuse(*args: Any, **options: Any) -> None:
    raise ModelError(
      f'The model draws by `keras.random.{name}`, which cannot follow from a '
      "client's seed. Draw by `uniform`, `normal`, `truncated_normal` or "
      '`dropout`.'
    )

  return refuse


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
  """Restart the numbering of unnamed layers from 0."""
  state = sys.modules['keras.src.backend.common.global_state']
  counters = 'object_name_uids'
  before = state.get_global_attribute(counters)
  # Keras makes new counters if the value is None.
  state.set_global_attribute(counters, None)
  try:
    yield
  finally:
    state.set_global_attribute(counters, before)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
  """Replace an attribute within the context."""
  is_own = name in vars(owner)
  before = getattr(owner, name)
  setattr(owner, name, value)
  try:
    yield
  finally:
    if is_own:
      setattr(owner, name, before)
    else:
      delattr(owner, name)
