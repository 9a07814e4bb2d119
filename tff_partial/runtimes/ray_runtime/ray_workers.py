"""Ray runtime: shards of a cohort run in processes of a Ray cluster.

  with tff_partial.runtimes.ray(address='auto'):
    result = tff_partial.train(process, clients, rounds=100)

It is the cohort runtime, whose shards are run by actors, each a separate
process on this or another machine. An actor receives each computation and each
array of a population once; then only values of the server, and the places of
clients in these arrays. An actor writes large client state to a file that all
machines see, and the actor that runs the client next reads it there. The
weights have the same bits as with the cohort runtime and with any other number
of workers, on machines whose processors and numbers of threads per kernel are
alike.

A round survives its workers. If one is killed, runs out of memory, is cut off
or freezes, another repeats its work, and none of it is counted twice: an
accumulator arrives whole or not at all. Only shards that several workers have
died of are given up, with an error that gives the places of their clients.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import importlib.util
import os
import tempfile
import threading
import time
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import jit_autotuning
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.cohort_runtime.cohort import AsyncCohortRuntime
from tff_partial.runtimes.cohort_runtime.cohort import CohortRuntime
from tff_partial.runtimes.program import serialized
from tff_partial.runtimes.ray_runtime import cluster
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.ray_runtime import remote_shards

# Number of workers lost to the same shards after which these are given up.
_ATTEMPTS = 5
# Seconds that a worker may take to start: it waits for free processors, and
# imports TensorFlow.
_STARTING = 600.0
# Seconds after which a slow start is logged.
_LONG = 60.0
# Seconds between two checks of silent workers.
_LOOK_AGAIN = 1.0


def ray(
  address: str | None = None,
  workers: int | None = None,
  *,
  gpus_per_worker: float = 0,
  jit: jit_autotuning.Jit = 'auto',
  strict: bool = False,
  choices: Mapping[str, bool] | None = None,
  asynchronous: bool = False,
  patience: float = 120.0,
  folder: str | os.PathLike[str] | None = None,
) -> CohortRuntime | AsyncCohortRuntime:
  """Create a runtime that compiles whole rounds and runs them on a Ray cluster.

  Requires Ray: `pip install 'tff-partial[ray]'`. Loops that cannot be sent,
  those with their own variables or over data sets, run in this process.

  Args:
    address: The address of a cluster, as `ray.init` takes it. Any process that
      reaches it can run code as its user; see docs/scale.md. None (or 'local')
      starts one on this machine, which ends with the context and which no other
      process can use.
    workers: How many processes run shards. None for as many as the cluster has
      processors for, also when machines join or leave.
    gpus_per_worker: How much of a GPU a worker has.
    jit: See `cohort`. With 'auto', one worker measures for all.
    strict: See `cohort`.
    choices: See `cohort`.
    asynchronous: See `cohort`.
    patience: Seconds that a worker may be silent. One that is silent for longer
      is ended and replaced.
    folder: A folder that all machines see, for files of client state, which are
      removed when no longer needed. By default, for a cluster of this machine
      that ends with the context, the system's folder for temporary files; for
      others none: then client state is sent in each round.

  Returns:
    A context like that of `cohort`.

  Raises:
    CohortRuntimeError: If Ray is not installed.
    ValueError: If `workers` is less than one, or `patience` is no time.
  """
  if workers is not None and workers < 1:
    raise ValueError(f'Expected at least one worker, found workers={workers}.')
  if not patience > 0:
    raise ValueError(f'{patience=}: give a number of seconds above 0.')
  if importlib.util.find_spec('ray') is None:
    raise errors.CohortRuntimeError(
      "The Ray runtime needs Ray: pip install 'ray>=2.52,<2.60', or in a clone "
      '`make ray`.'
    )
  if address == 'local':
    address = None
  crew = _Crew(
    cluster.Cluster(address, workers, gpus_per_worker),
    (jit, strict),
    patience,
    tempfile.gettempdir() if folder is None and address is None else folder,
  )
  if asynchronous:
    return AsyncCohortRuntime(jit, None, strict, choices, crew)
  return CohortRuntime(jit, None, strict, choices, crew)


@dataclasses.dataclass
class _Worker:
  """Actor, as the crew knows it.

  Attributes:
    actor: The actor.
    heard: The time when it last answered, or was requested.
    ping: A reference to a pending sign of life.
    place: The node and id of its process, once it has started.
    block: The block that it runs.
    work: The work of that block; a failed round leaves some blocks running.
    answer: A reference to the answer for that block.
  """

  actor: Any
  heard: float
  ping: Any
  place: tuple[str, int] | None = None
  block: int | None = None
  work: '_Work | None' = None
  answer: Any = None


class _Crew:
  """Workers, and the work to be shared among them."""

  def __init__(
    self,
    on: cluster.Cluster,
    options: tuple[Any, ...],
    patience: float,
    folder: str | os.PathLike[str] | None,
  ):
    self._cluster, self._options, self._patience = on, options, patience
    self._folder = folder
    # The folder of workers' files, once there are workers.
    self._deposits: str | None = None
    self._workers: list[_Worker] = []
    self._programs: dict[tff.Computation, tuple[str, Any]] = {}
    self._lock = threading.RLock()
    self._is_open = False
    # Number of workers in a row that ended before they had started.
    self._stillborn = 0
    self._has_warned = False
    self.arrays = remote_shards.RemoteArrays(self.put)

  def start(self) -> None:
    """Request workers, unless they are there."""
    with self._lock:
      if not self._is_open:
        if self._folder is not None and self._deposits is None:
          self._deposits = deposits.make_folder(self._folder)
        self._cluster.start()
        self._is_open = True
      self._hire()

  def close(self) -> None:
    """End all workers."""
    with self._lock:
      if self._is_open:
        for worker in self._workers:
          self._cluster.end(worker.actor, None)
        self._workers.clear()
        self._programs.clear()
        self.arrays.forget()
        self._cluster.close()
        self._is_open = False

  def put(self, value: Any) -> Any:
    """Put a value where all workers find it; return a reference."""
    import ray as ray_lib

    self.start()
    return ray_lib.put(value)

  def run(
    self,
    computation: tff.Computation,
    number: int,
    stage: rounds.ClientStage,
    shares: Sequence[Callable[[], rounds.Share]],
    chooser: jit_autotuning.Chooser,
  ) -> tuple[Sequence[tf.Tensor], list[rounds.Returned]]:
    """Run a loop, as `stage.run` does.

    Args:
      computation: The computation with the loop.
      number: The number of the loop in it, counted from 0.
      stage: The loop.
      shares: Build the inputs of each shard.
      chooser: Holds, and receives, the choice of XLA for the loop.
    """
    with self._lock:
      self.start()
      key, program = self._program(computation)
      common = self.put(remote_shards.Common.of(stage, number))
      work = _Work(
        [
          [shares[place] for place in block]
          for block in remote_shards.blocks(
            len(shares), self._cluster.num_workers()
          )
        ],
        lambda some: cluster.Job(
          key,
          program,
          common,
          [remote_shards.sent(share(), stage.loop.program) for share in some],
          dict(chooser.choices),
          self.arrays.keys(),
        ),
      )
      # One worker measures for the others.
      if chooser.is_undecided(stage.name):
        work.hold_back()
      while not work.is_done:
        self._hire()
        self._hand_out(work)
        self._listen(work, chooser)
    return remote_shards.joined(stage, work.answers())

  def _program(self, computation: tff.Computation) -> tuple[str, Any]:
    if computation not in self._programs:
      program = serialized.to_bytes(computation)
      key = hashlib.sha256(program).hexdigest()
      self._programs[computation] = key, self.put(program)
    return self._programs[computation]

  def _hire(self) -> None:
    """Request missing workers, and end surplus ones."""
    wanted = self._cluster.num_workers()
    idle = [w for w in self._workers if w.block is None]
    for worker in idle[: max(0, len(self._workers) - wanted)]:
      self._workers.remove(worker)
      self._cluster.end(worker.actor, worker.place)
    while len(self._workers) < wanted:
      actor = self._cluster.hire((*self._options, self._deposits))
      self._workers.append(
        _Worker(actor, time.monotonic(), actor.place.remote())
      )

  def _hand_out(self, work: '_Work') -> None:
    """Give work to workers that have started and have none."""
    for worker in self._workers:
      if worker.place is None or worker.block is not None:
        continue
      block = work.next()
      if block is None:
        return
      worker.block, worker.work = block, work
      worker.answer = worker.actor.run.remote(work.job(block))

  def _listen(self, work: '_Work', chooser: jit_autotuning.Chooser) -> None:
    """Take the answers of workers, and notice silent ones."""
    import ray as ray_lib

    said = {worker.ping: worker for worker in self._workers if worker.ping}
    said.update(
      (worker.answer, worker) for worker in self._workers if worker.answer
    )
    ready, _ = ray_lib.wait(
      list(said), num_returns=1, timeout=_LOOK_AGAIN, fetch_local=False
    )
    for reference in ready:
      worker = said[reference]
      if worker not in self._workers:
        continue
      try:
        answer = ray_lib.get(reference)
      except ray_lib.exceptions.RayError as error:
        self._lose(worker, work, errors.telling_line(error))
        continue
      worker.heard = time.monotonic()
      if reference == worker.ping:
        worker.place, worker.ping = answer, None
        self._stillborn = 0
        continue
      block, of = worker.block, worker.work
      worker.block = worker.work = worker.answer = None
      if of is not work:
        continue  # From a round that has failed.
      if answer.error is not None:
        raise answer.error
      chooser.choices.update(answer.choices)
      work.take(block, answer)
    self._ask_the_silent(work)

  def _ask_the_silent(self, work: '_Work') -> None:
    now = time.monotonic()
    for worker in list(self._workers):
      silent = now - worker.heard
      if worker.place is None and silent > _LONG and not self._has_warned:
        self._has_warned = True
        logging.warning(
          'A worker has been starting for %d s. %s.',
          silent,
          self._cluster.describe(),
        )
      if silent > (self._patience if worker.place else _STARTING):
        self._lose(worker, work, f'it said nothing for {silent:.0f} s')
      elif worker.ping is None and silent > self._patience / 4:
        worker.ping = worker.actor.place.remote()

  def _lose(self, worker: _Worker, work: '_Work', why: str) -> None:
    """Drop a worker, and queue its block again."""
    self._workers.remove(worker)
    self._cluster.end(worker.actor, worker.place)
    if worker.place is None:
      self._stillborn += 1
      if self._stillborn >= _ATTEMPTS:
        raise errors.CohortRuntimeError(
          f'{self._stillborn} workers in a row ended before they had started, '
          f'the last because {why}. {self._cluster.describe()}, and all '
          'machines need this Python with tff_partial.'
        )
    logging.warning('A worker is lost (%s); another takes its place.', why)
    if worker.block is not None and worker.work is work:
      work.give_back(worker.block, why)


class _Work:
  """Blocks of shards, waiting or done."""

  def __init__(
    self,
    blocks: Sequence[Sequence[Callable[[], rounds.Share]]],
    job: Callable[[Sequence[Callable[[], rounds.Share]]], cluster.Job],
  ):
    self._blocks, self._job = blocks, job
    self._waiting = collections.deque(range(len(blocks)))
    self._answers: dict[int, remote_shards.Answer] = {}
    self._lost: collections.Counter[int] = collections.Counter()
    self._may_begin = len(blocks)

  @property
  def is_done(self) -> bool:
    """True if all blocks have been run."""
    return len(self._answers) == len(self._blocks)

  def hold_back(self) -> None:
    """Hand out only the first block, until it is done."""
    self._may_begin = 1

  def next(self) -> int | None:
    """Return a waiting block, if one may start."""
    if self._waiting and self._waiting[0] < self._may_begin:
      return self._waiting.popleft()
    return None

  def job(self, block: int) -> cluster.Job:
    """Build a block as it is sent."""
    return self._job(self._blocks[block])

  def take(self, block: int | None, answer: remote_shards.Answer) -> None:
    """Note the answer for a block."""
    if block is not None:
      self._answers[block] = answer
      self._may_begin = len(self._blocks)

  def give_back(self, block: int, why: str) -> None:
    """Queue a block again, unless too many workers were lost with it."""
    self._lost[block] += 1
    if self._lost[block] < _ATTEMPTS:
      self._waiting.appendleft(block)
      return
    places = np.concatenate(
      [share().shard.positions for share in self._blocks[block]]
    )
    raise errors.CohortRuntimeError(
      f'{_ATTEMPTS} workers were lost while they ran the clients from place '
      f'{places.min()} to {places.max()} of the cohort (counted from 0), the '
      f'last because {why}. If it was memory, give workers more of it '
      '(fewer workers on a machine), or make batches smaller.'
    )

  def answers(self) -> list[remote_shards.Answer]:
    """Return the answers for all blocks, in their order."""
    return [self._answers[block] for block in range(len(self._blocks))]
