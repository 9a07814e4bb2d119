"""A round of MovieLens 1M: the cohort runtime against stock TFF and native.

The paper's recipe: a Keras model, 100 clients a round. All train on the same
clients and batches from the same first item vectors. A round counts from
choosing the cohort to having the new weights and metrics. Stock TFF finds each
client's `tf.data.Dataset` made and waiting.

  python -m benchmarks.movielens_round
  python -m benchmarks.movielens_round --full   # 500 rounds, start to result
"""

import collections
from collections.abc import Sequence
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

from benchmarks import measuring

STOCK, NATIVE, COHORT = 'stock', 'ours, native', 'ours, cohort'


class StockRun:
  """Training by `tff.learning.algorithms.build_fed_recon`, round by round.

  Attributes:
    state: The server's state.
    round: How many rounds were run.
  """

  def __init__(
    self, recipe: measuring.Recipe, sampler: Any, first: Any, context: Any
  ):
    """Builds the process and gives it our first weights.

    Args:
      recipe: The recipe.
      sampler: Chooses the cohorts.
      first: Our first weights, `ModelWeights`.
      context: TFF's own native runtime.
    """
    self._recipe, self._sampler, self._context = recipe, sampler, context
    self._datasets: dict[str, Any] = {}
    self.round = 0
    self.process = _stock_process(recipe)
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
    """Makes the data sets of the next round's clients."""
    for client in self._sampler.cohort(self.round + 1):
      if client not in self._datasets:
        self._datasets[client] = self._dataset(client)

  def step(self) -> None:
    """Does a round."""
    from tff_partial import records

    number = self.round + 1
    ids = self._sampler.cohort(number)
    with measuring.installed(self._context):
      output = self.process.next(
        self.state, [self._datasets[client] for client in ids]
      )
    self.state, self.round = output.state, number
    records.flatten(output.metrics)

  def weights(self) -> Any:
    """The item vectors."""
    with measuring.installed(self._context):
      return self.process.get_model_weights(self.state).trainable[0]

  def _dataset(self, client: str) -> Any:
    import tensorflow as tf

    seeds = np.zeros([1, 2], np.int32)
    value = self._recipe.clients.cohort([client], seeds)[0]
    count = int(value['count'])
    return tf.data.Dataset.from_tensor_slices(
      (value['examples']['x'][:count], value['examples']['y'][:count])
    ).batch(self._recipe.settings['batch_size'])


def _stock_process(recipe: measuring.Recipe) -> Any:
  import tensorflow as tf
  import tensorflow_federated as tff

  from tasks import movielens_models

  settings = recipe.settings
  reconstruction = tff.learning.models.ReconstructionModel
  build_model = functools.partial(
    movielens_models.build_matrix_factorization,
    recipe.task.ratings.num_items,
    settings['num_factors'],
    initial_scale=settings['initial_scale'],
  )

  def model_fn() -> Any:
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


def floors(
  recipe: measuring.Recipe, cohorts: Sequence[Sequence[str]]
) -> tuple[measuring.Floor, measuring.Floor]:
  """The least that a round takes, on average over some cohorts.

  Args:
    recipe: The recipe.
    cohorts: The ids of each cohort.

  Returns:
    One floor that touches the rows of the item table that clients use, and one
    in which each client copies the table, subtracts and sums whole tables.
  """
  settings = recipe.settings
  size, factors = settings['batch_size'], settings['num_factors']
  row = 4 * factors
  sparse, dense = measuring.Floor(0, 0), measuring.Floor(0, 0)
  table = recipe.task.ratings.num_items * row
  for ids in cohorts:
    seeds = np.zeros([len(ids), 2], np.int32)
    for value in recipe.clients.cohort(ids, seeds):
      count = int(value['count'])
      batches = np.arange(count) // size
      items = value['examples']['x'][:count]
      query = items[batches % 2 == 1][: size * settings['update_steps']]
      support = _seen(
        int((batches % 2 == 0).sum()),
        size,
        settings['reconstruction_epochs'],
        settings['reconstruction_steps'],
      )
      # A prediction, its derivatives and a step take 2 operations a factor
      # each in reconstruction; in the update a derivative is but scaled.
      client = measuring.Floor(
        bytes_moved=support * (row + 12) + len(query) * (2 * row + 12),
        operations=factors * (6 * support + 5 * len(query)),
      )
      # Old row, new row, and the sum read and written.
      changed = len(np.unique(query))
      sparse += client + measuring.Floor(4 * row * changed, 3 * factors * changed)
      # Copied, subtracted, and added to the sum with a weight.
      dense += client + measuring.Floor(8 * table, 3 * table // 4)
  # The server divides the sum and adds it to its weights.
  server = measuring.Floor(4 * table, 2 * table // 4)
  mean = [
    measuring.Floor(*(number / len(cohorts) for number in total)) + server
    for total in (sparse, dense)
  ]
  return mean[0], mean[1]


def _seen(examples: int, size: int, epochs: int, steps: int) -> int:
  """Examples seen in at most so many steps of at most so many epochs."""
  per_epoch = -(-examples // size)
  steps = min(steps, epochs * per_epoch)
  whole, rest = divmod(steps, max(per_epoch, 1))
  return whole * examples + min(rest * size, examples)


def compare(options: Any) -> None:
  """Measures rounds in turn, then what the models have learned."""
  measuring.begin('MovieLens, the paper\'s recipe, one round')
  import tensorflow_federated as tff

  from tff_partial import runtimes

  recipe = measuring.movielens(
    f'--clients_per_round={options.clients_per_round}'
  )
  process, clients = recipe.trainable.process, recipe.clients
  counts = recipe.task.counts
  say = measuring.say
  say(
    f'{counts["name"]}: {len(clients)} training clients, '
    f'{clients.num_examples} examples; {options.clients_per_round} clients a '
    f'round; jit={recipe.jit}'
  )
  with measuring.ending_children(), contextlib.ExitStack() as stack:
    cohort_context = stack.enter_context(runtimes.cohort(jit=recipe.jit))
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
        recipe,
        cohort.sampler,
        cohort.weights(),
        tff.backends.native.create_sync_local_cpp_execution_context(),
      )
      stock_turn = measuring.timed(stock.step)

      def prepared_turn() -> float:
        stock.prepare()
        return stock_turn()

      candidates = {STOCK: prepared_turn, **candidates}
    say(f'A turn of {COHORT!r} is the median of {options.cohort_rounds} rounds.')
    seconds = measuring.take_turns(
      candidates,
      repetitions=options.rounds - options.warm_up,
      warm_up=options.warm_up,
    )
    if options.stock:
      measuring.ratio(seconds, STOCK, COHORT, 'at least 200')
    measuring.ratio(seconds, NATIVE, COHORT, 'at least 10')

    numbers = range(options.warm_up + 1, options.rounds + 1)
    sparse, dense = floors(recipe, [cohort.sampler.cohort(n) for n in numbers])
    table = 4 * recipe.task.ratings.num_items * recipe.settings['num_factors']
    machine = measuring.rates(table)
    taken = statistics.median(seconds[COHORT])
    measuring.say_floor('rows that clients use', sparse, machine, taken)
    measuring.say_floor('whole tables', dense, machine, taken)

    say(f'Test users after {options.rounds} rounds, all measured alike:')
    kept[NATIVE] = native.weights()
    if options.stock:
      kept[STOCK] = _with_items(kept[COHORT], stock.weights())
    with measuring.installed(cohort_context):
      for name, weights in kept.items():
        _say_test(recipe, name, weights)


def _with_items(weights: Any, items: Any) -> Any:
  """Our weights with other item vectors."""
  (name,) = weights.trainable['global']
  trainable = collections.OrderedDict(
    {'global': collections.OrderedDict({name: items})}
  )
  return type(weights)(trainable, weights.non_trainable)


def _say_test(recipe: measuring.Recipe, name: str, weights: Any) -> None:
  import tff_partial

  evaluation = recipe.trainable.evaluation
  clients = recipe.task.clients('test', evaluation.example_spec)
  exam = tff_partial.Exam(evaluation, clients)
  measured = tff_partial.evaluate(exam, weights)
  measuring.say(
    f'  {name:12}  rmse {measured["rmse"]:.4f}  '
    f'accuracy {measured["accuracy"]:.4f}  ({len(clients)} users)'
  )


def train_fully(options: Any) -> None:
  """Times the training binary from process start to `result.json`."""
  measuring.begin(
    f'MovieLens, {options.full_rounds} rounds with evaluation every 50, from '
    'process start to result.json'
  )
  taken = []
  for _ in range(options.full_repetitions):
    with tempfile.TemporaryDirectory() as folder:
      output = pathlib.Path(folder) / 'run'
      command = [sys.executable, '-m', 'tasks.train']
      command += [f'--flagfile={measuring.RECIPE}', f'--output_dir={output}']
      command += [f'--rounds={options.full_rounds}', '--evaluate_every=50']
      started = time.perf_counter()
      subprocess.run(
        command, cwd=measuring.ROOT, check=True, stdout=subprocess.DEVNULL
      )
      taken.append(time.perf_counter() - started)
      result = json.loads((output / 'result.json').read_text())
    rmse = {name: test['rmse'] for name, test in result['test'].items()}
    measuring.say(
      f'  {taken[-1]:.1f} s; a round {result["seconds"]["per_round_median"]:.4f}'
      f' s, the first {result["seconds"]["first_round"]:.2f} s; test rmse '
      f'{rmse}; peak {result["peak_rss_mb"]} MB'
    )
  measuring.say(f'  median {statistics.median(taken):.1f} s; goal: under 30 s')


def main() -> None:
  """Reads the arguments and measures."""
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
