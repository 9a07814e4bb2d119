"""Readers of Python values of a TFF type, as nested lists of arrays.

A sequence is a leaf, too: `sequences.Elements`.
"""

from collections.abc import Mapping
import functools
import reprlib
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import typed_values

# Kinds of Python numbers that each kind of array takes, if nothing is lost.
_TAKEN = {'f': 'fiu', 'c': 'cfiu', 'i': 'iu', 'u': 'iu'}
# Kinds of arrays that each kind takes, if as wide, as in TFF's runtimes.
_WIDENED = {'f': 'f', 'c': 'c', 'i': 'iu', 'u': 'iu'}


class ValueReader:
  """Reader of Python values of one type, as nested lists of arrays.

  Built once per type and called for each client in each round, so optimized for
  the common case: arrays of the right dtype and shape, in lists or dicts.

  Attributes:
    type_spec: The type, its placement removed.
    elements: For a structure, the names (or places) of its elements, and their
      readers.
  """

  def __init__(self, type_spec: tff.Type):
    if isinstance(type_spec, tff.FederatedType):
      type_spec = type_spec.member
    self.type_spec = type_spec
    self.elements: list[tuple[str, ValueReader]] = []
    self._is_structure = isinstance(type_spec, tff.StructType)
    self._sequence: tuple[sequences.SequenceLayout, ValueReader] | None = None
    if isinstance(type_spec, tff.SequenceType):
      layout = sequences.SequenceLayout(type_spec)
      self._sequence = layout, ValueReader(type_spec.element)
    elif self._is_structure:
      self._names = [name for name, _ in typed_values.fields(type_spec)]
      self.elements = [
        (name or str(index), ValueReader(element))
        for index, (name, element) in enumerate(typed_values.fields(type_spec))
      ]
    else:
      self._spec = typed_values.leaf_spec(type_spec)
      self._dtype = np.dtype(self._spec.dtype.as_numpy_dtype)
      rank = self._spec.shape.rank
      self._shape = None if rank is None else tuple(self._spec.shape)

  def __reduce__(self) -> tuple[Any, ...]:
    proto = tff.types.serialize_type(self.type_spec)
    return _of_type, (proto.SerializeToString(deterministic=True),)

  @property
  def is_static(self) -> bool:
    """True if the type leaves no dimension open."""
    return not self.has_sequences and all(
      spec.shape.is_fully_defined()
      for spec in typed_values.tensor_specs(self.type_spec)
    )

  @functools.cached_property
  def has_sequences(self) -> bool:
    """True if a leaf of the type is a sequence."""
    return typed_values.has_sequences(self.type_spec)

  @functools.cached_property
  def is_empty(self) -> bool:
    """True if the type has no leaves."""
    return not typed_values.tensor_specs(self.type_spec)

  @functools.cached_property
  def stacked(self) -> 'ValueReader':
    """Reader of many such values, stacked along a leading dimension."""
    return ValueReader(_stacked(self.type_spec))

  def __call__(self, value: Any, *where: str) -> typed_values.Nested:
    """Read a value as nested lists; `where` is the path to it, for errors.

    Raises:
      ArgumentError: If the value is not of the type.
      UnsupportedComputationError: If it holds a sequence of the type that
        cannot be read as arrays.
    """
    if self._sequence is not None:
      layout, element = self._sequence
      return layout.read(value, where, element)
    if not self._is_structure:
      return self._leaf(value, where)
    return [
      reader(element, *where, step)
      for element, (step, reader) in zip(
        self.open(value, *where), self.elements, strict=True
      )
    ]

  def open(self, value: Any, *where: str) -> list[Any]:
    """Return a container's elements in the order of the type's fields."""
    if isinstance(value, Mapping):
      if None not in self._names and value.keys() == set(self._names):
        return [value[name] for name in self._names]
      found = f'the fields {list(value)}'
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
        names = tff.structure.name_list_with_nones(container)
        if None not in (*names, *self._names):
          fields = dict(tff.structure.iter_elements(container))
          return self.open(fields, *where)
        if len(container) == len(self._names):
          return list(container)
        found = f'{len(container)} elements'
    raise errors.ArgumentError(
      '/'.join(where),
      f'a structure of the type {self.type_spec}',
      found,
      'pass one value for each element, named as in the type',
    )

  def _leaf(self, value: Any, where: tuple[str, ...]) -> Any:
    if isinstance(value, tf.Tensor | tf.Variable):
      value = value.numpy()
    is_array = isinstance(value, np.ndarray | np.generic)
    # NumPy's own strings drop trailing zeros, which are part of them.
    if is_array and not isinstance(value, bytes | str):
      array = self._widened(value)
    else:
      array = self._of_python(value, where)
    fits = array.dtype == self._dtype or (
      self._spec.dtype == tf.string and array.dtype.kind in 'SU'
    )
    if not (fits and self._fits(array.shape)):
      raise errors.ArgumentError(
        '/'.join(where),
        str(self.type_spec),
        f'{array.dtype.name}{list(array.shape)}',
        'convert the value to that dtype and shape',
      )
    return array

  def _widened(self, array: Any) -> Any:
    """Convert an array of a narrower dtype to this one."""
    if array.dtype == self._dtype:
      return array
    is_akin = array.dtype.kind in _WIDENED.get(self._dtype.kind, '')
    if is_akin and np.can_cast(array.dtype, self._dtype):
      return array.astype(self._dtype)
    return array

  def _fits(self, shape: tuple[int, ...]) -> bool:
    if self._shape is None or shape == self._shape:
      return True
    return len(shape) == len(self._shape) and all(
      wanted is None or size == wanted
      for size, wanted in zip(shape, self._shape, strict=True)
    )

  def _of_python(self, value: Any, where: tuple[str, ...]) -> Any:
    """Read Python numbers, which have no width, with that of the type."""
    if self._spec.dtype == tf.string:
      return self._of_text(value)
    try:
      array = np.asarray(value)
      if not array.size:
        return array.astype(self._dtype)
      if array.dtype.kind not in _TAKEN.get(self._dtype.kind, ''):
        return array
      with np.errstate(over='ignore', invalid='ignore'):
        taken = array.astype(self._dtype)
        is_whole = _holds(taken, array)
    except (TypeError, ValueError) as error:
      raise errors.ArgumentError(
        '/'.join(where),
        str(self.type_spec),
        f'a {type(value).__name__}',
        'pass a number, a string or an array',
      ) from error
    if not is_whole:
      raise errors.ArgumentError(
        '/'.join(where),
        str(self.type_spec),
        reprlib.repr(value),
        f'pass numbers that {self._dtype.name} can hold',
      )
    return taken

  def _of_text(self, value: Any) -> Any:
    """Read strings as Python objects, which keep trailing zeros."""
    array = np.array(value, object)
    if all(isinstance(one, bytes | str) for one in array.flat):
      return array
    return np.asarray(value)


def _of_type(serialized: bytes) -> ValueReader:
  """Build the reader of a pickled type."""
  kind = type(tff.types.serialize_type(tff.StructType([])))
  return ValueReader(tff.types.deserialize_type(kind.FromString(serialized)))


def _holds(taken: np.ndarray, given: np.ndarray) -> bool:
  """Check whether integers are unchanged, and finite numbers still finite."""
  if given.dtype.kind in 'iu' and taken.dtype.kind != 'c':
    same = (taken.astype(given.dtype) == given) & ((taken < 0) == (given < 0))
    return bool(same.all())
  return bool((np.isfinite(taken) == np.isfinite(given)).all())


def _stacked(type_spec: tff.Type) -> tff.Type:
  if isinstance(type_spec, tff.StructType):
    return tff.StructType(
      [
        (name, _stacked(element)) if name else _stacked(element)
        for name, element in typed_values.fields(type_spec)
      ]
    )
  shape = None if type_spec.shape is None else (None, *type_spec.shape)
  return tff.TensorType(type_spec.dtype, shape)
