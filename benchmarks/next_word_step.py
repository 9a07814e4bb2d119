"""A step of the next-word models: the cohort runtime against a bare step.

The models are those of the task `next_word`: an LSTM and a causal transformer
of the default sizes. A round of one client that takes some steps, against the
same steps of the same Keras model in an XLA-compiled function that does nothing
else, with one call per step or one for all. Also prints tokens a second on all
cores: for one client, and for a round of many.

  python -m benchmarks.next_word_step
"""

import argparse
from collections.abc import Callable, Mapping
import statistics
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import lstm_step
from benchmarks import measuring
from tasks.next_word import models
from tasks.next_word.tokens import Tokens
from tff_partial import runtimes

MANY = 'ours, many clients'


def build_network(options: Any) -> Any:
  """Build the model, with as many output classes as tokens."""
  return models.build_next_word_model(
    Tokens(options.vocabulary, options.buckets),
    options.tokens,
    models.NextWordSizes(architecture=options.architecture),
  )


def bare_steps(
  options: Any, first: Mapping[str, np.ndarray]
) -> dict[str, Callable[[], Mapping[str, Any]]]:
  """Return the same steps and nothing else, compiled by XLA.

  Args:
    options: The arguments of the program.
    first: The initial weights, by name.

  Returns:
    Functions that take the steps of a round and return the new weights.
  """
  x, y = map(tf.constant, lstm_step.text(options))
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  def form(by_loop: bool) -> Callable[[], Mapping[str, Any]]:
    model = build_network(options)
    weights = {v.name.removesuffix(':0'): v for v in model.trainable_variables}
    for name, weight in weights.items():
      weight.assign(first[name])

    def step(number: Any) -> None:
      rows = number * options.batch_size + tf.range(options.batch_size)
      with tf.GradientTape() as tape:
        value = loss(tf.gather(y, rows), model(tf.gather(x, rows)))
      for weight, gradient in zip(
        weights.values(),
        tape.gradient(value, list(weights.values())),
        strict=True,
      ):
        change = lstm_step.LEARNING_RATE * tf.convert_to_tensor(gradient)
        weight.assign_sub(change)

    def steps() -> None:
      def body(number: Any) -> Any:
        step(number)
        return [number + 1]

      tf.while_loop(
        lambda number: number < options.steps, body, [tf.constant(0)]
      )

    compiled = tf.function(
      steps if by_loop else step, jit_compile=True, autograph=False
    )

    def work() -> Mapping[str, Any]:
      if by_loop:
        compiled()
      else:
        for number in range(options.steps):
          compiled(tf.constant(number))
      next(iter(weights.values())).numpy()
      return weights

    return work

  return {
    lstm_step.BY_STEP: form(by_loop=False),
    lstm_step.BY_LOOP: form(by_loop=True),
  }


def check_same(run: measuring.Run, bare: Mapping[str, Callable]) -> None:
  """Run a round of each and compare the weights.

  Raises:
    BenchmarkError: If they differ by more than rounding.
  """
  run.step()
  ours = run.weights().trainable['global']
  for form, work in bare.items():
    theirs = work()
    for name, one in ours.items():
      distance = float(np.abs(np.asarray(one) - theirs[name].numpy()).max())
      if not distance < 1e-4:
        raise measuring.BenchmarkError(
          f'{form!r} ends with another {name} than ours: off by {distance}.'
        )


def compare(options: Any, jitted: Any) -> None:
  """Compare one architecture and print its tokens a second."""
  measuring.say(f'\n{options.architecture}:')
  run = lstm_step.our_run(options, jitted, build=build_network)
  bare = bare_steps(options, run.weights().trainable['global'])
  check_same(run, bare)
  many = lstm_step.our_run(
    options, jitted, options.clients, build=build_network
  )
  seconds = measuring.take_turns(
    {
      lstm_step.OURS: measuring.timed(run.step),
      **{name: measuring.timed(work) for name, work in bare.items()},
      MANY: measuring.timed(many.step),
    },
    repetitions=options.repetitions,
    warm_up=options.warm_up,
  )
  measuring.ratio(seconds, lstm_step.OURS, lstm_step.BY_STEP, 'at most 1.2')
  measuring.ratio(seconds, lstm_step.OURS, lstm_step.BY_LOOP)
  tokens = options.steps * options.batch_size * options.tokens
  for name, number in ((lstm_step.OURS, 1), (MANY, options.clients)):
    rate = number * tokens / statistics.median(seconds[name])
    measuring.say(f'  {name}: {rate:,.0f} tokens a second')


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=9, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--steps', type=int, default=8, help='steps of a client in a round')
  add('--clients', type=int, default=16, help='of a round of many')
  add('--vocabulary', type=int, default=1000, help='number of words')
  add('--buckets', type=int, default=500, help='for all other words')
  add('--batch_size', type=int, default=16, help='sentences in a step')
  add('--tokens', type=int, default=20, help='words of a sentence')
  options = parser.parse_args()
  measuring.begin('A step of the models of next words')
  runtimes.cores_for_clients()
  with runtimes.cohort(jit=True) as jitted:
    for architecture in (models.LSTM, models.TRANSFORMER):
      compare(
        argparse.Namespace(**vars(options), architecture=architecture), jitted
      )


if __name__ == '__main__':
  main()
