"""The Ray cluster, and the actors on it that run shards."""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import os
import time
from typing import Any
import warnings

import tensorflow as tf

from tff_partial.errors import UserError
from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.ray_runtime import ray_access
from tff_partial.runtimes.ray_runtime import remote_shards

# Seconds between two checks of the size of the cluster.
_COUNT_AGAIN = 10.0
# Ray reports no usage statistics, and does not complain of uncollected metrics:
# errors are raised.
_SETTINGS = {'RAY_USAGE_STATS_ENABLED': '0', 'RAY_BACKEND_LOG_LEVEL': 'fatal'}


@dataclasses.dataclass(frozen=True)
class Job:
  """Shards as they are sent to an actor.

  Attributes:
    key: The key of the program.
    program: A reference to the program.
    common: A reference to the inputs that all shards of the loop share.
    shares: The inputs of each shard, from `remote_shards.sent`.
    choices: Whether XLA compiles loops, as far as that is decided.
    keys: The keys of all arrays that may be named again.
  """

  key: str
  program: Any
  common: Any
  shares: Sequence[rounds.Share]
  choices: Mapping[str, bool]
  keys: Sequence[int]


def _actor_class(ray_lib: Any) -> type:
  """Return the class of actors; only this requires Ray."""

  class Shards:
    """Process that runs shards."""

    def __init__(self, options: tuple[Any, ...], kernels: int):
      with contextlib.suppress(RuntimeError):
        tf.config.threading.set_intra_op_parallelism_threads(kernels)
      self._worker = remote_shards.ShardWorker(*options)

    @ray_lib.method(concurrency_group='control')
    def place(self) -> tuple[str, int]:
      """Return the node and process id; also shows that it is alive."""
      return ray_lib.get_runtime_context().get_node_id(), os.getpid()

    def run(self, job: Job) -> remote_shards.Answer:
      """Run some shards."""
      try:
        if not self._worker.knows(job.key):
          self._worker.learn(job.key, ray_lib.get(job.program))
        return self._worker.run(
          job.key,
          ray_lib.get(job.common),
          job.shares,
          job.choices,
          ray_lib.get,
          job.keys,
        )
      except Exception as error:
        # TensorFlow's errors may hold objects that cannot be sent.
        if not isinstance(error, UserError):
          error = RuntimeError(f'{type(error).__name__}: {error}')
        return remote_shards.Answer(error=error.with_traceback(None))

  return Shards


class Cluster:
  """Ray cluster, and the actors on it."""

  def __init__(self, address: str | None, workers: int | None, gpus: float):
    self._address, self._workers, self._gpus = address, workers, gpus
    self._is_ours = False
    # Cleans up when the cluster that we started has ended.
    self._private = contextlib.ExitStack()
    self._counted: tuple[float, int] = (-_COUNT_AGAIN, 1)

  def start(self) -> None:
    """Join the cluster, or start one."""
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
      raise errors.CohortRuntimeError(
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
    """Return arguments of `ray.init` for a cluster that is started, if any."""
    if self._address is not None:
      return {}
    options = stack.enter_context(ray_access.private())
    options['include_dashboard'] = False
    if self._workers is not None:
      # The requested workers are started, however few cores there are.
      options['num_cpus'] = self._workers
    return options

  def close(self) -> None:
    """Leave the cluster, if we joined it; end it, if we started it."""
    import ray as ray_lib

    if self._is_ours and ray_lib.is_initialized():
      ray_lib.shutdown()
    self._private.close()
    self._is_ours = False

  def num_workers(self) -> int:
    """Return how many workers there should be now."""
    if self._workers is not None:
      return self._workers
    import ray as ray_lib

    when, number = self._counted
    if time.monotonic() - when > _COUNT_AGAIN:
      has = ray_lib.cluster_resources()
      number = int(has.get('CPU', 0))
      if self._gpus:
        number = min(number, int(has.get('GPU', 0) / self._gpus))
      number = max(number, 1)
      self._counted = time.monotonic(), number
    return number

  def describe(self) -> str:
    """Describe the resources of the cluster."""
    import ray as ray_lib

    has, free = ray_lib.cluster_resources(), ray_lib.available_resources()
    return (
      f'The cluster has {has.get("CPU", 0):g} processors, of which '
      f'{free.get("CPU", 0):g} are free; a worker needs one'
    )

  def hire(self, options: tuple[Any, ...]) -> Any:
    """Request an actor, which may take a while to start."""
    import ray as ray_lib

    kernels = tf.config.threading.get_intra_op_parallelism_threads()
    actor = ray_lib.remote(
      num_cpus=1,
      num_gpus=self._gpus,
      max_restarts=0,
      max_task_retries=0,
      concurrency_groups={'control': 1},
    )(_actor_class(ray_lib))
    return actor.remote(options, kernels)

  def end(self, actor: Any, place: tuple[str, int] | None) -> None:
    """End an actor, even a silent one, and its process, if it has a place."""
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
