"""One call of a computation: server stages and loops, in turn.

A `CompiledComputation` is made once per computation and called every round.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
import contextlib
import dataclasses
import threading
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import client_batch
from tff_partial.runtimes import client_inputs
from tff_partial.runtimes import client_loop
from tff_partial.runtimes import compiled_loop
from tff_partial.runtimes import debugging
from tff_partial.runtimes import flat_program
from tff_partial.runtimes import jit_autotuning
from tff_partial.runtimes import loop_inputs
from tff_partial.runtimes import readers
from tff_partial.runtimes import schedule
from tff_partial.runtimes import sequences
from tff_partial.runtimes import sharding
from tff_partial.runtimes import typed_values

Key: TypeAlias = flat_program.Key
# Each call of TensorFlow takes time, and each accumulator that waits for the
# others takes memory.
_MERGED_AT_ONCE = 4

# For each client value that outlives its loop, its leaves, shard by shard.
Outputs: TypeAlias = dict[Key, list[list[Any]]]


@dataclasses.dataclass(frozen=True)
class Resources:
  """What all computations of a context share.

  Attributes:
    arrays: Resident arrays, on the device.
    chooser: Decides which loops XLA compiles.
    pool: Runs shards side by side; None for one after the other.
    debug: Whether clients run one by one, checked step by step.
  """

  arrays: client_inputs.DeviceArrays
  chooser: jit_autotuning.Chooser
  pool: futures.Executor | None
  debug: bool


class CompiledComputation:
  """A computation in parts, which are compiled when they are first needed."""

  def __init__(self, computation: tff.Computation):
    """Reads a computation.

    Args:
      computation: Any computation.

    Raises:
      UnsupportedComputationError: If it has parts that cannot be compiled.
    """
    self._program = flat_program.Program(computation)
    self._plan = schedule.Plan(self._program)
    # Two threads that call the same must not share its variables.
    self._turn: contextlib.AbstractContextManager[Any] = (
      contextlib.nullcontext()
    )
    if any(step.owns_resources for step in self._program.steps.values()):
      self._turn = threading.Lock()
    parameter = computation.type_signature.parameter
    self._reader = readers.Reader(
      tff.StructType([]) if parameter is None else parameter
    )

  def __call__(
    self,
    argument: Any,
    convert: Callable[[Iterator[Any]], Any],
    resources: Resources,
  ) -> Any:
    """Runs the computation.

    Args:
      argument: The argument, as TFF hands it to a context.
      convert: Puts leaves into the containers of the result: equal computations
        share a program, but may differ in these.
      resources: What to run it with.
    """
    with self._turn:
      values = self._values(argument, resources)
    nested = self._program.evaluate(self._program.result, values)
    return convert(map(_to_numpy, typed_values.leaves(nested)))

  def _values(
    self, argument: Any, resources: Resources
  ) -> dict[Key, typed_values.Nested]:
    """All values at the server in the end, and those of clients returned."""
    values, clients = self._open(argument, resources.arrays)
    shards = sharding.cut(clients, self._program.shows_order)
    outputs: Outputs = {}
    totals: Sequence[tf.Tensor] = []
    for number, stage in enumerate(self._plan.stages):
      computed, totals = stage(values, totals)
      values.update(computed)
      if number < len(self._plan.loops) and shards:
        name = f'{self._program.fingerprint}/{number}'
        client_stage = _ClientStage(
          name, self._plan.loops[number], values, outputs, totals, resources
        )
        totals = client_stage.run(shards)
    for key in self._plan.client_results:
      values[key] = self._of_clients(key, shards, outputs)
    return values

  def _open(
    self, argument: Any, arrays: client_inputs.DeviceArrays
  ) -> tuple[dict[Key, typed_values.Nested], dict[str, client_inputs.Clients]]:
    """Values at the server, and arguments with a value for each client."""
    values, clients = {}, {}
    for part in self._program.arguments.values():
      value, reader = argument, self._reader
      for index in part.key[1:]:
        value = reader.open(value, 'the arguments')[index]
        reader = reader.elements[index][1]
      if part.is_at_clients:
        clients[part.name] = client_inputs.open_argument(
          value, reader, part.name, arrays
        )
      else:
        nested = reader(value, part.name)
        values[part.key] = typed_values.like(
          nested, map(_to_tensor, typed_values.leaves(nested))
        )
    return values, clients

  def _of_clients(
    self, key: Key, shards: Sequence[sharding.Shard], outputs: Outputs
  ) -> typed_values.ClientValues:
    """A client value of the whole cohort, in its order."""
    positions = [shard.positions for shard in shards]
    size = sum(map(len, positions))
    specs = typed_values.tensor_specs(self._program.type_of(key))
    parts = outputs.get(key, ())
    return typed_values.ClientValues(
      size,
      [
        client_batch.gather(
          spec, [leaves[place].numpy() for leaves in parts], positions, size
        )
        for place, spec in enumerate(specs)
      ],
    )


@dataclasses.dataclass(frozen=True)
class _ClientStage:
  """One loop over the whole cohort, shard by shard.

  Attributes:
    name: A name of the loop that is the same in every process.
    loop: The loop.
    values: All values at the server.
    outputs: What loops have returned; this one adds to it.
    zeros: The leaves of the first accumulators, for each shard.
    resources: What to run it with.
  """

  name: str
  loop: client_loop.ClientLoop
  values: flat_program.Values
  outputs: Outputs
  zeros: Sequence[tf.Tensor]
  resources: Resources

  def run(self, shards: Sequence[sharding.Shard]) -> Sequence[tf.Tensor]:
    """Runs all shards; returns the merged accumulators."""
    numbers = range(len(shards))
    run: Callable[..., Iterable[compiled_loop.Results]] = map
    may_share = not (self.resources.debug or self.loop.owns_resources)
    if self.resources.pool is not None and may_share and len(shards) > 1:
      run = self.resources.pool.map
    unmerged: list[Sequence[tf.Tensor]] = []
    # Merged in the order of the shards, whichever is done first.
    for totals, returned in run(self._shard, shards, numbers):
      unmerged.append(totals)
      if len(unmerged) == _MERGED_AT_ONCE:
        unmerged = [self.loop.merge(unmerged)]
      for key, leaves in returned.items():
        self.outputs.setdefault(key, []).append(leaves)
    return self.loop.merge(unmerged)

  def _shard(self, shard: sharding.Shard, number: int) -> compiled_loop.Results:
    loop = self.loop
    kept = {key: self.outputs[key][number] for key in loop.kept}
    feeds = shard.feeds()
    inputs = loop_inputs.Inputs(self.values, kept, feeds, self.zeros)
    one_by_one = debugging.OneByOne(loop, shard, inputs)
    if self.resources.debug:
      return one_by_one.run()
    signature = loop_inputs.signature_of(feeds, shard.bucket)
    with one_by_one.explaining():
      compiled = self.resources.chooser.compiled(
        self.name, loop, signature, lambda: inputs.flat(loop, 1)
      )
      return compiled(inputs.flat(loop, len(shard)))


def _to_tensor(leaf: Any) -> tf.Tensor:
  if isinstance(leaf, sequences.Elements):
    return leaf.dataset()
  return tf.convert_to_tensor(leaf)


def _to_numpy(leaf: Any) -> Any:
  return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf
