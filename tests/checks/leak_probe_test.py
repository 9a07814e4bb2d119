"""Random tastes rank as by chance, but for a protocol that leaks."""

import pytest

from tff_partial import algorithms
from tff_partial.checks import leak_probe
from tff_partial.data import splits
from tff_partial.templates import implicit_factors
from tff_partial.templates import ranking

_ITEMS = 120


@pytest.mark.slow
@pytest.mark.parametrize('told', [False, True])
def test_only_what_was_held_out_tells_of_random_tastes(told) -> None:
  """An evaluation whose clients solve for all of their items is told."""
  model = implicit_factors.build_model(_ITEMS, 32)
  split = splits.by_mark()
  known = splits.Split(splits.everything(), split.query) if told else split
  evaluation = algorithms.build_fed_ials_eval(model, split=known)
  probe = leak_probe.probe_leak(
    algorithms.build_fed_ials(model),
    ranking.build_ranking_eval(evaluation, _ITEMS, split=split),
    _ITEMS,
    chance=0.1,
    num_users=200,
    rounds=3,
  )
  assert probe.leaks == told
  assert probe.hit_rate > 0.3 if told else abs(probe.hit_rate - 0.1) < 0.08
