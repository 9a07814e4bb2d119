"""The laws of every algorithm, over models of Keras 3.

There is no Keras 3 beside TensorFlow 2.14, and so nothing here for Python 3.11.
"""

import pytest

from tests.laws import laws_test
from tests.support import planted
from tff_partial.model import models
from tff_partial.templates import implicit_factors
from tff_partial.templates import rating_posteriors

keras = pytest.importorskip('keras', minversion='3')

pytestmark = pytest.mark.slow

# The laws and what they need; below, only the models are others.
_ABOUT_KERAS_2 = {
  'test_every_algorithm_has_a_row',
  'test_a_model_with_groups_is_refused_by_who_has_none',
}
globals().update(
  {
    name: law
    for name, law in vars(laws_test).items()
    if name.startswith(('fixture_', 'test_')) and name not in _ABOUT_KERAS_2
  }
)


class _Own(keras.layers.Layer):
  """A vector of the client's own, once for each example."""

  def build(self, shape) -> None:
    self.own = self.add_weight(
      shape=[planted.LOCAL_SIZE], initializer='random_normal', name='own'
    )

  def call(self, batch):
    return keras.ops.repeat(self.own[None], keras.ops.shape(batch)[0], axis=0)

  def compute_output_shape(self, shape):
    return (shape[0], planted.LOCAL_SIZE)


def _items(item):
  vectors = keras.layers.Embedding(
    planted.NUM_ITEMS, planted.NUM_FACTORS, name='items'
  )
  return keras.layers.Dropout(0.1)(vectors(item))


def _build_tastes() -> keras.Model:
  """That of `planted.build_tastes`."""
  item = keras.Input([], dtype='int32')
  taste = keras.layers.Dense(planted.LOCAL_SIZE, use_bias=False, name='user')
  return keras.Model(item, keras.ops.sum(taste(_items(item)), -1))


def _build_heads() -> keras.Model:
  """That of `planted.build_heads`."""
  item = keras.Input([], dtype='int32')
  own = keras.ops.pad(_Own(name='user')(item), [[0, 0], [0, 3]])
  taste = keras.ops.reshape(own, [-1, 4, planted.NUM_FACTORS])
  joined = _items(item) * (1.0 + keras.ops.sum(taste, 1))
  outputs = {
    name: keras.layers.Dense(1, name=name)(joined)[:, 0]
    for name in ('head', 'global_head')
  }
  return keras.Model(item, outputs)


@pytest.fixture(scope='module', name='model_of')
def fixture_model_of() -> dict[str, models.PartialModel]:
  return {
    # The library's own models, which are of Keras 2.
    'posterior': rating_posteriors.build_model(planted.NUM_ITEMS, 3),
    'implicit': implicit_factors.build_model(planted.NUM_ITEMS, 3),
    'partly local': planted.factorization(_build_tastes),
    'global': planted.factorization(_build_tastes, local=None),
    'clustered': planted.factorization(
      _build_tastes, local=None, group='user', num_groups=6
    ),
    'grouped': planted.heads(_build_heads),
  }
