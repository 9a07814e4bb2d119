"""A client's own vector, with and without a default that all learn together."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import layers
from tff_partial import processes
from tff_partial import tiers
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import sgd

# A prime number, to be looked for in types.
_UNITS = 13
_DEFAULT, _OWN = 'user/default', 'user/own'

pytestmark = pytest.mark.usefixtures('in_native')


def _build(**options: Any) -> tf.keras.Model:
  """The mean of the user's vector is added to the input."""
  number = tf.keras.Input([])
  vector = layers.PrivateVector(_UNITS, name='user', **options)(number)
  return tf.keras.Model(number, number + tf.reduce_mean(vector, -1))


def _model() -> models.PartialModel:
  return keras_models.from_keras(
    lambda: _build(learned_default=True, regularizer='l2'),
    local=_OWN,
    loss=tf.keras.losses.MeanSquaredError(),
  )


@pytest.fixture(scope='module', name='process')
def fixture_process() -> processes.PartialProcess:
  return algorithms.build_furl(
    _model(), training=Phase(optimizer=sgd(0.5), epochs=50)
  )


def _clients(**levels: float) -> dict[str, planted.Fields]:
  """Clients whose labels are so much above their inputs."""
  inputs = np.linspace(-1, 1, 8, dtype=np.float32)
  return {
    client: {'x': inputs, 'y': inputs + np.float32(level)}
    for client, level in levels.items()
  }


# ---- one vector --------------------------------------------------------------


def test_every_example_gets_the_vector():
  layer = layers.PrivateVector(3, initializer='ones')
  for batch in (tf.zeros([2]), tf.zeros([2, 5]), tf.zeros([2, 5, 4], tf.uint8)):
    np.testing.assert_array_equal(layer(batch), np.ones([2, 3]))
  assert [v.name for v in layer.weights] == ['private_vector/own:0']
  assert layer(tf.zeros([0])).shape == [0, 3]


def test_a_default_and_a_deviation_add_up():
  layer = layers.PrivateVector(2, learned_default=True, initializer='ones')
  batch = tf.zeros([1])
  np.testing.assert_array_equal(layer(batch), [[1, 1]])
  np.testing.assert_array_equal(layer.own, [0, 0])
  layer.own.assign([0.5, -3])
  np.testing.assert_array_equal(layer(batch), [[1.5, -2]])


def test_a_regularizer_is_for_what_is_the_clients_own():
  layer = layers.PrivateVector(
    2, learned_default=True, initializer='ones', regularizer='l2'
  )
  layer(tf.zeros([1]))
  assert layer.losses[0] == 0
  layer.own.assign([3, 4])
  assert float(layer.losses[0]) == pytest.approx(0.01 * 25)


def test_a_layer_can_be_saved(tmp_path):
  model = _build(learned_default=True, initializer='normal', regularizer='l1')
  model.save(tmp_path / 'model.keras')
  loaded = tf.keras.models.load_model(tmp_path / 'model.keras')
  layer = loaded.get_layer('user')
  assert layer.learned_default
  assert layer.units == _UNITS
  assert isinstance(layer.regularizer, tf.keras.regularizers.L1)
  planted.assert_same(loaded.get_weights(), model.get_weights())


# ---- a default that is learned -----------------------------------------------


@pytest.mark.slow
def test_the_deviation_alone_is_the_clients_own(process):
  assert list(process.model.specs(tiers.GLOBAL)) == [_DEFAULT]
  kept = process.initialize_client.type_signature.result
  assert kept.is_equivalent_to(
    tff.to_type(
      collections.OrderedDict({_OWN: tff.TensorType(np.float32, [_UNITS])})
    )
  )
  result = process.next.type_signature.result
  for served in (result.state, result.metrics):
    assert _OWN not in str(served)
  assert _DEFAULT in str(result.state)


@pytest.mark.slow
def test_new_users_begin_with_the_default_that_others_learned(process):
  # Levels whose mean is 3; nobody has it.
  clients = _clients(ann=1, bob=2, cid=6)
  cohort = planted.cohort_of(process, clients)
  output = planted.run(process, cohort)
  for _ in range(14):
    output = planted.run(process, cohort, output.state, output.client_states)
  default = planted.global_weights(process, output.state)[_DEFAULT].mean()
  deviations = [kept[_OWN].mean() for kept in output.client_states]
  assert default == pytest.approx(3, abs=0.1)
  # Deviations are held back, but go to where each client is.
  shares = np.array(deviations) / (np.array([1, 2, 6]) - default)
  assert ((shares > 0.5) & (shares < 1)).all()
  assert sum(deviations) == pytest.approx(0, abs=0.2)

  measured = planted.evaluate(
    algorithms.build_furl_eval(process.model),
    process.get_model_weights(output.state),
    _clients(dot=default, eve=default + 2),
  )
  losses = [client['loss'] for client in measured.per_client]
  np.testing.assert_allclose(losses, [0, 4], atol=1e-5)
