"""New users, measured by how many examples they have given."""

import collections
import math

import numpy as np
import pytest

from tests.support import planted
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.data import packing
from tff_partial.data.examples import ClientDataError
from tff_partial.phases import Phase
from tff_partial.phases import sgd
from tff_partial.training import evaluation_sets

_SIZES = (0, 5)
_RATE = 0.05


@pytest.fixture(scope='module', name='curve')
def fixture_curve():
  """New users' metrics by number of examples, and what they follow from."""
  model = planted.factorization(planted.constant_user(0.0))
  table = np.random.default_rng(1).normal(
    size=[planted.NUM_ITEMS, planted.NUM_FACTORS]
  )
  table = table.astype(np.float32)
  weights = planted.as_model_weights({'items/embeddings': table})
  users = planted.rate({'ann': 9, 'bob': 12, 'cid': 5, 'dot': 1})
  with runtimes.native():
    measured = evaluation_sets.measure_by_support(
      lambda split: algorithms.build_furl_eval(
        model,
        split=split,
        personalise=Phase(optimizer=sgd(_RATE), batch_size=1),
      ),
      weights,
      packing.pack(
        users, collections.OrderedDict(model.example_spec), min_examples=1
      ),
      _SIZES,
    )
  return measured, table, users


@pytest.mark.slow
def test_the_curve_by_hand(curve):
  measured, table, users = curve
  assert list(measured) == list(_SIZES)
  for size, metrics in measured.items():
    errors = []
    for user in ('ann', 'bob'):
      vectors, ratings = table[users[user]['x']], users[user]['y']
      own = np.zeros(planted.NUM_FACTORS)
      for vector, rating in zip(vectors[:size], ratings[:size], strict=True):
        own -= _RATE * 2 * (vector @ own - rating) * vector
      errors.extend(vectors[5:] @ own - ratings[5:])
    # The others have nothing after their fifth rating.
    assert metrics['num_clients'] == 2
    assert metrics['num_examples'] == len(errors) == 4 + 7
    assert metrics['rmse'] == pytest.approx(
      math.sqrt(np.mean(np.square(errors))), rel=1e-5
    )
    assert set(metrics['per_client']) == {'loss', 'rmse'}


def test_a_negative_size_is_refused():
  with pytest.raises(ClientDataError, match=r'first\(-1, query_from=3\)'):
    evaluation_sets.measure_by_support(lambda split: None, None, None, [3, -1])
