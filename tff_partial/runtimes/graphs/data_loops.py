"""Loops in place of `Dataset.reduce`, which is slow to start.

TensorFlow prepares the function of a `ReduceDataset` each time that it runs,
which takes longer than a client's few batches. A loop over an iterator of the
data set calls the same function, prepared once, with the same result.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.graphs import operations

_serial = itertools.count()


def as_loops(graph_def: tf.compat.v1.GraphDef) -> None:
  """Replace every `ReduceDataset` in a graph and its functions."""
  known = {f.signature.name: f for f in graph_def.library.function}
  changed = set()
  for function in list(known.values()):
    replaced = _replace(function.node_def, known, graph_def)
    if replaced:
      operations.rename_results(function, replaced)
      changed.add(function.signature.name)
  _replace(graph_def.node, known, graph_def)
  for function in graph_def.library.function:
    if function.signature.name not in known:
      changed.add(function.signature.name)
  _rename_functions(graph_def, changed)


def _rename_functions(
  graph_def: tf.compat.v1.GraphDef, changed: set[str]
) -> None:
  """Give changed functions and their callers new names.

  TensorFlow may know the unchanged function by the old name.
  """
  called = {
    function.signature.name: {
      inner.name
      for node in function.node_def
      for inner in operations.named_functions(node)
    }
    for function in graph_def.library.function
  }
  before = 0
  while len(changed) > before:
    before = len(changed)
    changed |= {name for name, inner in called.items() if inner & changed}
  operations.rename_functions(graph_def, changed, f'_loops_{next(_serial)}')


def _replace(
  nodes: Any, known: dict[str, Any], graph_def: tf.compat.v1.GraphDef
) -> set[str]:
  """Make nodes call loops; return the names of those nodes."""
  replaced = set()
  for node in nodes:
    if node.op != 'ReduceDataset':
      continue
    reduce = known[node.attr['f'].func.name]
    states = [
      tf.TensorSpec(shape, dtype)
      for shape, dtype in zip(
        node.attr['output_shapes'].list.shape,
        node.attr['Tstate'].list.type,
        strict=True,
      )
    ]
    others = [
      tf.TensorSpec(None, dtype) for dtype in node.attr['Targuments'].list.type
    ]
    end = len(reduce.signature.input_arg) - len(others)
    elements = [
      argument.type
      for argument in reduce.signature.input_arg[len(states) : end]
    ]
    loop, *inner = _loop(states, elements, others, reduce.signature.name)
    graph_def.library.function.extend([loop, *inner])
    operations.make_call(node, loop, 'StatefulPartitionedCall')
    replaced.add(node.name)
  return replaced


def reduced(
  dataset: tf.Tensor,
  dtypes: Sequence[tf.DType],
  step: Callable[..., Sequence[Any]],
  state: Sequence[Any],
  shapes: Sequence[tf.TensorShape],
) -> Sequence[Any]:
  """Reduce a data set by a loop, within a graph.

  Args:
    dataset: The data set.
    dtypes: The dtypes of an element's components.
    step: Maps the components of an element and the state to the next state.
    state: The initial state.
    shapes: The shape that each part of the state always has.
  """
  kinds = {
    'output_types': dtypes,
    'output_shapes': [tf.TensorShape(None)] * len(dtypes),
  }
  iterator = tf.raw_ops.AnonymousIteratorV3(**kinds)

  def following() -> tf.Tensor:
    return tf.raw_ops.IteratorGetNextAsOptional(iterator=iterator, **kinds)

  def once(optional: tf.Tensor, *state: Any) -> tuple[Any, ...]:
    values = tf.raw_ops.OptionalGetValue(optional=optional, **kinds)
    new = step(values, *state)
    return (following(), *new)

  tf.raw_ops.MakeIterator(dataset=dataset, iterator=iterator)
  return tf.while_loop(
    lambda optional, *_: tf.raw_ops.OptionalHasValue(optional=optional),
    once,
    [following(), *state],
    shape_invariants=[tf.TensorShape([]), *shapes],
    parallel_iterations=1,
  )[1:]


def _loop(
  states: Sequence[tf.TensorSpec],
  elements: Sequence[int],
  others: Sequence[tf.TensorSpec],
  name: str,
) -> list[Any]:
  """Build functions from data set, first states and others to last states.

  Args:
    states: The specs of the state passed from element to element.
    elements: The dtypes of an element.
    others: The specs of the function's other arguments.
    name: The function's name.

  Returns:
    First the function to call, then those that it calls.
  """
  dtypes = [tf.as_dtype(dtype) for dtype in elements]
  element = [tf.TensorSpec(None, dtype) for dtype in dtypes]
  # Placeholder for the function, which only its own graph can call.
  stand_in = graphs.trace(
    lambda *flat: [tf.identity(state) for state in flat[: len(states)]],
    [*states, *element, *others],
  )

  def run(dataset: tf.Tensor, *flat: tf.Tensor) -> Any:
    def step(values: Sequence[tf.Tensor], *state: tf.Tensor) -> Any:
      return stand_in(*state, *values, *flat[len(states) :])

    shapes = [state.shape for state in states]
    return reduced(dataset, dtypes, step, flat[: len(states)], shapes)

  traced = graphs.trace(run, [tf.TensorSpec([], tf.variant), *states, *others])
  functions = [
    traced.function_def,
    *traced.graph.as_graph_def().library.function,
  ]
  standing = stand_in.function_def.signature.name
  for function in functions:
    for node in function.node_def:
      if 'f' in node.attr and node.attr['f'].func.name == standing:
        node.op = 'StatefulPartitionedCall'
        node.attr['f'].func.name = name
  return [f for f in functions if f.signature.name != standing]
