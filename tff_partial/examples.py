"""What a client's examples consist of, and whether given ones can be used.

A client's value inside a computation is

    examples: what the model and the splits read, each `[capacity, ...]`
      x       inputs, in the structure that the model takes
      y       labels
      weight  how much an example counts, 1 unless said otherwise
      ...     further fields that a split asks for, such as a time
    count:    how many of the examples are real; the rest is padding
    seed:     the client's randomness in this round

Padding never changes a result: whoever reads examples honours `count`.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import errors

# Field to a structure of `tf.TensorSpec` of one example, without batch axis.
ExampleSpec = collections.OrderedDict[str, Any]

WEIGHT_SPEC = tf.TensorSpec([], tf.float32)


class ClientDataError(errors.UserError, ValueError):
  """Raised for client data that cannot be trained on."""


class EmptyClientError(ClientDataError):
  """Raised for a client without examples."""


class NoEligibleClientError(ClientDataError):
  """Raised when no client has enough examples."""


def client_spec(example_spec: ExampleSpec) -> collections.OrderedDict[str, Any]:
  """Returns the structure of `tf.TensorSpec` of one client's value."""
  return collections.OrderedDict(
    examples=tf.nest.map_structure(
      lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), example_spec
    ),
    count=tf.TensorSpec([], tf.int32),
    seed=tf.TensorSpec([2], tf.int32),
  )


def map_fields(fn: Callable[..., Any], *structures: Any) -> Any:
  """Maps over nested ordered dicts, keeping their order of fields.

  `tf.nest` sorts keys when it flattens; a computation's fields have an order.
  """
  first = structures[0]
  if isinstance(first, Mapping):
    return collections.OrderedDict(
      (key, map_fields(fn, *(s[key] for s in structures))) for key in first
    )
  if isinstance(first, tuple):
    return tuple(
      map_fields(fn, *parts) for parts in zip(*structures, strict=True)
    )
  return fn(*structures)


def shown(value: Any) -> str:
  """A value in a message: its beginning, if it is long."""
  try:
    return f'{value!r:.80}'
  except ValueError:  # Of integers, Python writes some thousand digits at most.
    return f'an integer of {value.bit_length():,} bits'


def check_array(array: Any, spec: tf.TensorSpec, where: str) -> np.ndarray:
  """Returns examples as an array of the spec's dtype, or says what is wrong.

  Where an example is an array of one number, plain numbers will do, as in
  Keras.

  Args:
    array: Values of one field, `[examples, ...]`.
    spec: Shape and dtype of one example.
    where: Names the field and its client in error messages.

  Raises:
    ClientDataError: For another shape, a dtype that would lose information, or
      a value that is not finite.
  """
  try:
    array = np.asarray(array)
  except ValueError as error:
    raise ClientDataError(
      f'{where}: the examples differ in shape. Pad or cut them to the shape '
      f'{tuple(spec.shape)}.'
    ) from error
  wanted = spec.dtype.as_numpy_dtype
  if array.ndim == 1 and tuple(spec.shape) == (1,):
    array = array[:, np.newaxis]
  if tuple(array.shape[1:]) != tuple(spec.shape) or array.ndim == 0:
    raise ClientDataError(
      f'{where}: expected one example to have shape {tuple(spec.shape)}, found '
      f'{tuple(array.shape[1:])}. Reshape the data, or describe them in the '
      'specs given to `from_keras`.'
    )
  is_float = array.dtype.kind == 'f'
  if is_float and not np.isfinite(array).all():
    row = int(np.argwhere(~np.isfinite(array))[0][0])
    raise ClientDataError(
      f'{where}: example {row} is {array[row]}, which is not finite. Drop or '
      'repair it before packing.'
    )
  if array.dtype == wanted:
    result = array
  elif array.dtype.kind in 'OSU' and np.dtype(wanted).kind == 'O':
    result = array.astype(object)
  elif array.dtype.kind not in 'biuf' or np.dtype(wanted).kind == 'O':
    first = f' (first value {shown(array.flat[0])})' if array.size else ''
    raise ClientDataError(
      f'{where}: expected values of type {spec.dtype.name}, found '
      f'{array.dtype}{first}. Convert them before packing.'
    )
  else:
    if is_float and np.dtype(wanted).kind not in 'fc':
      raise ClientDataError(
        f'{where}: expected {spec.dtype.name}, found {array.dtype}, whose '
        'fractions would be lost. Round the values or change the spec.'
      )
    with np.errstate(over='ignore', invalid='ignore'):
      result = array.astype(wanted)
    fits = np.isfinite(result) if is_float else result == array
    if not fits.all():
      raise ClientDataError(
        f'{where}: the value {array[~fits][0]} does not fit into '
        f'{spec.dtype.name}. Change the spec, or the values.'
      )
  return result


def check_fields(
  fields: Mapping[str, Any], example_spec: ExampleSpec, where: str
) -> Any:
  """Checks every field of some examples; ones stand in for missing weights."""
  missing = [n for n in example_spec if n not in fields and n != 'weight']
  if missing:
    raise ClientDataError(
      f'{where} lacks the fields {missing}; an example consists of '
      f'{list(example_spec)}.'
    )

  def check(spec: Any, value: Any, path: str) -> Any:
    if isinstance(spec, Mapping):
      if not isinstance(value, Mapping) or set(spec) - set(value):
        raise ClientDataError(
          f'{where}: {path} must be a mapping with the keys {list(spec)}.'
        )
      return collections.OrderedDict(
        (key, check(spec[key], value[key], f'{path}.{key}')) for key in spec
      )
    if isinstance(spec, tuple):
      if not isinstance(value, (tuple, list)) or len(value) != len(spec):
        raise ClientDataError(
          f'{where}: {path} must be a tuple of {len(spec)} arrays.'
        )
      return tuple(
        check(s, v, f'{path}[{i}]')
        for i, (s, v) in enumerate(zip(spec, value, strict=True))
      )
    return check_array(value, spec, f'{where}, {path}')

  checked = collections.OrderedDict(
    (name, check(spec, fields[name], name) if name in fields else None)
    for name, spec in example_spec.items()
  )
  if 'weight' not in fields:
    first, spec = tf.nest.flatten(checked['y'])[0], example_spec['weight']
    checked['weight'] = np.ones(
      [len(first), *spec.shape], spec.dtype.as_numpy_dtype
    )
  return checked
