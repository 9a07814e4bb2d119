"""Memory over 1,000 rounds: does a long run stay the same size?

Rounds of the paper's recipe on MovieLens, with an evaluation of all validation
users every 50 rounds. Counts the resident memory of this process and its
descendants.

  python -m benchmarks.endurance
  python -m benchmarks.endurance --runtime=native --rounds=200
"""

import gc
import time
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import measuring
from benchmarks import recipe
import tff_partial
from tff_partial import runtimes


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--rounds', type=int, default=1000, help='rounds of the run')
  add('--from_round', type=int, default=100, help='the round to compare with')
  add('--every', type=int, default=50, help='rounds between evaluations')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  add('--runtime', default='cohort', choices=['cohort', 'native'])
  options = parser.parse_args()
  if not 0 < options.from_round < options.rounds:
    parser.error('--from_round must lie between 0 and --rounds')

  measuring.begin(f'MovieLens, memory over {options.rounds} rounds')
  paper = recipe.load(f'--clients_per_round={options.clients_per_round}')
  evaluation_set = paper.trainable.evaluation_set(paper.task.validation)
  with (
    runtimes.native()
    if options.runtime == 'native'
    else runtimes.cohort(jit=paper.jit)
  ) as context:
    run = measuring.Run(
      paper.trainable.process, paper.clients, options.clients_per_round, context
    )
    memory: dict[int, int] = {}
    started = time.perf_counter()
    while run.round < options.rounds:
      run.step()
      if run.round % options.every == 0:
        tff_partial.evaluate(evaluation_set, run.weights())
      if run.round % options.every == 0 or run.round in (
        options.from_round,
        options.rounds,
      ):
        gc.collect()  # Uncollected garbage is no growth.
        memory[run.round] = measuring.tree_memory()
        measuring.say(
          f'  round {run.round:5}  {measuring.in_mib(memory[run.round]):>12}  '
          f'{time.perf_counter() - started:7.1f} s'
        )
  grown = memory[options.rounds] / memory[options.from_round] - 1
  measuring.say(
    f'  memory at round {options.rounds} / at round {options.from_round}: '
    f'{1 + grown:.4f} (goal: at most 1.03)'
  )
  resident = sum(
    array.nbytes
    for population in (paper.clients, evaluation_set.clients)
    for array in _resident(population)
  )
  measuring.say(
    f'  floor: clients {measuring.in_mib(resident)}, a model '
    f'{measuring.in_mib(paper.table_bytes)}; the libraries take the rest'
  )


def _resident(population: Any) -> list[np.ndarray]:
  """Return a population's resident arrays, from a cohort of all clients."""
  ids = population.client_ids
  return [
    array
    for group in population.cohort(ids, np.zeros([len(ids), 2])).groups
    for array in tf.nest.flatten(group.resident)
  ]


if __name__ == '__main__':
  main()
