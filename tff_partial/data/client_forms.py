"""Conversion of client data in various forms to fields of arrays."""

from collections.abc import Iterator, Mapping
import json
import os
import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.arguments import spelling
from tff_partial.data import examples

# The order of fields in tuples, as in Keras's `fit`.
_ORDER = ('x', 'y', 'weight')


def as_fields(given: Any, example_spec: Any, where: str) -> Mapping[str, Any]:
  """Return a client's examples as fields, `[examples, ...]`.

  Args:
    given: The fields; the model's inputs by name next to other fields, as in a
      dictionary of columns or a data frame; a tuple `(x, y)` or `(x, y,
      weight)`; or a `tf.data.Dataset` of one of these, batched or not.
    example_spec: Spec of one example.
    where: Names the client in error messages.

  Raises:
    ClientDataError: For anything else.
  """
  if isinstance(given, tf.data.Dataset):
    return _read(given, example_spec, where)
  if hasattr(given, 'columns') and hasattr(given, 'to_numpy'):
    given = {column: given[column].to_numpy() for column in given.columns}
  if isinstance(given, (tuple, list)) and len(given) in (2, 3):
    return dict(zip(_ORDER, given, strict=False))
  what = 'fields, `{"x": ..., "y": ...}`, a tuple or a `tf.data.Dataset`'
  spelling.check_kind(where, given, Mapping, what, examples.ClientDataError)
  inputs = example_spec['x']
  if 'x' in given or not isinstance(inputs, Mapping):
    return given
  if any(name in example_spec for name in inputs if name in given):
    return given  # An input may share its name with a field.
  fields = {n: value for n, value in given.items() if n not in inputs}
  if len(fields) < len(given):
    fields['x'] = {name: given[name] for name in inputs if name in given}
  return fields


def _read(
  dataset: tf.data.Dataset, example_spec: Any, where: str
) -> Mapping[str, Any]:
  """Read a data set into memory."""
  if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
    raise examples.ClientDataError(
      f'{where}: the data set repeats without end. Leave `repeat()` out; a '
      'phase has `epochs`.'
    )

  def fields_of(element: Any) -> Mapping[str, Any]:
    return as_fields(element, example_spec, where)

  specs = fields_of(dataset.element_spec)
  pairs = [
    pair
    for name, wanted in example_spec.items()
    if name in specs
    for pair in zip(
      tf.nest.flatten(specs[name]), tf.nest.flatten(wanted), strict=False
    )
  ]
  if any(
    isinstance(spec, tf.RaggedTensorSpec)
    for spec in tf.nest.flatten(dataset.element_spec)
  ):
    dataset = dataset.map(_dense)
  is_batched = any(_is_batch(found, wanted) for found, wanted in pairs)
  read = [fields_of(element) for element in dataset.as_numpy_iterator()]
  return joined(read, example_spec, is_batched)


def _dense(*element: Any) -> Any:
  """Pad ragged tensors of an element of a data set."""
  return tf.nest.map_structure(
    lambda t: t.to_tensor() if isinstance(t, tf.RaggedTensor) else t,
    element if len(element) > 1 else element[0],
  )


def _is_batch(found: Any, wanted: tf.TensorSpec) -> bool:
  """Return true if elements of a data set are batches of the wanted spec."""
  rank = found.shape.rank
  if rank is None or rank == wanted.shape.rank + 1:
    return True
  # Plain numbers are accepted for arrays of one.
  is_one = tuple(wanted.shape) == (1,) and rank == 1
  return is_one and found.shape[0] != 1


def joined(
  read: list[Mapping[str, Any]], example_spec: Any, are_batches: bool = False
) -> Any:
  """Join single examples, or batches of them, to fields `[examples, ...]`.

  `example_spec` is for a client without examples.
  """
  if not read:
    return examples.map_fields(
      lambda spec: np.zeros(
        [0, *(size or 1 for size in spec.shape)], spec.dtype.as_numpy_dtype
      ),
      example_spec,
    )

  def together(*values: Any) -> Any:
    if len({np.shape(value)[are_batches:] for value in values}) > 1:
      # Sequences, to be padded; or to be refused for their shapes.
      return [
        row for value in values for row in (value if are_batches else [value])
      ]
    return np.concatenate(values) if are_batches else np.stack(values)

  return examples.map_fields(together, *read)


def leaf_clients(
  path: str | os.PathLike[str],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yield the clients of a JSON file, or of a folder of them, in LEAF's format.

  Raises:
    ClientDataError: If there are none, or their format is another.
  """
  given = pathlib.Path(path)
  files = sorted(given.glob('*.json')) if given.is_dir() else [given]
  if not files:
    raise examples.ClientDataError(f'{given}: there are no files *.json.')
  for file in files:
    try:
      held = json.loads(file.read_text(encoding='utf-8'))
      found = [(str(user), held['user_data'][user]) for user in held['users']]
    except FileNotFoundError:
      raise examples.ClientDataError(
        f'{file}: there is no such file.'
      ) from None
    except (KeyError, OSError, RecursionError, TypeError, ValueError) as error:
      raise examples.ClientDataError(
        f'{file}: expected JSON as LEAF writes it, with `users` and the '
        f'`user_data` of each; {type(error).__name__}: {error!s:.80}'
      ) from None
    yield from found
