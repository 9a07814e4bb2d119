"""Popularity and neighbours of items score as sums over users by hand do."""

import numpy as np

from tasks.movielens import central_rankings

# Items 0 and 1 have the same two users, 2 shares one with them, 3 has none.
_TRAIN = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0]], np.float32)


def test_popularity_counts_users() -> None:
  score = central_rankings.popularity(_TRAIN)
  np.testing.assert_array_equal(score(_TRAIN[:2]), [[2, 2, 2, 0]] * 2)


def test_neighbours_are_shrunk_cosines_of_the_nearest() -> None:
  known = np.array([[1, 0, 1, 0]], np.float32)
  both = _TRAIN.T @ _TRAIN
  score = central_rankings.item_neighbours(both, 3, 1.0)
  # 2 / (2 + 1) between 0 and 1, 1 / (2 + 1) between 2 and either.
  np.testing.assert_allclose(score(known), [[1 / 3, 1, 1 / 3, 0]], 1e-6)
  score = central_rankings.item_neighbours(both, 1, 0.0)
  # Of item 0 only item 1 counts; of item 2 both, which are equally near.
  np.testing.assert_allclose(score(known), [[0.5, 1.5, 0, 0]])


def test_held_out_items_are_ranked_among_unseen_ones() -> None:
  """User 0 misses item 2, below nothing; user 2 misses item 0 of three ties."""
  found = central_rankings.measure(
    lambda known: np.array([[9, 9, 3, 1], [4, 4, 9, 4]])[: len(known)],
    _TRAIN[[0, 2]],
    np.array([2, 0]),
  )
  first_three = 1 / np.log2(np.arange(3) + 2)
  assert found['full_hit_rate_10'] == 1.0
  np.testing.assert_allclose(
    found['full_ndcg_10'], (1 + first_three.mean()) / 2, atol=1e-4
  )
