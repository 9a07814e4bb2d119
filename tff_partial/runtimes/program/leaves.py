"""Leaves of a TFF program: serialized TensorFlow graphs as Python functions.

A leaf is called, inside a `tf.function` or eagerly, with nested lists of
tensors. Importing a graph straight into a loop body mixes up control flow
frames, so it is wrapped as a function first. A leaf that owns variables or
tables brings an initialiser, which runs before each call, as in TFF: nothing
in a leaf outlives a call.
"""

from collections.abc import Sequence
import copy
import itertools
import re
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.model import tracing
from tff_partial.runtimes.graphs import data_loops
from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.values import typed_values
from tff_partial.runtimes.xla import conditionals
from tff_partial.runtimes.xla import doubts
from tff_partial.runtimes.xla import reductions

_serial = itertools.count(1)
# TensorFlow's name for a variable without a shared name.
_ANONYMOUS = 'cd2c89b7-88b7-44c8-ad83-06c2a9158347'


class Leaf:
  """Serialized TF graph as a function over nested lists of tensors.

  Attributes:
    type_signature: Its type.
    op_types: The types of all operations in it.
    is_for_xla: False if it has operations that XLA is known to refuse: linear
      solves on CPUs, and those in a scope of the name `tracing.DYNAMIC`.
    function_names: The Python functions that were traced into it.
    owns_resources: Whether it has variables or tables.
    is_random: Whether two calls on the same arguments may differ.
  """

  def __init__(self, block: tff.framework.CompiledComputation):
    """Read a graph.

    Raises:
      UnsupportedComputationError: If a resource would outlive a call.
    """
    self.type_signature = block.type_signature
    program = block.proto.tensorflow
    self._graph_def = tf.compat.v1.GraphDef()
    program.graph_def.Unpack(self._graph_def)
    nodes = [
      node for each in operations.executed(self._graph_def) for node in each
    ]
    self.op_types = [node.op for node in nodes]
    self.is_for_xla = 'MatrixSolve' not in self.op_types and not any(
      f'{tracing.DYNAMIC}/' in node.name for node in nodes
    )
    functions = self._graph_def.library.function
    names = {_python_name(function.signature.name) for function in functions}
    self.function_names = sorted(filter(None, names))
    data_loops.as_loops(self._graph_def)
    self._initializer = program.initialize_op
    self.owns_resources = bool(self._initializer)
    self._result = tensor_names(program.result)
    self._inputs = (
      typed_values.leaves(tensor_names(program.parameter))
      if program.HasField('parameter')
      else []
    )
    operations.check_resources(self._graph_def, self._initializer, self._inputs)
    self.is_random = operations.draws(self._graph_def) is not None
    self._outputs = typed_values.leaves(self._result)
    parameter = self.type_signature.parameter
    self._is_open = parameter is not None and any(
      not spec.shape.is_fully_defined()
      for spec in typed_values.tensor_specs(parameter)
    )
    self._result_specs = typed_values.tensor_specs(self.type_signature.result)
    self._functions: dict[Any, _Imported] = {}

  def __call__(self, *arguments: typed_values.Nested) -> typed_values.Nested:
    """Run the graph."""
    if not self._outputs:
      return typed_values.like(self._result, iter([]))
    flat = [leaf for value in arguments for leaf in typed_values.leaves(value)]
    results = list(self._function(flat)(*flat))
    if len(results) > len(self._outputs):
      doubts.notice(results.pop())
    for result, spec in zip(results, self._result_specs, strict=True):
      # Importing a graph loses static shapes, and XLA's loops need them.
      if result.dtype != tf.variant:
        result.set_shape(spec.shape)
    return typed_values.like(self._result, iter(results))

  def _function(self, flat: Sequence[Any]) -> '_Imported':
    """Return the graph, with open dimensions of its type as in `flat`."""
    shapes = tuple(tuple(leaf.shape) for leaf in flat) if self._is_open else ()
    # TensorFlow runs calls in one graph at once, so none shares its variables.
    call = next(_serial) if self.owns_resources else 0
    key = (shapes, reductions.are_folded(), call)
    if key not in self._functions:
      graph_def = self._with_shapes(shapes) if shapes else self._graph_def
      self._functions[key] = _Imported(
        _with_own_resources(graph_def, call) if call else graph_def,
        self._inputs,
        self._outputs,
        self._initializer,
        reductions.are_folded(),
      )
    return self._functions[key]

  def _with_shapes(
    self, shapes: Sequence[tuple[int | None, ...]]
  ) -> tf.compat.v1.GraphDef:
    graph_def = copy.deepcopy(self._graph_def)
    shape_of = {
      name.split(':')[0]: shape
      for name, shape in zip(self._inputs, shapes, strict=True)
    }
    for node in graph_def.node:
      if (
        node.op == 'Placeholder'
        and node.name in shape_of
        and node.attr['dtype'].type != tf.variant.as_datatype_enum
      ):
        node.attr['shape'].shape.CopyFrom(
          tf.TensorShape(shape_of[node.name]).as_proto()
        )
    return graph_def


class _Imported:
  """Graph as a function over flat tensors.

  XLA gets another form of it, which may have a doubt as its last result.
  """

  def __init__(
    self,
    graph_def: tf.compat.v1.GraphDef,
    inputs: Sequence[str],
    outputs: Sequence[str],
    initializer: str,
    folded: bool,
  ):
    if folded:
      graph_def, doubt = doubts.added(graph_def, outputs)
      outputs = [*outputs, doubt] if doubt else outputs
    else:
      graph_def = _adding_in_place(graph_def)
    wrapped = tf.compat.v1.wrap_function(
      lambda: tf.graph_util.import_graph_def(graph_def, name=''), []
    )
    element = wrapped.graph.as_graph_element
    self._initialize = (
      wrapped.prune([], element(initializer)) if initializer else None
    )
    ends = [element(name) for name in [*inputs, *outputs]]
    if folded:
      found = reductions.find(wrapped.graph)
      chosen = conditionals.as_choices(graph_def, wrapped.graph)
      if found or chosen is not graph_def:
        ends = []
        wrapped = tf.compat.v1.wrap_function(
          lambda: ends.extend(reductions.fold(chosen, found, inputs, outputs)),
          [],
        )
    self._function = wrapped.prune(ends[: len(inputs)], ends[len(inputs) :])

  def __call__(self, *flat: tf.Tensor) -> Sequence[tf.Tensor]:
    if self._initialize is not None:
      self._initialize()
    results = self._function(*flat)
    return results if isinstance(results, list | tuple) else [results]


def _adding_in_place(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
  """Return a graph that adds rows to a table in place where nothing else reads.

  `TensorScatterAdd` copies its table on a CPU in any case, so that to add a few
  rows takes as long as to read all. The other operation, which XLA lacks, has
  the same sums.
  """
  changed = copy.deepcopy(graph_def)
  # Functions keep their bodies: XLA is given others of the same names.
  for node in changed.node:
    if node.op == 'TensorScatterAdd':
      node.op = 'ScatterNdNonAliasingAdd'
  return changed


def tensor_names(binding: Any) -> Any:
  """Return the names of a binding's tensors, nested like the value."""
  kind = binding.WhichOneof('binding')
  if kind == 'struct':
    return [tensor_names(element) for element in binding.struct.element]
  if kind == 'tensor':
    return binding.tensor.tensor_name
  if kind == 'sequence':
    return binding.sequence.variant_tensor_name
  return []


def _with_own_resources(
  graph_def: tf.compat.v1.GraphDef, call: int
) -> tf.compat.v1.GraphDef:
  """Return a graph whose variables are apart from those of other calls."""
  own = copy.deepcopy(graph_def)
  for node in own.node:
    if 'shared_name' in node.attr:
      name = node.attr['shared_name'].s.decode()
      if name in ('', _ANONYMOUS):
        name = node.name
      node.attr['shared_name'].s = f'cohort_call_{call}/{name}'.encode()
  return own


_TRACED = re.compile(r'__(?:inference|forward)_(.+?)_\d+$')
_CONTROL_FLOW = re.compile(r'(while|cond)(_\d+)?_(body|cond|true|false)')


def _python_name(function: str) -> str | None:
  """Return the Python name of a traced function, if a user wrote it."""
  found = _TRACED.match(function)
  if found is None or _CONTROL_FLOW.search(found.group(1)):
    return None
  return found.group(1)
