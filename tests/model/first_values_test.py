"""First values of local weights that all clients learn together."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import tiers
from tff_partial.model import models
from tff_partial.phases import sgd

_VECTOR = 'user/vector'
_FIRST = f'first_values/{_VECTOR}'
_RATE = 0.2
pytestmark = pytest.mark.usefixtures('in_cohorts')


def _model() -> models.PartialModel:
  """An item's vector times the user's, which begins with one value."""
  return planted.factorization(planted.constant_user(0.5))


@pytest.fixture(scope='module', name='model')
def fixture_model() -> models.PartialModel:
  return tff_partial.learn_first_values(_model())


def _first_weights(model: models.PartialModel, tier: str) -> dict[str, Any]:
  named = model.initial_weights(tier, [0, 1])
  return {name: tensor.numpy() for name, tensor in named.items()}


def test_each_local_variable_has_a_global_one_beside_it(model):
  shape = [planted.NUM_FACTORS]
  assert dict(model.specs(tiers.LOCAL)) == {
    _VECTOR: tf.TensorSpec(shape, tf.float32)
  }
  assert model.specs(tiers.GLOBAL)[_FIRST] == tf.TensorSpec(shape, tf.float32)
  # It begins as the local one did, which begins with zeros.
  assert (_first_weights(model, tiers.GLOBAL)[_FIRST] == 0.5).all()
  assert not _first_weights(model, tiers.LOCAL)[_VECTOR].any()
  # Fields mean what they meant.
  assert model.example_spec == _model().example_spec
  assert model.example_spec.ids == _model().example_spec.ids


def test_first_values_are_drawn_or_those_that_were_given():
  drawn = _first_weights(
    tff_partial.learn_first_values(planted.factorization(planted.build_tastes)),
    tiers.GLOBAL,
  )['first_values/user/kernel']
  assert np.unique(drawn).size == drawn.size
  trained = planted.constant_user(0.25)()
  model = tff_partial.learn_first_values(
    tff_partial.from_keras(
      planted.constant_user(0.5),
      local='user',
      loss='mse',
      initial_weights=trained,
    )
  )
  assert (_first_weights(model, tiers.GLOBAL)[_FIRST] == 0.25).all()
  assert not _first_weights(model, tiers.LOCAL)[_VECTOR].any()


@pytest.fixture(scope='module', name='clients')
def fixture_clients() -> dict[str, planted.Fields]:
  return planted.rate({'a': 8, 'b': 12, 'c': 5})


def _round(model: models.PartialModel, clients: Any, steps: int = 1) -> Any:
  """A round of FedRecon; returns the weights of all before and after."""
  process = algorithms.build_fed_recon(
    model,
    reconstruct=tff_partial.Phase(optimizer=sgd(_RATE), batch_size=4),
    update=tff_partial.Phase(optimizer=sgd(0.1), batch_size=4, max_steps=steps),
  )
  return planted.before_and_after(process, clients, 1)


@pytest.mark.slow
def test_reconstruction_takes_the_steps_from_them(model, clients):
  # After one step of the update first values are other ones.
  _, plain = _round(_model(), clients)
  _, learned = _round(model, clients)
  planted.assert_close(learned['items/embeddings'], plain['items/embeddings'])


@pytest.mark.slow
def test_nothing_of_what_clients_rebuild_is_sent(model, clients):
  # They rebuild, and train nothing that is sent.
  before, after = _round(model, clients, steps=0)
  planted.assert_same(before, after)


@pytest.mark.slow
def test_they_learn_by_the_gradient_at_rebuilt_weights(model):
  # One example to rebuild the vector with, one to train: by hand.
  clients = {
    'a': {
      'x': np.array([3, 7], np.int32),
      'y': np.array([1.0, -2.0], np.float32),
    }
  }
  before, after = _round(model, clients)
  items, user = before['items/embeddings'], before[_FIRST]
  old, new = items[3], items[7]
  rebuilt = user - _RATE * 2 * (old @ user - 1.0) * old
  expected = user - 0.1 * 2 * (new @ rebuilt + 2.0) * new
  np.testing.assert_allclose(after[_FIRST], expected, rtol=1e-5)


def test_a_keras_model_has_the_sum(model):
  weights = _first_weights(model, tiers.GLOBAL)
  own = {_VECTOR: np.full([planted.NUM_FACTORS], 2.0, np.float32)}
  keras_model = model.to_keras(weights, own)
  np.testing.assert_allclose(keras_model.get_layer('user').vector.numpy(), 2.5)
  item = tf.constant([4])
  predicted, _ = model.predict(
    {
      tiers.GLOBAL: collections.OrderedDict(weights),
      tiers.LOCAL: collections.OrderedDict(own),
    },
    {},
    item,
    training=False,
    seed=[0, 1],
  )
  np.testing.assert_allclose(keras_model(item), predicted, rtol=1e-6)
  with pytest.raises(models.ModelError, match=r"'user/vector' has shape \(4,"):
    model.to_keras(weights, {_VECTOR: np.zeros([1], np.float32)})


def test_a_model_without_local_variables_is_refused():
  with pytest.raises(models.ModelError, match='has no local variables whose'):
    tff_partial.learn_first_values(
      planted.factorization(planted.build_tastes, local=None)
    )


def test_tables_of_a_clients_own_size_are_refused():
  def build() -> tf.keras.Model:
    users = tf.keras.Input([], dtype=tf.int32)
    vectors = tf.keras.layers.Embedding(5, 2, name='users')(users)
    return tf.keras.Model(users, tf.keras.layers.Dense(1)(vectors))

  model = tff_partial.from_keras(
    build, local='users', client_sized='users', loss='mse'
  )
  with pytest.raises(
    models.ModelError, match="'users/embeddings'.*each client"
  ):
    tff_partial.learn_first_values(model)
