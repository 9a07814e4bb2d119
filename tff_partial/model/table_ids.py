"""Detection of inputs that are row ids of tables.

A traced model is searched from each lookup back to the input that holds the
ids. Computed ids, such as hashes, are not counted as an example's.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tff_partial.data import id_ranges
from tff_partial.model import tracing

# Operations that pass on values: all of them, or (`_PICK`) some of them.
_HAND_ON = (
  'CheckNumerics',
  'ExpandDims',
  'Identity',
  'PreventGradient',
  'Reshape',
  'Squeeze',
  'StopGradient',
)
# Types that hold ids without loss.
_TYPES = (tf.int32, tf.int64, tf.float32, tf.float64)
_PICK = ('GatherV2', 'Slice', 'Split', 'SplitV', 'StridedSlice', 'Unpack')


def find(
  tables: Mapping[str, tf.Tensor],
  inputs: Mapping[str, tf.Tensor],
  local: Collection[str] = (),
) -> id_ranges.Ids:
  """Find the fields that hold ids of tables, given their tensors in a graph.

  Returns:
    Path of a field to the ranges in which its ids must lie. A table sized per
    client is included if all reads of it are by ids from fields.
  """
  path_of = {tensor.op.name: path for path, tensor in inputs.items()}
  found: dict[str, list[id_ranges.IdRange]] = {}
  untold = set()  # Tables that are also read in other ways.
  for name, table in tables.items():
    lookups = list(_looked_up(table))
    if len(lookups) < len(table.consumers()):
      untold.add(name)
    for ids in lookups:
      source, picks = _source(ids)
      path = path_of.get(source.op.name)
      elements = _elements(source, ids) if picks and path else None
      if path is None or elements == ():
        untold.add(name)
        continue
      layer = name.removesuffix('/embeddings')
      size = table.shape[0]
      described = f'table {layer!r} has {size} rows'
      if size is None:
        described = f'table {layer!r} has as many rows as a client needs'
      limits = id_ranges.IdRange(
        size,
        described,
        elements,
        is_local=name in local,
        table=name if size is None else '',
      )
      if limits not in found.setdefault(path, []):
        found[path].append(limits)
  # All reads of a table sized per client must follow from fields; a table of
  # fixed size also has rows for computed ids.
  told = {
    path: tuple(limits for limits in ranges if limits.table not in untold)
    for path, ranges in found.items()
  }
  return {path: ranges for path, ranges in told.items() if ranges}


def _looked_up(table: tf.Tensor) -> Iterator[tf.Tensor]:
  """Yield the ids of each row lookup in a table."""
  for operation in table.consumers():
    if operation.type == 'Identity':
      yield from _looked_up(operation.outputs[0])
    elif operation.type == 'GatherV2':
      read, ids, axis = operation.inputs
      is_by_row = (
        read.name == table.name
        and tf.get_static_value(axis) == 0
        and operation.get_attr('batch_dims') == 0
      )
      if is_by_row:
        yield ids


def _source(tensor: tf.Tensor) -> tuple[tf.Tensor, bool]:
  """Trace a tensor to its source; also return true if values are dropped."""
  picks = False
  while (
    tensor.op.type in (*_HAND_ON, *_PICK)
    or (tensor.op.type == 'Cast' and tensor.dtype in _TYPES)
    or _counts_from_the_end(tensor.op)
  ):
    picks = picks or tensor.op.type in _PICK
    place = {'Split': 1, 'SelectV2': 2}.get(tensor.op.type, 0)
    tensor = tensor.op.inputs[place]
  return tensor, picks


def _counts_from_the_end(operation: tf.Operation) -> bool:
  """Return True for `where(ids < 0, ids + rows, ids)`, as Keras 3 looks up."""
  if operation.type != 'SelectV2' or operation.inputs[0].op.type != 'Less':
    return False
  return operation.inputs[0].op.inputs[0].name == operation.inputs[2].name


def _elements(source: tf.Tensor, picked: tf.Tensor) -> tuple[int, ...] | None:
  """Return the positions of the picked elements in an example.

  None stands for all of them, an empty tuple for unknown.
  """
  shape = [1, *source.shape[1:]]
  if None in shape:
    return ()
  places = np.arange(np.prod(shape)).reshape(shape)
  example = places.astype(source.dtype.as_numpy_dtype)
  if (example != places).any():
    return ()
  try:
    found = tracing.value_of(picked, {source.name: example})
  except tf.errors.OpError:
    return ()  # The choice depends on something else.
  elements = tuple(np.unique(found).astype(int).tolist())
  return None if len(elements) == places.size else elements
