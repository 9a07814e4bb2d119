"""Runs the blocks of Python that the documentation shows."""

import pathlib
import re
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

import tff_partial
from tff_partial import client_state
from tff_partial import splits
from tff_partial import tiers

ROOT = pathlib.Path(__file__).parents[1]


def _run(name: str, known: dict[str, Any]) -> dict[str, Any]:
  """Runs all blocks of a page in turn, and returns what they define."""
  text = (ROOT / name).read_text(encoding='utf-8')
  for block in re.finditer(r'^```python\n(.*?)^```', text, re.M | re.S):
    # Errors name the page and its line.
    line = text[: block.start(1)].count('\n')
    code = compile('\n' * line + block[1], name, 'exec')
    exec(code, known)
  return known


def test_the_study_compares_methods_and_counts_epsilon():
  known = _run('docs/study.md', {})
  table = known['table']
  assert list(table.index) == ['FedRecon', 'FURL', 'FedAvg, fine-tuned']
  # Who always predicts the mean of all ratings is off by their deviation.
  deviation = known['frame']['test']['rating'].std()
  assert (table['rmse'] < 0.5 * deviation).all()
  assert table['rmse'].idxmin() == 'FedRecon'
  assert known['tested']['rmse'] < 0.6 * deviation
  assert known['plan'].epsilon <= 16.0
  assert known['trained'].client_store is not None
  assert known['state'].client_work['round'] == 10
  assert 0.0 < known['measured']['rmse'] < 2.0 * deviation


def test_the_page_on_privacy_plans_what_it_says():
  known = _run('docs/privacy.md', {})
  assert 7.9 < known['plan'].epsilon <= 8.0
  assert 0.0 < known['ledger'].epsilon(50) < known['plan'].epsilon
  assert known['aggregator'].mechanism == known['plan'].mechanism


def _build_keras_model() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  height = tf.keras.layers.Embedding(4, 1)(item)
  own = tff_partial.layers.PrivateVector(1, name='user_embedding')(height)
  return tf.keras.Model(item, tf.keras.layers.Add()([height, own]))


def test_the_five_lines_of_the_readme_plug_a_model_in():
  ratings = 3.0 + np.arange(120 * 4) % 4
  frame = pd.DataFrame(
    {
      'user': np.repeat(np.arange(120), 4),
      'item': np.tile(np.arange(4), 120),
      'rating': ratings,
    }
  )
  support, query = splits.halves()
  known = _run(
    'README.md',
    {
      'tf': tf,
      'build_keras_model': _build_keras_model,
      'frame': frame,
      # Of the block that shows what an algorithm is made of.
      'compose': tff_partial.compose,
      'forget': client_state.forget,
      'Phase': tff_partial.Phase,
      'sgd': tff_partial.sgd,
      'GLOBAL': tiers.GLOBAL,
      'LOCAL': tiers.LOCAL,
      'support': support,
      'query': query,
    },
  )
  result = known['result']
  assert result.rounds == 500 and not result.diverged
  assert result.train['loss'] < 0.1 * np.var(ratings)
