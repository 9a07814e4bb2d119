"""Values as nested lists, in the order of their TFF type.

TFF's programs address structures by position, Python callers by name and in
containers of their choice. Between the two, the runtime keeps every value as
nested lists whose leaves are tensors or arrays. `readers` makes them from
Python values; here they are flattened, and put into the containers that a type
requires.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes.values import client_batch

# A tensor, an array, or a list of nested values.
Nested: TypeAlias = Any


def leaves(value: Nested) -> list[Any]:
  """Return the leaves of a nested value, left to right."""
  if isinstance(value, list):
    return [leaf for element in value for leaf in leaves(element)]
  return [value]


def like(pattern: Nested, flat: Iterator[Any]) -> Nested:
  """Nest the next leaves of `flat` like `pattern`."""
  if isinstance(pattern, list):
    return [like(element, flat) for element in pattern]
  return next(flat)


def is_at_clients(type_spec: tff.Type) -> bool:
  """Check whether values of the type may differ from client to client."""
  return (
    isinstance(type_spec, tff.FederatedType)
    and type_spec.placement is tff.CLIENTS
    and not type_spec.all_equal
  )


def fields(type_spec: tff.StructType) -> list[tuple[str | None, tff.Type]]:
  """Return the names (None if unnamed) and types of a structure's elements."""
  return list(tff.structure.iter_elements(type_spec))


def pattern(type_spec: tff.Type) -> Nested:
  """Return the type as nested lists of its leaf types, without placements."""
  if isinstance(type_spec, tff.FederatedType):
    return pattern(type_spec.member)
  if isinstance(type_spec, tff.StructType):
    return [pattern(element) for _, element in fields(type_spec)]
  return type_spec


def leaf_names(type_spec: tff.Type, prefix: str = '') -> list[str]:
  """Return a readable path for each leaf, such as 'weights/trainable/0'."""
  if isinstance(type_spec, tff.FederatedType):
    return leaf_names(type_spec.member, prefix)
  if not isinstance(type_spec, tff.StructType):
    return [prefix or 'value']
  names = []
  for index, (name, element) in enumerate(fields(type_spec)):
    step = name or str(index)
    names.extend(leaf_names(element, f'{prefix}/{step}' if prefix else step))
  return names


def leaf_spec(leaf: tff.Type) -> tf.TensorSpec:
  """Return the spec of a leaf in a compiled program."""
  if isinstance(leaf, tff.SequenceType):
    return tf.TensorSpec([], tf.variant)
  if leaf.dtype is np.str_:
    return tf.TensorSpec(leaf.shape, tf.string)
  return tf.TensorSpec(leaf.shape, leaf.dtype)


def specs(type_spec: tff.Type) -> Nested:
  """Return the spec of each leaf in a compiled program, nested."""
  nested = pattern(type_spec)
  return like(nested, map(leaf_spec, leaves(nested)))


def tensor_specs(type_spec: tff.Type) -> list[tf.TensorSpec]:
  """Return the spec of each leaf in a compiled program, as a flat list."""
  return leaves(specs(type_spec))


def zeros(flat: Iterable[tf.TensorSpec]) -> list[tf.Tensor]:
  """Return zeros for each spec, with unknown dimensions taken as zero."""
  return [
    tf.zeros([size or 0 for size in spec.shape.as_list()], spec.dtype)
    for spec in flat
  ]


def num_bytes(type_spec: tff.Type) -> int | None:
  """Return the size of a value, or None if the type leaves it open."""
  total = 0
  for spec in tensor_specs(type_spec):
    if spec.dtype == tf.variant or not spec.shape.is_fully_defined():
      return None
    total += spec.shape.num_elements() * spec.dtype.size
  return total


def converter(type_spec: tff.Type) -> Callable[[Iterator[Any]], Any]:
  """Build a function that puts leaves into the containers of a type.

  Inspecting a type and its containers takes longer than some rounds, so this is
  done once for each type.

  Args:
    type_spec: The type; the leaves are taken off an iterator, in its order. A
      value at CLIENTS is one leaf, `sources.Scattered`.
  """
  if isinstance(type_spec, tff.FederatedType):
    convert = converter(type_spec.member)
    if is_at_clients(type_spec):
      return lambda flat: client_batch.Columns.of_scattered(next(flat), convert)
    return convert
  if not isinstance(type_spec, tff.StructType):
    return next
  make = _maker(type_spec)
  converters = [converter(element) for _, element in fields(type_spec)]
  return lambda flat: make([convert(flat) for convert in converters])


def _maker(type_spec: tff.StructType) -> Callable[[Sequence[Any]], Any]:
  """Return a function that makes a structure's container of its elements."""
  names = [name for name, _ in fields(type_spec)]
  container = type_spec.python_container
  shallow = [(name, np.int32) if name else np.int32 for name in names]
  # TFF refuses here structures that it has no container for.
  example = tff.types.type_to_py_container(
    tff.structure.Struct([(name, 0) for name in names]),
    tff.StructWithPythonType(shallow, container)
    if container
    else tff.StructType(shallow),
  )
  container = type(example)
  if hasattr(container, '_fields') or hasattr(container, '__attrs_attrs__'):
    return lambda values: container(**dict(zip(names, values, strict=True)))
  if any(names):
    return lambda values: container(zip(names, values, strict=True))
  return container


def has_sequences(type_spec: tff.Type) -> bool:
  """Check whether a leaf of the type is a sequence."""
  return tff.types.contains(
    type_spec, lambda inner: isinstance(inner, tff.SequenceType)
  )


def to_element(value: Nested, type_spec: tff.Type) -> Any:
  """Nest a value as TFF's data sets do: in dicts, or in tuples."""
  if not isinstance(type_spec, tff.StructType):
    return value
  elements = [
    to_element(element, element_type)
    for element, (_, element_type) in zip(value, fields(type_spec), strict=True)
  ]
  names = [name for name, _ in fields(type_spec)]
  # `tf.data` sorts the fields of a mapping, not those of a class.
  container = type_spec.python_container
  is_class = hasattr(container, '_fields') or hasattr(
    container, '__attrs_attrs__'
  )
  if names and None not in names and not is_class:
    return collections.OrderedDict(zip(names, elements, strict=True))
  return tuple(elements)
