"""Models of the next word: classes, forms, tiers, the loss, training.

The vocabulary of most tests has three words, and two buckets for all others:

  padding 0, words 1 2 3, buckets 4 5, beginning 6, end 7.
"""

from collections.abc import Callable
import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.next_word import models
from tasks.next_word.losses import build_loss
from tasks.next_word.losses import is_target
from tasks.next_word.losses import is_word
from tasks.next_word.models import BUCKET_LAYER
from tasks.next_word.models import LSTM
from tasks.next_word.models import NextWordSizes
from tasks.next_word.models import TRANSFORMER
from tasks.next_word.options import NextWordOptions
from tasks.next_word.tokens import Tokens
import tff_partial
from tff_partial import tiers

_TOKENS = Tokens(words=3, buckets=2)
_LENGTH = 5
# Sentences with their beginning and their end.
_SENTENCES = np.int32(
  [[6, 1, 2, 7, 0, 0], [6, 3, 4, 3, 5, 7]]
  + [[6, 2, 1, 1, 2, 3], [6, 5, 4, 7, 0, 0]]
)
_READ, _LABELS = _SENTENCES[:, :-1], _SENTENCES[:, 1:]


def _build(**sizes: Any) -> tf.keras.Model:
  sizes = {'embedding': 4, 'lstm_units': 6, 'projection': 4, **sizes}
  return models.build_next_word_model(_TOKENS, _LENGTH, NextWordSizes(**sizes))


def _from_keras(build: Callable[[], tf.keras.Model], **options: Any) -> Any:
  return tff_partial.from_keras(
    build,
    loss=build_loss(_TOKENS),
    labels=tf.TensorSpec([_LENGTH], tf.int32),
    **options,
  )


@pytest.fixture(scope='module', name='model')
def fixture_model() -> Any:
  return _from_keras(_build, local=BUCKET_LAYER)


def test_a_transformer_has_no_sizes_of_an_lstm():
  sizes = NextWordSizes(TRANSFORMER, lstm_units=64)
  with pytest.raises(
    OptionError, match='--lstm_units=64: a transformer has no'
  ):
    NextWordOptions(sizes=sizes)


# ---- tokens and classes ------------------------------------------------------


def test_targets():
  labels = tf.range(8)[None]
  assert is_target(_TOKENS, labels).numpy().tolist() == [[False] + [True] * 7]
  assert is_word(_TOKENS, labels).numpy()[0].nonzero()[0].tolist() == [1, 2, 3]


# ---- models ------------------------------------------------------------------


@pytest.mark.parametrize('architecture', [LSTM, TRANSFORMER])
def test_a_model_makes_a_logit_for_each_class(architecture):
  model = _build(architecture=architecture)
  logits = model(_READ)
  assert logits.shape == (4, _LENGTH, 8)
  # What comes later changes nothing that was said before.
  other = _READ.copy()
  other[:, 3] = 2
  change = np.abs(model(other) - logits).max((0, 2))
  assert change[:3].max() < 1e-6 < change[3:].min()


@pytest.mark.parametrize(
  ('words', 'sent'), [(1000, 2_362_055), (10_000, 4_099_055)]
)
def test_the_papers_sizes(words, sent):
  """V words, 500 buckets: (V + 3) 96 are embeddings of words.

  The LSTM has 4 (96 + 670 + 1) 670 weights, the projection (670 + 1) 96, and
  the output (96 + 1) (V + 503).
  """
  sizes = NextWordSizes(embedding=96, lstm_units=670, projection=96)
  model = models.build_next_word_model(Tokens(words, 500), 20, sizes)
  local = model.get_layer(BUCKET_LAYER).count_params()
  assert local == 500 * 96
  assert model.count_params() - local == sent


def test_a_bucket_is_read_by_its_own_vector():
  model = _build()
  before = model(_READ)
  table = model.get_layer(BUCKET_LAYER)
  (rows,) = table.get_weights()
  table.set_weights([rows + [[0.0], [1.0]]])  # The vector of 5.
  change = np.abs(model(_READ) - before).max(2)
  # Only sentences with a 5 change, and these from there on.
  expected = np.logical_or.accumulate(_READ == 5, axis=1)
  np.testing.assert_array_equal(change > 1e-6, expected)


# ---- tiers -------------------------------------------------------------------


def test_vectors_of_buckets_can_be_local(model):
  assert {n: s.shape for n, s in model.specs(tiers.LOCAL).items()} == {
    'bucket_embedding/embeddings': (2, 4)
  }
  # The output of buckets is global, as with the authors.
  assert model.specs(tiers.GLOBAL)['logits/kernel'].shape == (4, 8)
  # A client needs no more of the tables than the rows that it reads.
  assert 'word_embedding/embeddings' in model.only_looked_up


# ---- the loss ----------------------------------------------------------------


def test_the_loss_is_a_cross_entropy_for_each_target():
  scores = np.zeros([1, 3, 8], np.float32)
  scores[0, 0, 2] = math.log(3.0)  # Word 2 has probability 3 / 10.
  labels = tf.constant([[2, 0, 7]])
  losses = build_loss(_TOKENS)(labels, scores)
  expected = [[math.log(10 / 3), 0, math.log(8)]]
  np.testing.assert_allclose(losses, expected, rtol=1e-6)
  assert losses._keras_mask.numpy().tolist() == [[True, False, True]]


def test_the_loss_is_a_mean_over_targets_not_over_sentences():
  def build() -> tf.keras.Model:
    tokens = tf.keras.Input([_LENGTH], dtype=tf.int32)
    scores = tf.keras.layers.Embedding(8, 8)
    return tf.keras.Model(tokens, scores(tokens))

  labels = tf.constant(_LABELS[[0, 1, 3]])
  right = tf.one_hot(labels, 8)
  # The first sentence has three targets, of which nothing is known; all of the
  # second are known for sure; the third one only pads the batch.
  scores = right * tf.constant([0.0, 100.0, 0.0])[:, None, None]
  value = _from_keras(build).loss(
    labels, scores, tf.ones([3]), tf.constant([True, True, False])
  )
  total = 3 * math.log(8)
  assert value.num_elements.numpy() == 8
  assert value.total.numpy() == pytest.approx(total)
  assert value.objective.numpy() == pytest.approx(total / 8)


def test_without_targets_there_is_no_loss():
  labels = tf.constant([[0, 0]])
  scores = tf.ones([1, 2, 8])
  with tf.GradientTape() as tape:
    tape.watch(scores)
    losses = build_loss(_TOKENS)(labels, scores)
  assert not losses.numpy().any()
  assert not tape.gradient(losses, scores).numpy().any()
