"""TFF's own worker as a child process that dies with its parent."""

import collections
import contextlib
import contextvars
import functools
import os
import queue
import subprocess
import sys
import threading
import time
from typing import Any
import weakref

from absl import logging
import grpc
import portpicker
import tensorflow_federated as tff

from tff_partial.errors import UserError
from tff_partial.runtimes.values import typed_values

# Run by a bare interpreter that then becomes the worker: running code between
# fork and exec of this process is unsafe, since TensorFlow and gRPC have
# threads in it. Nothing starts if the parent has already died, or if the kernel
# does not support the death signal.
_LAUNCHER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)):
  sys.exit('No worker is started, since it would outlive its program: prctl '
           'failed with ' + os.strerror(ctypes.get_errno()))
if os.getppid() == int(sys.argv[1]):
  os.execv(sys.argv[2], sys.argv[2:])
"""

_BINARY = os.path.join(os.path.dirname(tff.__file__), 'data', 'worker_binary')
_CHANNEL_OPTIONS = (
  ('grpc.max_send_message_length', 2_000_000_000),
  ('grpc.max_receive_message_length', 2_000_000_000),
  # The worker listens some tenths of a second after its start.
  ('grpc.initial_reconnect_backoff_ms', 100),
  ('grpc.min_reconnect_backoff_ms', 100),
  ('grpc.max_reconnect_backoff_ms', 500),
  # A proxy in the environment must not be used for our own child.
  ('grpc.enable_http_proxy', 0),
)
_SECONDS_TO_START = 120
_SECONDS_TO_END = 1.0
_SIZES_KEPT = 4  # For instance: no clients, a cohort, two evaluations.
ATTEMPTS = 3

# Errors of the current invocation after which TFF retries. It retries forever,
# even if the computation itself ends the worker.
noted_failures: contextvars.ContextVar[list] = contextvars.ContextVar(
  'failures'
)


class NativeRuntimeError(UserError, RuntimeError):
  """The native runtime cannot run a computation."""


def _spawn(arguments: list[str]) -> subprocess.Popen[bytes]:
  """Start a child that the kernel kills when this process ends."""
  command = [sys.executable, '-I', '-S', '-c', _LAUNCHER, str(os.getpid())]
  started: queue.SimpleQueue = queue.SimpleQueue()

  def keep() -> None:
    try:
      process = subprocess.Popen(
        command + arguments,
        stdin=subprocess.DEVNULL,
        # Its messages go to stderr; our stdout may be the input of a pipe.
        stdout=subprocess.DEVNULL,
        # Out of reach of the signals that a terminal sends to our group.
        start_new_session=True,
        # Each round runs in other threads, and a thread cannot use the memory
        # that another one has freed in its own arena.
        env={'MALLOC_ARENA_MAX': '2', **os.environ},
      )
    except Exception as error:  # pylint: disable=broad-exception-caught
      started.put(error)
      return
    started.put(process)
    # The death signal is sent when the *thread* that forked ends, so it lasts
    # as long as the child does. Reaping the child is left to its `Popen`.
    with contextlib.suppress(ChildProcessError):
      os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

  threading.Thread(target=keep, name='native worker', daemon=True).start()
  outcome = started.get()
  if isinstance(outcome, Exception):
    raise outcome
  return outcome


class _Stub(tff.framework.RemoteExecutorGrpcStub):
  """Connection to the worker, which loses all values when it dies."""

  def dispose(self, request: object) -> None:
    """Tell the worker to forget a value."""
    with contextlib.suppress(grpc.RpcError, tff.framework.RetryableError):
      super().dispose(request)


class _Executor(tff.framework.RemoteExecutor):
  """Part of the worker that serves one cohort size."""

  def __init__(
    self, stub: _Stub, cardinalities: tff.framework.CardinalitiesType
  ):
    # Values are freed one by one: TFF's batches of twenty keep the last
    # arguments and results in memory, and among them are whole cohorts.
    super().__init__(stub, dispose_batch_size=1)
    self._no_clients = cardinalities[tff.CLIENTS] == 0
    self.set_cardinalities(cardinalities)

  def __del__(self) -> None:
    self.close()  # Unused now: the worker may forget it, too.

  async def create_call(self, comp: Any, arg: Any = None) -> Any:
    """Call `comp` in the worker; its result stays there until computed."""
    result = await super().create_call(comp, arg)
    if self._no_clients and tff.types.contains(
      result.type_signature, typed_values.is_at_clients
    ):
      # TFF cannot read an empty list of clients' values from its worker, so
      # these are made here and everything else is fetched.
      result.compute = functools.partial(self._fetch, result)
    return result

  async def _fetch(self, value: Any) -> object:
    type_spec = value.type_signature
    if typed_values.is_at_clients(type_spec):
      return []
    if not isinstance(type_spec, tff.StructType):
      return await value.compute()
    return tff.structure.Struct(
      [
        (name, await self._fetch(await self.create_selection(value, index)))
        for index, (name, _) in enumerate(
          tff.structure.iter_elements(type_spec)
        )
      ]
    )


class Worker(tff.framework.ExecutorFactory):
  """Child process and the executors inside it, one per cohort size."""

  def __init__(self) -> None:
    self._owner = os.getpid()
    self._lock = threading.RLock()
    self._process: subprocess.Popen[bytes] | None = None
    self._stub: _Stub | None = None
    self._executors: collections.OrderedDict = collections.OrderedDict()
    # Includes those no longer kept but still in use.
    self._alive: weakref.WeakSet[_Executor] = weakref.WeakSet()
    self.open = True

  @property
  def is_ours(self) -> bool:
    """False in a fork of the process that made this object."""
    return self._owner == os.getpid()

  def create_executor(
    self, cardinalities: tff.framework.CardinalitiesType
  ) -> tff.framework.RemoteExecutor:
    """Return the executor for these numbers of clients, kept or made."""
    failures = noted_failures.get([])
    if len(failures) >= ATTEMPTS:
      raise NativeRuntimeError(
        f'The native worker failed {len(failures)} times in running one '
        'computation. Its own messages are on the error output; if there is '
        'none, the system may have killed it for want of memory: use fewer '
        'clients at a time.'
      ) from failures[-1]
    cardinalities = {tff.CLIENTS: 0, **cardinalities}
    key = frozenset(cardinalities.items())
    with self._lock:
      stub = self._ensure_started()
      executor = self._executors.pop(key, None)
      if executor is None:
        executor = _Executor(stub, cardinalities)
        self._alive.add(executor)
      self._executors[key] = executor
      if len(self._executors) > _SIZES_KEPT:
        self._executors.popitem(last=False)
      return executor

  def clean_up_executor(
    self, cardinalities: tff.framework.CardinalitiesType
  ) -> None:
    """Drop an executor; TFF calls this while it handles an error."""
    error, process = sys.exc_info()[1], self._process
    noted_failures.get([]).append(error)
    if process and isinstance(error, tff.framework.RetryableError):
      # Its connection is lost some time before it has ended, and TFF tries
      # again after milliseconds, with a worker that still seems to run.
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
    with self._lock:
      self._executors.pop(
        frozenset({tff.CLIENTS: 0, **cardinalities}.items()), None
      )

  def _ensure_started(self) -> _Stub:
    """Start the child, if none runs, and return its stub."""
    if not self.open:
      raise NativeRuntimeError(
        'This native runtime was used after its `with` had ended.'
      )
    if self._process is not None and self._stub is not None:
      status = self._process.poll()
      if status is None:
        return self._stub
      logging.warning('The native worker ended with status %d.', status)
    self.end()  # Even one whose start was interrupted.
    if not os.path.isfile(_BINARY) or not os.path.getsize(_BINARY):
      raise NativeRuntimeError(
        "The native runtime needs TFF's worker, a program for Linux on x86-64, "
        'which this installation of TFF lacks (wheels made by `make dist` '
        f'leave it out): {_BINARY} is missing or empty. Use '
        "`runtimes.cohort()`, which needs none, or install TFF's own wheel."
      )
    port = portpicker.pick_unused_port()
    process = self._process = _spawn(
      [_BINARY, '--max_concurrent_computation_calls=-1', f'--port={port}']
    )
    # Closed with its last user, not explicitly: gRPC watches it in a thread
    # that complains of closing.
    channel = grpc.insecure_channel(f'localhost:{port}', _CHANNEL_OPTIONS)
    stub = _Stub(channel)
    patience = time.monotonic() + _SECONDS_TO_START
    while not stub.is_ready:
      # A thread that closes this runtime waits for our lock.
      late = not self.open or time.monotonic() > patience
      if late or process.poll() is not None:
        self.end()
        raise tff.framework.RetryableError('The native worker did not start.')
      time.sleep(0.02)
    self._stub = stub
    return stub

  def end(self) -> None:
    """End the child, if it runs; the next call starts another."""
    process = self._process
    if process is None or not self.is_ours:
      return
    process.kill()  # Before the lock, whose holder may wait for the child.
    with self._lock:
      if self._process is None:
        return
      self._process.kill()
      self._process.wait()
      # Only now, when they can no longer wait for the child: otherwise, values
      # deleted later would send requests to a child that has ended.
      for executor in tuple(self._alive):
        executor.close()
      self._executors.clear()
      self._stub = self._process = None

  def close(self) -> None:
    """End the child and let none start; this ends a running computation."""
    self.open = False
    self.end()
