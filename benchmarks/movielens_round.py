"""A round of MovieLens 1M: the cohort runtime against stock TFF and native.

The paper's recipe: a Keras model, 100 clients a round. All train on the same
clients and batches from the same initial item vectors. A round is timed from
choosing the cohort to the new weights and metrics. For stock TFF, each client's
`tf.data.Dataset` is made beforehand.

  python -m benchmarks.movielens_round
  python -m benchmarks.movielens_round --full   # 500 rounds, start to result
"""

import collections
import contextlib
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks import measuring
from benchmarks import recipe
from tasks.movielens import models as movielens_models
import tff_partial
from tff_partial import runtimes
from tff_partial.training import metrics_log

STOCK, NATIVE, COHORT = 'stock', 'ours, native', 'ours, cohort'


class StockRun:
  """Training by `tff.learning.algorithms.build_fed_recon`, round by round.

  Attributes:
    state: The server's state.
    round: Number of rounds run.
  """

  def __init__(
    self, paper: recipe.Recipe, sampler: Any, first: Any, context: Any
  ):
    """Build the process and set our initial weights.

    Args:
      paper: The recipe.
      sampler: Chooses the cohorts.
      first: Our initial weights, `ModelWeights`.
      context: TFF's native runtime.
    """
    self._paper, self._sampler, self._context = paper, sampler, context
    self._datasets: dict[str, Any] = {}
    self.round = 0
    self.process = _stock_process(paper)
    with measuring.installed(context):
      state = self.process.initialize()
      weights = self.process.get_model_weights(state)
      (items,) = first.trainable['global'].values()
      if np.shape(items) != np.shape(weights.trainable[0]):
        raise measuring.BenchmarkError('The two models have other weights.')
      self.state = self.process.set_model_weights(
        state, type(weights)([items], weights.non_trainable)
      )

  def prepare(self) -> None:
    """Make the data sets of the next round's clients."""
    for client in self._sampler.cohort(self.round + 1):
      if client not in self._datasets:
        self._datasets[client] = self._dataset(client)

  def step(self) -> None:
    """Run a round."""
    number = self.round + 1
    ids = self._sampler.cohort(number)
    with measuring.installed(self._context):
      output = self.process.next(
        self.state, [self._datasets[client] for client in ids]
      )
    self.state, self.round = output.state, number
    metrics_log.flatten(output.metrics)

  def weights(self) -> Any:
    """Return the item vectors."""
    with measuring.installed(self._context):
      return self.process.get_model_weights(self.state).trainable[0]

  def _dataset(self, client: str) -> Any:
    seeds = np.zeros([1, 2], np.int32)
    value = self._paper.clients.cohort([client], seeds)[0]
    count = int(value['count'])
    return tf.data.Dataset.from_tensor_slices(
      (value['examples']['x'][:count], value['examples']['y'][:count])
    ).batch(self._paper.settings['batch_size'])


def _stock_process(paper: recipe.Recipe) -> Any:
  settings = paper.settings
  reconstruction = tff.learning.models.ReconstructionModel
  build_model = functools.partial(
    movielens_models.build_matrix_factorization,
    paper.task.ratings.num_items,
    settings['num_factors'],
    initial_scale=settings['initial_scale'],
  )

  def drawn_by_each(next_creator: Any, **request: Any) -> Any:
    # Keras fixes an initializer's seed when it is traced, so that in stock TFF
    # all clients of all rounds would start from the same vector.
    if request.get('name') == 'vector':
      scale = settings['initial_scale']
      request['initial_value'] = lambda: tf.random.uniform(
        [settings['num_factors']], -scale, scale
      )
    return next_creator(**request)

  def model_fn() -> Any:
    with tf.variable_creator_scope(drawn_by_each):
      model = build_model()
    local = [model.get_layer('user_embedding')]
    return reconstruction.from_keras_model_and_layers(
      keras_model=model,
      global_layers=[layer for layer in model.layers if layer not in local],
      local_layers=local,
      input_spec=(
        tf.TensorSpec([None], tf.int32),
        tf.TensorSpec([None], tf.float32),
      ),
    )

  def optimizer(name: str) -> Any:
    return tff.learning.optimizers.build_sgdm(settings[f'{name}_learning_rate'])

  return tff.learning.algorithms.build_fed_recon(
    model_fn,
    loss_fn=tf.keras.losses.MeanSquaredError,
    metrics_fn=movielens_models.build_metrics,
    server_optimizer_fn=optimizer('server'),
    client_optimizer_fn=optimizer('update'),
    reconstruction_optimizer_fn=optimizer('reconstruction'),
    dataset_split_fn=reconstruction.build_dataset_split_fn(
      recon_epochs=settings['reconstruction_epochs'],
      recon_steps_max=settings['reconstruction_steps'],
      post_recon_epochs=settings['update_epochs'],
      post_recon_steps_max=settings['update_steps'],
      split_dataset=True,
    ),
  )


def compare(options: Any) -> None:
  """Time rounds in turn, then compare the trained models."""
  measuring.begin("MovieLens, the paper's recipe, one round")
  paper = recipe.load(f'--clients_per_round={options.clients_per_round}')
  process, clients = paper.trainable.process, paper.clients
  counts = paper.task.counts
  say = measuring.say
  say(
    f'{counts["name"]}: {len(clients)} training clients, '
    f'{clients.num_examples} examples; {options.clients_per_round} clients a '
    f'round; jit={paper.jit}'
  )
  with measuring.ending_children(), contextlib.ExitStack() as stack:
    cohort_context = stack.enter_context(runtimes.cohort(jit=paper.jit))
    native_context = stack.enter_context(runtimes.native())
    cohort, native = (
      measuring.Run(process, clients, options.clients_per_round, context)
      for context in (cohort_context, native_context)
    )
    kept: dict[str, Any] = {}

    def cohort_step() -> None:
      cohort.step()
      if cohort.round == options.rounds:
        kept[COHORT] = cohort.weights()

    candidates = {
      NATIVE: measuring.timed(native.step),
      COHORT: measuring.timed(cohort_step, options.cohort_rounds),
    }
    if options.stock:
      stock = StockRun(
        paper,
        cohort.sampler,
        cohort.weights(),
        tff.backends.native.create_sync_local_cpp_execution_context(),
      )
      stock_turn = measuring.timed(stock.step)

      def prepared_turn() -> float:
        stock.prepare()
        return stock_turn()

      candidates = {STOCK: prepared_turn, **candidates}
    say(
      f'A turn of {COHORT!r} is the median of {options.cohort_rounds} rounds.'
    )
    seconds = measuring.take_turns(
      candidates,
      repetitions=options.rounds - options.warm_up,
      warm_up=options.warm_up,
    )
    if options.stock:
      measuring.ratio(seconds, STOCK, COHORT, 'at least 200')
    measuring.ratio(seconds, NATIVE, COHORT, 'at least 10')

    chosen = [
      cohort.sampler.cohort(number)
      for number in range(options.warm_up + 1, options.rounds + 1)
    ]
    sparse, dense = recipe.floors(
      paper.settings,
      paper.task.ratings.num_items,
      [clients.cohort(ids, np.zeros([len(ids), 2])) for ids in chosen],
    )
    machine = measuring.rates(paper.table_bytes)
    taken = statistics.median(seconds[COHORT])
    measuring.say_floor('rows that clients use', sparse, machine, taken)
    measuring.say_floor('whole tables', dense, machine, taken)

    say(f'Test users after {options.rounds} rounds, all measured alike:')
    kept[NATIVE] = native.weights()
    if options.stock:
      kept[STOCK] = _with_items(kept[COHORT], stock.weights())
    with measuring.installed(cohort_context):
      for name, weights in kept.items():
        _say_test(paper, name, weights)


def _with_items(weights: Any, items: Any) -> Any:
  """Return our weights with other item vectors."""
  (name,) = weights.trainable['global']
  trainable = collections.OrderedDict(
    {'global': collections.OrderedDict({name: items})}
  )
  return type(weights)(trainable, weights.non_trainable)


def _say_test(paper: recipe.Recipe, name: str, weights: Any) -> None:
  (evaluation_clients,) = paper.task.tests.values()
  evaluation_set = paper.trainable.evaluation_set(evaluation_clients)
  measured = tff_partial.evaluate(evaluation_set, weights)
  measuring.say(
    f'  {name:12}  rmse {measured["rmse"]:.4f}  '
    f'accuracy {measured["accuracy"]:.4f}  '
    f'({len(evaluation_set.clients)} users)'
  )


def train_fully(options: Any) -> None:
  """Time the training program from process start to `result.json`."""
  measuring.begin(
    f'MovieLens, {options.full_rounds} rounds with evaluation every 50, from '
    'process start to result.json'
  )
  taken = []
  for _ in range(options.full_repetitions):
    with tempfile.TemporaryDirectory() as folder:
      output = pathlib.Path(folder) / 'run'
      command = [sys.executable, '-m', 'tasks.train']
      command += [f'--flagfile={recipe.flags_file()}', f'--output_dir={output}']
      command += [f'--rounds={options.full_rounds}', '--evaluate_every=50']
      started = time.perf_counter()
      subprocess.run(
        command, cwd=measuring.ROOT, check=True, stdout=subprocess.DEVNULL
      )
      taken.append(time.perf_counter() - started)
      result = json.loads((output / 'result.json').read_text())
    rmse = {name: test['rmse'] for name, test in result['test'].items()}
    measuring.say(
      f'  {taken[-1]:.1f} s; a round '
      f'{measuring.in_seconds(result["seconds"]["per_round_median"])}, the '
      f'first {measuring.in_seconds(result["seconds"]["first_round"])}; test '
      f'rmse {rmse}; peak {result["peak_rss_mb"]} MB'
    )
  measuring.say(f'  median {statistics.median(taken):.1f} s; goal: under 30 s')


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--rounds', type=int, default=30, help='rounds that stock TFF trains')
  add('--warm_up', type=int, default=2, help='of them, that do not count')
  add('--cohort_rounds', type=int, default=10, help='rounds in a turn of ours')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  add('--no_stock', dest='stock', action='store_false', help='leave stock out')
  add('--full', action='store_true', help='time the whole training instead')
  add('--full_rounds', type=int, default=500, help='rounds of --full')
  add('--full_repetitions', type=int, default=3, help='trainings of --full')
  options = parser.parse_args()
  if options.full:
    train_fully(options)
    return
  if not 0 < options.warm_up < options.rounds:
    parser.error('--warm_up must be positive and less than --rounds')
  compare(options)


if __name__ == '__main__':
  main()
