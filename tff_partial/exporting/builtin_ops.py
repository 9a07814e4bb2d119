"""The same graph of operations that TFLite has.

Two operations that come with most gradients are none of TFLite's builtin
operators: what is behind `x[:, None]`, and Keras's cross-entropy of integer
labels. Both can be written with others. So a SavedModel gets functions that do
so, and calls of them take the place of these operations.
"""

from collections.abc import Callable, Mapping
import pathlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

_FILE = 'saved_model.pb'


class _Substitute(NamedTuple):
  """What computes the same as an operation.

  Attributes:
    function: From the operation's inputs to its outputs.
    outputs: The names of its outputs.
    arguments: From its attributes to specs of its inputs.
    applies: Whether it does for such a node, given its neighbours by name.
  """

  function: Callable[..., Any]
  outputs: tuple[str, ...]
  arguments: Callable[[Any], list[tf.TensorSpec]]
  applies: Callable[[Any, Mapping[str, Any]], bool]


def _cross_entropy(
  logits: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """The losses `[batch]`, and their gradients `[batch, classes]`."""
  hot = tf.one_hot(labels, tf.shape(logits)[-1], dtype=logits.dtype)
  losses = -tf.reduce_sum(hot * tf.nn.log_softmax(logits), -1)
  return losses, tf.nn.softmax(logits) - hot


def _as_before(
  shape: tf.Tensor,
  begin: tf.Tensor,
  end: tf.Tensor,
  strides: tf.Tensor,
  gradient: tf.Tensor,
) -> tf.Tensor:
  """The gradient of what was only given further axes."""
  del begin, end, strides  # Nothing was cut away.
  return tf.reshape(gradient, shape)


def _adds_axes_alone(node: Any, others: Mapping[str, Any]) -> bool:
  """Whether nothing was cut away, so that a gradient needs but its shape."""
  steps = others.get(node.input[3].split(':')[0])
  if steps is None or steps.op != 'Const':
    return False
  strides = np.atleast_1d(tf.make_ndarray(steps.attr['value'].tensor))
  whole = node.attr['begin_mask'].i & node.attr['end_mask'].i
  whole |= node.attr['new_axis_mask'].i | node.attr['ellipsis_mask'].i
  cut = ~whole | node.attr['shrink_axis_mask'].i
  return bool((strides == 1).all()) and not cut & ((1 << strides.size) - 1)


_SUBSTITUTES = {
  'SparseSoftmaxCrossEntropyWithLogits': _Substitute(
    _cross_entropy,
    ('loss', 'backprop'),
    lambda attributes: [
      tf.TensorSpec([None, None], attributes['T'].type),
      # A SavedModel leaves out what is the default.
      tf.TensorSpec([None], attributes['Tlabels'].type or tf.int64),
    ],
    lambda node, others: True,
  ),
  'StridedSliceGrad': _Substitute(
    _as_before,
    ('output',),
    lambda attributes: [
      *[tf.TensorSpec([None], attributes['Index'].type)] * 4,
      tf.TensorSpec(None, attributes['T'].type),
    ],
    _adds_axes_alone,
  ),
}


def _definition(substitute: _Substitute, specs: list[tf.TensorSpec]) -> Any:
  """A function that takes and returns what the operation does, as a proto."""
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
  """Change a SavedModel so that it has fewer operations that TFLite lacks.

  Args:
    folder: Where it is.
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
      for name in list(node.attr):
        del node.attr[name]
  library.function.extend(made.values())
  (folder / _FILE).write_bytes(saved.SerializeToString())
