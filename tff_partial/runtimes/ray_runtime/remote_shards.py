"""Shards that other processes run: their inputs, results and workers.

A worker is sent a computation once, and the arrays of a population once; in a
round it is sent values of the server, the places of clients in these arrays,
and the state of clients. It merges the totals of its shards as the caller would
(see `merging`), and returns one accumulator. `ray_workers` does the transport.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.runtimes import merging
from tff_partial.runtimes.cohort_runtime import jit_autotuning
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.program import serialized
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import typed_values

# Leaves of values by the places of their keys among `Program.keys`: the keys
# themselves differ from process to process.
_ByPlace = Mapping[int, Sequence[Any] | deposits.Deposit]

# Results of a shard are left in a file if they have at least so many bytes.
_BYTES_OF_DEPOSIT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Common:
  """Inputs that all shards of a loop share.

  Attributes:
    number: The number of the loop in the computation, counted from 0.
    values: The values at the server that the loop reads, leaf by leaf.
    zeros: The leaves of the first accumulators.
  """

  number: int
  values: _ByPlace
  zeros: Sequence[Any]

  @classmethod
  def of(cls, stage: rounds.ClientStage, number: int) -> 'Common':
    """Take the inputs of a loop that is about to run."""
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
  """Answer of a worker for some shards.

  Attributes:
    totals: The leaves of their merged accumulators.
    returned: The outputs of their clients, shard by shard.
    choices: Whether XLA compiles each loop that the worker knows.
    error: The error, if the worker failed.
  """

  totals: Sequence[Any] = ()
  returned: Sequence[_ByPlace] = ()
  choices: Mapping[str, bool] = dataclasses.field(default_factory=dict)
  error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class RemoteArray:
  """Resident array in a feed: it is sent once, and then by its key.

  Attributes:
    key: The same for the same array.
    where: A reference by which a worker finds it.
  """

  key: int
  where: Any


class RemoteArrays(client_feeds.DeviceArrays):
  """Arrays that are the same objects in every round, each sent once."""

  def __init__(self, send: Callable[[np.ndarray], Any]):
    """Take `send`, which puts an array where workers find it."""
    super().__init__()
    self._send, self._count = send, 0
    self._here = client_feeds.DeviceArrays()

  def _made(self, array: np.ndarray) -> RemoteArray:
    self._count += 1
    return RemoteArray(self._count, self._send(array))

  def forget(self) -> None:
    """Send all arrays again from now on: the workers that had them are gone."""
    self._tensors.clear()

  def keys(self) -> list[int]:
    """Return the keys of the arrays that feeds may still name."""
    return [remote.key for _, remote in list(self._tensors.values())]

  def here(
    self, feeds: Sequence[client_feeds.MaybeRead]
  ) -> list[client_feeds.Feed]:
    """Open the feeds for a loop that runs in this process."""
    arrays: dict[int, Any] = {
      remote.key: array for array, remote in list(self._tensors.values())
    }
    return _with_tensors(
      super().here(feeds),
      lambda remote: self._here.tensor(arrays[remote.key]()),
    )


class ShardWorker:
  """Worker that runs shards for a caller in another process."""

  def __init__(
    self, jit: jit_autotuning.Jit, strict: bool, folder: str | None = None
  ) -> None:
    """Set up; large results of clients go to a folder, or are returned."""
    self._folder = folder
    self._chooser = jit_autotuning.Chooser(jit, None, strict, threads=1)
    self._resources = rounds.Resources(
      client_feeds.DeviceArrays(), self._chooser
    )
    self._programs: dict[str, rounds.CompiledComputation] = {}
    self._arrays: dict[int, np.ndarray] = {}

  def knows(self, key: str) -> bool:
    """Check whether it has a program already."""
    return key in self._programs

  def learn(self, key: str, program: bytes) -> None:
    """Add a serialized program, in place of the one that ran longest ago."""
    if len(self._programs) >= rounds.MOST_PROGRAMS:
      oldest = self._programs.pop(next(iter(self._programs)))
      self._chooser.forget(oldest.loops)
    self._programs[key] = rounds.CompiledComputation(
      serialized.from_bytes(program)
    )

  def run(
    self,
    key: str,
    common: Common,
    shares: Sequence[rounds.Share],
    choices: Mapping[str, bool],
    fetch: Callable[[Any], np.ndarray],
    keys: Sequence[int],
  ) -> Answer:
    """Run some shards.

    Args:
      key: The key of a program that it knows.
      common: The inputs that all shards of the loop share.
      shares: The inputs of each of these.
      choices: Whether XLA compiles loops, as far as that is decided.
      fetch: Fetches an array by its reference.
      keys: The keys of all arrays that the caller may name again.
    """
    self._chooser.choices.update(choices)
    self._arrays = {k: a for k, a in self._arrays.items() if k in keys}
    compiled = self._programs[key] = self._programs.pop(key)
    program = compiled.program
    stage = compiled.client_stage(
      common.number,
      {
        name: typed_values.like(program.pattern(name), iter(leaves))
        for name, leaves in by_key(program, common.values).items()
      },
      list(map(to_tensor, common.zeros)),
    )

    def tensor(remote: RemoteArray) -> tf.Tensor:
      if remote.key not in self._arrays:
        self._arrays[remote.key] = fetch(remote.where)
      return self._resources.arrays.tensor(self._arrays[remote.key])

    def opened(share: rounds.Share) -> rounds.Share:
      feeds = _with_tensors(client_feeds.opened(share.feeds), tensor)
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
    """Replace the large results of a shard by files."""
    if self._folder is None:
      return returned
    found = dict(returned)
    for key in compiled.may_be_deposited & found.keys():
      leaves = [leaf.numpy()[:clients] for leaf in found[key]]
      if sum(leaf.nbytes for leaf in leaves) >= _BYTES_OF_DEPOSIT:
        found[key] = deposits.Deposit.write(self._folder, leaves)
    return found


def sent(share: rounds.Share, program: flat_program.Program) -> rounds.Share:
  """Return a share as it is sent: values that were kept are by place."""
  return dataclasses.replace(share, kept=by_place(program, share.kept))


def by_place(
  program: flat_program.Program, values: Mapping[flat_program.Key, Any]
) -> dict[int, Any]:
  """Convert values to arrays, by places that other processes know."""
  return {
    place: _each(to_array, values[key])
    for place, key in enumerate(program.keys)
    if key in values
  }


def by_key(
  program: flat_program.Program, values: _ByPlace
) -> dict[flat_program.Key, Any]:
  """Convert values of another process to tensors, by key."""
  return {
    program.keys[place]: _each(to_tensor, leaves)
    for place, leaves in values.items()
  }


def _each(convert: Callable[[Any], Any], leaves: Any) -> Any:
  """Convert leaves one by one; those in a file stay there."""
  if isinstance(leaves, deposits.Deposit):
    return leaves
  return list(map(convert, leaves))


def joined(
  stage: rounds.ClientStage, answers: Sequence[Answer]
) -> tuple[Sequence[tf.Tensor], list[rounds.Returned]]:
  """Join workers' answers for `blocks` into the results of `stage.run`."""
  tree = merging.Tree(stage.loop.merge)
  returned: list[rounds.Returned] = []
  for answer in answers:
    tree.add(list(map(to_tensor, answer.totals)))
    for one in answer.returned:
      values = by_key(stage.loop.program, one)
      returned.append({key: _owned(value) for key, value in values.items()})
  return tree.root(), returned


def _owned(value: Any) -> Any:
  """Return a result; the file that it is in, if any, goes with it."""
  return value.owned() if isinstance(value, deposits.Deposit) else value


def blocks(number: int, workers: int) -> list[range]:
  """Cut shards into blocks to be sent together: subtrees of `merging`."""
  size = 1
  while size * 2 * workers <= number:
    size *= 2
  return [
    range(start, min(start + size, number)) for start in range(0, number, size)
  ]


def to_array(leaf: Any) -> Any:
  """Convert a tensor to an array that can be sent."""
  if isinstance(leaf, client_batch.Ragged):
    return leaf.mapped(to_array)
  return leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf


def to_tensor(leaf: Any) -> Any:
  """Convert a leaf that was sent to a tensor."""
  if isinstance(leaf, client_batch.Ragged):
    return leaf.mapped(to_tensor)
  return tf.convert_to_tensor(leaf)


def _with_tensors(
  feeds: Sequence[client_feeds.Feed], tensor: Callable[[RemoteArray], tf.Tensor]
) -> list[client_feeds.Feed]:
  """Replace remote arrays in feeds by tensors."""
  return [
    dataclasses.replace(
      feed,
      tensors=[
        tensor(leaf) if isinstance(leaf, RemoteArray) else leaf
        for leaf in feed.tensors
      ],
    )
    for feed in feeds
  ]
