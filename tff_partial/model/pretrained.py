"""First values from a trained Keras model, in memory or in a file.

A model of the same architecture gives all values by their order. One that is a
part of it, such as a backbone of keras_hub, gives those of the same names. In
place of a model its path will do: a file `.keras`, the folder of a SavedModel,
or a file `.weights.h5` of the whole model's weights.
"""

import collections
from collections.abc import Callable, Sequence
import os
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial.model import keras_3
from tff_partial.model import preprocessing
from tff_partial.model import selectors
from tff_partial.model import tracing
from tff_partial.model.keras_analysis import KerasSpec
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import ModelError

_WEIGHTS = '.weights.h5'


def values_of(
  spec: KerasSpec, build: Callable[[], Any], given: Any, num_groups: int
) -> list[dict[str, np.ndarray]]:
  """Return first values by name, of one model or of one for each group.

  Args:
    spec: The model.
    build: Makes it, for files that hold weights alone.
    given: A trained model, its path, `num_groups` of either, or None.
    num_groups: Number of sub-populations.

  Raises:
    ModelError: If a model cannot be loaded, or is not the model or a part of
      it.
  """
  if isinstance(given, str) or not isinstance(given, Sequence):
    return [_values(spec, _loaded(build, given))]
  if len(given) != num_groups or not num_groups:
    raise ModelError(
      f'`initial_weights` has {len(given)} models, but there are '
      f'num_groups={num_groups}. Pass one model, or one for each '
      'sub-population.'
    )
  return [_values(spec, _loaded(build, each)) for each in given]


def _loaded(build: Callable[[], Any], given: Any) -> Any:
  """Return a model; one that is given by its path is loaded."""
  if not isinstance(given, (str, os.PathLike)):
    return given
  path = os.fspath(given)
  try:
    if path.endswith(_WEIGHTS):
      model = preprocessing.whole(build())
      model.load_weights(path)
      return model
    keras = keras_3.module() if keras_3.makes_model(build) else tf.keras
    return keras.models.load_model(path, compile=False)
  except Exception as error:
    raise ModelError(
      f'initial_weights={path!r} cannot be loaded: {tracing.reason(error)} '
      'Give a file `.keras`, a folder of `model.save`, or the '
      f'weights of the same model in a file `{_WEIGHTS}`.'
    ) from error


def _values(spec: KerasSpec, trained: Any) -> dict[str, np.ndarray]:
  """Return a trained Keras model's values by name; empty without a model."""
  if trained is None:
    return {}
  trained = preprocessing.without_first_layers(trained)
  given = getattr(trained, 'variables', None)
  if given is None:
    raise ModelError(
      'initial_weights: expected a Keras model or the path of one, found a '
      f'{type(trained).__name__}.'
    )
  if keras_3.is_model(trained):
    given = trained.weights  # Without the counters of random draws.
  wanted = sorted(spec.variables, key=lambda v: v.position)
  pairs: list[tuple[VariableSpec | None, Any]]
  # Of the same names, layers may have been made in another order.
  are_named = {v.name for v in wanted} == set(map(_name, given))
  if (
    not are_named
    and len(given) == len(wanted)
    and all(v.fits(value.shape) for v, value in zip(wanted, given, strict=True))
  ):
    pairs = list(zip(wanted, given, strict=True))
  else:
    pairs = [(_named(wanted, value), value) for value in given]
    _warn_of_counted(trained)
  taken = collections.Counter(v.name for v, _ in pairs if v)
  missing = [
    (_name(value), tuple(value.shape))
    for v, value in pairs
    if not v or taken[v.name] > 1
  ]
  if missing or not pairs:
    raise ModelError(
      '`initial_weights` is neither the model nor a part of it: its variables '
      f'{missing} have no counterpart each of the same name and shape among '
      f'{[(v.name, v.shape) for v in wanted]}.'
    )
  return {
    v.name: value.numpy().astype(v.dtype.as_numpy_dtype, copy=False)
    for v, value in pairs
    if v and not v.is_client_sized
  }


def _warn_of_counted(trained: Any) -> None:
  """Warn of names that count layers made before those of the model."""
  layers = getattr(trained, 'layers', ())
  names = {layer.name for layer in layers}
  counted = [
    layer.name
    for layer in layers
    if layer.weights
    and selectors.is_counted(layer)
    and layer.name.rpartition('_')[0] not in names
  ]
  if counted:
    logging.warning(
      'initial_weights: the layers %s got their names by counting all layers '
      'of this program. In the callable they are counted again, so that values '
      'may come to other layers. Name these layers in both.',
      counted,
    )


def _name(variable: Any) -> str:
  """Return a variable's name: its path in Keras 3."""
  return getattr(variable, 'path', variable.name).split(':')[0]


def _named(wanted: Sequence[VariableSpec], value: Any) -> VariableSpec | None:
  """Return the only variable of a value's name and shape, or None.

  A name may begin with those of layers around it in one of the two models.
  """
  name = f'/{_name(value)}'
  found = [
    v
    for v in wanted
    if (f'/{v.name}'.endswith(name) or name.endswith(f'/{v.name}'))
    and v.fits(value.shape)
  ]
  found = [v for v in found if f'/{v.name}' == name] or found
  return found[0] if len(found) == 1 else None
