"""The Ray runtime: shards of a cohort run in processes of a Ray cluster.

  with tff_partial.runtimes.ray(address='auto'):
    result = tff_partial.train(process, clients, rounds=100)

It is the cohort runtime, whose shards are run by actors, each a process of its
own on this or another machine. An actor has each computation and each array of
a population sent once; then only values of the server, and the places of
clients in these arrays. What clients remember, if it is much, an actor leaves
in a file that all machines see, and whoever runs them next reads it there. The
weights are the same bits as with the cohort runtime and as with any other
number of workers, on machines whose processors and numbers of threads a kernel
are alike.

A round survives its workers. What one was doing when it was killed, ran out of
memory, was cut off or froze is done again by another, and none of it is counted
twice: an accumulator arrives whole or not at all. Only shards that several
workers have died of are given up, with the places of their clients.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import os
import tempfile
import threading
import time
from typing import Any
import warnings

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.errors import UserError
from tff_partial.runtimes import deposits
from tff_partial.runtimes import errors
from tff_partial.runtimes import jit_autotuning
from tff_partial.runtimes import ray_access
from tff_partial.runtimes import remote_shards
from tff_partial.runtimes import rounds
from tff_partial.runtimes.cohort import AsyncCohortRuntime
from tff_partial.runtimes.cohort import CohortRuntime

# So many workers may die of the same shards.
_ATTEMPTS = 5
# Seconds that a worker may take to start: it waits for processors to be free,
# and imports TensorFlow.
_STARTING = 600.0
# Seconds after which that is said.
_LONG = 60.0
# Seconds between two looks at workers that say nothing.
_LOOK_AGAIN = 1.0
# Seconds between two looks at the size of the cluster.
_COUNT_AGAIN = 10.0
# Ray tells its makers nothing, and does not complain that nobody collects its
# metrics: what goes wrong is raised.
_SETTINGS = {'RAY_USAGE_STATS_ENABLED': '0', 'RAY_BACKEND_LOG_LEVEL': 'fatal'}


class RayRuntimeError(errors.CohortRuntimeError):
  """The Ray runtime cannot go on."""


def ray(
  address: str | None = None,
  workers: int | None = None,
  cpus_per_worker: int = 1,
  gpus_per_worker: float = 0,
  *,
  jit: jit_autotuning.Jit = 'auto',
  strict: bool = False,
  choices: Mapping[str, bool] | None = None,
  asynchronous: bool = False,
  patience: float = 120.0,
  folder: str | os.PathLike[str] | None = None,
  lanes: int = 1,
) -> CohortRuntime | AsyncCohortRuntime:
  """A runtime that compiles whole rounds, and runs them on a Ray cluster.

  Needs Ray: `pip install 'tff-partial[ray]'`. What cannot travel, loops with
  variables of their own and over data sets, runs in this process.

  Args:
    address: That of a cluster, as `ray.init` takes it. Any process that reaches
      it can run code as its user; docs/scale.md says more. None (or 'local')
      for one on this machine, which ends with the context and which no other
      process can use.
    workers: How many processes run shards. None for as many as the cluster has
      processors for, also when machines join or leave.
    cpus_per_worker: How many shards a worker runs side by side.
    gpus_per_worker: How much of a GPU a worker has.
    jit: See `cohort`. What 'auto' measures, one worker measures for all.
    strict: See `cohort`.
    choices: See `cohort`.
    asynchronous: See `cohort`.
    patience: Seconds that a worker may be silent. One that is silent for longer
      is ended, and another takes its place.
    folder: One that all machines see, for files of what clients remember, which
      go when they are of no more use. By default, for a cluster of this machine
      that ends with the context, that of the system for temporary files; for
      others none: then what clients remember is sent in each round.
    lanes: See `cohort`.

  Returns:
    A context, as that of `cohort`.

  Raises:
    RayRuntimeError: If Ray is not installed.
    ValueError: If there are to be no workers, or none with a processor.
  """
  if workers is not None and workers < 1:
    raise ValueError(f'Expected at least one worker, found workers={workers}.')
  if cpus_per_worker < 1:
    raise ValueError(
      f'Expected at least one processor, found {cpus_per_worker=}.'
    )
  if importlib.util.find_spec('ray') is None:
    raise RayRuntimeError(
      "The Ray runtime needs Ray: pip install 'ray>=2.52,<2.60', or in a clone "
      '`make ray`.'
    )
  if address == 'local':
    address = None
  crew = _Crew(
    _Cluster(address, workers, cpus_per_worker, gpus_per_worker),
    (jit, strict, cpus_per_worker, lanes),
    patience,
    tempfile.gettempdir() if folder is None and address is None else folder,
  )
  if asynchronous:
    return AsyncCohortRuntime(jit, None, strict, False, choices, crew, lanes)
  return CohortRuntime(jit, None, strict, False, choices, crew, lanes)


class _Cluster:
  """A Ray cluster, and the actors on it."""

  def __init__(
    self, address: str | None, workers: int | None, cpus: int, gpus: float
  ):
    self._address, self._workers = address, workers
    self._cpus, self._gpus = cpus, gpus
    self._is_ours = False
    # What is to be done when the cluster that we started has ended.
    self._private = contextlib.ExitStack()
    self._counted: tuple[float, int] = (-_COUNT_AGAIN, 1)

  def start(self) -> None:
    """Join the cluster, or starts one."""
    # Ray reads these when it is imported.
    for name, value in _SETTINGS.items():
      os.environ.setdefault(name, value)
    import ray as ray_lib

    if ray_lib.is_initialized():
      ray_access.warn_of_access(ray_lib.get_runtime_context().gcs_address)
      return
    try:
      with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter('ignore', FutureWarning)
        ray_lib.init(
          address=self._address or 'local',
          log_to_driver=False,
          configure_logging=False,
          **self._own_options(stack),
        )
        self._private = stack.pop_all()
    except (OSError, RuntimeError, ValueError) as error:
      why = errors.telling_line(error)
      raise RayRuntimeError(
        f'No Ray cluster can be started on this machine: {why}'
        if self._address is None
        else f'No Ray cluster answers at {self._address!r}: {why}; start one '
        'with `ray start --head`, or leave out the address for one on this '
        'machine.'
      ) from error
    self._is_ours = True
    if self._address is not None:
      ray_access.warn_of_access(self._address)

  def _own_options(self, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Arguments of `ray.init` for a cluster that is started, if one is."""
    if self._address is not None:
      return {}
    options = stack.enter_context(ray_access.private())
    options['include_dashboard'] = False
    if self._workers is not None:
      # Who asks for workers gets them, however few cores there are.
      options['num_cpus'] = self._workers * self._cpus
    return options

  def close(self) -> None:
    """Leaves the cluster, if we joined it; one that we started ends."""
    import ray as ray_lib

    if self._is_ours and ray_lib.is_initialized():
      ray_lib.shutdown()
    self._private.close()
    self._is_ours = False

  def num_workers(self) -> int:
    """How many workers there should be now."""
    if self._workers is not None:
      return self._workers
    import ray as ray_lib

    when, number = self._counted
    if time.monotonic() - when > _COUNT_AGAIN:
      has = ray_lib.cluster_resources()
      number = int(has.get('CPU', 0) // self._cpus)
      if self._gpus:
        number = min(number, int(has.get('GPU', 0) / self._gpus))
      number = max(number, 1)
      self._counted = time.monotonic(), number
    return number

  def describe(self) -> str:
    """Says what the cluster has to offer."""
    import ray as ray_lib

    has, free = ray_lib.cluster_resources(), ray_lib.available_resources()
    return (
      f'The cluster has {has.get("CPU", 0):g} processors, of which '
      f'{free.get("CPU", 0):g} are free; a worker needs {self._cpus}'
    )

  def hire(self, options: tuple[Any, ...]) -> Any:
    """Asks for an actor, which may take a while to start."""
    import ray as ray_lib

    kernels = tf.config.threading.get_intra_op_parallelism_threads()
    actor = ray_lib.remote(
      num_cpus=self._cpus,
      num_gpus=self._gpus,
      max_restarts=0,
      max_task_retries=0,
      concurrency_groups={'control': 1},
    )(_actor_class(ray_lib))
    return actor.remote(options, kernels)

  def end(self, actor: Any, place: tuple[str, int] | None) -> None:
    """End an actor, also one that does not listen.

    Args:
      actor: The actor.
      place: The node and number of its process, if they are known.
    """
    import ray as ray_lib

    with contextlib.suppress(Exception):
      ray_lib.kill(actor, no_restart=True)
    if place is None:
      return
    node, pid = place
    affinity = ray_lib.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    def end_process() -> None:
      import os
      import signal

      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        pass

    with contextlib.suppress(Exception):
      ray_lib.remote(end_process).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=affinity(node_id=node, soft=False),
      ).remote()


def _actor_class(ray_lib: Any) -> type:
  """The class of actors; Ray need not be there until one is wanted."""

  class Shards:
    """A process that runs shards."""

    def __init__(self, options: tuple[Any, ...], kernels: int):
      with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(kernels)
      self._worker = remote_shards.ShardWorker(*options)

    @ray_lib.method(concurrency_group='control')
    def place(self) -> tuple[str, int]:
      """Where it is; also says that it is alive."""
      return ray_lib.get_runtime_context().get_node_id(), os.getpid()

    def run(self, job: '_Job') -> remote_shards.Answer:
      """Run some shards."""
      try:
        if not self._worker.knows(job.key):
          self._worker.learn(ray_lib.get(job.program))
        return self._worker.run(
          job.key,
          ray_lib.get(job.common),
          job.shares,
          job.choices,
          ray_lib.get,
          job.keys,
        )
      except Exception as error:
        # What TensorFlow raises may hold what cannot travel.
        if not isinstance(error, UserError):
          error = RuntimeError(f'{type(error).__name__}: {error}')
        return remote_shards.Answer(error=error.with_traceback(None))

  return Shards


@dataclasses.dataclass(frozen=True)
class _Job:
  """Shards as they are sent to an actor.

  Attributes:
    key: Of the program.
    program: Where the program is.
    common: Where that is which all shards of the loop are given.
    shares: What each shard is given.
    choices: Whether XLA compiles loops, as far as that is decided.
    keys: Of all arrays that may be named again.
  """

  key: str
  program: Any
  common: Any
  shares: Sequence[remote_shards.Share]
  choices: Mapping[str, bool]
  keys: Sequence[int]


@dataclasses.dataclass
class _Worker:
  """An actor, as the crew knows it.

  Attributes:
    actor: The actor.
    heard: When it last said something, or was asked for.
    ping: What it has been asked and has not answered yet.
    place: The node and number of its process, once it has started.
    block: What it is doing.
    work: What that is a part of; a round that failed leaves some undone.
    answer: Where what comes of that will be.
  """

  actor: Any
  heard: float
  ping: Any
  place: tuple[str, int] | None = None
  block: int | None = None
  work: '_Work | None' = None
  answer: Any = None


class _Crew:
  """Workers, and the work that is to be shared among them."""

  def __init__(
    self,
    cluster: _Cluster,
    options: tuple[Any, ...],
    patience: float,
    folder: str | os.PathLike[str] | None,
  ):
    self._cluster, self._options, self._patience = cluster, options, patience
    self._folder = folder
    # Where workers leave files, once there are workers.
    self._deposits: str | None = None
    self._workers: list[_Worker] = []
    self._programs: dict[tff.Computation, tuple[str, Any]] = {}
    self._lock = threading.RLock()
    self._is_open = False
    # How many workers in a row ended before they had started.
    self._stillborn = 0
    self._has_warned = False
    self.arrays = remote_shards.RemoteArrays(self.put)

  def start(self) -> None:
    """Asks for workers, unless they are there."""
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
    """Put a value where all workers find it."""
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
    """See `rounds.Workers`."""
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
        lambda some: _Job(
          key,
          program,
          common,
          [
            remote_shards.Share.of(share(), stage.loop.program)
            for share in some
          ],
          dict(chooser.choices),
          self.arrays.keys(),
        ),
      )
      # What one measures, the others are told.
      if chooser.is_undecided(stage.name):
        work.hold_back()
      while not work.is_done:
        self._hire()
        self._hand_out(work)
        self._listen(work, chooser)
    return remote_shards.joined(stage, work.answers())

  def _program(self, computation: tff.Computation) -> tuple[str, Any]:
    if computation not in self._programs:
      program = remote_shards.Program.of(computation)
      self._programs[computation] = program.key, self.put(program)
    return self._programs[computation]

  def _hire(self) -> None:
    """Asks for the workers that are missing, and lets go those too many."""
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
    """Take what workers say, and notices who says nothing any more."""
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
        continue  # Of a round that has failed.
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
    """Lets a worker go, and has what it was doing done again."""
    self._workers.remove(worker)
    self._cluster.end(worker.actor, worker.place)
    if worker.place is None:
      self._stillborn += 1
      if self._stillborn >= _ATTEMPTS:
        raise RayRuntimeError(
          f'{self._stillborn} workers in a row ended before they had started, '
          f'the last because {why}. {self._cluster.describe()}, and all '
          'machines need this Python with tff_partial.'
        )
    logging.warning('A worker is lost (%s); another takes its place.', why)
    if worker.block is not None and worker.work is work:
      work.give_back(worker.block, why)


class _Work:
  """Blocks of shards: which wait, which are done."""

  def __init__(
    self,
    blocks: Sequence[Sequence[Callable[[], rounds.Share]]],
    job: Callable[[Sequence[Callable[[], rounds.Share]]], _Job],
  ):
    self._blocks, self._job = blocks, job
    self._waiting = collections.deque(range(len(blocks)))
    self._answers: dict[int, remote_shards.Answer] = {}
    self._lost: collections.Counter[int] = collections.Counter()
    self._may_begin = len(blocks)

  @property
  def is_done(self) -> bool:
    """Whether all blocks have been run."""
    return len(self._answers) == len(self._blocks)

  def hold_back(self) -> None:
    """Hands out the first block alone, until it is done."""
    self._may_begin = 1

  def next(self) -> int | None:
    """A block that waits, if there is one to be begun."""
    if self._waiting and self._waiting[0] < self._may_begin:
      return self._waiting.popleft()
    return None

  def job(self, block: int) -> _Job:
    """A block as it is sent."""
    return self._job(self._blocks[block])

  def take(self, block: int | None, answer: remote_shards.Answer) -> None:
    """Note what came of a block."""
    if block is not None:
      self._answers[block] = answer
      self._may_begin = len(self._blocks)

  def give_back(self, block: int, why: str) -> None:
    """Has a block done again, unless too many workers were lost with it."""
    self._lost[block] += 1
    if self._lost[block] < _ATTEMPTS:
      self._waiting.appendleft(block)
      return
    places = np.concatenate(
      [share().shard.positions for share in self._blocks[block]]
    )
    raise RayRuntimeError(
      f'{_ATTEMPTS} workers were lost while they ran the clients from place '
      f'{places.min()} to {places.max()} of the cohort (counted from 0), the '
      f'last because {why}. If it was memory, give workers more of it '
      '(workers=, cpus_per_worker=), or make batches smaller; to see which '
      'client it is, run the round with `runtimes.cohort(debug=True)`.'
    )

  def answers(self) -> list[remote_shards.Answer]:
    """What came of all blocks, in their order."""
    return [self._answers[block] for block in range(len(self._blocks))]
