"""FedRAP beside a loop of NumPy: both tables, the vector, the regularizers."""

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

_ITEMS, _FACTORS = 5, 2
_SHARED, _OWN, _VECTOR = (
  'item/embeddings',
  'user_item/embeddings',
  'user/kernel',
)
_RATES = {GLOBAL: 0.3, LOCAL: 0.2}
_LAMBDA, _MU = 0.05, 0.02
_CLIENTS = {
  'ann': ([0, 3, 1, 3], [1.0, -1.0, 2.0, 0.5]),
  'bob': ([2, 3], [-2.0, 1.0]),
}


def _build() -> tf.keras.Model:
  layers = tf.keras.layers
  item = layers.Input((), dtype=tf.int32)
  shared = layers.Embedding(_ITEMS, _FACTORS, 'normal', name='item')(item)
  own = layers.Embedding(_ITEMS, _FACTORS, 'zeros', name='user_item')(item)
  user = layers.Dense(1, use_bias=False, name='user')
  return tf.keras.Model(item, user(layers.Add()([shared, own]))[:, 0])


@pytest.fixture(scope='module', name='model')
def fixture_model():
  return tff_partial.from_keras(_build, local='user.*', loss='mse')


def test_rounds_are_those_of_numpy(model):
  process = algorithms.build_fed_rap(
    model,
    shared=_SHARED,
    own=_OWN,
    difference=_LAMBDA,
    sparsity=_MU,
    training=Phase(
      optimizer={tier: sgd(rate) for tier, rate in _RATES.items()}, batch_size=2
    ),
    server_optimizer=sgd(0.8),
  )
  clients = {
    name: {'x': np.array(x, np.int32), 'y': np.array(y, np.float32)}
    for name, (x, y) in _CLIENTS.items()
  }
  with runtimes.cohort(jit=False):
    first = planted.global_weights(process, process.initialize())[_SHARED]
    state, kept = planted.trained(process, clients, [['ann', 'bob']] * 2)
    cohort = planted.cohort_of(process, clients, 0)
    drawn = planted.first_states(process, cohort)
  c = np.array(first, np.float64)
  own = {
    name: [np.array(state[_VECTOR][:, 0], np.float64), np.zeros(c.shape)]
    for name, state in zip(clients, drawn, strict=True)
  }
  for done in range(2):
    growth, moves = np.tanh(done / 10), []
    for name, (x, y) in _CLIENTS.items():
      (u, d), mine = own[name], c.copy()
      for begin in range(0, len(x), 2):
        items, slopes = x[begin : begin + 2], [np.zeros(c.shape), 0 * u]
        for j, label in zip(items, y[begin : begin + 2], strict=True):
          error = 2 / len(items) * ((mine[j] + d[j]) @ u - label)
          slopes[0][j] += error * u
          slopes[1] += error * (mine[j] + d[j])
        mine = mine - _RATES[GLOBAL] * slopes[0]
        d = d - _RATES[LOCAL] * slopes[0]
        u = u - _RATES[LOCAL] * slopes[1]
        apart = 2 * _LAMBDA * (d - mine)
        mine, d = (
          mine - growth * (apart + _MU * np.sign(mine)),
          d + growth * apart,
        )
      own[name] = [u, d]
      moves.append((mine - c, len(x)))
    c = c + 0.8 * sum(m * n for m, n in moves) / sum(n for _, n in moves)
  after = planted.global_weights(process, state)[_SHARED]
  np.testing.assert_allclose(after, c, atol=1e-6)
  for name, (u, d) in own.items():
    np.testing.assert_allclose(kept[name][_OWN], d, atol=1e-6)
    np.testing.assert_allclose(kept[name][_VECTOR][:, 0], u, atol=1e-6)


@pytest.mark.parametrize(
  ('wrong', 'message'),
  [
    ({'difference': -1.0}, 'difference=-1.0: give'),
    ({'sparsity': float('nan')}, 'sparsity=nan: give'),
    ({'shared': _OWN}, "shared='user_item/embeddings': the model has no"),
    ({'own': _VECTOR}, 'give tables of one shape'),
  ],
)
def test_what_does_not_fit_is_refused(model, wrong, message):
  with pytest.raises(ValueError, match=message):
    algorithms.build_fed_rap(model, **{'shared': _SHARED, 'own': _OWN, **wrong})
