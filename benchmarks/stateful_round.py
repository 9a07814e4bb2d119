"""Cost of client states: a round of MovieLens with and without them.

Clients train items and their own vector together. In one process they discard
the vector, in the other they keep it between rounds, in memory or in a file
that holds a million clients.

  python -m benchmarks.stateful_round
"""

import statistics
import tempfile
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks import recipe
import tff_partial
from tff_partial import client_state
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import typed_values
from tff_partial.training.client_store import client_store

FORGOTTEN = 'forgotten'
IN_MEMORY = 'remembered, in memory'
IN_FILE = 'remembered, in a file'


def build(paper: recipe.Recipe, memory: client_state.ClientState) -> Any:
  """Build joint training of items and user vectors.

  Args:
    paper: The recipe.
    memory: The clients' state.
  """
  settings = paper.settings
  work = tff_partial.Phase(
    train=(tiers.GLOBAL, tiers.LOCAL),
    optimizer=tff_partial.sgd(settings['update_learning_rate']),
    batch_size=settings['batch_size'],
    epochs=settings['update_epochs'],
    max_steps=settings['update_steps'],
    measured=True,
  )
  return tff_partial.compose(
    paper.task.model_with('own'), work=[work], client_state=memory
  )


def fill(store: client_store.ClientStore, client_ids: list[str]) -> None:
  """Give clients a state and save it."""
  draw = np.random.default_rng(0)
  specs = typed_values.tensor_specs(store.type)
  leaves = [
    draw.normal(size=[len(client_ids), *spec.shape]).astype(np.float32)
    for spec in specs
  ]
  convert = typed_values.converter(store.type)
  states = client_batch.Columns.of(len(client_ids), leaves, convert)
  seconds = measuring.timed(lambda: store.write(client_ids, states))()
  seconds += measuring.timed(lambda: store.save(0))()
  size = store.path.stat().st_size if store.path else 0
  measuring.say(
    f'{len(client_ids):,} clients were stored in '
    f'{measuring.in_seconds(seconds)}; the file has {measuring.in_mib(size)}.'
  )


def say_store(store: client_store.ClientStore, client_ids: list[str]) -> None:
  """Print the time to read and write large cohorts."""
  draw = np.random.default_rng(1)
  for size in (100, 1000):
    taken: dict[str, list[float]] = {'read': [], 'written': []}
    for _ in range(20):
      places = draw.choice(len(client_ids), size, replace=False)
      ids = [client_ids[place] for place in places]
      read: list[Any] = []
      work = {
        'read': lambda ids=ids, read=read: read.append(store.read(ids)),
        'written': lambda ids=ids, read=read: store.write(ids, read[0]),
      }
      for name, do in work.items():
        taken[name].append(measuring.timed(do)())
    for name, seconds in taken.items():
      measuring.say(
        f'  {size} clients {name}: '
        f'{measuring.in_seconds(statistics.median(seconds))}'
      )


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=20, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--rounds', type=int, default=5, help='rounds in a turn')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  add('--population', type=int, default=1_000_000, help='clients in the file')
  options = parser.parse_args()

  measuring.begin('MovieLens, joint training, one round, by what is remembered')
  number = options.clients_per_round
  paper = recipe.load(f'--clients_per_round={number}')
  users = list(paper.clients.client_ids)
  others = [f'invented {i}' for i in range(options.population - len(users))]
  keeping = build(paper, client_state.persist_local)
  with (
    tempfile.TemporaryDirectory() as folder,
    runtimes.cohort(jit=paper.jit) as context,
  ):
    file = client_store.ClientStore(keeping.initialize_client, folder=folder)
    fill(file, [*users, *others])
    stores = {
      IN_MEMORY: client_store.ClientStore(keeping.initialize_client),
      IN_FILE: file,
    }
    runs = {
      FORGOTTEN: measuring.Run(
        build(paper, client_state.stateless), paper.clients, number, context
      )
    }
    for name, store in stores.items():
      runs[name] = measuring.Run(
        keeping, paper.clients, number, context, store=store
      )
    seconds = measuring.take_turns(
      {
        name: measuring.timed(run.step, options.rounds)
        for name, run in runs.items()
      },
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    measuring.say(f'A turn is the median of {options.rounds} rounds.')
    measuring.ratio(seconds, IN_FILE, FORGOTTEN, 'at most 1.3')
    measuring.ratio(seconds, IN_MEMORY, FORGOTTEN)

    file.save(1)
    measuring.say(f'A store of {options.population:,} clients, in a file:')
    say_store(file, [*users, *others])
    file.save(2)
    for _ in range(50):
      runs[IN_FILE].step()
    taken = measuring.timed(lambda: file.save(3))()
    measuring.say(
      f'  saved what 50 rounds touched: {measuring.in_seconds(taken)}'
    )
    file.close()

  vector = 4 * paper.settings['num_factors']
  machine = measuring.rates(number * vector)
  added = measuring.Floor(2 * number * vector, 0)
  median = {name: statistics.median(turns) for name, turns in seconds.items()}
  measuring.say_floor(
    'vectors of a cohort, read and written',
    added,
    machine,
    max(median[IN_FILE] - median[FORGOTTEN], 1e-9),
  )


if __name__ == '__main__':
  main()
