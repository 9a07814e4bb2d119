"""Seconds and memory of a round against the size of cohort and population.

Invented clients of MovieLens's shape, the paper's recipe. Cohorts of 10 to
10,000 clients out of 10,000: time should be linear, memory flat. Populations of
1,000 to 1,000,000 with 100 clients a round: both should be flat; a reader makes
clients when they are drawn, or they are resident and memory grows at least by
their size. Each setting has its own process, which waits while the others run
their round.

  python -m benchmarks.scaling
  python -m benchmarks.scaling --sweep=population --source=resident
"""

import argparse
import contextlib
import functools
import statistics
from typing import Any

import numpy as np

from benchmarks import measuring

NUM_ITEMS = 3706
MIN_EXAMPLES, MAX_EXAMPLES = 20, 60


def read_client(client: str) -> dict[str, np.ndarray]:
  """Invent the ratings of one client, the same at each call."""
  draw = np.random.default_rng(int(client))
  count = draw.integers(MIN_EXAMPLES, MAX_EXAMPLES, endpoint=True)
  return {
    'x': draw.integers(0, NUM_ITEMS, count, np.int32),
    'y': draw.integers(1, 6, count).astype(np.float32),
  }


def make_source(options: Any, example_spec: Any) -> Any:
  """Make the clients: a reader, or resident arrays."""
  import tff_partial
  from tff_partial.data import populations

  ids = [str(client) for client in range(options.population)]
  if options.source == 'reader':
    return tff_partial.Reader(ids, read_client, example_spec, [MAX_EXAMPLES])
  draw = np.random.default_rng(0)
  counts = draw.integers(
    MIN_EXAMPLES, MAX_EXAMPLES, len(ids), np.int32, endpoint=True
  )
  total = int(counts.sum())
  flat = {
    'x': draw.integers(0, NUM_ITEMS, total, np.int32),
    'y': draw.integers(1, 6, total, np.int8).astype(np.float32),
    'weight': np.ones([total], np.float32),
  }
  return populations.Population(
    ids,
    example_spec,
    {name: flat[name] for name in example_spec},
    np.concatenate([[0], np.cumsum(counts)]),
    capacities=[MAX_EXAMPLES],
  )


def prepare(options: Any, stack: contextlib.ExitStack) -> measuring.Answers:
  """Prepare one setting for the comparing process.

  Args:
    options: The arguments of the program.
    stack: Closes the runtime.
  """
  import tensorflow as tf

  from benchmarks import recipe
  from tasks.movielens import models as movielens_models
  import tff_partial
  from tff_partial import runtimes

  settings = recipe.read().flags()
  model = tff_partial.from_keras(
    functools.partial(
      movielens_models.build_matrix_factorization,
      NUM_ITEMS,
      settings['num_factors'],
    ),
    local=movielens_models.LOCAL_LAYERS,
    loss=tf.keras.losses.MeanSquaredError(),
    metrics=movielens_models.build_metrics,
  )
  process = recipe.build(model, settings)
  source = make_source(options, process.example_spec)

  context = stack.enter_context(runtimes.cohort(jit=True))
  run = measuring.Run(process, source, options.clients_per_round, context)
  turn = measuring.timed(run.step)

  def begin() -> dict[str, float]:
    measuring.forget_peak()
    return {}

  def memory() -> dict[str, float]:
    return {'peak': measuring.peak_memory()}

  def floor() -> dict[str, float]:
    ids = run.sampler.cohort(1)
    seeds = np.zeros([len(ids), 2], np.int32)
    # Clients send the rows that they use; whole tables are not their floor.
    rows, _ = recipe.floors(settings, NUM_ITEMS, [source.cohort(ids, seeds)])
    return rows._asdict()

  return {
    'turn': lambda: {'seconds': turn()},
    'begin': begin,
    'memory': memory,
    'floor': floor,
  }


def sweep(
  title: str, options: Any, settings: dict[str, dict[str, Any]], goal: str
) -> None:
  """Time some settings in turn.

  Args:
    title: The varied quantity.
    options: The arguments of the program.
    settings: For each setting's name, its population, clients_per_round and
      source; the smallest first.
    goal: Description of the expected result.
  """
  measuring.begin(title)
  arguments = {
    name: ['--worker', *(f'--{key}={value}' for key, value in setting.items())]
    for name, setting in settings.items()
  }
  with measuring.workers('benchmarks.scaling', arguments) as started:
    for worker in started.values():
      for _ in range(options.warm_up):
        worker.turn()
      worker.ask('begin')
    seconds = measuring.take_turns(
      {name: worker.turn for name, worker in started.items()},
      repetitions=options.repetitions,
      warm_up=1,
    )
    memory = {name: worker.ask('memory') for name, worker in started.items()}
    floors = {
      name: measuring.Floor(**worker.ask('floor'))
      for name, worker in started.items()
    }
  machine = measuring.rates(4 * 50 * NUM_ITEMS)
  first = next(iter(settings))
  measuring.say(f'Peaks are those of the rounds alone. Goal: {goal}.')
  for name, setting in settings.items():
    median = statistics.median(seconds[name])
    peak = memory[name]['peak']
    measuring.say(
      f'  {name:>10}: '
      f'{measuring.in_seconds(median / setting["clients_per_round"])} a client;'
      f' peak {measuring.in_mib(peak)}, {peak / memory[first]["peak"]:.3f} '
      f'times that of {first}'
    )
    measuring.say_floor('rows that clients use', floors[name], machine, median)
  for name, smaller in zip(list(settings)[1:], settings, strict=False):
    measuring.ratio(seconds, name, smaller)


def main() -> None:
  """Read the arguments and compare, or serve one setting."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--sweep', choices=['cohort', 'population', 'both'], default='both')
  add(
    '--source',
    choices=['reader', 'resident', 'both'],
    default='both',
    help='of the clients when populations are compared',
  )
  add('--largest_cohort', type=int, default=10_000, help='the last of a sweep')
  add('--largest_population', type=int, default=1_000_000, help='likewise')
  add('--repetitions', type=int, default=7, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--clients_per_round', type=int, default=100, help='with populations')
  for name in ('--worker', '--population'):
    add(name, help=argparse.SUPPRESS, **_WORKER_ARGUMENTS[name])
  options = parser.parse_args()
  if options.worker:
    with contextlib.ExitStack() as stack:
      measuring.serve(lambda: prepare(options, stack))
  if options.sweep != 'population':
    sweep(
      'Clients a round, resident',
      options,
      {
        f'{number:,}': {
          'clients_per_round': number,
          'population': options.largest_cohort,
          'source': 'resident',
        }
        for number in _powers(10, options.largest_cohort)
      },
      'time linear, memory flat',
    )
  if options.sweep != 'cohort':
    for source in ('reader', 'resident'):
      if options.source in (source, 'both'):
        sweep(
          f'Clients of the population, {source}',
          options,
          {
            f'{number:,}': {
              'clients_per_round': options.clients_per_round,
              'population': number,
              'source': source,
            }
            for number in _powers(1000, options.largest_population)
          },
          'time and memory flat'
          + ('' if source == 'reader' else ', but for the clients themselves'),
        )


_WORKER_ARGUMENTS: dict[str, dict[str, Any]] = {
  '--worker': {'action': 'store_true'},
  '--population': {'type': int, 'default': 1000},
}


def _powers(first: int, last: int) -> list[int]:
  """Return `first` times the powers of ten, up to `last`."""
  numbers = []
  while first <= last:
    numbers.append(first)
    first *= 10
  return numbers


if __name__ == '__main__':
  main()
