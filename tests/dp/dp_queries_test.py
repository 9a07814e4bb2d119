"""Private sums: the same mechanisms as tensorflow-privacy's, with seeds.

Statistical tests draw with fresh seeds; chance fails them once in 10**9 times.
"""

import collections
import secrets

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf
import tensorflow_privacy as tfp

from tff_partial.dp import dp_queries
from tff_partial.dp import dp_trees

pytestmark = pytest.mark.filterwarnings('ignore:np.find_common_type')

_CHANCE = 1e-9
_CLIP, _NOISE = 3.0, 2.0


def _fresh():
  return tf.constant(
    np.frombuffer(secrets.token_bytes(8), np.int32).astype(np.int32)
  )


def _seed(number):
  return lambda: tf.constant([number, 7])


def _gaussian(seed=_fresh, clip=_CLIP, noise=_NOISE):
  return dp_queries.GaussianSumQuery(clip, noise, seed)


def _adaptive(seed=_fresh, clip=_CLIP, noise=_NOISE, **changed):
  arguments = {
    'quantile': 0.5,
    'learning_rate': 0.2,
    'count_stddev': 5.0,
    'expected_clients': 20.0,
    **changed,
  }
  return dp_queries.AdaptiveClipSumQuery(clip, noise, seed, **arguments)


def _tree(size, seed=_fresh, rounds=100, clip=_CLIP, noise=_NOISE):
  return dp_trees.TreeResidualSumQuery(
    clip, noise, seed, specs=tf.TensorSpec([size]), rounds_per_tree=rounds
  )


def _sum(query, state, records):
  """The records' sum in units, without noise."""
  params = query.derive_sample_params(state)
  total = query.initial_sample_state(records[0])
  for record in records:
    total = query.accumulate_record(params, total, record)
  return total


def _run(query, records, rounds):
  """What is released in each round, and the last state."""
  state, results = query.initial_global_state(), []
  step = tf.function(
    lambda state: query.get_noised_result(_sum(query, state, records), state)[
      :2
    ]
  )
  for _ in range(rounds):
    result, state = step(state)
    results.append(tf.nest.map_structure(np.asarray, result))
  return results, state


def _looks_normal(values, stddev):
  assert stats.kstest(np.ravel(values) / stddev, 'norm').pvalue > _CHANCE


def _look_alike(values, others):
  assert stats.ks_2samp(np.ravel(values), np.ravel(others)).pvalue > _CHANCE


# ---- noise -------------------------------------------------------------------


@pytest.mark.slow
def test_noise_is_normal():
  drawn = dp_queries.standard_normal(_fresh(), [2, 500_000]).numpy()
  _looks_normal(drawn, 1.0)
  one, other = drawn
  assert abs(np.mean(one * other)) < 7.0 / np.sqrt(len(one))
  # Five standard deviations are seldom, but not unheard of.
  many = np.abs(dp_queries.standard_normal(_fresh(), [2**23]).numpy())
  beyond = stats.norm.sf(4.5) * 2.0 * len(many)
  assert abs(np.sum(many > 4.5) - beyond) < 7.0 * np.sqrt(beyond)


def test_noise_has_no_edge(monkeypatch):
  # The smallest bits that can be drawn give the largest noise.
  monkeypatch.setattr(
    dp_queries.random_bits,
    'bits',
    lambda seed, shape: tf.zeros(shape, tf.uint32),
  )
  largest = dp_queries.standard_normal(_fresh(), [1]).numpy()
  np.testing.assert_allclose(largest, np.sqrt(2 * 64 * np.log(2)), rtol=1e-6)


def test_noise_is_the_same_with_xla():
  def draw(seed):
    noised = dp_queries.standard_normal(seed, [10_000])
    return dp_queries.on_grid(noised, 1.0)

  seed = _fresh()
  np.testing.assert_array_equal(
    tf.function(draw)(seed), tf.function(draw, jit_compile=True)(seed)
  )


def test_a_noised_sum_is_on_a_grid_of_the_noise():
  # 2**-20 of the largest power of two that is not above the noise.
  noised = dp_queries.on_grid(tf.constant([0.1, 1e3], tf.double), 3.0)
  steps = noised.numpy() * 2.0**19
  np.testing.assert_array_equal(steps, np.round(steps))
  np.testing.assert_allclose(noised, [0.1, 1e3], atol=2.0**-20)
  assert dp_queries.on_grid(tf.constant(0.1), 0.0) == np.float32(0.1)


# ---- sensitivity -------------------------------------------------------------


_ADVERSARIES = {
  'huge': [3e38, -3e38, 3e38],
  'not a number': [np.nan, 1.0, 1.0],
  'infinite': [np.inf, 1.0, 1.0],
  'minus infinity': [0.0, -np.inf, 0.0],
  'tiny': [1e-45, 0.0, 0.0],
  'empty': [0.0, 0.0, 0.0],
  'just above': [3.0000002, 0.0, 0.0],
}


@pytest.mark.parametrize('kind', _ADVERSARIES)
def test_no_client_moves_a_sum_by_more_than_the_clip(kind):
  adversary = tf.constant(_ADVERSARIES[kind])
  units, _ = dp_queries.to_units(adversary, tf.constant(_CLIP))
  # Whole numbers, so this is no matter of rounding.
  assert sum(int(unit) ** 2 for unit in units.numpy()) <= (2**30) ** 2

  others = [tf.constant([1.0, 2.0, -0.5]), tf.constant([9.0, 1.0, 1.0])]
  query = _gaussian(noise=0.0)
  (without,), _ = _run(query, others, 1)
  (within,), _ = _run(query, [others[0], adversary, others[1]], 1)
  moved = np.linalg.norm(within.astype(np.float64) - without)
  assert np.isfinite(moved) and moved <= _CLIP * (1.0 + 1e-6)
  if kind in ('not a number', 'infinite', 'minus infinity', 'empty'):
    assert moved == 0.0


def test_a_joint_clip_is_of_all_tensors():
  record = {'a': tf.constant([3.0]), 'b': tf.constant([[4.0]])}  # Norm 5.
  units, norm = dp_queries.to_units(record, tf.constant(1.0))
  np.testing.assert_allclose(norm, 5.0)
  np.testing.assert_allclose(units['a'] / 2**30, [0.6], rtol=2e-6)
  np.testing.assert_allclose(units['b'] / 2**30, [[0.8]], rtol=2e-6)
  # One spoilt tensor spoils the record.
  record['a'] = tf.constant([np.nan])
  units, _ = dp_queries.to_units(record, tf.constant(1.0))
  assert not np.any(units['b'])


@pytest.mark.slow
def test_the_order_of_clients_changes_no_bit():
  random = np.random.default_rng()
  records = [
    tf.constant(
      random.normal(size=50) * 10.0 ** random.integers(-6, 6), tf.float32
    )
    for _ in range(12)
  ]
  query = _gaussian(_seed(1))
  one = _run(query, records, 1)[0]
  other = _run(query, records[::-1], 1)[0]
  np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_without_noise_sums_are_those_of_tensorflow_privacy():
  random = np.random.default_rng(0)
  records = [
    tf.constant(random.normal(size=5), tf.float32) * scale
    for scale in (0.1, 1.0, 7.0)
  ]
  theirs = tfp.GaussianSumQuery(_CLIP, 0.0)
  total = _sum(theirs, theirs.initial_global_state(), records)
  for query in (
    _gaussian(noise=0.0),
    _adaptive(noise=0.0),
    _tree(5, noise=0.0),
  ):
    (ours,), _ = _run(query, records, 1)
    np.testing.assert_allclose(ours, total, rtol=3e-6)


# ---- the Gaussian mechanism --------------------------------------------------


def test_gaussian_noise_is_that_of_tensorflow_privacy():
  record = tf.zeros([20_000])
  results, _ = _run(_gaussian(), [record], 2)
  theirs, _ = _run(tfp.GaussianSumQuery(_CLIP, _CLIP * _NOISE), [record], 1)
  for result in results:
    _looks_normal(result, _CLIP * _NOISE)
    _look_alike(result, theirs)


@pytest.mark.slow
def test_rounds_runs_and_tensors_have_noise_of_their_own():
  record = collections.OrderedDict(a=tf.zeros([1000]), b=tf.zeros([1000]))
  results = (
    _run(_gaussian(), [record], 2)[0] + _run(_gaussian(), [record], 1)[0]
  )
  drawn = [leaf for result in results for leaf in result.values()]
  correlation = np.corrcoef(drawn) - np.eye(len(drawn))
  assert np.max(np.abs(correlation)) < 7.0 / np.sqrt(1000)


@pytest.mark.slow
@pytest.mark.parametrize(
  'make', [_gaussian, _adaptive, lambda seed: _tree(4, seed, rounds=3)]
)
def test_a_seed_and_a_state_say_all_noise(make):
  records = [tf.constant([1.0, 2.0, 3.0, 4.0])]
  results, _ = _run(make(_seed(1)), records, 7)
  again, _ = _run(make(_seed(1)), records, 7)
  other, _ = _run(make(_seed(2)), records, 7)
  np.testing.assert_array_equal(results, again)
  assert not np.any(np.equal(results, other))
  assert len(np.unique(results)) == np.size(results)


# ---- adaptive clipping -------------------------------------------------------


@pytest.mark.slow
def test_a_clip_is_adapted_as_by_hand():
  query = _adaptive(noise=0.0, count_stddev=0.0, expected_clients=4.0)
  records = [tf.constant([norm]) for norm in (1.0, 2.0, 4.0, 5.0)]
  _, state = _run(query, records, 1)
  # Half of the clients are below 3, as they shall be.
  np.testing.assert_allclose(state.clip, 3.0, rtol=1e-6)
  np.testing.assert_allclose(state.share_clipped, 0.5)
  _, state = _run(query, records[2:] * 2, 1)
  np.testing.assert_allclose(state.clip, 3.0 * np.exp(0.2 * 0.5), rtol=1e-6)
  np.testing.assert_allclose(state.share_clipped, 1.0)


# ---- trees -------------------------------------------------------------------


@pytest.mark.slow
def test_tree_noise_is_that_of_tensorflow_privacy():
  size, rounds = 4000, 8
  record = tf.zeros([size])
  ours, _ = _run(_tree(size), [record], rounds)
  theirs = tfp.TreeResidualSumQuery.build_l2_gaussian_query(
    _CLIP, _NOISE, tf.TensorSpec([size])
  )
  theirs, _ = _run(theirs, [record], rounds)
  for one, other in zip(ours, theirs, strict=True):
    _look_alike(one, other)
  for one, other in zip(np.cumsum(ours, 0), np.cumsum(theirs, 0), strict=True):
    _look_alike(one, other)


@pytest.mark.slow
def test_a_rounds_noise_in_a_tree_is_known():
  # A leaf; then half the sum of two leaves and a node's own noise, all divided
  # by 3/2, less the first leaf: (-2/3, 1/3, 2/3) times independent noise.
  np.testing.assert_allclose(
    dp_trees.residual_stddevs(3), [1.0, np.sqrt(4 + 1 + 4) / 3]
  )
  size = 4000
  query = _tree(size)
  results, state = _run(query, [tf.zeros([size])], 16)
  for number, result in enumerate(results):
    state = state._replace(round=tf.constant(number))
    measured = query.measure(state, state, tf.constant(result))
    _looks_normal(result, measured['noise_stddev'].numpy())


@pytest.mark.slow
def test_a_new_tree_begins():
  size = 4000
  results, state = _run(_tree(size, rounds=2), [tf.zeros([size])], 4)
  assert state.round == 0 and not np.any(state.previous)
  # The second tree is as the first, but independent.
  sums = results[0] + results[1], results[2] + results[3]
  _look_alike(*sums)
  assert abs(np.corrcoef(sums)[0, 1]) < 7.0 / np.sqrt(size)


# ---- measurements ------------------------------------------------------------


def test_the_signal_is_found_in_the_noised_sum():
  size = 40_000
  signal = tf.fill([size], 3.0 / np.sqrt(size))  # Of norm 3.
  query = _gaussian(clip=3.0, noise=0.01)
  (result,), state = _run(query, [signal] * 2, 1)
  measured = query.measure(state, state, tf.constant(result))
  np.testing.assert_allclose(measured['noise_stddev'], 0.03, rtol=1e-6)
  # The sum's norm is 6, the noise's is 0.03 * 200 = 6.
  np.testing.assert_allclose(measured['signal_to_noise'], 1.0, atol=0.05)
