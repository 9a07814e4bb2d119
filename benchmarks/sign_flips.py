"""Joins of updates where a fifth of the clients flip the signs of theirs.

python -m benchmarks.sign_flips > docs/results/tables/sign_flips.csv

Twenty clients hold scikit-learn's digits by a Dirichlet distribution of 1. A
quarter of each client's images is held out. All take part in each of 30 rounds,
four of them hostile: they send their update backwards, as it is or five times
as long. Accuracy on what is held out of all clients, over three seeds of the
division and of who is hostile.
"""

import collections
import csv
import sys
from typing import Any

import numpy as np
from sklearn import datasets
import tensorflow as tf

import tff_partial
from tff_partial import aggregators
from tff_partial import algorithms
from tff_partial import partitions
from tff_partial import Phase
from tff_partial import sgd
from tff_partial import splits
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.contexts import OverwriteWeights

CLIENTS, HOSTILE, ROUNDS, SEEDS = 20, 4, 30, 3
ATTACKS = {'none': 1.0, 'flipped': -1.0, 'flipped, five times': -5.0}
JOINS: dict[str, Any] = {
  'mean': None,
  'median of coordinates': aggregators.coordinate_median(
    clients_per_round=CLIENTS
  ),
  'trimmed mean, 0.2': aggregators.trimmed_mean(
    share=0.2, clients_per_round=CLIENTS
  ),
  'Krum': aggregators.krum(num_attackers=HOSTILE, clients_per_round=CLIENTS),
  'multi-Krum, 10': aggregators.krum(
    num_attackers=HOSTILE, num_chosen=10, clients_per_round=CLIENTS
  ),
  'geometric median': aggregators.geometric_median(clients_per_round=CLIENTS),
}


def build() -> tf.keras.Model:
  """Make a small network."""
  layers = [tf.keras.layers.Dense(32, 'relu'), tf.keras.layers.Dense(10)]
  return tf.keras.Sequential([tf.keras.Input([64]), *layers])


def scaled(client: ClientContext) -> tiers.Weights:
  """Return weights whose update is a multiple of the client's own."""
  factor = client.examples['factor'][0]
  trained = client.weights[tiers.GLOBAL]
  weights = collections.OrderedDict(
    (name, old + factor * (trained[name] - old))
    for name, old in client.received[tiers.GLOBAL].items()
  )
  return collections.OrderedDict({tiers.GLOBAL: weights})


def accuracies(join: Any) -> dict[str, list[float]]:
  """Train and measure one join, by attack."""
  digits, marked = datasets.load_digits(), splits.by_mark('is_query')
  model = tff_partial.from_keras(
    build,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
    seed=0,
  )
  fields = {'factor': tf.TensorSpec([], tf.float32)}
  factors = splits.Part('factors', splits.everything().choose, fields)
  process = tff_partial.compose(
    model,
    work=[
      Phase(optimizer=sgd(0.1), on=marked.support, measured=True),
      OverwriteWeights(scaled, factors),
    ],
    aggregation=tff_partial.Aggregation(join),
  )
  measure = algorithms.build_fed_avg_eval(model, split=marked)
  found: dict[str, list[float]] = {attack: [] for attack in ATTACKS}
  for seed in range(SEEDS):
    draw = np.random.default_rng(seed)
    parts = partitions.dirichlet(
      digits.target, CLIENTS, 1.0, min_examples=20, seed=seed
    )
    held_out = draw.random(len(digits.target)) < 0.25
    hostile = draw.choice(list(parts), HOSTILE, replace=False)
    for attack, factor in ATTACKS.items():
      data = {
        'x': digits.data.astype(np.float32) / 16,
        'y': digits.target,
        'is_query': held_out.astype(np.int32),
        'factor': np.ones(len(held_out), np.float32),
      }
      for name in hostile:
        data['factor'][parts[name]] = factor
      run = tff_partial.train(
        process,
        tff_partial.from_arrays(data, parts, process.example_spec),
        rounds=ROUNDS,
        clients_per_round=CLIENTS,
        seed=seed,
        show_progress=False,
      )
      del data['factor']
      tests = tff_partial.from_arrays(data, parts, measure.example_spec)
      tested = tff_partial.EvaluationSet(measure, tests)
      score = tff_partial.evaluate(tested, run.weights)['accuracy']
      found[attack].append(float(score))
  return found


def main() -> None:
  """Write a table, a row for each join."""
  table = csv.writer(sys.stdout, lineterminator='\n')
  columns = [f'{attack} ↑{end}' for attack in ATTACKS for end in ('', ' ±')]
  table.writerow(['join', *columns])
  for name, join in JOINS.items():
    found = accuracies(join).values()
    numbers = [n for of in found for n in (np.mean(of), np.std(of, ddof=1))]
    table.writerow([name, *(f'{number:.3f}' for number in numbers)])


if __name__ == '__main__':
  with tff_partial.runtimes.cohort(jit=False):
    main()
