"""A custom Keras model whose last layer stays with each client.

Each client has few of ten classes. FedPer trains a shared body and a head for
each client; FedAvg one model for all.
"""

import tff_partial  # Before TensorFlow, which then logs less.

import numpy as np
import tensorflow as tf

from tff_partial import algorithms
from tff_partial import Phase
from tff_partial import sgd
from tff_partial import splits

random = np.random.default_rng(0)
prototypes = random.normal(size=[10, 16]).astype(np.float32)
y = random.integers(0, 10, 4_000).astype(np.int32)
x = prototypes[y] + random.normal(size=[4_000, 16]).astype('f')
partition = tff_partial.partitions.shards(y, 50, 2)


def build_keras_model() -> tf.keras.Model:
  return tf.keras.Sequential(
    [
      tf.keras.Input([16]),
      tf.keras.layers.Dense(32, 'relu', name='body'),
      tf.keras.layers.Dense(10, name='head'),
    ]
  )


def accuracy(build, measure, **parts) -> float:
  """Train on the first half of each client's examples, measure the second."""
  model = tff_partial.from_keras(
    build_keras_model,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=['accuracy'],
    **parts,
  )
  half = splits.halves().support
  training = Phase(optimizer=sgd(0.1), batch_size=10, epochs=2, on=half)
  process = build(model, training=training)
  evaluation = measure(model, split=splits.halves())
  spec = process.example_spec
  clients = tff_partial.from_arrays({'x': x, 'y': y}, partition, spec)
  trained = tff_partial.train(process, clients, rounds=40, clients_per_round=10)
  tested = tff_partial.EvaluationSet(
    evaluation, clients, remembering=not process.is_stateless
  )
  return tff_partial.evaluate(tested, trained)['accuracy']


ours = algorithms.build_fed_per, algorithms.build_fed_per_eval
head = accuracy(*ours, local='head')
alone = accuracy(algorithms.build_fed_avg, algorithms.build_fed_avg_eval)
print(f'A head for each: {head:.3f}. One model for all: {alone:.3f}.')
