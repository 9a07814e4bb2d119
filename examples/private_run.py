"""A run with a target epsilon: calibrated noise, and a privacy ledger.

Protects whole users against anyone who sees the trained weights; the server is
trusted with clients' updates (docs/privacy.md).
"""

import tff_partial  # Before TensorFlow, which then logs less.

import numpy as np
import tensorflow as tf

from tff_partial.dp import clipping
from tff_partial.dp import privacy_plans

EPSILON, DELTA, ROUNDS, USERS = 8.0, 1e-4, 60, 2_000

random = np.random.default_rng(0)
common = random.normal(size=[8, 1])
examples = {}
for user in range(USERS):
  x = random.normal(size=[10, 8]).astype(np.float32)
  own = random.normal()
  examples[f'user {user}'] = {'x': x, 'y': (x @ common + own).astype('f')}


def build_keras_model() -> tf.keras.Model:
  inputs = tf.keras.Input([8])
  shared = tf.keras.layers.Dense(1, use_bias=False, name='shared')(inputs)
  own = tff_partial.layers.PrivateVector(1, initializer='zeros', name='own')
  return tf.keras.Model(inputs, shared + own(inputs))


model = tff_partial.from_keras(build_keras_model, local='own', loss='mse')
plan = privacy_plans.plan(
  clipping.AdaptiveClip(),
  target_epsilon=EPSILON,
  delta=DELTA,
  population=USERS,
  clients_per_round=100,
  rounds=ROUNDS,
)
process = tff_partial.algorithms.build_furl(
  model,
  training=tff_partial.Phase(optimizer=tff_partial.sgd(0.05), epochs=2),
  aggregation=tff_partial.Aggregation(
    aggregator=plan.mean(), client_weighting=tff_partial.ClientWeighting.UNIFORM
  ),
)
trained = tff_partial.train(
  process,
  tff_partial.pack(examples, process.example_spec),
  rounds=ROUNDS,
  clients_per_round=100,
  privacy=privacy_plans.PrivacyLedger(plan),
)
(found,) = trained.weights.trainable['global'].values()
error = np.linalg.norm(found - common) / np.linalg.norm(common)
print(f'Off by {error:.1%} at epsilon {trained.privacy["epsilon"]:.2f}.')
