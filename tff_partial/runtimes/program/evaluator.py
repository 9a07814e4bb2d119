"""Evaluation of the blocks of a TFF program at one placement.

At the server and at a client every intrinsic means the same: a map calls its
function, a broadcast or a zip passes its argument on. So one evaluator serves
both; only the values of the names differ.
"""

from collections.abc import Callable, Mapping
import hashlib
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes.program import intrinsics
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import typed_values

framework = tff.framework
Block = intrinsics.Block


class Evaluator:
  """Evaluator of blocks, as nested tensors or Python functions over them."""

  def __init__(self) -> None:
    self._leaves: dict[bytes, leaves.Leaf] = {}
    # The block is kept so that its id is not reused.
    self._leaf_of_block: dict[int, tuple[Block, leaves.Leaf]] = {}

  def evaluate(self, block: Block, names: Mapping[str, Any]) -> Any:
    """Return a block's value, given the values of the names in it."""
    if isinstance(block, framework.Reference):
      return names[block.name]
    if isinstance(block, framework.Struct):
      return [self.evaluate(element, names) for element in block]
    if isinstance(block, framework.Selection):
      return self.evaluate(block.source, names)[index_of(block)]
    if isinstance(block, framework.Lambda):
      return self._function(block, names)
    if isinstance(block, framework.Block):
      names = dict(names)
      for name, value in block.locals:
        names[name] = self.evaluate(value, names)
      return self.evaluate(block.result, names)
    if isinstance(block, framework.CompiledComputation):
      return self._leaf(block)
    if isinstance(block, framework.Literal):
      spec = typed_values.leaf_spec(block.type_signature)
      return tf.constant(block.value, spec.dtype)
    if isinstance(block, framework.Call):
      arguments = []
      if block.argument is not None:
        arguments.append(self.evaluate(block.argument, names))
      if isinstance(block.function, framework.Intrinsic):
        return intrinsics.run(block.function, *arguments)
      return self.evaluate(block.function, names)(*arguments)
    raise TypeError(f'No rule for a block of type {type(block).__name__}.')

  def leaves_in(self, block: Block) -> list[leaves.Leaf]:
    """Return the graphs in a block."""
    found = []

    def look(inner: Block) -> tuple[Block, bool]:
      if isinstance(inner, framework.CompiledComputation):
        found.append(self._leaf(inner))
      return inner, False

    framework.transform_postorder(block, look)
    return found

  def _function(
    self, block: tff.framework.Lambda, names: Mapping[str, Any]
  ) -> Callable[..., Any]:
    if block.parameter_name is None:
      return lambda: self.evaluate(block.result, names)
    return lambda argument: self.evaluate(
      block.result, {**names, block.parameter_name: argument}
    )

  def _leaf(self, block: tff.framework.CompiledComputation) -> leaves.Leaf:
    """Return the graph as a function; equal graphs are imported once."""
    if id(block) not in self._leaf_of_block:
      serialized = block.proto.SerializeToString(deterministic=True)
      key = hashlib.sha256(serialized).digest()
      if key not in self._leaves:
        self._leaves[key] = leaves.Leaf(block)
      self._leaf_of_block[id(block)] = block, self._leaves[key]
    return self._leaf_of_block[id(block)][1]


def index_of(selection: tff.framework.Selection) -> int:
  """Return the place of the element that a block selects."""
  if selection.index is not None:
    return selection.index
  fields = typed_values.fields(selection.source.type_signature)
  return [name for name, _ in fields].index(selection.name)
