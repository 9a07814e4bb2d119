"""Time rounds of six models where TensorFlow puts them, with XLA and without.

The cohort runtime, with XLA where it chose it and without, trains MovieLens
(FedRecon), a small dense network with few examples per client, convolutions on
MNIST, and the LSTM and the transformer of the task `next_word`. Run it twice to
compare a GPU with the processor beside it:

  python -m benchmarks.devices
  CUDA_VISIBLE_DEVICES= python -m benchmarks.devices
"""

import argparse
from collections.abc import Callable, Mapping
import contextlib
from typing import Any

import numpy as np

from benchmarks import measuring
from benchmarks import ray_round


def dense(options: Any, context: Any) -> measuring.Run:
  """Build federated averaging of a small dense model: 10 examples a client."""
  import tensorflow as tf

  import tff_partial
  from tff_partial import algorithms

  def build() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
      [tf.keras.Input([20]), layers.Dense(32, 'relu'), layers.Dense(10)]
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
        'x': generator.normal(size=[10, 20]).astype(np.float32),
        'y': generator.integers(10, size=10).astype(np.int32),
      }
      for client in range(options.clients_per_round)
    },
    process.example_spec,
  )
  return measuring.Run(process, clients, options.clients_per_round, context)


def next_words(
  architecture: str, words: int = 1000, steps: int = 4
) -> Callable[[Any, Any], measuring.Run]:
  """Build federated averaging of a next-word model, some steps a client."""

  def run(options: Any, context: Any) -> measuring.Run:
    from benchmarks import lstm_step
    from benchmarks import next_word_step

    sizes = argparse.Namespace(
      architecture=architecture,
      vocabulary=words,
      buckets=1,
      tokens=20,
      batch_size=16,
      steps=steps,
    )
    return lstm_step.our_run(
      sizes,
      context,
      options.clients_per_round,
      build=next_word_step.build_network,
    )

  return run


_RUNS: Mapping[str, Callable[[Any, Any], measuring.Run]] = {
  'movielens': ray_round.movielens(100),
  'dense': dense,
  'convolutions': ray_round.mnist,
  'lstm': next_words('lstm'),
  'transformer': next_words('transformer'),
  'lstm of 10,000 words': next_words('lstm', words=10_000, steps=10),
}


def compare(name: str, options: Any) -> None:
  """Compare seconds of rounds with XLA, where it was chosen, and without."""
  from tff_partial import runtimes

  measuring.say(f'\n{name}')
  with contextlib.ExitStack() as stack:
    runs = {
      label: _RUNS[name](options, stack.enter_context(context))
      for label, context in (
        ('XLA chosen', runtimes.cohort()),
        ('without XLA', runtimes.cohort(jit=False)),
      )
    }
    seconds = measuring.take_turns(
      {label: measuring.timed(run.step) for label, run in runs.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
  measuring.ratio(seconds, *runs)


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=7, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--only', nargs='*', default=[*_RUNS], choices=[*_RUNS])
  add('--population', type=int, default=100, help='clients of MNIST')
  add('--clients_per_round', type=int, default=50, help='but of MovieLens')
  options: argparse.Namespace = parser.parse_args()

  measuring.begin('Rounds by device')
  import tensorflow as tf

  from tff_partial import runtimes

  runtimes.cores_for_clients()
  for device in tf.config.list_physical_devices('GPU'):
    details = tf.config.experimental.get_device_details(device)
    measuring.say(str(details.get('device_name', device.name)))
  for name in options.only:
    compare(name, options)


if __name__ == '__main__':
  main()
