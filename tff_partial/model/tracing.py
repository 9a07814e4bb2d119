"""Tracing functions that use Keras, and reading the graphs that come of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
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


def traced(fn: Callable[..., Any], *specs: Any) -> Any:
  """Traces a function under eager execution, without AutoGraph.

  Our functions need no conversion, which would take longer than the tracing.
  Keras by itself converts what users wrote, here as anywhere else.
  """

  def hold_and_call(*args: Any) -> Any:
    _hold_constants(tf.compat.v1.get_default_graph())
    return fn(*args)

  return unconverted(hold_and_call).get_concrete_function(*specs)


def unconverted(fn: Callable[..., Any]) -> Any:
  """A graph function without AutoGraph, in which Keras is as anywhere else."""
  outside = tf.__internal__.autograph.control_status_ctx()

  def call(*args: Any) -> Any:
    # Where Keras has not been told to convert nothing. If it has, it spoils the
    # operators that functional models are made of: they can no more be saved.
    with outside:
      return fn(*args)

  return tf.function(call, autograph=False)


def _hold_constants(graph: Any) -> None:
  """Make a function's constants of the eager tensors that it reads.

  It would otherwise ask for them as inputs, which TFF's computations have not.
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
  """Make a function that computes the same, and nothing but the outputs.

  Args:
    function: What `traced` returned.
    num_inputs: How many inputs it needs, at most.
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
  """Compute a tensor of a graph.

  Args:
    tensor: The tensor.
    feeds: Values of others by their names, such as those of placeholders.

  Raises:
    OpError: If it depends on a placeholder without a value.
  """
  with tf.compat.v1.Session(graph=tensor.graph) as session:
    return np.asarray(session.run(tensor.name, feeds))


def reason(error: Exception) -> str:
  """What an error of TensorFlow or Keras says, in one line."""
  # What AutoGraph adds comes before the message, other remarks after it.
  lines = [line.strip() for line in str(error).split('\n') if line.strip()]
  lines = lines or [type(error).__name__]
  if lines[0].startswith('Exception encountered when calling layer'):
    rest = itertools.takewhile(
      lambda line: not line.startswith('Call arguments received'), lines[1:]
    )
    lines = list(rest) or lines
  line = lines[-1 if lines[0].startswith('in user code') else 0]
  return line if line.endswith('.') else f'{line}.'


def placeholder(spec: tf.TensorSpec, size: int | None = None) -> tf.Tensor:
  """A tensor of a batch of examples, of open or known size, for tracing."""
  return tf.compat.v1.placeholder(spec.dtype, [size, *spec.shape])


def broadcasts_over(operation: tf.Operation, size: int) -> bool:
  """Whether an operation sets a batch against a batch by broadcasting.

  Args:
    operation: The operation.
    size: The size of the batch, which no other axis has.
  """
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
  """Name and type of the operations of a graph and of its functions."""
  definition = graph.as_graph_def()
  nodes = [definition.node]
  nodes += [function.node_def for function in definition.library.function]
  for node in itertools.chain(*nodes):
    yield node.name, node.op


def _sources(tensors: Sequence[tf.Tensor]) -> list[tf.Operation]:
  """All operations that tensors are computed with."""
  found = {}
  stack = [tensor.op for tensor in tensors if tf.is_tensor(tensor)]
  while stack:
    operation = stack.pop()
    if id(operation) not in found:
      found[id(operation)] = operation
      stack.extend(tensor.op for tensor in operation.inputs)
  return list(found.values())


def depends_on(tensors: Sequence[tf.Tensor], sources: Sequence[Any]) -> bool:
  """Says whether any of the tensors is computed from any of the sources."""
  wanted = {id(source.op) for source in sources}
  return any(id(operation) in wanted for operation in _sources(tensors))


def refuse_hidden_draws(graph: Any) -> None:
  """Raise an error if a traced model draws from a hidden generator."""
  for name, kind in operations(graph):
    if kind in _DRAWS:
      raise ModelError(
        f'The operation {name!r} ({kind}) draws random numbers from hidden '
        "state, so that a run could not be repeated. Use Keras's own "
        "initializers and random layers, created in the model's constructor."
      )
