"""Selections in place of conditionals with cheap, elementwise branches.

XLA copies whole arrays into and out of a conditional, and fuses nothing across
it. Aggregators that clip or zero updates have one for each. Where both branches
are elementwise arithmetic, it is cheaper to compute both and to select, which
XLA fuses into the operations that read the result. The selected value is that
of the conditional; a NaN or an infinity in the other branch is dropped.
"""

from collections.abc import Iterable

import tensorflow as tf

from tff_partial.runtimes.graphs import operations

# Longer branches may be worth skipping.
_MAX_OPERATIONS = 32
_ELEMENTWISE = frozenset(
  """
  Abs Add AddV2 BroadcastTo Cast Const Fill Identity Maximum Minimum Mul Neg
  NoOp Pack RealDiv Shape Square Sub ZerosLike
  """.split()
)


def as_choices(
  graph_def: tf.compat.v1.GraphDef, graph: tf.Graph
) -> tf.compat.v1.GraphDef:
  """Replace cheap conditionals of a graph.

  Args:
    graph_def: The graph.
    graph: The same graph, imported, with shapes.

  Returns:
    A copy, or the graph itself if it has none.
  """
  cheap = {
    function.signature.name
    for function in graph_def.library.function
    if len(function.node_def) <= _MAX_OPERATIONS
    and all(node.op in _ELEMENTWISE for node in function.node_def)
  }
  found = {
    node.name
    for node in graph_def.node
    if node.op in operations.CONDITIONALS
    and {node.attr[f'{way}_branch'].func.name for way in ('then', 'else')}
    <= cheap
    and _is_dense(graph.get_operation_by_name(node.name))
  }
  if not found:
    return graph_def
  replaced = tf.compat.v1.GraphDef()
  replaced.CopyFrom(graph_def)
  del replaced.node[:]
  for node in graph_def.node:
    replaced.node.extend(_choice(node) if node.name in found else [node])
  return replaced


def _is_dense(operation: tf.Operation) -> bool:
  """Check whether one Boolean chooses between numbers of the same shapes."""
  condition, *_ = operation.inputs
  return (
    condition.dtype == tf.bool
    and condition.shape.rank == 0
    and bool(operation.outputs)
    and all(
      output.shape.is_fully_defined()
      and (output.dtype.is_floating or output.dtype.is_integer)
      for output in operation.outputs
    )
  )


def _choice(node: tf.compat.v1.NodeDef) -> Iterable[tf.compat.v1.NodeDef]:
  """Yield calls of both branches, then a node with the old name and outputs."""
  condition, *inputs = node.input
  types = node.attr['Tout'].list.type
  calls = {way: f'{node.name}/{way}_chosen' for way in ('then', 'else')}
  for way, name in calls.items():
    call = tf.compat.v1.NodeDef(
      name=name, op='PartitionedCall', input=inputs, device=node.device
    )
    call.attr['Tin'].CopyFrom(node.attr['Tin'])
    call.attr['Tout'].CopyFrom(node.attr['Tout'])
    call.attr['f'].CopyFrom(node.attr[f'{way}_branch'])
    yield call
  chosen = tf.compat.v1.NodeDef(name=node.name, op='IdentityN')
  chosen.attr['T'].CopyFrom(node.attr['Tout'])
  for place, dtype in enumerate(types):
    select = tf.compat.v1.NodeDef(
      name=f'{node.name}/chosen_{place}',
      op='SelectV2',
      input=[condition, *(f'{call}:{place}' for call in calls.values())],
      device=node.device,
    )
    select.attr['T'].type = dtype
    chosen.input.append(select.name)
    yield select
  yield chosen
