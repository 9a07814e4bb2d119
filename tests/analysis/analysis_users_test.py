"""Users as maps and matrices: scores that can be redone by hand."""

import matplotlib
from matplotlib import image
import numpy as np
import pytest

from tff_partial.analysis import confusion
from tff_partial.analysis import embeddings
from tff_partial.analysis.errors import AnalysisError


def _clusters(number: int = 20, distance: float = 20.0) -> embeddings.Users:
  """Two clouds of users."""
  draw = np.random.default_rng(0).normal(size=[2 * number, 5])
  draw[number:, 0] += distance
  return embeddings.Users(draw, ['cats'] * number + ['dogs'] * number)


# ---- maps of embeddings ------------------------------------------------------


def test_the_silhouette_by_hand():
  # Users at 0, 1, 4 and 5. The first is 1 from its own and 4.5 from the others
  # on average: (4.5 - 1) / 4.5; the second: (3.5 - 1) / 3.5; and mirrored.
  users = np.array([[0.0], [1.0], [4.0], [5.0]])
  found = embeddings.silhouette(users, ['a', 'a', 'b', 'b'])
  assert found == pytest.approx((3.5 / 4.5 + 2.5 / 3.5) / 2)


def test_clusters_score_high_and_chance_does_not():
  users = _clusters()
  assert embeddings.silhouette(*users) > 0.7
  mixed = np.random.default_rng(1).permutation(users.attribute)
  assert abs(embeddings.silhouette(users.embeddings, mixed)) < 0.1


@pytest.mark.slow
def test_a_map_keeps_clusters(tmp_path):
  backend, path = matplotlib.get_backend(), tmp_path / 'map.png'
  users = _clusters()
  both = {'server': users, 'federated': _clusters(distance=3.0)}
  scores = embeddings.draw(both, path, attribute='pet')
  assert list(scores) == ['server', 'federated']
  assert scores['server'].embeddings == embeddings.silhouette(*users)
  assert scores['server'].map > 0.5
  assert scores['server'].embeddings > scores['federated'].embeddings
  assert min(image.imread(path).shape[:2]) > 300
  assert matplotlib.get_backend() == backend


def test_colours_follow_numbers_and_then_words():
  # '²' is a digit that is no number.
  users = embeddings.Users(np.eye(5), ['10', '²', '9', 'cat', '9'])
  assert list(embeddings._colours({'map': users})) == ['9', '10', 'cat', '²']


@pytest.mark.parametrize(
  'vectors, attribute, expected',
  [
    (np.eye(3), list('aab'), 'at least 4 users'),
    (np.eye(4), list('aaaa'), 'Number of labels is 1'),
    (np.eye(4), list('aab'), 'inconsistent numbers of samples'),
    (np.ones([4, 2]), list('aabb'), 'all 4 embeddings are equal'),
    (np.ones([4]), list('aabb'), r'\[users, size\]'),
    (np.full([4, 2], np.nan), list('aabb'), 'contains NaN'),
  ],
)
def test_what_makes_no_map_is_refused(vectors, attribute, expected, tmp_path):
  path = tmp_path / 'map.png'
  users = {'server': embeddings.Users(vectors, attribute)}
  with pytest.raises(AnalysisError, match=f'server: (?s:.*){expected}'):
    embeddings.draw(users, path, attribute='pet')
  assert not path.exists()


# ---- assignments against the truth -------------------------------------------

_TRUTH = [0, 0, 0, 1, 1, 1, 2, 2]
_ASSIGNED = [2, 2, 1, 1, 1, 1, 0, 2]


def test_users_are_counted():
  found = confusion.confusion(_TRUTH, _ASSIGNED)
  np.testing.assert_array_equal(found.counts, [[0, 1, 2], [0, 3, 0], [1, 0, 1]])
  assert found.num_users == 8
  # The largest classes of the groups have 1, 3 and 2 users.
  assert found.purity == 6 / 8
  # In the group of their number are 0, 3 and 1.
  assert found.accuracy == 4 / 8
  np.testing.assert_allclose(found.shares[0], [0, 1 / 3, 2 / 3])


def test_groups_without_names_are_matched():
  found = confusion.confusion([*_TRUTH, 0], [*_ASSIGNED, 3]).matched()
  # Group 2 stands for sub-population 0, and group 0 for 2; 3 is nobody's.
  assert found.groups == ('0', '1', '2', '3?')
  assert found.counts.tolist() == [[2, 1, 0, 1], [0, 3, 0, 0], [1, 0, 1, 0]]
  assert found.accuracy == 6 / 9 and found.purity == 7 / 9


def test_numbers_come_in_their_order():
  for numbers in ([10, 9, 2], ['10', '9', '2']):
    found = confusion.confusion(numbers, numbers)
    assert found.classes == found.groups == ('2', '9', '10')
    assert found.purity == found.accuracy == 1.0
  # Numbers that read alike are the same name.
  assert confusion.confusion([0.0, 1.0], [0, 1]).accuracy == 1.0


@pytest.mark.slow
def test_matrices_are_drawn(tmp_path):
  path = tmp_path / 'matrix.png'
  found = confusion.confusion(_TRUTH, _ASSIGNED)
  confusion.draw({'SOM': found, 'matched': found.matched()}, path)
  assert min(image.imread(path).shape[:2]) > 300


@pytest.mark.parametrize(
  ('truth', 'assigned', 'expected'),
  [
    ([], [], 'of the same users, at least one'),
    ([1], [1, 2], 'of the same users, at least one'),
    (['a', None], [1, 2], 'truth: missing for 1 of 2 users, first at place 1'),
    ([1, 2], [np.nan, 2], 'assigned: missing for 1 of 2 users'),
    (['a', np.nan], [1, 2], 'truth: missing for 1 of 2 users, first at place'),
  ],
)
def test_what_makes_no_matrix_is_refused(truth, assigned, expected):
  with pytest.raises(AnalysisError, match=expected):
    confusion.confusion(truth, assigned)
