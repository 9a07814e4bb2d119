"""Shared parts of the benchmarks: clocks, memory, floors, processes, rounds.

A benchmark compares candidates. Each is a function that does its work once and
returns the seconds taken; candidates take turns (A B A B ...), so that a slow
phase of the machine hits all of them, and medians count.
"""

import argparse
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Does its work once and returns the seconds.
Candidate: TypeAlias = Callable[[], float]


class BenchmarkError(RuntimeError):
  """Raised when something cannot be measured."""


# ---- printing ----------------------------------------------------------------


def say(text: str = '') -> None:
  """Print a line."""
  sys.stdout.write(f'{text}\n')
  sys.stdout.flush()


class _HelpFormatter(
  argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
  """Formatter that keeps a docstring's lines and prints default values."""


def parser(description: str | None) -> argparse.ArgumentParser:
  """Make a parser whose help is the benchmark's docstring."""
  return argparse.ArgumentParser(
    description=description, formatter_class=_HelpFormatter
  )


def begin(title: str) -> None:
  """Print a title and a description of the machine."""
  cores = len(os.sched_getaffinity(0))
  load = os.getloadavg()[0]
  memory = psutil.virtual_memory().total / 2**30
  say(f'== {title}')
  say(
    f'{_processor()}, {cores} cores, {memory:.0f} GiB; Python '
    f'{platform.python_version()}; load before: {load:.1f}'
  )
  if load > 0.3 * cores:
    say('Others are using this machine: trust the ratios, not the seconds.')


def _processor() -> str:
  with contextlib.suppress(OSError):
    for line in pathlib.Path('/proc/cpuinfo').read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.machine()


def in_seconds(seconds: float) -> str:
  """Format seconds in a suitable unit."""
  if seconds < 1e-3:
    return f'{seconds * 1e6:.0f} us'
  if seconds < 1.0:
    return f'{seconds * 1e3:.3g} ms'
  return f'{seconds:.3g} s'


# ---- time --------------------------------------------------------------------


def timed(work: Callable[[], Any], times: int = 1, parts: int = 1) -> Candidate:
  """Return a candidate that does some work in this process.

  Args:
    work: The work.
    times: Repetitions in each turn; the median counts. For work that is short
      compared with the others'.
    parts: Number of equal parts of the work; the time of one part counts.
  """

  def run() -> float:
    taken = []
    for _ in range(times):
      started = time.perf_counter()
      work()
      taken.append(time.perf_counter() - started)
    return statistics.median(taken) / parts

  return run


def take_turns(
  candidates: Mapping[str, Candidate], *, repetitions: int, warm_up: int
) -> dict[str, list[float]]:
  """Time candidates in turn and print the seconds of each.

  Args:
    candidates: Candidates by name.
    repetitions: Turns of each that count.
    warm_up: Uncounted turns of each before those.

  Returns:
    The seconds of each counted turn, by name.
  """
  seconds: dict[str, list[float]] = {name: [] for name in candidates}
  for turn in range(warm_up + repetitions):
    for name, candidate in candidates.items():
      taken = candidate()
      if turn >= warm_up:
        seconds[name].append(taken)
  say(
    f'{repetitions} turns each, one after the other, after {warm_up} to warm '
    'up, which do not count:'
  )
  width = max(map(len, candidates))
  say(f'  {"":{width}}  {"median":>9}  {"quartiles":>21}  {"least":>9}')
  for name, turns in seconds.items():
    low, high = quartiles(turns)
    say(
      f'  {name:{width}}  {in_seconds(statistics.median(turns)):>9}  '
      f'{in_seconds(low):>9} - {in_seconds(high):>9}  '
      f'{in_seconds(min(turns)):>9}'
    )
  return seconds


def quartiles(values: Sequence[float]) -> tuple[float, float]:
  """Return the lower and the upper quartile."""
  low, high = np.quantile(values, [0.25, 0.75])
  return float(low), float(high)


def ratio(
  seconds: Mapping[str, Sequence[float]], of: str, to: str, goal: str = ''
) -> float:
  """Print and return how many times as long one candidate took as another.

  The ratio is the median, over the turns, of the ratio within a turn.

  Args:
    seconds: The result of `take_turns`.
    of: The numerator.
    to: The denominator.
    goal: Target for the ratio, to be printed.
  """
  ratios = [a / b for a, b in zip(seconds[of], seconds[to], strict=True)]
  low, high = quartiles(ratios)
  middle = statistics.median(ratios)
  aim = f'; goal: {goal}' if goal else ''
  say(f'  {of} / {to}: {middle:.3g} (quartiles {low:.3g} to {high:.3g}{aim})')
  return middle


def fastest(seconds: Mapping[str, Sequence[float]], *names: str) -> str:
  """Return the name of the candidate with the least median."""
  return min(names, key=lambda name: statistics.median(seconds[name]))


# ---- floors ------------------------------------------------------------------


class Floor(NamedTuple):
  """Lower bound of some work.

  Attributes:
    bytes_moved: Bytes that must be read and written.
    operations: Additions and multiplications.
  """

  bytes_moved: float
  operations: float

  def __add__(self, other: Any) -> 'Floor':
    return Floor(
      self.bytes_moved + other.bytes_moved, self.operations + other.operations
    )


class Rates(NamedTuple):
  """Throughput of this machine per second, on all cores.

  Attributes:
    bytes_moved: Bytes read and written by copying arrays.
    operations: Additions and multiplications in a matrix product.
  """

  bytes_moved: float
  operations: float

  def least_seconds(self, floor: Floor) -> float:
    """Return the floor's seconds if memory access and computing overlap."""
    return max(
      floor.bytes_moved / self.bytes_moved, floor.operations / self.operations
    )


def rates(array_bytes: int, seconds: float = 0.5) -> Rates:
  """Measure this machine's throughput: the best of many short attempts.

  Args:
    array_bytes: The size of the arrays to copy; arrays that fit into a cache
      move faster.
    seconds: Time to spend on each of the two rates.
  """
  cores = len(os.sched_getaffinity(0))
  size = 512
  one, other, result = (np.ones([size, size], np.float32) for _ in range(3))
  pairs = [
    (np.ones(array_bytes, np.uint8), np.empty(array_bytes, np.uint8))
    for _ in range(cores)
  ]

  def best(work: Callable[[], Any]) -> float:
    least, end = float('inf'), time.perf_counter() + seconds
    while time.perf_counter() < end:
      started = time.perf_counter()
      work()
      least = min(least, time.perf_counter() - started)
    return least

  # NumPy multiplies matrices on all cores and copies on one.
  product = best(lambda: np.matmul(one, other, out=result))
  with futures.ThreadPoolExecutor(cores) as pool:
    copies = pool.map(lambda pair: best(lambda: np.copyto(*pair)), pairs)
    moved = sum(2 * array_bytes / least for least in copies)
  return Rates(moved, 2 * size**3 / product)


def say_floor(what: str, floor: Floor, machine: Rates, measured: float) -> None:
  """Print a floor, its time on this machine, and the measured multiple of it.

  Args:
    what: Name of the work.
    floor: The work's floor.
    machine: Rates of this machine.
    measured: Measured seconds.
  """
  least = machine.least_seconds(floor)
  say(
    f'  floor, {what}: {floor.bytes_moved / 1e6:.4g} MB moved, '
    f'{floor.operations / 1e6:.4g} million operations: at least '
    f'{in_seconds(least)} at {machine.bytes_moved / 1e9:.3g} GB/s and '
    f'{machine.operations / 1e9:.3g} GFLOP/s (measured now); '
    f'{measured / least:.3g} times that was taken'
  )


# ---- memory ------------------------------------------------------------------


def tree_memory() -> int:
  """Return the resident bytes of this process and its descendants."""
  process = psutil.Process()
  total = process.memory_info().rss
  for child in process.children(recursive=True):
    with contextlib.suppress(psutil.Error):
      total += child.memory_info().rss
  return total


def forget_peak() -> None:
  """Reset this process's peak memory, where the system supports it."""
  with contextlib.suppress(OSError):
    pathlib.Path('/proc/self/clear_refs').write_text('5')


def peak_memory() -> int:
  """Return this process's peak resident bytes since `forget_peak`."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('VmHWM'):
      return 1024 * int(line.split()[1])
  raise BenchmarkError('The system does not tell the peak of a process.')


def in_mib(size: float) -> str:
  """Format bytes as mebibytes."""
  return f'{size / 2**20:.1f} MiB'


# ---- processes ---------------------------------------------------------------


@contextlib.contextmanager
def ending_children() -> Iterator[None]:
  """Kill child processes started in the context when it ends.

  The worker that TFF's stock runtime starts would outlive Python.
  """
  before = {child.pid for child in psutil.Process().children(recursive=True)}
  try:
    yield
  finally:
    for child in psutil.Process().children(recursive=True):
      if child.pid not in before:
        with contextlib.suppress(psutil.Error):
          child.kill()


def new_process(*command: str) -> tuple[float, str]:
  """Run Python and return the seconds and the last line of its output."""
  started = time.monotonic()
  done = subprocess.run(
    [sys.executable, *command],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  lines = done.stdout.splitlines()
  return time.monotonic() - started, lines[-1] if lines else ''


class Worker:
  """Child process that does its work on request.

  For candidates that cannot share a process: the number of kernel threads is
  fixed once per process, and peak memory never falls.
  """

  def __init__(
    self, module: str, *arguments: str, python: str = sys.executable
  ):
    """Start `python -m module arguments`, whose `main` calls `serve`."""
    self._process = subprocess.Popen(
      [python, '-m', module, *arguments],
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )

  def ask(self, request: str) -> dict[str, Any]:
    """Return the answer to a request.

    Raises:
      BenchmarkError: If the worker has ended; its output says why.
    """
    try:
      if self._process.stdin and self._process.stdout:
        self._process.stdin.write(f'{request}\n')
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer:
          return json.loads(answer)
    except BrokenPipeError:
      pass
    raise BenchmarkError(
      f'The worker ended with status {self._process.wait()}.'
    )

  def turn(self) -> float:
    """Have the worker do its work once; a candidate."""
    return float(self.ask('turn')['seconds'])

  def close(self) -> None:
    """End the worker."""
    for pipe in (self._process.stdin, self._process.stdout):
      if pipe:
        pipe.close()
    self._process.wait()


@contextlib.contextmanager
def workers(
  module: str, arguments: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Worker]]:
  """Start workers one after the other and end them with the context.

  Args:
    module: The module that they run.
    arguments: The arguments of each, by name.
  """
  started: dict[str, Worker] = {}
  try:
    for name, given in arguments.items():
      started[name] = Worker(module, *given)
      started[name].ask('ready')
    yield started
  finally:
    for worker in started.values():
      worker.close()


Answers: TypeAlias = Mapping[str, Callable[[], Mapping[str, Any]]]


def serve(prepare: Callable[[], Answers]) -> NoReturn:
  """Answer requests of the `Worker` that started this process.

  Only answers reach the standard output.

  Args:
    prepare: Sets up and returns the function that answers each request, by
      name. 'ready' is always answered.
  """
  replies = os.fdopen(os.dup(sys.stdout.fileno()), 'w')
  sys.stdout.flush()
  os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
  with ending_children():
    answers = prepare()
    for line in sys.stdin:
      request = line.strip()
      answer = {} if request == 'ready' else answers[request]()
      replies.write(json.dumps(answer) + '\n')
      replies.flush()
  sys.exit(0)


# ---- rounds ------------------------------------------------------------------


class Run:
  """Training run, round by round, with the same steps as `tff_partial.train`.

  Attributes:
    state: The server's state.
    round: Number of rounds run.
    metrics: Metrics of the last round.
  """

  def __init__(
    self,
    process: Any,
    clients: Any,
    clients_per_round: int,
    context: Any,
    seed: int = 0,
    store: Any = None,
  ):
    """Set up the run and its first state.

    Args:
      process: A `PartialProcess`.
      clients: A source of clients.
      clients_per_round: The size of a cohort.
      context: The runtime; must stay open.
      seed: The run's seed.
      store: A `ClientStore`; None if clients keep no state.
    """
    from tff_partial.training import sampling

    self._process, self._clients, self._store = process, clients, store
    self._context = context
    self.sampler = sampling.CohortSampler(
      clients.client_ids, clients_per_round, seed
    )
    self.round = 0
    self.metrics: Mapping[str, Any] = {}
    with installed(context):
      self.state = process.initialize()

  def step(self) -> None:
    """Run a round, from choosing the cohort to weights and metrics."""
    from tff_partial.training import metrics_log

    number = self.round + 1
    ids = self.sampler.cohort(number)
    seeds = self.sampler.seeds(number, ids)
    kept: Sequence[Any] = [collections.OrderedDict()] * len(ids)
    if self._store is not None:
      kept = self._store.read(ids)
    with installed(self._context):
      output = self._process.next(
        self.state, kept, self._clients.cohort(ids, seeds)
      )
    if self._store is not None:
      self._store.write(ids, output.client_states)
    self.state, self.round = output.state, number
    self.metrics = metrics_log.flatten(output.metrics)

  def weights(self) -> Any:
    """Return the model's weights at the server."""
    with installed(self._context):
      return self._process.get_model_weights(self.state)


def installed(context: Any) -> Any:
  """Return a context manager that runs computations in `context`."""
  import tensorflow_federated as tff

  return tff.framework.get_context_stack().install(context)
