"""A client whose computation fails is named by its id."""

import numpy as np
import pytest
import tensorflow as tf

import tff_partial
from tff_partial.training.errors import RunError


def _at_most_five(values: tf.Tensor) -> tf.Tensor:
  check = tf.debugging.assert_less_equal(values, 5.0, message='too high')
  with tf.control_dependencies([check]):
    return tf.identity(values)


def _build() -> tf.keras.Model:
  height = tf.keras.Input([])
  checked = tf.keras.layers.Lambda(_at_most_five, name='limit')(height)
  return tf.keras.Model(height, tf.keras.layers.Dense(1)(checked[:, None]))


@pytest.fixture(scope='module', name='world')
def fixture_world():
  model = tff_partial.from_keras(_build, loss='mse')
  clients = tff_partial.pack(
    {
      f'u{user}': {'x': [1.0, 9.0 if user == 3 else 2.0], 'y': np.zeros(2)}
      for user in range(6)
    },
    model.example_spec,
  )
  process = tff_partial.compose(model, work=[tff_partial.Phase(measured=True)])
  evaluation = tff_partial.algorithms.build_fed_recon_eval(
    model,
    split=tff_partial.splits.same(),
    personalise=tff_partial.Phase(max_steps=0),
  )
  return process, evaluation, clients


@pytest.mark.slow
@pytest.mark.parametrize('jit', [False, 'auto'])
def test_the_client_and_the_layer_are_named(world, jit):
  process, evaluation, clients = world
  expected = r"client 'u3' computes fails in .*limit.*: .*too high"
  with tff_partial.runtimes.cohort(jit=jit):
    with pytest.raises(RunError, match=f'Round 1.*{expected}'):
      tff_partial.train(process, clients, rounds=1, clients_per_round=6)
    weights = process.get_model_weights(process.initialize())
    with pytest.raises(RunError, match=f'Evaluation.*{expected}') as caught:
      tff_partial.evaluate(
        tff_partial.EvaluationSet(evaluation, clients), weights
      )
  assert '\n' not in str(caught.value)
  assert 'node' not in str(caught.value)
