"""Shards that other processes run: what goes there, and what comes back.

A worker is sent a computation once, and the arrays of a population once; in a
round it is sent values of the server, the places of clients in these arrays,
and what clients remember. It merges what its shards leave as the caller would
(see `merging`), and returns one accumulator. How things travel is not known
here: `ray_workers` knows.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import hashlib
import threading
from typing import Any
import weakref

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import client_batch
from tff_partial.runtimes import client_inputs
from tff_partial.runtimes import deposits
from tff_partial.runtimes import flat_program
from tff_partial.runtimes import jit_autotuning
from tff_partial.runtimes import merging
from tff_partial.runtimes import rounds
from tff_partial.runtimes import sharding
from tff_partial.runtimes import typed_values

# Leaves of values by the places of their keys among `Program.keys`: the keys
# themselves differ from process to process.
_ByPlace = Mapping[int, Sequence[Any] | deposits.Deposit]

# What clients of a shard return is left in a file from so many bytes on.
_BYTES_OF_DEPOSIT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Program:
  """A computation as it is sent.

  Attributes:
    key: The same for the same computation, in every process.
    serialized: The computation.
  """

  key: str
  serialized: bytes

  @classmethod
  def of(cls, computation: tff.Computation) -> 'Program':
    """Serialize a computation."""
    proto = tff.framework.serialize_computation(computation)
    serialized = proto.SerializeToString(deterministic=True)
    return cls(hashlib.sha256(serialized).hexdigest(), serialized)

  def computation(self) -> tff.Computation:
    """What was serialized."""
    proto = type(tff.framework.serialize_computation(_nothing))()
    proto.ParseFromString(self.serialized)
    return tff.framework.deserialize_computation(proto)


@tff.tensorflow.computation
def _nothing() -> int:
  return 0


@dataclasses.dataclass(frozen=True)
class Common:
  """What all shards of a loop are given.

  Attributes:
    number: Which loop of the computation, counted from 0.
    values: The values at the server that the loop reads, leaf by leaf.
    zeros: The leaves of the first accumulators.
  """

  number: int
  values: _ByPlace
  zeros: Sequence[Any]

  @classmethod
  def of(cls, stage: rounds.ClientStage, number: int) -> 'Common':
    """Take it from a loop that is about to run."""
    values = {
      key: typed_values.leaves(stage.values[key]) for key in stage.loop.shared
    }
    return cls(
      number,
      by_place(stage.loop.program, values),
      list(map(to_array, stage.zeros)),
    )


@dataclasses.dataclass(frozen=True)
class Answer:
  """What a worker returns for some shards.

  Attributes:
    totals: The leaves of their merged accumulators.
    returned: What their clients return, shard by shard.
    choices: Whether XLA compiles each loop that the worker knows.
    error: What went wrong instead.
  """

  totals: Sequence[Any] = ()
  returned: Sequence[_ByPlace] = ()
  choices: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  error: Exception | None = None


class RemoteArray:
  """A resident array, in a feed: it is sent once, and then by its key.

  Attributes:
    key: The same for the same array.
    where: How a worker finds it.
  """

  def __init__(self, key: int, where: Any, array: np.ndarray):
    self.key, self.where = key, where
    self._array = weakref.ref(array)

  def __reduce__(self) -> tuple[Any, ...]:
    return _Named, (self.key, self.where)

  @property
  def array(self) -> np.ndarray:
    """The array, in the process that sends it."""
    array = self._array()
    if array is None:
      raise ReferenceError('A feed outlived the cohort whose arrays it names.')
    return array


@dataclasses.dataclass(frozen=True)
class _Named:
  """A `RemoteArray` where it arrives."""

  key: int
  where: Any


class RemoteArrays(client_inputs.DeviceArrays):
  """Sends arrays that are the same objects round after round once."""

  def __init__(self, send: Callable[[np.ndarray], Any]):
    """Send nothing yet.

    Args:
      send: Puts an array where workers find it, and says where.
    """
    super().__init__()
    self._send, self._count = send, 0
    self._here = client_inputs.DeviceArrays()

  def _made(self, array: np.ndarray) -> RemoteArray:
    self._count += 1
    return RemoteArray(self._count, self._send(array), array)

  def forget(self) -> None:
    """Send all arrays again: those who had them are gone."""
    self._tensors.clear()

  def keys(self) -> list[int]:
    """Of the arrays that feeds may still name."""
    return [remote.key for _, remote in list(self._tensors.values())]

  def here(
    self, feeds: Sequence[client_inputs.Feed | client_inputs.UnreadFeed]
  ) -> list[client_inputs.Feed]:
    """Feed for a loop that runs in this process."""
    return _with_tensors(
      super().here(feeds),
      RemoteArray,
      lambda remote: self._here.tensor(remote.array),
    )


class ShardWorker:
  """Runs shards for a caller in another process."""

  def __init__(
    self,
    jit: jit_autotuning.Jit,
    strict: bool,
    threads: int,
    lanes: int = 1,
    folder: str | None = None,
  ) -> None:
    """Knows nothing yet.

    Args:
      jit: See `cohort`.
      strict: See `cohort`.
      threads: How many shards run side by side.
      lanes: See `cohort`.
      folder: Where what clients return is left, if it is much; None to return
        all of it.
    """
    self._folder = folder
    self._chooser = jit_autotuning.Chooser(jit, None, strict, threads, lanes)
    self._resources = rounds.Resources(
      client_inputs.DeviceArrays(),
      self._chooser,
      futures.ThreadPoolExecutor(threads) if threads > 1 else None,
      debug=False,
    )
    self._programs: dict[str, rounds.CompiledComputation] = {}
    self._arrays: dict[int, np.ndarray] = {}

  def knows(self, key: str) -> bool:
    """Whether it has a program already."""
    return key in self._programs

  def learn(self, program: Program) -> None:
    """Take a program."""
    self._programs[program.key] = rounds.CompiledComputation(
      program.computation()
    )

  def run(
    self,
    key: str,
    common: Common,
    shares: 'Sequence[Share]',
    choices: Mapping[str, bool],
    fetch: Callable[[Any], np.ndarray],
    keys: Sequence[int],
  ) -> Answer:
    """Run some shards.

    Args:
      key: Of a program that it knows.
      common: What all shards of the loop are given.
      shares: What each of these is given.
      choices: Whether XLA compiles loops, as far as that is decided.
      fetch: Takes an array from where it is said to be.
      keys: Of all arrays that the caller may name again.
    """
    self._chooser.choices.update(choices)
    self._arrays = {k: a for k, a in self._arrays.items() if k in keys}
    compiled = self._programs[key]
    program = compiled.program
    stage = compiled.client_stage(
      common.number,
      {
        name: typed_values.like(program.pattern(name), iter(leaves))
        for name, leaves in by_key(program, common.values).items()
      },
      list(map(to_tensor, common.zeros)),
    )

    def tensor(named: _Named) -> tf.Tensor:
      if named.key not in self._arrays:
        self._arrays[named.key] = fetch(named.where)
      return self._resources.arrays.tensor(self._arrays[named.key])

    lock = threading.Lock()  # Shards may ask for the same array.

    def opened(share: Share) -> rounds.Share:
      feeds = [feed.opened() for feed in share.feeds]
      with lock:
        feeds = _with_tensors(feeds, _Named, tensor)
      return rounds.Share(share.shard, feeds, by_key(program, share.kept))

    totals, returned = stage.run(
      [functools.partial(opened, share) for share in shares], self._resources
    )
    return Answer(
      list(map(to_array, totals)),
      [
        by_place(program, self._deposited(compiled, one, len(share.shard)))
        for one, share in zip(returned, shares, strict=True)
      ],
      dict(self._chooser.choices),
    )

  def _deposited(
    self,
    compiled: rounds.CompiledComputation,
    returned: rounds.Returned,
    clients: int,
  ) -> rounds.Returned:
    """What a shard returns, with what is much of it left in files."""
    if self._folder is None:
      return returned
    found = dict(returned)
    for key in compiled.may_be_deposited & found.keys():
      leaves = [leaf.numpy()[:clients] for leaf in found[key]]
      if sum(leaf.nbytes for leaf in leaves) >= _BYTES_OF_DEPOSIT:
        found[key] = deposits.Deposit.write(self._folder, leaves)
    return found


@dataclasses.dataclass(frozen=True)
class Share:
  """A `rounds.Share` as it travels.

  Attributes:
    shard: Its clients.
    feeds: Their share of each argument.
    kept: What earlier loops kept for them.
  """

  shard: sharding.Shard
  feeds: Sequence[client_inputs.Feed | client_inputs.UnreadFeed]
  kept: _ByPlace

  @classmethod
  def of(cls, share: rounds.Share, program: flat_program.Program) -> 'Share':
    """Make a share ready to travel."""
    kept = by_place(program, share.kept)
    return cls(share.shard, share.feeds, kept)


def by_place(
  program: flat_program.Program,
  values: Mapping[flat_program.Key, Any],
) -> dict[int, Any]:
  """Values as another process knows them, as arrays."""
  return {
    place: _each(to_array, values[key])
    for place, key in enumerate(program.keys)
    if key in values
  }


def by_key(
  program: flat_program.Program, values: _ByPlace
) -> dict[flat_program.Key, Any]:
  """Values of another process, as tensors."""
  return {
    program.keys[place]: _each(to_tensor, leaves)
    for place, leaves in values.items()
  }


def _each(convert: Callable[[Any], Any], leaves: Any) -> Any:
  """Leaves one by one; those in a file stay there."""
  if isinstance(leaves, deposits.Deposit):
    return leaves
  return list(map(convert, leaves))


def joined(
  stage: rounds.ClientStage, answers: Sequence[Answer]
) -> tuple[Sequence[tf.Tensor], list[rounds.Returned]]:
  """What `stage.run` returns, of what workers returned for `blocks`."""
  tree = merging.Tree(stage.loop.merge)
  returned: list[rounds.Returned] = []
  for answer in answers:
    tree.add(list(map(to_tensor, answer.totals)))
    returned.extend(by_key(stage.loop.program, one) for one in answer.returned)
  return tree.root(), returned


def blocks(number: int, workers: int) -> list[range]:
  """Which shards travel together: subtrees of `merging`, one a worker.

  Args:
    number: How many shards there are.
    workers: How many workers.
  """
  size = 1
  while size * 2 * workers <= number:
    size *= 2
  return [
    range(start, min(start + size, number)) for start in range(0, number, size)
  ]


def to_array(leaf: Any) -> Any:
  """A tensor as it travels."""
  if isinstance(leaf, client_batch.Ragged):
    return leaf.mapped(to_array)
  return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def to_tensor(leaf: Any) -> Any:
  """What travelled, as a tensor."""
  if isinstance(leaf, client_batch.Ragged):
    return leaf.mapped(to_tensor)
  return tf.convert_to_tensor(leaf)


def _with_tensors(
  feeds: Sequence[client_inputs.Feed],
  kind: type,
  tensor: Callable[[Any], tf.Tensor],
) -> list[client_inputs.Feed]:
  """Feed with what is of a kind replaced by tensors."""
  return [
    dataclasses.replace(
      feed,
      tensors=[tensor(t) if isinstance(t, kind) else t for t in feed.tensors],
    )
    for feed in feeds
  ]
