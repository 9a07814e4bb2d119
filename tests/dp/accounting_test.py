"""What privacy costs, against dp-accounting called by hand."""

import json
import math

import dp_accounting
import numpy as np
import pytest
from scipy import optimize
from scipy import stats
import tensorflow_privacy as tfp

from tff_partial import errors
from tff_partial.dp import accounting
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import privacy_plans
from tff_partial.dp import samplings
from tff_partial.errors import PrivacyError

pytestmark = pytest.mark.filterwarnings('ignore:np.find_common_type')

_DELTA = 1e-5
_Relation = dp_accounting.NeighboringRelation
_POISSON = samplings.PoissonSampling(0.02)
_SAMPLINGS = [
  _POISSON,
  samplings.FixedSizeSampling(1000, 20),
  samplings.EveryRound(),
  samplings.OncePerTree(30),
]


def _plan(clipping=None, **changed):
  arguments = {
    'delta': _DELTA,
    'population': 1000,
    'clients_per_round': 20,
    'rounds': 100,
    **changed,
  }
  return privacy_plans.plan(
    clipping or clipping_lib.FixedClip(1.0), **arguments
  )


def _gaussian_epsilon(noise_multiplier):
  """The exact epsilon of one Gaussian mechanism (Balle and Wang 2018)."""

  def delta(epsilon):
    shift = epsilon * noise_multiplier
    half = 0.5 / noise_multiplier
    return stats.norm.cdf(half - shift) - math.exp(epsilon) * stats.norm.cdf(
      -half - shift
    )

  return optimize.brentq(lambda epsilon: delta(epsilon) - _DELTA, 0.0, 100.0)


# ---- epsilon -----------------------------------------------------------------


@pytest.mark.slow
def test_poisson_sampling_by_hand():
  expected = (
    dp_accounting.pld.PLDAccountant(
      _Relation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4
    )
    .compose(
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
          0.02, dp_accounting.GaussianDpEvent(0.8)
        ),
        200,
      )
    )
    .get_epsilon(_DELTA)
  )
  ours = accounting.epsilon(0.8, _POISSON, 200, _DELTA)
  np.testing.assert_allclose(ours, expected, rtol=2e-3)
  assert ours >= expected  # Coarser steps, on the safe side.


def test_every_round_by_hand():
  # 100 Gaussian mechanisms with the noise multiplier 60 are one with 6, and two
  # clips see half of it.
  ours = accounting.epsilon(60.0, samplings.EveryRound(), 100, _DELTA)
  np.testing.assert_allclose(ours, _gaussian_epsilon(3.0), rtol=2e-3)


@pytest.mark.parametrize('sampling', _SAMPLINGS)
def test_a_cohort_of_fixed_size_has_no_user_more_or_less(sampling):
  is_independent = isinstance(sampling, samplings.PoissonSampling)
  assert (sampling.neighbours == 'one user more or less') == is_independent
  is_replaced = sampling.neighbours == 'one user replaced'
  assert sampling.distance == (2.0 if is_replaced else 1.0)


@pytest.mark.slow
def test_fixed_size_by_hand():
  # A user that is replaced moves the sum by two clips.
  expected = (
    dp_accounting.rdp.RdpAccountant(neighboring_relation=_Relation.REPLACE_ONE)
    .compose(
      dp_accounting.SelfComposedDpEvent(
        dp_accounting.SampledWithoutReplacementDpEvent(
          1000, 20, dp_accounting.GaussianDpEvent(1.5 / 2.0)
        ),
        200,
      )
    )
    .get_epsilon(_DELTA)
  )
  ours = accounting.epsilon(
    1.5, samplings.FixedSizeSampling(1000, 20), 200, _DELTA
  )
  # Fewer orders are tried, and none of them costs less than it should.
  assert expected <= ours < 1.005 * expected


def test_trees_by_hand():
  # Two whole trees of 7 rounds have 3 levels each; one round more has one.
  accountant = dp_accounting.rdp.RdpAccountant(
    neighboring_relation=_Relation.REPLACE_SPECIAL
  )
  divergences = accountant.orders * (3 + 3 + 1) / (2.0 * 4.0**2)
  expected, _ = dp_accounting.rdp.compute_epsilon(
    accountant.orders, divergences, _DELTA
  )
  ours = accounting.epsilon(4.0, samplings.OncePerTree(7), 15, _DELTA)
  np.testing.assert_allclose(ours, expected)
  theirs = tfp.compute_rdp_tree_restart(4.0, [7, 7, 1], accountant.orders)
  np.testing.assert_allclose(divergences, theirs)


@pytest.mark.parametrize('sampling', _SAMPLINGS)
def test_nothing_costs_nothing_and_no_noise_everything(sampling):
  assert accounting.epsilon(1.0, sampling, 0, _DELTA) == 0.0
  assert accounting.epsilon(0.0, sampling, 1, _DELTA) == math.inf


def test_small_epsilons_are_counted_in_finer_steps():
  exact = _gaussian_epsilon(30.0)
  ours = accounting.epsilon(60.0, samplings.EveryRound(), 1, _DELTA)
  assert ours < 0.2
  np.testing.assert_allclose(ours, exact, rtol=2e-3)


# ---- releases before training ------------------------------------------------


def test_what_is_released_once_is_paid_for():
  sampling = samplings.PoissonSampling(1.0)
  # 100 / 30**2 = 1/9 for the rounds and 1/16 more are 25/144 = (12/5)**-2.
  ours = accounting.epsilon(30.0, sampling, 100, _DELTA, once=[4.0])
  np.testing.assert_allclose(ours, _gaussian_epsilon(12.0 / 5.0), rtol=2e-3)
  alone = accounting.epsilon(30.0, sampling, 0, _DELTA, once=[4.0])
  np.testing.assert_allclose(alone, _gaussian_epsilon(4.0), rtol=2e-3)


def test_a_replaced_user_pays_twice_for_what_is_released_once():
  ours = accounting.epsilon(
    1.0, samplings.FixedSizeSampling(1000, 20), 0, _DELTA, once=[8.0]
  )
  exact = _gaussian_epsilon(4.0)
  assert exact <= ours < 1.2 * exact


def test_local_noise_has_no_help_and_two_clips():
  ours = accounting.local_epsilon(20.0, 25, _DELTA)
  # 25 mechanisms with the noise multiplier 10 are one with 2.
  np.testing.assert_allclose(ours, _gaussian_epsilon(2.0), rtol=2e-3)
  assert accounting.local_epsilon(0.0, 1, _DELTA) == math.inf


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: accounting.local_epsilon(1.0, 2.5, _DELTA), 'whole .* found 2.5'),
    (lambda: samplings.OncePerTree(2.5), 'whole number .* found 2.5'),
    (lambda: samplings.FixedSizeSampling(1000, 2.5), 'or 1000, found 2.5'),
    (
      lambda: accounting.epsilon(1.0, _POISSON, 9, _DELTA, once=[math.inf]),
      '`once` must be a finite number .* found inf',
    ),
  ],
)
def test_what_cannot_be_counted_is_refused(call, match):
  with pytest.raises(PrivacyError, match=match):
    call()


# ---- calibration -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('sampling', _SAMPLINGS)
@pytest.mark.parametrize('target', [0.4, 8.0])
def test_noise_is_the_least_for_a_target(sampling, target):
  noise = accounting.calibrate(target, sampling, 40, _DELTA)
  cost = accounting.epsilon(noise, sampling, 40, _DELTA)
  assert cost <= target
  assert cost > 0.995 * target
  less = accounting.epsilon(0.99 * noise, sampling, 40, _DELTA)
  assert less > target


@pytest.mark.slow
def test_what_is_released_once_is_paid_first():
  def noise(once):
    return accounting.calibrate(4.0, _POISSON, 100, _DELTA, once=once)

  assert noise([]) < noise([8.0]) < noise([2.0])
  with pytest.raises(PrivacyError, match='nearest'):
    noise([1.0])


def test_an_impossible_target_is_refused_with_the_nearest():
  with pytest.raises(PrivacyError) as caught:
    accounting.calibrate(
      0.2, _POISSON, 100, _DELTA, largest_noise_multiplier=2.0
    )
  nearest = accounting.epsilon(2.0, _POISSON, 100, _DELTA)
  assert f'{nearest:.3g}'[:4] in str(caught.value)
  assert 'count_stddev' in str(caught.value)
  assert isinstance(caught.value, errors.UserError)
  with pytest.raises(PrivacyError, match='counted'):
    accounting.calibrate(1e-6, samplings.OncePerTree(9), 9, _DELTA)


# ---- plans -------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_reaches_its_target():
  plan = _plan(target_epsilon=4.0)
  assert 3.98 < plan.epsilon <= 4.0
  assert plan.sampling == _POISSON
  again = _plan(noise_multiplier=plan.noise_multiplier)
  assert again == plan
  factory = plan.mean(noise_seed=3)
  assert factory.noise_multiplier == plan.noise_multiplier
  assert factory.clients_per_round == 20 and factory.mechanism.is_simulation


def test_plans_account_samplings_as_what_they_are():
  plans = {
    name: _plan(noise_multiplier=2.0, sampling=name)
    for name in ('poisson', 'fixed_size', 'every_round')
  }
  costs = {name: plan.epsilon for name, plan in plans.items()}
  assert costs['poisson'] < costs['fixed_size'] < costs['every_round']
  tree = _plan(
    clipping_lib.TreeNoise(1.0, 50),
    noise_multiplier=2.0,
    sampling='once_per_tree',
  )
  assert tree.sampling == samplings.OncePerTree(50)


_TREE = clipping_lib.TreeNoise(1.0, 51)


@pytest.mark.parametrize(
  ('clipping', 'changed', 'match'),
  [
    (None, {'delta': 1e-3}, 'below 1 / population, 0.001'),
    (None, {'delta': 0.0}, 'between 0 and 1'),
    (None, {'clients_per_round': 1001}, 'between 1 and 1000'),
    (None, {'rounds': 0}, 'rounds must be a positive integer'),
    (None, {'rounds': math.inf}, 'must be a positive integer, found inf'),
    (None, {'rounds': 1.5}, 'rounds must be a positive integer, found 1.5'),
    (None, {'target_epsilon': 1.0}, 'either'),
    (None, {'noise_multiplier': None}, 'either'),
    (None, {'noise_multiplier': -1.0}, 'must not be negative'),
    (None, {'noise_multiplier': math.inf}, 'negative or infinite'),
    (None, {'sampling': 'poison'}, "one of .*'poisson'.* found 'poison'"),
    (None, {'sampling': 'once_per_tree'}, 'need one another'),
    (_TREE, {}, 'need one another'),
    (_TREE, {'sampling': 'once_per_tree'}, 'TreeNoise 50 rounds at most'),
    (clipping_lib.AdaptiveClip(), {'sampling': 'local'}, 'needs a FixedClip'),
  ],
)
def test_impossible_plans_are_refused(clipping, changed, match):
  with pytest.raises(PrivacyError, match=match):
    _plan(clipping, **{'noise_multiplier': 1.0, **changed})


# ---- the ledger --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  'sampling', ['poisson', 'fixed_size', 'every_round', 'once_per_tree']
)
def test_a_ledger_bounds_what_is_spent(sampling):
  is_tree = sampling == 'once_per_tree'
  plan = _plan(
    clipping_lib.TreeNoise(1.0, 30) if is_tree else None,
    noise_multiplier=2.0,
    sampling=sampling,
  )
  ledger = privacy_plans.PrivacyLedger(plan)
  spent = [ledger.epsilon(rounds) for rounds in range(121)]
  assert spent[0] == 0.0 and spent[100] == plan.epsilon
  assert np.all(np.diff(spent) >= 0.0)
  for rounds in (17, 60, 120):
    exact = accounting.epsilon(2.0, plan.sampling, rounds, _DELTA)
    assert exact * (1.0 - 1e-9) <= spent[rounds] < 1.5 * exact


def test_without_noise_what_was_released_before_is_counted():
  plan = _plan(noise_multiplier=0.0, once=[5.0])
  ledger = privacy_plans.PrivacyLedger(plan)
  assert 0.0 < ledger.epsilon(0) < 2.0
  assert ledger.epsilon(1) == plan.epsilon == math.inf


def test_a_report_is_json_and_says_who_is_a_neighbour():
  plan = _plan(noise_multiplier=1.0, once=[5.0])
  ledger = privacy_plans.PrivacyLedger(plan, simulation=True)
  report = ledger.report(100, clip=0.5)
  assert json.loads(json.dumps(report)) == {
    'epsilon': plan.epsilon,
    'delta': _DELTA,
    'noise_multiplier': 1.0,
    'sampling': 'poisson',
    'neighbours': 'one user more or less',
    'rounds': 100,
    'population': plan.population,
    'clients_per_round': 20,
    'simulation': True,
    'assumed_public': ['population'],
    'clip': 0.5,
  }


# ---- noise beside updates ----------------------------------------------------


def _noisy(clipping, number, **changed):
  settings = {'noise_multiplier': 1.1, 'clients_per_round': 10, **changed}
  return _plan(clipping, **settings).noise_norm(number)


@pytest.mark.slow
def test_noise_of_a_mean_is_as_long_as_its_weights_are_many():
  clip = clipping_lib.FixedClip(0.1)
  found = _noisy(clip, 100_000)
  # 1.1 * 0.1 / 10 a weight, times the root of their number.
  assert found.noise == pytest.approx(3.479, abs=5e-4)
  assert found.largest_update == pytest.approx(0.1)
  assert found.is_hopeless and not _noisy(clip, 1_000).is_hopeless
  # Of ten clients each adds as much as the server would, once.
  local = _noisy(clip, 100_000, sampling='local')
  assert local.noise == pytest.approx(math.sqrt(10) * found.noise)
  # The count of clipped clients takes half of what is spent.
  adaptive = clipping_lib.AdaptiveClip(0.1, count_stddev=1.1 / math.sqrt(2))
  assert _noisy(adaptive, 100_000).ratio == pytest.approx(
    math.sqrt(2) * found.ratio
  )


def test_noise_of_parts_adds_up():
  clips = {
    'global': clipping_lib.FixedClip(0.3),
    'group': clipping_lib.FixedClip(0.4),
  }
  found = _noisy(clips, {'global': 9, 'group': 4})
  # Each costs half, so that its multiplier is the root of two times 1.1.
  each = 1.1 * math.sqrt(2) / 10
  assert found.noise == pytest.approx(each * math.hypot(0.3 * 3, 0.4 * 2))
  assert found.largest_update == pytest.approx(0.5)
  with pytest.raises(PrivacyError, match=r"\['global', 'group'\]"):
    _noisy(clips, 13)


def test_a_plan_prints_how_long_its_noise_is_and_warns(caplog):
  settings = {'noise_multiplier': 1.1, 'clients_per_round': 10}
  clip = clipping_lib.FixedClip(0.1)
  # (10 / 1.1) ** 2 weights.
  assert 'at 82.6 weights, and' in str(_plan(clip, **settings))
  few = _plan(clip, **settings, num_weights=1_000)
  assert not caplog.records
  assert few == _plan(clip, **settings)
  many = _plan(clip, **settings, num_weights=100_000)
  said = 'norm 3.5 against 0.1 of the largest mean update: 35 times as long'
  assert f'noise: {said}' in str(many)
  (told,) = [record.getMessage() for record in caplog.records]
  assert told.startswith(f'Noise of {said}. The noise drowns what clients')
  # A run may go on whether this was said or not.
  assert few.terms == many.terms == _plan(clip, **settings).terms
