"""Rounds on the Ray runtime against the cohort runtime on as many cores.

The same rounds by two workers of a Ray cluster on this machine and by two
threads of the cohort runtime: convolutions on MNIST (50 clients of 100 images)
without and with client states (Ditto), an LSTM, MovieLens with more and more
clients, and clients that do nothing. Weights are compared first and must be the
same bits. Needs Ray; `make ray` makes .venv-ray, which has it.

  .venv-ray/bin/python -m benchmarks.ray_round
"""

import argparse
from collections.abc import Callable, Iterator
import statistics
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks import mnist_cnn
from benchmarks import recipe

COHORT, RAY = 'cohort, threads', 'Ray, workers'


def mnist(options: Any, context: Any) -> measuring.Run:
  """Build federated averaging of convolutions."""
  process = mnist_cnn.our_process()
  clients = mnist_cnn.our_clients(process, options.population)
  return measuring.Run(process, clients, options.clients_per_round, context)


def ditto(options: Any, context: Any) -> measuring.Run:
  """Build Ditto: the same network, and a personal one for each client."""
  import tff_partial
  from tff_partial import algorithms
  from tff_partial.training.client_store import client_store

  phase = tff_partial.Phase(
    optimizer=tff_partial.sgd(mnist_cnn.LEARNING_RATE),
    batch_size=mnist_cnn.BATCH_SIZE,
  )
  process = algorithms.build_ditto(
    mnist_cnn.our_model(), penalty=0.1, training=phase, personal=phase
  )
  clients = mnist_cnn.our_clients(process, options.population)
  store = client_store.ClientStore(process.initialize_client)
  return measuring.Run(
    process, clients, options.clients_per_round, context, store=store
  )


def lstm(options: Any, context: Any) -> measuring.Run:
  """Build federated averaging of an LSTM language model of 1,000 words."""
  from benchmarks import lstm_step

  sizes = argparse.Namespace(
    vocabulary=1000,
    embedding=96,
    units=128,
    tokens=20,
    batch_size=16,
    steps=4,
    unroll=False,
  )
  return lstm_step.our_run(sizes, context, options.clients_per_round)


def movielens(number: int) -> Callable[[Any, Any], measuring.Run]:
  """Return a builder of FedRecon on MovieLens with `number` clients a round."""

  def run(options: Any, context: Any) -> measuring.Run:
    paper = recipe.load(f'--clients_per_round={number}')
    return measuring.Run(
      paper.trainable.process, paper.clients, number, context
    )

  return run


def empty(context: Any) -> measuring.Candidate:
  """Return a candidate: a round of 50 clients that send a number."""
  import tensorflow_federated as tff

  @tff.federated_computation(tff.FederatedType(np.float32, tff.CLIENTS))
  def total(numbers: Any) -> Any:
    return tff.federated_sum(numbers)

  values = [1.0] * 50

  def work() -> None:
    with measuring.installed(context):
      total(values)

  return measuring.timed(work, times=5)


def compare(name: str, runs: dict[str, measuring.Run], options: Any) -> None:
  """Compare the weights after a round, then the seconds of rounds."""
  for run in runs.values():
    run.step()
  one, other = (
    [np.asarray(leaf) for leaf in _leaves(run.weights().trainable)]
    for run in runs.values()
  )
  for mine, theirs in zip(one, other, strict=True):
    if not np.array_equal(mine, theirs):
      raise measuring.BenchmarkError(f'{name}: the weights differ.')
  measuring.say(f'\n{name}; the weights are the same bits.')
  seconds = measuring.take_turns(
    {key: measuring.timed(run.step) for key, run in runs.items()},
    repetitions=options.repetitions,
    warm_up=options.warm_up,
  )
  measuring.ratio(seconds, RAY, COHORT, 'at most 1.10 but for MovieLens')


def _leaves(nested: Any) -> Iterator[Any]:
  import tensorflow as tf

  yield from tf.nest.flatten(nested)


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=9, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--workers', type=int, default=2, help='and threads')
  add('--population', type=int, default=100, help='clients of MNIST')
  add('--clients_per_round', type=int, default=50, help='of MNIST')
  add(
    '--movielens',
    type=int,
    nargs='*',
    default=[100, 1000, 4000],
    help='sizes of cohorts of MovieLens',
  )
  add('--skip_mnist', action='store_true', help='leave out MNIST and the LSTM')
  options = parser.parse_args()

  measuring.begin('Rounds on Ray')
  from tff_partial import runtimes

  runtimes.cores_for_clients()
  of_mnist: dict[str, Callable[[Any, Any], measuring.Run]] = {}
  if not options.skip_mnist:
    of_mnist = {
      'MNIST, convolutions': mnist,
      'MNIST, Ditto': ditto,
      'LSTM': lstm,
    }
  of_movielens = {
    f'MovieLens, {number:,} clients a round': movielens(number)
    for number in options.movielens
  }
  threads = options.workers
  with (
    runtimes.cohort(jit=False, threads=threads) as plain,
    runtimes.cohort(jit=True, threads=threads) as jitted,
    runtimes.ray(workers=options.workers, jit=False) as workers,
  ):
    nothing = measuring.take_turns(
      {COHORT: empty(plain), RAY: empty(workers)},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    more = statistics.median(nothing[RAY]) - statistics.median(nothing[COHORT])
    measuring.say(
      f'An empty round takes {measuring.in_seconds(more)} longer (goal: under '
      '10 ms).'
    )
    for name, make in of_mnist.items():
      runs = {COHORT: make(options, plain), RAY: make(options, workers)}
      compare(name, runs, options)
  with runtimes.ray(workers=options.workers, jit=True) as workers:
    for name, make in of_movielens.items():
      runs = {COHORT: make(options, jitted), RAY: make(options, workers)}
      compare(name, runs, options)


if __name__ == '__main__':
  main()
