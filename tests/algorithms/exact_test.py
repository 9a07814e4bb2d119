"""An exact solve in place of steps: the textbook's weights, in all places."""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn import linear_model
import tensorflow as tf

from tests.support import planted
from tff_partial import algorithms
from tff_partial import layers
from tff_partial import runtimes
from tff_partial import terms
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.evaluation import build_evaluation
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Interleaved
from tff_partial.phases import Phase
from tff_partial.phases import PhaseError
from tff_partial.phases import sgd
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import ExactError
from tff_partial.solvers.exact import Prior
from tff_partial.templates.partial_training import exact_first

_NUM_FEATURES = 4
_DRAW = np.random.default_rng(0)
_X = _DRAW.normal(size=[12, _NUM_FEATURES]).astype(np.float32)
_WEIGHT = _DRAW.uniform(0.5, 2.0, 12).astype(np.float32)
_WITH_ONES = np.hstack([_X, np.ones([12, 1])]).astype(np.float64)


def _head(units: int = 1, activation: str | None = None) -> Callable[[], Any]:
  """A callable for a client's own linear layer, and zeros that all share."""

  def build() -> tf.keras.Model:
    x = tf.keras.Input([_NUM_FEATURES])
    own = tf.keras.layers.Dense(units, activation, name='own')(x)
    shared = layers.PrivateVector(units, initializer='zeros', name='all')(x)
    return tf.keras.Model(x, own + shared)

  return build


def _model(
  build: Callable[[], Any] = _head(), loss: Any = 'mse', **options: Any
) -> models.PartialModel:
  return keras_models.from_keras(build, local='own', loss=loss, **options)


def _solved(
  model: models.PartialModel, settings: Exact, fields: Any, **phase: Any
) -> dict[str, np.ndarray]:
  """The weights of a client with these examples."""
  measuring = build_evaluation(
    model,
    client_state=algorithms.fed_recon.stateless,
    work=[
      Phase(train=(tiers.LOCAL,), optimizer=settings, **phase),
      Phase(train=(), measured=True),
    ],
  )
  (value,) = planted.cohort_of(measuring, {'a': fields}, 1)
  weights = planted.as_model_weights(
    model.initial_weights(tiers.GLOBAL, [0, 0])
  )
  with runtimes.native():
    found = measuring.personalise(weights, collections.OrderedDict(), value)
  return {name: np.asarray(tensor) for name, tensor in found.items()}


def test_one_example_by_hand():
  """x = (2, 0, 0, 0), y = 3: (3 - 2w - b)^2 + w^2 + b^2 is least at (1, .5)."""
  fields = {
    'x': np.array([[2.0, 0, 0, 0]], np.float32),
    'y': np.array([[3.0]], np.float32),
  }
  found = _solved(_model(), Exact(ridge=1.0), fields)
  np.testing.assert_allclose(found['own/kernel'][:, 0], [1, 0, 0, 0], atol=1e-6)
  np.testing.assert_allclose(found['own/bias'], [0.5], rtol=1e-6)


def test_squared_error_is_ridge_regression_of_numpy():
  y = (_X @ [1, -2, 0.5, 3] + 1).astype(np.float32)[:, None]
  found = _solved(
    _model(), Exact(ridge=0.3), {'x': _X, 'y': y, 'weight': _WEIGHT}
  )
  a = _WITH_ONES
  wanted = np.linalg.solve(
    a.T @ (_WEIGHT[:, None] * a) + 0.3 * np.eye(5), a.T @ (_WEIGHT * y[:, 0])
  )
  np.testing.assert_allclose(found['own/kernel'][:, 0], wanted[:4], atol=1e-5)
  np.testing.assert_allclose(found['own/bias'], wanted[4:], atol=1e-5)


@pytest.mark.slow
def test_several_outputs_are_solved_together():
  """Keras's mean over outputs halves each loss, and so doubles the ridge."""
  y = _DRAW.normal(size=[12, 2]).astype(np.float32)
  found = _solved(_model(_head(2)), Exact(ridge=0.3), {'x': _X, 'y': y})
  ridge = linear_model.Ridge(alpha=0.6, fit_intercept=False)
  ridge.fit(_WITH_ONES, y)
  np.testing.assert_allclose(found['own/kernel'], ridge.coef_.T[:4], atol=1e-5)


def _logistic_regression(y: np.ndarray) -> np.ndarray:
  regression = linear_model.LogisticRegression(
    C=1.0, fit_intercept=False, tol=1e-10, max_iter=1000
  )
  return regression.fit(_WITH_ONES, y).coef_[:, :4].T


def test_logistic_head_is_that_of_scikit_learn():
  y = (_X[:, 0] + 0.3 * _DRAW.normal(size=12) > 0).astype(np.float32)
  loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
  found = _solved(
    _model(loss=loss), Exact(ridge=0.5), {'x': _X, 'y': y[:, None]}
  )
  wanted = _logistic_regression(y)
  np.testing.assert_allclose(found['own/kernel'], wanted, atol=1e-4)


@pytest.mark.slow
def test_a_loss_without_curvature_far_away_is_minimized():
  wanted = 9.0 * np.ones([_X.shape[1], 1], np.float32)
  fields = {'x': _X, 'y': _X @ wanted}
  found = _solved(_model(loss=tf.keras.losses.Huber()), Exact(1e-6), fields)
  np.testing.assert_allclose(found['own/kernel'], wanted, atol=1e-3)


@pytest.mark.slow
def test_steps_that_end_far_from_the_minimum_find_nothing():
  fields = {'x': _X, 'y': (_X[:, :1] > 0).astype(np.float32)}
  model = _model(loss=tf.keras.losses.BinaryCrossentropy(from_logits=True))
  one, many = (
    _solved(model, Exact(1e-5, newton_steps=steps), fields)['own/kernel']
    for steps in (1, 20)
  )
  assert np.isnan(one).all() and np.isfinite(many).all()


@pytest.mark.slow
def test_softmax_head_is_that_of_scikit_learn():
  y = np.argmax(_X[:, :3] + _DRAW.normal(size=[12, 3]), 1).astype(np.int32)
  loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
  found = _solved(_model(_head(3), loss), Exact(ridge=0.5), {'x': _X, 'y': y})
  wanted = _logistic_regression(y)
  np.testing.assert_allclose(found['own/kernel'], wanted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['mse', 'logistic'])
def test_conjugate_gradients_find_the_same(kind):
  y = _DRAW.integers(0, 2, [12, 1]).astype(np.float32)
  loss: Any = 'mse'
  if kind == 'logistic':
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
  direct, by_products = (
    _solved(
      _model(loss=loss), Exact(ridge=0.5, max_direct=most), {'x': _X, 'y': y}
    )
    for most in (512, 1)
  )
  planted.assert_close(direct, by_products, 2e-5)


@pytest.mark.slow
def test_terms_and_regularization_count_as_in_steps():
  """12 examples, each with 0.5 / 2 |w|^2: a ridge of 3 more."""
  y = _DRAW.normal(size=[12, 1]).astype(np.float32)
  fields = {'x': _X, 'y': y}
  with_term = _solved(
    _model(), Exact(0.5), fields, terms=(terms.l2(0.5, tiers.LOCAL),)
  )
  planted.assert_close(with_term, _solved(_model(), Exact(3.5), fields), 1e-5)


@pytest.mark.slow
def test_prior_has_a_mean_and_a_precision():
  y = _DRAW.normal(size=[12, 1]).astype(np.float32)
  mean = {
    'own/kernel': tf.ones([_NUM_FEATURES, 1]),
    'own/bias': tf.constant([2.0]),
  }
  precision = np.diag([1.0, 2, 3, 4, 5]) + 0.1
  found = _solved(
    _model(),
    Exact(prior=lambda client: Prior(mean, precision)),
    {'x': _X, 'y': y},
  )
  a = _WITH_ONES
  first = np.array([1, 1, 1, 1, 2.0])
  wanted = np.linalg.solve(
    a.T @ a + precision, a.T @ y[:, 0] + precision @ first
  )
  np.testing.assert_allclose(found['own/kernel'][:, 0], wanted[:4], atol=1e-5)


@pytest.mark.slow
def test_covariance_is_the_inverse_of_half_the_hessian():
  class Spread(tf.keras.layers.Layer):
    def build(self, shape: Any) -> None:
      size = [_NUM_FEATURES, _NUM_FEATURES]
      self.spread = self.add_weight('spread', size, initializer='zeros')

    def call(self, x: tf.Tensor) -> tf.Tensor:
      return tf.einsum('bi,ij,bj->b', x, self.spread, x)[:, None]

  def with_spread() -> tf.keras.Model:
    x = tf.keras.Input([_NUM_FEATURES])
    own = tf.keras.layers.Dense(1, use_bias=False, name='own')(x)
    shared = layers.PrivateVector(1, initializer='zeros', name='all')(x)
    spread = Spread(name='own_spread')(x)
    return tf.keras.Model(x, own + shared + 0.0 * spread)

  model = keras_models.from_keras(
    with_spread, local=['own', 'own_spread'], loss='mse'
  )
  y = _DRAW.normal(size=[12, 1]).astype(np.float32)
  found = _solved(
    model,
    Exact(ridge=0.5, covariance='own_spread/spread'),
    {'x': _X, 'y': y},
    variable_filter='own/kernel',
  )
  wanted = np.linalg.inv(
    _X.T.astype(np.float64) @ _X + 0.5 * np.eye(_NUM_FEATURES)
  )
  np.testing.assert_allclose(found['own_spread/spread'], wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('through', [False, True])
def test_fed_recon_runs_alike_in_all_runtimes(through):
  model = planted.factorization()
  process = algorithms.build_fed_recon(
    model,
    reconstruct=Phase(optimizer=Exact()),
    update=Phase(optimizer=sgd(0.5)),
    through_solution=through,
  )
  clients = planted.rate({'a': 9, 'b': 4, 'c': 1, 'd': 20})
  found = {}
  for name, runtime in planted.RUNTIMES.items():
    with runtime():
      cohort = planted.cohort_of(process, clients, 1)
      output = planted.run(process, cohort)
      found[name] = planted.global_weights(process, output.state)
  planted.assert_close(found['jit'], found['native'])
  planted.assert_close(found['no jit'], found['native'])


@pytest.mark.slow
def test_order_and_batches_make_no_difference():
  y = _DRAW.normal(size=[12, 1]).astype(np.float32)
  forth = _solved(_model(), Exact(), {'x': _X, 'y': y}, batch_size=5)
  back = _solved(_model(), Exact(), {'x': _X[::-1], 'y': y[::-1]})
  planted.assert_close(forth, back)


@pytest.mark.slow
def test_query_set_has_no_part_in_it():
  measuring = algorithms.build_fed_recon_eval(
    planted.factorization(),
    personalise=Phase(optimizer=Exact()),
    split=splits.halves(),
  )
  clients = planted.rate({'a': 10})
  (value,) = planted.cohort_of(measuring, clients, 1)
  clients['a']['y'][5:] = 99.0
  (other,) = planted.cohort_of(measuring, clients, 1)
  weights = planted.as_model_weights(
    measuring.model.initial_weights(tiers.GLOBAL, [0, 0])
  )
  with runtimes.native():
    planted.assert_same(
      *(
        measuring.personalise(weights, collections.OrderedDict(), one)
        for one in (value, other)
      )
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', ['furl', 'fed_rep'])
def test_what_clients_keep_is_solved_for_before_the_rest_is_trained(name):
  """FURL with an optimizer for each tier, and FedRep, are the same here."""
  model = planted.factorization()
  if name == 'furl':
    optimizers = {tiers.LOCAL: Exact(), tiers.GLOBAL: sgd(0.5)}
    process = algorithms.build_furl(
      model, training=Phase(optimizer=optimizers, epochs=2, batch_size=5)
    )
  else:
    process = algorithms.build_fed_rep(
      model,
      head=Phase(optimizer=Exact()),
      representation=Phase(optimizer=sgd(0.5), epochs=2, batch_size=5),
    )
  clients = planted.rate({'a': 9})
  cohort = planted.cohort_of(process, clients, 1)
  state = process.initialize()
  items = planted.global_weights(process, state)['items/embeddings']
  with runtimes.native():
    output = planted.run(process, cohort, state)
  (kept,) = output.client_states
  rows = items[clients['a']['x']].astype(np.float64)
  wanted = linear_model.Ridge(alpha=1.0, fit_intercept=False).fit(
    rows, clients['a']['y']
  )
  np.testing.assert_allclose(kept['user/vector'], wanted.coef_, atol=1e-5)
  moved = planted.global_weights(process, output.state)['items/embeddings']
  assert np.abs(moved - items).max() > 1e-3


def test_an_exact_phase_keeps_the_settings_that_are_not_of_steps():
  training = Phase(
    optimizer={tiers.LOCAL: Exact(), tiers.GLOBAL: sgd(0.5)},
    on=splits.halves().support,
    variable_filter='own.*',
    terms=(terms.l2(0.5, tiers.LOCAL),),
    epochs=3,
    shuffle=True,
  )
  solved, stepped = exact_first(
    training, train=(tiers.GLOBAL, tiers.LOCAL), measured=True
  )
  assert (solved.train, stepped.train) == ((tiers.LOCAL,), (tiers.GLOBAL,))
  for setting in ('on', 'variable_filter', 'terms'):
    assert getattr(solved, setting) == getattr(training, setting)
  assert (solved.epochs, solved.measured) == (1, False)
  assert (stepped.epochs, stepped.measured) == (3, True)


# ---- what is refused ---------------------------------------------------------


class _Idle(tf.keras.layers.Layer):
  """Has a weight that it does not read."""

  def build(self, shape: Any) -> None:
    self.unread = self.add_weight('unread', [2])

  def call(self, x: tf.Tensor) -> tf.Tensor:
    return x


def _with_idle_weights() -> tf.keras.Model:
  x = tf.keras.Input([_NUM_FEATURES])
  shared = tf.keras.layers.Dense(1, name='all')(x)
  return tf.keras.Model(x, _Idle(name='own')(shared))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'build': _head(1, 'relu')}, r'own/Relu.*activation'),
    ({'build': _with_idle_weights}, 'depend on none'),
    ({'loss': 'mae'}, 'no curvature|no second derivative'),
    ({'loss': lambda y, p: -tf.square(y - p)[:, 0]}, 'not convex'),
    # Keras clips probabilities, and so has no slope at 0 or below.
    ({'loss': 'binary_crossentropy'}, 'not convex'),
  ],
)
def test_what_cannot_be_solved_is_refused(options, message):
  with pytest.raises(ExactError, match=message):
    algorithms.build_fed_recon_fine_tuning_eval(
      _model(**options),
      personalise=Phase(optimizer=Exact()),
      tune=Phase(max_steps=0),
    )


@pytest.mark.parametrize('ridge', [0.0, -1.0, float('nan')])
def test_a_ridge_is_positive(ridge):
  with pytest.raises(ExactError, match='ridge'):
    Exact(ridge=ridge)


@pytest.mark.parametrize(
  'settings',
  [
    {'epochs': 2},
    {'steps_per_batch': 2},
    {'max_steps': 3},
    {'shuffle': True},
    {'measured': True},
    {'slots': 'kept'},
    {'rate_factor': 0.5},
  ],
)
def test_settings_without_effect_are_refused(settings):
  with pytest.raises(PhaseError, match=next(iter(settings))):
    Phase(train=(tiers.LOCAL,), optimizer=Exact(), **settings)


def test_a_covariance_has_a_place():
  with pytest.raises(ExactError, match='name a LOCAL variable'):
    build_evaluation(
      _model(),
      work=[
        Phase(train=(tiers.LOCAL,), optimizer=Exact(covariance='own/kernel')),
        Phase(train=(), measured=True),
      ],
    )


def test_exact_phases_take_no_turns():
  exact = Phase(train=(tiers.LOCAL,), optimizer=Exact())
  with pytest.raises(PhaseError, match='take turns'):
    build_evaluation(
      _model(),
      work=[
        Interleaved((exact, Phase(train=()))),
        Phase(train=(), measured=True),
      ],
    )


def test_one_phase_does_not_solve_and_step():
  with pytest.raises(PhaseError, match='phases of their own'):
    Phase(
      train=(tiers.GLOBAL, tiers.LOCAL),
      optimizer={tiers.GLOBAL: sgd(0.1), tiers.LOCAL: Exact()},
    )
