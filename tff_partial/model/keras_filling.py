"""Keras models with given weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tff_partial.arguments import spelling
from tff_partial.model.keras_analysis import VariableSpec
from tff_partial.model.keras_variables import ModelError


def named_weights(given: Any) -> list[Mapping[str, Any]]:
  """Convert `ModelWeights`, or such a mapping, to mappings from name to value.

  Raises:
    ModelError: If it is neither.
  """
  if hasattr(given, 'trainable') and hasattr(given, 'non_trainable'):
    return [*given.trainable.values(), given.non_trainable]
  what = 'the `best_weights` of a result, or a mapping from variable to value'
  spelling.check_kind('weights', given, Mapping, what, ModelError)
  return [given]


def values_of_all(
  weights: Sequence[Any],
  names: Sequence[str],
  frozen: Mapping[str, Any],
  local: Sequence[str],
) -> dict[str, Any]:
  """Return a value for each variable of a model; later weights override.

  Raises:
    ModelError: If a variable has no value, or no variable has a value's name.
  """
  values: dict[str, Any] = dict(frozen)
  for given in weights:
    for named in named_weights(given):
      values.update(named)
  unknown = [name for name in values if name not in names]
  if unknown:
    raise ModelError(f'The model has no variables {unknown}, but {names}.')
  missing = [name for name in names if name not in values]
  if missing:
    own = [name for name in missing if name in local]
    remedy = ''
    if own:
      remedy = (
        f' Clients have {own}: `tff_partial.personalise` makes the model of '
        'one.'
      )
    raise ModelError(
      f'There are no values for the variables {missing}.{remedy}'
    )
  return values


def checked(spec: VariableSpec, value: Any) -> np.ndarray:
  """Return a variable's value as an array.

  Raises:
    ModelError: If its shape is wrong.
  """
  array = np.asarray(value)
  if not spec.fits(array.shape):
    raise ModelError(
      f'Variable {spec.name!r} has shape {spec.shape}, the value given for it '
      f'{array.shape}.'
    )
  return array
