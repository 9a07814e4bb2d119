"""How phases train the weights of some tiers on some examples."""

import collections
import functools
import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tests.support.one_client import Client
from tests.support.one_client import SEED
from tests.support.stacks import dense
from tests.support.stacks import linear
from tests.support.stacks import stack
from tff_partial import phases
from tff_partial import terms
from tff_partial import tiers
from tff_partial.client import work as work_lib
from tff_partial.composition import compose
from tff_partial.data import splits
from tff_partial.model import keras_metrics
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.model.keras_variables import ModelError
from tff_partial.phases import Phase
from tff_partial.phases import sgd

layers = tf.keras.layers
optimizers = tff.learning.optimizers
_BOTH = (tiers.GLOBAL, tiers.LOCAL)


_TWO = stack(1, dense(2, name='body'), dense(1, name='user'))
_ONES = {'x': np.ones([3, 1], 'f'), 'y': np.ones([3, 1], 'f')}


def _rated(count: int, seed: int = 0) -> planted.Fields:
  (fields,) = planted.rate({'client': count}, seed).values()
  generator = np.random.default_rng(seed)
  return {
    **fields,
    'weight': generator.uniform(0.5, 2.0, [count]).astype(np.float32),
    'time': generator.integers(0, 5, [count]),
  }


# ---- order -------------------------------------------------------------------


class _ByStep(optimizers.Optimizer):
  """Step s subtracts s + 1 times the gradient, so that s can be read."""

  def initialize(self, specs):
    return collections.OrderedDict(step=tf.constant(0.0))

  def next(self, state, weights, gradients):
    gradients = tf.nest.map_structure(tf.convert_to_tensor, gradients)
    step = state['step'] + 1.0
    moved = tf.nest.map_structure(lambda w, g: w - step * g, weights, gradients)
    return collections.OrderedDict(step=step), moved

  def get_hparams(self, state):
    return collections.OrderedDict()

  def set_hparams(self, state, hparams):
    return state


def _table(rows: int) -> models.PartialModel:
  """Predicts an entry of a table; the prediction is the loss."""

  def build():
    item = tf.keras.Input([], dtype=tf.int32)
    entry = layers.Embedding(rows, 1, 'zeros', name='table')(item)
    one = layers.Dense(1, use_bias=False, kernel_initializer='ones')
    return tf.keras.Model(item, one(entry))

  return keras_models.from_keras(
    build, loss=lambda labels, predictions: predictions[:, 0], local='table'
  )


def _steps_of(*work: Any, count: int, **options: Any) -> np.ndarray:
  """At which step, from 1, each example was read; the sum if it was at many."""
  fields = {
    'x': np.arange(count, dtype=np.int32),
    'y': np.zeros([count, 1], np.float32),
  }
  done = Client(_table(count), *work)(fields, **options)
  return -done.weights[tiers.LOCAL]['table/embeddings'][:, 0]


def _one_by_one(**options: Any) -> Phase:
  return Phase(
    (tiers.LOCAL,), **{'optimizer': _ByStep(), 'batch_size': 1, **options}
  )


_ALL = {'batch_size': None}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('options', 'steps'),
  [
    ({}, [1, 2, 3, 4, 5]),
    # Batches of 2, of which each example has one half; the last has but one.
    ({'batch_size': 2}, [0.5, 0.5, 1, 1, 3]),
    ({'on': splits.alternating(2).query}, [0, 0, 1, 2, 0, 0, 3]),
    ({'epochs': 2}, [1 + 4, 2 + 5, 3 + 6]),
    ({'epochs': 2, 'max_steps': 4}, [1 + 4, 2, 3]),
    ({'epochs': 1, 'max_steps': 9}, [1, 2, 3]),
    ({'max_steps': 0}, [0, 0, 0]),
    # A batch of everything is a step an epoch.
    (_ALL, [0.25] * 4),
    ({**_ALL, 'epochs': 3, 'max_steps': 2}, [(1 + 2) / 4] * 4),
    ({**_ALL, 'on': splits.halves().query}, [0, 0, 0.5, 0.5]),
    # A batch is gone through again before the next.
    ({'steps_per_batch': 3}, [1 + 2 + 3, 4 + 5 + 6]),
    (
      {'steps_per_batch': 2, 'epochs': 2, 'max_steps': 3},
      [1 + 2 + 5 + 6, 3 + 4],
    ),
  ],
)
def test_examples_are_read_in_their_order(options, steps):
  found = _steps_of(_one_by_one(**options), count=len(steps))
  np.testing.assert_array_equal(found, steps)
  if options == _ALL:  # And padding is none of it.
    found = _steps_of(_one_by_one(**options), count=4, capacity=9)
    np.testing.assert_array_equal(found, steps)


def test_a_last_small_batch_may_be_left_out():
  dropping = functools.partial(_one_by_one, batch_size=2, drop_remainder=True)
  for options, steps, capacity in (
    ({'epochs': 2}, [(1 + 3) / 2] * 2 + [(2 + 4) / 2] * 2 + [0], 5),
    ({'epochs': 2}, [(1 + 3) / 2] * 2 + [(2 + 4) / 2] * 2 + [0], 9),
    ({}, [0.5, 0.5, 1, 1], 4),
    ({'epochs': 3}, [0], 1),
  ):
    found = _steps_of(dropping(**options), count=len(steps), capacity=capacity)
    np.testing.assert_array_equal(found, steps)
  # Each epoch leaves out another one: five times four of five examples.
  shuffled = _steps_of(dropping(epochs=5, shuffle=True), count=5)
  assert shuffled.sum() == sum(range(1, 11)) and shuffled.all()


@pytest.mark.slow
def test_each_epoch_has_an_order_of_its_own():
  count = 12
  shuffled = functools.partial(_one_by_one, epochs=3, shuffle=True)
  sums = [
    _steps_of(shuffled(max_steps=epochs * count), count=count, capacity=20)
    for epochs in (1, 2, 3)
  ]
  orders = [sums[0], sums[1] - sums[0], sums[2] - sums[1]]
  for epoch, order in enumerate(orders):
    expected = np.arange(count) + 1 + epoch * count
    np.testing.assert_array_equal(np.sort(order), expected)
    assert (order != expected).any()
  assert (orders[0] != orders[1] - count).any()
  assert (orders[1] - count != orders[2] - 2 * count).any()
  other = _steps_of(shuffled(max_steps=count), count=count, seed=SEED + 1)
  assert (other != orders[0]).any()


@pytest.mark.slow
def test_phases_share_one_shuffled_split():
  support, query = splits.shuffled(splits.halves())
  work = _one_by_one(on=support), _one_by_one(on=query, shuffle=True)
  for seed in (SEED, SEED + 1):
    steps = _steps_of(*work, count=9, seed=seed)
    # Four examples of one part, five of the other, and each in one of them.
    assert sorted(steps) == [1, 1, 2, 2, 3, 3, 4, 4, 5]


# ---- steps -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  'optimizer',
  [
    sgd(0.1),
    optimizers.build_adam(0.1),
    optimizers.build_yogi(0.1),
    optimizers.build_adagrad(0.1),
    optimizers.build_sgdm(0.1, momentum=0.9),
    optimizers.build_rmsprop(0.1),
  ],
  ids=['plain', 'adam', 'yogi', 'adagrad', 'momentum', 'rmsprop'],
)
def test_steps_are_those_on_all_of_a_table(optimizer):
  model = planted.factorization()
  client = Client(
    model, Phase(_BOTH, optimizer=optimizer, batch_size=4, epochs=2)
  )
  fields = _rated(11)
  fields['x'][:4] = (
    3  # The rows that a batch reads more than once move as often.
  )
  weights = client.first_weights()
  # What it should be: the optimizer over dense gradients, step by step.
  held = collections.OrderedDict(
    (name, tf.Variable(tensor))
    for named in weights.values()
    for name, tensor in named.items()
  )
  state = optimizer.initialize(
    tf.nest.map_structure(lambda v: tf.TensorSpec(v.shape, v.dtype), held)
  )
  for start in (0, 4, 8, 0, 4, 8):
    rows = slice(start, min(start + 4, 11))
    with tf.GradientTape() as tape:
      table, user = held['items/embeddings'], held['user/vector']
      vectors = tf.gather(tf.convert_to_tensor(table), fields['x'][rows])
      errors = tf.linalg.matvec(vectors, user) - fields['y'][rows]
      loss = tf.reduce_mean(fields['weight'][rows] * errors**2)
    gradients = tf.nest.map_structure(
      tf.convert_to_tensor, tape.gradient(loss, held)
    )
    state, moved = optimizer.next(
      state, tf.nest.map_structure(tf.convert_to_tensor, held), gradients
    )
    for name, tensor in moved.items():
      held[name].assign(tensor)
  found = client(fields, capacity=20).weights
  for named in found.values():
    for name, tensor in named.items():
      planted.assert_close(tensor, held[name].numpy(), 1e-5)
  before, after = (
    np.delete(held[tiers.GLOBAL]['items/embeddings'], fields['x'], axis=0)
    for held in (weights, found)
  )
  np.testing.assert_array_equal(after, before)  # Nobody read these rows.


@pytest.mark.slow
def test_tiers_that_are_not_trained_stay_as_they_are():
  fields = _rated(6)
  for trained in _BOTH:
    client = Client(planted.factorization(), Phase((trained,)))
    before, after = client.first_weights(), client(fields).weights
    for tier in _BOTH:
      for name, tensor in before[tier].items():
        assert (after[tier][name] != tensor.numpy()).any() == (tier == trained)


@pytest.mark.parametrize('optimizer', [sgd(0.1), optimizers.build_adam(0.1)])
def test_variables_that_are_not_named_stay_as_they_are(optimizer):
  work = Phase(
    _BOTH, optimizer=optimizer, variable_filter='user/kernel|.*/bias'
  )
  client = Client(planted.factorization(_TWO, metrics=list), work)
  before, after = client.first_weights(), client(_ONES).weights
  moved = {
    name: (after[tier][name] != tensor.numpy()).any()
    for tier, named in before.items()
    for name, tensor in named.items()
  }
  trained = ('body/bias', 'user/kernel', 'user/bias')
  assert moved == {'body/kernel': False, **dict.fromkeys(trained, True)}


@pytest.mark.slow
def test_each_tier_may_have_an_optimizer_of_its_own():
  model = planted.factorization()
  fields = _rated(6)
  client = Client(model, Phase(_BOTH))
  before, after = client.first_weights(), client(fields).weights
  other = Client(
    model,
    Phase(_BOTH, optimizer={tiers.GLOBAL: sgd(0.2), tiers.LOCAL: sgd(0.3)}),
  )(fields).weights
  # One step: all of the slopes are those at the first weights.
  for tier, factor in ((tiers.GLOBAL, 2), (tiers.LOCAL, 3)):
    for name, tensor in before[tier].items():
      step = after[tier][name] - tensor.numpy()
      planted.assert_close(other[tier][name], tensor.numpy() + factor * step)


@pytest.mark.slow
def test_phases_take_turns_on_each_batch():
  local = Phase((tiers.LOCAL,), batch_size=4, epochs=2, steps_per_batch=2)
  shared = Phase((tiers.GLOBAL,), batch_size=4, epochs=2)
  client = Client(planted.factorization(), phases.Interleaved((local, shared)))
  fields = _rated(11)
  weights = client.first_weights()
  table = weights[tiers.GLOBAL]['items/embeddings'].numpy().astype(np.float64)
  user = weights[tiers.LOCAL]['user/vector'].numpy().astype(np.float64)
  for start in (0, 4, 8, 0, 4, 8):
    rows = slice(start, min(start + 4, 11))
    items, weight = fields['x'][rows], fields['weight'][rows]
    for turn in ('local', 'local', 'shared'):
      error = table[items] @ user - fields['y'][rows]
      slope = 2 * weight * error / len(items)
      if turn == 'local':
        user = user - 0.1 * slope @ table[items]
      else:
        np.add.at(table, items, -0.1 * np.outer(slope, user))
  found = client(fields, capacity=20).weights
  planted.assert_close(found[tiers.GLOBAL]['items/embeddings'], table)
  planted.assert_close(found[tiers.LOCAL]['user/vector'], user)


def test_phases_that_take_turns_keep_their_optimizers():
  still = Phase((tiers.GLOBAL,), optimizer=sgd(0.0), batch_size=1)
  work = phases.Interleaved((still, _one_by_one(), still))
  np.testing.assert_array_equal(_steps_of(work, count=4), [1, 2, 3, 4])


@pytest.mark.slow
@pytest.mark.parametrize('local', [(), (tiers.LOCAL,)])
def test_a_copy_of_the_global_weights_is_trained_in_their_place(local):
  model = planted.factorization()
  fields = _rated(11)
  work = Phase((tiers.PERSONAL, *local), batch_size=4, measured=True)
  client = Client(model, work)
  first = client.first_weights()
  done = client(fields)
  planted.assert_same(
    dict(done.weights[tiers.GLOBAL]),
    {name: tensor.numpy() for name, tensor in first[tiers.GLOBAL].items()},
  )
  # As global weights of the same values would be.
  instead = Phase((tiers.GLOBAL, *local), batch_size=4, measured=True)
  expected = Client(model, instead)(fields, weights=tiers.personal_copy(first))
  for tier, other in (
    (tiers.PERSONAL, tiers.GLOBAL),
    (tiers.LOCAL, tiers.LOCAL),
  ):
    planted.assert_same(dict(done.weights[tier]), dict(expected.weights[other]))
  assert done.loss == expected.loss


@pytest.mark.slow
def test_a_phase_reads_the_copy_if_it_says_so():
  model = planted.factorization()
  fields = _rated(5)
  plain = Client(model, Phase((), measured=True))
  idle = Phase((tiers.PERSONAL,), max_steps=0)
  losses = []
  for weights_fn in (tiers.server_and_local_weights, tiers.personal_copy):
    client = Client(
      model, idle, Phase((), weights_fn=weights_fn, measured=True)
    )
    weights = weights_fn(client.first_weights())
    losses.append(client(fields).loss)
    assert losses[-1] == plain(fields, weights=weights).loss
  assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_variable_without_a_gradient_stays_as_it_is():
  class Unused(layers.Layer):
    def build(self, _):
      self.spare = self.add_weight('spare', [2], initializer='ones')

    def call(self, inputs):
      return inputs

  unused = functools.partial(Unused, name='unused')
  build = stack(1, unused, dense(1, name='body'), dense(1, name='user'))
  model = planted.factorization(build, metrics=list)
  for optimizer in (sgd(0.1), optimizers.build_adam(0.1)):
    done = Client(model, Phase(_BOTH, optimizer=optimizer))(_ONES)
    spare = done.weights[tiers.GLOBAL]['unused/spare']
    np.testing.assert_array_equal(spare, [1, 1])
    assert done.is_finite
    assert done.weights[tiers.LOCAL]['user/bias'] > 0
  only = Phase(_BOTH, variable_filter='unused/.*|user/.*')
  with pytest.raises(
    phases.PhaseError,
    match=r"trains 'global', but what it minimizes depends on none of "
    r"\['unused/spare'\], so that they would stay as they are",
  ):
    Client(model, only)(_ONES)


def test_a_term_that_is_no_number_is_refused():
  long = Phase(terms=(lambda client: client.weights['global']['body/bias'],))
  model = planted.factorization(stack(1, dense(1, name='body')), local=None)
  with pytest.raises(
    phases.PhaseError, match=r'terms: one is of the shape \(1'
  ):
    Client(model, long)(_ONES)


def test_a_weights_fn_with_the_clients_copy_beside_the_original_is_refused():
  model = planted.factorization(stack(1, dense(1, name='body')), local=None)
  held = Phase(weights_fn=lambda weights: weights, measured=True)
  with pytest.raises(ModelError, match="'body/bias' twice, last as 'personal'"):
    compose(model, work=[held])


@pytest.mark.slow
def test_weights_of_two_types_are_trained_together():
  wide = dense(2, dtype='float64', name='wide')
  model = planted.factorization(
    stack(2, wide, dense(1, name='user')), metrics=list
  )
  fields = {'x': np.ones([5, 2], 'f'), 'y': np.ones([5, 1], 'f')}
  for optimizer in (sgd(0.1), optimizers.build_adam(0.1)):
    work = Phase(_BOTH, optimizer=optimizer, epochs=30, measured=True)
    client = Client(model, work, Phase((), measured=True))
    done = client(fields)
    assert done.weights[tiers.GLOBAL]['wide/kernel'].dtype == np.float64
    first = Client(model, Phase((), measured=True))(fields)
    assert done.loss[0] / done.loss[1] < 0.5 * first.loss[0] / first.loss[1]


# ---- what is drawn in a step -------------------------------------------------


@pytest.mark.slow
def test_dropout_is_another_one_in_each_step_and_phase():
  dropout = functools.partial(layers.Dropout, 0.5)
  build = stack(64, dropout, linear('zeros', name='user'), linear('ones'))
  model = keras_models.from_keras(
    build, loss=lambda labels, predictions: predictions[:, 0], local='user'
  )
  fields = {'x': np.ones([1, 64], 'f'), 'y': np.zeros([1, 1], 'f')}
  local = functools.partial(Phase, (tiers.LOCAL,), optimizer=sgd(1.0), epochs=2)

  def kernel(*work: Phase, **options: Any) -> np.ndarray:
    done = Client(model, *work)(fields, **options)
    return done.weights[tiers.LOCAL]['user/kernel'][:, 0]

  one = kernel(local(max_steps=1))
  # Each step subtracts 2 where an input is kept, and 0 where it is dropped.
  assert set(one) == {0.0, -2.0}
  second = kernel(local()) - one
  assert set(second) == {0.0, -2.0}
  third = kernel(local(max_steps=1), local(max_steps=1)) - one
  assert set(third) == {0.0, -2.0}
  again = kernel(local(epochs=1, steps_per_batch=2)) - one
  assert set(again) == {0.0, -2.0}
  for mask, other in itertools.combinations((one, second, third, again), 2):
    assert 10 < (mask != other).sum() < 54
  np.testing.assert_array_equal(kernel(local(max_steps=1)), one)
  assert (kernel(local(max_steps=1), seed=SEED + 1) != one).any()


# ---- losses ------------------------------------------------------------------


def test_regularization_counts_in_every_phase():
  # Nothing but their regularization works on the weights.
  decaying = functools.partial(
    linear, 'ones', kernel_regularizer=tf.keras.regularizers.L2(0.5)
  )
  build = stack(1, decaying(name='shared'), decaying(name='user'))
  client = Client(
    planted.factorization(build, metrics=list),
    Phase((tiers.LOCAL,), epochs=3),
    Phase((tiers.GLOBAL,), epochs=2, measured=True),
  )
  done = client({'x': np.zeros([2, 1], 'f'), 'y': np.zeros([2, 1], 'f')}, 5)
  # The slope of w**2 / 2 is w: a step with the rate 0.1 leaves nine tenths.
  local, shared = (
    done.weights[t][n]
    for t, n in ((tiers.LOCAL, 'user/kernel'), (tiers.GLOBAL, 'shared/kernel'))
  )
  np.testing.assert_allclose(local, [[0.9**3]], rtol=1e-6)
  np.testing.assert_allclose(shared, [[0.9**2]], rtol=1e-6)
  # The loss that is reported is that of the examples.
  assert done.loss[:2] == [0.0, 4.0]


# A prediction is the local weight times the input, times one.
_one_weight_from_zero = stack(1, linear('zeros', name='user'), linear('ones'))


def test_the_loss_and_the_regularization_are_those_of_keras():
  decaying = functools.partial(dense, kernel_regularizer='l2')
  build = stack(6, decaying(4, name='user'), decaying(1))
  model = planted.factorization(build, loss='mse', metrics=list)
  generator = np.random.default_rng(0)
  fields = {
    'x': generator.normal(size=[7, 6]).astype(np.float32),
    'y': generator.normal(size=[7, 1]).astype(np.float32),
  }
  client = Client(model, Phase((), batch_size=3, measured=True))
  found = client.measure(client(fields, 11))
  keras = model.to_keras(*client.first_weights().values())
  keras.compile(loss='mse')
  expected = keras.evaluate(fields['x'], fields['y'], verbose=0)
  penalty = sum(0.01 * (v.numpy() ** 2).sum() for v in keras.variables[::2])
  np.testing.assert_allclose(found['regularization'], penalty, rtol=1e-5)
  np.testing.assert_allclose(
    found['loss'] + found['regularization'], expected, rtol=1e-5
  )


def test_without_the_loss_a_phase_trains_on_its_terms_alone():
  client = Client(
    planted.factorization(),
    Phase(
      (tiers.GLOBAL,),
      epochs=3,
      use_model_loss=False,
      terms=(terms.l2(1.0, tiers.GLOBAL),),
    ),
  )
  fields = _rated(4)
  fields['y'][:] = np.nan  # Nobody looks.
  done = client(fields)
  assert done.is_finite
  for name, tensor in client.first_weights()[tiers.GLOBAL].items():
    # A step with the rate 0.1 leaves nine tenths.
    planted.assert_close(done.weights[tiers.GLOBAL][name], 0.9**3 * tensor)


@pytest.mark.slow
def test_terms_compare_with_the_weights_as_the_round_began():
  def toward_start(client):
    difference = (
      client.weights[tiers.LOCAL]['user/kernel']
      - client.received[tiers.LOCAL]['user/kernel']
    )
    return 50.0 * tf.reduce_sum(difference**2)

  model = planted.factorization(_one_weight_from_zero, metrics=list)
  fields = {'x': np.ones([1, 1], 'f'), 'y': np.ones([1, 1], 'f')}
  work = Phase(
    (tiers.LOCAL,), optimizer=sgd(0.01), epochs=50, terms=(toward_start,)
  )
  # The loss is (w - 1)**2 + 50 (w - w0)**2: least at (1 + 50 w0) / 51, where
  # w0 = 0 also for a second phase.
  for times in (1, 2):
    done = Client(model, *[work] * times)(fields)
    np.testing.assert_allclose(
      done.weights[tiers.LOCAL]['user/kernel'], [[1 / 51]], rtol=1e-4
    )


# ---- measuring ---------------------------------------------------------------


_classifier = stack(
  6,
  dense(4, 'tanh', name='user'),
  functools.partial(layers.Dropout, 0.5),
  dense(1, 'sigmoid'),
)


def _metrics() -> list[tf.keras.metrics.Metric]:
  return [
    tf.keras.metrics.AUC(name='auc'),
    tf.keras.metrics.Precision(name='precision'),
    tf.keras.metrics.BinaryAccuracy(name='accuracy'),
    tf.keras.metrics.RootMeanSquaredError(name='rmse'),
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('loss', 'batch_size'),
  [
    (tf.keras.losses.BinaryCrossentropy(label_smoothing=0.1), 8),
    (tf.keras.losses.MeanSquaredError(), 100),
  ],
  ids=['ragged batches', 'one large batch'],
)
def test_what_is_measured_is_what_keras_evaluates(loss, batch_size):
  model = planted.factorization(_classifier, loss=loss, metrics=_metrics)
  generator = np.random.default_rng(0)
  fields = {
    'x': generator.normal(size=[37, 6]).astype(np.float32),
    'y': generator.integers(0, 2, [37, 1]).astype(np.float32),
    'weight': generator.uniform(0.5, 2.0, [37]).astype(np.float32),
  }
  client = Client(model, Phase((), batch_size=batch_size, measured=True))
  found = client.measure(client(fields, 50))
  keras = model.to_keras(*client.first_weights().values())
  keras.compile(loss=loss, weighted_metrics=_metrics())
  expected = keras.evaluate(
    fields['x'],
    fields['y'],
    sample_weight=fields['weight'],
    batch_size=37,
    return_dict=True,
    verbose=0,
  )
  assert set(found) == {*expected, *keras_metrics.COUNTS}
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-5)
  assert found['num_examples'] == 37


@pytest.mark.slow
def test_predictions_count_before_each_step():
  # The prediction is w, beginning with 0; labels are 1. A step with rate 0.5
  # moves w by 0.5 * 2 * (1 - w): to 1, where the error is 0.
  model = planted.factorization(_one_weight_from_zero)
  ones = np.ones([4, 1], np.float32)
  work = Phase(
    (tiers.LOCAL,), optimizer=sgd(0.5), batch_size=2, epochs=1, measured=True
  )
  client = Client(model, work)
  done = client({'x': ones, 'y': ones})
  assert done.loss == [2.0, 4.0]
  assert client.measure(done)['loss'] == 0.5
  np.testing.assert_allclose(client.measure(done)['rmse'], np.sqrt(0.5))


@pytest.mark.slow
def test_a_batch_that_is_gone_through_again_is_measured_once():
  # As above, but each of two steps leaves half of the error.
  ones = np.ones([4, 1], np.float32)
  work = Phase(
    (tiers.LOCAL,),
    optimizer=sgd(0.25),
    batch_size=2,
    steps_per_batch=2,
    measured=True,
  )
  client = Client(planted.factorization(_one_weight_from_zero), work)
  done = client({'x': ones, 'y': ones})
  assert done.loss == [2.0 + 2 * 0.25**2, 4.0]
  assert done.num_examples == 4


@pytest.mark.slow
def test_only_measured_phases_weigh_a_client():
  support, query = splits.fraction(0.7)
  model = planted.factorization()
  fields = _rated(10)
  measured = functools.partial(Phase, (), measured=True)
  for work, expected in [
    ([Phase(on=support), measured(on=query)], 3),
    ([measured(on=support), measured(on=query)], 10),
    ([Phase(on=query)], 0),
    ([measured(on=support, epochs=2)], 7),
    ([measured(max_steps=0)], 0),
  ]:
    done = Client(model, *work)(fields)
    assert done.num_examples == expected
    if not expected:
      assert done.loss == [0.0, 0.0]


# ---- numbers that are none ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
  ('spoil', 'is_finite'),
  [
    ({}, True),
    ({'y': 1e30}, False),  # Its square is no number.
    ({'y': np.nan}, False),
    ({'y': 1e18}, True),
    ({'weight': np.inf}, False),
  ],
)
def test_losses_that_are_no_numbers_are_noticed(spoil, is_finite):
  fields = _rated(9)
  for name, value in spoil.items():
    fields[name][6] = value
  for client in _in_three_ways():
    assert client(fields).is_finite == is_finite


@functools.cache
def _in_three_ways() -> list[Client]:
  model = planted.factorization()
  measured = functools.partial(Phase, batch_size=4, measured=True)
  return [
    Client(model, Phase((tiers.LOCAL,), batch_size=4), measured(())),
    Client(model, measured((tiers.GLOBAL,))),
    Client(model, measured(())),
  ]


@pytest.mark.slow
def test_a_measured_loss_that_is_no_number_is_noticed_beside_terms():
  fields = _rated(4)
  fields['y'][2] = np.nan
  work = Phase(
    (tiers.LOCAL,),
    terms=(
      lambda client: tf.reduce_sum(client.weight(tiers.LOCAL, 'user/vector')),
    ),
    use_model_loss=False,
    measured=True,
  )
  assert not Client(planted.factorization(), work)(fields).is_finite


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_noticed():
  # The loss is a number before the one step, and nobody looks at it after.
  fields = _rated(4)
  fields['y'][:] = 1e10
  model = planted.factorization()
  for tier, momentum in ((tiers.GLOBAL, None), (tiers.LOCAL, 0.5)):
    optimizer = optimizers.build_sgdm(1e38, momentum)
    work = Phase((tier,), optimizer=optimizer, measured=True)
    done = Client(model, work)(fields)
    assert not done.is_finite
    assert np.isfinite(done.loss).all()


# ---- refusals ----------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (
      {'epochs': 0},
      'epochs must be positive, found 0. To skip a phase, pass max_steps=0',
    ),
    ({'variable_filter': 'a('}, r"variable_filter='a\(' is not a regular"),
    ({'max_steps': -1}, 'max_steps: expected at least 0, found -1'),
    (
      {'drop_remainder': True, 'batch_size': None},
      'a batch of all examples has no remainder. Give a batch size',
    ),
    (
      {'train': (tiers.PERSONAL,), 'weights_fn': 'mixture'},
      "weights_fn: expected a function of the client's weights, .* found a str",
    ),
    (
      {'train': (tiers.GLOBAL, tiers.PERSONAL)},
      "the loss does not depend on the 'global' weights where the model reads",
    ),
    ({'rate_factor': -1.0}, 'rate_factor: expected a .* 0 or more, found -1.0'),
    ({'terms': terms.l2(1.0, tiers.LOCAL)}, 'terms: expected functions in bra'),
    (
      {'use_model_loss': False},
      'trains on nothing: use_model_loss=False, and no',
    ),
    (
      {'optimizer': {tiers.LOCAL: sgd(0.1)}},
      r"trains 'global' but has optimizers for \['local'\] alone",
    ),
    (
      {'optimizer': tf.keras.optimizers.Adam(0.02)},
      r'`tff.learning.optimizers.build_adam\(0.02\)`; found Adam',
    ),
  ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
  with pytest.raises(phases.PhaseError, match=message):
    Phase(**options)


@pytest.mark.parametrize('rate', [-0.1, float('nan')])
def test_a_learning_rate_that_makes_no_sense_is_named(rate):
  with pytest.raises(
    phases.PhaseError, match=f'sgd: learning_rate: expected .* found {rate}'
  ):
    sgd(rate)


@pytest.mark.parametrize(
  'options', [{'on': splits.halves().query}, {'epochs': 2}]
)
def test_phases_with_other_batches_cannot_take_turns(options):
  (name,) = options
  work = phases.Interleaved((Phase(), Phase((tiers.LOCAL,), **options)))
  with pytest.raises(
    phases.PhaseError, match=f'take turns on each batch differ in {name}: '
  ):
    work_lib.check([work], planted.factorization())


@pytest.mark.parametrize('tier', [tiers.GLOBAL, tiers.PERSONAL])
def test_names_of_no_variable_are_refused(tier):
  with pytest.raises(
    phases.PhaseError,
    match=r"variable_filter='user/.\*' names none of the variables that the "
    r"phase could train: \['items/embeddings'\]",
  ):
    work_lib.check(
      [Phase((tier,), variable_filter='user/.*')], planted.factorization()
    )


def test_a_phase_says_in_a_line_what_is_chosen():
  assert repr(Phase()) == (
    "Phase(train=('global',), on=everything, optimizer=SGD(learning_rate=0.1))"
  )
  chosen = Phase(
    train=_BOTH,
    on=splits.halves().support,
    optimizer={
      tiers.GLOBAL: sgd(0.5),
      tiers.LOCAL: optimizers.build_sgdm(0.25, momentum=0.5),
    },
    epochs=5,
    terms=(terms.proximal(0.1),),
    weights_fn=tiers.server_and_local_weights,
  )
  shown = repr(chosen)
  assert "optimizer={'global': SGD(learning_rate=0.5), 'local': SGD(" in shown
  assert 'momentum=0.5' in shown and 'epochs=5' in shown
  assert (
    'weights_fn=server_and_local_weights' in shown and ' at 0x' not in shown
  )
  assert len(shown) < 300
  assert 'optimizer' not in repr(Phase(train=()))  # It only measures.
