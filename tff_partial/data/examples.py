"""The format of clients' examples, and checks of given ones.

A client's value inside a computation is

    examples: fields for the model and the splits, each `[capacity, ...]`
      x       inputs, in the structure that the model takes
      y       labels
      weight  weight of an example, 1 by default
      ...     further fields that a split requires, such as a time
    count:    number of real examples; the rest is padding
    rows:     if tables are sized per client, a mask of the real rows of each
              such table, `[capacity of the table]`
    seed:     the client's randomness in this round

Padding never changes a result: readers of examples respect `count`.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial import errors
from tff_partial.arguments import spelling
from tff_partial.data import id_ranges
from tff_partial.data import lengths

WEIGHT_SPEC = tf.TensorSpec([], tf.float32)


class ExampleSpec(collections.OrderedDict[str, Any]):
  """Field to a structure of `tf.TensorSpec` of one example, without batch axis.

  Attributes:
    ids: Fields that are known to hold ids: of the rows of a model's tables, or
      of classes.
    lifted: Inputs that pass through a layer when clients are packed, such as
      `x`, and that layer (see `model/preprocessing.py`).
  """

  def __init__(
    self,
    fields: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    ids: id_ranges.Ids | None = None,
    lifted: Mapping[str, Any] | None = None,
  ):
    super().__init__(fields)
    # A copy keeps what it does not replace.
    self.ids = dict(ids_of(fields) if ids is None else ids)
    self.lifted = dict(lifted_of(fields) if lifted is None else lifted)

  def __repr__(self) -> str:
    """Return one line per field."""
    lines = ['ExampleSpec:']
    for path, spec in leaves(self):
      if not isinstance(spec, tf.TensorSpec):
        return super().__repr__()
      line = f'  {path}: {spec.dtype.name} {list(spec.shape)}'
      if path in self.lifted:
        line += f', from {self.lifted[path]!r}'
      for ids in self.ids.get(path, ()):
        places = '' if ids.elements is None else f' at {list(ids.elements)}'
        last = '' if ids.size is None else f' to {ids.size - 1}'
        line += f', 0{last or " and up"}{places} ({ids.what})'
      lines.append(line)
    return '\n'.join(lines)


def leaves(structure: Any, path: str = '') -> Iterator[tuple[str, Any]]:
  """Yield path and value of each leaf, such as `x.item`, `x[0]`."""
  if isinstance(structure, Mapping):
    for key, value in structure.items():
      yield from leaves(value, f'{path}.{key}' if path else str(key))
  elif isinstance(structure, (tuple, list)):
    for place, value in enumerate(structure):
      yield from leaves(value, f'{path}[{place}]')
  else:
    yield path, structure


def ids_of(example_spec: Any) -> id_ranges.Ids:
  """Return the fields that hold ids; a plain mapping has none."""
  return getattr(example_spec, 'ids', {})


def lifted_of(example_spec: Any) -> Mapping[str, Any]:
  """Return the layers that inputs pass through; a plain mapping has none."""
  return getattr(example_spec, 'lifted', {})


def as_packed(example_spec: ExampleSpec) -> ExampleSpec:
  """Return the spec of examples whose inputs have passed their layers."""
  return ExampleSpec(example_spec, lifted={})


class ClientDataError(errors.UserError, ValueError):
  """Raised for client data that cannot be trained on."""


def client_spec(example_spec: ExampleSpec) -> collections.OrderedDict[str, Any]:
  """Return the structure of `tf.TensorSpec` of one client's value."""
  spec = collections.OrderedDict(
    examples=map_fields(
      lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), example_spec
    ),
    count=tf.TensorSpec([], tf.int32),
  )
  if tables := id_ranges.client_sized(ids_of(example_spec)):
    spec['rows'] = collections.OrderedDict(
      (name, tf.TensorSpec([None], tf.bool)) for name in tables
    )
  spec['seed'] = tf.TensorSpec([2], tf.int32)
  return spec


def map_fields(fn: Callable[..., Any], *structures: Any) -> Any:
  """Map over nested ordered dicts, keeping their order of fields.

  `tf.nest` sorts keys when it flattens; a computation's fields are ordered.
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
  """Format a value for messages, shortened if it is long."""
  if isinstance(value, np.generic):
    value = value.item()  # As in users' code: NumPy 2 shows its types.
  try:
    return f'{value!r:.80}'
  except ValueError:  # Python limits the digits of integers in text.
    return f'an integer of {value.bit_length():,} bits'


def _example(place: int) -> str:
  """Name an example in messages."""
  return f'example {place}'


def _of_shape(array: np.ndarray, spec: tf.TensorSpec) -> str:
  """Describe examples of another shape than their spec, for messages."""
  if not array.ndim:
    found = f'the single value {shown(array[()])}. Give a list or an array.'
    return f'expected one value for each example, found {found}'
  classes = 'take sparse_categorical_crossentropy for class numbers, '
  advice = f'Reshape the data, {classes if array.ndim == 1 else ""}or'
  return (
    f'expected one example to have shape {tuple(spec.shape)}, found '
    f'{array.shape[1:]}. {advice} describe them in the specs of `from_keras`.'
  )


def check_array(
  array: Any,
  spec: tf.TensorSpec,
  where: str,
  ids: Sequence[id_ranges.IdRange] = (),
  which: Callable[[int], str] = _example,
) -> np.ndarray:
  """Return examples as an array of the spec's dtype, or raise an error.

  Plain numbers are accepted for arrays of one number, as in Keras.

  Args:
    array: Values of one field, `[examples, ...]`.
    spec: Shape and dtype of one example.
    where: Names the field and its client in error messages.
    ids: The ranges in which ids must lie.
    which: Names an example by its index.

  Raises:
    ClientDataError: For a wrong shape, dtype or id, or a value not finite.
  """
  if np.ma.is_masked(array):
    raise ClientDataError(f'{where}: values are masked. Drop or fill them.')
  try:
    open_length = lengths.is_open(spec)
    array = lengths.padded(array, spec) if open_length else np.asarray(array)
  except ValueError as error:
    raise ClientDataError(
      f'{where}: the examples differ in shape. Pad or cut them to the shape '
      f'{tuple(spec.shape)}.'
    ) from error
  wanted = spec.dtype.as_numpy_dtype
  if array.ndim == 1 and tuple(spec.shape) == (1,):
    array = array[:, np.newaxis]
  if not array.ndim or not spec.shape.is_compatible_with(array.shape[1:]):
    raise ClientDataError(f'{where}: {_of_shape(array, spec)}')
  is_float = array.dtype.kind == 'f'
  if is_float and not np.isfinite(array).all():
    row = int(np.argwhere(~np.isfinite(array))[0][0])
    raise ClientDataError(
      f'{where}: {which(row)} is {array[row]}, which is not finite. Drop or '
      'repair it before packing.'
    )
  if array.dtype.kind in 'OSU' and np.dtype(wanted).kind == 'O':
    result = array.astype(object, copy=False)
    are_texts = np.frompyfunc(lambda t: isinstance(t, (str, bytes)), 1, 1)
    for row, *_ in np.argwhere(~are_texts(result).astype(bool))[:1]:
      raise ClientDataError(
        f'{where}: {which(row)} is {shown(array[row])}, where texts are read. '
        'Drop such rows, or fill them.'
      )
  elif array.dtype == wanted:
    result = array
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
        'fractions would be lost. Round the values or change the spec. Whole '
        f'numbers need `.astype({spec.dtype.name!r})`.'
      )
    with np.errstate(over='ignore', invalid='ignore'):
      result = array.astype(wanted)
    fits = np.isfinite(result) if is_float else result == array
    if not fits.all():
      raise ClientDataError(
        f'{where}: the value {array[~fits][0]} does not fit into '
        f'{spec.dtype.name}. Change the spec, or the values.'
      )
  check_ids(result, ids, where, which)
  return result


def check_ids(
  array: np.ndarray,
  ids: Sequence[id_ranges.IdRange],
  where: str,
  which: Callable[[int], str] = _example,
) -> None:
  """Check that ids lie in their ranges; `which` names an example, by index."""
  for limits in ids:
    if (outside := limits.first_outside(array)) is not None:
      place, value = outside
      raise ClientDataError(
        f'{where}: {which(place)} is {value}, but {limits.what}: ids are 0 '
        f'{"and up" if limits.size is None else f"to {limits.size - 1}"}. '
        f'{limits.advice(value)}'
      )


def check_fields(
  fields: Mapping[str, Any],
  example_spec: ExampleSpec,
  where: str,
  name_of: Callable[[str], str] | None = None,
  which: Callable[[int], str] = _example,
) -> Any:
  """Check every field of examples; missing weights become ones.

  Args:
    fields: Field to its values.
    example_spec: Spec of one example.
    where: Names the source of the fields in messages.
    name_of: From the path of a field to its name in messages.
    which: Names an example by its index in messages.
  """
  ids, lifted = ids_of(example_spec), lifted_of(example_spec)
  missing = [n for n in example_spec if n not in fields and n != 'weight']
  if missing:
    raise ClientDataError(
      f'{where} lacks the fields {missing}: an example consists of '
      f'{list(example_spec)}, and {list(fields)} are given.'
    )
  _check_names('field', fields, example_spec, where)

  def check(spec: Any, value: Any, path: str) -> Any:
    if isinstance(spec, Mapping):
      if not isinstance(value, Mapping) or set(spec) - set(value):
        raise ClientDataError(
          f'{where}: {path} must be a mapping with the keys {list(spec)}.'
        )
      _check_names('key', value, spec, f'{where}, {path}')
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
    name = name_of(path) if name_of else f'{where}, {path}'
    if path in lifted:
      value = lifted[path].encode(value, name, which)
    array = check_array(value, spec, name, ids.get(path, ()), which)
    if path == 'weight' and (negative := np.argwhere(array < 0)).size:
      row = int(negative[0][0])
      raise ClientDataError(
        f'{name}: {which(row)} is {array[row]}, and a weight is not negative.'
      )
    return array

  checked = collections.OrderedDict(
    (name, check(spec, fields[name], name) if name in fields else None)
    for name, spec in example_spec.items()
  )
  if 'weight' in example_spec and 'weight' not in fields:
    first, spec = tf.nest.flatten(checked['y'])[0], example_spec['weight']
    shape = [first.shape[1] if n is None else n for n in spec.shape]
    checked['weight'] = np.ones([len(first), *shape], spec.dtype.as_numpy_dtype)
  if lengths.are_open(example_spec):
    return _of_one_length(checked, fields, example_spec, where)
  return checked


def _of_one_length(
  checked: Any, given: Any, example_spec: ExampleSpec, where: str
) -> Any:
  """Pad all fields of open length to the length of the inputs."""
  x, specs = checked['x'], example_spec['x']
  longest = lengths.longest(x, specs)
  wanted = lengths.of_examples(x, specs)

  def fit(spec: tf.TensorSpec, array: np.ndarray, raw: Any) -> np.ndarray:
    if not lengths.is_open(spec):
      return array
    if wrong := lengths.why_unlike(raw, array, longest, wanted):
      raise ClientDataError(
        f'{where}: a label or weight has {wrong}. Give each step of the input '
        'one.'
      )
    return lengths.cut_or_padded(array, longest)

  return map_fields(fit, example_spec, checked, {**checked, **given, 'x': x})


def _check_names(
  what: str, found: Iterable[Any], known: Mapping[str, Any], where: str
) -> None:
  """Refuse unknown names, which may be misspelt."""
  if wrong := spelling.unknown(what, found, known):
    raise ClientDataError(
      f'{where}: {wrong} What is read is {list(known)}. Leave others out.'
    )


def check_is_spec(given: Any) -> None:
  """Refuse what is no spec of an example, such as a model."""
  what = 'the fields of an example, `process.example_spec`'
  spelling.check_kind('example_spec', given, Mapping, what, ClientDataError)


def check_spec(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
  """Check that packed examples match the spec of their reader."""
  packed, read = dict(leaves(found)), dict(leaves(wanted))
  complaints = [
    *(f'they lack {path!r}' for path in read if path not in packed),
    *(
      f'they have {path!r}, which is not read'
      for path in packed
      if path not in read
    ),
    *(
      f'{path!r} is {packed[path].dtype.name} {list(packed[path].shape)} '
      f'instead of {spec.dtype.name} {list(spec.shape)}'
      for path, spec in read.items()
      if path in packed
      and (packed[path].shape, packed[path].dtype) != (spec.shape, spec.dtype)
    ),
  ]
  if not complaints and list(packed) != list(read):
    complaints = [f'their fields are {list(packed)} instead of {list(read)}']
  if lifted_of(found) and lifted_of(found) != lifted_of(wanted):
    complaints.append(
      f'they passed through {lifted_of(found)} instead of {lifted_of(wanted)}, '
      'or through the same with another vocabulary or other statistics'
    )
  held, needed = (
    list(id_ranges.client_sized(ids_of(spec))) for spec in (found, wanted)
  )
  if held != needed:
    complaints.append(
      f'they count rows of the client-sized tables {held} instead of {needed}'
    )
  if complaints:
    raise ClientDataError(
      f'The clients were packed for another process: {"; ".join(complaints)}. '
      'Pack them with the `example_spec` of the process or evaluation that '
      'reads them.'
    )
