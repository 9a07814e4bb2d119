"""Batch normalization where each client's images are scaled in its own way.

python examples/batch_normalization.py FOLDER_OF_FASHION_MNIST ROUNDS SEED
"""

import tff_partial  # Before TensorFlow, which then logs less.

import gzip
import sys

import numpy as np
import tensorflow as tf

from tff_partial import algorithms
from tff_partial import EvaluationSet
from tff_partial import Phase
from tff_partial import splits

folder, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with gzip.open(f'{folder}/train-images-idx3-ubyte.gz') as file:
  x = np.frombuffer(file.read(), np.uint8, offset=16).reshape([-1, 28, 28, 1])
with gzip.open(f'{folder}/train-labels-idx1-ubyte.gz') as file:
  y = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int32)
random, seen, new = np.random.default_rng(seed), {}, {}
for k, rows in enumerate(random.permutation(len(y))[:7_200].reshape([12, 600])):
  scale, shift = (1, 0.5, 0.25, 0.1)[k % 4], random.uniform(-0.5, 0.5)
  images = (x[rows] / 255 * scale + shift).astype(np.float32)
  (seen if k < 8 else new)[f'client_{k}'] = {'x': images, 'y': y[rows]}
layers, half = tf.keras.layers, splits.halves()


def build(norm) -> tf.keras.Model:
  stack = [tf.keras.Input([28, 28, 1])]
  for name, filters in (('norm_1', 16), ('norm_2', 32)):
    conv = layers.Conv2D(filters, 3, strides=2, use_bias=False)
    stack += [conv, norm(name=name), layers.ReLU()]
  return tf.keras.Sequential([*stack, layers.Flatten(), layers.Dense(10)])


loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
for method, norm, parts in (
  ('FedAvg', layers.BatchNormalization, {'state': 'averaged'}),
  ('SiloBN', layers.BatchNormalization, {'state': 'local'}),
  ('FedBN', layers.BatchNormalization, {'local': 'norm_.'}),
  ('GroupNorm', lambda name: layers.GroupNormalization(8, name=name), {}),
):
  options = {'loss': loss, 'metrics': ['accuracy'], 'seed': seed, **parts}
  model = tff_partial.from_keras(lambda norm=norm: build(norm), **options)
  process = algorithms.build_fed_bn(model, training=Phase(on=half.support))
  plain = algorithms.build_fed_bn_eval(model, split=half)
  has_averages = bool(model.state)
  own = algorithms.build_fed_bn_eval(model, split=half, estimate=has_averages)
  old, other = (tff_partial.pack(c, plain.example_spec) for c in (seen, new))
  run = tff_partial.train(process, old, rounds=rounds, clients_per_round=8)
  for what, clients in {'seen': old, 'new': other}.items():
    keeps = what == 'seen' and not process.is_stateless
    for how, measure in {'as trained': plain, 'own averages': own}.items():
      tests = EvaluationSet(measure, clients, remembering=keeps)
      found = tff_partial.evaluate(tests, run)
      print(f'{method}, {what}, {how}: {found["accuracy"]:.3f}')
