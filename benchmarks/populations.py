"""Stack Overflow and FEMNIST with their true numbers of clients.

Writes files of the publishers' formats with invented examples: TFF's SQLite
file of 342,477 users, and LEAF's JSON files of 3,400 writers with 226 images
each. Trains some rounds of a recipe on each, in a process of its own, and
reports seconds and peak memory.

Users of Stack Overflow have 397 sentences on average. Here they have as many as
--sentences says, so reading them and a round take less.

  python -m benchmarks.populations
"""

import contextlib
import json
import pathlib
import sqlite3
import tempfile

import numpy as np
import pandas as pd
import tensorflow as tf

from benchmarks import many_sentences
from benchmarks import measuring

USERS, WRITERS, IMAGES, CHARACTERS = 342_477, 3_400, 226, 62
_WRITERS_OF_A_FILE, _DISTINCT = 100, 10_000


def write_stack_overflow(folder: pathlib.Path, users: int, number: int) -> None:
  """Write TFF's SQLite file of users with a number of sentences each."""
  draw = np.random.default_rng(0)
  examples = []
  for place, sentence in enumerate(many_sentences.sentences(_DISTINCT, draw)):
    # Later places are later in time.
    date = f'2010-01-{1 + 28 * place // _DISTINCT:02} 09:34:05.1 UTC'
    features = {
      name: tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[text.encode()])
      )
      for name, text in {'tokens': sentence, 'creation_date': date}.items()
    }
    examples.append(
      tf.train.Example(
        features=tf.train.Features(feature=features)
      ).SerializeToString()
    )
  path = folder / 'stackoverflow' / 'stackoverflow.sqlite'
  path.parent.mkdir()
  with contextlib.closing(sqlite3.connect(path)) as database:
    database.execute(
      'CREATE TABLE examples (split_name TEXT, client_id TEXT, '
      'serialized_example_proto BLOB)'
    )
    database.execute(
      'CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, '
      'num_examples INTEGER)'
    )
    for user in range(users):
      name = f'{user:08}'
      database.execute(
        'INSERT INTO client_metadata VALUES (?, "train", ?)', (name, number)
      )
      database.executemany(
        'INSERT INTO examples VALUES ("train", ?, ?)',
        (
          (name, examples[place])
          for place in draw.integers(_DISTINCT, size=number)
        ),
      )
    database.commit()


def write_femnist(folder: pathlib.Path, writers: int) -> None:
  """Write LEAF's JSON files of writers with 226 images each."""
  draw = np.random.default_rng(0)
  strokes = np.where(draw.random([50, 784]) < 0.2, draw.random([50, 784]), 1.0)
  images = [json.dumps(image.round(6).tolist()) for image in strokes]
  (folder / 'femnist').mkdir()
  for begin in range(0, writers, _WRITERS_OF_A_FILE):
    names = [f'f{k:04}' for k in range(begin, begin + _WRITERS_OF_A_FILE)]
    path = folder / 'femnist' / f'all_data_{begin // _WRITERS_OF_A_FILE}.json'
    with path.open('w') as file:
      file.write(f'{{"users": {json.dumps(names)}, "user_data": {{')
      for place, name in enumerate(names):
        drawn = draw.integers(len(images), size=IMAGES)
        labels = draw.integers(CHARACTERS, size=IMAGES).tolist()
        file.write(
          f'{", " if place else ""}"{name}": {{"x": '
          f'[{", ".join(images[k] for k in drawn)}], "y": {labels}}}'
        )
      file.write('}}')


def measure(folder: pathlib.Path, *flags: str, rounds: int) -> None:
  """Train by a recipe in a new process, and report."""
  output = folder / 'output'
  seconds, _ = measuring.new_process(
    '-m',
    'tasks.train',
    *flags,
    f'--rounds={rounds}',
    f'--evaluate_every={rounds}',
    '--validation_users=100',
    '--test_users=100',
    f'--data_dir={folder}',
    f'--output_dir={output}',
  )
  result = json.loads((output / 'result.json').read_text())
  rows = pd.read_csv(output / 'metrics.csv')
  measuring.say(
    f'{" ".join(flags)}: {measuring.in_seconds(seconds)} in all, of which '
    f'{json.dumps(result["seconds"])}; a round '
    f'{measuring.in_seconds(rows["seconds_round"].iloc[1:].median())}, '
    f'{rows["num_examples"].mean():,.0f} examples; at most '
    f'{result["peak_rss_mb"]:,.0f} MB; clients {result["data"]["clients"]}'
  )


def main() -> None:
  """Read the arguments, write both populations, and train on each."""
  parser = measuring.parser(__doc__)
  add = parser.add_argument
  add('--users', type=int, default=USERS, help='users of Stack Overflow')
  add('--sentences', type=int, default=16, help='sentences of each user')
  add('--writers', type=int, default=WRITERS, help='writers of FEMNIST')
  add('--rounds', type=int, default=5, help='rounds of each run')
  options = parser.parse_args()
  measuring.begin('True numbers of clients')
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    if options.writers:
      write_femnist(folder, options.writers)
      measure(folder, '--recipe=femnist_fed_avg', rounds=options.rounds)
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    if options.users:
      write_stack_overflow(folder, options.users, options.sentences)
      measure(
        folder,
        '--recipe=stackoverflow_fed_recon',
        '--clients_per_round=10',
        rounds=options.rounds,
      )


if __name__ == '__main__':
  main()
