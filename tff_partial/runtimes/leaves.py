"""Leaves of a TFF program: serialized TensorFlow graphs as Python functions.

A leaf is imported once and then called, inside a `tf.function`, with nested
lists of tensors. Importing straight into a loop body mixes up control flow
frames, so a leaf is wrapped as a function first. A leaf that owns variables or
tables brings an initialiser, which runs before each call, as in TFF: nothing
in a leaf outlives a call.
"""

import itertools
import re
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import typed_values

_serial = itertools.count()


def tensor_names(binding: Any) -> Any:
  """The names of a binding's tensors, nested as the value is."""
  kind = binding.WhichOneof('binding')
  if kind == 'struct':
    return [tensor_names(element) for element in binding.struct.element]
  if kind == 'tensor':
    return binding.tensor.tensor_name
  if kind == 'sequence':
    return binding.sequence.variant_tensor_name
  return []


def all_nodes(graph_def: tf.compat.v1.GraphDef):
  yield from graph_def.node
  for function in graph_def.library.function:
    yield from function.node_def


class Leaf:
  """A serialized TF graph as a function over nested lists of tensors."""

  def __init__(self, block: tff.framework.CompiledComputation):
    self.type_signature = block.type_signature
    self.name = str(block)
    program = block.proto.tensorflow
    graph_def = tf.compat.v1.GraphDef()
    program.graph_def.Unpack(graph_def)
    self.op_types = [node.op for node in all_nodes(graph_def)]
    self.function_names = sorted(filter(None, map(
        _python_name, [f.signature.name for f in graph_def.library.function])))
    self.owns_resources = bool(program.initialize_op)
    if self.owns_resources:
      _own_resources(graph_def)
    self._result = tensor_names(program.result)
    self._result_specs = typed_values.tensor_specs(self.type_signature.result)
    inputs = typed_values.leaves(
        tensor_names(program.parameter)) if program.HasField(
            'parameter') else []
    outputs = typed_values.leaves(self._result)
    wrapped = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph_def, name=''), [])
    element = wrapped.graph.as_graph_element
    self._initialize = wrapped.prune(
        [], element(program.initialize_op)) if self.owns_resources else None
    self._function = wrapped.prune(
        [element(name) for name in inputs],
        [element(name) for name in outputs]) if outputs else None

  @property
  def is_random(self) -> bool:
    """Whether two calls on the same arguments may differ."""
    return any(_is_random(op) for op in self.op_types)

  def __call__(self, *arguments: typed_values.Nested) -> typed_values.Nested:
    if self._function is None:
      return typed_values.like(self._result, iter([]))
    if self._initialize is not None:
      self._initialize()
    flat = [leaf for value in arguments for leaf in typed_values.leaves(value)]
    results = self._function(*flat)
    if not isinstance(results, (list, tuple)):
      results = [results]
    results = list(results)
    for result, spec in zip(results, self._result_specs):
      # Importing a graph loses static shapes, and XLA's loops need them.
      if result.dtype != tf.variant:
        result.set_shape(spec.shape)
    return typed_values.like(self._result, iter(results))


def _own_resources(graph_def: tf.compat.v1.GraphDef) -> None:
  """Keeps variables of equal names in different leaves apart."""
  prefix = f'cohort_leaf_{next(_serial)}'
  for node in all_nodes(graph_def):
    if 'shared_name' in node.attr:
      name = node.attr['shared_name'].s.decode() or node.name
      node.attr['shared_name'].s = f'{prefix}/{name}'.encode()


_TRACED = re.compile(r'__(?:inference|forward)_(.+?)_\d+$')


def _python_name(function: str) -> str | None:
  """The name that a traced function has in Python, if a user gave it one."""
  found = _TRACED.match(function)
  if found is None or re.search(r'(while|cond)(_\d+)?_(body|cond|true|false)',
                                found.group(1)):
    return None
  return found.group(1)


def _is_random(op: str) -> bool:
  return op.startswith(('Random', 'TruncatedNormal', 'ParameterizedTruncated',
                        'Multinomial')) or op == 'Timestamp'
