"""Gradients of global weights through an exact reconstruction."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
from tff_partial import algorithms
from tff_partial import layers
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior

_ONE = tf.keras.initializers.Ones()


def _product() -> tf.keras.Model:
  """y = own * shared * x."""
  x = tf.keras.Input([1])
  dense = tf.keras.layers.Dense
  shared = dense(1, use_bias=False, kernel_initializer=_ONE, name='shared')(x)
  return tf.keras.Model(x, dense(1, use_bias=False, name='own')(shared))


def _own_head() -> tf.keras.Model:
  """A shared layer, a client's own head, and a vector that all share."""
  x = tf.keras.Input([3])
  draw = tf.keras.initializers.RandomNormal(seed=1)
  hidden = tf.keras.layers.Dense(
    4, 'tanh', kernel_initializer=draw, name='shared'
  )(x)
  own = tf.keras.layers.Dense(2, name='own')(hidden)
  mean = layers.PrivateVector(10, initializer='zeros', name='mean')(x)
  # The vector is the mean of the prior alone.
  return tf.keras.Model(x, own + 0.0 * tf.reduce_sum(mean, 1, keepdims=True))


def _step(
  model: models.PartialModel,
  fields: Any,
  settings: Exact,
  through: bool = True,
  **update: Any,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """The GLOBAL weights before and after a round of one client."""
  process = algorithms.build_fed_recon(
    model,
    reconstruct=Phase(optimizer=settings, batch_size=None),
    update=Phase(optimizer=sgd(0.1), batch_size=None, **update),
    through_solution=through,
  )
  with runtimes.native():
    before, after = planted.before_and_after(process, {'a': fields}, 1)
  return {name: (before[name], after[name]) for name in before}


@pytest.mark.parametrize(
  ('through', 'steps', 'expected'),
  [
    # Own is 4 c / (c^2 + 3) = 1, and the loss (own * c)^2 with c = 1.
    pytest.param(False, 1, 1 - 0.1 * 2, marks=pytest.mark.slow),
    # d(own * c) / dc = 4 * 2 c 3 / (c^2 + 3)^2 = 1.5, in place of 1.
    (True, 1, 1 - 0.1 * 2 * 1.5),
    # Own is 4 * .7 / 3.49, solved for again before the second step.
    pytest.param(
      *(True, 2, 0.7 - 0.1 * 2 * (4 * 0.49 / 3.49) * (24 * 0.7 / 3.49**2)),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_step_by_hand(through: bool, steps: int, expected: float) -> None:
  """Support: x = 1, y = 4. Query: x = 1, y = 0. The ridge is 3."""
  model = keras_models.from_keras(_product, local='own', loss='mse')
  fields = {
    'x': np.ones([2, 1], np.float32),
    'y': np.array([[4], [0]], np.float32),
  }
  found = _step(model, fields, Exact(ridge=3.0), through, epochs=steps)
  np.testing.assert_allclose(found['shared/kernel'][1], [[expected]], rtol=1e-5)


def _prior_of_mean(client: Any) -> Prior:
  vector = client.weight(tiers.GLOBAL, 'mean/own')
  mean = {'own/kernel': tf.reshape(vector[:8], [4, 2]), 'own/bias': vector[8:]}
  return Prior(mean, 0.5 + tf.reduce_sum(vector**2))


def _rest_of(kind: str) -> tuple[Callable[[], Any], dict[str, Any], Exact]:
  from_logits = {'from_logits': True}
  softmax = tf.keras.losses.SparseCategoricalCrossentropy(**from_logits)
  return {
    'squared': (_own_head, {'loss': 'mse'}, Exact(0.5)),
    'products': (_own_head, {'loss': 'mse'}, Exact(0.5, max_direct=1)),
    'softmax': (_own_head, {'loss': softmax}, Exact(0.5)),
    'prior': (_own_head, {'loss': 'mse'}, Exact(prior=_prior_of_mean)),
    'table': (planted.build_factorization, {'loss': 'mse'}, Exact(0.5)),
  }[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind', ['squared', 'products', 'softmax', 'prior', 'table']
)
def test_step_follows_the_slope_of_the_evaluation(kind: str) -> None:
  """The loss of unseen clients is what is minimized: its finite differences."""
  build, options, settings = _rest_of(kind)
  draw = np.random.default_rng(0)
  if kind == 'table':
    model = planted.factorization()
    fields = planted.rate({'a': 12})['a']
  else:
    model = keras_models.from_keras(build, local='own', **options)
    labels = draw.normal(size=[12, 2]).astype(np.float32)
    if kind == 'softmax':
      labels = draw.integers(0, 2, 12).astype(np.int32)
    fields = {'x': draw.normal(size=[12, 3]).astype(np.float32), 'y': labels}
  moved = _step(model, fields, settings)
  measuring = algorithms.build_fed_recon_eval(
    model, personalise=Phase(optimizer=settings)
  )

  def loss(weights: dict[str, np.ndarray]) -> float:
    found = planted.evaluate(
      measuring, planted.as_model_weights(weights), {'a': fields}
    )
    return float(found.metrics['loss'])

  for name, (before, after) in moved.items():
    gradient = (before - after) / 0.1
    length = np.linalg.norm(gradient)
    if name == 'mean/own' and kind != 'prior':
      assert length == 0
      continue
    way = 0.02 * gradient / length
    first = {key: value[0] for key, value in moved.items()}
    ahead, behind = (
      loss({**first, name: before + sign * way}) for sign in (1, -1)
    )
    assert (ahead - behind) / 0.04 == pytest.approx(length, rel=0.02), name


_SOLVE = Phase(train=(tiers.LOCAL,), optimizer=Exact())


@pytest.mark.parametrize(
  ('settings', 'words'),
  [
    ({'through': Phase(train=(tiers.LOCAL,))}, 'optimizer=Exact'),
    ({'through': Phase(optimizer=Exact())}, 'optimizer=Exact'),
    ({'through': _SOLVE, 'train': (tiers.LOCAL,)}, 'trains others'),
    ({'through': _SOLVE, 'train': ()}, 'trains others'),
  ],
)
def test_other_phases_are_refused(settings: Any, words: str) -> None:
  with pytest.raises(PhaseError, match=words):
    Phase(**settings)


def test_steps_have_no_solution() -> None:
  with pytest.raises(PhaseError, match='optimizer=Exact'):
    algorithms.build_fed_recon(planted.factorization(), through_solution=True)
