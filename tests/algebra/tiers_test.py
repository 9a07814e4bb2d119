"""Laws of named weights in three tiers."""

import collections
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tff_partial import tiers
from tff_partial.errors import SettingError


def _weights() -> tiers.Weights:
  """One variable a tier, two in the first."""
  return collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (f'{tier}/{number}', tf.fill([number + 1], float(number)))
        for number in range(2 if tier == tiers.GLOBAL else 1)
      ),
    )
    for tier in tiers.TIERS
  )


_CHOICES = [
  choice
  for size in range(len(tiers.TIERS) + 1)
  for choice in itertools.combinations(tiers.TIERS, size)
]


@pytest.mark.parametrize('chosen', _CHOICES, ids='+'.join)
def test_what_is_split_can_be_joined(chosen):
  weights = _weights()
  inside = {tier: weights[tier] for tier in chosen}
  outside = {t: w for t, w in weights.items() if t not in chosen}
  for parts in ((inside, outside), (outside, inside)):
    joined = tiers.join(*parts)
    assert list(joined) == list(tiers.TIERS)
    assert all(joined[tier] is weights[tier] for tier in tiers.TIERS)


def test_one_tier_may_be_named_alone():
  assert tiers.check_tiers(tiers.LOCAL, 'where') == (tiers.LOCAL,)


def test_joining_leaves_out_tiers_that_nobody_has():
  assert list(tiers.join({tiers.LOCAL: 1}, {tiers.GLOBAL: 2})) == [
    tiers.GLOBAL,
    tiers.LOCAL,
  ]
  assert tiers.join() == {}


def test_delta_is_what_a_step_took_away():
  before = _weights()[tiers.GLOBAL]
  after = collections.OrderedDict(
    (name, tensor - 0.5) for name, tensor in before.items()
  )
  for name, tensor in tiers.delta(before, after).items():
    np.testing.assert_array_equal(tensor, np.full(before[name].shape, 0.5))
  for tensor in tiers.delta(before, before).values():
    assert not tensor.numpy().any()


def test_an_unknown_tier_is_refused():
  with pytest.raises(
    SettingError,
    match=r"^where: 'lokal' is not a tier. The tiers are global, group, local.",
  ):
    tiers.check_tiers(('lokal',), 'where')


def test_a_tier_in_two_parts_is_refused():
  with pytest.raises(ValueError, match="'local' is in two of the parts"):
    tiers.join({tiers.LOCAL: 1}, {tiers.LOCAL: 2})
