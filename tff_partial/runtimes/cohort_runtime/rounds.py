"""Calls of a computation: server stages and loops, in turn.

A `CompiledComputation` is made once per computation and called every round.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import threading
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import merging
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import compiled_loop
from tff_partial.runtimes.cohort_runtime import failing_clients
from tff_partial.runtimes.cohort_runtime import jit_autotuning
from tff_partial.runtimes.cohort_runtime import loop_inputs
from tff_partial.runtimes.cohort_runtime import schedule
from tff_partial.runtimes.cohort_runtime import sharding
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import client_inputs
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import sources
from tff_partial.runtimes.values import typed_values

Key: TypeAlias = flat_program.Key

# A context keeps the programs of so many computations: an experiment has about
# four, and each takes some ten megabytes or more.
MOST_PROGRAMS = 32

# For each client value that outlives its loop, its leaves, shard by shard, or
# their source.
Outputs: TypeAlias = dict[Key, list[Any]]
# The same for one shard: a list of leaves, or a `sources.Source`.
Returned: TypeAlias = dict[Key, Any]


@dataclasses.dataclass(frozen=True)
class Resources:
  """Resources that all computations of a context share.

  Attributes:
    arrays: Resident arrays, on the device.
    chooser: Decides which loops XLA compiles.
    pool: Runs shards in parallel; None for one after the other.
    workers: Other processes that run shards, as `ray_workers` has them; None
      if there are none.
  """

  arrays: client_feeds.DeviceArrays
  chooser: jit_autotuning.Chooser
  pool: futures.Executor | None = None
  workers: Any = None


class CompiledComputation:
  """Computation in parts, which are compiled when first needed.

  Attributes:
    program: The program of the computation.
    loops: Its loops over clients.
  """

  def __init__(self, computation: tff.Computation):
    """Read a computation.

    Raises:
      UnsupportedComputationError: If it has parts that cannot be compiled.
    """
    self._computation = computation
    self.program = flat_program.Program(computation)
    self._plan = schedule.Plan(self.program)
    self.loops = self._plan.loops
    # Two threads that call it must not share its variables.
    self._turn: contextlib.AbstractContextManager[Any] = (
      contextlib.nullcontext()
    )
    if any(step.owns_resources for step in self.program.steps.values()):
      self._turn = threading.Lock()
    parameter = computation.type_signature.parameter
    self._reader = readers.ValueReader(
      tff.StructType([]) if parameter is None else parameter
    )

  def __call__(
    self,
    argument: Any,
    convert: Callable[[Iterator[Any]], Any],
    resources: Resources,
  ) -> Any:
    """Run the computation.

    Args:
      argument: The argument, as TFF passes it to a context.
      convert: Puts leaves into the containers of the result: equal computations
        share a program, but may differ in these.
      resources: The resources to run it with.
    """
    with self._turn:
      values = self._values(argument, resources)
    nested = self.program.evaluate(self.program.result, values)
    return convert(map(_to_numpy, typed_values.leaves(nested)))

  def _values(
    self, argument: Any, resources: Resources
  ) -> dict[Key, typed_values.Nested]:
    """Compute all values at the server, and the client values returned."""
    values, clients = self._open(argument, resources.arrays)
    shards = sharding.cut(clients, self.program.shows_order)
    outputs: Outputs = {}
    totals: Sequence[tf.Tensor] = []
    for number, stage in enumerate(self._plan.stages):
      computed, totals = stage(values, totals)
      values.update(computed)
      if number < len(self.loops) and shards:
        client_stage = self.client_stage(number, values, totals)
        shares = [
          functools.partial(
            _share,
            shard,
            clients.values(),
            {key: outputs[key][place] for key in client_stage.loop.kept},
          )
          for place, shard in enumerate(shards)
        ]
        if resources.workers is not None and client_stage.may_travel:
          totals, returned = resources.workers.run(
            self._computation, number, client_stage, shares, resources.chooser
          )
        else:
          totals, returned = client_stage.run(shares, resources)
        for of_shard in returned:
          for key, leaves in of_shard.items():
            outputs.setdefault(key, []).append(leaves)
    for key in self._plan.client_results:
      specs = typed_values.tensor_specs(self.program.type_of(key))
      values[key] = sources.Scattered.of(
        specs,
        [_source(part, specs) for part in outputs.get(key, ())],
        [shard.positions for shard in shards],
      )
    return values

  def client_stage(
    self, number: int, values: flat_program.Values, zeros: Sequence[tf.Tensor]
  ) -> 'ClientStage':
    """Return loop `number`, counted from 0, with its inputs in a round."""
    name = f'{self.program.fingerprint}/{number}'
    return ClientStage(name, self.loops[number], values, zeros)

  @functools.cached_property
  def may_be_deposited(self) -> frozenset[Key]:
    """Client results that no other loop reads, with only arrays in them."""
    read = {key for loop in self.loops for key in loop.kept}
    return frozenset(
      key
      for key in self._plan.client_results
      if key not in read
      and all(
        spec.shape.is_fully_defined() and spec.dtype != tf.string
        for spec in typed_values.tensor_specs(self.program.type_of(key))
      )
    )

  def _open(
    self, argument: Any, arrays: client_feeds.DeviceArrays
  ) -> tuple[dict[Key, typed_values.Nested], dict[str, client_inputs.Clients]]:
    """Open values at the server, and arguments with a value per client."""
    values, clients = {}, {}
    for part in self.program.arguments.values():
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


@dataclasses.dataclass(frozen=True)
class Share:
  """Inputs of the loop over one shard that differ between shards.

  Attributes:
    shard: Its clients.
    feeds: Their share of each argument.
    kept: The values that earlier loops kept for them, leaf by leaf, by key; in
      a share that was sent, by place.
  """

  shard: sharding.Shard
  feeds: Sequence[client_feeds.MaybeRead]
  kept: Mapping[Any, Any]


def _share(
  shard: sharding.Shard,
  arguments: Iterable[client_inputs.Clients],
  kept: Mapping[Key, Sequence[Any]],
) -> Share:
  feeds = [each.feed(shard.positions, shard.bucket) for each in arguments]
  return Share(shard, feeds, kept)


@dataclasses.dataclass(frozen=True)
class ClientStage:
  """Loop over clients, shard by shard.

  Attributes:
    name: A name of the loop that is the same in every process.
    loop: The loop.
    values: All values at the server that the loop reads.
    zeros: The leaves of the first accumulators, for each shard.
  """

  name: str
  loop: client_loop.ClientLoop
  values: flat_program.Values
  zeros: Sequence[tf.Tensor]

  @property
  def may_travel(self) -> bool:
    """True if another process may run it: variables and data sets stay."""
    return not (self.loop.owns_resources or self.loop.reads_sequences)

  def run(
    self, shares: Sequence[Callable[[], Share]], resources: Resources
  ) -> tuple[Sequence[tf.Tensor], list[Returned]]:
    """Run all shards in this process.

    Args:
      shares: Build the inputs of each shard, when its turn comes.
      resources: The resources to run them with.

    Returns:
      The merged accumulators, and the outputs of clients, shard by shard.
    """
    run: Callable[..., Iterable[compiled_loop.Results]] = map
    is_shared = self.loop.owns_resources
    if resources.pool is not None and not is_shared and len(shares) > 1:
      run = resources.pool.map
    tree = merging.Tree(self.loop.merge)
    returned = []
    # Merged in the order of the shards, whichever is done first.
    for results in run(lambda share: self._run(share(), resources), shares):
      tree.add(results.totals)
      returned.append(results.outputs)
    return tree.root(), returned

  def _run(self, share: Share, resources: Resources) -> compiled_loop.Results:
    loop, feeds = self.loop, resources.arrays.here(share.feeds)
    inputs = loop_inputs.Inputs(self.values, share.kept, feeds, self.zeros)
    signature = loop_inputs.signature_of(feeds, share.shard.bucket)
    with failing_clients.named(loop, share.shard, inputs):
      compiled = resources.chooser.compiled(
        self.name, loop, signature, lambda: inputs.flat(loop, 1)
      )
      return compiled(inputs.flat(loop, len(share.shard)))


def _source(part: Any, specs: Sequence[tf.TensorSpec]) -> sources.Source:
  """Return the source of a shard's leaves."""
  if isinstance(part, list):
    found = [leaf.numpy() for leaf in part]
    return sources.Held(list(map(sources.stacked, found, specs)))
  return part


def _to_tensor(leaf: Any) -> tf.Tensor:
  if isinstance(leaf, sequences.Elements):
    return leaf.dataset()
  return tf.convert_to_tensor(leaf)


def _to_numpy(leaf: Any) -> Any:
  return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf
