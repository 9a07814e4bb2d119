"""Cost of robust and differentially private aggregators on MovieLens.

A round of the paper's recipe with each aggregator against the plain mean, under
the cohort runtime. For our mean and our robust aggregator clients send the rows
that they trained; for TFF's aggregators, including the private ones, whole
tables.

  python -m benchmarks.aggregators
"""

import statistics

import tensorflow_federated as tff

from benchmarks import measuring
from benchmarks import recipe
from tff_partial import aggregators
from tff_partial import composition
from tff_partial import runtimes

MEAN = 'mean'
WHOLE = 'mean of whole tables'
ROBUST = 'robust: zeroing and clipping'
FIXED = 'private: gaussian_fixed'
ADAPTIVE = 'private: gaussian_adaptive'


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=20, help='turns of each that count')
  add('--warm_up', type=int, default=2, help='turns of each before')
  add('--rounds', type=int, default=5, help='rounds in a turn')
  add('--clients_per_round', type=int, default=100, help='size of a cohort')
  options = parser.parse_args()

  measuring.begin("MovieLens, the paper's recipe, by aggregator, one round")
  private = tff.aggregators.DifferentiallyPrivateFactory
  number = options.clients_per_round
  factories = {
    MEAN: aggregators.MeanFactory(),
    WHOLE: tff.aggregators.MeanFactory(no_nan_division=True),
    ROBUST: aggregators.robust(),
    FIXED: private.gaussian_fixed(
      noise_multiplier=0.5, clients_per_round=number, clip=1.0
    ),
    ADAPTIVE: private.gaussian_adaptive(
      noise_multiplier=0.5, clients_per_round=number
    ),
  }
  paper = recipe.load(f'--clients_per_round={number}')
  with runtimes.cohort(jit=paper.jit) as context:
    runs = {
      name: measuring.Run(
        recipe.build(
          paper.task.model_with('own'),
          paper.settings,
          aggregation=composition.Aggregation(factory),
        ),
        paper.clients,
        number,
        context,
      )
      for name, factory in factories.items()
    }
    seconds = measuring.take_turns(
      {
        name: measuring.timed(run.step, options.rounds)
        for name, run in runs.items()
      },
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
  measuring.say(f'A turn is the median of {options.rounds} rounds.')
  for name in (ROBUST, FIXED, ADAPTIVE):
    measuring.ratio(seconds, name, MEAN, 'at most 2')
  for name in (WHOLE, FIXED, ADAPTIVE):
    measuring.ratio(seconds, name, MEAN if name == WHOLE else WHOLE)

  # Extra cost of clipping over a mean of whole tables: the norm reads old and
  # new weights once more; the sum scales what it reads anyway. Noise is drawn
  # once.
  table = paper.table_bytes
  machine = measuring.rates(table)
  added = measuring.Floor(number * 2 * table, number * 3 * table // 4)
  median = {name: statistics.median(seconds[name]) for name in seconds}
  measuring.say_floor(
    'what a norm and a scale of whole tables add to the mean',
    added,
    machine,
    max(median[FIXED] - median[WHOLE], 1e-9),
  )


if __name__ == '__main__':
  main()
