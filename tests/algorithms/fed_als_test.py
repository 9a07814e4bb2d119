"""Federated ALS computes the posteriors of the textbook, and finds tastes."""

from typing import Any

import numpy as np
import pytest
from scipy import stats
import tensorflow as tf

from tests.support import planted
from tff_partial import algorithms
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.contexts import Batch
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.data.examples import ClientDataError
from tff_partial.errors import SettingError
from tff_partial.solvers.triangles import Packing
from tff_partial.templates import rating_intervals
from tff_partial.templates import rating_posteriors

_ITEMS, _FACTORS = planted.NUM_ITEMS, 2
_SIZE = _FACTORS + 1
_COUNTS = {'a': 9, 'b': 4, 'c': 1, 'd': 20}


def _model(**options: Any) -> Any:
  return rating_posteriors.build_model(_ITEMS, _FACTORS, **options)


def _ratings(users: int, noise: float, seed: int = 0) -> dict[str, Any]:
  """Users who rate 25 items by two factors, biases, and a known noise."""
  draw = np.random.default_rng(seed)
  items = draw.normal(size=[_ITEMS, _FACTORS])
  liked = draw.normal(size=_ITEMS)
  clients = {}
  for user in range(users):
    taste, bias = draw.normal(size=_FACTORS), draw.normal()
    x = draw.permutation(_ITEMS)[:25].astype(np.int32)
    y = 3 + bias + liked[x] + items[x] @ taste + noise * draw.normal(size=25)
    clients[f'user {user}'] = {'x': x, 'y': y.astype(np.float32)}
  return clients


def _train(process: Any, clients: Any, rounds: int, part: int | None = None):
  """Train on all clients, or on `part` of them in turn."""
  draw = np.random.default_rng(0)
  plan = [
    list(clients)
    if part is None
    else list(draw.permutation(list(clients))[:part])
    for _ in range(rounds)
  ]
  with runtimes.cohort(jit=False):
    state, _ = planted.trained(process, clients, plan, capacities=[25])
  return process.get_model_weights(state)


def _measured(weights: Any, clients: Any, **metrics: Any) -> Any:
  measuring = algorithms.build_fed_als_eval(_model(**metrics))
  return planted.evaluate(measuring, weights, clients).metrics


# ---- one round, by hand ------------------------------------------------------


def _posterior(x: Any, y: Any, item: Any, mean: float) -> tuple[Any, Any]:
  """A user's posterior with items that are known, in NumPy's float64."""
  a = item[x].copy()
  a[:, 0] = 1.0
  covariance = np.linalg.inv(a.T @ a + np.eye(_SIZE))
  return covariance @ a.T @ (y - mean - item[x, 0]), covariance


def _begun(process: Any) -> tuple[Any, np.ndarray]:
  """The state before the first round, and its items in float64."""
  state = process.initialize()
  item = planted.global_weights(process, state)['ratings/item']
  return state, item.astype(np.float64)


def _own(measuring: Any, weights: Any, clients: Any) -> Any:
  """What a client that has nothing makes its own by weights of the server."""
  (value,) = planted.cohort_of(measuring, clients, 1)
  nothing = measuring.initialize_client([0, 0])
  return measuring.personalise(
    planted.as_model_weights(weights), nothing, value
  )


@pytest.mark.slow
def test_a_round_is_that_of_numpy() -> None:
  model = _model(mean=0.5)
  process = algorithms.build_fed_als(model)
  clients = planted.rate(_COUNTS)
  state, item = _begun(process)
  left = np.zeros([_ITEMS, _SIZE, _SIZE])
  right = np.zeros([_ITEMS, _SIZE])
  users, errors = [], []
  for fields in clients.values():
    x, y = fields['x'], fields['y'].astype(np.float64)
    z, covariance = _posterior(x, y, item, 0.5)
    one, wide = np.array([1, *z[1:]]), covariance.copy()
    wide[0] = wide[:, 0] = 0
    by_bias = np.array([z[0], *(z[0] * z[1:] + covariance[0, 1:])])
    for i, rating in zip(x, y, strict=True):
      left[i] += np.outer(one, one) + wide
      right[i] += (rating - 0.5) * one - by_bias
      a = np.array([1, *item[i, 1:]])
      predicted = 0.5 + z @ a + item[i, 0]
      errors.append((rating - predicted) ** 2 + a @ covariance @ a)
    users.append((z, covariance))
  noise = np.mean(errors)
  precision = np.eye(_SIZE)
  wanted = np.linalg.solve(left + precision, right[..., None])[..., 0]
  cohort = planted.cohort_of(process, clients, 1)
  output = planted.run(process, cohort, state)
  found = planted.global_weights(process, output.state)
  np.testing.assert_allclose(found['ratings/item'], wanted, atol=1e-4)
  # Four users are too few for a prior of three numbers and the noise.
  np.testing.assert_allclose(found['ratings/noise'], noise, rtol=1e-4)
  packing = Packing(_SIZE)
  covariance = packing.unpack(tf.constant(found['ratings/item_covariance']))
  np.testing.assert_allclose(
    covariance, noise * np.linalg.inv(left + precision), atol=1e-4
  )
  mean = np.mean([z for z, _ in users], 0)
  np.testing.assert_allclose(found['ratings/user_mean'], mean, atol=1e-4)


@pytest.mark.slow
def test_a_user_knows_its_covariance() -> None:
  measuring = algorithms.build_fed_als_eval(_model(), split=splits.same())
  clients = planted.rate({'a': 9})
  weights = measuring.model.initial_weights(tiers.GLOBAL, [0, 0])
  own = _own(measuring, weights, clients)
  item = np.asarray(weights['ratings/item'], float)
  z, covariance = _posterior(clients['a']['x'], clients['a']['y'], item, 0.0)
  np.testing.assert_allclose(own['ratings/user'], z, atol=1e-5)
  np.testing.assert_allclose(own['ratings/user_spread'], covariance, atol=1e-5)
  # Its surprises, with a prior of 20 ratings as expected. No item is doubtful.
  a = np.concatenate([np.ones([9, 1]), item[clients['a']['x'], 1:]], 1)
  residual = clients['a']['y'] - a @ z - item[clients['a']['x'], 0]
  expected = 1 - np.sum(a @ covariance * a, 1)
  scale = (20 + np.sum(residual**2 / expected)) / 29
  np.testing.assert_allclose(own['ratings/user_scale'], scale, rtol=1e-5)


# ---- what it learns ----------------------------------------------------------


@pytest.mark.slow
def test_it_finds_tastes_noise_and_honest_error_bars() -> None:
  """Of 12 ratings a user's other 13 are predicted, about as well as can be."""
  noise = 0.5
  process = algorithms.build_fed_als(_model(mean=3.0))
  weights = _train(process, _ratings(300, noise), 15)
  found = weights.trainable[tiers.GLOBAL]['ratings/noise']
  np.testing.assert_allclose(found, noise**2, rtol=0.1)
  new = {f'new {k}': v for k, v in _ratings(300, noise).items()}
  for fields in new.values():
    fields['x'], fields['y'] = fields['x'][::-1], fields['y'][::-1]
  measured = _measured(
    weights, new, metrics=lambda: [rating_intervals.IntervalCoverage(0.8)]
  )
  # 12 ratings say a user's three numbers up to 3 / 12 of the noise's variance.
  assert measured['loss'] < noise**2 * 1.6
  np.testing.assert_allclose(measured['coverage_80'], 0.8, atol=0.02)


@pytest.mark.slow
def test_a_third_of_the_clients_in_each_round_will_do() -> None:
  clients = _ratings(300, 0.5)
  whole = _train(algorithms.build_fed_als(_model(mean=3.0)), clients, 15)
  some = _train(
    algorithms.build_fed_als(_model(mean=3.0), memory=2 / 3), clients, 45, 100
  )
  losses = [_measured(weights, clients)['loss'] for weights in (whole, some)]
  assert losses[1] < 1.05 * losses[0]


@pytest.mark.slow
def test_a_round_without_ratings_forgets_nothing() -> None:
  process = algorithms.build_fed_als(_model(mean=3.0), memory=0.5)
  clients = _ratings(30, 0.5)
  with runtimes.cohort(jit=False):
    state, _ = planted.trained(process, clients, [list(clients)] * 2, [25])
    after = process.next(state, [], []).state
  planted.assert_same_weights(process, after, state)
  planted.assert_same(after.client_work['server'], state.client_work['server'])


@pytest.mark.slow
def test_ratings_without_noise_leave_posteriors_whole() -> None:
  clients = _ratings(12, 0.0)
  for fields in clients.values():
    fields['y'] = np.full(25, 4, np.float32)
  weights = _train(algorithms.build_fed_als(_model(mean=3.0)), clients, 25)
  found = weights.trainable[tiers.GLOBAL]
  assert np.abs(found['ratings/item']).max() < 0.1
  assert np.linalg.eigvalsh(found['ratings/user_precision']).min() > 0


@pytest.mark.slow
def test_a_scale_makes_no_difference() -> None:
  """Ratings from 0 to 100 are predicted as the same ones in stars."""
  clients = _ratings(12, 0.5)
  wide = {
    name: {'x': f['x'], 'y': 20 * (f['y'] - 3)} for name, f in clients.items()
  }
  stars = _train(algorithms.build_fed_als(_model(mean=3.0)), clients, 3)
  other = _train(algorithms.build_fed_als(_model(unit=20.0)), wide, 3)
  np.testing.assert_allclose(
    other.trainable[tiers.GLOBAL]['ratings/item'],
    stars.trainable[tiers.GLOBAL]['ratings/item'],
    atol=1e-3,
  )


def test_coverage_counts_ratings_within_the_interval_by_hand() -> None:
  """Half of a normal variable is within 0.674 deviations of its mean."""
  metric = rating_intervals.IntervalCoverage(0.5)
  assert metric.name == 'coverage_50'
  metric.update_state(
    tf.constant([1.0, 1.0]),
    {
      rating_posteriors.RATING: tf.constant([3.69, 3.71]),
      rating_posteriors.VARIANCE: tf.constant([16.0, 16.0]),
    },
  )
  assert metric.result() == 0.5
  np.testing.assert_allclose(
    rating_intervals.half_width(16.0, 0.5), 4 * 0.6745, rtol=1e-4
  )
  np.testing.assert_allclose(
    rating_intervals.half_width(1.0, 0.8), stats.norm.ppf(0.9), rtol=1e-6
  )


def test_packing_holds_symmetric_matrices() -> None:
  packing = Packing(2)
  matrix = tf.constant([[1.0, 2.0], [2.0, 3.0]])
  np.testing.assert_array_equal(packing.pack(matrix), [1, 2, 3])
  np.testing.assert_array_equal(packing.unpack(packing.pack(matrix)), matrix)
  np.testing.assert_array_equal(
    packing.dot(packing.pack(matrix)[None], matrix), [1 + 2 * 4 + 9]
  )


# ---- attributes --------------------------------------------------------------


def _of_age(clients: Any) -> Any:
  """The same clients, whose age is known: young, old, and in turn."""
  return {
    name: {
      'x': {
        'item_id': fields['x'],
        'age': np.full(len(fields['x']), k % 2, np.int32),
      },
      'y': fields['y'],
    }
    for k, (name, fields) in enumerate(clients.items())
  }


@pytest.mark.slow
def test_priors_follow_attributes_as_in_ridge_regression() -> None:
  """The coefficients are NumPy's; an item without ratings is as expected."""
  genres = np.random.default_rng(0).normal(size=[_ITEMS, 2])
  process = algorithms.build_fed_als(
    _model(user_attributes={'age': 2}), attributes=genres
  )
  plain = planted.rate(_COUNTS)
  clients = _of_age(plain)
  state, item = _begun(process)
  cohort = planted.cohort_of(process, clients, 1)
  first = planted.run(process, cohort, state).state
  found = planted.global_weights(process, first)
  known = np.array([[1, 1, 0], [1, 0, 1], [1, 1, 0], [1, 0, 1]])
  users = np.array(
    [_posterior(**f, item=item, mean=0)[0] for f in plain.values()]
  )
  wanted = np.linalg.solve(
    known.T @ known + np.diag([0, 1, 1]), known.T @ users
  )
  np.testing.assert_allclose(found['ratings/user_mean'], wanted[0], atol=1e-4)
  np.testing.assert_allclose(found['ratings/of_age'], wanted[1:], atol=1e-4)
  # The second round expects items by those of the first.
  second = planted.run(process, cohort, first).state
  after = planted.global_weights(process, second)['ratings/item']
  rated = np.unique(np.concatenate([f['x'] for f in plain.values()]))
  never = np.setdiff1d(np.arange(_ITEMS), rated)
  assert len(never)
  a = np.column_stack([np.ones(_ITEMS), genres])
  coefficients = np.linalg.solve(
    a[rated].T @ a[rated] + np.diag([0, 1, 1]),
    a[rated].T @ found['ratings/item'][rated],
  )
  np.testing.assert_allclose(after[never], a[never] @ coefficients, atol=1e-4)


@pytest.mark.slow
def test_a_user_without_ratings_is_as_its_attributes_say() -> None:
  model = _model(user_attributes={'age': 2})
  measuring = algorithms.build_fed_als_eval(model, split=splits.first(0))
  weights = dict(measuring.model.initial_weights(tiers.GLOBAL, [0, 0]))
  weights['ratings/user_mean'] = np.array([1.0, 2, 3], np.float32)
  weights['ratings/of_age'] = np.array([[1.0, 0, -1], [9, 9, 9]], np.float32)
  own = _own(measuring, weights, _of_age(planted.rate({'a': 3})))
  np.testing.assert_allclose(own['ratings/user'], [2, 2, 2], atol=1e-6)


def test_values_that_an_attribute_does_not_have_are_refused() -> None:
  clients = _of_age(planted.rate({'a': 3}))
  spec = _model(user_attributes={'age': 2}).example_spec
  for age in (-1, 2):
    clients['a']['x']['age'][:] = age
    message = f"age.* is {age}, but user_attributes: 'age' has 2 values"
    with pytest.raises(ClientDataError, match=message):
      planted.pack(clients, spec)


@pytest.mark.slow
def test_a_prior_follows_which_items_were_rated() -> None:
  """The coefficients are NumPy's, and what is measured says nothing."""
  process = algorithms.build_fed_als(_model(rated_items=True))
  clients = planted.rate(_COUNTS)
  state, item = _begun(process)
  cohort = planted.cohort_of(process, clients, 1)
  first = planted.run(process, cohort, state).state
  found = planted.global_weights(process, first)

  def rated(x: Any, items: Any) -> Any:
    return items[x].sum(0) / np.sqrt(len(x) + 10)

  known = np.array([[1, *rated(f['x'], item)] for f in clients.values()])
  users = np.array(
    [_posterior(**f, item=item, mean=0)[0] for f in clients.values()]
  )
  wanted = np.linalg.solve(
    known.T @ known + np.diag([0, 1, 1, 1]), known.T @ users
  )
  np.testing.assert_allclose(found['ratings/user_mean'], wanted[0], atol=1e-4)
  table = found['ratings/by_rated_items']
  np.testing.assert_allclose(table, wanted[1:], atol=1e-4)
  # A new user's prior: of the items of its support set, and of no others. Items
  # are as if they were certain.
  found['ratings/item_covariance'] = 0 * found['ratings/item_covariance']
  measuring = algorithms.build_fed_als_eval(
    _model(rated_items=True), split=splits.first(3)
  )
  own = _own(measuring, found, {'d': clients['d']})
  x, y = clients['d']['x'][:3], clients['d']['y'][:3]
  a = found['ratings/item'][x].astype(float)
  mean = found['ratings/user_mean'] + rated(x, found['ratings/item']) @ table
  residual = y - a[:, 0]
  a[:, 0] = 1
  precision = found['ratings/user_precision']
  np.testing.assert_allclose(
    own['ratings/user'],
    np.linalg.solve(a.T @ a + precision, a.T @ residual + precision @ mean),
    atol=1e-3,
  )


def test_a_rating_of_weight_zero_is_none_that_a_prior_follows() -> None:
  items = tf.constant([[1.0, 2.0], [10.0, 20.0]])
  tables = {
    rating_posteriors.ITEM: items,
    f'{rating_posteriors.LAYER}/by_rated_items': tf.eye(2),
  }
  model: Any = None
  client = ClientContext(
    *(model, {tiers.GLOBAL: tables}, {}, {}),
    {'x': tf.constant([0, 1]), 'weight': tf.constant([1.0, 0.0])},
    *(tf.constant(2), tf.constant([0, 0])),
  )
  np.testing.assert_allclose(
    rating_posteriors.known_of(client), [1.0, 1.0 / 11**0.5, 2.0 / 11**0.5]
  )


def test_no_surprise_is_negative_where_a_weight_is_small() -> None:
  """Of weight 0.1, a rating may leave its user 5 times the noise in doubt."""
  predictions: Any = {
    'rating': [2.0],
    'variance': [6.0],
    'variance_of_user': [5.0],
  }
  fields: Any = {'x': [0], 'y': [3.0], 'weight': [0.1]}
  fields, predictions = (
    {name: tf.constant(value) for name, value in given.items()}
    for given in (fields, predictions)
  )
  nothing: Any = None
  own: Any = {tiers.LOCAL: {rating_posteriors.SCALE: tf.constant(1.0)}}
  client = ClientContext(
    *(nothing, own, nothing, nothing, fields, tf.constant(1), nothing),
    batch=Batch.of(fields, tf.constant([True]), predictions),
  )
  (distance,) = rating_posteriors.posterior_phases()[1].terms
  wanted = 0.1 * (1.0 - 1.0 / (6.0 - 0.1 * 2.0 * 5.0)) ** 2
  np.testing.assert_allclose(distance(client), wanted, rtol=1e-6)


# ---- what is refused ---------------------------------------------------------


def _als(**options: Any) -> Any:
  return algorithms.build_fed_als(_model(), **options)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: _als(attributes=np.zeros([_ITEMS + 1, 2])), 'attributes'),
    (lambda: _als(attributes=np.full([_ITEMS, 1], np.nan)), 'attributes'),
    (lambda: _als(attributes=np.float64(5.0)), r'attributes.* found \[\]'),
    (lambda: _als(memory=-0.1), 'memory'),
    (lambda: _als(memory=1.0), 'memory'),
    (lambda: _als(memory=float('nan')), 'memory'),
    (lambda: algorithms.build_fed_als(planted.factorization()), 'build_model'),
    (
      lambda: algorithms.build_fed_als_eval(planted.factorization()),
      'build_fed_als_eval: the model has no posterior',
    ),
    (lambda: rating_intervals.IntervalCoverage(80), 'level=80'),
    (lambda: rating_posteriors.build_model(0, 2), 'num_items: .* found 0'),
  ],
)
def test_what_does_not_fit_is_refused(build: Any, message: str) -> None:
  with pytest.raises(SettingError, match=message):
    build()
