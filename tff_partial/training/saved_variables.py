"""Reader of a SavedModel's variables, which runs none of its program.

A SavedModel is a program: loading it runs whatever its author put there. Its
variables are data. So checkpoints, which TFF writes as SavedModels, are read
here, against the types of the process that needs them.
"""

from collections.abc import Callable, Mapping
import math
import os
import pathlib
import re
from typing import Any

import numpy as np
import tensorflow as tf

# Path of a SavedModel's variables, and parts of their names in TensorFlow: the
# attribute of TFF's module, and the suffix after the path to the value.
_VARIABLES = os.path.join('variables', 'variables')
_FIRST, _LAST = '_value', '/.ATTRIBUTES/VARIABLE_VALUE'
_OBJECT_GRAPH = '_CHECKPOINTABLE_OBJECT_GRAPH'


class DamagedError(Exception):
  """Raised if a checkpoint's files cannot be read."""


class OtherError(Exception):
  """Raised if a checkpoint is from another process."""


def read(checkpoint: pathlib.Path, expected: Any) -> Any:
  """Read the variables of a checkpoint, and run nothing of it.

  Raises:
    DamagedError: If its files cannot be read.
    OtherError: If they hold something else.
  """
  specs: dict[str, tf.TensorSpec] = {}
  _mapped(specs.__setitem__, expected)
  try:
    reader = tf.train.load_checkpoint(str(checkpoint / _VARIABLES))
    dtypes = reader.get_variable_to_dtype_map()
    shapes = reader.get_variable_to_shape_map()
    num_bytes = sum(
      path.stat().st_size for path in (checkpoint / _VARIABLES).parent.iterdir()
    )
  except Exception as error:  # Any damage of a file surfaces differently.
    raise DamagedError(str(error) or type(error).__name__) from error
  found = {
    name: tf.TensorSpec(shape, dtypes[name])
    for name, shape in shapes.items()
    if name != _OBJECT_GRAPH
  }
  if difference := _difference(found, specs):
    raise OtherError(difference)
  # The reader allocates memory before it checks the size of the file.
  claimed = sum(
    math.prod(spec.shape) * spec.dtype.size
    for spec in found.values()
    if spec.dtype != tf.string
  )
  if claimed > num_bytes:
    raise DamagedError(f'{claimed} bytes of numbers in {num_bytes} bytes.')
  try:
    # Also unneeded ones: a file is whole, or it is damaged.
    values = {name: reader.get_tensor(name) for name in shapes}
  except Exception as error:
    raise DamagedError(str(error) or type(error).__name__) from error
  return _mapped(lambda name, _: values[name], expected)


def read_group(checkpoint: pathlib.Path, *path: str) -> dict[str, np.ndarray]:
  """Read the variables of a path of a checkpoint, by the rest of their names.

  Raises:
    DamagedError: If its files cannot be read.
  """
  first = '/'.join((_FIRST, *path))
  try:
    reader = tf.train.load_checkpoint(str(checkpoint / _VARIABLES))
    return {
      _unescaped(name[len(first) : -len(_LAST)].removeprefix('/')): (
        reader.get_tensor(name)
      )
      for name in reader.get_variable_to_shape_map()
      if name.startswith(f'{first}/')
    }
  except Exception as error:  # Any damage of a file surfaces differently.
    raise DamagedError(str(error) or type(error).__name__) from error


def _unescaped(name: str) -> str:
  """Undo the escapes of separators in a name."""
  return re.sub(r'\.(S|\.)', lambda m: '/' if m[1] == 'S' else '.', name)


def _mapped(
  function: Callable[[str, Any], Any], value: Any, name: str = _FIRST
) -> Any:
  """Map the leaves of a structure, with their names in a checkpoint."""
  parts: list[tuple[str, Any]]
  if isinstance(value, Mapping):
    parts = list(value.items())
  elif hasattr(value, '_asdict'):
    parts = list(value._asdict().items())
  elif isinstance(value, (list, tuple)):
    parts = [(str(place), part) for place, part in enumerate(value)]
  else:
    return function(name + _LAST, value)
  made = []
  for key, part in parts:
    # TensorFlow escapes separators in names like this.
    inner = key.replace('.', '..').replace('/', '.S')
    made.append((key, _mapped(function, part, f'{name}/{inner}')))
  if isinstance(value, Mapping):
    return type(value)(made)  # type: ignore[call-arg]
  if hasattr(value, '_asdict'):
    return type(value)(**dict(made))
  return type(value)(part for _, part in made)


def _difference(
  found: Mapping[str, tf.TensorSpec], expected: Mapping[str, tf.TensorSpec]
) -> str | None:
  """Describe the first difference of found and expected specs, or None."""

  def named(name: str) -> str:
    return name.removeprefix(f'{_FIRST}/').removesuffix(_LAST)

  for name, wanted in expected.items():
    if name not in found:
      return f'numbers in another structure (no {named(name)})'
    actual = found[name]
    if not wanted.shape.is_compatible_with(actual.shape):
      return (
        f'{named(name)} of shape {_shape(actual)} where this run has '
        f'{_shape(wanted)}'
      )
    if actual.dtype != wanted.dtype:
      return (
        f'{named(name)} of type {actual.dtype.name} where this run has '
        f'{wanted.dtype.name}'
      )
  for name in sorted(set(found) - set(expected)):
    return f'numbers in another structure (with {named(name)})'
  return None


def _shape(spec: tf.TensorSpec) -> tuple[int | None, ...]:
  return tuple(spec.shape.as_list())
