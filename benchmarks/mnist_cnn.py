"""Federated averaging of a convolutional network on MNIST: one round.

50 clients of 100 images in batches of 20; two convolutions (3x3x32, 3x3x64), a
2x2 pool, dense 128, dense 10. Ours against bare TensorFlow loops that take only
the same steps, and against stock TFF. Each has its own process, because the
number of kernel threads is fixed once per process.

  python -m benchmarks.mnist_cnn
"""

import collections
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import gzip
import os
import pathlib
import statistics
from typing import Any

import numpy as np

from benchmarks import measuring

# Bare loops: a client per core with single-threaded kernels, or one client
# after the other on all cores.
BY_CLIENT, BY_KERNEL = 'bare, a client a core', 'bare, a kernel on all cores'
OURS, OURS_SINGLE = 'ours', 'ours, single-threaded kernels'
STOCK = 'stock'
SINGLE_THREADED = (BY_CLIENT, OURS_SINGLE)
CANDIDATES = (OURS, OURS_SINGLE, BY_CLIENT, BY_KERNEL, STOCK)

LEARNING_RATE = 0.05
CLIENT_EXAMPLES = 100
BATCH_SIZE = 20


def build_network() -> Any:
  """Build the network, without a softmax; it takes images as stored."""
  import tensorflow as tf

  layers = tf.keras.layers
  return tf.keras.Sequential(
    [
      layers.InputLayer([28, 28, 1], dtype=tf.uint8),
      layers.Rescaling(1 / 255),
      layers.Conv2D(32, 3, activation='relu'),
      layers.Conv2D(64, 3, activation='relu'),
      layers.MaxPool2D(2),
      layers.Flatten(),
      layers.Dense(128, activation='relu'),
      layers.Dense(10),
    ]
  )


def images(number: int) -> tuple[np.ndarray, np.ndarray, str]:
  """Return images, uint8, their labels, and the name of their source."""
  folder = pathlib.Path(os.environ.get('TFF_PARTIAL_DATA_DIR', '')) / 'emnist'
  try:
    x = _read_idx(folder / 'train-images-idx3-ubyte.gz', number)
    y = _read_idx(folder / 'train-labels-idx1-ubyte.gz', number)
    source = 'MNIST'
  except OSError:
    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, [number, 28, 28], np.uint8)
    y = draw.integers(0, 10, [number], np.uint8)
    source = 'invented images (no emnist folder in $TFF_PARTIAL_DATA_DIR)'
  return x[..., None], y.astype(np.int32), source


def _read_idx(path: pathlib.Path, number: int) -> np.ndarray:
  with gzip.open(path) as file:
    rank = file.read(4)[3]
    shape = np.frombuffer(file.read(4 * rank), '>i4')
    size = min(number, int(shape[0]))
    item = int(np.prod(shape[1:], dtype=int))
    data = np.frombuffer(file.read(size * item), np.uint8)
  return data.reshape(size, *shape[1:])


def client_data(population: int) -> tuple[np.ndarray, np.ndarray]:
  """Return images and labels by client, `[clients, examples, ...]`."""
  x, y, source = images(population * CLIENT_EXAMPLES)
  measuring.say(f'{source}: {len(x)} images.')
  number = len(x) // CLIENT_EXAMPLES
  shape = (number, CLIENT_EXAMPLES)
  used = number * CLIENT_EXAMPLES
  return (x[:used].reshape(*shape, 28, 28, 1), y[:used].reshape(shape))


def cohorts(population: int, clients_per_round: int) -> Iterator[list[int]]:
  """Yield client numbers, round by round; the same for all candidates."""
  draw = np.random.default_rng(1)
  while True:
    yield draw.choice(population, clients_per_round, replace=False).tolist()


# ---- candidates: each returns a function that runs a round -------------------


def our_model() -> Any:
  """Build the network as a `PartialModel`."""
  import tensorflow as tf

  import tff_partial

  return tff_partial.from_keras(
    build_network,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=lambda: [tf.keras.metrics.SparseCategoricalAccuracy('accuracy')],
  )


def our_clients(process: Any, population: int) -> Any:
  """Pack clients for a process of that model."""
  import tff_partial

  x, y = client_data(population)
  return tff_partial.pack(
    {str(i): {'x': x[i], 'y': y[i]} for i in range(len(x))},
    process.example_spec,
  )


def our_process() -> Any:
  """Build federated averaging with our library."""
  import tensorflow_federated as tff

  import tff_partial
  from tff_partial import client_state

  return tff_partial.compose(
    our_model(),
    client_state=client_state.stateless,
    work=[
      tff_partial.Phase(
        optimizer=tff_partial.sgd(LEARNING_RATE),
        batch_size=BATCH_SIZE,
        measured=True,
      )
    ],
    aggregation=tff_partial.Aggregation(tff.aggregators.MeanFactory()),
    server_optimizer=tff_partial.sgd(1.0),
  )


def our_round(options: Any, stack: contextlib.ExitStack) -> Callable[[], Any]:
  """Set up federated averaging in the cohort runtime."""
  from tff_partial import runtimes

  process = our_process()
  clients = our_clients(process, options.population)
  jit: Any = {'true': True, 'false': False}.get(options.jit, 'auto')
  context = stack.enter_context(runtimes.cohort(jit=jit))
  run = measuring.Run(process, clients, options.clients_per_round, context)

  def step() -> None:
    run.step()
    if run.round == 1:
      measuring.say(f'XLA was chosen: {list(context.choices.values())}')

  return step


def stock_round(options: Any, stack: contextlib.ExitStack) -> Callable[[], Any]:
  """Set up `build_weighted_fed_avg` of TFF, with data sets made beforehand."""
  import tensorflow as tf
  import tensorflow_federated as tff

  stack.enter_context(measuring.ending_children())
  spec = (
    tf.TensorSpec([None, 28, 28, 1], tf.uint8),
    tf.TensorSpec([None], tf.int32),
  )
  model = tff.learning.models.functional_model_from_keras(
    build_network,
    tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    spec,
    metrics_constructor=lambda: collections.OrderedDict(
      accuracy=tf.keras.metrics.SparseCategoricalAccuracy()
    ),
  )
  process = tff.learning.algorithms.build_weighted_fed_avg(
    model,
    tff.learning.optimizers.build_sgdm(LEARNING_RATE),
    tff.learning.optimizers.build_sgdm(1.0),
  )
  x, y = client_data(options.population)
  datasets = [
    tf.data.Dataset.from_tensor_slices((x[i], y[i])).batch(BATCH_SIZE)
    for i in range(len(x))
  ]
  context = tff.backends.native.create_sync_local_cpp_execution_context()
  stack.enter_context(measuring.installed(context))
  rounds = cohorts(len(x), options.clients_per_round)
  states = [process.initialize()]

  def step() -> None:
    output = process.next(states.pop(), [datasets[i] for i in next(rounds)])
    states.append(output.state)

  return step


def bare_round(options: Any, stack: contextlib.ExitStack) -> Callable[[], Any]:
  """Set up bare Keras models, gradients, assignments and a mean of updates."""
  import tensorflow as tf

  single = options.worker == BY_CLIENT
  threads = len(os.sched_getaffinity(0)) if single else 1
  x, y = (tf.constant(part) for part in client_data(options.population))
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

  def make_trainer() -> Any:
    model = build_network()
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def train(weights: Any, client: Any) -> Any:
      images, labels = tf.gather(x, client), tf.gather(y, client)
      for variable, weight in zip(variables, weights, strict=True):
        variable.assign(weight)

      for start in range(0, CLIENT_EXAMPLES, BATCH_SIZE):
        batch = slice(start, start + BATCH_SIZE)
        with tf.GradientTape() as tape:
          value = loss(labels[batch], model(images[batch], training=True))
        gradients = tape.gradient(value, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
          variable.assign_sub(LEARNING_RATE * gradient)
      return [
        variable - weight
        for variable, weight in zip(variables, weights, strict=True)
      ]

    return train

  trainers = [make_trainer() for _ in range(threads)]
  pool = stack.enter_context(futures.ThreadPoolExecutor(threads))
  rounds = cohorts(len(x), options.clients_per_round)
  weights = [[tf.constant(w) for w in build_network().get_weights()]]
  add = tf.function(
    lambda one, other: [a + b for a, b in zip(one, other, strict=True)],
    autograph=False,
  )

  def step() -> None:
    members = next(rounds)
    now = weights.pop()

    def work(number: int) -> Any:
      total = None
      for client in members[number::threads]:
        change = trainers[number](now, tf.constant(client))
        total = change if total is None else add(total, change)
      return total

    total, *others = pool.map(work, range(threads))
    for other in others:
      total = add(total, other)
    weights.append(
      [w + t / len(members) for w, t in zip(now, total, strict=True)]
    )
    weights[0][0].numpy()

  return step


def serve(options: Any) -> None:
  """Run rounds of one candidate for the comparing process."""
  import tensorflow as tf

  if options.worker in SINGLE_THREADED:
    tf.config.threading.set_intra_op_parallelism_threads(1)
  makers: Mapping[str, Callable[..., Callable[[], Any]]] = {
    OURS: our_round,
    OURS_SINGLE: our_round,
    STOCK: stock_round,
    BY_CLIENT: bare_round,
    BY_KERNEL: bare_round,
  }

  def prepare() -> measuring.Answers:
    turn = measuring.timed(makers[options.worker](options, stack))
    return {
      'turn': lambda: {'seconds': turn()},
      'memory': lambda: {'peak': measuring.peak_memory()},
    }

  with contextlib.ExitStack() as stack:
    measuring.serve(prepare)


def floor(clients_per_round: int) -> measuring.Floor:
  """Return the lower bound of a round."""
  # Multiply-adds of an example: two convolutions and two dense layers.
  first = 26 * 26 * 9 * 32
  others = 24 * 24 * 9 * 32 * 64 + 12 * 12 * 64 * 128 + 128 * 10
  # Forward, by the weights, by the inputs; images need no gradient.
  example = 2 * (2 * first + 3 * others)
  weights = 4 * (9 * 32 + 32 + 9 * 32 * 64 + 64 + 9216 * 128 + 128 + 1290)
  steps = CLIENT_EXAMPLES // BATCH_SIZE
  # A step reads the weights twice (forward and backward), writes a gradient and
  # subtracts it; a client copies, subtracts and adds to a sum.
  client = weights * (steps * 6 + 8) + CLIENT_EXAMPLES * 28 * 28
  return measuring.Floor(
    clients_per_round * client, clients_per_round * CLIENT_EXAMPLES * example
  )


def compare(options: Any) -> None:
  """Time rounds in turn."""
  measuring.begin('MNIST, federated averaging of a CNN, one round')
  names = [name for name in CANDIDATES if options.stock or name != STOCK]
  shared = [
    f'--population={options.population}',
    f'--clients_per_round={options.clients_per_round}',
    f'--jit={options.jit}',
  ]
  arguments = {name: [f'--worker={name}', *shared] for name in names}
  with measuring.workers('benchmarks.mnist_cnn', arguments) as started:
    # Traced, compiled and, for ours, timed with XLA and without.
    first = {name: [worker.turn()] for name, worker in started.items()}
    seconds = measuring.take_turns(
      {name: worker.turn for name, worker in started.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    memory = {n: worker.ask('memory')['peak'] for n, worker in started.items()}
  measuring.say('The most memory that each process took, from its start on:')
  for name in names:
    measuring.say(f'  {name}: {measuring.in_mib(memory[name])}')
  measuring.say('The first round of each, of which the above knows nothing:')
  for name in names:
    later = statistics.median(seconds[name])
    measuring.ratio(
      {'first round': first[name], name: [later]},
      'first round',
      name,
      'at most 2.5' if name == OURS else '',
    )
  best = measuring.fastest(seconds, BY_CLIENT, BY_KERNEL)
  measuring.say(f'The best bare loop is {best!r}.')
  measuring.ratio(seconds, OURS, best, 'at most 1.3')
  measuring.ratio(seconds, OURS_SINGLE, best)
  if options.stock:
    measuring.ratio(seconds, STOCK, OURS, 'at least 1.8')
  measuring.say_floor(
    'a round',
    floor(options.clients_per_round),
    measuring.rates(1 << 22),
    statistics.median(seconds[OURS]),
  )


def main() -> None:
  """Read the arguments and compare, or serve one candidate."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=7, help='turns of each that count')
  add('--warm_up', type=int, default=1, help='turns of each before')
  add('--clients_per_round', type=int, default=50, help='size of a cohort')
  add('--population', type=int, default=500, help='number of clients')
  add('--jit', default='auto', choices=['auto', 'true', 'false'], help='XLA')
  add('--no_stock', dest='stock', action='store_false', help='leave stock out')
  add('--worker', choices=CANDIDATES, help='serve another process')
  options = parser.parse_args()
  if options.worker:
    serve(options)
  compare(options)


if __name__ == '__main__':
  main()
