"""Exact solves of implicit feedback are NumPy's, and rank what is liked."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial.contexts import Batch
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import ranking_metrics
from tff_partial.templates import implicit_factors as factors
from tff_partial.templates import ranking

_ITEMS, _FACTORS = planted.NUM_ITEMS, 3
_COVERAGE = ranking_metrics.CatalogueCoverage(_ITEMS, 11)
_WEIGHTING = factors.Weighting(unobserved=0.3, ridge=0.05)


def _model() -> Any:
  return factors.build_model(_ITEMS, _FACTORS)


def _clients(counts: dict[str, int]) -> Any:
  """Users with some items each, all different."""
  draw = np.random.default_rng(0)
  return {
    user: {
      'x': draw.permutation(_ITEMS)[:count].astype(np.int32),
      'y': np.ones(count, np.float32),
    }
    for user, count in counts.items()
  }


def _solved(table: Any, labels: Any) -> Any:
  """Each vector that minimizes the weighted error over all of a table.

  Labels are NaN for what is not observed.
  """
  w, found = _WEIGHTING.unobserved, []
  for row in labels:
    weight = np.where(np.isnan(row), w, 1.0)
    left = (table * weight[:, None]).T @ table
    left += _WEIGHTING.ridge * weight.sum() * np.eye(_FACTORS)
    found.append(np.linalg.solve(left, table.T @ np.nan_to_num(row)))
  return np.array(found)


@pytest.mark.parametrize(
  'labels', [[1.0], pytest.param([1.0, 0.0, 0.5], marks=pytest.mark.slow)]
)
def test_a_round_is_that_of_numpy(labels) -> None:
  process = algorithms.build_fed_ials(_model(), weighting=_WEIGHTING)
  clients = _clients({'a': 9, 'b': 4, 'c': 1, 'd': 20})
  for fields in clients.values():
    fields['y'] = np.resize(np.float32(labels), len(fields['y']))
  state = process.initialize()
  # The Gram matrix of the first round is a guess; of the second, the items'.
  for _ in range(2):
    before = planted.global_weights(process, state)['scores/item']
    cohort = planted.cohort_of(process, clients, 1)
    state = planted.run(process, cohort, state).state
  after = planted.global_weights(process, state)
  table = np.full([len(clients), _ITEMS], np.nan)
  for row, fields in zip(table, clients.values(), strict=True):
    row[fields['x']] = fields['y']
  items = _solved(_solved(before.astype(float), table), table.T)
  np.testing.assert_allclose(after['scores/item'], items, atol=1e-4)
  np.testing.assert_allclose(after['scores/gram'], items.T @ items, atol=1e-4)


@pytest.mark.slow
def test_a_repeated_interaction_is_that_of_a_greater_weight() -> None:
  """Three times the same item: its weight is 3, its wanted score still 1."""
  evaluation = algorithms.build_fed_ials_eval(_model(), weighting=_WEIGHTING)
  table = np.eye(_ITEMS, _FACTORS, dtype=np.float32)
  w, ridge = _WEIGHTING
  x = np.zeros(6, np.int32)
  clients = {'a': {'x': x, 'y': np.ones(6, np.float32)}}
  weights = planted.as_model_weights(
    {'scores/item': table, 'scores/gram': table.T @ table}
  )
  found = planted.evaluate(evaluation, weights, clients).metrics
  score = 3 / (3 + ridge * (3 + w * (_ITEMS - 1)))
  assert found['loss'] == pytest.approx((1 - score) ** 2, rel=1e-3)


@pytest.mark.slow
def test_where_no_client_counts_all_stays_as_it_is() -> None:
  process = algorithms.build_fed_ials(_model(), memory=0.5)
  once = planted.run(
    process, planted.cohort_of(process, _clients({'a': 9, 'b': 4}), 1)
  ).state
  twice = process.next(once, [], []).state
  planted.assert_same_weights(process, twice, once)
  planted.assert_same(
    process.get_server_state(twice), process.get_server_state(once)
  )


@pytest.mark.slow
def test_a_user_ranks_what_others_like_with_its_items() -> None:
  """Two kinds of users like two halves of the items; one item is held out."""
  draw = np.random.default_rng(1)
  clients = {}
  for user in range(40):
    half = np.arange(14) + 14 * (user % 2)
    x = draw.permutation(half)[:8].astype(np.int32)
    clients[f'user {user}'] = {
      'x': x,
      'y': np.ones(8, np.float32),
      'is_query': np.array([0] * 7 + [1], np.int32),
    }
  split = splits.by_mark()
  known = {
    user: {name: values[:7] for name, values in fields.items()}
    for user, fields in clients.items()
  }
  process = algorithms.build_fed_ials(_model(), weighting=_WEIGHTING)
  with runtimes.cohort(jit=False):
    state, _ = planted.trained(
      process,
      {u: {k: f[k] for k in ('x', 'y')} for u, f in known.items()},
      [list(known)] * 6,
      capacities=[8],
    )
  measuring = ranking.build_ranking_eval(
    algorithms.build_fed_ials_eval(_model(), weighting=_WEIGHTING, split=split),
    _ITEMS,
    split=split,
  )
  weights = process.get_model_weights(state)
  found = planted.evaluate(measuring, weights, clients).metrics
  # Seven unseen items of the user's own half come before the other half's.
  assert found['full_hit_rate_10'] == 1.0
  assert found['full_mrr_10'] > 1.5 / 7
  untrained = process.get_model_weights(process.initialize())
  found = planted.evaluate(measuring, untrained, clients).metrics
  assert found['full_hit_rate_10'] < 0.8


def _build_biases() -> tf.keras.Model:
  item = tf.keras.Input([], dtype=tf.int32)
  bias = tf.keras.layers.Embedding(_ITEMS, 1, name='bias')(item)
  return tf.keras.Model(item, tf.keras.layers.Reshape([])(bias))


@pytest.mark.slow
@pytest.mark.parametrize('batch_size', [1, 8])
def test_ranks_of_known_scores(batch_size) -> None:
  """Each item's score is its number, but the last six are tied."""
  split = splits.by_mark()
  model = planted.factorization(_build_biases, local=None)
  measuring = ranking.build_ranking_eval(
    algorithms.build_fed_avg_eval(model, split=split),
    _ITEMS,
    split=split,
    metrics=lambda: [
      ranking_metrics.HitRate(3),
      ranking_metrics.NDCG(3),
      ranking_metrics.HitRate(1, 1),
      ranking_metrics.CatalogueCoverage(_ITEMS, 10),
    ],
    batch_size=batch_size,
  )
  scores = np.minimum(np.arange(_ITEMS), 23).astype(np.float32)
  weights = planted.as_model_weights({'bias/embeddings': scores[:, None]})
  clients = {
    # 28 and 27 are seen: 26 shares the ranks 0 to 3 with 23, 24 and 25. That a
    # comes back to 26 and to 28 makes no difference.
    'a': {'x': [28, 28, 27, 26, 26], 'is_query': [0, 1, 0, 1, 1]},
    # 22 has the six above it, and 25 ties with five others.
    'b': {'x': [0, 22, 25], 'is_query': [0, 1, 1]},
  }
  clients = {
    name: {
      'x': np.int32(fields['x']),
      'y': np.ones(len(fields['x']), np.float32),
      'is_query': np.int32(fields['is_query']),
    }
    for name, fields in clients.items()
  }
  found = planted.evaluate(measuring, weights, clients)
  shared = 1 + 1 / np.log2(3) + 1 / 2
  of_two = 1 + 1 / np.log2(3)
  wanted = {
    'full_hit_rate_3': [3 / 4, (0 + 3 / 6) / 2],
    'full_ndcg_3': [shared / 4, shared / 6 / of_two],
    # One is drawn of 26 others, of which 3 are tied with a's 26, 5 above b's
    # 22, and 5 tied with its 25.
    'hit_rate_1': [(23 + 3 / 2) / 26, ((26 - 5) / 26 + (21 + 5 / 2) / 26) / 2],
  }
  for name, values in wanted.items():
    for client, value in zip(found.per_client, values, strict=True):
      assert float(client[name]) == pytest.approx(value, abs=1e-6), name
    pooled = (values[0] + 2 * values[1]) / 3
    assert found.metrics[name] == pytest.approx(pooled, abs=1e-6)
  # a is shown 17 to 26, and b 23 to 28 and 19 to 22.
  coverage = found.metrics['catalogue_coverage_10']
  assert coverage == pytest.approx(12 / _ITEMS)


@pytest.mark.slow
def test_replaced_predictions_are_not_ranked() -> None:
  model = planted.factorization(_build_biases, local=None)
  split = splits.by_mark()
  measuring = ranking.build_ranking_eval(
    algorithms.build_fed_avg_eval(model, split=split), _ITEMS, split=split
  )
  with pytest.raises(SettingError, match='replaces the predictions'):
    ranking.build_ranking_eval(measuring, _ITEMS, split=split)


def test_users_are_shown_unseen_items_alone() -> None:
  """Also one who has fewer of them than are kept."""
  catalogue = ranking._Catalogue(4, None, None, lambda weights: weights, 3)
  item = {'x': tf.constant([3]), 'y': tf.ones([1]), 'weight': tf.ones([1])}
  client = ClientContext(
    *(None,) * 7,
    computed={
      'ranking_seen': tf.constant([True, False, True, False]),
      'ranking_held_out': tf.constant([False, False, False, True]),
      'ranking_scores': tf.constant([4.0, 3.0, 2.0, 1.0]),
    },
    batch=Batch.of(item, tf.constant([True]), None),
  )
  top = catalogue.rank(client)['top']
  assert top.numpy().tolist() == [[1, 3, -1]]
  # A score that is not known may be a larger one.
  client.computed['ranking_scores'] = tf.constant([4.0, np.nan, 2.0, 1.0])
  assert catalogue.rank(client)['all']['above'] == 1.0
  coverage = ranking_metrics.CatalogueCoverage(4, 3)
  coverage.update_state(None, {'top': top})
  assert coverage.result() == 2 / 4


@pytest.mark.parametrize(
  ('num_items', 'settings', 'message'),
  [
    (_ITEMS + 1, {}, 'num_items=.* rows'),
    (_ITEMS, {'item': 'film'}, 'no input'),
    (9, {}, 'num_top=10'),
    (_ITEMS, {'metrics': lambda: [_COVERAGE]}, 'num_top=11'),
  ],
)
def test_a_catalogue_that_cannot_be_scored_is_refused(
  num_items, settings, message
) -> None:
  model = planted.factorization(_build_biases, local=None)
  split = splits.by_mark()
  evaluation = algorithms.build_fed_avg_eval(model, split=split)
  with pytest.raises(SettingError, match=message):
    ranking.build_ranking_eval(evaluation, num_items, split=split, **settings)


@pytest.mark.parametrize('numbers', [(0, 4), (9, 0)])
def test_negatives_are_drawn_from_some_items(numbers) -> None:
  with pytest.raises(
    SettingError, match='NegativeItems: .* at least 1, found 0'
  ):
    ranking.NegativeItems(*numbers)


@pytest.mark.parametrize(
  'wrong', [{'memory': 1.0}, {'weighting': factors.Weighting(1.0)}]
)
def test_impossible_settings_are_refused(wrong) -> None:
  with pytest.raises(SettingError, match='less than 1'):
    algorithms.build_fed_ials(_model(), **wrong)


def test_impossible_weights_are_refused_in_evaluation_too() -> None:
  with pytest.raises(SettingError, match='less than 1'):
    algorithms.build_fed_ials_eval(_model(), weighting=factors.Weighting(2.0))


def test_other_models_are_refused() -> None:
  with pytest.raises(SettingError, match='implicit_factors.build_model'):
    algorithms.build_fed_ials(planted.factorization())
