"""A custom algorithm: clients with a high loss get a higher weight.

After q-FedAvg (Li et al., ICLR 2020), each client is weighted by its loss to
the power q. With its update it sends its loss, and the server keeps the mean.
"""

import tff_partial  # Before TensorFlow, which then logs less.

import numpy as np
import tensorflow as tf

from tff_partial import client_statistics
from tff_partial import Phase
from tff_partial import sgd
from tff_partial import tiers


def build_q_fed_avg(model, q, training):
  def loss_of(client):
    error = client.predict()[:, 0] - client.examples['y'][:, 0]
    squares = tf.where(client.is_real, tf.square(error), 0.0)
    return tf.reduce_sum(squares) / tf.cast(client.count, tf.float32)

  def weight(result):
    return tf.pow(loss_of(result.context), q)

  def keep_mean(server, joined):
    return server._replace(state=joined[0] / joined[1])

  return tff_partial.compose(
    model,
    work=[training],
    aggregation=tff_partial.Aggregation(client_weighting=weight),
    server_state=lambda model: tf.constant(0.0),
    statistics=[
      client_statistics.Statistic(
        'loss', lambda c: tf.stack([loss_of(c), 1.0]), update=keep_mean
      )
    ],
  )


# Nine of ten clients agree.
random = np.random.default_rng(0)
clients = {}
for number in range(20):
  x = random.normal(size=[30, 2]).astype(np.float32)
  slope = [[1.0], [1.0]] if number % 10 else [[-1.0], [1.0]]
  clients[f'client {number}'] = {'x': x, 'y': (x @ slope).astype('f')}
dense = tf.keras.layers.Dense
model = tff_partial.from_keras(
  lambda: tf.keras.Sequential([tf.keras.Input([2]), dense(1)]), loss='mse'
)
for q in (0.0, 2.0):
  training = Phase((tiers.GLOBAL,), optimizer=sgd(0.1), measured=True)
  process = build_q_fed_avg(model, q, training)
  packed = tff_partial.pack(clients, process.example_spec)
  trained = tff_partial.train(process, packed, rounds=40, clients_per_round=20)
  kernel, _ = trained.weights.trainable['global'].values()
  print(f'q = {q}: first slope {kernel[0, 0]:.2f}')
