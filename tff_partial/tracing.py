"""Tracing functions that use Keras, and reading the graphs that come of it."""

from collections.abc import Callable, Iterator, Sequence
import itertools
from typing import Any

import tensorflow as tf

from tff_partial.keras_variables import ModelError

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
  outside = tf.__internal__.autograph.control_status_ctx()

  def unconverted(*args: Any) -> Any:
    with outside:  # Where Keras has not been told to convert nothing.
      return fn(*args)

  return tf.function(unconverted, autograph=False).get_concrete_function(*specs)


def placeholder(spec: tf.TensorSpec) -> tf.Tensor:
  """A tensor of a batch of examples, for tracing."""
  return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape])


def operations(graph: Any) -> Iterator[tuple[str, str]]:
  """Name and type of the operations of a graph and of its functions."""
  definition = graph.as_graph_def()
  nodes = [definition.node]
  nodes += [function.node_def for function in definition.library.function]
  for node in itertools.chain(*nodes):
    yield node.name, node.op


def depends_on(tensors: Sequence[tf.Tensor], sources: Sequence[Any]) -> bool:
  """Says whether any of the tensors is computed from any of the sources."""
  seen = set()
  stack = [t.op for t in tensors if tf.is_tensor(t)]
  wanted = {id(source.op) for source in sources}
  while stack:
    operation = stack.pop()
    if id(operation) in seen:
      continue
    seen.add(id(operation))
    if id(operation) in wanted:
      return True
    stack.extend(tensor.op for tensor in operation.inputs)
  return False


def refuse_hidden_draws(graph: Any) -> None:
  """Raises an error if a traced model draws from a hidden generator."""
  for name, kind in operations(graph):
    if kind in _DRAWS:
      raise ModelError(
        f'The operation {name!r} ({kind}) draws random numbers from hidden '
        "state, so that a run could not be repeated. Use Keras's own "
        "initializers and random layers, created in the model's constructor."
      )
