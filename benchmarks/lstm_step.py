"""A step of an LSTM language model: the cohort runtime against a bare step.

Next-word prediction: embedding, LSTM, projection, softmax over the vocabulary.
The time per step in a round of one client, against the same steps in an
XLA-compiled function that does nothing else. The bare version comes in two
forms: one call per step, and one call for all steps.

  python -m benchmarks.lstm_step
  python -m benchmarks.lstm_step --vocabulary=1000 --units=64 --embedding=16
"""

from collections.abc import Callable, Mapping, Sequence
import statistics
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks import measuring
import tff_partial
from tff_partial import client_state
from tff_partial import runtimes

OURS = 'ours, cohort'
BY_STEP, BY_LOOP = 'bare, a call a step', 'bare, a call for all steps'
LEARNING_RATE = 0.1


def build_network(options: Any) -> Any:
  """Build the network, without a softmax."""
  layers = tf.keras.layers
  tokens = tf.keras.Input([options.tokens], dtype=tf.int32)
  hidden = layers.Embedding(options.vocabulary, options.embedding)(tokens)
  hidden = layers.LSTM(
    options.units, return_sequences=True, unroll=options.unroll
  )(hidden)
  hidden = layers.Dense(options.embedding)(hidden)
  return tf.keras.Model(tokens, layers.Dense(options.vocabulary)(hidden))


def text(options: Any, client: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Invent a client's sentences and the next word at each position."""
  shape = [options.batch_size * options.steps, options.tokens + 1]
  words = np.random.default_rng(client).zipf(1.2, shape) % options.vocabulary
  words = words.astype(np.int32)
  return words[:, :-1], words[:, 1:]


def our_process(options: Any, build: Callable[[Any], Any]) -> Any:
  """Build federated averaging of a network with our library."""
  model = tff_partial.from_keras(
    lambda: build(options),
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )
  return tff_partial.compose(
    model,
    client_state=client_state.stateless,
    work=[
      tff_partial.Phase(
        optimizer=tff_partial.sgd(LEARNING_RATE),
        batch_size=options.batch_size,
        measured=True,
      )
    ],
    aggregation=tff_partial.Aggregation(tff.aggregators.MeanFactory()),
    server_optimizer=tff_partial.sgd(1.0),
  )


def our_run(
  options: Any,
  context: Any,
  num_clients: int = 1,
  *,
  build: Callable[[Any], Any] = build_network,
) -> measuring.Run:
  """Return a run in which all clients take part in each round."""
  process = our_process(options, build)
  texts = {str(client): text(options, client) for client in range(num_clients)}
  clients = tff_partial.pack(
    {client: {'x': x, 'y': y} for client, (x, y) in texts.items()},
    process.example_spec,
  )
  return measuring.Run(process, clients, num_clients, context)


def bare_steps(
  options: Any, first: Sequence[np.ndarray]
) -> dict[str, Callable[[], Sequence[Any]]]:
  """Return the same steps and nothing else, compiled by XLA.

  XLA cannot update variables row by row, so weights are tensors here, and the
  gradient of the embedding is applied to the rows that were read.

  Args:
    options: The arguments of the program.
    first: The initial weights.

  Returns:
    Functions that take the steps of a round and return the new weights.
  """
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  x, y = (tf.constant(part) for part in text(options))
  size = options.batch_size

  def step(weights: Any, number: Any) -> Any:
    rows = number * size + tf.range(size)
    tokens, following = tf.gather(x, rows), tf.gather(y, rows)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(weights)
      value = loss(following, _logits(options, weights, tokens))
    changed = []
    for weight, gradient in zip(
      weights, tape.gradient(value, weights), strict=True
    ):
      if isinstance(gradient, tf.IndexedSlices):
        where = tf.reshape(gradient.indices, [-1, 1])
        change = -LEARNING_RATE * tf.reshape(
          gradient.values, [-1, weight.shape[-1]]
        )
        changed.append(tf.tensor_scatter_nd_add(weight, where, change))
      else:
        changed.append(weight - LEARNING_RATE * gradient)
    return changed

  compiled = tf.function(step, jit_compile=True, autograph=False)

  @tf.function(jit_compile=True, autograph=False)
  def all_steps(weights: Any) -> Any:
    return tf.while_loop(
      lambda number, *_: number < options.steps,
      lambda number, *weights: (number + 1, *step(list(weights), number)),
      (tf.constant(0), *weights),
    )[1:]

  weights = [tf.constant(weight) for weight in first]
  state = {BY_STEP: weights, BY_LOOP: weights}

  def by_step() -> Sequence[Any]:
    for number in range(options.steps):
      state[BY_STEP] = compiled(state[BY_STEP], tf.constant(number))
    state[BY_STEP][0].numpy()
    return state[BY_STEP]

  def by_loop() -> Sequence[Any]:
    state[BY_LOOP] = list(all_steps(state[BY_LOOP]))
    state[BY_LOOP][0].numpy()
    return state[BY_LOOP]

  return {BY_STEP: by_step, BY_LOOP: by_loop}


def _logits(options: Any, weights: Any, tokens: Any) -> Any:
  """Compute the output of the Keras network in plain TensorFlow."""
  table, kernel, recurrent, bias, *dense = weights
  inputs = tf.gather(table, tokens) @ kernel + bias
  shape = [options.batch_size, options.units]
  hidden, cell, outputs = tf.zeros(shape), tf.zeros(shape), []
  for place in range(options.tokens):
    gates = inputs[:, place] + hidden @ recurrent
    take, keep, new, give = tf.split(gates, 4, axis=1)
    cell = tf.sigmoid(keep) * cell + tf.sigmoid(take) * tf.tanh(new)
    hidden = tf.sigmoid(give) * tf.tanh(cell)
    outputs.append(hidden)
  projected = tf.stack(outputs, 1) @ dense[0] + dense[1]
  return projected @ dense[2] + dense[3]


def floor(options: Any) -> measuring.Floor:
  """Return the lower bound of a step."""
  gates = 4 * options.units * (options.embedding + options.units)
  projection = options.units * options.embedding
  output = options.embedding * options.vocabulary
  tokens = options.batch_size * options.tokens
  table = options.vocabulary * options.embedding
  # Forward, by the weights and by the inputs: two operations each.
  operations = 6 * tokens * (gates + projection + output)
  dense = gates + projection + output
  # Dense weights are read forward and backward and rewritten, of the table only
  # the rows used; logits are written, and read forward and backward.
  rows = min(tokens, table) * options.embedding
  numbers = 3 * dense + 3 * rows + 4 * tokens * options.vocabulary
  return measuring.Floor(4 * numbers, operations)


def check_same(run: measuring.Run, bare: Mapping[str, Callable]) -> None:
  """Run a round of each and compare the weights.

  Raises:
    BenchmarkError: If they differ by more than rounding.
  """
  run.step()
  ours = list(run.weights().trainable['global'].values())
  for name, work in bare.items():
    for one, other in zip(ours, work(), strict=True):
      distance = float(np.abs(np.asarray(one) - np.asarray(other)).max())
      if not distance < 1e-4:
        raise measuring.BenchmarkError(
          f'{name!r} ends with other weights than ours: off by {distance}.'
        )


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=9, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--steps', type=int, default=8, help='steps of the client in a round')
  add('--vocabulary', type=int, default=10_000, help='number of words')
  add('--embedding', type=int, default=96, help='also of the projection')
  add('--units', type=int, default=670, help='of the LSTM')
  add('--batch_size', type=int, default=16, help='sentences in a step')
  add('--tokens', type=int, default=20, help='words in a sentence')
  add('--rolled', dest='unroll', action='store_false', help='keep the loop')
  options = parser.parse_args()

  measuring.begin('LSTM language model, one step')
  with runtimes.cohort(jit=True) as context:
    run = our_run(options, context)
    bare = bare_steps(options, list(run.weights().trainable['global'].values()))
    check_same(run, bare)
    seconds = measuring.take_turns(
      {
        name: measuring.timed(work, parts=options.steps)
        for name, work in {OURS: run.step, **bare}.items()
      },
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
  measuring.say(f'Seconds are those of a step, one of {options.steps}.')
  best = measuring.fastest(seconds, BY_STEP, BY_LOOP)
  measuring.say(f'The best bare form is {best!r}.')
  measuring.ratio(seconds, OURS, best, 'at most 1.2')
  measuring.say_floor(
    'a step',
    floor(options),
    measuring.rates(1 << 22),
    statistics.median(seconds[OURS]),
  )


if __name__ == '__main__':
  main()
