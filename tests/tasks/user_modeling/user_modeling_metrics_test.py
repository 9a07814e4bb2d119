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


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'answer': np.zeros(3)}, r'answers \(3,\) .* row with the attributes'),
    ({'attributes': np.zeros([3, 1], int)}, r'attributes \(3, 1\)'),
    ({'user': np.array([0, 5])}, 'record 1 is of user 5, .* from 0 to 3'),
    ({'user': np.array([-1, 0])}, 'record 0 is of user -1'),
    (
      {'attributes': np.array([[-1, 1], [0, 2]])},
      'record 1 is of attribute 2, .* from 0 to 1',
    ),
  ],
)
def test_records_that_do_not_fit_are_refused(changed, message):
  arguments = {
    'user': np.array([0, 1]),
    'attributes': np.zeros([2, 1], int),
    'answer': np.zeros(2),
    'num_users': 4,
    'num_attributes': 2,
    **changed,
  }
  with pytest.raises(AnalysisError, match=message):
    ranking.mean_answers(**arguments)


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


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (([[1.0]], [[1.0, 2.0]]), r'shape \(1, 1\), and answers of shape \(1, 2\)'),
    (([[1.0], [_NAN]], [[1.0], [1.0]]), 'user 1 are not finite. The run div'),
  ],
)
@pytest.mark.parametrize('metric', [ranking.degree_of_agreement, ranking.ndcg])
def test_what_cannot_be_ranked_is_refused(metric, arguments, message):
  message = message.replace(
    'answers', 'predictions' if metric is ranking.ndcg else 'answers'
  )
  with pytest.raises(AnalysisError, match=message):
    metric(*map(np.array, arguments))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'ties': 1.5}, 'ties=1.5. A pair with the same answers'),
    ({'across_clients': ['a']}, '2 users, but the clients of 1'),
  ],
)
def test_what_agreement_cannot_do_is_refused(options, message):
  with pytest.raises(AnalysisError, match=message):
    ranking.degree_of_agreement(np.ones([2, 1]), np.ones([2, 1]), **options)


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


def test_dissimilarity_adds_up_distances_of_all_ordered_pairs():
  # Right angles in the first attribute, opposite directions in the second: of
  # each of the two ordered pairs (1 + 2) / 2.
  found = similarity.dissimilarity(
    {
      'north': np.array([[1.0, 0.0], [3.0, 0.0]]),
      'south': np.array([[0.0, 2.0], [-1.0, 0.0]]),
    }
  )
  assert found == pytest.approx(3.0)


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


@pytest.mark.parametrize(
  ('components', 'message'),
  [
    ({}, 'there is no client'),
    ({'one': np.ones(3)}, r"of client 'one' has the shape \(3,\)"),
    (
      {'one': np.ones([3, 2]), 'two': np.ones([4, 2])},
      r"of client 'two' has the shape \(4, 2\)",
    ),
    ({'one': np.full([1, 1], np.inf)}, "of client 'one' is not finite"),
  ],
)
def test_components_that_do_not_compare_are_refused(components, message):
  with pytest.raises(AnalysisError, match=message):
    similarity.dissimilarity(components)


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
