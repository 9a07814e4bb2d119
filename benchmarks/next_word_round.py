"""A round of next words: the cohort runtime, stock TFF, and pfl-research.

Federated averaging of the LSTM of the task `next_word` in its default size: 16
clients of 8 batches of 16 sentences, all from the same initial weights. Each
candidate has its own process and chooses its number of threads. All must have
the same weights after a round; this is checked first. Stock TFF is
`build_weighted_fed_avg` on the native context; pfl-research is
`FederatedAveraging` of a Keras model on `SimulatedBackend`, if it is installed,
or in a folder into which pip installs it separately:

  python -m benchmarks.next_word_round
  pip install --no-deps --target=DIR pfl multiprocess dill prv-accountant
  python -m benchmarks.next_word_round --pfl=DIR
"""

import argparse
from collections.abc import Callable, Mapping
import contextlib
import importlib.util
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks import lstm_step
from benchmarks import measuring
from benchmarks import next_word_step
from tasks.next_word import models
from tff_partial import runtimes

OURS, STOCK, PFL = 'ours, cohort', 'stock TFF', 'pfl-research'
FIRST = 'first'

# Runs a round.
Step = Callable[[], Any]
# Returns the weights after all rounds so far, in the model's order.
Weights = Callable[[], list[np.ndarray]]


def loss() -> tf.keras.losses.Loss:
  """Return the training loss of all candidates."""
  return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def file_of(options: argparse.Namespace, name: str) -> pathlib.Path:
  """Return the file of the initial weights, or of a candidate's."""
  return pathlib.Path(options.folder) / f'{name}.npz'


def save(path: pathlib.Path, weights: list[np.ndarray]) -> None:
  """Save weights for the comparing process."""
  np.savez(path, *weights)


def load(path: pathlib.Path) -> list[np.ndarray]:
  """Load the weights written by `save`."""
  with np.load(path) as arrays:
    return list(arrays.values())


# ---- candidates: each returns a round, and the weights -----------------------


def our_round(
  options: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Step, Weights]:
  """Set up the cohort runtime and save its first weights for all."""
  runtimes.cores_for_clients()
  context = stack.enter_context(runtimes.cohort(jit=True))
  run = lstm_step.our_run(
    options, context, options.clients, build=next_word_step.build_network
  )

  def weights() -> list[np.ndarray]:
    return [np.asarray(w) for w in run.weights().trainable['global'].values()]

  save(file_of(options, FIRST), weights())
  return run.step, weights


def stock_round(
  options: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Step, Weights]:
  """Set up `build_weighted_fed_avg` of TFF, with data sets made beforehand."""
  stack.enter_context(measuring.ending_children())
  spec = tf.TensorSpec([None, options.tokens], tf.int32)

  def model() -> tff.learning.models.VariableModel:
    # A functional model in TFF would not find the input of our recurrence.
    return tff.learning.models.from_keras_model(
      next_word_step.build_network(options), loss(), (spec, spec)
    )

  process = tff.learning.algorithms.build_weighted_fed_avg(
    model,
    tff.learning.optimizers.build_sgdm(lstm_step.LEARNING_RATE),
    tff.learning.optimizers.build_sgdm(1.0),
  )
  datasets = [
    tf.data.Dataset.from_tensor_slices(lstm_step.text(options, client)).batch(
      options.batch_size
    )
    for client in range(options.clients)
  ]
  context = tff.backends.native.create_sync_local_cpp_execution_context()
  stack.enter_context(measuring.installed(context))
  state = process.initialize()
  weights = process.get_model_weights(state)
  first = type(weights)(load(file_of(options, FIRST)), weights.non_trainable)
  states = [process.set_model_weights(state, first)]

  def step() -> None:
    states.append(process.next(states.pop(), datasets).state)

  def now() -> list[np.ndarray]:
    trained = process.get_model_weights(states[0]).trainable
    return [np.asarray(weight) for weight in trained]

  return step, now


def pfl_round(
  options: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Step, Weights]:
  """Set up pfl-research, which trains clients one by one on all cores."""
  del stack  # There is nothing to close.
  if options.pfl:
    sys.path.append(options.pfl)
  from pfl.aggregate.simulate import SimulatedBackend
  from pfl.algorithm.base import NNAlgorithmParams
  from pfl.algorithm.federated_averaging import FederatedAveraging
  from pfl.data.dataset import Dataset
  from pfl.data.federated_dataset import FederatedDataset
  from pfl.data.sampling import get_user_sampler
  from pfl.hyperparam.base import NNTrainHyperParams
  from pfl.model.tensorflow import TFModel

  network = next_word_step.build_network(options)
  network.compile(tf.keras.optimizers.SGD(lstm_step.LEARNING_RATE), loss())
  for variable, value in zip(
    network.trainable_variables, load(file_of(options, FIRST)), strict=True
  ):
    variable.assign(value)
  model = TFModel(network, {}, tf.keras.optimizers.SGD(1.0))
  users = list(range(options.clients))
  texts = [
    [tf.constant(part) for part in lstm_step.text(options, user)]
    for user in users
  ]
  data = FederatedDataset(
    lambda user: Dataset(texts[user], user_id=str(user)),
    get_user_sampler('minimize_reuse', users),
  )
  backend = SimulatedBackend(data, data)
  algorithm = FederatedAveraging()
  training = NNTrainHyperParams(
    local_num_epochs=1,
    local_learning_rate=lstm_step.LEARNING_RATE,
    local_batch_size=options.batch_size,
  )
  done = 0

  def step() -> None:
    nonlocal done
    done += 1
    # Runs up to this round, without evaluation.
    rounds = NNAlgorithmParams(
      central_num_iterations=done,
      evaluation_frequency=sys.maxsize,
      train_cohort_size=options.clients,
      val_cohort_size=None,
    )
    algorithm.run(
      rounds, backend, model, training, send_metrics_to_platform=False
    )

  return step, lambda: [w.numpy() for w in network.trainable_variables]


MAKERS: Mapping[
  str,
  Callable[[argparse.Namespace, contextlib.ExitStack], tuple[Step, Weights]],
] = {OURS: our_round, STOCK: stock_round, PFL: pfl_round}


def serve(options: argparse.Namespace) -> None:
  """Run rounds of one candidate for the comparing process."""
  with contextlib.ExitStack() as stack:

    def prepare() -> measuring.Answers:
      step, weights = MAKERS[options.worker](options, stack)
      turn = measuring.timed(step)

      def leave() -> Mapping[str, Any]:
        save(file_of(options, options.worker), weights())
        return {}

      return {'turn': lambda: {'seconds': turn()}, 'weights': leave}

    measuring.serve(prepare)


def has_pfl(options: argparse.Namespace) -> bool:
  """Return True if pfl-research can be imported."""
  folder = pathlib.Path(options.pfl) / 'pfl' if options.pfl else None
  if folder and not folder.is_dir():
    raise measuring.BenchmarkError(
      f'--pfl={options.pfl}: there is no package pfl in that folder.'
    )
  return bool(folder) or importlib.util.find_spec('pfl') is not None


def check_same(
  options: argparse.Namespace, started: Mapping[str, measuring.Worker]
) -> None:
  """Compare the weights of all after their first round.

  Raises:
    BenchmarkError: If they differ by more than rounding.
  """
  for worker in started.values():
    worker.ask('weights')
  first = load(file_of(options, FIRST))
  ours = load(file_of(options, OURS))
  moved = max(np.abs(a - b).max() for a, b in zip(first, ours, strict=True))
  for name in started:
    theirs = load(file_of(options, name))
    distance = max(
      np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)
    )
    measuring.say(
      f'  {name}: weights at most {distance:.1g} from ours, which the first '
      f'round moved by {moved:.2g}.'
    )
    if not distance < 1e-3 * moved:
      raise measuring.BenchmarkError(f'{name!r} does not do the same work.')


def compare(options: argparse.Namespace) -> None:
  """Time rounds in turn."""
  measuring.begin('A round of the LSTM of next words')
  names = [name for name in MAKERS if name != PFL or has_pfl(options)]
  if PFL not in names:
    measuring.say('Without pfl-research, which is not installed: see --pfl.')
  shared = [
    f'--{name}={getattr(options, name)}'
    for name in (*_SIZES, 'pfl', 'folder')
    if getattr(options, name)
  ]
  arguments = {name: [f'--worker={name}', *shared] for name in names}
  with measuring.workers('benchmarks.next_word_round', arguments) as started:
    for worker in started.values():
      worker.turn()
    check_same(options, started)
    seconds = measuring.take_turns(
      {name: worker.turn for name, worker in started.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
  tokens = options.clients * options.steps * options.batch_size * options.tokens
  for name in names:
    if name != OURS:
      measuring.ratio(seconds, name, OURS)
    rate = tokens / statistics.median(seconds[name])
    measuring.say(f'  {name}: {rate:,.0f} tokens a second')


_SIZES = {
  'clients': (16, 'of a round'),
  'steps': (8, 'of a client in a round'),
  'vocabulary': (1000, 'number of words'),
  'buckets': (500, 'for all other words'),
  'batch_size': (16, 'sentences in a step'),
  'tokens': (20, 'words of a sentence'),
}


def main() -> None:
  """Read the arguments and compare, or serve one candidate."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=9, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  for name, (size, meaning) in _SIZES.items():
    add(f'--{name}', type=int, default=size, help=meaning)
  add('--architecture', default=models.LSTM, help=argparse.SUPPRESS)
  add('--pfl', default='', help='folder with the package pfl')
  add('--folder', default='', help=argparse.SUPPRESS)
  add('--worker', choices=list(MAKERS), help='serve another process')
  options = parser.parse_args()
  if options.worker:
    serve(options)
  with tempfile.TemporaryDirectory() as options.folder:
    compare(options)


if __name__ == '__main__':
  main()
