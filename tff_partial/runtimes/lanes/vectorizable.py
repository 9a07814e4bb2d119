"""Functions of a graph in the form that `tf.vectorized_map` takes.

Importing a graph brings its functions along as definitions alone.
`tf.vectorized_map` looks into functions, for which it needs their graphs: so
each function is traced again from its nodes, innermost first.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.graphs import operations


class UnfitForLanesError(ValueError):
  """Several clients cannot run a computation in lock-step."""


def retraced(traced: Any) -> Any:
  """Return a concrete function of which all inner functions have graphs.

  Args:
    traced: A concrete function of flat tensors, to flat tensors.

  Raises:
    UnfitForLanesError: If it calls a function by its name.
  """
  library = traced.graph.as_graph_def().library
  return _Functions([*library.function, traced.function_def])[
    traced.function_def.signature.name
  ]


class _Functions:
  """Functions by name, each traced when first needed."""

  def __init__(self, definitions: Iterable[Any]):
    self._definitions = {one.signature.name: one for one in definitions}
    self._traced: dict[str, Any] = {}

  def __getitem__(self, name: str) -> Any:
    if name not in self._traced:
      self._traced[name] = self._trace(self._definitions[name])
    return self._traced[name]

  def _trace(self, definition: Any) -> Any:
    signature = definition.signature
    specs = [
      tf.TensorSpec(_shape_of(definition, place), argument.type)
      for place, argument in enumerate(signature.input_arg)
    ]

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
      graph = tf.compat.v1.get_default_graph()
      nodes, names = _as_in_graphs(definition)
      for node in nodes:
        for called in operations.named_functions(node):
          inner = self[called.name]
          inner.add_to_graph(graph)
          called.name = inner.name
      return _imported(
        nodes,
        {
          names[argument.name]: tensor
          for argument, tensor in zip(signature.input_arg, inputs, strict=True)
        },
        [names[definition.ret[a.name]] for a in signature.output_arg],
        definition.control_ret.values(),
      )

    return graphs.trace(run, specs)


def _shape_of(definition: Any, place: int) -> tf.TensorShape:
  """Return the shape of an argument, if it was traced with one."""
  shapes = definition.attr.get('_input_shapes')
  if shapes is None:
    attributes = definition.arg_attr.get(place)
    shapes = attributes and attributes.attr.get('_output_shapes')
    place = 0
  if shapes is None or place >= len(shapes.list.shape):
    return tf.TensorShape(None)
  return tf.TensorShape(shapes.list.shape[place])


def _as_in_graphs(
  definition: Any,
) -> tuple[list[tf.compat.v1.NodeDef], dict[str, str]]:
  """Return a function's nodes, and the names of its tensors as in graphs.

  Functions name a tensor by the output of its operation, graphs by its place.
  """
  names = {a.name: f'{a.name}:0' for a in definition.signature.input_arg}
  for node in definition.node_def:
    defined = operations.definition(node)
    if defined is None:
      raise UnfitForLanesError(f'clients call the function {node.op}')
    number = 0
    for output in defined.output_arg:
      size = 1
      if output.number_attr:
        size = node.attr[output.number_attr].i
      elif output.type_list_attr:
        size = len(node.attr[output.type_list_attr].list.type)
      for index in range(size):
        names[f'{node.name}:{output.name}:{index}'] = f'{node.name}:{number}'
        number += 1
  nodes = []
  for node in definition.node_def:
    renamed = tf.compat.v1.NodeDef()
    renamed.CopyFrom(node)
    renamed.input[:] = [names.get(name, name) for name in node.input]
    nodes.append(renamed)
  return nodes, names


def _imported(
  nodes: Iterable[tf.compat.v1.NodeDef],
  given: Mapping[str, tf.Tensor],
  wanted: Sequence[str],
  effects: Iterable[str],
) -> list[tf.Tensor]:
  """Build nodes in the current graph.

  Args:
    nodes: The nodes.
    given: Their inputs from elsewhere.
    wanted: The tensors to return.
    effects: The names of nodes, such as assertions, that must run as well.
  """
  graph_def = tf.compat.v1.GraphDef()
  read: set[str] = set()
  for node in nodes:
    copy = graph_def.node.add()
    copy.CopyFrom(node)
    read.update(name if ':' in name else f'{name}:0' for name in node.input)
    for name in ('_output_shapes', '_class'):
      if name in copy.attr:
        del copy.attr[name]
  graph_def.versions.CopyFrom(tf.Graph().as_graph_def().versions)
  inner = [name for name in wanted if name not in given]
  found = tf.graph_util.import_graph_def(
    graph_def,
    input_map={name: given[name] for name in given if name in read},
    return_elements=[*inner, *effects],
    name='lanes',
  )
  known = {**given, **dict(zip(inner, found, strict=False))}
  with tf.control_dependencies(found[len(inner) :]):
    return [tf.identity(known[name]) for name in wanted]
