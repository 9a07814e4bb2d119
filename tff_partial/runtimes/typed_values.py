"""Values as nested lists, in the order of their TFF type.

TFF's programs speak of structures by position, Python callers by name and in
containers of their own choice. Between the two, the runtime keeps every value
as nested lists whose leaves are tensors or arrays; this module goes from a
Python value to nested lists along a `tff.Type`, and back to the containers
that the type asks for.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class Reader:
  """Turns Python values of one type into nested lists of arrays.

  Built once per type and called for each client in each round, hence the care
  for the common case: arrays of the right dtype and shape, in lists or dicts.
  """

  def __init__(self, type_spec: tff.Type):
    if isinstance(type_spec, tff.FederatedType):
      type_spec = type_spec.member
    self.type_spec = type_spec
    self._elements = None
    if isinstance(type_spec, tff.StructType):
      self._names = [name for name, _ in fields(type_spec)]
      self._elements = [
          (name or str(index), Reader(element))
          for index, (name, element) in enumerate(fields(type_spec))]
    else:
      self._spec = leaf_spec(type_spec)
      self._dtype = np.dtype(self._spec.dtype.as_numpy_dtype)
      self._shape = None if self._spec.shape.rank is None else tuple(
          self._spec.shape)

  @property
  def is_static(self) -> bool:
    """Whether the type leaves no dimension open."""
    return all(spec.shape.is_fully_defined()
               for spec in tensor_specs(self.type_spec))

  @property
  def named(self) -> list[tuple[str, 'Reader']]:
    """The elements' names (or places) and their readers."""
    return self._elements or []

  @functools.cached_property
  def stacked(self) -> 'Reader':
    """A reader of many such values, stacked along a leading dimension."""
    return Reader(_stacked(self.type_spec))

  def __call__(self, value: Any, *where: str) -> Nested:
    """The value as nested lists; `where` is its path, for errors."""
    if self._elements is None:
      return self._leaf(value, where)
    return [
        reader(element, *where, step)
        for element, (step, reader) in zip(
            self.elements(value, *where), self._elements)]

  def elements(self, value: Any, *where: str) -> list[Any]:
    """A container's elements in the order of the type's fields."""
    if isinstance(value, collections.abc.Mapping):
      if None not in self._names and value.keys() == set(self._names):
        return [value[name] for name in self._names]
      found = list(value)
    elif type(value) in (list, tuple):
      if len(value) == len(self._names):
        return list(value)
      found = f'{len(value)} elements'
    else:
      try:
        container = tff.structure.from_container(value, recursive=False)
      except TypeError:
        found = f'a {type(value).__name__}'
      else:
        if len(container) == len(self._names):
          return [element for _, element in tff.structure.iter_elements(
              container)]
        found = f'{len(container)} elements'
    raise errors.ArgumentError(
        '/'.join(where), f'a structure of the type {self.type_spec}', str(found),
        'pass one value for each element, named as in the type')

  def _leaf(self, value: Any, where: tuple[str, ...]) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
      array = value
    elif isinstance(value, tf.Tensor):
      if value.dtype == self._spec.dtype and (
          self._spec.shape.is_compatible_with(value.shape)):
        return value
      array = np.asarray(value)
    else:
      array = self._of_python(value, where)
    fits = array.dtype == self._dtype or (
        self._spec.dtype == tf.string and array.dtype.kind in 'SU')
    if not (fits and self._fits(array.shape)):
      raise errors.ArgumentError(
          '/'.join(where), str(self.type_spec),
          f'{array.dtype.name}{list(array.shape)}',
          'convert the value to that dtype and shape')
    return array

  def _fits(self, shape: tuple[int, ...]) -> bool:
    if self._shape is None:
      return True
    return shape == self._shape or len(shape) == len(self._shape) and all(
        size == wanted or wanted is None
        for size, wanted in zip(shape, self._shape))

  def _of_python(self, value: Any, where: tuple[str, ...]) -> np.ndarray:
    """Python's own numbers have no width: they take that of the type."""
    try:
      if isinstance(value, tf.Variable):
        return value.numpy()
      array = np.asarray(value)
      if array.dtype.kind in _WIDENED.get(self._dtype.kind, ''):
        return array.astype(self._dtype)
      return array
    except (TypeError, ValueError) as error:
      raise errors.ArgumentError(
          '/'.join(where), str(self.type_spec), f'a {type(value).__name__}',
          'pass a number, a string or an array') from error


# Kinds of Python numbers that each kind of array takes without loss.
_WIDENED = {'f': 'fiu', 'c': 'cfiu', 'i': 'i', 'u': 'iu', 'O': 'SUO'}


def _stacked(type_spec: tff.Type) -> tff.Type:
  if isinstance(type_spec, tff.StructType):
    return tff.StructType([
        (name, _stacked(element)) if name else _stacked(element)
        for name, element in fields(type_spec)])
  shape = None if type_spec.shape is None else (None, *type_spec.shape)
  return tff.TensorType(type_spec.dtype, shape)


def to_tf_structure(value: Nested, type_spec: tff.Type) -> Any:
  """Nested lists as the elements of TFF's datasets: dicts, or tuples."""
  if not isinstance(type_spec, tff.StructType):
    return value
  elements = [to_tf_structure(element, element_type)
              for element, (_, element_type) in zip(value, fields(type_spec))]
  names = [name for name, _ in fields(type_spec)]
  if names and None not in names:
    return collections.OrderedDict(zip(names, elements))
  return tuple(elements)


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


def function(run: Callable[..., list[tf.Tensor]],
             inputs: Sequence[tf.TensorSpec], *, jit: bool = False) -> (
                 Callable[..., list[tf.Tensor]]):
  """Compiles a function of flat tensors.

  TF checks the arguments of a `tf.function` with care that costs more than
  many a round; a wrapped function is called as it is.
  """
  concrete = tf.function(
      run, autograph=False, jit_compile=jit or None).get_concrete_function(
          *inputs)
  return tf.compat.v1.wrap_function(lambda *flat: concrete(*flat), inputs)


def zeros(specs: Iterable[tf.TensorSpec]) -> list[tf.Tensor]:
  """A zero for each spec, unknown dimensions taken as zero."""
  return [
      tf.zeros([size or 0 for size in spec.shape.as_list()], spec.dtype)
      for spec in specs
  ]
