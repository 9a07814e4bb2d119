"""Bodies of graphs and functions, and which results differ between lanes.

TensorFlow names tensors differently in functions and in graphs; here they have
the names of graphs: `node:place`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import functools
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.lanes import lane_values

# These read only the shape of a tensor, which is the same in all lanes.
SHAPES = frozenset(('Rank', 'Shape', 'ShapeN', 'Size'))
# The same for lists of tensors.
_SHAPES_OF_LISTS = frozenset(('TensorListElementShape', 'TensorListLength'))


class Body:
  """Nodes of a graph or a function, in topological order.

  Attributes:
    inputs: The names of the input tensors.
    outputs: The names of the output tensors.
    nodes: The nodes between them, each after all that it needs.
    constants: The nodes that are constants, by their names.
    readers: For each tensor, the nodes that read it.
  """

  def __init__(
    self,
    nodes: Iterable[tf.compat.v1.NodeDef],
    inputs: Sequence[str],
    outputs: Sequence[str],
    effects: Iterable[str],
  ):
    self.inputs, self.outputs = list(inputs), list(outputs)
    known = {node.name: node for node in nodes}
    given = {operations.source(name) for name in self.inputs}
    ends = [*self.outputs, *effects]
    self.nodes: list[tf.compat.v1.NodeDef] = []
    seen = set(given)
    waiting = [(operations.source(name), False) for name in reversed(ends)]
    while waiting:
      name, is_ready = waiting.pop()
      if is_ready:
        self.nodes.append(known[name])
      elif name not in seen:
        seen.add(name)
        waiting.append((name, True))
        waiting.extend(
          (operations.source(one), False) for one in known[name].input
        )
    self.constants = {n.name: n for n in self.nodes if n.op == 'Const'}
    self.readers: dict[str, set[str]] = {}
    for node in self.nodes:
      for name in data_inputs(node):
        self.readers.setdefault(name, set()).add(node.name)

  @functools.cached_property
  def kept(self) -> list[bool]:
    """For each output, True if it is the input at the same place."""
    known = {node.name: node for node in self.nodes}
    return [
      operations.origin(known, name) == given
      for name, given in zip(self.outputs, self.inputs, strict=False)
    ]


def data_inputs(node: tf.compat.v1.NodeDef) -> list[str]:
  """Return the tensors that a node reads, each by its full name."""
  return [
    name if ':' in name else f'{name}:0'
    for name in node.input
    if not name.startswith('^')
  ]


def _sizes(
  arguments: Iterable[Any], attributes: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
  """Yield each named output of an operation and its number of tensors."""
  for argument in arguments:
    if argument.number_attr:
      yield argument.name, attributes[argument.number_attr].i
    elif argument.type_list_attr:
      types = attributes[argument.type_list_attr].list.type
      yield argument.name, len(types)
    else:
      yield argument.name, 1


def outputs(node: tf.compat.v1.NodeDef) -> list[str]:
  """Return the names of all output tensors of a node."""
  arguments = operations.definition(node).output_arg
  number = sum(size for _, size in _sizes(arguments, node.attr))
  return [f'{node.name}:{place}' for place in range(number)]


def _body_of(function: Any) -> Body:
  """Read a function, and rename its tensors as in graphs."""
  inputs = [argument.name for argument in function.signature.input_arg]
  places: dict[str, str] = {name: f'{name}:0' for name in inputs}
  for node in function.node_def:
    defined = operations.definition(node)
    if defined is None:
      raise lane_values.UnfitForLanesError(
        f'clients call the function {node.op}'
      )
    number = 0
    for output, size in _sizes(defined.output_arg, node.attr):
      for index in range(size):
        places[f'{node.name}:{output}:{index}'] = f'{node.name}:{number}'
        number += 1
  nodes = []
  for node in function.node_def:
    renamed = tf.compat.v1.NodeDef()
    renamed.CopyFrom(node)
    renamed.input[:] = [places.get(name, name) for name in node.input]
    nodes.append(renamed)
  return Body(
    nodes,
    [places[name] for name in inputs],
    [
      places[function.ret[argument.name]]
      for argument in function.signature.output_arg
    ],
    function.control_ret.values(),
  )


def read(nodes: Mapping[str, Any]) -> list[str]:
  """Return the tensors from elsewhere that nodes read, each once."""
  return list(
    dict.fromkeys(
      name
      for node in nodes.values()
      for name in data_inputs(node)
      if operations.source(name) not in nodes
    )
  )


def imported(
  nodes: Mapping[str, Any],
  given: Mapping[str, tf.Tensor],
  wanted: Sequence[str],
) -> list[tf.Tensor]:
  """Build nodes in the current graph."""
  graph_def = tf.compat.v1.GraphDef()
  for node in nodes.values():
    copy = graph_def.node.add()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(data_inputs(node))
    for name in ('_output_shapes', '_class'):
      if name in copy.attr:
        del copy.attr[name]
  graph_def.versions.CopyFrom(tf.Graph().as_graph_def().versions)
  return tf.graph_util.import_graph_def(
    graph_def,
    # A function cannot read the tensors of functions around it.
    input_map={name: tf.identity(tensor) for name, tensor in given.items()},
    return_elements=list(wanted),
    name='lanes',
  )


class LaneFunctions:
  """Functions of a graph, and which results differ between lanes."""

  def __init__(self, graph_def: tf.compat.v1.GraphDef):
    self._functions = {
      function.signature.name: function
      for function in graph_def.library.function
    }
    self._bodies: dict[str, Body] = {}
    self._flags: dict[tuple[str, tuple[bool, ...]], list[bool]] = {}

  def body(self, name: str) -> Body:
    """Return the body of a function."""
    if name not in self._bodies:
      self._bodies[name] = _body_of(self._functions[name])
    return self._bodies[name]

  def differing(self, name: str, flags: Sequence[bool]) -> list[bool]:
    """Return which results of a function differ between lanes.

    Args:
      name: The function.
      flags: Which of its arguments differ.
    """
    key = (name, tuple(flags))
    if key not in self._flags:
      body = self.body(name)
      known = dict(zip(body.inputs, flags, strict=True))
      for node in body.nodes:
        given = [known[one] for one in data_inputs(node)]
        for place, flag in enumerate(self.differing_of_node(node, given)):
          known[f'{node.name}:{place}'] = flag
      self._flags[key] = [known[one] for one in body.outputs]
    return self._flags[key]

  def differing_of_node(
    self, node: tf.compat.v1.NodeDef, given: Sequence[bool]
  ) -> list[bool]:
    """Return which results of a node differ, given which inputs do."""
    if node.op in operations.CALLS:
      return self.differing(node.attr['f'].func.name, given)
    ways = [
      self.differing(branch.name, given[1:])
      for branch in operations.branches(node)
    ]
    if ways:
      return [given[0] or any(way) for way in zip(*ways, strict=True)]
    if node.op in operations.LOOPS:
      return self.differing_of_loop(node, given)[0]
    number = len(outputs(node))
    if node.op in SHAPES | _SHAPES_OF_LISTS:
      return [False] * number
    return [any(given)] * number

  def differing_of_loop(
    self, node: tf.compat.v1.NodeDef, given: Sequence[bool]
  ) -> tuple[list[bool], bool]:
    """Return which variables of a loop differ, and whether its end does.

    Args:
      node: The loop.
      given: Which of its initial values differ between lanes.
    """
    condition = node.attr['cond'].func.name
    body = node.attr['body'].func.name
    kept = self.body(body).kept
    flags = list(given)
    while True:
      (ends_apart,) = self.differing(condition, flags)
      new = [
        flag or (not is_kept and (after or ends_apart))
        for flag, is_kept, after in zip(
          flags, kept, self.differing(body, flags), strict=True
        )
      ]
      if new == flags:
        return flags, ends_apart
      flags = new
