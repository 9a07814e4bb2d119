"""Private federated ALS and DP-ALS: what clients send, and what it costs."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.support import planted
import tff_partial
from tff_partial import algorithms
from tff_partial.algorithms import dp_als
from tff_partial.checks import privacy_audit
from tff_partial.dp import clipping
from tff_partial.dp import privacy
from tff_partial.dp import privacy_plans
from tff_partial.errors import PrivacyError
from tff_partial.errors import SettingError
from tff_partial.templates import private_items
from tff_partial.templates import rating_posteriors

_ITEMS, _LEARNED, _KNOWN = planted.NUM_ITEMS, 2, 3
_SIZE = 1 + _LEARNED + _KNOWN
_ATTRIBUTES = np.random.default_rng(5).random([_ITEMS, _KNOWN])
_COUNTS = {'a': 9, 'b': 4, 'c': 1, 'd': 20}
pytestmark = pytest.mark.usefixtures('in_cohorts')


def _model(**options: Any) -> Any:
  return rating_posteriors.build_model(_ITEMS, _LEARNED + _KNOWN, **options)


def _process(
  noise: float = 0.0,
  *,
  build: Any = algorithms.build_fed_als_private,
  clip: float = 1.0,
  columns: int = 1 + _LEARNED,
  **options: Any,
) -> Any:
  """Four clients, and a server that keeps all that it learns of them."""
  mean = privacy.private_mean(
    clipping.FixedClip(clip),
    noise_multiplier=noise,
    clients_per_round=4,
    **options,
  )
  canaries = privacy_audit.Canaries(_ITEMS * columns + 1, 0)
  return build(
    _model(),
    aggregation=tff_partial.Aggregation(aggregator=canaries.watched(mean)),
    attributes=_ATTRIBUTES,
  )


def _states(process: Any, clients: Any, rounds: int) -> list[Any]:
  cohort = planted.cohort_of(process, clients, 1)
  states = [process.initialize()]
  for _ in range(rounds):
    states.append(planted.run(process, cohort, states[-1]).state)
  return states


def _released(state: Any) -> tuple[np.ndarray, np.ndarray]:
  held = state.client_work['server']
  return np.asarray(held['count']), np.asarray(held['estimate'])


# ---- rounds, by hand ---------------------------------------------------------


@pytest.mark.slow
def test_rounds_are_those_of_numpy():
  """A count, and then a sum of bounded residuals and a Newton step by it."""
  process = _process(clip=3.0)
  clients = planted.rate(_COUNTS)
  states = _states(process, clients, 2)
  named = planted.global_weights(process, states[1])
  item = named['ratings/item'].astype(np.float64)
  np.testing.assert_allclose(
    item[:, 1 + _LEARNED :], private_items.TASTE_SCALE * _ATTRIBUTES, rtol=1e-6
  )
  noise = 0.8
  count, total = np.zeros(_ITEMS), np.zeros([_ITEMS, 1 + _LEARNED])
  precision = np.diag([5.0, *np.ones(_SIZE - 1)])
  for fields in clients.values():
    mine = np.bincount(fields['x'], minlength=_ITEMS) / len(fields['x']) ** 0.5
    count += mine * min(0.99 / np.linalg.norm(mine), 1.0)
  weight = np.maximum(count, 2.0) ** -0.35
  weight /= (
    (np.maximum(count, 2) * weight**2).sum() / np.maximum(count, 2).sum()
  ) ** 0.5
  for fields in clients.values():
    x, y = fields['x'], fields['y'].astype(np.float64)
    a = item[x].copy()
    a[:, 0] = 1.0
    covariance = np.linalg.inv(a.T @ a / noise + precision)
    z = covariance @ a.T @ (y - item[x, 0]) / noise
    error = y - item[x, 0] - a @ z
    slopes = error[:, None] * z[: 1 + _LEARNED]
    slopes -= a @ covariance[:, : 1 + _LEARNED]
    slopes[:, 0] = error
    mine = np.zeros_like(total)
    np.add.at(mine, x, weight[x, None] * slopes / len(x) ** 0.5)
    total += mine * min(0.99 / np.linalg.norm(mine), 1.0)
  divisor = np.maximum(count, 0.3) * weight
  wanted = item[:, : 1 + _LEARNED] + total / divisor[:, None]
  found_count, found = _released(states[2])
  np.testing.assert_allclose(found_count, count, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_noisy_equations_are_those_of_numpy():
  """DP-ALS: small eigenvalues are raised, and the ridge follows the noise."""
  generator = np.random.default_rng(3)
  matrix = generator.normal(size=[_ITEMS, 3, 3])
  matrix += matrix.transpose(0, 2, 1)
  right = generator.normal(size=[_ITEMS, 3])
  rows, columns = np.tril_indices(3)
  sums = np.concatenate([matrix[:, rows, columns], 2.0 * right], 1)
  items = private_items.PrivateItems(_ITEMS, 2)
  zeros = tf.zeros([_ITEMS, 3])
  _, found, _ = dp_als._solved(items, {}, zeros, sums, 1.0, 1.0, 1.0)
  for each, value, one in zip(matrix, right, found, strict=True):
    values, vectors = np.linalg.eigh(each)
    assert values[0] < 1.7
    each = (vectors * (np.maximum(values, 1.7) + 2.05)) @ vectors.T
    wanted = np.linalg.solve(each, value)
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rounds_of_dp_als_are_those_of_numpy():
  process = _process(build=algorithms.build_dp_als, columns=9, clip=3.0)
  clients = planted.rate(_COUNTS)
  first, second = _states(process, clients, 2)[1:]
  item, found = (
    planted.global_weights(process, state)['ratings/item'].astype(np.float64)
    for state in (first, second)
  )
  learned = 1 + _LEARNED
  left, right = (np.zeros([_ITEMS, *each]) for each in ([3, 3], [3]))
  weights = private_items.PrivateItems(_ITEMS, 0).weights(_released(first)[0])
  for fields in clients.values():
    x, y = fields['x'], fields['y'].astype(np.float64)
    a = item[x].copy()
    a[:, 0] = 1.0
    precision = np.diag([5.0, *np.ones(_SIZE - 1)])
    z = np.linalg.solve(a.T @ a / 0.8 + precision, a.T @ (y - item[x, 0]) / 0.8)
    user = np.array([1.0, *z[1:learned]])
    labels = y - z[0] - a[:, learned:] @ z[learned:]
    mine = np.zeros_like(left), np.zeros_like(right)
    by_item = np.asarray(weights)[x] / len(x) ** 0.5
    np.add.at(mine[0], x, by_item[:, None, None] * np.outer(user, user))
    np.add.at(mine[1], x, (by_item * labels)[:, None] * user)
    norm = np.sqrt((np.tril(mine[0]) ** 2).sum() + 4.0 * (mine[1] ** 2).sum())
    left += min(0.99 / norm, 1.0) * mine[0]
    right += min(0.99 / norm, 1.0) * mine[1]
  wanted = np.linalg.solve(left + 0.05 * np.eye(learned), right[..., None])
  np.testing.assert_allclose(
    found[:, :learned], wanted[..., 0], rtol=1e-3, atol=1e-4
  )


# ---- what it costs -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  'build, columns',
  [
    (algorithms.build_fed_als_private, 1 + _LEARNED),
    (algorithms.build_dp_als, 9),
  ],
)
def test_one_extreme_user_moves_all_that_leaves_by_one_clip(build, columns):
  clip = 2.0
  process = _process(clip=clip, build=build, columns=columns)
  clients = planted.rate(_COUNTS)
  extreme = {
    'x': np.arange(_ITEMS, dtype=np.int32),
    'y': np.full(_ITEMS, 1e4, np.float32),
  }
  state = process.initialize()
  for _ in range(2):
    found = [
      planted.run(process, planted.cohort_of(process, each, 1), state).state
      for each in (clients, {**clients, 'extreme': extreme})
    ]
    one, other = (_sums(state, each, clip) for each in found)
    assert 0.5 < np.linalg.norm(one - other) < 1.0 + 1e-5
    state = found[0]


def _sums(before: Any, after: Any, clip: float) -> np.ndarray:
  """All numbers of the released sum of messages, in clips."""
  found = after.aggregator['scores'] - before.aggregator['scores']
  return np.asarray(found) * 4 / clip


@pytest.mark.slow
def test_the_noise_is_what_is_accounted_for():
  """In a count and in sums of residuals, beside the same without noise."""
  noise = 3.0
  exact = _process(clip=2.0)
  process = _process(noise, clip=2.0, noise_seed=1)
  cohort = planted.cohort_of(process, planted.rate(_COUNTS), 1)
  before = exact.initialize()
  aggregator = process.initialize().aggregator
  for _ in range(2):
    after = planted.run(exact, cohort, before).state
    added = []
    for number in range(4):
      query = aggregator['inner'].query_state._replace(round=np.int32(number))
      inner = aggregator['inner']._replace(query_state=query)
      start = _with(before, {**aggregator, 'inner': inner})
      added.append(_sums(start, planted.run(process, cohort, start).state, 2.0))
    added -= _sums(before, after, 2.0)
    np.testing.assert_allclose(np.std(added), noise, rtol=0.15)
    before = after


def _with(state: Any, aggregator: Any) -> Any:
  """The server's state, with that of another aggregator."""
  return type(state)(
    state.global_model_weights,
    state.distributor,
    state.client_work,
    aggregator,
    state.finalizer,
  )


@pytest.mark.slow
def test_other_noise_than_the_plans_is_refused():
  plan = privacy_plans.plan(
    clipping.FixedClip(1.0),
    target_epsilon=8.0,
    delta=1e-3,
    population=4,
    clients_per_round=4,
    rounds=3,
  )
  ledger = privacy_plans.PrivacyLedger(plan)
  process = algorithms.build_fed_als_private(
    _model(), aggregation=tff_partial.Aggregation(aggregator=plan.mean())
  )
  ledger.check(process.mechanism)
  other = _process(0.5 * plan.noise_multiplier)
  with pytest.raises(PrivacyError, match='other noise than the process adds'):
    ledger.check(other.mechanism)
  clients = planted.pack(planted.rate(_COUNTS), process.example_spec)
  result = tff_partial.train(
    process, clients, rounds=3, clients_per_round=4, privacy=ledger
  )
  assert result.privacy['epsilon'] == pytest.approx(8.0, rel=1e-3)


# ---- what is refused ---------------------------------------------------------


def test_what_does_not_fit_is_refused():
  adaptive = privacy.private_mean(
    clipping.AdaptiveClip(), noise_multiplier=0.1, clients_per_round=4
  )
  for aggregator in (adaptive, None):
    with pytest.raises(PrivacyError, match='mean of a plan with a fixed clip'):
      algorithms.build_fed_als_private(
        _model(), aggregation=tff_partial.Aggregation(aggregator=aggregator)
      )
  mean = privacy.private_mean(
    clipping.FixedClip(1.0), noise_multiplier=1.0, clients_per_round=4
  )
  aggregation = tff_partial.Aggregation(aggregator=mean)
  for build in (algorithms.build_fed_als_private, algorithms.build_dp_als):
    with pytest.raises(SettingError, match=f'^{build.__name__}: the model'):
      build(planted.factorization(), aggregation=aggregation)
  for attributes in (
    _ATTRIBUTES[1:],
    np.ones([_ITEMS, 9]),
    np.inf * _ATTRIBUTES,
  ):
    with pytest.raises(SettingError, match='attributes'):
      algorithms.build_fed_als_private(
        _model(), aggregation=aggregation, attributes=attributes
      )
