"""Accuracy of a small CNN under Keras's policies of half precision.

python -m benchmarks.half_precision FASHION_MNIST > \
  docs/results/tables/half_precision.csv

Eight clients with 250 images of Fashion-MNIST each train in ten rounds of one
epoch, with batches of 20 and rate 0.1; then 2,000 other images are measured.
Over three seeds, of the images and of the first weights.
"""

import csv
import pathlib
import sys

import numpy as np
import tensorflow as tf

from tasks.files import idx_files
import tff_partial
from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import sgd

CLIENTS, IMAGES, ROUNDS, SEEDS = 8, 250, 10, 3
POLICIES = ('float32', 'mixed_bfloat16', 'mixed_float16')


def read(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
  """Read the training images, and their classes."""
  x, y = (
    idx_files.read(folder, f'train-{name}', shape, np.uint8, 'Fetch it.')
    for name, shape in (
      ('images-idx3-ubyte', [60_000, 28, 28]),
      ('labels-idx1-ubyte', [60_000]),
    )
  )
  return x[..., np.newaxis], y.astype(np.int32)


def build() -> tf.keras.Model:
  """Make a small network."""
  layers = tf.keras.layers
  conv = [layers.Conv2D(n, 3, 2, activation='relu') for n in (16, 32)]
  ends = [layers.Flatten(), layers.Dense(10)]
  return tf.keras.Sequential([tf.keras.Input([28, 28, 1]), *conv, *ends])


def accuracy(x: np.ndarray, y: np.ndarray, policy: str, seed: int) -> float:
  """Train and measure under a policy."""
  tf.keras.mixed_precision.set_global_policy(policy)
  model = tff_partial.from_keras(
    build,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
    seed=seed,
  )
  tf.keras.mixed_precision.set_global_policy('float32')
  process = algorithms.build_fed_avg(model, training=Phase(optimizer=sgd(0.1)))
  measure = algorithms.build_fed_avg_eval(model)
  order = np.random.default_rng(seed).permutation(len(y))
  parts = [
    *order[: IMAGES * CLIENTS].reshape([CLIENTS, IMAGES]),
    order[-2_000:],
  ]
  *clients, other = (
    {'x': x[part] / np.float32(255), 'y': y[part]} for part in parts
  )
  run = tff_partial.train(
    process,
    tff_partial.pack(
      {f'client {k}': fields for k, fields in enumerate(clients)},
      process.example_spec,
    ),
    rounds=ROUNDS,
    clients_per_round=CLIENTS,
    seed=seed,
    show_progress=False,
  )
  tests = tff_partial.pack({'test': other}, measure.example_spec)
  found = tff_partial.evaluate(
    tff_partial.EvaluationSet(measure, tests), run.weights
  )
  return float(found['accuracy'])


def main(folder: str) -> None:
  """Write a table, a row for each policy."""
  x, y = read(pathlib.Path(folder))
  table = csv.writer(sys.stdout, lineterminator='\n')
  seeds = [f'seed {seed}' for seed in range(SEEDS)]
  table.writerow(['policy', 'accuracy', 'accuracy ±', *seeds])
  for policy in POLICIES:
    found = [accuracy(x, y, policy, seed) for seed in range(SEEDS)]
    numbers = [np.mean(found), np.std(found, ddof=1), *found]
    table.writerow([policy, *(f'{number:.4f}' for number in numbers)])


if __name__ == '__main__':
  with tff_partial.runtimes.cohort(jit=False):
    main(sys.argv[1])
