"""Values as nested lists, in the order of their TFF type.

TFF's programs speak of structures by position, Python callers by name and in
containers of their own choice. Between the two, the runtime keeps every value
as nested lists whose leaves are tensors or arrays; this module goes from a
Python value to nested lists along a `tff.Type`, and back to the containers
that the type asks for.
"""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors

# A tensor, an array, or a list of nested values.
Nested = Any


def leaves(value: Nested) -> list[Any]:
  """The leaves of a nested value, left to right."""
  if isinstance(value, list):
    return [leaf for element in value for leaf in leaves(element)]
  return [value]


def like(pattern: Nested, flat: Iterator[Any]) -> Nested:
  """Arranges the next leaves of `flat` as `pattern` is nested."""
  if isinstance(pattern, list):
    return [like(element, flat) for element in pattern]
  return next(flat)


def fields(type_spec: tff.StructType) -> list[tuple[str | None, tff.Type]]:
  """The names (None where unnamed) and types of a structure's elements."""
  return list(tff.structure.iter_elements(type_spec))


def pattern(type_spec: tff.Type) -> Nested:
  """The type as nested lists of its leaf types, placements removed."""
  if isinstance(type_spec, tff.FederatedType):
    return pattern(type_spec.member)
  if isinstance(type_spec, tff.StructType):
    return [pattern(element) for _, element in fields(type_spec)]
  return type_spec


def leaf_names(type_spec: tff.Type, prefix: str = '') -> list[str]:
  """A readable path for each leaf of the type: 'weights/trainable/0'."""
  if isinstance(type_spec, tff.FederatedType):
    return leaf_names(type_spec.member, prefix)
  if not isinstance(type_spec, tff.StructType):
    return [prefix or 'value']
  names = []
  for index, (name, element) in enumerate(fields(type_spec)):
    step = name or str(index)
    names.extend(leaf_names(element, f'{prefix}/{step}' if prefix else step))
  return names


def specs(type_spec: tff.Type) -> Nested:
  """What a compiled program expects at each leaf of the type, nested."""
  return like(pattern(type_spec), map(leaf_spec, leaves(pattern(type_spec))))


def tensor_specs(type_spec: tff.Type) -> list[tf.TensorSpec]:
  """The same, one after the other."""
  return leaves(specs(type_spec))


def leaf_spec(leaf: tff.Type) -> tf.TensorSpec:
  if isinstance(leaf, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  if leaf.dtype is np.str_:
    return tf.TensorSpec(leaf.shape, tf.string)
  return tf.TensorSpec(leaf.shape, leaf.dtype)


def elements_of(value: Any, type_spec: tff.StructType, where: str) -> list[Any]:
  """A container's elements in the order of the type's fields."""
  expected = fields(type_spec)
  if isinstance(value, (list, tuple)) and not hasattr(value, '_fields'):
    found = list(value)
  else:
    named = tff.structure.to_elements(
        tff.structure.from_container(value, recursive=False))
    if isinstance(value, collections.abc.Mapping):
      by_name = dict(named)
      missing = [name for name, _ in expected if name not in by_name]
      if missing or len(by_name) != len(expected):
        raise errors.ArgumentError(
            where, f'a structure with the fields {[n for n, _ in expected]}',
            f'one with the fields {list(by_name)}',
            'name the fields as the type does')
      return [by_name[name] for name, _ in expected]
    found = [element for _, element in named]
  if len(found) != len(expected):
    raise errors.ArgumentError(
        where, f'a structure of {len(expected)} elements ({type_spec})',
        f'{len(found)} elements', 'pass one value for each element')
  return found


def to_nested(value: Any, type_spec: tff.Type, where: str) -> Nested:
  """A Python value as nested lists of arrays of the type's dtypes."""
  if isinstance(type_spec, tff.StructType):
    try:
      found = elements_of(value, type_spec, where)
    except (TypeError, ValueError, NotImplementedError) as error:
      if isinstance(error, errors.ArgumentError):
        raise
      raise errors.ArgumentError(
          where, f'a structure ({type_spec})', f'a {type(value).__name__}',
          'pass a container with one value for each element') from error
    return [
        to_nested(element, element_type, f'{where}/{name or index}')
        for index, (element, (name, element_type)) in enumerate(
            zip(found, fields(type_spec)))
    ]
  return to_leaf(value, type_spec, where)


def to_leaf(value: Any, type_spec: tff.TensorType, where: str) -> Any:
  """A tensor or an array of the leaf's dtype, its shape checked."""
  if isinstance(value, tf.Variable):
    value = value.read_value()
  if not isinstance(value, (tf.Tensor, np.ndarray)):
    value = as_array(value, type_spec, where)
  dtype = tf.as_dtype(value.dtype) if value.dtype.kind not in 'OSU' else (
      tf.string) if isinstance(value, np.ndarray) else value.dtype
  spec = leaf_spec(type_spec)
  if dtype != spec.dtype or not spec.shape.is_compatible_with(value.shape):
    raise errors.ArgumentError(
        where, str(type_spec), f'{dtype.name}{list(value.shape)}',
        'convert the value to that dtype and shape')
  return value


def as_array(value: Any, type_spec: tff.TensorType, where: str) -> np.ndarray:
  """A Python scalar or list as an array; only lossless casts are taken."""
  wanted = object if type_spec.dtype is np.str_ else type_spec.dtype
  try:
    array = np.asarray(value)
    if wanted is object:
      return array.astype(object)
    if not isinstance(value, np.generic):
      # Python's own numbers have no width: they take that of the type.
      kinds = {'f': 'fiu', 'c': 'cfiu', 'i': 'i', 'u': 'iu', 'b': 'b'}
      if array.size and array.dtype.kind not in kinds.get(
          np.dtype(wanted).kind, array.dtype.kind):
        return array
      return array.astype(wanted)
    return array
  except (TypeError, ValueError) as error:
    raise errors.ArgumentError(
        where, str(type_spec), f'a {type(value).__name__}',
        'pass a number, a string or an array') from error


def to_python(value: Nested, type_spec: tff.Type) -> Any:
  """Nested lists in the containers that the type asks for."""
  if isinstance(type_spec, tff.FederatedType) and not type_spec.all_equal:
    return [to_python(element, type_spec.member) for element in value]
  return tff.types.type_to_py_container(
      to_struct(value, type_spec), type_spec)


def to_struct(value: Nested, type_spec: tff.Type) -> Any:
  if isinstance(type_spec, tff.FederatedType):
    if not type_spec.all_equal:
      return [to_struct(element, type_spec.member) for element in value]
    return to_struct(value, type_spec.member)
  if isinstance(type_spec, tff.StructType):
    return tff.structure.Struct([
        (name, to_struct(element, element_type))
        for element, (name, element_type) in zip(value, fields(type_spec))
    ])
  return value


def zeros(specs: Iterable[tf.TensorSpec]) -> list[tf.Tensor]:
  """A zero for each spec, unknown dimensions taken as zero."""
  return [
      tf.zeros([size or 0 for size in spec.shape.as_list()], spec.dtype)
      for spec in specs
  ]
