"""Metrics of user modeling, beside scikit-learn and loops easy to read.

In the loops `h` is what a model thinks of users by attribute, and `g` how they
answered; NaN where a user answered nothing with the attribute.
"""

import itertools
import math

import numpy as np
import pytest
from sklearn import metrics

from tasks.user_modeling import cuts
from tasks.user_modeling import measures
from tff_partial import random_bits
from tff_partial.analysis import ranking
from tff_partial.analysis import similarity
from tff_partial.analysis.errors import AnalysisError

_NAN = float('nan')


# ---- mean answers ------------------------------------------------------------


def test_mean_answers():
  found = ranking.mean_answers(
    user=np.array([0, 0, 2, 0]),
    attributes=np.array([[0, -1], [0, 1], [1, -1], [-1, -1]]),
    answer=np.array([1.0, 4.0, 3.0, 5.0]),
    num_users=3,
    num_attributes=3,
  )
  np.testing.assert_array_equal(
    found, [[2.5, 4.0, _NAN], [_NAN, _NAN, _NAN], [_NAN, 3.0, _NAN]]
  )


def test_an_attribute_beyond_the_number_is_not_that_of_the_next_user():
  with pytest.raises(AnalysisError, match=r'attribute 2 is none of 2.*=3 or'):
    ranking.mean_answers([0, 1], [[2], [1]], [5.0, 1.0], 2, 2)


# ---- degree of agreement -----------------------------------------------------


def _loop(h, g, client):
  """Eq. 9 for one attribute, pair by pair."""
  agreeing, pairs = 0.0, 0
  for a in range(len(h)):
    for b in range(len(h)):
      if h[a] > h[b] and not (np.isnan(g[a]) or np.isnan(g[b])):
        if client[a] != client[b]:
          pairs += 1
          agreeing += 1.0 if g[a] > g[b] else 0.5 if g[a] == g[b] else 0.0
  return agreeing / pairs if pairs else _NAN


def test_the_degree_of_agreement_is_a_share_of_pairs():
  hidden = [[0.9, 0.1], [0.5, 0.1], [0.1, 0.1]]
  answers = [[4.0, 3.0], [5.0, 1.0], [2.0, 2.0]]
  # By the first attribute the first user should answer better than the second,
  # and does not; the two other pairs agree. The second one tells nothing.
  found = ranking.degree_of_agreement(hidden, answers, ['a', 'b', 'c'])
  assert found == pytest.approx(2 / 3)


def test_across_clients_users_of_the_same_client_are_no_pair():
  hidden, answers = [[3.0], [2.0], [1.0]], [[1.0], [2.0], [1.5]]
  # Alone the second and the third user agree, and they are of two clients.
  places = ['north', 'north', 'south']
  assert ranking.degree_of_agreement(hidden, answers, places) == 0.5
  alone = ranking.degree_of_agreement(hidden, answers, ['north'] * 3)
  assert math.isnan(alone)


def test_all_pairs_are_counted_and_the_same_answers_one_half():
  random = random_bits.generator('agreement')
  for size in (2, 7, 40):
    # Few values, so that many are the same.
    hidden = random.integers(-2, 3, [size, 1]).astype(float)
    answers = random.integers(0, 4, [size, 1]).astype(float)
    answers[random.uniform(size=[size, 1]) < 0.2] = np.nan
    clients = random.integers(10, 13, size).astype(str).tolist()
    found = ranking.degree_of_agreement(hidden, answers, clients)
    expected = _loop(hidden[:, 0], answers[:, 0], clients)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# ---- NDCG --------------------------------------------------------------------


def test_ndcg_discounts_as_printed():
  # Discounts are 1, 1 / (log2(2) + 1) = 1 / 2, and 1 / (log2(3) + 1); gains,
  # without the smallest, are 2, 1 and 0.
  order, third = np.array([[0.2, 0.9, 0.5]]), 1 / (math.log2(3) + 1)
  found = ranking.ndcg([[3.0, 2.0, 1.0]], order)
  assert found == pytest.approx((1 + 2 * third) / (2 + 1 / 2))
  # As printed, nothing is shifted.
  found = ranking.ndcg([[3.0, 2.0, -1.0]], order, shift=False)
  assert found == pytest.approx((2 - 1 / 2 + 3 * third) / (3 + 2 / 2 - third))


def test_attributes_with_the_same_prediction_share_their_discounts():
  # Gains 1 and 0 at places with the discounts 1 and 1 / 2, in either order.
  found = ranking.ndcg([[5.0, 4.0]], np.array([[0.7, 0.7]]))
  assert found == pytest.approx(0.75)


def test_attributes_without_prediction_and_users_with_nothing_are_left_out():
  found = ranking.ndcg(
    [[1.0, 9.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]],
    np.array([[0.9, _NAN, 0.1], [0.1, 0.2, 0.3], [_NAN, _NAN, _NAN]]),
  )
  assert found == 0.5
  assert math.isnan(ranking.ndcg(np.ones([1, 2]), np.ones([1, 2])))


def test_what_is_not_finite_has_no_measure():
  hidden, answers = [[1.0], [_NAN], [3.0]], [[1.0], [2.0], [3.0]]
  assert math.isnan(ranking.degree_of_agreement(hidden, answers, [*'abc']))
  hidden, answers = [[1.0, 2.0], [_NAN, 1.0]], [[1.0, 2.0], [1.0, 2.0]]
  assert math.isnan(ranking.ndcg(hidden, answers))
  components = {'a': np.full([1, 2], _NAN), 'b': np.ones([1, 2])}
  assert math.isnan(similarity.dissimilarity(components))


def test_ndcg_follows_the_loop_and_adding_a_constant_changes_nothing():
  random = random_bits.generator('ndcg')
  hidden = random.normal(size=[50, 19])
  predicted = random.normal(size=[50, 19])
  found = ranking.ndcg(hidden, predicted)
  assert found == pytest.approx(ranking.ndcg(hidden + 7.0, predicted))
  shares = []
  for h, order in zip(hidden, predicted, strict=True):
    gains = h - h.min()
    by_order, ideal = (
      sum(gains[k] / (math.log2(p + 1) + 1) for p, k in enumerate(places))
      for places in (np.argsort(-order), np.argsort(-gains))
    )
    assert 0 < by_order <= ideal
    shares.append(by_order / ideal)
  assert found == pytest.approx(np.mean(shares))


# ---- cuts --------------------------------------------------------------------


def test_cuts_are_where_most_records_are_right():
  # Answers of 3 are predicted at 2.25 and those of 2 at 1.75 and 2.15: the best
  # cut lies between 2.15 and 2.25, not in the middle between 2 and 3.
  answer = np.array([1, 2, 2, 3, 3])
  prediction = np.array([1.0, 1.75, 2.15, 2.25, 2.25])
  counts = cuts.histogram(answer, prediction, (1.0, 3.0))
  assert counts.sum() == 5 and counts[2, 62] == 2  # 2.24 to 2.26
  # Bins of 0.02 from 1 on.
  low, high = cuts.choose(counts)
  assert 0 < low <= 37 and 58 <= high <= 62
  chosen = np.array([low, high]), (1.0, 3.0)
  assert cuts.accuracy(answer, prediction, *chosen) == 1.0
  assert math.isnan(cuts.accuracy(np.ones(1), np.array([_NAN]), *chosen))


def test_no_other_cuts_are_right_more_often():
  random = random_bits.generator('cuts')
  scale = (1.0, 4.0)
  for _ in range(20):
    answer = random.integers(1, 5, 30)
    prediction = np.round(random.uniform(1.0, 3.8, 30), 1) + 0.05
    counts = sum(
      cuts.histogram(*part, scale)
      for part in ((answer[:9], prediction[:9]), (answer[9:], prediction[9:]))
    )
    found = cuts.choose(counts)
    assert (np.diff(found) >= 0).all()
    best = max(
      (1 + (prediction[:, None] >= np.array(each)).sum(1) == answer).mean()
      for each in itertools.combinations_with_replacement(
        np.arange(1.0, 4.1, 0.1), 3
      )
    )
    assert cuts.accuracy(answer, prediction, found, scale) == best


# ---- similarity --------------------------------------------------------------


def test_dissimilarity_is_the_sum_of_scikit_learns_distances():
  random = random_bits.generator('similarity')
  components = {f'client {i}': random.normal(size=[7, 4]) for i in range(10)}
  components['client 3'][2] = 0.0
  components['client 4'][2] = 0.0
  distances = [
    metrics.pairwise.cosine_distances(vectors).sum()
    for vectors in np.stack(list(components.values()), axis=1)
  ]
  expected = np.mean(distances)
  assert similarity.dissimilarity(components) == pytest.approx(expected)


# ---- ratings -----------------------------------------------------------------


def test_the_exact_auc_is_a_share_of_pairs():
  # The pairs of a wrong and a right answer: 0.5 against 0.8 and against 0.5,
  # 0.2 against both.
  found = measures.exact_auc(
    np.array([0.0, 1.0, 1.0, 0.0]), np.array([0.5, 0.5, 0.8, 0.2])
  )
  assert found == pytest.approx((1 + 0.5 + 1 + 1) / 4)


@pytest.mark.parametrize(
  ('answers', 'predictions'),
  [
    ([], []),
    ([1.0, 1.0], [0.9, 0.4]),
    ([1.0, 0.0, 1.0], [_NAN, 0.1, 0.8]),
    ([1.0, 0.0], [np.inf, 0.1]),
  ],
)
def test_of_nothing_to_compare_auc_is_no_number(answers, predictions):
  found = measures.exact_auc(np.array(answers), np.array(predictions))
  assert math.isnan(found)
