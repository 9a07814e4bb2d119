"""Operations that XLA lacks, written with others that it has.

Keras's top-k accuracies use `InTopKV2`. A program for XLA has in its place a
function with the same results, so that one such metric does not keep the whole
round from being compiled.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.graphs import operations


def _in_top_k(
  predictions: tf.Tensor, targets: tf.Tensor, k: tf.Tensor
) -> tf.Tensor:
  """Compute `InTopKV2`, with False for a row with NaN or an infinity."""
  number = tf.shape(predictions)[1]
  targets, k = tf.cast(targets, tf.int32), tf.cast(k, tf.int32)
  is_class = (targets >= 0) & (targets < number)
  safe = tf.where(is_class, targets, 0)
  of_targets = tf.gather(predictions, safe[:, tf.newaxis], batch_dims=1)
  larger = tf.reduce_sum(tf.cast(predictions > of_targets, tf.int32), 1)
  is_finite = tf.reduce_all(tf.math.is_finite(predictions), 1)
  return is_class & is_finite & (larger < k)


_SUBSTITUTES: Mapping[str, Callable[..., tf.Tensor]] = {'InTopKV2': _in_top_k}


def insert(graph_def: tf.compat.v1.GraphDef) -> None:
  """Replace operations of a graph and its functions, in place."""
  added: dict[str, Any] = {}
  _replace(graph_def.node, added)
  for function in graph_def.library.function:
    operations.rename_results(function, _replace(function.node_def, added))
  graph_def.library.function.extend(added.values())


def _replace(nodes: Any, added: dict[str, Any]) -> set[str]:
  """Make nodes call functions, which are added; return their names."""
  replaced = set()
  for node in nodes:
    if node.op in _SUBSTITUTES:
      function = _function(node.op, tf.as_dtype(node.attr['T'].type))
      added[function.signature.name] = function
      operations.make_call(node, function)
      replaced.add(node.name)
  return replaced


@functools.cache
def _function(op: str, integers: tf.DType) -> Any:
  """Trace a substitute as a function of a graph."""
  specs = [
    tf.TensorSpec([None, None], tf.float32),
    tf.TensorSpec([None], integers),
    tf.TensorSpec([], integers),
  ]
  return graphs.trace(_SUBSTITUTES[op], specs).function_def
