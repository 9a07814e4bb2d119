"""Clients on disk: rounds drawn from ten thousand to a million of them.

Invented clients of MovieLens's shape with 20 to 200 ratings each, written to
folders (`tff_partial.write_clients`); FURL, where each client keeps a vector of
50 numbers in a store on disk; 1,000 clients a round. Seconds a round should not
depend on the population, nor memory on the number of rounds. Each setting has
its own process, which waits while the others run their round. With Ray, two
workers read the clients that they run.

  python -m benchmarks.million_clients
  .venv-ray/bin/python -m benchmarks.million_clients --runtime=ray
"""

import argparse
from collections.abc import Iterator
import contextlib
import functools
import pathlib
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import psutil

from benchmarks import measuring

NUM_ITEMS, NUM_FACTORS = 3706, 50
MIN_EXAMPLES, MAX_EXAMPLES = 20, 200
# Rounds between two lines about memory.
SAID_EVERY = 50


def build() -> Any:
  """Build the process: items are shared, each client keeps its vector."""
  import tensorflow as tf

  from tasks.movielens import models as movielens_models
  import tff_partial
  from tff_partial import algorithms

  model = tff_partial.from_keras(
    functools.partial(
      movielens_models.build_matrix_factorization, NUM_ITEMS, NUM_FACTORS
    ),
    local=movielens_models.LOCAL_LAYERS,
    loss=tf.keras.losses.MeanSquaredError(),
    metrics=movielens_models.build_metrics,
  )
  phase = tff_partial.Phase(
    optimizer=tff_partial.sgd(0.1), batch_size=20, max_steps=10
  )
  return algorithms.build_furl(model, training=phase)


def invented(number: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
  """Yield clients with invented ratings, the same at each call."""
  draw = np.random.default_rng(0)
  for client in range(number):
    count = draw.integers(MIN_EXAMPLES, MAX_EXAMPLES, endpoint=True)
    yield (
      f'client {client}',
      {
        'x': draw.integers(0, NUM_ITEMS, count, np.int32),
        'y': draw.integers(1, 6, count).astype(np.float32),
      },
    )


def write(folder: pathlib.Path, number: int, example_spec: Any) -> None:
  """Write a population unless it exists."""
  import tff_partial

  if folder.exists():
    return
  seconds = measuring.timed(
    lambda: tff_partial.write_clients(folder, invented(number), example_spec)
  )()
  size = sum(path.stat().st_size for path in folder.iterdir())
  measuring.say(
    f'{number:,} clients were written in {measuring.in_seconds(seconds)}: '
    f'{measuring.in_mib(size)}.'
  )


def prepare(options: Any, stack: contextlib.ExitStack) -> measuring.Answers:
  """Prepare one setting for the comparing process.

  Args:
    options: The arguments of the program.
    stack: Closes store and runtime.
  """
  from benchmarks import stateful_round
  import tff_partial
  from tff_partial import runtimes
  from tff_partial.training.client_store import client_store

  process = build()
  clients = tff_partial.open_clients(
    pathlib.Path(options.folder) / str(options.population),
    process.example_spec,
    capacities=[MAX_EXAMPLES],
  )
  temporary = stack.enter_context(tempfile.TemporaryDirectory())
  store = client_store.ClientStore(process.initialize_client, folder=temporary)
  stack.callback(store.close)
  # Drawing a new client's first state would cost more.
  stateful_round.fill(store, list(clients.client_ids))
  context = stack.enter_context(
    runtimes.ray(workers=2, jit=True)
    if options.runtime == 'ray'
    else runtimes.cohort(jit=True)
  )
  run = measuring.Run(
    process, clients, options.clients_per_round, context, store=store
  )

  def step() -> dict[str, float]:
    started = time.perf_counter()
    run.step()
    seconds = time.perf_counter() - started
    # Unsaved states are in memory: with few clients, soon those of all.
    store.save(run.round)
    return {'seconds': seconds}

  return {'turn': step, 'memory': _memory}


def _memory() -> dict[str, float]:
  """Return resident bytes of the driver and of each Ray worker."""
  process = psutil.Process()
  found = {'driver': process.memory_info().rss}
  workers = []
  for child in process.children(recursive=True):
    with contextlib.suppress(psutil.Error):
      if 'ray::Shards' in ' '.join(child.cmdline()):
        workers.append(child.memory_info().rss)
  names = (f'worker {place}' for place in range(1, len(workers) + 1))
  return {**found, **dict(zip(names, sorted(workers), strict=False))}


def sweep(options: Any, folder: str, runtime: str) -> None:
  """Compare populations under a runtime, then continue with the largest."""
  populations = options.populations
  names = {number: f'{number:,}' for number in populations}
  arguments = {
    names[number]: [
      '--worker',
      f'--folder={folder}',
      f'--runtime={runtime}',
      f'--population={number}',
      f'--clients_per_round={options.clients_per_round}',
    ]
    for number in populations
  }
  measuring.say(f'\nRuntime: {runtime}')
  with measuring.workers('benchmarks.million_clients', arguments) as started:
    seconds = measuring.take_turns(
      {name: worker.turn for name, worker in started.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    for number in populations[1:]:
      measuring.ratio(seconds, names[number], names[populations[0]], 'flat')
    largest = started[names[populations[-1]]]
    rounds = options.warm_up + options.repetitions
    memory: dict[int, dict[str, Any]] = {rounds: largest.ask('memory')}
    taken: list[float] = []
    while rounds < options.rounds:
      taken.append(largest.turn())
      rounds += 1
      if rounds % SAID_EVERY == 0 or rounds == options.rounds:
        memory[rounds] = largest.ask('memory')
        each = ', '.join(
          f'{name} {measuring.in_mib(size)}'
          for name, size in memory[rounds].items()
        )
        measuring.say(
          f'  round {rounds:4}: {each}; '
          f'{measuring.in_seconds(statistics.median(taken))} a round'
        )
        taken.clear()
  first, last = min(memory), max(memory)
  for name, size in memory[first].items():
    measuring.say(
      f'  memory of the {name} at round {last} / at round {first}: '
      f'{memory[last][name] / size:.3f} (goal: flat)'
    )


def main() -> None:
  """Read the arguments and compare, or serve one setting."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add(
    '--populations',
    type=int,
    nargs='+',
    default=[10_000, 100_000, 1_000_000],
    help='numbers of clients, the smallest first',
  )
  add('--runtime', choices=['cohort', 'ray'], default='cohort')
  add('--clients_per_round', type=int, default=1000, help='size of a cohort')
  add('--repetitions', type=int, default=15, help='turns of each that count')
  add('--warm_up', type=int, default=3, help='turns of each before')
  add('--rounds', type=int, default=500, help='of the largest, for its memory')
  add('--folder', help='where clients are written; a temporary one by default')
  add('--worker', action='store_true', help=argparse.SUPPRESS)
  add('--population', type=int, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    with contextlib.ExitStack() as stack:
      measuring.serve(lambda: prepare(options, stack))
  measuring.begin('Clients on disk')
  with contextlib.ExitStack() as stack:
    folder = options.folder or stack.enter_context(
      tempfile.TemporaryDirectory()
    )
    spec = build().example_spec
    for number in options.populations:
      write(pathlib.Path(folder) / str(number), number, spec)
    sweep(options, folder, options.runtime)


if __name__ == '__main__':
  main()
