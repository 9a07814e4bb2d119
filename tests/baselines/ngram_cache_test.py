"""A cache of the user's own n-grams, mixed into a model of the next token.

The model of most tests is a table: the logits of what comes next, by the last
token. If it is zero, each of five tokens has the probability 1/5.
"""

import collections
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import baselines
from tasks.experiment.methods import algorithms as experiment_algorithms
from tests.support import planted
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

_TOKENS, _LENGTH = 5, 4
# Padding behind the end of a sentence, where no token is right.
_NONE = -1


def _build(length: int = _LENGTH) -> tf.keras.Model:
  tokens = tf.keras.Input([length], dtype=tf.int32)
  table = tf.keras.layers.Embedding(_TOKENS, _TOKENS, name='table')
  return tf.keras.Model(tokens, table(tokens))


def _loss(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
  losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.maximum(labels, 0), logits
  )
  losses._keras_mask = labels >= 0
  return losses


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return keras_models.from_keras(
    _build, loss=_loss, labels=tf.TensorSpec([_LENGTH], tf.int32)
  )


def _table(values: np.ndarray) -> Any:
  return planted.as_model_weights(
    {'table/embeddings': values.astype(np.float32)}
  )


def _sentences(*rows: list[int]) -> planted.Fields:
  """Sentences of up to five tokens, each of which but the first is a label."""
  full = np.array([row + [_NONE] * (_LENGTH + 1 - len(row)) for row in rows])
  return {
    'x': np.maximum(full[:, :-1], 0).astype(np.int32),
    'y': full[:, 1:].astype(np.int32),
  }


# ---- a NumPy loop ------------------------------------------------------------


def _by_hand(
  table: np.ndarray,
  fields: planted.Fields,
  num_tokens: int,
  mixing: float,
  smoothing: float,
) -> list[float]:
  """The losses of a client's targets, by counts in dictionaries."""
  x, y = fields['x'].tolist(), fields['y'].tolist()
  half = max(min(round(len(y) / 2), len(y) - 1), 1)
  counts: dict[tuple[int, ...], collections.Counter[int]] = (
    collections.defaultdict(collections.Counter)
  )
  for row in range(half):
    for place, label in enumerate(y[row]):
      for number in range(1, num_tokens + 1):
        if label != _NONE and number <= place + 1:
          before = tuple(x[row][place + 1 - number : place + 1])
          counts[before][label] += 1
  losses = []
  for row in range(half, len(y)):
    for place, label in enumerate(y[row]):
      if label == _NONE:
        continue
      exponentials = np.exp(table[x[row][place]])
      p = exponentials[label] / exponentials.sum()
      for number in range(min(num_tokens, place + 1), 0, -1):
        before = tuple(x[row][place + 1 - number : place + 1])
        if before in counts:
          total = counts[before].total()
          share = mixing * total / (total + smoothing)
          p = share * counts[before][label] / total + (1 - share) * p
          break
      losses.append(-math.log(p))
  return losses


@pytest.fixture(scope='module', name='clients')
def fixture_clients() -> dict[str, planted.Fields]:
  random = np.random.default_rng(4)
  return {
    name: _sentences(
      *(
        random.integers(0, _TOKENS, random.integers(2, _LENGTH + 2)).tolist()
        for _ in range(size)
      )
    )
    for name, size in {'ann': 9, 'bob': 1, 'cid': 30, 'dot': 2}.items()
  }


@pytest.mark.slow
@pytest.mark.parametrize('num_tokens', [1, 3])
def test_all_runtimes_give_the_numbers_of_a_loop(model, clients, num_tokens):
  table = np.random.default_rng(5).normal(size=[_TOKENS, _TOKENS])
  measuring = baselines.build_ngram_cache_eval(
    model,
    num_tokens=num_tokens,
    mixing=0.7,
    smoothing=0.5,
    measure_batch_size=4,
  )
  losses = [
    _by_hand(table, fields, num_tokens, 0.7, 0.5) for fields in clients.values()
  ]
  for runtime in planted.RUNTIMES.values():
    found = planted.evaluate(
      measuring, _table(table), clients, runtime, capacities=[40]
    )
    assert found.metrics['loss'] == pytest.approx(
      np.mean(sum(losses, [])), abs=1e-6
    )
    for own, expected in zip(found.per_client, losses, strict=True):
      mean = np.mean(expected) if expected else 0.0
      assert own['loss'] == pytest.approx(mean, abs=1e-6)


@pytest.mark.slow
def test_a_model_is_tuned_before_it_is_mixed(model):
  """Ann wrote 0 1 twice, and a table of zeros takes one step with rate 1.

  After 0 the model said 1/5 of each token, so that row 0 moves by -1/5, and by
  +4/5 for the 1 that followed. The cache saw it twice: n = 2.
  """
  tune = Phase(optimizer=sgd(1.0), batch_size=None)
  found = planted.evaluate(
    baselines.build_ngram_cache_eval(model, mixing=0.6, tune=tune),
    _table(np.zeros([_TOKENS, _TOKENS])),
    {'ann': _sentences(*[[0, 1]] * 4)},
  )
  exponentials = np.exp([-0.2, 0.8, -0.2, -0.2, -0.2])
  share = 0.6 * 2 / 3
  right = share + (1 - share) * exponentials[1] / exponentials.sum()
  assert found.metrics['loss'] == pytest.approx(-math.log(right), abs=1e-6)


# ---- models of next words ----------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'trained_as'),
  [
    ('knn_per', 'fed_avg'),
    ('ngram_cache', 'fed_avg'),
    ('fed_recon_knn_per', 'fed_recon'),
    ('fed_recon_cache', 'fed_recon'),
  ],
)
def test_what_others_train_can_be_measured_with_a_memory(name, trained_as):
  rows = experiment_algorithms.ALGORITHMS
  assert rows[name].build is rows[trained_as].build
  assert rows[name].user == rows[trained_as].user
  assert rows[name].measure is not rows[trained_as].measure


# ---- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'mixing': 1.0}, 'mixing=1.0: .* from 0 to less than 1'),
    ({'num_tokens': 0}, 'num_tokens=0: a cache compares at least 1'),
    ({'smoothing': -1.0}, 'smoothing=-1.0: give a finite number of 0 or more'),
    ({'smoothing': math.inf}, 'smoothing=inf: give a finite number'),
    ({'logits': 'scores'}, "logits='scores': the model has no such output"),
  ],
)
def test_what_makes_no_sense_is_refused(options, message, model):
  with pytest.raises(SettingError, match=message):
    baselines.build_ngram_cache_eval(model, **options)


def test_models_that_read_no_tokens_are_refused():
  model = planted.factorization(local=None)
  with pytest.raises(SettingError, match='which is no sequence of tokens'):
    baselines.build_ngram_cache_eval(model)


def test_models_that_predict_no_token_for_each_are_refused():
  def build() -> tf.keras.Model:
    given = _build()
    return tf.keras.Model(given.input, tf.reduce_sum(given.output, 1))

  model = keras_models.from_keras(
    build, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  )
  with pytest.raises(
    SettingError,
    match=r'predictions \[1\] for one example, but keys are \[1, 4\]',
  ):
    baselines.build_ngram_cache_eval(model)
