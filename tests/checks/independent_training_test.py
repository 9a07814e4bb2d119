"""What breaks independent local training (FURL, Eq. 1) is found."""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.checks import independent_training
from tff_partial.checks import split_personalization

layers = tf.keras.layers
_NUM_USERS = 5


def _central(
  around: Callable[[Any], Any] = lambda vector: vector, **options: Any
) -> tf.keras.Model:
  """Matrix factorization over the table of all users."""
  item = layers.Input([], dtype=tf.int32, name='item')
  user = layers.Input([], dtype=tf.int32, name='user')
  items = layers.Embedding(7, 3, name='items')(item)
  vector = layers.Embedding(_NUM_USERS, 3, name='users', **options)(user)
  rating = layers.Dot(1, name='rating')([items, around(vector)])
  return tf.keras.Model({'item': item, 'user': user}, rating)


def _ratings() -> dict[str, Any]:
  """Two ratings of each of the users 0, 2 and 3."""
  return {
    'x': {
      'item': np.array([0, 1, 2, 3, 4, 5], np.int32),
      'user': np.array([0, 0, 2, 2, 3, 3], np.int32),
    },
    'y': np.arange(6, dtype=np.float32)[:, None],
  }


def _check(
  build: Callable[[], tf.keras.Model], **options: Any
) -> split_personalization.Report:
  return independent_training.check_independent_training(
    build,
    **{
      'examples': _ratings(),
      'loss': tf.keras.losses.MeanSquaredError(),
      'private': 'users/.*',
      'user': 'user',
      **options,
    },
  )


@tf.keras.saving.register_keras_serializable(package='tests')
class _Norm(layers.Layer):
  """Adds the norm of each vector that comes along to the loss."""

  def call(self, vectors: tf.Tensor) -> tf.Tensor:
    self.add_loss(tf.reduce_sum(tf.norm(vectors, axis=1)))
    return vectors


@pytest.mark.parametrize(
  'build',
  [
    _central,
    functools.partial(_central, _Norm()),
    functools.partial(_central, activity_regularizer='l2'),
    functools.partial(_central, layers.Dropout(0.5)),
  ],
  ids=['plain', 'norm of a row', 'activity', 'dropout'],
)
def test_what_concerns_one_user_is_allowed(build):
  report = _check(build)
  assert report.holds
  assert str(report) == 'Eq. 1 holds.'


def test_a_norm_of_the_whole_table_is_not_allowed():
  norm = tf.keras.regularizers.L2(0.5)
  report = _check(functools.partial(_central, embeddings_regularizer=norm))
  assert not report.holds
  (violation,) = report.violations
  assert violation.equation == 1
  assert violation.variable == 'users/embeddings'
  # The gradient of 0.5 * x^2 is x: standard normal draws, 15 of them, twice.
  assert 1 < violation.size < 5
  assert str(report).startswith('Eq. 1 does not hold, by ')
  assert 'a row of user' in str(report)
  assert 'that a loss that a layer adds of user' in str(report)


def test_a_prediction_that_looks_at_other_users_is_not_allowed():
  class Neighbour(layers.Layer):
    """A user's vector beside the next one's."""

    def build(self, shape):
      self.table = self.add_weight('table', [_NUM_USERS, 3])

    def call(self, user):
      neighbour = tf.gather(self.table, (user + 1) % _NUM_USERS)
      return tf.gather(self.table, user) + 0.1 * neighbour

  def build() -> tf.keras.Model:
    user = layers.Input([], dtype=tf.int32)
    vector = Neighbour(name='users')(user)
    return tf.keras.Model(user, layers.Dense(1)(vector))

  ratings = {**_ratings(), 'x': _ratings()['x']['user']}
  report = _check(build, examples=ratings, user=None)
  (violation,) = report.violations
  assert violation.variable == 'users/table'
  assert 'that the loss of user' in str(violation)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'private': 'people/.*'},
      "'people/.*' names none of .*'users/embeddings'",
    ),
    ({'user': None}, 'the examples have several inputs. Name the one'),
    (
      {'user': 'author'},
      r"no input 'author'; the inputs are \['item', 'user'\]",
    ),
    (
      {'examples': {**_ratings(), 'x': {**_ratings()['x'], 'user': [5] * 6}}},
      'has no row for each of the users 5 to 5',
    ),
  ],
)
def test_what_cannot_be_checked_is_refused(options, message):
  with pytest.raises(split_personalization.CheckError, match=message):
    _check(_central, **options)


def test_a_table_that_nobody_reads_is_refused():
  said = r"depends on the private variables \['users/embeddings'\]"
  with pytest.raises(split_personalization.CheckError, match=said):
    _check(functools.partial(_central, tf.zeros_like))
