"""Lanes: one program that computes for several clients in lock-step.

What one client computes is read as a graph, and built anew with a leading
dimension of clients, *lanes*, wherever values differ between them; what all
lanes have alike, such as the server's weights, stays as it is. A loop that ends
sooner for some lanes goes on until all are done, and what it computes for the
others is dropped; where lanes go different ways, both are computed. Single
operations are those of `tf.vectorized_map`: matrix products become batched
ones. Convolutions become grouped ones. What nobody knows to do for several
clients at once, such as to draw from their seeds, is done once for each lane.

A lane that is done, or on another way, is handed no index and no divisor of its
own, so that it raises no error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import logging
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial.runtimes import operations

_CALLS = ('PartitionedCall', 'StatefulPartitionedCall')
_CONDITIONALS = ('If', 'StatelessIf')
_CASES = ('Case', 'StatelessCase')
_LOOPS = ('While', 'StatelessWhile')
_VARIANT = tf.variant.as_datatype_enum
# These say that they keep something between calls, but nothing that counts.
_HARMLESS = frozenset(
  (
    *(*_CALLS, *_CASES, *_CONDITIONALS, *_LOOPS),
    *('Assert', 'DeviceIndex', 'GuaranteeConst', 'StatelessRandomGetAlg'),
  )
)
# Control flow of TensorFlow 1, in which a graph goes in circles.
_FRAMES = frozenset(('Enter', 'Exit', 'Merge', 'NextIteration', 'Switch'))
# Of a tensor these know its shape alone, which is the same in all lanes.
_SHAPES = frozenset(('Rank', 'Shape', 'ShapeN', 'Size'))
# Operations on the last dimension of their first input, or on each number,
# which `vectorized_map` does not know.
_OF_LAST_DIMENSION = frozenset(('Bitcast', 'OnesLike', 'TopKV2'))
_SCATTERS = frozenset(
  ('TensorScatterAdd', 'TensorScatterSub', 'TensorScatterUpdate')
)
# Inputs that must be sound whatever becomes of the result: operation to the
# place of the input, and a number that is always sound.
_MUST_BE_SOUND = {
  **dict.fromkeys(('Gather', 'GatherNd', 'GatherV2'), (1, 0)),
  **dict.fromkeys(('Slice', 'StridedSlice'), (1, 0)),
  'ScatterNd': (0, 0),
  **dict.fromkeys(_SCATTERS, (1, 0)),
  **dict.fromkeys(
    ('UnsortedSegmentMax', 'UnsortedSegmentMin', 'UnsortedSegmentSum'), (1, 0)
  ),
  'SparseSoftmaxCrossEntropyWithLogits': (1, 0),
  **dict.fromkeys(
    ('Div', 'FloorDiv', 'FloorMod', 'Mod', 'TruncateDiv', 'TruncateMod'), (1, 1)
  ),
}
# Convolutions of each lane's filters are one of all lanes' channels in groups.
_CONVOLUTIONS = frozenset(
  ('Conv2D', 'Conv2DBackpropFilter', 'Conv2DBackpropInput')
)
_MASK = 'lanes_at_work'


class UnfitForLanesError(ValueError):
  """What a client computes cannot be computed for several in lock-step."""


class _Value(NamedTuple):
  """A tensor, and whether its leading dimension is that of the lanes.

  A list of tensors (`tf.TensorArray`) always has lanes in each of its elements;
  here it has lanes if elements differ between them.
  """

  tensor: tf.Tensor
  has_lanes: bool


class _Body:
  """What a graph or a function computes.

  Attributes:
    inputs: The names of the tensors that go in.
    outputs: The names of the tensors that come out.
    nodes: What lies between, each behind all that it needs.
    constants: Those of the nodes that are constants, by their names.
    readers: Each tensor to the nodes that read it.
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
    """For each output, whether it is the input at the same place."""
    known = {node.name: node for node in self.nodes}

    def origin(name: str) -> str:
      node = known.get(operations.source(name))
      if node is not None and node.op == 'Identity':
        return origin(data_inputs(node)[0])
      return name

    return [
      origin(name) == given
      for name, given in zip(self.outputs, self.inputs, strict=False)
    ]


def data_inputs(node: tf.compat.v1.NodeDef) -> list[str]:
  """The tensors that a node reads, each by its full name."""
  return [
    name if ':' in name else f'{name}:0'
    for name in node.input
    if not name.startswith('^')
  ]


def _sizes(
  arguments: Iterable[Any], attributes: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
  """How many tensors each named output of an operation has."""
  for argument in arguments:
    if argument.number_attr:
      yield argument.name, attributes[argument.number_attr].i
    elif argument.type_list_attr:
      types = attributes[argument.type_list_attr].list.type
      yield argument.name, len(types)
    else:
      yield argument.name, 1


def _outputs(node: tf.compat.v1.NodeDef) -> list[str]:
  """The names of all tensors that come out of a node."""
  arguments = operations.definition(node).output_arg
  number = sum(size for _, size in _sizes(arguments, node.attr))
  return [f'{node.name}:{place}' for place in range(number)]


def _body_of_function(function: Any) -> _Body:
  """Reads a function, in which tensors are called otherwise than in graphs."""
  inputs = [argument.name for argument in function.signature.input_arg]
  places: dict[str, str] = {name: f'{name}:0' for name in inputs}
  for node in function.node_def:
    defined = operations.definition(node)
    if defined is None:
      raise UnfitForLanesError(f'clients call the function {node.op}')
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
  return _Body(
    nodes,
    [places[name] for name in inputs],
    [
      places[function.ret[argument.name]]
      for argument in function.signature.output_arg
    ],
    function.control_ret.values(),
  )


class Lanes:
  """A traced function, built anew for several clients at once."""

  def __init__(
    self,
    traced: Any,
    number: int,
    has_lanes: Sequence[bool],
    groups_convolutions: bool | None = None,
  ):
    """Reads a function.

    Args:
      traced: A concrete function of flat tensors, to flat tensors.
      number: The number of lanes.
      has_lanes: Which of its arguments differ between lanes.
      groups_convolutions: Whether convolutions of all lanes become one with
        groups of channels, which TensorFlow knows on a GPU and under XLA; if
        not, each lane has its own. By default where there is a GPU.

    Raises:
      UnfitForLanesError: If it holds what lanes cannot run.
    """
    self.number = number
    if groups_convolutions is None:
      groups_convolutions = bool(tf.config.list_physical_devices('GPU'))
    self.groups_convolutions = groups_convolutions
    graph_def = traced.graph.as_graph_def()
    self._functions = {
      function.signature.name: function
      for function in graph_def.library.function
    }
    # What TensorFlow does not vectorize, as far as it was met; see `_kind`.
    self.one_by_one: set[tuple[str, ...]] = set()
    self._bodies: dict[str, _Body] = {}
    self._flags: dict[tuple[str, tuple[bool, ...]], list[bool]] = {}
    self._captured = list(traced.captured_inputs)
    self._has_lanes = [*has_lanes, *[False] * len(self._captured)]
    self._body = _Body(
      graph_def.node,
      [tensor.name for tensor in traced.inputs],
      [tensor.name for tensor in traced.outputs],
      [operation.name for operation in traced.graph.control_outputs],
    )

  def __call__(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    """Computes for all lanes.

    Args:
      *flat: The arguments; what differs between lanes has them in front.

    Returns:
      The results, with a leading dimension of lanes.
    """
    values = [
      _Value(tensor, flag)
      for tensor, flag in zip(
        [*flat, *self._captured], self._has_lanes, strict=True
      )
    ]
    return [
      self.spread(value).tensor for value in self.run(self._body, values, None)
    ]

  def run(
    self, body: _Body, values: Sequence[_Value], mask: _Value | None
  ) -> list[_Value]:
    """Builds a graph or a function."""
    return _Builder(self, body, values, mask).build()

  def body(self, name: str) -> _Body:
    """What a function computes."""
    if name not in self._bodies:
      self._bodies[name] = _body_of_function(self._functions[name])
    return self._bodies[name]

  def spread(self, value: _Value) -> _Value:
    """The same value with lanes."""
    tensor = value.tensor
    if value.has_lanes:
      return value
    if tensor.dtype == tf.variant:
      return _Value(tensor, True)
    shape = tf.concat([[self.number], tf.shape(tensor)], 0)
    spread = tf.broadcast_to(tensor[tf.newaxis], shape)
    spread.set_shape([self.number, *tensor.shape])
    return _Value(spread, True)

  def outputs_with_lanes(self, name: str, flags: Sequence[bool]) -> list[bool]:
    """Which results of a function differ between lanes.

    Args:
      name: The function.
      flags: Which of its arguments do.
    """
    key = (name, tuple(flags))
    if key not in self._flags:
      body = self.body(name)
      known = dict(zip(body.inputs, flags, strict=True))
      for node in body.nodes:
        given = [known[one] for one in data_inputs(node)]
        for place, flag in enumerate(self.node_outputs(node, given)):
          known[f'{node.name}:{place}'] = flag
      self._flags[key] = [known[one] for one in body.outputs]
    return self._flags[key]

  def node_outputs(
    self, node: tf.compat.v1.NodeDef, given: Sequence[bool]
  ) -> list[bool]:
    """Which results of a node differ between lanes, given which inputs do."""
    if node.op in _CALLS:
      return self.outputs_with_lanes(node.attr['f'].func.name, given)
    branches = _branches(node)
    if branches:
      ways = [self.outputs_with_lanes(name, given[1:]) for name in branches]
      return [given[0] or any(way) for way in zip(*ways, strict=True)]
    if node.op in _LOOPS:
      return self.loop_flags(node, given)[0]
    number = len(_outputs(node))
    if node.op in _SHAPES or node.op in (
      'TensorListLength',
      'TensorListElementShape',
    ):
      return [False] * number
    return [any(given)] * number

  def loop_flags(
    self, node: tf.compat.v1.NodeDef, given: Sequence[bool]
  ) -> tuple[list[bool], bool]:
    """Which variables of a loop differ between lanes, and whether its end does.

    Args:
      node: The loop.
      given: Which of its first values do.
    """
    condition = node.attr['cond'].func.name
    body = node.attr['body'].func.name
    kept = self.body(body).kept
    flags = list(given)
    while True:
      (ends_apart,) = self.outputs_with_lanes(condition, flags)
      new = [
        flag or (not is_kept and (after or ends_apart))
        for flag, is_kept, after in zip(
          flags, kept, self.outputs_with_lanes(body, flags), strict=True
        )
      ]
      if new == flags:
        return flags, ends_apart
      flags = new


def _branches(node: tf.compat.v1.NodeDef) -> list[str]:
  """The functions of which a node runs one, in the order of its choice."""
  if node.op in _CONDITIONALS:
    return [node.attr[f'{way}_branch'].func.name for way in ('else', 'then')]
  if node.op in _CASES:
    return [branch.name for branch in node.attr['branches'].list.func]
  return []


class _Builder:
  """Builds one body in the current graph."""

  def __init__(
    self,
    lanes: Lanes,
    body: _Body,
    values: Sequence[_Value],
    mask: _Value | None,
  ):
    self._lanes, self._body, self._mask = lanes, body, mask
    self._known = dict(zip(body.inputs, values, strict=True))
    if mask is not None:
      self._known[f'{_MASK}:0'] = mask
    self._flags = {name: value.has_lanes for name, value in self._known.items()}
    self._constants = dict(body.constants)
    self._readers = dict(body.readers)
    # Nodes that are not built yet: several at once are built sooner.
    self._waiting: dict[str, tf.compat.v1.NodeDef] = {}

  def build(self) -> list[_Value]:
    """Builds everything; returns the outputs."""
    for node in self._body.nodes:
      self._add(node)
    self._flush()
    return self._values(self._body.outputs)

  def _values(self, names: Iterable[str]) -> list[_Value]:
    """What tensors were built as; constants are built when they are read."""
    for name in names:
      source = operations.source(name)
      if name not in self._known and source in self._constants:
        nodes = {source: self._constants[source]}
        (self._known[name],) = self._import(nodes, [name])
    return [self._known[name] for name in names]

  def _add(self, node: tf.compat.v1.NodeDef) -> None:
    names = data_inputs(node)
    defined = operations.definition(node)
    if defined is None:
      raise UnfitForLanesError(f'clients call the function {node.op}')
    if node.op in _FRAMES:
      raise UnfitForLanesError("clients have TensorFlow 1's control flow")
    if defined.is_stateful and node.op not in _HARMLESS:
      raise UnfitForLanesError(
        f'clients read and write something step by step ({node.op})'
      )
    given = [self._flags[name] for name in names]
    for place, flag in enumerate(self._lanes.node_outputs(node, given)):
      self._flags[f'{node.name}:{place}'] = flag
    if node.op == 'Const':
      return
    self._take(self._made_sound(node, names, given))

  def _take(self, node: tf.compat.v1.NodeDef) -> None:
    """Builds a node, or lets it wait for others."""
    names = data_inputs(node)
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
  ) -> Callable[..., list[_Value]] | None:
    """What builds a node that is no ordinary operation of tensors."""
    if node.op in _CALLS:
      return self._call
    if node.op in _LOOPS:
      return self._loop
    if node.op in (*_CONDITIONALS, *_CASES):
      return self._choice
    if node.op == 'Assert':
      return self._assert
    if node.op in _SHAPES and has_lanes:
      return self._shape
    if node.op in _LISTS:
      return _LISTS[node.op](self._lanes)
    if (
      node.op in _CONVOLUTIONS
      and self._lanes.groups_convolutions
      and has_lanes
      and node.attr['data_format'].s in (b'', b'NHWC')
    ):
      return self._convolution
    if node.op in _SCATTERS and has_lanes:
      return self._scatter
    first, *others = [self._flags[name] for name in data_inputs(node)] or [
      False
    ]
    if node.op in _OF_LAST_DIMENSION and first and not any(others):
      return self._plain
    if has_lanes and self._kind(node) in self._lanes.one_by_one:
      return self._one_by_one
    # To ask for an attribute that is missing would add it.
    if 'T' in node.attr and node.attr['T'].type == _VARIANT:
      return self._plain
    return None

  def _made_sound(
    self,
    node: tf.compat.v1.NodeDef,
    names: Sequence[str],
    given: Sequence[bool],
  ) -> tf.compat.v1.NodeDef:
    """A node that raises no error for lanes that are not at work."""
    place, number = _MUST_BE_SOUND.get(node.op, (None, 0))
    if self._mask is None or place is None or not given[place]:
      return node
    dtype = tf.as_dtype(_input_type(node, place))
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
    """Builds the nodes that wait."""
    waiting, self._waiting = self._waiting, {}
    if not waiting:
      return
    nodes = {
      name: node
      for name, node in waiting.items()
      if not any(self._flags[given] for given in data_inputs(node))
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
    """Builds nodes one after the other; what fails alone, once for each lane.

    That other nodes of the kind fail as well is remembered.
    """
    for node in nodes.values():
      if len(nodes) == 1:
        self._lanes.one_by_one.add(self._kind(node))
      self._take(node)
      self._flush()

  def _kind(self, node: tf.compat.v1.NodeDef) -> tuple[str, ...]:
    """An operation, and which of its inputs have lanes."""
    return (node.op, *(str(self._flags[name]) for name in data_inputs(node)))

  def _read_elsewhere(
    self, nodes: Mapping[str, Any], waiting: Mapping[str, Any]
  ) -> list[str]:
    """The tensors of nodes that others read."""
    outputs = set(self._body.outputs)
    inner = {
      name
      for node in waiting.values()
      if node.name not in nodes
      for name in data_inputs(node)
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
  ) -> list[_Value]:
    """Builds nodes as they are, which compute the same for all lanes."""
    nodes = self._with_constants(nodes)
    tensors = _imported(
      nodes, {name: self._known[name].tensor for name in _read(nodes)}, wanted
    )
    return [
      _Value(tensor, self._flags[name])
      for name, tensor in zip(wanted, tensors, strict=True)
    ]

  def _vectorize(
    self, nodes: Mapping[str, Any], wanted: Sequence[str]
  ) -> list[_Value]:
    """Builds nodes that compute something else for each lane."""
    nodes = self._with_constants(nodes)
    given = {name: self._known[name] for name in _read(nodes)}
    apart = [name for name, value in given.items() if value.has_lanes]

    def one(*tensors: tf.Tensor) -> list[tf.Tensor]:
      inputs = {name: value.tensor for name, value in given.items()}
      inputs.update(zip(apart, tensors, strict=True))
      return _imported(nodes, inputs, wanted)

    with _silence():
      results = tf.vectorized_map(
        lambda tensors: one(*tensors),
        tuple(given[name].tensor for name in apart),
        fallback_to_while_loop=False,
      )
    return [_Value(tensor, True) for tensor in results]

  def _with_constants(self, nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Nodes, and the constants that they read, which many operations need."""
    constants = self._constants
    read = [operations.source(name) for name in _read(nodes)]
    return {
      **{name: constants[name] for name in read if name in constants},
      **nodes,
    }

  def _one_by_one(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    """An operation that is built once for each lane."""
    nodes = self._with_constants({node.name: node})
    wanted = _outputs(node)
    of_lanes = []
    for lane in range(self._lanes.number):
      inputs = {
        name: value.tensor[lane] if value.has_lanes else value.tensor
        for name, value in zip(data_inputs(node), given, strict=True)
        if operations.source(name) not in nodes
      }
      of_lanes.append(_imported(nodes, inputs, wanted))
    return [
      _Value(tf.stack(tensors), True) for tensors in zip(*of_lanes, strict=True)
    ]

  def _plain(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    """An operation that takes lanes as they are, and so leaves them."""
    del given
    return self._import({node.name: node}, _outputs(node))

  def _convolution(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    """A convolution, or its gradient, with the channels of all lanes."""
    number = self._lanes.number
    tensors = [
      _channels_together(self._lanes.spread(value).tensor)
      if value.tensor.dtype.is_floating
      # The shape of what comes out.
      else tf.concat(
        [_same_in_all(value)[:3], _same_in_all(value)[3:] * number], 0
      )
      for value in given
    ]
    names = [a.name for a in operations.definition(node).input_arg]
    result = getattr(tf.raw_ops, node.op)(
      **dict(zip(names, tensors, strict=True)),
      strides=list(node.attr['strides'].list.i),
      padding=node.attr['padding'].s.decode(),
      use_cudnn_on_gpu=node.attr['use_cudnn_on_gpu'].b,
      explicit_paddings=list(node.attr['explicit_paddings'].list.i),
      dilations=list(node.attr['dilations'].list.i),
    )
    return [_Value(_channels_apart(result, number), True)]

  def _scatter(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    """Adds to, or writes into, the tensor of each lane."""
    tensor, indices, updates = [self._lanes.spread(v).tensor for v in given]
    shape = tf.concat([tf.shape(indices)[:-1], [1]], 0)
    lane = tf.reshape(
      tf.range(self._lanes.number, dtype=indices.dtype),
      tf.concat([[self._lanes.number], tf.ones_like(shape[1:])], 0),
    )
    places = tf.concat([tf.broadcast_to(lane, shape), indices], -1)
    changed = getattr(tf.raw_ops, node.op)(
      tensor=tensor, indices=places, updates=updates
    )
    return [_Value(changed, True)]

  def _shape(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    """What is known of the shape of one lane, or of several tensors' shapes."""
    dtype = tf.int32
    if 'out_type' in node.attr:
      dtype = tf.as_dtype(node.attr['out_type'].type)

    def found(value: _Value) -> tf.Tensor:
      skipped = int(value.has_lanes)
      if node.op == 'Rank':
        return tf.rank(value.tensor) - skipped
      static = value.tensor.shape[skipped:]
      shape = tf.shape(value.tensor, dtype)[skipped:]
      if static.is_fully_defined():
        shape = tf.constant(static.as_list(), dtype)
      return tf.reduce_prod(shape) if node.op == 'Size' else shape

    return [_Value(found(value), False) for value in given]

  def _assert(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    condition, *data = given
    holds = condition.tensor
    if self._mask is not None:
      holds = tf.logical_or(holds, tf.logical_not(self._mask.tensor))
    tf.debugging.Assert(
      tf.reduce_all(holds),
      [value.tensor for value in data],
      node.attr['summarize'].i,
    )
    return []

  def _call(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    body = self._lanes.body(node.attr['f'].func.name)
    return self._lanes.run(body, given, self._mask)

  def _choice(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    index, *inputs = given
    names = _branches(node)
    flags = self._lanes.node_outputs(node, [v.has_lanes for v in given])
    bodies = [self._lanes.body(name) for name in names]
    which = index.tensor
    if node.op in _CONDITIONALS:
      if which.dtype != tf.bool:
        raise UnfitForLanesError('a condition is no Boolean')
      which = tf.cast(which, tf.int32)
    # Whatever else is asked for, the last branch is run.
    which = tf.where((which < 0) | (which >= len(names)), len(names) - 1, which)
    if not index.has_lanes:

      def way(body: _Body) -> list[tf.Tensor]:
        results = self._lanes.run(body, inputs, self._mask)
        return [
          tf.constant(0),
          *(
            (self._lanes.spread(value) if flag else value).tensor
            for value, flag in zip(results, flags, strict=True)
          ),
        ]

      _, *tensors = tf.switch_case(
        which, [functools.partial(way, body) for body in bodies]
      )
      return [
        _Value(tensor, flag)
        for tensor, flag in zip(tensors, flags, strict=True)
      ]
    chosen: list[_Value] = []
    for number, body in enumerate(bodies):
      mine = tf.equal(which, number)
      if self._mask is not None:
        at_work = tf.logical_and(mine, self._mask.tensor)
      else:
        at_work = mine
      results = [
        self._lanes.spread(value)
        for value in self._lanes.run(body, inputs, _Value(at_work, True))
      ]
      chosen = _selected(mine, results, chosen) if number else results
    return chosen

  def _loop(
    self, node: tf.compat.v1.NodeDef, given: Sequence[_Value]
  ) -> list[_Value]:
    flags, ends_apart = self._lanes.loop_flags(
      node, [value.has_lanes for value in given]
    )
    condition = self._lanes.body(node.attr['cond'].func.name)
    body = self._lanes.body(node.attr['body'].func.name)
    varying = [place for place, kept in enumerate(body.kept) if not kept]
    first = [
      self._lanes.spread(given[place]) if flags[place] else given[place]
      for place in varying
    ]

    def all_of(tensors: Sequence[tf.Tensor]) -> list[_Value]:
      values = list(given)
      for place, tensor in zip(varying, tensors, strict=True):
        values[place] = _Value(tensor, flags[place])
      return values

    def after(
      tensors: Sequence[tf.Tensor], mask: _Value | None
    ) -> list[_Value]:
      results = self._lanes.run(body, all_of(tensors), mask)
      return [
        self._lanes.spread(results[place]) if flags[place] else results[place]
        for place in varying
      ]

    def goes_on(tensors: Sequence[tf.Tensor], mask: _Value | None) -> tf.Tensor:
      return self._lanes.run(condition, all_of(tensors), mask)[0].tensor

    start = [value.tensor for value in first]
    shapes = _loop_shapes(node, varying, first)
    if not ends_apart:
      results = tf.while_loop(
        lambda *tensors: goes_on(tensors, self._mask),
        lambda *tensors: _like(
          [v.tensor for v in after(tensors, self._mask)], shapes
        ),
        start,
        shape_invariants=shapes,
        parallel_iterations=1,
      )
    else:

      def step(at_work: tf.Tensor, *tensors: tf.Tensor) -> Any:
        mask = _Value(at_work, True)
        before = [_Value(tensor, True) for tensor in tensors]
        selected = _selected(at_work, after(tensors, mask), before)
        new = _like([value.tensor for value in selected], shapes)
        return tf.logical_and(at_work, goes_on(new, mask)), *new

      begins = goes_on(start, self._mask)
      if self._mask is not None:
        begins = tf.logical_and(begins, self._mask.tensor)
      results = tf.while_loop(
        lambda at_work, *_: tf.reduce_any(at_work),
        step,
        [begins, *start],
        shape_invariants=[begins.shape, *shapes],
        parallel_iterations=1,
      )[1:]
    return all_of(results)


def _in_front(lanes: Lanes, shape: tf.Tensor) -> tf.Tensor:
  """The shape of a list's elements with lanes; -1 stands for any."""
  if shape.shape.rank == 0:
    return shape
  return tf.concat([tf.cast([lanes.number], shape.dtype), shape], 0)


def _same_in_all(value: _Value) -> tf.Tensor:
  """A place in a list, or its length."""
  if value.has_lanes:
    raise UnfitForLanesError('lanes would read different places of a list')
  return value.tensor


def _swapped(tensor: tf.Tensor) -> tf.Tensor:
  """Elements first and lanes next, or the other way round."""
  rank = tensor.shape.rank
  if rank is None:
    raise UnfitForLanesError('a list has elements of any number of dimensions')
  return tf.transpose(tensor, [1, 0, *range(2, rank)])


def _channels_together(tensor: tf.Tensor) -> tf.Tensor:
  """From `[lanes, a, b, c, channels]` to `[a, b, c, lanes * channels]`."""
  shape = tf.shape(tensor)
  together = tf.reshape(
    tf.transpose(tensor, [1, 2, 3, 0, 4]),
    tf.concat([shape[1:4], [shape[0] * shape[4]]], 0),
  )
  static = tensor.shape
  if static[0] is not None and static[4] is not None:
    together.set_shape([*static[1:4], static[0] * static[4]])
  return together


def _channels_apart(tensor: tf.Tensor, lanes: int) -> tf.Tensor:
  """From `[a, b, c, lanes * channels]` to `[lanes, a, b, c, channels]`."""
  shape = tf.concat(
    [tf.shape(tensor)[:3], [lanes, tf.shape(tensor)[3] // lanes]], 0
  )
  apart = tf.transpose(tf.reshape(tensor, shape), [3, 0, 1, 2, 4])
  channels = tensor.shape[3]
  apart.set_shape([lanes, *tensor.shape[:3], channels and channels // lanes])
  return apart


def _list_operation(
  build: Callable[..., Sequence[tuple[tf.Tensor, bool]]],
) -> Callable[[Lanes], Callable[..., list[_Value]]]:
  """What builds an operation on lists of tensors."""

  def of(lanes: Lanes) -> Callable[..., list[_Value]]:
    return lambda node, given: [
      _Value(*result) for result in build(lanes, node.attr, *given)
    ]

  return of


def _element(handle: _Value, item: tf.Tensor) -> tuple[tf.Tensor, bool]:
  """What is read from a list; once, if it is the same in all lanes."""
  return (item, True) if handle.has_lanes else (item[0], False)


def _reserve(
  lanes: Lanes, attr: Any, shape: _Value, size: _Value
) -> list[tuple[tf.Tensor, bool]]:
  made = tf.raw_ops.TensorListReserve(
    element_shape=_in_front(lanes, _same_in_all(shape)),
    num_elements=_same_in_all(size),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [(made, False)]


def _empty(
  lanes: Lanes, attr: Any, shape: _Value, size: _Value
) -> list[tuple[tf.Tensor, bool]]:
  made = tf.raw_ops.EmptyTensorList(
    element_shape=_in_front(lanes, _same_in_all(shape)),
    max_num_elements=_same_in_all(size),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [(made, False)]


def _set_item(
  lanes: Lanes, attr: Any, handle: _Value, index: _Value, item: _Value
) -> list[tuple[tf.Tensor, bool]]:
  changed = tf.raw_ops.TensorListSetItem(
    input_handle=handle.tensor,
    index=_same_in_all(index),
    item=lanes.spread(item).tensor,
    resize_if_index_out_of_bounds=attr['resize_if_index_out_of_bounds'].b,
  )
  return [(changed, handle.has_lanes or item.has_lanes)]


def _get_item(
  lanes: Lanes, attr: Any, handle: _Value, index: _Value, shape: _Value
) -> list[tuple[tf.Tensor, bool]]:
  item = tf.raw_ops.TensorListGetItem(
    input_handle=handle.tensor,
    index=_same_in_all(index),
    element_shape=_in_front(lanes, _same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [_element(handle, item)]


def _push(
  lanes: Lanes, attr: Any, handle: _Value, item: _Value
) -> list[tuple[tf.Tensor, bool]]:
  del attr
  longer = tf.raw_ops.TensorListPushBack(
    input_handle=handle.tensor, tensor=lanes.spread(item).tensor
  )
  return [(longer, handle.has_lanes or item.has_lanes)]


def _pop(
  lanes: Lanes, attr: Any, handle: _Value, shape: _Value
) -> list[tuple[tf.Tensor, bool]]:
  shorter, item = tf.raw_ops.TensorListPopBack(
    input_handle=handle.tensor,
    element_shape=_in_front(lanes, _same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
  )
  return [(shorter, handle.has_lanes), _element(handle, item)]


def _stack(
  lanes: Lanes, attr: Any, handle: _Value, shape: _Value
) -> list[tuple[tf.Tensor, bool]]:
  stacked = tf.raw_ops.TensorListStack(
    input_handle=handle.tensor,
    element_shape=_in_front(lanes, _same_in_all(shape)),
    element_dtype=tf.as_dtype(attr['element_dtype'].type),
    num_elements=attr['num_elements'].i,
  )
  return [_element(handle, _swapped(stacked))]


def _from_tensor(
  lanes: Lanes, attr: Any, tensor: _Value, shape: _Value
) -> list[tuple[tf.Tensor, bool]]:
  del attr
  made = tf.raw_ops.TensorListFromTensor(
    tensor=_swapped(lanes.spread(tensor).tensor),
    element_shape=_in_front(lanes, _same_in_all(shape)),
  )
  return [(made, tensor.has_lanes)]


def _length(
  lanes: Lanes, attr: Any, handle: _Value
) -> list[tuple[tf.Tensor, bool]]:
  del lanes, attr
  return [(tf.raw_ops.TensorListLength(input_handle=handle.tensor), False)]


def _element_shape(
  lanes: Lanes, attr: Any, handle: _Value
) -> list[tuple[tf.Tensor, bool]]:
  del lanes
  shape = tf.raw_ops.TensorListElementShape(
    input_handle=handle.tensor,
    shape_type=tf.as_dtype(attr['shape_type'].type),
  )
  return [(shape[1:], False)]


_LISTS = {
  'EmptyTensorList': _list_operation(_empty),
  'TensorListElementShape': _list_operation(_element_shape),
  'TensorListFromTensor': _list_operation(_from_tensor),
  'TensorListGetItem': _list_operation(_get_item),
  'TensorListLength': _list_operation(_length),
  'TensorListPopBack': _list_operation(_pop),
  'TensorListPushBack': _list_operation(_push),
  'TensorListReserve': _list_operation(_reserve),
  'TensorListSetItem': _list_operation(_set_item),
  'TensorListStack': _list_operation(_stack),
}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """TensorFlow logs what it cannot vectorize, for which there is a remedy."""
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel(logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(level)


def _read(nodes: Mapping[str, Any]) -> list[str]:
  """The tensors from elsewhere that nodes read, each once."""
  return list(
    dict.fromkeys(
      name
      for node in nodes.values()
      for name in data_inputs(node)
      if operations.source(name) not in nodes
    )
  )


def _imported(
  nodes: Mapping[str, Any],
  given: Mapping[str, tf.Tensor],
  wanted: Sequence[str],
) -> list[tf.Tensor]:
  """Builds nodes in the current graph."""
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
    # A function does not know the tensors of those around it.
    input_map={name: tf.identity(tensor) for name, tensor in given.items()},
    return_elements=list(wanted),
    name='lanes',
  )


def _selected(
  mask: tf.Tensor, new: Sequence[_Value], old: Sequence[_Value]
) -> list[_Value]:
  """New values in the lanes of a mask, old ones elsewhere."""
  selected = []
  for one, other in zip(new, old, strict=True):
    if one.tensor.dtype == tf.variant:
      raise UnfitForLanesError('lanes would need lists of different lengths')
    tensor = tf.raw_ops.Select(condition=mask, x=one.tensor, y=other.tensor)
    tensor.set_shape(one.tensor.shape)
    selected.append(_Value(tensor, True))
  return selected


def _loop_shapes(
  node: tf.compat.v1.NodeDef, varying: Sequence[int], first: Sequence[_Value]
) -> list[tf.TensorShape]:
  """The shapes that the variables of a loop keep."""
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
  """Tensors whose shapes importing lost."""
  for tensor, shape in zip(tensors, shapes, strict=True):
    if tensor.dtype != tf.variant:
      tensor.set_shape(shape)
  return list(tensors)


def _input_type(node: tf.compat.v1.NodeDef, place: int) -> int:
  """The dtype of an input."""
  argument = operations.definition(node).input_arg[place]
  return argument.type or node.attr[argument.type_attr].type
