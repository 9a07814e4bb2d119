"""Clients in parallel lanes, without XLA, against one client after the other.

The same rounds by cohort runtimes with one lane and with several: MovieLens
(FedRecon), a small dense network with few examples per client, convolutions on
MNIST, and the LSTM and the transformer of the task `next_word`. All use the
same threads. The weights after the first round are compared: their distance is
at most 1e-5 of their norm.

  python -m benchmarks.lanes
  python -m benchmarks.lanes --only=dense --lanes 1 8 64
"""

import argparse
from collections.abc import Callable, Mapping
import contextlib
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks import ray_round

_CLOSE = 1e-5


def dense(options: Any, context: Any) -> measuring.Run:
  """Build federated averaging of a small dense model: 10 examples a client."""
  import tensorflow as tf

  import tff_partial
  from tff_partial import algorithms

  def build() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
      [
        tf.keras.Input([options.features]),
        layers.Dense(32, 'relu'),
        layers.Dense(10),
      ]
    )

  process = algorithms.build_fed_avg(
    tff_partial.from_keras(
      build,
      loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ),
    training=tff_partial.Phase(
      optimizer=tff_partial.sgd(0.1), batch_size=5, epochs=5
    ),
  )
  generator = np.random.default_rng(0)
  clients = tff_partial.pack(
    {
      f'{client}': {
        'x': generator.normal(size=[10, options.features]).astype(np.float32),
        'y': generator.integers(10, size=10).astype(np.int32),
      }
      for client in range(options.clients_per_round)
    },
    process.example_spec,
  )
  return measuring.Run(process, clients, options.clients_per_round, context)


def next_words(architecture: str) -> Callable[[Any, Any], measuring.Run]:
  """Build federated averaging of a next-word model, 4 steps a client."""

  def run(options: Any, context: Any) -> measuring.Run:
    from benchmarks import lstm_step
    from benchmarks import next_word_step

    sizes = argparse.Namespace(
      architecture=architecture,
      vocabulary=1000,
      buckets=1,
      tokens=20,
      batch_size=16,
      steps=4,
    )
    return lstm_step.our_run(
      sizes,
      context,
      options.clients_per_round,
      build=next_word_step.build_network,
    )

  return run


_RUNS: Mapping[str, tuple[Callable[[Any, Any], measuring.Run], bool]] = {
  'movielens': (lambda o, c: ray_round.movielens(100)(o, c), True),
  'dense': (dense, True),
  'convolutions': (ray_round.mnist, False),
  'lstm': (next_words('lstm'), True),
  'transformer': (next_words('transformer'), True),
}


def compare(name: str, options: Any) -> None:
  """Compare the weights after a round, then the seconds of rounds."""
  import tensorflow as tf

  from tff_partial.runtimes.lanes.lane_loop import cohort_in_lanes

  make, jit = _RUNS[name]
  jit = jit if options.jit is None else options.jit == 'true'
  with contextlib.ExitStack() as stack:
    runs = {
      lanes: make(
        options,
        stack.enter_context(
          cohort_in_lanes(lanes, jit and lanes == 1, strict=True)
        ),
      )
      for lanes in options.lanes
    }
    weights = {}
    for lanes, run in runs.items():
      run.step()
      leaves = tf.nest.flatten(run.weights().trainable)
      weights[lanes] = np.concatenate([np.ravel(leaf) for leaf in leaves])
    first, *others = options.lanes
    for lanes in others:
      distance = np.linalg.norm(weights[lanes] - weights[first])
      if not distance <= _CLOSE * np.linalg.norm(weights[first]):
        raise measuring.BenchmarkError(f'{name}: the weights differ.')
    measuring.say(f'\n{name}, one lane {"with" if jit else "without"} XLA')
    seconds = measuring.take_turns(
      {f'lanes {n}': measuring.timed(run.step) for n, run in runs.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    for lanes in others:
      measuring.ratio(seconds, f'lanes {lanes}', f'lanes {first}')


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=9, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--lanes', type=int, nargs='*', default=[1, 4, 16], help='the first: 1')
  add('--only', nargs='*', default=[*_RUNS], choices=[*_RUNS])
  add('--jit', choices=['true', 'false'], help='XLA for one lane, or not')
  add('--features', type=int, default=20, help='of the dense network')
  add('--population', type=int, default=100, help='clients of MNIST')
  add('--clients_per_round', type=int, default=50, help='but of MovieLens')
  options: argparse.Namespace = parser.parse_args()

  measuring.begin('Clients in lanes')
  from tff_partial import runtimes

  runtimes.cores_for_clients()
  for name in options.only:
    compare(name, options)


if __name__ == '__main__':
  main()
