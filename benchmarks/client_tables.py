"""Client-sized tables against padding to the largest.

Schools answer items, and each keeps a table of its users and one of its items.
The number of items is distributed between schools as between the teachers of
ASSISTments: a few have many times the typical number. In one candidate each
school has the rows that it needs; in the other all have as many as the largest,
as a model with tables of fixed size requires.

  python -m benchmarks.client_tables
"""

from collections.abc import Mapping
import statistics
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from benchmarks import measuring
import tff_partial
from tff_partial import runtimes
from tff_partial.algorithms import furl
from tff_partial.training.client_store import client_store

OWN, LARGEST = 'own sizes', 'padded to the largest'
_USERS, _ITEMS = 'users/embeddings', 'items/embeddings'
_WIDTH = 108


def build(batch_size: int) -> Any:
  """Build a process whose clients keep tables of their users and items.

  Args:
    batch_size: Answers in a step.
  """

  def keras_model() -> tf.keras.Model:
    layers = tf.keras.layers
    user = tf.keras.Input([], dtype=tf.int32, name='user')
    item = tf.keras.Input([], dtype=tf.int32, name='item')
    users = layers.Embedding(30, _WIDTH, name='users')(user)
    items = layers.Embedding(300, _WIDTH, name='items')(item)
    score = layers.Dense(1, name='score')(layers.Multiply()([users, items]))
    return tf.keras.Model({'user': user, 'item': item}, score)

  model = tff_partial.from_keras(
    keras_model,
    loss='mse',
    local=['users', 'items'],
    client_sized=['users', 'items'],
  )
  return furl.build_furl(
    model,
    training=tff_partial.Phase(
      optimizer=tff.learning.optimizers.build_adam(0.001), batch_size=batch_size
    ),
  )


def invent(number: int, largest: int) -> dict[str, Any]:
  """Invent the answers of some schools.

  Args:
    number: Number of schools.
    largest: Items of the largest; the smallest has a five-hundredth of them.
  """
  draw = np.random.default_rng(0)
  schools = {}
  for place, share in enumerate(np.geomspace(1 / 500, 1, number) ** 1.3):
    num_items = max(int(largest * share), 2)
    num_users, num_answers = 30, 3 * num_items
    answers = {
      'user': draw.integers(0, num_users, num_answers),
      'item': draw.integers(0, num_items, num_answers),
    }
    answers['item'][0] = num_items - 1
    answers['user'][0] = num_users - 1
    schools[f'school {place}'] = {
      'x': answers,
      'y': draw.normal(size=[num_answers, 1]),
    }
  return schools


def main() -> None:
  """Read the arguments and run the benchmark."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--repetitions', type=int, default=5, help='turns of each that count')
  add('--warm_up', type=int, default=1, help='turns of each before')
  add('--clients', type=int, default=60, help='schools, all in every round')
  add('--largest', type=int, default=10_836, help='items of the largest school')
  add('--batch_size', type=int, default=128, help='answers in a step')
  options = parser.parse_args()

  measuring.begin('Tables of schools, one round, by how many rows they have')
  process = build(options.batch_size)
  schools = invent(options.clients, options.largest)
  sizes = {
    school: {_USERS: 30, _ITEMS: int(held['x']['item'].max()) + 1}
    for school, held in schools.items()
  }
  needed = sum(sum(rows.values()) for rows in sizes.values())
  measuring.say(
    f'{len(sizes)} schools need {needed:,} rows of {_WIDTH} numbers: '
    f'{measuring.in_mib(4 * _WIDTH * needed)}.'
  )
  populations = {
    OWN: tff_partial.pack(schools, process.example_spec),
    LARGEST: tff_partial.pack(
      schools,
      process.example_spec,
      num_rows={
        school: {_USERS: 30, _ITEMS: options.largest} for school in schools
      },
    ),
  }
  with runtimes.cohort(jit=False) as context:
    stores = {
      name: client_store.ClientStore(process.initialize_client)
      for name in populations
    }
    runs = {
      name: measuring.Run(
        process, clients, options.clients, context, store=stores[name]
      )
      for name, clients in populations.items()
    }
    seconds = measuring.take_turns(
      {name: measuring.timed(run.step) for name, run in runs.items()},
      repetitions=options.repetitions,
      warm_up=options.warm_up,
    )
    for name, turns in seconds.items():
      measuring.say(f'{name}: {measuring.in_seconds(statistics.median(turns))}')
    measuring.ratio(seconds, LARGEST, OWN)
    for name, run in runs.items():
      before = measuring.tree_memory()
      measuring.forget_peak()
      run.step()
      peak = measuring.peak_memory() - before
      kept = 0
      for school in schools:
        state: Mapping[str, np.ndarray] = stores[name].client(school) or {}
        kept += sum(leaf.nbytes for leaf in state.values())
      measuring.say(
        f'{name}: clients keep {measuring.in_mib(kept)}; a round takes at most '
        f'{measuring.in_mib(peak)} more than what is held between rounds.'
      )


if __name__ == '__main__':
  main()
