"""Ranking metrics are those of the definitions, over all orders and draws."""

import itertools
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics
import tensorflow as tf

from tff_partial.errors import SettingError
from tff_partial.model import ranking_metrics as ranking


def _ranks(scores: Any, target: int, held_out: float = 1.0) -> Any:
  """The ranks of one of some items, all of them unseen."""
  others = np.delete(np.asarray(scores, np.float32), target)
  counts = {
    'above': tf.constant([np.sum(others > scores[target])], tf.float32),
    'tied': tf.constant([np.sum(others == scores[target])], tf.float32),
    'others': tf.constant([len(others)], tf.float32),
  }
  return {
    'all': counts,
    'drawn': counts,
    'held_out': tf.constant([held_out]),
    'top': tf.constant([np.argsort(scores)[::-1][:2]], tf.int32),
  }


def _value(metric: Any, *ranks: Any) -> float:
  for each in ranks:
    metric.update_state(tf.ones([1]), each)
  return float(metric.result())


def _by_enumeration(gain: Any, scores: Any, target: int, negatives: int) -> Any:
  """The mean over all drawn sets, and all places among equal scores."""
  others = np.delete(np.asarray(scores, float), target)
  values = []
  for drawn in itertools.combinations(others, negatives):
    above = sum(score > scores[target] for score in drawn)
    tied = sum(score == scores[target] for score in drawn)
    values.append(np.mean([gain(above + i) for i in range(tied + 1)]))
  return np.mean(values)


_GAINS = {
  ranking.HitRate: lambda rank: float(rank < 2),
  ranking.NDCG: lambda rank: (rank < 2) / np.log2(rank + 2),
  ranking.ReciprocalRank: lambda rank: (rank < 2) / (rank + 1),
}


@pytest.mark.parametrize('kind', _GAINS)
@pytest.mark.parametrize('negatives', [None, 3, 20])
@pytest.mark.parametrize('target', range(7))
def test_values_are_means_over_all_draws_and_orders(kind, negatives, target):
  scores = [0.5, 0.1, 0.5, 0.9, 0.5, 0.1, 0.3]
  found = _value(kind(2, negatives), _ranks(scores, target))
  wanted = _by_enumeration(_GAINS[kind], scores, target, min(negatives or 6, 6))
  assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize('negatives', [None, 99])
def test_a_constant_score_is_worth_chance(negatives):
  found = _value(ranking.HitRate(10, negatives), _ranks(np.zeros(500), 7))
  assert found == pytest.approx(10 / (100 if negatives else 500), abs=1e-6)


def test_ndcg_of_several_is_scikit_learns():
  scores = np.array([0.9, 0.2, 0.8, 0.4, 0.7, 0.1])
  held_out = [2, 3, 5]
  found = _value(
    ranking.NDCG(4), *(_ranks(scores, i, len(held_out)) for i in held_out)
  )
  relevance = np.isin(np.arange(6), held_out).astype(float)
  wanted = sklearn_metrics.ndcg_score([relevance], [scores], k=4)
  assert found == pytest.approx(wanted, abs=1e-6)


def test_held_out_items_are_ranked_one_by_one_among_drawn_ones():
  first, second = (_ranks([0.9, 0.1, 0.2, 0.3], 0, 2.0) for _ in range(2))
  assert _value(ranking.NDCG(3, 2), first, second) == pytest.approx(1.0)


def test_coverage_counts_items_that_are_shown_to_some_user():
  coverage = ranking.CatalogueCoverage(8, 2)
  first, second = np.zeros(8), np.zeros(8)
  first[[1, 2]] = second[[2, 5]] = [2, 1]
  assert _value(coverage, _ranks(first, 0), _ranks(second, 0)) == 3 / 8


@pytest.mark.parametrize(
  ('make', 'expected'),
  [
    (lambda: ranking.HitRate(0), 'k: expected at least 1, found 0'),
    (lambda: ranking.NDCG(2.5), 'k: expected a whole number, found 2.5'),
    (lambda: ranking.ReciprocalRank(3, -1), 'num_negatives: .* at least 0'),
    (lambda: ranking.CatalogueCoverage(8, -1), 'k: expected at least 1'),
    (lambda: ranking.CatalogueCoverage(0), 'num_items: expected at least 1'),
  ],
)
def test_numbers_of_ranks_and_items_that_there_are_not(make, expected):
  with pytest.raises(SettingError, match=expected):
    make()


def test_padding_does_not_count():
  for metric in (*ranking.ranking_metrics()(), ranking.CatalogueCoverage(6, 2)):
    metric.update_state(
      tf.ones([1]), _ranks(np.arange(6), 3), sample_weight=tf.zeros([1])
    )
    assert not any(np.any(v.numpy()) for v in metric.variables)
