"""Lanes: one program that computes for several clients in lock-step.

The graph of one client is rebuilt with a leading dimension of clients, *lanes*,
wherever values differ between them; values shared by all lanes, such as the
server's weights, stay unchanged. Single operations are those of
`tf.vectorized_map`: matrix products become batched ones. Operations that cannot
run for several clients at once, such as convolutions with filters that differ
and draws from their seeds, run once for each lane.

A lane that is done, or in another branch, gets a safe index and divisor, so
that it raises no error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import logging
from typing import Any

import tensorflow as tf

from tff_partial.runtimes.graphs import operations
from tff_partial.runtimes.lanes import function_bodies
from tff_partial.runtimes.lanes import lane_control_flow
from tff_partial.runtimes.lanes import lane_rules
from tff_partial.runtimes.lanes import lane_values
from tff_partial.runtimes.lanes.function_bodies import Body
from tff_partial.runtimes.lanes.lane_values import Value

_VARIANT = tf.variant.as_datatype_enum
# These are marked as stateful, but keep no state that matters.
_HARMLESS = frozenset(
  (
    *lane_control_flow.BUILDS,
    *('DeviceIndex', 'GuaranteeConst', 'StatelessRandomGetAlg'),
  )
)
# Control flow of TensorFlow 1, with cycles in the graph.
_FRAMES = frozenset(('Enter', 'Exit', 'Merge', 'NextIteration', 'Switch'))
# Operations on the last dimension of their first input, or on each number,
# which `vectorized_map` does not support.
_OF_LAST_DIMENSION = frozenset(('Bitcast', 'OnesLike', 'TopKV2'))
# Inputs that must be valid even if the result is dropped: from an operation to
# the place of the input, and a number that is always valid.
_MUST_BE_SOUND = {
  **dict.fromkeys(('Gather', 'GatherNd', 'GatherV2'), (1, 0)),
  **dict.fromkeys(('Slice', 'StridedSlice'), (1, 0)),
  'ScatterNd': (0, 0),
  **dict.fromkeys(lane_rules.SCATTERS, (1, 0)),
  **dict.fromkeys(
    ('UnsortedSegmentMax', 'UnsortedSegmentMin', 'UnsortedSegmentSum'), (1, 0)
  ),
  'SparseSoftmaxCrossEntropyWithLogits': (1, 0),
  **dict.fromkeys(
    ('Div', 'FloorDiv', 'FloorMod', 'Mod', 'TruncateDiv', 'TruncateMod'), (1, 1)
  ),
}
_MASK = 'lanes_at_work'


class Lanes:
  """Traced function, rebuilt for several clients at once."""

  def __init__(
    self,
    traced: Any,
    number: int,
    has_lanes: Sequence[bool],
  ):
    """Read a function.

    Args:
      traced: A concrete function of flat tensors, to flat tensors.
      number: The number of lanes.
      has_lanes: Which of its arguments differ between lanes.

    Raises:
      UnfitForLanesError: If it has an operation that lanes cannot run.
    """
    self.number = number
    graph_def = traced.graph.as_graph_def()
    self.functions = function_bodies.LaneFunctions(graph_def)
    # Kinds (see `_kind`) that TensorFlow did not vectorize so far.
    self.one_by_one: set[tuple[str, ...]] = set()
    self._captured = list(traced.captured_inputs)
    self._has_lanes = [*has_lanes, *[False] * len(self._captured)]
    self._body = Body(
      graph_def.node,
      [tensor.name for tensor in traced.inputs],
      [tensor.name for tensor in traced.outputs],
      [operation.name for operation in traced.graph.control_outputs],
    )

  def __call__(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    """Compute for all lanes.

    Args:
      *flat: The arguments; those that differ have a leading dimension of lanes.

    Returns:
      The results, with a leading dimension of lanes.
    """
    values = [
      Value(tensor, flag)
      for tensor, flag in zip(
        [*flat, *self._captured], self._has_lanes, strict=True
      )
    ]
    return [
      lane_values.spread(value, self.number).tensor
      for value in self.run(self._body, values, None)
    ]

  def run(
    self, body: Body, values: Sequence[Value], mask: Value | None
  ) -> list[Value]:
    """Build a graph or a function."""
    return _Builder(self, body, values, mask).build()


class _Builder:
  """Builder of one body in the current graph."""

  def __init__(
    self,
    lanes: Lanes,
    body: Body,
    values: Sequence[Value],
    mask: Value | None,
  ):
    self._lanes, self._body, self._mask = lanes, body, mask
    self._known = dict(zip(body.inputs, values, strict=True))
    if mask is not None:
      self._known[f'{_MASK}:0'] = mask
    self._flags = {name: value.has_lanes for name, value in self._known.items()}
    self._constants = dict(body.constants)
    self._readers = dict(body.readers)
    # Nodes that are not built yet: several at once are built faster.
    self._waiting: dict[str, tf.compat.v1.NodeDef] = {}

  def build(self) -> list[Value]:
    """Build everything; return the outputs."""
    for node in self._body.nodes:
      self._add(node)
    self._flush()
    return self._values(self._body.outputs)

  def _values(self, names: Iterable[str]) -> list[Value]:
    """Return the built values of tensors; build constants when first read."""
    for name in names:
      source = operations.source(name)
      if name not in self._known and source in self._constants:
        nodes = {source: self._constants[source]}
        (self._known[name],) = self._import(nodes, [name])
    return [self._known[name] for name in names]

  def _add(self, node: tf.compat.v1.NodeDef) -> None:
    names = function_bodies.data_inputs(node)
    defined = operations.definition(node)
    if defined is None:
      raise lane_values.UnfitForLanesError(
        f'clients call the function {node.op}'
      )
    if node.op in _FRAMES:
      raise lane_values.UnfitForLanesError(
        "clients have TensorFlow 1's control flow"
      )
    if defined.is_stateful and node.op not in _HARMLESS:
      raise lane_values.UnfitForLanesError(
        f'clients read and write something step by step ({node.op})'
      )
    given = [self._flags[name] for name in names]
    for place, flag in enumerate(
      self._lanes.functions.differing_of_node(node, given)
    ):
      self._flags[f'{node.name}:{place}'] = flag
    if node.op == 'Const':
      return
    self._take(self._made_sound(node, names, given))

  def _take(self, node: tf.compat.v1.NodeDef) -> None:
    """Build a node, or let it wait for others."""
    names = function_bodies.data_inputs(node)
    build = self._special(node, any(self._flags[name] for name in names))
    if build is None:
      self._waiting[node.name] = node
      return
    if any(operations.source(name) in self._waiting for name in names):
      self._flush()
    results = build(node, self._values(names))
    for place, value in enumerate(results):
      self._known[f'{node.name}:{place}'] = value

  def _special(
    self, node: tf.compat.v1.NodeDef, has_lanes: bool
  ) -> Callable[..., list[Value]] | None:
    """Return a method for a node that is no ordinary operation on tensors."""
    if node.op in lane_control_flow.BUILDS:
      build = lane_control_flow.BUILDS[node.op]
      return functools.partial(build, self._lanes, self._mask)
    rule = lane_rules.rule_of(node, has_lanes)
    if rule is not None:
      return functools.partial(rule, self._lanes.number)
    first, *others = [
      self._flags[name] for name in function_bodies.data_inputs(node)
    ] or [False]
    if node.op in _OF_LAST_DIMENSION and first and not any(others):
      return self._plain
    if has_lanes and self._kind(node) in self._lanes.one_by_one:
      return self._one_by_one
    # Reading a missing attribute would add it.
    if 'T' in node.attr and node.attr['T'].type == _VARIANT:
      return self._plain
    return None

  def _made_sound(
    self,
    node: tf.compat.v1.NodeDef,
    names: Sequence[str],
    given: Sequence[bool],
  ) -> tf.compat.v1.NodeDef:
    """Return a node that raises no error for lanes that are not active."""
    place, number = _MUST_BE_SOUND.get(node.op, (None, 0))
    if self._mask is None or place is None or not given[place]:
      return node
    dtype = operations.input_dtypes(node)[place]
    if not dtype.is_integer:
      return node
    sound = tf.compat.v1.NodeDef(name=f'{node.name}/{_MASK}/sound', op='Const')
    sound.attr['dtype'].type = dtype.as_datatype_enum
    sound.attr['value'].tensor.CopyFrom(tf.make_tensor_proto(number, dtype))
    chosen = tf.compat.v1.NodeDef(
      name=f'{node.name}/{_MASK}/chosen',
      op='SelectV2',
      input=[f'{_MASK}:0', names[place], f'{sound.name}:0'],
    )
    chosen.attr['T'].type = dtype.as_datatype_enum
    self._constants[sound.name] = sound
    self._readers[f'{chosen.name}:0'] = {node.name}
    self._flags[f'{sound.name}:0'] = False
    self._flags[f'{chosen.name}:0'] = True
    self._take(chosen)
    guarded = tf.compat.v1.NodeDef()
    guarded.CopyFrom(node)
    guarded.input[place] = f'{chosen.name}:0'
    return guarded

  def _flush(self) -> None:
    """Build the waiting nodes."""
    waiting, self._waiting = self._waiting, {}
    if not waiting:
      return
    nodes = {
      name: node
      for name, node in waiting.items()
      if not any(
        self._flags[given] for given in function_bodies.data_inputs(node)
      )
    }
    wanted = self._read_elsewhere(nodes, waiting)
    if wanted:
      values = self._import(nodes, wanted)
      self._known.update(zip(wanted, values, strict=True))
    nodes = {n: node for n, node in waiting.items() if n not in nodes}
    wanted = self._read_elsewhere(nodes, waiting)
    if wanted:
      try:
        values = self._vectorize(nodes, wanted)
      except (AssertionError, NotImplementedError, TypeError, ValueError):
        self._find_what_fails(nodes)
      else:
        self._known.update(zip(wanted, values, strict=True))

  def _find_what_fails(self, nodes: Mapping[str, Any]) -> None:
    """Build nodes one by one; those that fail alone, once for each lane.

    Other nodes of the same kind are then built so from the start.
    """
    for node in nodes.values():
      if len(nodes) == 1:
        self._lanes.one_by_one.add(self._kind(node))
      self._take(node)
      self._flush()

  def _kind(self, node: tf.compat.v1.NodeDef) -> tuple[str, ...]:
    """Return the operation, and which of its inputs have lanes."""
    return (
      node.op,
      *(str(self._flags[name]) for name in function_bodies.data_inputs(node)),
    )

  def _read_elsewhere(
    self, nodes: Mapping[str, Any], waiting: Mapping[str, Any]
  ) -> list[str]:
    """Return the tensors of nodes that others read."""
    outputs = set(self._body.outputs)
    inner = {
      name
      for node in waiting.values()
      if node.name not in nodes
      for name in function_bodies.data_inputs(node)
    }
    return [
      name
      for name in self._flags
      if operations.source(name) in nodes
      and (
        name in outputs
        or name in inner
        or not self._readers.get(name, set()) <= waiting.keys()
      )
    ]

  def _import(
    self, nodes: Mapping[str, Any], wanted: Sequence[str]
  ) -> list[Value]:
    """Build nodes unchanged; they compute the same for all lanes."""
    nodes = self._with_constants(nodes)
    tensors = function_bodies.imported(
      nodes,
      {name: self._known[name].tensor for name in function_bodies.read(nodes)},
      wanted,
    )
    return [
      Value(tensor, self._flags[name])
      for name, tensor in zip(wanted, tensors, strict=True)
    ]

  def _vectorize(
    self, nodes: Mapping[str, Any], wanted: Sequence[str]
  ) -> list[Value]:
    """Build nodes that compute something different for each lane."""
    nodes = self._with_constants(nodes)
    given = {name: self._known[name] for name in function_bodies.read(nodes)}
    apart = [name for name, value in given.items() if value.has_lanes]

    def one(*tensors: tf.Tensor) -> list[tf.Tensor]:
      inputs = {name: value.tensor for name, value in given.items()}
      inputs.update(zip(apart, tensors, strict=True))
      return function_bodies.imported(nodes, inputs, wanted)

    with _silence():
      results = tf.vectorized_map(
        lambda tensors: one(*tensors),
        tuple(given[name].tensor for name in apart),
        fallback_to_while_loop=False,
      )
    return [Value(tensor, True) for tensor in results]

  def _with_constants(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Add the constants that nodes read, which many operations need."""
    constants = self._constants
    read = [operations.source(name) for name in function_bodies.read(nodes)]
    return {
      **{name: constants[name] for name in read if name in constants},
      **nodes,
    }

  def _one_by_one(
    self, node: tf.compat.v1.NodeDef, given: Sequence[Value]
  ) -> list[Value]:
    """Build an operation once for each lane."""
    nodes = self._with_constants({node.name: node})
    wanted = function_bodies.outputs(node)
    of_lanes = []
    for lane in range(self._lanes.number):
      inputs = {
        name: value.tensor[lane] if value.has_lanes else value.tensor
        for name, value in zip(
          function_bodies.data_inputs(node), given, strict=True
        )
        if operations.source(name) not in nodes
      }
      of_lanes.append(function_bodies.imported(nodes, inputs, wanted))
    return [
      Value(tf.stack(tensors), True) for tensors in zip(*of_lanes, strict=True)
    ]

  def _plain(
    self, node: tf.compat.v1.NodeDef, given: Sequence[Value]
  ) -> list[Value]:
    """Build an operation that works on inputs with lanes unchanged."""
    del given
    return self._import({node.name: node}, function_bodies.outputs(node))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Silence the logs of nodes that cannot be vectorized: they are handled."""
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(level)
