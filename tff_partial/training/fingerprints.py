"""Fingerprints of computations that do not depend on the process.

A run that is resumed must be the run that was started. Serialized graphs cannot
be compared for that: names and order in them depend on earlier traces. A
fingerprint is made of their operations: the type of each, its attributes,
constants such as learning rates, and the fingerprints of what it reads.
"""

from collections.abc import Iterable, Iterator, Mapping
import graphlib
import hashlib
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.dp import mechanisms
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import typed_values

# Precedes the digits; older versions, which told operations by less, had none.
FORM = 'reads '
# Attributes that name or place operations but do not change their results.
_IDLE_ATTRIBUTES = frozenset(
  ('config', 'config_proto', 'container', 'executor_type', 'shared_name')
)


def of_computations(*computations: tff.Computation) -> str:
  """Return the fingerprint of computations in their order."""
  parts = []
  for computation in computations:
    parts.append(computation.type_signature.compact_representation().encode())
    for leaf in _leaves(computation.to_building_block()):
      program = leaf.proto.tensorflow
      graph = tf.compat.v1.GraphDef()
      program.graph_def.Unpack(graph)
      names = leaves.tensor_names(program.parameter)
      results = typed_values.leaves(leaves.tensor_names(program.result))
      arguments = [name.split(':')[0] for name in typed_values.leaves(names)]
      parts.append(_Functions(graph).of_body(graph.node, arguments, results))
  return FORM + _hashed(parts)


def _leaves(block: Any) -> list[tff.framework.CompiledComputation]:
  """Return the graphs in a program, in its order."""
  found = []

  def look(inner: Any) -> tuple[Any, bool]:
    if isinstance(inner, tff.framework.CompiledComputation):
      found.append(inner)
    return inner, False

  tff.framework.transform_postorder(block, look)
  return found


class _Functions:
  """Fingerprints of the functions in a graph, by their names."""

  def __init__(self, graph: tf.compat.v1.GraphDef):
    self._functions = {f.signature.name: f for f in graph.library.function}
    self._prints: dict[str, str] = {}

  def _of_function(self, name: str) -> str:
    if name not in self._prints:
      function = self._functions[name]
      signature = function.signature
      arguments = [argument.name for argument in signature.input_arg]
      results = [function.ret[result.name] for result in signature.output_arg]
      self._prints[name] = self.of_body(function.node_def, arguments, results)
    return self._prints[name]

  def of_body(
    self, nodes: Iterable[Any], arguments: Iterable[str], results: Iterable[str]
  ) -> str:
    """Return the fingerprint of a graph or of a function's body.

    Args:
      nodes: Its operations.
      arguments: Names of its arguments, in their order.
      results: Names of its results, in their order.
    """
    prints = {name: f'argument {n}' for n, name in enumerate(arguments)}
    by_name = {node.name: node for node in nodes if node.name not in prints}
    reads = {
      name: set(map(_source, node.input)) & by_name.keys()
      for name, node in by_name.items()
    }
    for name in graphlib.TopologicalSorter(reads).static_order():
      prints[name] = _hashed(self._operation(by_name[name], prints))
    ends = [_read(name, prints) for name in results]
    return _hashed([*sorted(prints.values()), *ends])

  def _operation(self, node: Any, prints: Mapping[str, str]) -> Iterator[Any]:
    if mechanisms.SECRET in node.name:
      return
    yield node.op
    # Those with a ^ only come before it, in an order that is not kept.
    reads = [_read(name, prints) for name in node.input]
    yield from sorted(reads, key=lambda read: read if read[0] == '^' else '')
    for name, value in sorted(node.attr.items()):
      if name.startswith('_') or name in _IDLE_ATTRIBUTES:
        continue
      yield name
      called = [value.func] if value.HasField('func') else value.list.func
      if called:
        yield from (self._of_function(function.name) for function in called)
      else:
        yield value.SerializeToString(deterministic=True)


def _source(read: str) -> str:
  """Return the operation of an input: `b` of `^b`, `b:1` and `b:output:0`."""
  return read.lstrip('^').split(':')[0]


def _read(name: str, prints: Mapping[str, str]) -> str:
  """Return an input, or a result, with a fingerprint for its operation."""
  source = _source(name)
  return name.replace(source, prints[source], 1)


def _hashed(parts: Iterable[str | bytes]) -> str:
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    encoded = part.encode() if isinstance(part, str) else part
    digest.update(len(encoded).to_bytes(8, 'big') + encoded)
  return digest.hexdigest()
