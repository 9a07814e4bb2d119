"""Control flow for several lanes at once: calls, choices, loops, assertions.

A loop that ends sooner for some lanes goes on until all are done, and its
results for the others are dropped; where lanes take different branches, both
are computed.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.lanes import lane_values
from tff_partial.runtimes.lanes.function_bodies import Body
from tff_partial.runtimes.lanes.function_bodies import LaneFunctions
from tff_partial.runtimes.lanes.lane_values import Value


class Runner(Protocol):
  """Builder of graphs and functions for several lanes.

  Attributes:
    number: The number of lanes.
    functions: The functions of the graph.
  """

  number: int
  functions: LaneFunctions

  def run(
    self, body: Body, values: Sequence[Value], mask: Value | None
  ) -> list[Value]:
    """Build a graph or a function.

    Args:
      body: The graph or function.
      values: Its inputs.
      mask: The lanes that are at work, or None for all.
    """


# From a runner, the lanes at work, a node and its inputs to its outputs.
Build: TypeAlias = Callable[
  [Runner, Value | None, tf.compat.v1.NodeDef, Sequence[Value]], list[Value]
]


def _assert(
  lanes: Runner,
  mask: Value | None,
  node: tf.compat.v1.NodeDef,
  given: Sequence[Value],
) -> list[Value]:
  """Assert a condition for the lanes at work."""
  del lanes
  condition, *data = given
  holds = condition.tensor
  if mask is not None:
    holds = tf.logical_or(holds, tf.logical_not(mask.tensor))
  tf.debugging.Assert(
    tf.reduce_all(holds),
    [value.tensor for value in data],
    node.attr['summarize'].i,
  )
  return []


def _call(
  lanes: Runner,
  mask: Value | None,
  node: tf.compat.v1.NodeDef,
  given: Sequence[Value],
) -> list[Value]:
  body = lanes.functions.body(node.attr['f'].func.name)
  return lanes.run(body, given, mask)


def _choice(
  lanes: Runner,
  mask: Value | None,
  node: tf.compat.v1.NodeDef,
  given: Sequence[Value],
) -> list[Value]:
  """Build a conditional: one branch, or all where lanes choose differently."""
  index, *inputs = given
  names = [branch.name for branch in operations.branches(node)]
  flags = lanes.functions.differing_of_node(
    node, [value.has_lanes for value in given]
  )
  bodies = [lanes.functions.body(name) for name in names]
  which = index.tensor
  if node.op in operations.CONDITIONALS:
    if which.dtype != tf.bool:
      raise lane_values.UnfitForLanesError('a condition is no Boolean')
    which = tf.cast(which, tf.int32)
  # An index out of range runs the last branch.
  which = tf.where((which < 0) | (which >= len(names)), len(names) - 1, which)
  if not index.has_lanes:

    def way(body: Body) -> list[tf.Tensor]:
      results = lanes.run(body, inputs, mask)
      return [
        tf.constant(0),
        *[v.tensor for v in _spread(lanes, results, flags)],
      ]

    _, *tensors = tf.switch_case(
      which, [functools.partial(way, body) for body in bodies]
    )
    return list(map(Value, tensors, flags))
  chosen: list[Value] = []
  for number, body in enumerate(bodies):
    mine = tf.equal(which, number)
    at_work = mine if mask is None else tf.logical_and(mine, mask.tensor)
    results = [
      lane_values.spread(value, lanes.number)
      for value in lanes.run(body, inputs, Value(at_work, True))
    ]
    chosen = lane_values.selected(mine, results, chosen) if number else results
  return chosen


def _loop(
  lanes: Runner,
  mask: Value | None,
  node: tf.compat.v1.NodeDef,
  given: Sequence[Value],
) -> list[Value]:
  """Build a loop that goes on until all lanes are done."""
  flags, ends_apart = lanes.functions.differing_of_loop(
    node, [value.has_lanes for value in given]
  )
  condition = lanes.functions.body(node.attr['cond'].func.name)
  body = lanes.functions.body(node.attr['body'].func.name)
  varying = [place for place, kept in enumerate(body.kept) if not kept]
  own_flags = [flags[place] for place in varying]

  def of_varying(values: Sequence[Value]) -> list[Value]:
    return _spread(lanes, [values[place] for place in varying], own_flags)

  def all_of(tensors: Sequence[tf.Tensor]) -> list[Value]:
    values = list(given)
    for place, tensor in zip(varying, tensors, strict=True):
      values[place] = Value(tensor, flags[place])
    return values

  def after(tensors: Sequence[tf.Tensor], mask: Value | None) -> list[Value]:
    return of_varying(lanes.run(body, all_of(tensors), mask))

  def goes_on(tensors: Sequence[tf.Tensor], mask: Value | None) -> tf.Tensor:
    return lanes.run(condition, all_of(tensors), mask)[0].tensor

  first = of_varying(given)
  start = [value.tensor for value in first]
  shapes = _loop_shapes(node, varying, first)
  if not ends_apart:
    results = tf.while_loop(
      lambda *tensors: goes_on(tensors, mask),
      lambda *tensors: _like([v.tensor for v in after(tensors, mask)], shapes),
      start,
      shape_invariants=shapes,
      parallel_iterations=1,
    )
    return all_of(results)

  def step(at_work: tf.Tensor, *tensors: tf.Tensor) -> Any:
    mask = Value(at_work, True)
    before = [Value(tensor, True) for tensor in tensors]
    selected = lane_values.selected(at_work, after(tensors, mask), before)
    new = _like([value.tensor for value in selected], shapes)
    return tf.logical_and(at_work, goes_on(new, mask)), *new

  begins = goes_on(start, mask)
  if mask is not None:
    begins = tf.logical_and(begins, mask.tensor)
  results = tf.while_loop(
    lambda at_work, *_: tf.reduce_any(at_work),
    step,
    [begins, *start],
    shape_invariants=[begins.shape, *shapes],
    parallel_iterations=1,
  )[1:]
  return all_of(results)


def _spread(
  lanes: Runner, values: Sequence[Value], flags: Sequence[bool]
) -> list[Value]:
  """Give lanes to those values that differ elsewhere."""
  return [
    lane_values.spread(value, lanes.number) if flag else value
    for value, flag in zip(values, flags, strict=True)
  ]


def _loop_shapes(
  node: tf.compat.v1.NodeDef, varying: Sequence[int], first: Sequence[Value]
) -> list[tf.TensorShape]:
  """Return the shape invariants of the variables of a loop."""
  declared = node.attr['output_shapes'].list.shape
  shapes = []
  for place, value in zip(varying, first, strict=True):
    shape = value.tensor.shape
    if declared and value.tensor.dtype != tf.variant:
      kept = tf.TensorShape(declared[place])
      if value.has_lanes:
        kept = tf.TensorShape([shape[0]]).concatenate(kept)
      if kept.rank is None or not kept.is_fully_defined():
        shape = kept
    shapes.append(shape)
  return shapes


def _like(
  tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape]
) -> list[tf.Tensor]:
  """Set the shapes of tensors, which importing lost."""
  for tensor, shape in zip(tensors, shapes, strict=True):
    if tensor.dtype != tf.variant:
      tensor.set_shape(shape)
  return list(tensors)


BUILDS: Mapping[str, Build] = {
  'Assert': _assert,
  **dict.fromkeys(operations.CALLS, _call),
  **dict.fromkeys((*operations.CONDITIONALS, *operations.CASES), _choice),
  **dict.fromkeys(operations.LOOPS, _loop),
}
