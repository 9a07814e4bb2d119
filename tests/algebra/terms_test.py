"""Extra loss terms: their values and slopes, and what is refused."""

import collections
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import terms
from tff_partial import tiers
from tff_partial.contexts import ClientContext
from tff_partial.errors import SettingError


def _weights(**values: list[float]) -> tiers.Weights:
  """Each tier holds a variable of its own, but PERSONAL and GLOBAL the same."""
  names = {tiers.PERSONAL: 'w', tiers.GLOBAL: 'w', tiers.LOCAL: 'v'}
  return collections.OrderedDict(
    (tier, collections.OrderedDict([(names[tier], tf.constant(value))]))
    for tier, value in values.items()
  )


def _context(now: tiers.Weights, received: tiers.Weights) -> ClientContext:
  """What a client knows that has no examples."""
  model: Any = None
  zero = tf.constant(0)
  return ClientContext(model, now, received, {}, {}, zero, tf.zeros([2]))


_NOW = {'global': [1.0, 2.0], 'local': [3.0], 'personal': [4.0, 6.0]}
_RECEIVED = {'global': [0.0, 4.0], 'local': [5.0], 'personal': [9.0, 9.0]}


@pytest.mark.parametrize(
  ('term', 'value', 'slopes'),
  [
    # Half of 1 + 4, twice.
    (terms.proximal(2.0), 5.0, {'global': [2.0, -4.0]}),
    (terms.proximal(3.0, tiers.LOCAL), 6.0, {'local': [-6.0]}),
    # A client's own copy is held near the global weights that it received.
    (terms.proximal(0.5, tiers.PERSONAL), 5.0, {'personal': [2.0, 1.0]}),
    # Near to where they stand now; both ends are pulled.
    (terms.moreau(2.0), 25.0, {'personal': [6.0, 8.0], 'global': [-6.0, -8.0]}),
    (terms.l2(0.1, tiers.PERSONAL), 2.6, {'personal': [0.4, 0.6]}),
    (terms.proximal(0.0), 0.0, {}),
  ],
)
def test_values_and_slopes(term, value, slopes):
  now, received = _weights(**_NOW), _weights(**_RECEIVED)
  with tf.GradientTape() as tape:
    tape.watch(now)
    found = term(_context(now, received))
  np.testing.assert_allclose(found, value, rtol=1e-6)
  gradients = tape.gradient(
    found, now, unconnected_gradients=tf.UnconnectedGradients.ZERO
  )
  for tier, named in gradients.items():
    (slope,) = named.values()
    np.testing.assert_allclose(
      slope, slopes.get(tier, np.zeros_like(slope)), rtol=1e-6
    )


@pytest.mark.parametrize(
  'term', [terms.proximal(2.0, tiers.LOCAL), terms.l2(2.0, tiers.LOCAL)]
)
def test_a_tier_that_a_model_lacks_costs_nothing(term):
  weights = _weights(**{'global': [1.0, 2.0]})
  assert term(_context(weights, weights)) == 0.0


def test_weights_of_several_types_are_summed():
  weights = {
    tiers.GLOBAL: {
      'narrow': tf.constant([1.0], tf.float32),
      'wide': tf.constant([2.0], tf.float64),
    }
  }
  found = terms.l2(2.0, tiers.GLOBAL)(_context(weights, weights))
  np.testing.assert_allclose(found, 5.0, rtol=1e-6)


@pytest.mark.parametrize('penalty', [-1.0, float('inf'), float('nan')])
@pytest.mark.parametrize(
  'build',
  [terms.proximal, terms.moreau, lambda s: terms.l2(s, tiers.LOCAL)],
  ids=['proximal', 'moreau', 'l2'],
)
def test_penalties_that_make_no_sense_are_refused(build, penalty):
  with pytest.raises(
    SettingError, match='the penalty: expected a finite number of 0 or more'
  ):
    build(penalty)


@pytest.mark.parametrize('build', [terms.proximal, terms.l2])
def test_tiers_that_are_none_are_refused(build):
  with pytest.raises(SettingError, match="'mine' is not a tier"):
    build(1.0, 'mine')


def test_linear_terms_add_their_slopes():
  now = _weights(**_NOW)
  term = terms.linear(
    lambda client: {'w': client.received[tiers.GLOBAL]['w'] - 1.0}
  )
  with tf.GradientTape() as tape:
    tape.watch(now)
    found = term(_context(now, _weights(**_RECEIVED)))
  # (-1, 3) times (1, 2).
  assert found == 5.0
  slopes = tape.gradient(found, now)[tiers.GLOBAL]['w']
  np.testing.assert_array_equal(slopes, [-1.0, 3.0])
