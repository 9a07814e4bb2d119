"""Rounds with cores given to clients against cores given to kernels.

Recipes as `python -m tasks.train` runs them, with one thread per kernel
(`runtimes.cores_for_clients`), and in a process in which TensorFlow lets each
kernel use all cores.

  python -m benchmarks.kernel_threads
"""

import contextlib
import os
from typing import Any

import tensorflow as tf

from benchmarks import measuring
from benchmarks import recipe
from tff_partial import runtimes
from tff_partial.training.client_store import client_store

CLIENTS, KERNELS = 'cores for clients', 'cores for kernels'
RECIPES = (
  'mnist_preference_fed_embed_prototype',
  'subreddit_furl',
  'movielens_furl',
)


def serve(options: Any) -> None:
  """Run rounds of one candidate for the comparing process."""
  if options.worker == KERNELS:
    threads = tf.config.threading
    threads.set_intra_op_parallelism_threads(len(os.sched_getaffinity(0)))
    tf.constant(0)  # This fixes the setting.

  def prepare() -> measuring.Answers:
    given = recipe.load(name=options.recipe)
    if runtimes.cores_for_clients() != (options.worker == CLIENTS):
      raise measuring.BenchmarkError('Kernels have other threads than meant.')
    process = given.trainable.process
    run = measuring.Run(
      process,
      given.clients,
      given.settings['clients_per_round'],
      stack.enter_context(runtimes.cohort(jit=given.jit)),
      store=client_store.ClientStore(process.initialize_client),
    )
    turn = measuring.timed(run.step)
    return {'turn': lambda: {'seconds': turn()}}

  with contextlib.ExitStack() as stack:
    measuring.serve(prepare)


def compare(options: Any) -> None:
  """Time rounds of each recipe in turn."""
  measuring.begin('Threads: for clients, or for kernels; one round')
  for name in RECIPES:
    measuring.say(name)
    arguments = {
      worker: [f'--worker={worker}', f'--recipe={name}']
      for worker in (CLIENTS, KERNELS)
    }
    with measuring.workers('benchmarks.kernel_threads', arguments) as started:
      seconds = measuring.take_turns(
        {worker: process.turn for worker, process in started.items()},
        repetitions=options.repetitions,
        warm_up=options.warm_up,
      )
    measuring.ratio(seconds, KERNELS, CLIENTS, 'at least 1')


def main() -> None:
  """Read the arguments and compare, or serve one candidate."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=10, help='turns of each that count')
  add('--warm_up', type=int, default=3, help='turns of each before')
  add('--worker', choices=(CLIENTS, KERNELS), help='serve another process')
  add('--recipe', choices=RECIPES, help='the recipe that it serves')
  options = parser.parse_args()
  if options.worker:
    serve(options)
  else:
    compare(options)


if __name__ == '__main__':
  main()
