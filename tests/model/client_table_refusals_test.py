"""Which tables cannot have as many rows as a client needs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial.model import models

_BUILT_ROWS, _WIDTH = 4, 3
_ITEMS = 'items/embeddings'


def _one_table(
  look_up: Callable[[Any, tf.Tensor], tf.Tensor] = lambda table, ids: table(
    ids
  ),
  **options: Any,
) -> Callable[[], tf.keras.Model]:
  def build() -> tf.keras.Model:
    ids = tf.keras.Input([], dtype=tf.int32)
    table = tf.keras.layers.Embedding(
      _BUILT_ROWS, _WIDTH, name='items', **options
    )
    join = tf.keras.layers.Dense(1, name='join')
    return tf.keras.Model(ids, join(look_up(table, ids)))

  return build


def _attend(table: Any, ids: tf.Tensor) -> tf.Tensor:
  scores = tf.matmul(table(ids), table.embeddings, transpose_b=True)
  return tf.matmul(tf.nn.softmax(scores), table.embeddings)


_UNKNOWN = f"how many rows of '{_ITEMS}' a client needs does not follow"


_ALL_ROWS = f"rows of '{_ITEMS}' a client needs .* and be read in no other way"


_UNALIKE = f"'{_ITEMS}:0' begins with other values in each row"


@pytest.mark.parametrize(
  ('build', 'options', 'message'),
  [
    (
      _one_table(),
      {'local': 'join'},
      f"client_sized='items': '{_ITEMS}' is not local.*name it in `local`",
    ),
    (
      _one_table(),
      {'client_sized': 'item'},
      "client_sized='item' matches no variable. The model has the layers",
    ),
    (
      _one_table(),
      {'local': 'join', 'client_sized': 'join/bias'},
      r"'join/bias' of the shape \[1\] is no table",
    ),
    (
      _one_table(),
      {'local': 'join', 'client_sized': 'join/kernel'},
      "how many rows of 'join/kernel' a client needs does not follow",
    ),
    (
      _one_table(weights=[np.ones([_BUILT_ROWS, _WIDTH])]),
      {},
      f"'{_ITEMS}' .* is no table whose rows an initializer makes",
    ),
    # Ids that are computed, and rows that are read beside those of ids.
    (_one_table(lambda table, ids: table(ids % _BUILT_ROWS)), {}, _UNKNOWN),
    (
      _one_table(lambda table, ids: table(ids) + table(tf.constant([2]))),
      {},
      _UNKNOWN,
    ),
    (
      _one_table(
        lambda table, ids: (
          table(ids) + tf.gather(table.embeddings, [0], axis=1)[0]
        )
      ),
      {},
      _UNKNOWN,
    ),
    (_one_table(embeddings_regularizer='l2'), {}, _ALL_ROWS),
    (_one_table(_attend), {}, _ALL_ROWS),
    *(
      (_one_table(embeddings_initializer=initializer), {}, _UNALIKE)
      for initializer in (
        tf.keras.initializers.Constant(np.arange(12.0).reshape(4, 3)),
        # Draws by itself, the same numbers in every client.
        lambda shape, dtype: tf.random.stateless_uniform(
          shape, [1, 2], dtype=dtype
        ),
      )
    ),
    (
      _one_table(embeddings_initializer='orthogonal'),
      {},
      f"the initializer of '{_ITEMS}' makes all rows together",
    ),
  ],
)
def test_what_is_no_table_of_a_client_is_refused(build, options, message):
  given = {'local': 'items', 'client_sized': 'items', **options}
  with pytest.raises(models.ModelError, match=message):
    tff_partial.from_keras(build, loss='mse', **given)
