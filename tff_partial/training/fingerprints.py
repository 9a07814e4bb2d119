"""Fingerprints of computations that do not depend on the process.

A run that is resumed must be the run that was started. Serialized graphs cannot
be compared for that: names and order in them depend on earlier traces. A
fingerprint is made of their operations: the type of each, its attributes, the
types of its inputs, and constants such as learning rates.
"""

from collections.abc import Iterable, Iterator, Mapping
import hashlib
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.dp import mechanisms

# Attributes that name or place operations but do not change their results.
_IDLE_ATTRIBUTES = frozenset(
  ('config', 'config_proto', 'container', 'executor_type', 'shared_name')
)


def of_computations(*computations: tff.Computation) -> str:
  """Return the fingerprint of computations in their order, as hex digits."""
  digest = hashlib.blake2b(digest_size=16)
  for computation in computations:
    digest.update(computation.type_signature.compact_representation().encode())
    for leaf in _leaves(computation.to_building_block()):
      program = leaf.proto.tensorflow
      graph = tf.compat.v1.GraphDef()
      program.graph_def.Unpack(graph)
      for line in sorted(_described(graph)):
        digest.update(line)
  return digest.hexdigest()


def _leaves(block: Any) -> list[tff.framework.CompiledComputation]:
  """Return the graphs in a program, in its order."""
  found = []

  def look(inner: Any) -> tuple[Any, bool]:
    if isinstance(inner, tff.framework.CompiledComputation):
      found.append(inner)
    return inner, False

  tff.framework.transform_postorder(block, look)
  return found


def _described(graph: tf.compat.v1.GraphDef) -> Iterator[bytes]:
  """Yield each operation of a graph and of the functions in it."""
  bodies: list[Iterable[Any]] = [graph.node]
  bodies += [function.node_def for function in graph.library.function]
  for nodes in bodies:
    kinds = {node.name: node.op for node in nodes}
    for node in nodes:
      if mechanisms.SECRET not in node.name:
        yield _operation(node, kinds)


def _operation(node: Any, kinds: Mapping[str, str]) -> bytes:
  parts = [node.op.encode()]
  for name in node.input:
    # A control input starts with ^; a colon precedes the index of the output.
    source = name.lstrip('^').split(':')[0]
    parts.append(kinds.get(source, 'argument').encode())
  for name in sorted(node.attr):
    value = node.attr[name]
    is_function = value.WhichOneof('value') == 'func'
    if not (is_function or name.startswith('_') or name in _IDLE_ATTRIBUTES):
      parts.append(name.encode())
      parts.append(value.SerializeToString(deterministic=True))
  return b'\x1f'.join(parts)
