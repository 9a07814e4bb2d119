"""Large sums, maxima and norms, in a form that XLA compiles to fast code.

XLA's code for CPUs sums a large array element by element, ten times slower than
it scales one. Aggregators that clip or zero updates do little else. Here such a
reduction first folds the array in eight, and the rest again, as long as it is
large: elementwise code, which XLA vectorises. The order of a sum changes, hence
its last bits; so programs that run without XLA keep their reductions unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import contextvars
import functools
from typing import Any

import tensorflow as tf

_FOLDS = 8
# A smaller array is reduced without folding.
_LARGE = 1 << 12

_enabled = contextvars.ContextVar('fold reductions', default=False)


@contextlib.contextmanager
def folded() -> Iterator[None]:
  """Fold the large reductions of leaves that are traced inside."""
  token = _enabled.set(True)
  try:
    yield
  finally:
    _enabled.reset(token)


def are_folded() -> bool:
  """Return whether leaves are being traced for XLA."""
  return _enabled.get()


def _fold(
  x: tf.Tensor, combine: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
) -> tf.Tensor:
  flat = tf.reshape(x, [-1])
  while flat.shape[0] >= _LARGE:
    size = flat.shape[0] // _FOLDS
    *parts, rest = tf.split(flat, [size] * _FOLDS + [flat.shape[0] % _FOLDS])
    flat = tf.concat([functools.reduce(combine, parts), rest], 0)
  return flat


def _sum(x: tf.Tensor) -> tf.Tensor:
  return tf.reduce_sum(_fold(x, tf.add))


_FOLDED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
  'Sum': _sum,
  'Mean': lambda x: _sum(x) / tf.cast(tf.size(x), x.dtype),
  'L2Loss': lambda x: _sum(x * x) / 2,
  'Max': lambda x: tf.reduce_max(_fold(x, tf.maximum)),
  'Min': lambda x: tf.reduce_min(_fold(x, tf.minimum)),
  'All': lambda x: tf.reduce_all(_fold(x, tf.logical_and)),
  'Any': lambda x: tf.reduce_any(_fold(x, tf.logical_or)),
}


def find(graph: tf.Graph) -> list[tf.Operation]:
  """Return large reductions of a graph to a scalar, in topological order."""
  found = []
  for operation in graph.get_operations():
    if operation.type not in _FOLDED:
      continue
    size = operation.inputs[0].shape.num_elements()
    dtype = operation.inputs[0].dtype
    is_scalar = operation.outputs[0].shape.num_elements() == 1
    if size is None or size < _LARGE or not is_scalar:
      continue
    if dtype.is_floating or dtype == tf.bool:
      found.append(operation)
  return found


def fold(
  graph_def: tf.compat.v1.GraphDef,
  reductions: Sequence[tf.Operation],
  inputs: Sequence[str],
  outputs: Sequence[str],
) -> list[Any]:
  """Import a graph into the current one, its reductions folded.

  The graph is imported once up to each reduction, and once more after the last;
  nodes imported twice are pruned later.

  Returns:
    The inputs, then the outputs.
  """
  placed = tf.graph_util.import_graph_def(
    graph_def, return_elements=list(inputs), name='inputs'
  )
  replaced = dict(zip(inputs, placed, strict=True))
  for number, operation in enumerate(reductions):
    (x,) = tf.graph_util.import_graph_def(
      graph_def,
      input_map=replaced,
      return_elements=[operation.inputs[0].name],
      name=f'reduction_{number}',
    )
    x.set_shape(operation.inputs[0].shape)
    result = operation.outputs[0]
    replaced[result.name] = tf.reshape(_FOLDED[operation.type](x), result.shape)
  found = tf.graph_util.import_graph_def(
    graph_def, input_map=replaced, return_elements=list(outputs), name='outputs'
  )
  # Mapped tensors are not imported: outputs that are inputs or reductions.
  return [
    *placed,
    *[
      replaced.get(name, tensor)
      for name, tensor in zip(outputs, found, strict=True)
    ],
  ]
