"""A custom table: a CSV file with one example a row, and its client's id.

python examples/own_csv.py ratings.csv --client=user --item=film --label=rating
"""

import tff_partial  # Before TensorFlow, which then logs less.

import argparse

import pandas as pd
import tensorflow as tf

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument('file')
parser.add_argument('--client', default='user')
parser.add_argument('--item', default='film')
parser.add_argument('--label', default='rating')
parser.add_argument('--rounds', type=int, default=200)
options = parser.parse_args()

frame = pd.read_csv(options.file)
num_items = frame[options.item].nunique()


def build_keras_model() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(num_items, 8, 'normal')(item)
  return tf.keras.Model(item, tf.keras.layers.Dense(1, name='taste')(vector))


model = tff_partial.from_keras(build_keras_model, local='taste', loss='mse')
process = tff_partial.algorithms.build_fed_recon(
  model, reconstruct=tff_partial.Phase(epochs=10, batch_size=4)
)
clients = tff_partial.from_pandas(
  frame,
  process.example_spec,
  client_id=options.client,
  inputs=options.item,
  labels=options.label,
  encode=options.item,
)
print(clients)
trained = tff_partial.train(
  process, clients, rounds=options.rounds, clients_per_round=20
)
someone = clients.client_ids[0]
best = tff_partial.top_n(
  tff_partial.personalise(trained, clients, someone),
  clients.vocabularies[options.item],
  3,
)
print(f'For {someone}: {", ".join(str(choice.candidate) for choice in best)}')
