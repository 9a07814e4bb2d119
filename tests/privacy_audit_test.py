"""Canaries: what an attack proves must be below what is claimed."""

import functools

import numpy as np
import pytest
from scipy import stats
import tensorflow_federated as tff

from tff_partial import accounting
from tff_partial import clippings
from tff_partial import privacy
from tff_partial import privacy_audit
from tff_partial import runtimes

pytestmark = pytest.mark.filterwarnings('ignore:np.find_common_type')

_DELTA = 1e-5
_CANARIES = 2000
# A canary that is there is in each round, and nobody is there in its place if
# it is not.
_ALWAYS = accounting.PoissonSampling(1.0)
# Tests draw with fresh seeds; chance fails one in a million times.
_SURELY = 1.0 - 1e-6


@pytest.fixture(autouse=True, scope='module')
def _cohort_runtime():
  with runtimes.cohort(jit=False):
    yield


@functools.cache
def _process(noise_multiplier, clipping):
  return privacy.private_mean(
    clipping, noise_multiplier=noise_multiplier, clients_per_round=_CANARIES
  ).create(tff.TensorType(np.float32, [_CANARIES]))


def _proved(noise_multiplier, clipping=None, **options):
  clipping = clipping or clippings.FixedClip(1.0)
  scores = privacy_audit.canary_scores(
    _process(noise_multiplier, clipping), seed=0, **options
  )
  return privacy_audit.epsilon_lower_bound(*scores, _DELTA, _SURELY)


def test_without_noise_canaries_are_seen():
  # 500 of 500 right guesses, twice: each rate is wrong by 3 % at the worst.
  assert 3.0 < _proved(0.0) < np.log(1000.0)


@pytest.mark.parametrize(
  ('noise_multiplier', 'clipping'),
  [
    (1.0, clippings.FixedClip(1.0)),
    (1.0, clippings.AdaptiveClip(1.0)),
    (4.0, clippings.FixedClip(7.0)),
  ],
)
def test_no_attack_proves_more_than_is_claimed(noise_multiplier, clipping):
  claimed = accounting.epsilon(noise_multiplier, _ALWAYS, 1, _DELTA)
  assert _proved(noise_multiplier, clipping) < claimed


def test_little_noise_is_found_out():
  proved = _proved(0.25)
  # Right for the noise that is there, too much for what might be claimed.
  assert proved < accounting.epsilon(0.25, _ALWAYS, 1, _DELTA)
  assert proved > accounting.epsilon(2.0, _ALWAYS, 1, _DELTA)


def test_chance_hides_canaries():
  rounds, rate = 4, 0.25
  claimed = accounting.epsilon(
    0.5, accounting.PoissonSampling(rate), rounds, _DELTA
  )
  assert _proved(0.5, rounds=rounds, probability=rate) < claimed


def test_canaries_score_what_they_send():
  inside, outside = privacy_audit.canary_scores(
    _process(0.0, clippings.FixedClip(1.0)), seed=1, rounds=2
  )
  np.testing.assert_allclose(inside, 2.0 / _CANARIES, rtol=2e-6)
  assert len(inside) == len(outside) == _CANARIES // 2
  assert not np.any(outside)


def test_a_bound_by_hand():
  # All of 100 guesses right: each rate is wrong by 0.025 ** (1 / 100) at most.
  ones, zeros = np.ones(200), np.zeros(200)
  worst = 0.025 ** (1.0 / 100.0)
  bound = privacy_audit.epsilon_lower_bound(ones, zeros, 0.01)
  np.testing.assert_allclose(bound, np.log((worst - 0.01) / (1.0 - worst)))


def test_an_attack_that_sees_nothing_proves_nothing():
  same = np.zeros(1000)
  assert privacy_audit.epsilon_lower_bound(same, same, _DELTA) == 0.0


def test_a_bound_holds_as_often_as_it_says():
  # Scores whose epsilon is known at every delta: a Gaussian mechanism.
  claimed = accounting.epsilon(1.0, _ALWAYS, 1, 0.1)
  random = np.random.default_rng()
  wrong = 0
  for _ in range(60):
    inside, outside = random.normal(size=[2, 1000])
    bound = privacy_audit.epsilon_lower_bound(inside + 1.0, outside, 0.1, 0.9)
    wrong += bound > claimed
  # At most one in ten is wrong, but for the chance of this test.
  assert stats.binom.sf(wrong - 1, 60, 0.1) > 1e-6
