"""Ratings from a CSV file to a user's top 10 and files for a phone.

python examples/csv_to_phone.py ratings.csv phone

The file has the columns user, item and rating; phone is a new folder.
"""

import tff_partial  # Before TensorFlow, which then logs less.

import sys

import pandas as pd
import tensorflow as tf

frame = pd.read_csv(sys.argv[1], dtype={'user': str, 'item': str})


def build() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(frame.item.nunique(), 8, 'normal')(item)
  return tf.keras.Model(item, tf.keras.layers.Dense(1, name='taste')(vector))


model = tff_partial.from_keras(build, local='taste', loss='mse')
process = tff_partial.algorithms.build_fed_recon(
  model, reconstruct=tff_partial.Phase(batch_size=4)
)
spec = process.example_spec
clients = tff_partial.from_pandas(
  frame, spec, client_id='user', inputs='item', labels='rating', encode='item'
)
trained = tff_partial.train(process, clients, rounds=200, clients_per_round=20)
user, known = clients.client_ids[0], clients.vocabularies
mine = tff_partial.personalise(trained, clients, user)
rated = frame.item[frame.user == user]
for item, score in tff_partial.top_n(mine, known['item'], 10, exclude=rated):
  print(f'{user} may like {item}: {score:.2f}')
weights, out = trained.best_weights, sys.argv[2]
tff_partial.export(model, weights, out, reconstruct=trained, vocabularies=known)
