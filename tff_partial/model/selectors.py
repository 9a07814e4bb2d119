"""Selection of a tier's variables: by layer, regular expression, predicate."""

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any, TypeAlias, TypeGuard

import tensorflow as tf

from tff_partial import tiers as tiers_lib
from tff_partial.arguments import spelling
from tff_partial.model import client_tables
from tff_partial.model import keras_3
from tff_partial.model import keras_analysis
from tff_partial.model.keras_variables import ModelError

# Selects a tier's variables: a layer, a layer's name, a regular expression over
# the names of layers or variables, a predicate over `VariableSpec`, or several
# of them.
Selector: TypeAlias = (
  str
  | re.Pattern[str]
  | tf.keras.layers.Layer
  | Callable[[keras_analysis.VariableSpec], bool]
)


Selectors: TypeAlias = Selector | Sequence[Selector] | None


def _names_variable(
  selector: Selector, variable: keras_analysis.VariableSpec, layers: set[str]
) -> bool:
  """Return true if a selector matches a variable itself, not its layers."""
  if _is_layer(selector) or (isinstance(selector, str) and selector in layers):
    return False
  if isinstance(selector, (str, re.Pattern)):
    return re.fullmatch(selector, variable.name) is not None
  return callable(selector) and bool(selector(variable))


def _names_owner(
  selector: Selector, owner: Sequence[str], layers: set[str]
) -> bool:
  """Return true if a selector matches a layer or one around it."""
  if _is_layer(selector):
    return selector.name in owner
  if isinstance(selector, str) and selector in layers:
    return selector in owner
  if isinstance(selector, (str, re.Pattern)):
    return any(re.fullmatch(selector, name) for name in owner)
  return False


def _refuse_shared(
  variable: keras_analysis.VariableSpec,
  selectors: Sequence[Selector],
  layers: set[str],
  tier: str,
) -> None:
  """Raise an error if not all layers of a selected variable are selected."""
  if any(_names_variable(s, variable, layers) for s in selectors):
    return
  others = [
    owner[-1]
    for owner in variable.owners
    if not any(_names_owner(s, owner, layers) for s in selectors)
  ]
  if others:
    raise ModelError(
      f'{tier}={selectors}: variable {variable.name!r} is also used by '
      f'{others}. A variable belongs to one tier: select all of its layers, '
      'or give each a variable of its own.'
    )


def _as_list(selectors: Selectors) -> list[Selector]:
  if selectors is None:
    return []
  if isinstance(selectors, (list, tuple)):
    return list(selectors)
  return [selectors]


def _matched(
  spec: keras_analysis.KerasSpec, selector: Selector, what: str
) -> list[keras_analysis.VariableSpec]:
  """Return the variables that a selector matches."""
  if isinstance(selector, type):
    raise ModelError(
      f'{what}={selector.__name__} is a class. Name the layers, or pass a '
      'predicate over variables.'
    )
  if _is_layer(selector) and is_counted(selector):
    raise ModelError(
      f'{what}: the layer that is given got its name {selector.name!r} by '
      'counting all layers of this program, and in the callable they are '
      "counted again. Name it there, `Dense(..., name='own')`, and pass its "
      'name.'
    )
  if isinstance(selector, str) and (wrong := spelling.why_no_pattern(selector)):
    raise ModelError(f'{what}={wrong}')
  layers = set(spec.layers)
  matched = [
    v
    for v in spec.variables
    if _names_variable(selector, v, layers)
    or any(_names_owner(selector, owner, layers) for owner in v.owners)
  ]
  if not matched:
    raise ModelError(
      f'{what}={selector!r} matches no variable. The model has the layers '
      f'{list(spec.layers)} with the variables '
      f'{[v.name for v in spec.variables]}.{_if_parts(spec, selector)}'
    )
  return matched


def _is_layer(selector: Any) -> TypeGuard[tf.keras.layers.Layer]:
  """Return True for a layer of Keras 2 or 3."""
  keras = keras_3.module()
  kinds = [tf.keras.layers.Layer] + ([keras.layers.Layer] if keras else [])
  return isinstance(selector, tuple(kinds))


def is_counted(layer: Any) -> bool:
  """Return True if a layer's name is its class and a number, as Keras makes."""
  kind = type(layer).__name__.replace('_', '').lower()
  named, _, number = layer.name.rpartition('_')
  return number.isdigit() and named.replace('_', '').endswith(kind)


def _if_parts(spec: keras_analysis.KerasSpec, selector: Selector) -> str:
  """Return advice if a selector matches parts of names."""
  if not isinstance(selector, (str, re.Pattern)):
    return ''
  pattern = selector if isinstance(selector, str) else selector.pattern
  names = [*spec.layers, *(v.name for v in spec.variables)]
  if not any(re.search(selector, name) for name in names):
    return ''
  return (
    f' Whole names are matched: where {pattern!r} is a part of one, write '
    f'{f".*{pattern}.*"!r}.'
  )


def names_of(
  spec: keras_analysis.KerasSpec, selectors: Selectors, what: str
) -> set[str]:
  """Return the names of the variables that selectors match.

  Args:
    spec: The model.
    selectors: One or several.
    what: The argument that they were given for.

  Raises:
    ModelError: If one matches nothing.
  """
  return {
    v.name
    for selector in _as_list(selectors)
    for v in _matched(spec, selector, what)
  }


def with_client_sizes(
  spec: keras_analysis.KerasSpec,
  tier_of: Mapping[str, str],
  client_sized: Selectors,
) -> keras_analysis.KerasSpec:
  """Let each client choose the number of rows of some local tables.

  Raises:
    ModelError: If one is not local or not a table, or its first values are
      given for specific rows or not made row by row.
  """
  names = names_of(spec, client_sized, 'client_sized')
  variables = []
  for variable in spec.variables:
    if variable.name in names:
      if tier_of[variable.name] != tiers_lib.LOCAL or not variable.trainable:
        raise ModelError(
          f'client_sized={client_sized!r}: {variable.name!r} is not local. '
          'Only what a client alone holds can have a size of its own: name it '
          'in `local`, too.'
        )
      if variable.draw_rows is None or len(variable.shape) < 2:
        raise ModelError(
          f'client_sized={client_sized!r}: {variable.name!r} of the shape '
          f'{list(variable.shape)} is no table whose rows an initializer '
          'makes. Name embeddings without values of their own.'
        )
      client_tables.check_rows(variable.name, variable.draw_rows)
      variable = variable._replace(shape=(None, *variable.shape[1:]))
    variables.append(variable)
  return spec._replace(variables=tuple(variables))


def assign_tiers(
  spec: keras_analysis.KerasSpec, selectors: Mapping[str, Selectors]
) -> dict[str, str]:
  """Assign a tier to every variable; GLOBAL if no selector matches."""
  layers = set(spec.layers)
  chosen: dict[str, str] = {}
  for tier, given in selectors.items():
    selectors_of_tier = _as_list(given)
    for selector in selectors_of_tier:
      matched = _matched(spec, selector, tier)
      if not any(v.trainable for v in matched):
        raise ModelError(
          f'{tier}={selector!r} matches only variables that are not trainable: '
          f'{[v.name for v in matched]}. Make them trainable, or leave them to '
          'the server.'
        )
      for variable in matched:
        _refuse_shared(variable, selectors_of_tier, layers, tier)
        if chosen.setdefault(variable.name, tier) != tier:
          raise ModelError(
            f'Variable {variable.name!r} is selected for two tiers: '
            f'{chosen[variable.name]} and {tier}.'
          )
  tier_of = {
    v.name: chosen.get(v.name, tiers_lib.GLOBAL) for v in spec.variables
  }
  trainable = [v.name for v in spec.variables if v.trainable]
  if not trainable:
    raise ModelError('The model has no trainable variable.')
  if all(tier_of[name] == tiers_lib.LOCAL for name in trainable):
    raise ModelError(
      f'local={selectors[tiers_lib.LOCAL]!r} matches every trainable variable, '
      'so that nothing would be learned together. Name fewer layers.'
    )
  return tier_of
