"""Cost of a client against the size of the table that it reads rows of.

Invented clients that rate items drawn from tables of 10,000 to 1,000,000 rows,
the recipe of MovieLens. Each table is trained in rounds of few and of many
clients, cut into the same number of shards. The cost of a client is the
difference divided by the additional clients, and should be flat. The rest is
the cost of the server and of the shards' accumulators, which do handle whole
tables. The smallest table is also trained with TFF's mean, to which clients
send whole tables.

  python -m benchmarks.sparse_rows
"""

import functools
import statistics
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks import measuring
from benchmarks import recipe
from tasks.movielens import models as movielens_models
import tff_partial
from tff_partial import runtimes
from tff_partial.data import populations

EXAMPLES = 60
# A cohort of either size is cut into the maximum number of shards.
FEW, MANY, SHARDS = 500, 5000, 8


def make_clients(num_items: int, example_spec: Any) -> populations.Population:
  """Invent clients that have all rated the same number of items."""
  draw = np.random.default_rng(0)
  total = MANY * EXAMPLES
  flat = {
    'x': draw.integers(0, num_items, total, np.int32),
    'y': draw.integers(1, 6, total).astype(np.float32),
    'weight': np.ones([total], np.float32),
  }
  return populations.Population(
    [str(client) for client in range(MANY)],
    example_spec,
    {name: flat[name] for name in example_spec},
    np.arange(0, total + 1, EXAMPLES),
    capacities=[EXAMPLES],
  )


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=10, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--num_factors', type=int, default=16, help='numbers in a row')
  add('--largest', type=int, default=1_000_000, help='rows of the last table')
  options = parser.parse_args()

  measuring.begin('Clients that read rows of tables, by rows of the table')
  settings = recipe.read(f'--num_factors={options.num_factors}').flags()
  sizes = [10**power for power in range(4, 9) if 10**power <= options.largest]
  kinds: dict[str, tuple[int, dict[str, Any]]] = {
    f'{size:,} rows': (size, {}) for size in sizes
  }
  whole = f'{sizes[0]:,} rows, sent as a whole'
  mean = tff.aggregators.MeanFactory(no_nan_division=True)
  kinds[whole] = (sizes[0], {'aggregation': tff_partial.Aggregation(mean)})

  candidates = {}
  floors = {}
  with runtimes.cohort(jit=True) as context:
    for name, (size, changes) in kinds.items():
      model = tff_partial.from_keras(
        functools.partial(
          movielens_models.build_matrix_factorization, size, options.num_factors
        ),
        local=movielens_models.LOCAL_LAYERS,
        loss=tf.keras.losses.MeanSquaredError(),
      )
      process = recipe.build(model, settings, **changes)
      clients = make_clients(size, process.example_spec)
      for number in (FEW, MANY):
        run = measuring.Run(process, clients, number, context)
        candidates[f'{name}, {number} clients'] = measuring.timed(run.step)
      ids = clients.client_ids[:FEW]
      cohort = clients.cohort(ids, np.zeros([FEW, 2], np.int32))
      # The same clients' floor without a table at the server.
      floors[name], _ = recipe.floors(settings, 0, [cohort])
    seconds = measuring.take_turns(
      candidates, repetitions=options.repetitions, warm_up=options.warm_up
    )

  each = {
    name: [
      (many - few) / (MANY - FEW)
      for few, many in zip(
        seconds[f'{name}, {FEW} clients'],
        seconds[f'{name}, {MANY} clients'],
        strict=True,
      )
    ]
    for name in kinds
  }
  first, *others = kinds
  for name, (size, _) in kinds.items():
    table = 4 * options.num_factors * size
    machine = measuring.rates(table)
    client = statistics.median(each[name])
    least = measuring.Floor(*(part / FEW for part in floors[name]))
    measuring.say(f'{name}: {measuring.in_seconds(client)} a client')
    measuring.say_floor('rows that a client uses', least, machine, client)
    # Accumulators are cleared and merged; the mean is divided and subtracted.
    rest = statistics.median(seconds[f'{name}, {FEW} clients']) - FEW * client
    server = measuring.Floor((2 * SHARDS + 6) * table, SHARDS * table // 4)
    measuring.say_floor('accumulators and server', server, machine, rest)
  measuring.say('What a client costs:')
  for name in others:
    goal = '' if name == whole else 'flat'
    measuring.ratio(each, name, first, goal)


if __name__ == '__main__':
  main()
