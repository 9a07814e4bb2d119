"""Clients that personalise a model, and how well it serves each of them."""

import collections
import dataclasses
import functools

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tests.support import planted
from tff_partial import algorithms
from tff_partial import client_state
from tff_partial import composition
from tff_partial import errors
from tff_partial import evaluation
from tff_partial import tiers
from tff_partial.client import client_work
from tff_partial.data import packing
from tff_partial.data import splits
from tff_partial.model import keras_models
from tff_partial.phases import Phase
from tff_partial.training import evaluation_sets
from tff_partial.training import programs

_COUNTS = {'ann': 8, 'bob': 11, 'cid': 1, 'dot': 2, 'eve': 30}
_START = 0.3
_RATE = 0.1
pytestmark = pytest.mark.usefixtures('in_native')


@pytest.fixture(scope='module', name='evaluation')
def fixture_evaluation() -> evaluation.Evaluation:
  return algorithms.build_fed_recon_eval(
    planted.factorization(planted.constant_user(_START)),
    personalise=Phase(epochs=2, batch_size=3),
  )


@pytest.fixture(scope='module', name='weights')
def fixture_weights() -> tff.learning.models.ModelWeights:
  generator = np.random.default_rng(5)
  table = generator.normal(size=[planted.NUM_ITEMS, planted.NUM_FACTORS])
  return planted.as_model_weights({'items/embeddings': table.astype('f')})


def _by_hand(weights, fields) -> tuple[np.ndarray, np.ndarray]:
  """A client's vector after two passes in batches of 3, and its errors."""
  table = weights.trainable[tiers.GLOBAL]['items/embeddings'].astype(float)
  user = np.full([planted.NUM_FACTORS], _START)
  count = len(fields['x'])
  half = max(min(round(count / 2), count - 1), 1)
  for _ in range(2):
    for start in range(0, half, 3):
      rows = slice(start, min(start + 3, half))
      vectors = table[fields['x'][rows]]
      slope = 2 * (vectors @ user - fields['y'][rows]) / len(vectors)
      user -= _RATE * slope @ vectors
  query = slice(half, count)
  return user, table[fields['x'][query]] @ user - fields['y'][query]


def _evaluate(evaluation, weights, clients, **options):
  cohort = planted.cohort_of(evaluation, clients, **options)
  return evaluation.evaluate(
    weights, planted.first_states(evaluation, cohort), cohort
  )


@pytest.mark.slow
def test_metrics_are_pooled_over_all_examples(evaluation, weights):
  clients = planted.rate(_COUNTS)
  errors = [_by_hand(weights, fields)[1] for fields in clients.values()]
  pooled = np.concatenate(errors)
  found = _evaluate(evaluation, weights, clients).metrics
  assert found['loss'] == pytest.approx(np.mean(pooled**2), rel=1e-5)
  assert found['rmse'] == pytest.approx(np.sqrt(np.mean(pooled**2)), rel=1e-5)
  # The client with one example keeps it for its support set.
  assert found['num_examples'] == len(pooled) == 4 + 5 + 0 + 1 + 15
  assert found['num_clients'] == 4
  assert found['num_not_finite'] == 0


def test_each_client_has_metrics_of_its_own(evaluation, weights):
  clients = planted.rate(_COUNTS)
  per_client = _evaluate(evaluation, weights, clients).per_client
  assert len(per_client) == len(clients)
  for found, fields in zip(per_client, clients.values(), strict=True):
    _, errors = _by_hand(weights, fields)
    assert found['num_examples'] == len(errors)
    assert found['num_clients'] == (len(errors) > 0)
    expected = np.sqrt(np.mean(errors**2)) if len(errors) else np.nan
    np.testing.assert_allclose(found['rmse'], expected, rtol=1e-4)


@pytest.mark.slow
def test_a_client_can_have_its_weights(evaluation, weights):
  clients = planted.rate(_COUNTS)
  cohort = planted.cohort_of(evaluation, clients)
  for value, fields in zip(cohort, clients.values(), strict=True):
    nothing = collections.OrderedDict()
    own = evaluation.personalise(weights, nothing, value)
    user, _ = _by_hand(weights, fields)
    planted.assert_close(own['user/vector'], user, 1e-5)
    states, measured = evaluation.measure(weights, nothing, value)
    assert list(states) == list(measured)
    assert measured['num_examples'] == states['num_examples'][0]
  # With them a Keras model of its own predicts what was measured.
  keras = evaluation.model.to_keras(weights.trainable[tiers.GLOBAL], own)
  _, errors = _by_hand(weights, clients['eve'])
  found = keras(clients['eve']['x'])[15:] - clients['eve']['y'][15:]
  planted.assert_close(found, errors, 1e-5)


def test_nobody_may_come(evaluation, weights):
  found = evaluation.evaluate(weights, [], [])
  assert np.isnan(found.metrics['rmse'])
  assert not any(v for n, v in found.metrics.items() if n != 'rmse')
  assert not found.per_client


@pytest.mark.slow
def test_the_evaluation_of_tff_is_ours_too(evaluation, weights):
  clients = planted.rate(_COUNTS)
  reconstruction = tff.learning.models.ReconstructionModel

  def model_fn():
    keras = planted.constant_user(_START)()
    return reconstruction.from_keras_model_and_layers(
      keras,
      global_layers=[keras.get_layer('items')],
      local_layers=[keras.get_layer('user')],
      input_spec=collections.OrderedDict(
        x=tf.TensorSpec([None], tf.int32), y=tf.TensorSpec([None], tf.float32)
      ),
    )

  theirs = tff.learning.algorithms.build_fed_recon_eval(
    model_fn,
    loss_fn=tf.keras.losses.MeanSquaredError,
    metrics_fn=lambda: [tf.keras.metrics.RootMeanSquaredError(name='rmse')],
    reconstruction_optimizer_fn=tff.learning.optimizers.build_sgdm(_RATE),
    dataset_split_fn=reconstruction.build_dataset_split_fn(
      recon_epochs=2, split_dataset=True
    ),
  )
  state = theirs.set_model_weights(
    theirs.initialize(),
    tff.learning.models.ModelWeights(
      [weights.trainable[tiers.GLOBAL]['items/embeddings']], []
    ),
  )
  data = [
    tf.data.Dataset.from_tensor_slices(collections.OrderedDict(fields)).batch(3)
    for fields in clients.values()
  ]
  metrics = theirs.next(state, data).metrics
  expected = metrics['client_work']['eval']['current_round_metrics']
  # TFF splits by batches.
  mine = algorithms.build_fed_recon_eval(
    evaluation.model,
    split=splits.alternating(3),
    personalise=Phase(epochs=2, batch_size=3),
  )
  found = _evaluate(mine, weights, clients).metrics
  assert found['rmse'] == pytest.approx(expected['rmse'], rel=1e-5)


@pytest.mark.slow
def test_what_clients_remember_can_be_evaluated(weights):
  mine = evaluation.build_evaluation(
    planted.factorization(planted.constant_user(_START)),
    client_state=client_state.persist_local,
    work=[Phase((), measured=True)],
  )
  clients = planted.rate({'ann': 6, 'bob': 9})
  cohort = planted.cohort_of(mine, clients)
  remembered = [
    collections.OrderedDict(
      {'user/vector': np.arange(4, dtype=np.float32) * scale}
    )
    for scale in (1.0, -0.5)
  ]
  found = mine.evaluate(weights, remembered, cohort)
  table = weights.trainable[tiers.GLOBAL]['items/embeddings']
  for own, fields, kept in zip(
    found.per_client, clients.values(), remembered, strict=True
  ):
    errors = table[fields['x']] @ kept['user/vector'] - fields['y']
    assert own['loss'] == pytest.approx(np.mean(errors**2), rel=1e-5)


# ---- summaries ---------------------------------------------------------------


def test_a_summary_by_hand():
  clients = [
    {'rmse': value, 'num_wins': 3, 'num_examples': 9, 'num_clients': count}
    for value, count in [(1.0, 1), (2.0, 1), (3.0, 1), (6.0, 1), (99.0, 0)]
  ]
  summary = evaluation.summarize(clients)
  assert set(summary) == {'rmse', 'num_wins'}
  # Four clients count: their mean is 3, their squared distances 4, 1, 0 and 9.
  assert summary['rmse'] == pytest.approx(
    {'mean': 3.0, 'std': np.sqrt(3.5), 'p10': 1.3, 'p50': 2.5, 'p90': 5.1}
  )


def test_a_metric_of_several_numbers_has_no_summary():
  clients = [{'loss': 1.0, 'hits': [3.0, np.nan], 'num_clients': 1}] * 2
  assert set(evaluation.summarize(clients)) == {'loss'}


def test_an_undefined_metric_is_counted_and_left_out():
  clients = [
    {'auc': value, 'num_clients': 1} for value in (np.nan, 1.0, np.nan)
  ]
  summary = evaluation.summarize(clients)['auc']
  assert summary['mean'] == 1.0
  assert summary['num_undefined'] == 2
  assert evaluation.summarize(clients[:1]) == {'auc': {'num_undefined': 1}}


def test_a_client_of_one_class_has_no_area_under_a_curve():
  dense = functools.partial(tf.keras.layers.Dense, 1, 'sigmoid')
  model = planted.factorization(
    lambda: tf.keras.Sequential(
      [
        *(tf.keras.Input([1]), dense(name='shared', kernel_initializer='ones')),
        dense(name='user', kernel_initializer='ones'),
      ]
    ),
    metrics=['AUC'],
  )
  labels = {'ann': [0, 1, 1, 1], 'bob': [0, 0, 0, 0], 'cid': [1, 1, 1, 1]}
  clients = {
    name: {
      'x': np.arange(4, dtype=np.float32)[:, None],
      'y': np.array(y, np.float32)[:, None],
    }
    for name, y in labels.items()
  }
  found = _evaluate(
    evaluation.build_query_evaluation(model),
    client_work.initial_weights(model)(),
    clients,
  )
  summary = evaluation.summarize(found.per_client)['auc']
  assert summary['mean'] == summary['p10'] == pytest.approx(1.0)
  assert summary['num_undefined'] == 2
  assert 0.5 < found.metrics['auc'] < 1.0


@pytest.mark.slow
def test_a_client_whose_steps_are_all_masked_has_no_loss():
  loss = tf.keras.losses.SparseCategoricalCrossentropy(True, ignore_class=-1)
  model = keras_models.from_keras(
    lambda: tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=[1])]),
    loss=loss,
  )
  x = np.zeros([2, 1], np.float32)
  found = _evaluate(
    evaluation.build_query_evaluation(model),
    client_work.initial_weights(model)(),
    {'ann': {'x': x, 'y': [0, 1]}, 'bob': {'x': x, 'y': [-1, -1]}},
  )
  summary = evaluation.summarize(found.per_client)['loss']
  assert summary['num_undefined'] == 1
  assert summary['mean'] == pytest.approx(np.log(2)) == found.metrics['loss']


@pytest.mark.slow
def test_new_clients_of_random_weights_are_known():
  alike = planted.factorization(planted.constant_user(_START))
  drawn = planted.factorization()
  sized = planted.factorization(
    planted.constant_user(_START), local='items', client_sized='items'
  )
  built = {
    'alike': algorithms.build_fed_per_eval(alike),
    'drawn': algorithms.build_fed_per_eval(drawn),
    'sized': algorithms.build_fed_per_eval(sized),
    'trained': algorithms.build_fed_rep_eval(drawn, personalise=Phase()),
    'fixed': evaluation.build_query_evaluation(
      drawn, client_state=client_state.frozen_init
    ),
  }
  found = {name for name, each in built.items() if each.is_of_random_weights}
  assert found == {'drawn', 'sized'}


# ---- refusals ----------------------------------------------------------------


def test_an_evaluation_that_measures_nothing_is_refused():
  with pytest.raises(
    client_work.CompositionError, match='No phase of the evaluation is measured'
  ):
    evaluation.build_evaluation(
      planted.factorization(),
      client_state=client_state.stateless,
      work=[Phase()],
    )


def test_an_evaluation_that_personalises_nothing_is_refused():
  with pytest.raises(client_work.CompositionError, match='Say which tiers'):
    evaluation.build_query_evaluation(
      planted.factorization(), personalise=Phase((tiers.LOCAL,))
    )


def test_a_metric_of_several_numbers_is_none_of_a_run():
  """It has no column, and selects no round."""
  each = tf.keras.metrics.F1Score(average=None, threshold=0.5, name='each')
  x = tf.keras.Input([3])
  model = keras_models.from_keras(
    lambda: tf.keras.Model(x, tf.keras.layers.Dense(2)(x)),
    loss='mse',
    metrics=[each, 'mae'],
  )
  measuring = evaluation.build_evaluation(
    model, work=[Phase(train=(), measured=True)]
  )
  found = evaluation_sets.EvaluationSet(measuring, None).metrics
  assert found[:2] == ['loss', 'mae']


_MEASURED = Phase(train=(), measured=True)


@pytest.mark.parametrize(
  ('attempt', 'message'),
  [
    (
      lambda held, weights: programs.evaluate(held, weights),
      'expected clients and how they are measured',
    ),
    (
      lambda held, _: programs.evaluate(programs.EvaluationSet(held, None), 3),
      'weights: expected a result of `train`, .* found a int',
    ),
    (
      lambda held, _: programs.evaluate(
        programs.EvaluationSet(held, None), tf.keras.Sequential()
      ),
      'weights: expected a result of `train`, .* found a Sequential',
    ),
    (
      lambda held, _: evaluation.build_evaluation(held.model, work=_MEASURED),
      'work: expected a list of phases, found a Phase',
    ),
    (
      lambda held, _: evaluation.build_evaluation(
        held.model, work=[dataclasses.replace(_MEASURED, on=splits.halves())]
      ),
      'on: expected one part of a split, .* found a Split',
    ),
    (
      lambda held, _: composition.compose(
        held.model, work=[], aggregation=tff.aggregators.MeanFactory()
      ),
      'aggregation: expected `Aggregation.*`, found a MeanFactory',
    ),
    (
      lambda held, _: packing.from_arrays({}, [[0]], held.example_spec),
      'partition: expected a mapping from client id to places, .* found a list',
    ),
    (
      lambda held, _: packing.pack({}, held.model),
      'example_spec: expected .*, found a PartialModel',
    ),
  ],
)
def test_arguments_of_other_kinds_are_named(request, weights, attempt, message):
  held = request.getfixturevalue('evaluation')
  with pytest.raises(errors.UserError, match=message):
    attempt(held, weights)
