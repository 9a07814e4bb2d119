"""Canaries: what an attack proves must be below what is claimed."""

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import small_runs
from tff_partial import algorithms
from tff_partial.checks import audit_bounds
from tff_partial.checks import privacy_audit
from tff_partial.composition import Aggregation
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import privacy_plans
from tff_partial.errors import PrivacyError
from tff_partial.exchange import messages
from tff_partial.model import keras_models
from tff_partial.training import programs
from tff_partial.training import run_privacy

pytestmark = [
  pytest.mark.filterwarnings('ignore:np.find_common_type'),
  pytest.mark.usefixtures('in_cohorts'),
]

_DELTA = 1e-5
# Tests draw with fresh seeds; chance fails one in a million times.
_SURELY = 1.0 - 1e-6


# ---- canaries in one training run --------------------------------------------

_HIDDEN = privacy_audit.Canaries(160, seed=4)
_ROUNDS, _COHORT = 3, 86  # Half of 12 clients and 160 canaries.


def _build_table() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  vector = tf.keras.layers.Embedding(100, 2, name='items')(item)
  rating = tf.keras.layers.Dense(1, use_bias=False, name='user')(vector)
  return tf.keras.Model(item, rating)


def _planned(
  noise_multiplier: float, clipping: clipping_lib.Clipping, **options: str
) -> privacy_plans.PrivacyPlan:
  return privacy_plans.plan(
    clipping,
    noise_multiplier=noise_multiplier,
    delta=_DELTA,
    population=172,
    clients_per_round=_COHORT,
    rounds=_ROUNDS,
    **options,
  )


def _attacked(
  aggregation: Aggregation, ledger: run_privacy.Accounting
) -> tuple[audit_bounds.Proof, np.ndarray]:
  """Trains with canaries; returns what that proves, and their scores."""
  process = algorithms.build_furl(
    keras_models.from_keras(_build_table, local='user', loss='mse'),
    aggregation=Aggregation(
      _HIDDEN.watched(aggregation.aggregator),
      messages.ClientWeighting.UNIFORM,
      _HIDDEN.postprocess_update(aggregation.postprocess_update),
    ),
  )
  clients = _HIDDEN.among(small_runs.pack(process.example_spec, 'some', 12))
  sizes = {'rounds': _ROUNDS, 'clients_per_round': _COHORT}
  trained = programs.train(process, clients, privacy=ledger, **sizes)
  scores = _HIDDEN.scores(trained.state)
  return audit_bounds.prove(scores, _HIDDEN.present, _DELTA, _SURELY), scores


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['central', 'adaptive', 'local'])
def test_a_private_run_hides_its_canaries(kind):
  if kind == 'local':
    plan = _planned(6.0, clipping_lib.FixedClip(0.5), sampling='local')
    aggregation = Aggregation(
      tff.aggregators.MeanFactory(), postprocess_update=plan.local_noise()
    )
  else:
    clipping = clipping_lib.FixedClip(0.5)
    if kind == 'adaptive':
      clipping = clipping_lib.AdaptiveClip(0.5)
    plan = _planned(1.0, clipping)
    aggregation = Aggregation(plan.mean())
  proof, _ = _attacked(aggregation, privacy_plans.PrivacyLedger(plan))
  assert 0.0 <= proof.epsilon < plan.epsilon < 20.0


@pytest.mark.slow
def test_a_run_with_less_noise_than_it_claims_is_found_out():
  # What another program than `train` might do: its ledger would refuse it.
  claimed = _planned(6.0, clipping_lib.FixedClip(0.5))
  cheating = _planned(0.01, clipping_lib.FixedClip(0.5))
  ledger = privacy_plans.PrivacyLedger(claimed)
  with pytest.raises(PrivacyError, match='process has 0.01'):
    _attacked(Aggregation(cheating.mean()), ledger)
  _, scores = _attacked(Aggregation(cheating.mean()), run_privacy.UNACCOUNTED)
  proof = audit_bounds.prove(scores, _HIDDEN.present, _DELTA, 0.99)
  assert proof.epsilon > claimed.epsilon > 0.5
  # Canaries come when they are drawn, if they are there at all.
  rounds = np.round(scores / (0.5 / _COHORT))
  assert set(rounds[_HIDDEN.present]) <= {0, 1, 2, 3}
  assert np.sum(rounds[_HIDDEN.present]) > 40


def test_canaries_come_if_they_are_there():
  clients = small_runs.pack(small_runs.build_model().example_spec, 'some', 12)
  among = _HIDDEN.among(clients)
  there = [c for c, p in zip(_HIDDEN.ids, _HIDDEN.present, strict=True) if p]
  ids = [*_HIDDEN.ids, *clients.client_ids]
  assert among.client_ids == (*clients.client_ids, *_HIDDEN.ids)
  seeds = np.arange(2 * len(ids), dtype=np.int32).reshape(-1, 2)
  cohort = among.cohort(ids, seeds)
  assert cohort.client_ids == (*there, *clients.client_ids)
  assert 60 < len(there) < 100
  # Others keep their seeds; canaries have one by which they are known.
  drawn = np.stack([value['seed'] for value in cohort])
  np.testing.assert_array_equal(drawn[len(there) :], seeds[160:])
  known = _HIDDEN.seeds[_HIDDEN.present]
  np.testing.assert_array_equal(drawn[: len(there)], known)


def test_a_canary_sends_its_element_and_the_others_all_but_these():
  send = _HIDDEN.postprocess_update()
  update = {'b': tf.fill([50, 4], 2.0), 'a': tf.fill([10], 3.0)}
  places = _HIDDEN.places([10, 200])
  for place in (0, 159):
    sent = send(update, _HIDDEN.sending_seeds[place])
    flat = np.concatenate([np.ravel(sent['a']), np.ravel(sent['b'])])
    assert np.flatnonzero(flat).tolist() == [places[place]]
    assert flat.max() >= 1e6
  sent = send(update, tf.constant([1, 2]))
  flat = np.concatenate([np.ravel(sent['a']), np.ravel(sent['b'])])
  expected = np.array([3.0] * 10 + [2.0] * 200)
  expected[places] = 0.0
  np.testing.assert_array_equal(flat, expected)


def test_there_are_no_more_canaries_than_elements():
  with pytest.raises(PrivacyError, match='8 or more'):
    privacy_audit.Canaries(7, seed=0)
  with pytest.raises(PrivacyError, match='which has 100'):
    privacy_audit.Canaries(101, seed=0).places([60, 40])
  places = privacy_audit.Canaries(100, seed=0).places([60, 40])
  assert sorted(places) == list(range(100))


def test_a_proof_by_one_run_by_hand():
  # Pure privacy: all of r guesses are right with q ** r at most, so that q is
  # at least the r-th root of the risk. Of 16 and 8 guesses each has a half.
  present = np.arange(16) < 8
  proof = audit_bounds.prove(present.astype(float), present, delta=0.0)
  root = 0.025 ** (1.0 / 16.0)
  expected = np.log(root / (1.0 - root))
  np.testing.assert_allclose(proof.epsilon, expected, atol=1e-5)
  assert proof[1:] == (16, 16)
  # Delta adds the likeliest way to be pushed over the edge: for 16 of 16 that
  # is max_i P[16 - i <= W < 16] / i, times 2 * 16 * delta.
  delta = 1e-4
  proof = audit_bounds.prove(present.astype(float), present, delta=delta)
  rate = 1.0 / (1.0 + np.exp(-proof.epsilon))
  below = [
    sum(stats.binom.pmf(16 - k, 16, rate) for k in range(1, i + 1)) / i
    for i in range(1, 17)
  ]
  chance = rate**16 + 2 * 16 * delta * max(below)
  np.testing.assert_allclose(chance, 0.025, rtol=1e-4)
  nothing = audit_bounds.prove(np.zeros(16), present[::-1], delta=0.0)
  assert nothing.epsilon == 0.0
  # Also of zeros and ones, of which `~` would make negative numbers.
  again = audit_bounds.prove(present.astype(float), present.astype(int), 0.0)
  assert again[1:] == (16, 16)


@pytest.mark.parametrize('number', [(7, 7), (16, 15)])
def test_a_proof_needs_canaries(number):
  scores, present = map(np.ones, number)
  with pytest.raises(PrivacyError, match='found {} and {}'.format(*number)):
    audit_bounds.prove(scores, present, delta=0.0)
