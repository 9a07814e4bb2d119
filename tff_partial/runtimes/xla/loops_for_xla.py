"""Constants from outside loops, made known to XLA inside them.

A size that a loop only reads is one of its variables, which every iteration
passes on. XLA must know it as a constant to shape the loop's tensors.
TensorFlow passes constants into loops, but only into marked ones; and it fails
where a loop reads the size from another loop, which it may have rewritten
later: then XLA refuses.
"""

from collections.abc import Callable, Iterable
import functools
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import operations


def prepared(
  graph_def: tf.compat.v1.GraphDef, ending: str
) -> tf.compat.v1.GraphDef:
  """Return a graph that computes the same as another one.

  Args:
    graph_def: That graph.
    ending: Appended to the names of all functions, since TensorFlow identifies
      functions by name, and they change: loops are marked, and variables that a
      loop only reads are read from the loop's input.
  """
  graph = tf.compat.v1.GraphDef()
  graph.CopyFrom(graph_def)
  functions = {
    function.signature.name: function for function in graph.library.function
  }

  @functools.cache
  def handed_on(name: str) -> list[int]:
    function = functions[name]
    passed = _prepare(function.node_def, ':output:', handed_on)
    for result, tensor in function.ret.items():
      function.ret[result] = passed.get(tensor, tensor)
    return _handed_on(function)

  _prepare(graph.node, ':', handed_on)
  for name in functions:
    handed_on(name)
  operations.rename_functions(graph, functions, ending)
  return graph


def _prepare(
  nodes: Any, separator: str, handed_on: Callable[[str], Iterable[int]]
) -> dict[str, str]:
  """Prepare nodes; return, for results that loops pass on, their inputs.

  Args:
    nodes: The nodes of a graph or of a function.
    separator: The text between the name of a loop and the place of its result.
    handed_on: Returns the places of the variables that a loop's body, a
      function, passes on unchanged.
  """
  passed: dict[str, str] = {}
  for node in nodes:
    if node.op in operations.LOOPS:
      # TensorFlow sets this on loops that it traces for XLA.
      node.attr['_xla_propagate_compile_time_consts'].b = True
      for place in handed_on(node.attr['body'].func.name):
        passed[f'{node.name}{separator}{place}'] = node.input[place]
        if not place and separator == ':':
          passed[node.name] = node.input[place]
  for result in passed:
    while passed[result] in passed:  # It comes from a loop as well.
      passed[result] = passed[passed[result]]
  for node in nodes:
    for place, name in enumerate(node.input):
      node.input[place] = passed.get(name, name)
  return passed


def _handed_on(function: Any) -> list[int]:
  """Return the places of arguments that a function returns unchanged."""
  known = {node.name: node for node in function.node_def}
  return [
    place
    for place, (given, returned) in enumerate(
      zip(
        function.signature.input_arg,
        function.signature.output_arg,
        strict=False,
      )
    )
    if operations.origin(known, function.ret[returned.name]) == given.name
  ]
