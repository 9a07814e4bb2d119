"""Laws of the native runtime: its worker ends with it, whatever happens."""

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import gc
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes.native_runtime.native import native
from tff_partial.runtimes.native_runtime.worker import NativeRuntimeError

_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
# The function of this name hides it.
native_module = importlib.import_module(
  'tff_partial.runtimes.native_runtime.native'
)
_CLIENTS = tff.FederatedType(np.float32, tff.CLIENTS)


@tff.federated_computation(_CLIENTS)
def _total(values):
  return tff.federated_sum(values)


@tff.tensorflow.computation
def _endless():
  return tf.while_loop(lambda i: i >= 0, lambda i: i, [tf.constant(0)])[0]


# Workers that other modules' tests in this process have started: what runs
# outside any `with` has one, which lives as long as the process.
_OTHERS: set[int] = set()


@pytest.fixture(scope='module', autouse=True)
def fixture_others():
  """Notes which workers are there before these tests."""
  _OTHERS.update(worker.pid for worker in _workers())


def _workers() -> list[psutil.Process]:
  """The workers of this process that these tests have started."""
  children = psutil.Process().children()
  return [
    child
    for child in children
    if child.pid not in _OTHERS and child.name() == 'worker_binary'
  ]


def _is_alive(process: psutil.Process) -> bool:
  with contextlib.suppress(psutil.NoSuchProcess):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
  return False


def _becomes(condition: Callable[[], bool], seconds: float = 10) -> bool:
  patience = time.monotonic() + seconds
  while not condition() and time.monotonic() < patience:
    time.sleep(0.05)
  return condition()


# Whole programs, and how each ends. They run side by side, and all have a
# worker before the first one ends: so each end must also spare the others.

_PROGRAM = """
import atexit, os, signal, sys
import tff_partial  # Before TFF, for the sake of Python 3.12 and later.
import numpy as np, psutil, tensorflow as tf, tensorflow_federated as tff
from tff_partial.runtimes.native_runtime.native import native
from tff_partial.runtimes.native_runtime.worker import NativeRuntimeError

@tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
def total(values):
  return tff.federated_sum(values)

@tff.tensorflow.computation
def endless():
  return tf.while_loop(lambda i: i >= 0, lambda i: i, [tf.constant(0)])[0]

def tell_and_wait():
  assert total([1.0, 2.0]) == 3.0
  children = [str(child.pid) for child in psutil.Process().children()]
  print('workers:', *children, file=sys.stderr, flush=True)
  sys.stdin.readline()

"""

_ENDINGS = {
  'return': """
native().set_default()
tell_and_wait()
print('first line')
print('last line')
""",
  'exception': """
with native():
  tell_and_wait()
  raise ValueError('on purpose')
""",
  # Python's own way out of a fork waits for TensorFlow's threads, which are
  # not there: hence `os._exit`, as in `multiprocessing`.
  'fork': """
try:
  with native():
    total([1.0])
    child = os.fork()
    if not child:
      try:
        total([1.0])
      except NativeRuntimeError:
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    with native():
      tell_and_wait()
    assert total([1.0, 2.0]) == 3.0
    assert len(psutil.Process().children()) == 1
except SystemExit as end:
  atexit._run_exitfuncs()
  os._exit(end.code)
""",
  'SIGINT': """
native().set_default()
tell_and_wait()
endless()
""",
  'SIGTERM': """
with native():
  tell_and_wait()
  endless()
""",
  'SIGTERM with a handler': """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with native():
  tell_and_wait()
  endless()
""",
  'SIGKILL': """
with native():
  tell_and_wait()
  endless()
""",
  # TFF's own default survives this; that of a program that imports us does not.
  'SIGKILL outside any with': """
tell_and_wait()
endless()
""",
}


@pytest.fixture(scope='module', name='programs')
def fixture_programs() -> Iterator[dict]:
  """Each ending's process and workers."""
  environment = os.environ | {'PYTHONPATH': _ROOT, 'TF_CPP_MIN_LOG_LEVEL': '3'}
  processes = {}
  for ending, code in _ENDINGS.items():
    command = [sys.executable, '-c', _PROGRAM + code]
    if ending == 'return':
      command = ['sh', '-c', '"$@" | tail -1', 'sh'] + command
    processes[ending] = subprocess.Popen(
      command,
      env=environment,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
  programs = {}
  for ending, process in processes.items():
    workers = []
    for line in process.stderr:
      if line.startswith('workers:'):
        workers = [psutil.Process(int(pid)) for pid in line.split()[1:]]
        break
    programs[ending] = process, workers
  yield dict(programs)
  for process, workers in programs.values():
    if process.poll() is None:
      process.kill()
      process.communicate()
    for worker in workers:
      with contextlib.suppress(psutil.NoSuchProcess):
        worker.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
  'ending, status, workers_count',
  [
    ('return', 0, 1),
    ('exception', 1, 1),
    ('fork', 0, 2),
    ('SIGINT', -signal.SIGINT, 1),
    ('SIGTERM', -signal.SIGTERM, 1),
    ('SIGTERM with a handler', 7, 1),
    ('SIGKILL', -signal.SIGKILL, 1),
    ('SIGKILL outside any with', -signal.SIGKILL, 1),
  ],
)
def test_nothing_outlives_a_program(programs, ending, status, workers_count):
  process, workers = programs.pop(ending)
  assert len(workers) == workers_count, process.communicate()
  assert all(map(_is_alive, workers))
  process.stdin.write('\n')
  process.stdin.flush()
  if ending.startswith('SIG'):
    time.sleep(1)  # Let it be in the middle of its computation.
    assert all(map(_is_alive, workers))
    process.send_signal(signal.Signals[ending.split()[0]])

  # Returns when nobody holds an end of its pipes any more.
  output, errors = process.communicate(timeout=20)

  assert process.returncode == status, errors
  assert output == ('last line\n' if ending == 'return' else '')
  assert _becomes(lambda: not any(map(_is_alive, workers)))
  if ending in ('return', 'fork'):
    assert 'Traceback' not in errors
  if ending == 'exception':
    assert errors.rstrip().endswith('ValueError: on purpose')
  for _, others in programs.values():
    assert all(map(_is_alive, others))


def test_a_default_that_was_chosen_stays():
  stack = tff.framework.get_context_stack()
  before = stack.current
  chosen = tff.backends.native.create_async_local_cpp_execution_context()
  try:
    tff.framework.set_default_context(chosen)
    native_module.replace_stock_default()
    assert stack.current is chosen
    tff.backends.native.set_sync_local_cpp_execution_context()
    native_module.replace_stock_default()
    assert isinstance(stack.current, native_module.NativeRuntime)
  finally:
    tff.framework.set_default_context(before)


def test_leaving_the_with_ends_its_own_worker_only():
  assert not _workers()
  with native() as outer:
    assert _total([1.0, 2.0]) == 3.0
    (outer_worker,) = _workers()
    with pytest.raises(ValueError, match='on purpose'), native():
      assert _total([1.0]) == 1.0
      assert len(_workers()) == 2
      raise ValueError('on purpose')
    assert _workers() == [outer_worker]
    with outer:
      assert _total([4.0]) == 4.0
    assert _total([5.0]) == 5.0
    assert _workers() == [outer_worker]
  assert not _workers()
  with pytest.raises(NativeRuntimeError, match='after its `with`'):
    outer.invoke(_total, [1.0])
  with outer:
    assert _total([6.0]) == 6.0
  assert not _workers()


def test_a_default_ends_when_another_takes_its_place():
  stack = tff.framework.get_context_stack()
  before = stack.current
  try:
    native().set_default()
    assert _total([1.0]) == 1.0
    (first,) = _workers()
    native().set_default()
    assert _becomes(lambda: not _is_alive(first))
    assert _total([2.0]) == 2.0
  finally:
    tff.framework.set_default_context(before)
  # TFF's threads may hold it for a moment, or cycles until they are collected.
  gc.collect()
  assert _becomes(lambda: not _workers())


def test_a_lost_worker_is_replaced_once_it_has_ended(monkeypatch):
  with native() as runtime:
    _total([1.0])
    process = runtime._worker._process
    end = time.monotonic() + 0.3
    wait, poll = process.wait, process.poll

    def slow_wait(timeout: float | None = None) -> int:
      time.sleep(max(0.0, end - time.monotonic()))
      return wait(timeout)

    def slow_poll() -> int | None:
      return poll() if time.monotonic() >= end else None

    monkeypatch.setattr(process, 'wait', slow_wait)
    monkeypatch.setattr(process, 'poll', slow_poll)
    process.kill()
    assert _total([1.0, 2.0]) == 3.0
    assert len(_workers()) == 1


def test_a_worker_lost_again_and_again_is_an_error():
  done = threading.Event()

  def kill():
    while not done.wait(0.1):
      for worker in _workers():
        worker.kill()

  with native():
    killer = threading.Thread(target=kill)
    killer.start()
    try:
      with pytest.raises(NativeRuntimeError, match='3 times'):
        _endless()
    finally:
      done.set()
      killer.join()
    assert _total([1.0, 2.0]) == 3.0


def test_an_interrupt_stops_the_computation_and_the_runtime_goes_on():
  with native():
    _total([1.0])
    (worker,) = _workers()
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
      _endless()
    assert not _is_alive(worker)
    time.sleep(0.5)
    assert not _workers()
    assert _total([1.0, 2.0]) == 3.0


@pytest.mark.slow
def test_cohorts_of_changing_size_do_not_fill_the_worker():
  medians = []  # Not the maximum: a thread may be about to end just then.
  with native():
    for first in range(1, 100, 10):
      threads = []
      for size in range(first, first + 10):
        _total([1.0] * size)
        threads.append(_workers()[0].num_threads())
      medians.append(np.median(threads))
  assert min(np.diff(medians)) <= 0, medians  # Eight a size would be kept.


class _Lazy(Sequence):
  """Clients that are made when asked for, and count how often."""

  def __init__(self, clients):
    self._clients = clients
    self.asked = collections.Counter()

  def __len__(self):
    return len(self._clients)

  def __getitem__(self, index):
    client = self._clients[index]
    self.asked[index] += 1
    return client


_Client = collections.OrderedDict(
  x=tff.TensorType(np.float32, [2]), weight=np.float32
)


@tff.tensorflow.computation(np.float32, _Client)
def _weigh(factor, client):
  return factor * client['weight'] * tf.reduce_sum(client['x'])


@tff.federated_computation(
  tff.FederatedType(np.float32, tff.SERVER),
  tff.FederatedType(_Client, tff.CLIENTS),
  _CLIENTS,
)
def _weighted(factor, clients, more):
  everywhere = tff.federated_broadcast(factor)
  weighed = tff.federated_map(_weigh, (everywhere, clients))
  return collections.OrderedDict(
    sum=tff.federated_sum(weighed), more=tff.federated_sum(more), all=weighed
  )


@pytest.mark.parametrize('size', [0, 1, 3])
def test_clients_may_be_any_sequence(size):
  clients = [
    collections.OrderedDict(x=[i, i + 1.0], weight=i + 0.5)
    for i in map(float, range(size))
  ]
  with native():
    lazy = _Lazy(clients)
    expected = _weighted(2.0, clients, [float(i) for i in range(size)])
    found = _weighted(2.0, lazy, more=_Lazy([float(i) for i in range(size)]))
    assert found == expected
    assert lazy.asked == collections.Counter(range(size))
    assert _total(_Lazy([1.0] * size)) == size


def test_a_single_structure_may_hold_sequences():
  @tff.federated_computation(
    collections.OrderedDict(a=_CLIENTS, b=[_CLIENTS, _CLIENTS])
  )
  def add(both):
    return tff.federated_sum(both['a']), tff.federated_sum(both['b'][1])

  with native():
    values = _Lazy([1.0, 2.0])
    assert add(collections.OrderedDict(a=values, b=(values, [3.0, 4.0]))) == (
      3.0,
      7.0,
    )


def test_what_tff_refuses_stays_refused():
  with native():
    for wrong in (7.0, 'clients', {1.0, 2.0}):
      with pytest.raises(TypeError):
        _total(wrong)
    with pytest.raises(ValueError, match='Conflicting cardinalities'):
      _weighted(1.0, _Lazy([]), [1.0])
    assert _total([1.0, 2.0]) == 3.0


def test_a_worker_outlives_the_thread_that_started_it():
  with native(asynchronous=True) as context:

    def start():
      asyncio.run(context.invoke(_total, [1.0]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (worker,) = _workers()
    time.sleep(0.5)
    assert _is_alive(worker)


def test_the_asynchronous_runtime_serves_programs():
  async def program(context):
    sums = await asyncio.gather(
      *(context.invoke(_total, _Lazy([1.0] * n)) for n in range(8))
    )
    assert sums == list(range(8))
    assert await _total(_Lazy([1.0, 2.0])) == 3.0
    federated = tff.program.NativeFederatedContext(context)
    with tff.framework.get_context_stack().install(federated):
      assert await _total([1.0, 2.0]).get_value() == 3.0

  with native(asynchronous=True) as context:
    asyncio.run(program(context))
    assert len(_workers()) == 1
  assert not _workers()
