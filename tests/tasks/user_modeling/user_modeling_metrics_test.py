"""Metrics of user modeling, beside scikit-learn and loops easy to read.

In the loops `h` is what a model thinks of users by attribute, and `g` how they
answered; NaN where a user answered nothing with the attribute.
"""

import math

import numpy as np
import pytest
from sklearn import metrics

from tasks.user_modeling import measures
from tff_partial import random_bits
from tff_partial.analysis import ranking
from tff_partial.analysis import similarity

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


# ---- degree of agreement -----------------------------------------------------


def _loop(h, g, client=None, ties=0.0):
  """Eq. 9 for one attribute, pair by pair."""
  agreeing, pairs = 0.0, 0
  for a in range(len(h)):
    for b in range(len(h)):
      if h[a] > h[b] and not (np.isnan(g[a]) or np.isnan(g[b])):
        if client is None or client[a] != client[b]:
          pairs += 1
          agreeing += 1.0 if g[a] > g[b] else ties if g[a] == g[b] else 0.0
  return agreeing / pairs if pairs else _NAN, pairs


def test_the_degree_of_agreement_is_a_share_of_pairs():
  hidden = [[0.9, 0.1], [0.5, 0.1], [0.1, 0.1]]
  answers = [[4.0, 3.0], [5.0, 1.0], [2.0, 2.0]]
  # By the first attribute the first user should answer better than the second,
  # and does not; the two other pairs agree. The second one tells nothing.
  found = ranking.degree_of_agreement(hidden, answers)
  np.testing.assert_allclose(found.by_attribute, [2 / 3, _NAN])
  np.testing.assert_array_equal(found.num_pairs, [3, 0])
  assert found.mean == pytest.approx(2 / 3)


@pytest.mark.parametrize(('ties', 'expected'), [(0.0, 0.5), (0.5, 0.75)])
def test_the_same_answers_count_as_one_says(ties, expected):
  # Of the four pairs with different h two have the same answers.
  found = ranking.degree_of_agreement(
    [[2.0], [2.0], [1.0], [1.0]], [[1.0], [1.0], [1.0], [0.0]], ties=ties
  )
  np.testing.assert_array_equal(found.num_pairs, [4])
  assert found.mean == expected


def test_across_clients_users_of_the_same_client_are_no_pair():
  hidden, answers = [[3.0], [2.0], [1.0]], [[1.0], [2.0], [1.5]]
  # Alone the second and the third user agree, and they are of two clients.
  found = ranking.degree_of_agreement(
    hidden, answers, across_clients=['north', 'north', 'south']
  )
  np.testing.assert_array_equal(found.num_pairs, [2])
  assert found.mean == 0.5
  alone = ranking.degree_of_agreement(
    hidden, answers, across_clients=['north'] * 3
  )
  assert math.isnan(alone.mean)


@pytest.mark.parametrize('ties', [0.0, 0.5])
@pytest.mark.parametrize('across', [False, True])
def test_all_pairs_are_counted(across, ties):
  random = random_bits.generator('agreement')
  for size in (1, 2, 7, 40):
    # Few values, so that many are the same.
    hidden = random.integers(-2, 3, [size, 4]).astype(float)
    answers = random.integers(0, 4, [size, 4]).astype(float)
    answers[random.uniform(size=[size, 4]) < 0.2] = np.nan
    clients = random.integers(10, 13, size)
    found = ranking.degree_of_agreement(
      hidden,
      answers,
      across_clients=clients.tolist() if across else None,
      ties=ties,
    )
    shares, pairs = zip(
      *(
        _loop(hidden[:, k], answers[:, k], clients if across else None, ties)
        for k in range(4)
      ),
      strict=True,
    )
    np.testing.assert_allclose(found.by_attribute, shares, rtol=1e-12)
    np.testing.assert_array_equal(found.num_pairs, pairs)
    if any(pairs):
      assert found.mean == pytest.approx(np.nanmean(shares))


# ---- NDCG --------------------------------------------------------------------


def test_ndcg_as_printed():
  # Discounts are 1, 1 / (log2(2) + 1) = 1 / 2, and 1 / (log2(3) + 1).
  third = 1 / (math.log2(3) + 1)
  found = ranking.ndcg(
    [[3.0, 2.0, 1.0]], np.array([[0.2, 0.9, 0.5]]), shift=False
  )
  expected = (2 + 1 / 2 + 3 * third) / (3 + 2 / 2 + third)
  assert found.mean == pytest.approx(expected)
  # Shifted, the gains are 2, 1 and 0.
  found = ranking.ndcg([[3.0, 2.0, 1.0]], np.array([[0.2, 0.9, 0.5]]))
  assert found.mean == pytest.approx((1 + 2 * third) / (2 + 1 / 2))


def test_negative_characteristics_leave_the_unit_interval_unless_shifted():
  # Printed, a perfect order has 1, and a worse one may have more.
  hidden, worst = np.array([[-1.0, -2.0]]), np.array([[1.0, 2.0]])
  assert ranking.ndcg(hidden, -worst, shift=False).mean == 1.0
  assert ranking.ndcg(hidden, worst, shift=False).mean == pytest.approx(1.25)
  assert ranking.ndcg(hidden, -worst).mean == 1.0
  assert ranking.ndcg(hidden, worst).mean == 0.5


def test_attributes_with_the_same_prediction_share_their_discounts():
  # Gains 1 and 0 at places with the discounts 1 and 1 / 2, in either order.
  found = ranking.ndcg([[5.0, 4.0]], np.array([[0.7, 0.7]]))
  assert found.mean == pytest.approx(0.75)


def test_attributes_without_prediction_and_users_with_nothing_are_left_out():
  found = ranking.ndcg(
    [[1.0, 9.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]],
    np.array([[0.9, _NAN, 0.1], [0.1, 0.2, 0.3], [_NAN, _NAN, _NAN]]),
  )
  np.testing.assert_array_equal(found.by_user, [0.5, _NAN, _NAN])
  assert found.mean == 0.5
  assert math.isnan(ranking.ndcg(np.ones([1, 2]), np.ones([1, 2])).mean)


def test_shifted_ndcg_lies_between_none_and_one_and_follows_the_loop():
  random = random_bits.generator('ndcg')
  hidden = random.normal(size=[50, 19])
  predicted = random.normal(size=[50, 19])
  found = ranking.ndcg(hidden, predicted)
  assert (found.by_user > 0).all() and (found.by_user <= 1).all()
  np.testing.assert_allclose(
    found.by_user, ranking.ndcg(hidden + 7.0, predicted).by_user
  )
  for user in range(50):
    gains = hidden[user] - hidden[user].min()
    sums = []
    for order in (np.argsort(-predicted[user]), np.argsort(-gains)):
      sums.append(
        sum(gains[k] / (math.log2(p + 1) + 1) for p, k in enumerate(order))
      )
    assert found.by_user[user] == pytest.approx(sums[0] / sums[1])


# ---- similarity --------------------------------------------------------------


def test_dissimilarity_is_the_sum_of_scikit_learns_distances():
  random = random_bits.generator('similarity')
  components = {f'client {i}': random.normal(size=[7, 4]) for i in range(10)}
  components['client 3'][2] = 0.0
  components['client 4'][2] = 0.0
  expected = np.mean(
    [
      metrics.pairwise.cosine_distances(
        [vectors[k] for vectors in components.values()]
      ).sum()
      for k in range(7)
    ]
  )
  assert similarity.dissimilarity(components) == pytest.approx(expected)


# ---- ratings -----------------------------------------------------------------


def test_the_exact_auc_is_a_share_of_pairs():
  # The pairs of a wrong and a right answer: 0.5 against 0.8 and against 0.5,
  # 0.2 against both; as two clients.
  found = measures.exact_auc(
    [np.array([0.0, 1.0]), np.array([1.0, 0.0])],
    [np.array([0.5, 0.5]), np.array([0.8, 0.2])],
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
def test_where_there_is_nothing_to_compare_auc_is_no_number(
  answers, predictions
):
  found = measures.exact_auc([np.array(answers)], [np.array(predictions)])
  assert math.isnan(found)
  assert math.isnan(measures.exact_auc([], []))
