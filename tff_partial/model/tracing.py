"""Tracing of functions that use Keras, and reading of their graphs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import hashlib
import itertools
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.model.keras_variables import ModelError

# Operations that draw numbers from hidden state.
_DRAWS = (
  'RandomUniform',
  'RandomUniformInt',
  'RandomStandardNormal',
  'TruncatedNormal',
  'ParameterizedTruncatedNormal',
  'RandomShuffle',
  'RandomGamma',
  'RandomPoisson',
  'RandomPoissonV2',
  'Multinomial',
  'NonDeterministicInts',
  'StatefulUniform',
  'StatefulUniformInt',
  'StatefulUniformFullInt',
  'StatefulStandardNormal',
  'StatefulStandardNormalV2',
  'StatefulTruncatedNormal',
  'StatefulRandomBinomial',
  'RngReadAndSkip',
)

# A line of a stack that names what was raised, and what Keras adds to it.
_RAISED = re.compile(r'\w*(Error|Exception): ')
_CALLING = 'Exception encountered when calling'
_RECEIVED = 'rguments received by'
_STACK, _NODE = 'Graph execution error', '[[{{node'

# Name scope of operations whose shapes follow from data, which XLA refuses.
DYNAMIC = 'dynamic_shapes'

# Operations that compute with all numbers along the last axis.
_ALONG_LAST = ('Softmax', 'LogSoftmax', 'TopKV2')
# Operations that compute number by number, where a single one is repeated.
_NUMBER_BY_NUMBER = """
  Add AddV2 Sub Mul FloorDiv FloorMod Maximum Minimum Equal NotEqual Less
  LessEqual Greater GreaterEqual LogicalAnd LogicalOr Select SelectV2
""".split()

# Operations whose results depend only on the shapes of what they read.
_OF_SHAPES = ('Shape', 'ShapeN', 'Size', 'Rank', 'ZerosLike', 'OnesLike')


def traced(fn: Callable[..., Any], *specs: Any) -> Any:
  """Trace a function under eager execution, without AutoGraph.

  Our functions need no conversion, which would take longer than the tracing.
  Keras still converts users' code itself, as usual.
  """
  return unconverted(fn).get_concrete_function(*specs)


def unconverted(fn: Callable[..., Any]) -> Any:
  """Make a graph function without AutoGraph, in which Keras works as usual."""
  outside = tf.__internal__.autograph.control_status_ctx()

  def call(*args: Any) -> Any:
    with keras_scope(outside):
      return fn(*args)

  return tf.function(call, autograph=False)


@contextlib.contextmanager
def keras_scope(outside: Any) -> Iterator[None]:
  """Let a function that is traced without AutoGraph use Keras.

  Eager tensors are constants of the function, and the AutoGraph status is
  another: if AutoGraph is disabled, Keras breaks the operators of functional
  models, which then cannot be saved.

  Args:
    outside: The AutoGraph status of the place where the function was made.
  """
  _hold_constants(tf.compat.v1.get_default_graph())
  with outside:
    yield


def _hold_constants(graph: Any) -> None:
  """Turn the eager tensors that a function reads into constants.

  They would otherwise become inputs, which TFF's computations do not have.
  """
  capture = graph.capture
  constants: dict[int, tuple[Any, tf.Tensor]] = {}

  def hold(tensor: Any, name: str | None = None, shape: Any = None) -> Any:
    is_value = isinstance(tensor, tf.__internal__.EagerTensor)
    if not is_value or tensor.dtype in (tf.resource, tf.variant):
      return capture(tensor, name=name, shape=shape)
    if id(tensor) not in constants:
      with graph.as_default(), tf.control_dependencies(None):
        constants[id(tensor)] = tensor, tf.constant(tensor.numpy())
    return constants[id(tensor)][1]

  graph.capture = hold


def without_assertions(
  function: Any, num_inputs: int
) -> Callable[..., list[tf.Tensor]]:
  """Make a function that computes the same outputs, and nothing else.

  `num_inputs` is the maximum number of inputs that the traced function needs.
  """
  wanted = function.outputs
  inputs = function.inputs[:num_inputs]
  sources = {operation.name for operation in _sources(wanted)}
  definition = function.graph.as_graph_def()
  nodes = list(definition.node)
  del definition.node[:]
  for node in nodes:
    if node.name in sources and node.op != 'Placeholder':
      operands = [name for name in node.input if not name.startswith('^')]
      del node.input[:]
      node.input.extend(operands)
      definition.node.append(node)

  def run(*flat: tf.Tensor) -> list[tf.Tensor]:
    return tf.graph_util.import_graph_def(
      definition,
      input_map={
        tensor.name: value
        for tensor, value in zip(inputs, flat, strict=True)
        if tensor.op.name in sources
      },
      return_elements=[tensor.name for tensor in wanted],
      name='part',
    )

  return run


def value_of(
  tensor: tf.Tensor, feeds: Mapping[str, Any] | None = None
) -> np.ndarray:
  """Compute a tensor of a graph from values of placeholders, by name."""
  with tf.compat.v1.Session(graph=tensor.graph) as session:
    return np.asarray(session.run(tensor.name, feeds))


def reason(error: Exception) -> str:
  """Return the message of a TensorFlow or Keras error in one line."""
  # AutoGraph adds lines before the message, others add lines after it; Keras 3
  # prints it in bold.
  text = str(error).replace('\x1b[1m', '').replace('\x1b[0m', '')
  lines = [line.strip() for line in text.split('\n') if line.strip()]
  lines = list(itertools.takewhile(lambda line: _RECEIVED not in line, lines))
  if any(line.startswith('in user code') for line in lines):
    raised = [i for i, line in enumerate(lines) if _RAISED.match(line)]
    lines = lines[raised[-1] if raised else -1 :]
  # A stack of operations comes before what failed, and its node after it.
  nodes = [i for i, line in enumerate(lines) if line.startswith(_NODE)]
  if nodes and lines[0].startswith(_STACK):
    lines = lines[nodes[0] - 1 :]
  told = [line for line in lines if _CALLING not in line] or lines
  line, *_ = told or [type(error).__name__]
  return line if line.endswith('.') else f'{line}.'


def placeholder(spec: tf.TensorSpec, size: int | None = None) -> tf.Tensor:
  """Make a placeholder for a batch of examples, of open or known size."""
  return tf.compat.v1.placeholder(spec.dtype, [size, *spec.shape])


def one_example(specs: Any, value: float = 0.0) -> Any:
  """Return a batch of one example of equal numbers; open axes have length 1."""

  def filled(spec: tf.TensorSpec) -> tf.Tensor:
    shape = [n or 1 for n in [1, *spec.shape]]
    if not value:
      return tf.zeros(shape, spec.dtype)
    return tf.cast(tf.fill(shape, value), spec.dtype)

  return tf.nest.map_structure(filled, specs)


def broadcasts_over(operation: tf.Operation, size: int) -> bool:
  """Return true if an operation broadcasts a batch against a batch."""
  of = [
    tensor.shape
    for tensor in operation.inputs
    if tensor.shape.rank and list(tensor.shape).count(size) == 1
  ]
  return len({shape.rank for shape in of}) > 1 and any(
    tensor.shape.rank and list(tensor.shape).count(size) > 1
    for tensor in operation.outputs
  )


def operations(graph: Any) -> Iterator[tuple[str, str]]:
  """Yield name and type of each operation of a graph and its functions."""
  definition = graph.as_graph_def()
  nodes = [definition.node]
  nodes += [function.node_def for function in definition.library.function]
  for node in itertools.chain(*nodes):
    yield node.name, node.op


def constants_of(graph: Any) -> frozenset[bytes]:
  """Return digests of the constant arrays of floats in a graph."""
  held = [op for op in graph.get_operations() if op.type == 'Const']
  return frozenset(
    hashlib.sha256(value.SerializeToString(deterministic=True)).digest()
    for value in (op.get_attr('value') for op in held)
    if value.tensor_shape.dim and tf.DType(value.dtype).is_floating
  )


def _sources(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
  """Return all operations that tensors are computed with."""
  found = {}
  stack = [tensor.op for tensor in tensors if tf.is_tensor(tensor)]
  while stack:
    operation = stack.pop()
    if id(operation) not in found:
      found[id(operation)] = operation
      stack.extend(tensor.op for tensor in operation.inputs)
  return list(found.values())


def depends_on(tensors: Sequence[tf.Tensor], sources: Sequence[Any]) -> bool:
  """Return true if any of the tensors is computed from any of the sources."""
  wanted = {id(source.op) for source in sources}
  return any(id(operation) in wanted for operation in _sources(tensors))


def first_dependent(
  tensors: Sequence[tf.Tensor], sources: Sequence[Any], prefix: str = ''
) -> tf.Operation | None:
  """Return an operation through which tensors depend on values of sources.

  Operations that read only the shapes of sources do not count. Of several on
  the path from the tensors to a source, it is the last whose name begins with
  `prefix`; None if the tensors do not depend on the sources.
  """
  wanted = {id(source.op) for source in sources}
  found = set()
  stack = [(tensor.op, tensor.op) for tensor in tensors]
  while stack:
    operation, named = stack.pop()
    if id(operation) in found or operation.type in _OF_SHAPES:
      continue
    found.add(id(operation))
    if operation.name.startswith(prefix):
      named = operation
    if any(id(tensor.op) in wanted for tensor in operation.inputs):
      return named
    stack.extend((tensor.op, named) for tensor in operation.inputs)
  return None


def first_joining(
  tensors: Sequence[tf.Tensor], sources: Sequence[Any]
) -> tf.Operation | None:
  """Return the first operation that computes with all examples of a batch.

  The shape of numbers that are computed for each example is open, as long as
  the number of examples is. A whole number of closed shape may be a size, such
  as that of the longest list, unless numbers of each example meet it.

  Args:
    tensors: What is computed for each example.
    sources: Placeholders of a batch of open size.
  """
  needed = {
    id(tensor) for operation in _sources(tensors) for tensor in operation.inputs
  }.union(map(id, tensors))
  for operation in sources[0].graph.get_operations() if sources else ():
    if any(
      id(tensor) in needed
      and _is_of_all(tensor)
      and first_dependent([tensor], sources) is not None
      for tensor in operation.outputs
    ):
      return operation
  return None


def _is_of_all(tensor: tf.Tensor) -> bool:
  """Return true if a tensor of examples is computed from all of them."""
  operation = tensor.op
  if operation.type in _ALONG_LAST:
    # The batch is the only open axis, and the last.
    shape = operation.inputs[0].shape
    are_open = [size is None for size in shape] if shape.rank else [False]
    if are_open[-1] and not any(are_open[:-1]):
      return True
  if not tensor.shape.is_fully_defined():
    return False
  return tensor.dtype.is_floating or any(
    user.type in _NUMBER_BY_NUMBER
    and not all(read.shape.is_fully_defined() for read in user.inputs)
    for user in tensor.consumers()
  )


def refuse_hidden_draws(graph: Any, constants: frozenset[bytes]) -> None:
  """Refuse a traced model that draws by itself, or without its `constants`."""
  if constants - constants_of(graph):
    raise ModelError(
      'The model has an array of other numbers each time that it is built. '
      'Draw it outside the callable given to `from_keras`, or as a weight, '
      '`self.add_weight(..., trainable=False)`, which follows from a seed.'
    )
  for name, kind in operations(graph):
    if kind in _DRAWS:
      raise ModelError(
        f'The operation {name!r} ({kind}) draws random numbers from hidden '
        "state, so that a run could not be repeated. Use Keras's own "
        "initializers and random layers, created in the model's constructor."
      )
