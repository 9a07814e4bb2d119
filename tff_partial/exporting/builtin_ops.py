"""Replacement of operations that TFLite lacks by equivalent ones.

Two operations that come with most gradients are not builtin operators of
TFLite: the gradient of `x[:, None]`, and Keras's cross-entropy of integer
labels. Both can be written with other operations. So functions that do so are
added to a SavedModel, and calls of them replace these operations.
"""

import collections
from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

_FILE = 'saved_model.pb'


class _Substitute(NamedTuple):
  """Function that computes the same as an operation.

  Attributes:
    function: Maps the operation's inputs to its outputs.
    outputs: The names of its outputs.
    arguments: Maps its attributes to specs of its inputs.
    applies: Returns True for nodes to replace, given their neighbours by name.
  """

  function: Callable[..., Any]
  outputs: tuple[str, ...]
  arguments: Callable[[Any], list[tf.TensorSpec]]
  applies: Callable[[Any, Mapping[str, Any]], bool]


def _cross_entropy(
  logits: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Return losses `[batch]` and their gradients `[batch, classes]`."""
  hot = tf.one_hot(labels, tf.shape(logits)[-1], dtype=logits.dtype)
  losses = -tf.reduce_sum(hot * tf.nn.log_softmax(logits), -1)
  return losses, tf.nn.softmax(logits) - hot


def _adds_axes_alone(node: Any, others: Mapping[str, Any]) -> bool:
  """Return True if a slice cuts nothing, so its gradient is a reshape."""
  steps = others.get(node.input[3].split(':')[0])
  if steps is None or steps.op != 'Const':
    return False
  strides = np.atleast_1d(tf.make_ndarray(steps.attr['value'].tensor))
  # To read an absent attribute of the node itself would add an empty one.
  mask = collections.Counter({n: value.i for n, value in node.attr.items()})
  whole = mask['begin_mask'] & mask['end_mask']
  whole |= mask['new_axis_mask'] | mask['ellipsis_mask']
  cut = ~whole | mask['shrink_axis_mask']
  return bool((strides == 1).all()) and not cut & ((1 << strides.size) - 1)


_SUBSTITUTES = {
  'SparseSoftmaxCrossEntropyWithLogits': _Substitute(
    _cross_entropy,
    ('loss', 'backprop'),
    lambda attributes: [
      tf.TensorSpec([None, None], attributes['T'].type),
      # A SavedModel omits default attributes.
      tf.TensorSpec([None], attributes['Tlabels'].type or tf.int64),
    ],
    lambda node, others: True,
  ),
  'StridedSliceGrad': _Substitute(
    # The gradient of a slice that only added axes: nothing was cut away.
    lambda shape, begin, end, strides, gradient: tf.reshape(gradient, shape),
    ('output',),
    lambda attributes: [
      *[tf.TensorSpec([None], attributes['Index'].type)] * 4,
      tf.TensorSpec(None, attributes['T'].type),
    ],
    _adds_axes_alone,
  ),
}


def _definition(substitute: _Substitute, specs: list[tf.TensorSpec]) -> Any:
  """Return a function with the operation's signature, as a proto."""
  traced = tf.function(substitute.function, autograph=False)
  definition = traced.get_concrete_function(*specs).function_def
  for output, name in zip(
    definition.signature.output_arg, substitute.outputs, strict=True
  ):
    value = definition.ret.pop(output.name)
    output.name = name
    definition.ret[name] = value
  return definition


def substitute(folder: pathlib.Path) -> None:
  """Replace operations of a SavedModel that TFLite lacks, if possible.

  Args:
    folder: The SavedModel.
  """
  saved = saved_model_pb2.SavedModel()
  saved.ParseFromString((folder / _FILE).read_bytes())
  library = saved.meta_graphs[0].graph_def.library
  made: dict[Any, Any] = {}
  for function in library.function:
    others = {node.name: node for node in function.node_def}
    for node in function.node_def:
      found = _SUBSTITUTES.get(node.op)
      if found is None or not found.applies(node, others):
        continue
      specs = found.arguments(node.attr)
      key = (node.op, *specs)
      if key not in made:
        made[key] = _definition(found, specs)
      node.op = made[key].signature.name
      node.attr.clear()
  library.function.extend(made.values())
  (folder / _FILE).write_bytes(saved.SerializeToString())
