"""Tests of the document model: its layers against Keras's, and its forms."""

import numpy as np
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.subreddit import layers
from tasks.subreddit import models as subreddit_models
from tasks.task import NOBODY
from tasks.task import OWN
from tasks.task import TABLE
import tff_partial

_CHARS = 12


def _sizes(**sizes) -> subreddit_models.DocumentSizes:
  small = {'char_embedding': 3, 'lstm_units': 4, 'user_embedding': 7}
  return subreddit_models.DocumentSizes(**{**small, 'mlp_units': (5,), **sizes})


def _build(user=OWN, num_outputs=6, vocabulary_size=20, num_users=9, **sizes):
  return subreddit_models.build_document_model(
    *(vocabulary_size, _CHARS, num_outputs, _sizes(**sizes)),
    user=user,
    num_users=num_users,
  )


def _texts(number: int = 8) -> np.ndarray:
  return np.random.default_rng(0).integers(0, 20, (number, _CHARS))


def _from_keras(user, **sizes):
  return tff_partial.from_keras(
    lambda: _build(user, **sizes),
    local=subreddit_models.LOCAL_WEIGHTS if user == OWN else None,
    loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
  )


# ---- layers ------------------------------------------------------------------


@pytest.mark.parametrize('go_backwards', [False, True])
def test_the_fused_lstm_computes_what_keras_computes(go_backwards):
  generator = np.random.default_rng(0)
  inputs = generator.normal(size=(5, 11, 3)).astype(np.float32)
  options = {'return_sequences': True, 'go_backwards': go_backwards}
  keras = tf.keras.layers.LSTM(4, **options)
  keras.build(inputs.shape)
  values = [generator.normal(size=w.shape) * 0.5 for w in keras.get_weights()]
  keras.set_weights(values)
  ours = layers.FusedLSTM(4, go_backwards)
  ours.build(inputs.shape)

  # Keras has input, forget, cell, output, and no bias that is always there.
  def in_our_order(w):
    gates = np.split(np.asarray(w), 4, -1)
    return np.concatenate([gates[gate] for gate in (0, 2, 1, 3)], -1)

  ordered = [in_our_order(w) for w in values]
  ordered[2][8:12] -= 1.0
  ours.set_weights(ordered)

  def run(layer, backwards):
    x = tf.constant(inputs)
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = layer(x)
      y = y[:, ::-1] if backwards else y
      loss = tf.reduce_sum(tf.sin(y))
    return y, tape.gradient(loss, [x, *layer.trainable_variables])

  # Keras's layer leaves what it says in the order in which it read.
  y, gradients = run(keras, go_backwards)
  our_y, our_gradients = run(ours, False)
  np.testing.assert_allclose(our_y, y, atol=1e-5)
  np.testing.assert_allclose(our_gradients[0], gradients[0], atol=1e-5)
  expected = map(in_our_order, gradients[1:])
  for found, gradient in zip(our_gradients[1:], expected, strict=True):
    np.testing.assert_allclose(found, gradient, atol=1e-4)


def test_ngrams_tell_characters_by_those_before_them():
  layer = layers.NGrams(3, 1000)
  numbers = layer(tf.constant([[5, 6, 7, 5, 6, 7, 0], [9, 6, 7, 0, 0, 0, 0]]))
  first, second = numbers.numpy().tolist()
  assert first[2] == first[5]  # 5 6 7 again.
  assert first[2] != second[2]  # 9 6 7.
  assert len(set(first[:5])) == 5
  assert first[6] == 0 and set(second[3:]) == {0}
  assert min(first[:6]) >= 1 and max(first) < 1000


def test_the_mean_of_places_leaves_out_padding():
  vectors = tf.constant([[[1.0, 8.0], [3.0, 0.0], [9.0, 9.0]]] * 2)
  text = tf.constant([[7, 4, 0], [0, 0, 0]], tf.uint8)
  mean = layers.MeanOfPlaces()((vectors, text))
  assert mean.numpy().tolist() == [[2.0, 4.0], [0.0, 0.0]]


def test_users_are_unknown_in_training_alone():
  layer = layers.SometimesUnknown(0.25)
  vectors = tf.random.stateless_uniform([400, 3], [1, 2], minval=1.0)
  np.testing.assert_array_equal(layer(vectors), vectors)
  left = layer(vectors, training=True).numpy()
  is_unknown = (left == 0).all(axis=1)
  assert 60 < is_unknown.sum() < 140
  # The others are as they were, not enlarged as dropout would.
  np.testing.assert_array_equal(left[~is_unknown], vectors[~is_unknown])
  again = layers.SometimesUnknown.from_config(layer.get_config())
  assert again.drop.rate == 0.25


def test_a_vector_drifts_between_control_points():
  layer = layers.Drift(4)
  vectors = tf.constant([[5.0, 5.0, 0.0, 10.0, 2.0, 20.0, 8.0, 0.0]] * 5)
  times = tf.constant([0.0, 0.25, 0.5, 0.6, 1.0])
  expected = [[5, 15], [6, 20], [7, 25], [8.2, 21], [13, 5]]
  np.testing.assert_allclose(layer((vectors, times)), expected, rtol=1e-6)
  again = layers.Drift.from_config(layer.get_config())
  assert again.num_vectors == 4


# ---- the model ---------------------------------------------------------------


@pytest.mark.parametrize('user', [OWN, TABLE, NOBODY])
def test_a_model_makes_a_logit_for_each_class(user):
  inputs = _texts()
  if user == TABLE:
    inputs = {'text': inputs, 'user': np.arange(8)}
  assert _build(user)(inputs).shape == (8, 6)


def test_one_logit_has_no_axis():
  assert _build(num_outputs=None)(_texts()).shape == (8,)


def test_a_row_of_the_table_is_a_vector_of_ones_own():
  own, table = _build(OWN), _build(TABLE)
  values = {v.name: v.numpy() for v in table.variables}
  rows = values.pop('user_embedding/embeddings:0')
  assert rows.shape == (9, 7)
  for variable in own.variables:
    variable.assign(values.get(variable.name, rows[3] * 10))
  for variable in table.variables:
    if variable.name.startswith('user_embedding'):
      variable.assign(rows * 10)
  by_table = table({'text': _texts(), 'user': np.full(8, 3)})
  np.testing.assert_allclose(own(_texts()), by_table, rtol=1e-5)
  other = table({'text': _texts(), 'user': np.full(8, 4)})
  assert np.abs(other - by_table).max() > 1e-3


@pytest.mark.parametrize('user', [OWN, TABLE])
def test_users_who_drift_have_a_vector_for_each_control_point(user):
  tf.keras.utils.set_random_seed(0)  # For other vectors the last need not hold.
  model = _build(user, control_points=3)
  shapes = {v.name: v.shape.as_list() for v in model.variables}
  rows = {OWN: [4 * 7], TABLE: [9, 4 * 7]}[user]
  (name,) = [name for name in shapes if name.startswith('user_embedding')]
  assert shapes[name] == rows
  inputs = {'text': np.repeat(_texts()[:1], 3, axis=0)}
  inputs['when'] = np.array([0.0, 0.1, 1.0], np.float32)
  if user == TABLE:
    inputs['user'] = np.full(3, 2)
  first, second, last = model(inputs).numpy()
  assert 0 < np.abs(second - first).max() < np.abs(last - first).max()


def test_all_options_together():
  shares = {'place_dropout': 0.2, 'dropout': 0.5, 'unknown_users': 0.5}
  ngrams = {'ngram_lengths': (2, 4), 'ngram_buckets': 50}
  model = _build(
    places_per_step=3, mlp_units=(5, 4), mean_of_places=True, **ngrams, **shares
  )
  names = {layer.name for layer in model.layers}
  assert {'ngram_embedding_2', 'ngram_embedding_4', 'mlp_1'} <= names
  assert model.get_layer('steps').output_shape == (None, 4, 9)
  # Two directions by maximum and by mean, and what was embedded of places.
  said = model.get_layer('text_representation').output_shape
  assert said == (None, 2 * 8 + 9)
  assert model(_texts()).shape == (8, 6)


@pytest.mark.slow
def test_dropped_places_follow_from_the_seed():
  model = _from_keras(NOBODY, place_dropout=0.5, dropout=0.5)
  weights = {'global': model.initial_weights('global', np.array([1, 2]))}
  texts = _texts().astype(np.uint8)

  def predict(training: bool, *seed: int) -> np.ndarray:
    logits, _ = model.predict(
      weights, model.frozen_weights(), texts, training=training, seed=seed
    )
    return logits.numpy()

  np.testing.assert_array_equal(predict(True, 3, 4), predict(True, 3, 4))
  assert np.abs(predict(True, 3, 4) - predict(True, 3, 5)).max() > 1e-4
  np.testing.assert_array_equal(predict(False, 3, 4), predict(False, 3, 5))


@pytest.mark.slow
def test_what_is_local_is_one_vector():
  model = _from_keras(OWN)
  assert {n: s.shape for n, s in model.specs('local').items()} == {
    'user_embedding/own': (7,)
  }
  assert all(7 not in s.shape for s in model.specs('global').values())
  assert _from_keras(NOBODY).tiers == ('global',)
  with_default = _from_keras(OWN, learned_default=True)
  assert list(with_default.specs('local')) == ['user_embedding/own']
  assert 'user_embedding/default' in with_default.specs('global')


@pytest.mark.slow
def test_texts_are_small_in_memory():
  assert _from_keras(NOBODY).example_spec['x'].dtype == tf.uint8
  assert subreddit_models.text_type(257) == tf.int32


@pytest.mark.parametrize(
  ('name', 'value'),
  [('control_points', 1), ('mlp_units', (5, 0)), ('ngram_lengths', (0,))]
  + [('dropout', -0.1), ('unknown_users', 1.0), ('ngram_buckets', 9)],
)
def test_sizes_that_make_no_sense_are_refused(name, value):
  with pytest.raises(OptionError, match=name):
    subreddit_models.DocumentSizes(**{name: value})


def test_a_text_is_a_whole_number_of_steps():
  with pytest.raises(OptionError, match='places_per_step=5: texts of 12'):
    _build(places_per_step=5)
