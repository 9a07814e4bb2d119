"""Laws of cohort sampling: a pure function of the round."""

import collections
import collections.abc
import types
from typing import Any

import numpy as np
import pytest

from tff_partial import errors
from tff_partial import random_bits
from tff_partial.dp import clipping
from tff_partial.training import sampling
from tff_partial.training.errors import ProgramError

_POPULATION = tuple(f'client {i}' for i in range(40))


def _sampler(**options) -> sampling.CohortSampler:
  options = {'clients_per_round': 10, 'seed': 0, **options}
  return sampling.CohortSampler(_POPULATION, **options)


def test_a_cohort_is_distinct_clients_of_the_population():
  sampler = _sampler()
  for number in range(1, 30):
    cohort = sampler.cohort(number)
    assert len(cohort) == len(set(cohort)) == 10
    assert set(cohort) <= set(_POPULATION)


def test_a_cohort_depends_on_seed_and_round_alone():
  first, second = _sampler(), _sampler()
  rounds = range(1, 8)
  forwards = [first.cohort(number) for number in rounds]
  np.random.seed(1)  # noqa: NPY002 - whoever uses it must not change a cohort.
  assert [second.cohort(n) for n in reversed(rounds)] == forwards[::-1]
  assert len(set(map(tuple, forwards))) == len(forwards)
  assert _sampler(seed=1).cohort(1) != forwards[0]


def test_every_client_has_its_turn():
  sampler = _sampler()
  counts = collections.Counter(c for n in range(400) for c in sampler.cohort(n))
  assert set(counts) == set(_POPULATION)
  # Each is expected a hundred times, with a deviation below nine.
  assert max(counts.values()) < 140
  assert min(counts.values()) > 60


@pytest.mark.parametrize(
  'clients, oversample, asked',
  [(10, 1.0, 10), (10, 1.25, 13), (10, 1.1, 11), (30, 1.1, 33), (1, 1.5, 2)],
)
def test_how_many_are_asked(clients, oversample, asked):
  sampler = _sampler(clients_per_round=clients, oversample=oversample)
  assert sampler.num_asked == asked
  assert len(sampler.cohort(1)) == clients


def test_oversampling_alone_asks_more_and_joins_as_many():
  # The first ones that answer are joined, and everybody answers.
  sampler = _sampler(oversample=2.0)
  everybody = _sampler(clients_per_round=20)
  for number in range(1, 6):
    assert sampler.cohort(number) == everybody.cohort(number)[:10]


def test_dropout_takes_clients_away():
  full, sampler = _sampler(), _sampler(dropout_rate=0.3)
  sizes = []
  for number in range(1, 401):
    cohort, asked = sampler.cohort(number), full.cohort(number)
    # Those who stay keep their order.
    assert cohort == [c for c in asked if c in set(cohort)]
    assert cohort == sampler.cohort(number)
    sizes.append(len(cohort))
  assert 6.7 < np.mean(sizes) < 7.3
  # They drop out one by one, not all together.
  assert 1.2 < np.std(sizes) < 1.7


def test_the_cost_of_a_cohort_is_not_that_of_the_population():
  # As long as a list of 2^40 clients, but nobody is in it before being asked.
  class Everybody(collections.abc.Sequence):
    asked = 0

    def __len__(self):
      return 2**40

    def __getitem__(self, place):
      self.asked += 1
      return f'client {place}'

  for poisson in (False, True):
    everybody = Everybody()
    sampler = sampling.CohortSampler(everybody, 100, 0, poisson=poisson)
    cohort = sampler.cohort(1)
    assert everybody.asked == len(cohort) == len(set(cohort))


# ---- Poisson -----------------------------------------------------------------


def test_poisson_cohorts_vary_as_independent_draws_do():
  sampler = _sampler(poisson=True)
  cohorts = [sampler.cohort(number) for number in range(1000)]
  assert all(len(set(cohort)) == len(cohort) for cohort in cohorts)
  sizes = np.array([len(cohort) for cohort in cohorts])
  # 40 clients with probability 1/4 each: mean 10, variance 40 * 1/4 * 3/4.
  assert abs(sizes.mean() - 10.0) < 4 * np.sqrt(7.5 / 1000)
  assert abs(sizes.var() - 7.5) < 4 * 7.5 * np.sqrt(2 / 1000)
  took_part = np.array(
    [[client in set(cohort) for client in _POPULATION] for cohort in cohorts]
  )
  assert np.allclose(took_part.mean(0), 0.25, atol=4.5 * np.sqrt(0.1875 / 1000))
  # Whether one takes part tells nothing about another.
  together = np.corrcoef(took_part.T)[np.triu_indices(40, 1)]
  assert abs(together.mean()) < 0.01 and abs(together).max() < 0.16


def test_dropout_thins_poisson_cohorts_and_cuts_nobody_off():
  sampler = _sampler(poisson=True, clients_per_round=30, dropout_rate=0.2)
  sizes = [len(sampler.cohort(number)) for number in range(400)]
  assert abs(np.mean(sizes) - 24.0) < 0.7
  assert max(sizes) > 30


# ---- seeds -------------------------------------------------------------------


def test_a_clients_seed_is_its_own():
  sampler = _sampler()
  seeds = sampler.seeds(3, _POPULATION)
  assert seeds.shape == (40, 2)
  assert seeds.dtype == np.int32
  assert len({tuple(seed) for seed in seeds}) == 40
  for client, seed in zip(_POPULATION, seeds, strict=True):
    np.testing.assert_array_equal(seed, random_bits.derive(0, 3, client))
  alone = sampler.seeds(3, ['client 7'])
  np.testing.assert_array_equal(alone[0], seeds[7])
  assert (sampler.seeds(4, ['client 7']) != alone).any()
  assert (_sampler(seed=1).seeds(3, ['client 7']) != alone).any()


@pytest.mark.parametrize(
  'options, expected',
  [
    ({'clients_per_round': 0}, 'clients_per_round=0'),
    ({'clients_per_round': -3}, 'clients_per_round=-3'),
    ({'clients_per_round': 41}, 'asks 41 clients .* population has 40'),
    ({'poisson': True, 'clients_per_round': 41}, 'population has 40'),
    ({'poisson': True, 'oversample': 1.5}, 'oversample=1.5: with Poisson'),
    ({'oversample': 0.5}, 'oversample=0.5'),
    ({'oversample': float('nan')}, 'oversample=nan'),
    ({'oversample': float('inf')}, 'oversample=inf'),
    ({'oversample': 4.2}, 'asks 42 clients .*oversample=4.2.* has 40'),
    ({'dropout_rate': 1.0}, 'dropout_rate=1.0'),
    ({'dropout_rate': -0.1}, 'dropout_rate=-0.1'),
    ({'dropout_rate': float('nan')}, 'dropout_rate=nan'),
  ],
)
def test_impossible_cohorts_are_refused_at_once(options, expected):
  with pytest.raises(ProgramError, match=expected) as caught:
    _sampler(**options)
  assert isinstance(caught.value, errors.UserError)


@pytest.mark.parametrize(
  'quantile, oversample, fits',
  [(0.5, 1.0, True), (0.8, 1.0, True), (0.9, 1.0, False), (0.9, 2.0, True)],
)
def test_a_quantile_that_dropout_hides_is_refused(quantile, oversample, fits):
  clip = clipping.AdaptiveClip(quantile=quantile)
  plan = types.SimpleNamespace(
    clients_per_round=10, population=40, sampling=None, clipping=clip
  )
  ledger: Any = types.SimpleNamespace(plan=plan, simulation=False)
  arguments = (_POPULATION, 10, 0, oversample, 0.4, ledger)
  if fits:
    assert sampling.planned(*arguments).dropout_rate == 0.4
  else:
    with pytest.raises(ProgramError, match=r'of 0\.9.* from 0\.2 to 0\.8'):
      sampling.planned(*arguments)
