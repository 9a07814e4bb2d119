"""Processes killed at random moments during runs on the Ray runtime.

FedRecon, FURL and Ditto, whose workers read their clients from a folder.
Workers and a machine's whole node are killed during the run; the driver is
killed and restarted, and resumes from its checkpoint. In the end, weights and
client states must equal those of an undisturbed run of the cohort runtime, bit
for bit, and no started process may be left. Needs Ray; `make ray` makes
.venv-ray, which has it.

  .venv-ray/bin/python -m benchmarks.ray_kills
"""

import argparse
import contextlib
import functools
import hashlib
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np
import psutil

from benchmarks import measuring

METHODS = ('fed_recon', 'furl', 'ditto')
WORKERS, DRIVER, NODE = 'workers', 'driver', 'node'

_CLIENTS, _ITEMS, _FACTORS = 400, 200, 8
# After the driver's death, Ray's agents try for a minute to report it.
_SECONDS_TO_END = 150.0


# ---- the run -----------------------------------------------------------------


def _build_keras_model() -> Any:
  import tensorflow as tf

  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(_ITEMS, _FACTORS, name='items')(item)
  score = tf.keras.layers.Dense(1, use_bias=False, name='taste')(vector)
  return tf.keras.Model(item, score)


def build(method: str) -> Any:
  """Build the process of one of the methods."""
  import tff_partial
  from tff_partial import algorithms

  is_personal = method == 'ditto'
  model = tff_partial.from_keras(
    _build_keras_model, local=None if is_personal else 'taste', loss='mse'
  )
  phase = tff_partial.Phase(optimizer=tff_partial.sgd(0.1), shuffle=True)
  builders = {
    'fed_recon': functools.partial(algorithms.build_fed_recon, model),
    'furl': functools.partial(algorithms.build_furl, model, training=phase),
    'ditto': functools.partial(
      algorithms.build_ditto, model, training=phase, personal=phase
    ),
  }
  return builders[method]()


def _clients(folder: pathlib.Path, process: Any) -> Any:
  """Open the clients, written first if they do not exist."""
  import tff_partial

  if not folder.exists():
    draw = np.random.default_rng(0)
    clients = {
      f'client {number:03}': {
        'x': draw.integers(0, _ITEMS, 10 + number % 30, np.int32),
        'y': draw.normal(size=[10 + number % 30, 1]).astype(np.float32),
      }
      for number in range(_CLIENTS)
    }
    tff_partial.write_clients(folder, clients.items(), process.example_spec)
  return tff_partial.open_clients(folder, process.example_spec, capacities=[40])


def train(options: Any) -> str:
  """Train and return a digest of the weights and client states."""
  import tensorflow as tf

  import tff_partial
  from tff_partial import runtimes

  process = build(options.method)
  folder = pathlib.Path(options.folder)
  clients = _clients(folder / 'clients', process)

  def run() -> Any:
    return tff_partial.train(
      process,
      clients,
      rounds=options.rounds,
      clients_per_round=100,
      checkpoint_every=25,
      output_dir=folder / options.output,
      tensorboard=False,
      callbacks=[_say_round],
    )

  with contextlib.ExitStack() as stack:
    if options.run == 'cohort':
      stack.enter_context(runtimes.cohort(jit=False))
    elif options.run == NODE:
      address = stack.enter_context(_losing_nodes(options))
      stack.enter_context(runtimes.ray(address, jit=False, patience=60.0))
    else:
      stack.enter_context(runtimes.ray(workers=2, jit=False, patience=60.0))
    found = run()
    digest = hashlib.sha256()
    store = found.client_store
    remembered = [] if store is None else list(store.read(clients.client_ids))
    for leaf in tf.nest.flatten([found.weights, remembered]):
      digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


def _say_round(result: Any) -> None:
  measuring.say(f'round {result.round}')


@contextlib.contextmanager
def _losing_nodes(options: Any) -> Any:
  """Start a cluster that repeatedly loses and replaces one of two nodes.

  Yields:
    The cluster's address.
  """
  import ray
  from ray import cluster_utils

  draw = random.Random(options.seed)
  cluster = cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 0}
  )
  nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
  is_over = threading.Event()

  def lose() -> None:
    for _ in range(options.kills):
      if is_over.wait(draw.uniform(12.0, 25.0)):
        return
      # On one host, the driver may have joined any node; losing it ends the
      # run.
      own = ray.get_runtime_context().get_node_id()
      lost = draw.choice([node for node in nodes if node.node_id != own])
      nodes.remove(lost)
      cluster.remove_node(lost, allow_graceful=False)
      measuring.say('lost')
      nodes.append(cluster.add_node(num_cpus=1))

  thread = threading.Thread(target=lose, daemon=True)
  thread.start()
  try:
    yield cluster.address
  finally:
    is_over.set()
    thread.join()
    cluster.shutdown()


# ---- the kills ---------------------------------------------------------------


class _Disturbed:
  """Run in a child process, with its output and its descendants so far."""

  def __init__(self, *arguments: str):
    self._errors = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'benchmarks.ray_kills', *arguments],
      cwd=measuring.ROOT,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
    )
    self.lines: list[str] = []
    self.seen: set[psutil.Process] = set()
    self._reader = threading.Thread(target=self._read, daemon=True)
    self._reader.start()

  def _read(self) -> None:
    for line in self._process.stdout or ():
      self.lines.append(line.strip())

  @property
  def is_running(self) -> bool:
    """True until the process has ended."""
    return self._process.poll() is None

  def is_training(self) -> bool:
    """Return True once a round has been run."""
    return any(line.startswith('round') for line in self.lines)

  def look(self) -> list[psutil.Process]:
    """Record all descendants and return those that run clients."""
    workers = []
    with contextlib.suppress(psutil.Error):
      for child in psutil.Process(self._process.pid).children(recursive=True):
        self.seen.add(child)
        with contextlib.suppress(psutil.Error):
          if 'ray::Shards' in ' '.join(child.cmdline()):
            workers.append(child)
    return workers

  def kill(self) -> None:
    """Kill the driver with SIGKILL."""
    self.look()
    self._process.send_signal(signal.SIGKILL)
    self._process.wait()

  def digest(self) -> str:
    """Return the digest of a finished run.

    Raises:
      BenchmarkError: If it failed.
    """
    status = self._process.wait()
    self._reader.join()
    if status:
      self._errors.seek(0)
      said = self._errors.read()[-2000:]
      raise measuring.BenchmarkError(f'A run ended with {status}: {said}')
    return self.lines[-1]


def _has_ended(process: psutil.Process) -> bool:
  try:
    return process.status() == psutil.STATUS_ZOMBIE
  except psutil.Error:
    return True


def _left(seen: set[psutil.Process]) -> list[psutil.Process]:
  """Return the processes that are still alive after a while."""
  deadline = time.monotonic() + _SECONDS_TO_END
  while time.monotonic() < deadline:
    if all(map(_has_ended, seen)):
      return []
    time.sleep(0.5)
  return [process for process in seen if not _has_ended(process)]


def disturb(
  arguments: list[str], what: str, kills: int, draw: random.Random
) -> tuple[int, str, set[psutil.Process]]:
  """Run the training while killing processes.

  Args:
    arguments: Arguments of the run.
    what: The kind of process to kill.
    kills: Maximum number of kills.
    draw: Chooses the moments and the victims.

  Returns:
    The number of kills before the run ended, the run's digest, and all
    processes that it had started.
  """
  run, done = _Disturbed(f'--run={what}', *arguments), 0
  seen: set[psutil.Process] = set()
  while run.is_running:
    workers = run.look()
    if done < kills and run.is_training() and what != NODE:
      time.sleep(draw.uniform(2.0, 14.0))
      workers = run.look()
      if what == DRIVER and run.is_running:
        run.kill()
        seen |= run.seen
        done += 1
        run = _Disturbed(f'--run={what}', *arguments)
      elif what == WORKERS and workers:
        with contextlib.suppress(psutil.Error):
          draw.choice(workers).kill()
          done += 1
    time.sleep(0.2)
  if what == NODE:
    done = run.lines.count('lost')
  return done, run.digest(), seen | run.seen


def main() -> None:
  """Read the arguments and run the benchmark, or one training run."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--kills_of_workers', type=int, default=14, help='for each method')
  add('--kills_of_drivers', type=int, default=4, help='for each method')
  add('--losses_of_nodes', type=int, default=2, help='for each method')
  add('--rounds', type=int, default=2000, help='of each run')
  add('--seed', type=int, default=0, help='of the moments')
  add('--methods', nargs='+', default=METHODS, choices=METHODS)
  for name in ('--run', '--method', '--folder', '--output'):
    add(name, help=argparse.SUPPRESS)
  add('--kills', type=int, default=0, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.run:
    measuring.say(train(options))
    return
  measuring.begin('Processes killed at random moments')
  kinds = {
    WORKERS: options.kills_of_workers,
    DRIVER: options.kills_of_drivers,
    NODE: options.losses_of_nodes,
  }
  totals = dict.fromkeys(kinds, 0)
  with tempfile.TemporaryDirectory() as folder:
    for method in options.methods:
      given = [
        f'--method={method}',
        f'--folder={folder}',
        f'--rounds={options.rounds}',
        f'--seed={options.seed}',
      ]
      alone = _Disturbed('--run=cohort', *given, f'--output={method}').digest()
      for what, kills in kinds.items():
        if not kills:
          continue
        output = [f'--output={method}_{what}', f'--kills={kills}']
        draw = random.Random(f'{options.seed} {method} {what}')
        started = time.perf_counter()
        done, found, seen = disturb([*given, *output], what, kills, draw)
        if found != alone:
          raise measuring.BenchmarkError(
            f'{method}, {what} killed {done} times: other bits.'
          )
        left = _left(seen)
        if left:
          raise measuring.BenchmarkError(f'{method}, {what}: left are {left}.')
        totals[what] += done
        measuring.say(
          f'  {method}: {what} killed {done} times in '
          f'{measuring.in_seconds(time.perf_counter() - started)}: the same '
          f'bits; of {len(seen)} processes none is left'
        )
  measuring.say(
    'Altogether ' + ', '.join(f'{what} {n} times' for what, n in totals.items())
  )


if __name__ == '__main__':
  main()
