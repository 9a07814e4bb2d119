"""Laws of the preference task: who likes what, its F1, and its model."""

import os

import numpy as np
import pytest
from sklearn import metrics
import tensorflow as tf

from tasks.errors import OptionError
from tasks.experiment import from_recipe
from tasks.experiment import Output
from tasks.experiment import run as run_experiment
from tasks.experiment import trainable
from tasks.experiment.options import hyperparameters
from tasks.experiment.runs import running
from tasks.preference import f1
from tasks.preference import losses
from tasks.preference import mnist as mnist_preference
from tasks.preference import models as preference_models
from tasks.preference import preferences
from tasks.task import Data
import tff_partial
from tff_partial.training import sampling

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')
_SIZES = {'train': 20, 'validation': 10, 'test': 10}
_KINDS = np.repeat(np.arange(10), 100)


def _load(data: str = 'synthetic', seed: int = 0, **options):
  chosen = mnist_preference.MnistOptions(**options)
  return chosen.load(Data(data=data, data_dir=_REAL), seed)


# ---- who likes what ----------------------------------------------------------


def test_users_are_as_common_as_in_the_paper():
  def users(name: str, number: int = 9_000) -> list[int]:
    shares = mnist_preference.SHARES[name]
    return preferences.numbers_of_users(number, shares)

  assert users('balanced') == [900] * 10
  assert users('imbalanced') == [2250, 1350, *[900] * 4, *[450] * 4]
  assert sum(users('imbalanced', 333)) == 333


def test_half_of_what_users_see_is_liked():
  users_of = [2] * 10
  parts = preferences.draw(_KINDS, users_of, _SIZES)
  assert set(parts) == set(_SIZES)
  for part, size in _SIZES.items():
    assert len(parts[part]) == 20
    for user, held in parts[part].items():
      assert len(held) == size
      liked = _KINDS[held] == preferences.kind_liked_by(user)
      assert liked.sum() == size // 2
      # In no order.
      assert 0 < liked[: size // 2].sum() < size // 2 or size == 10
  for user in parts['train']:
    mine = np.concatenate([parts[part][user] for part in _SIZES])
    assert len(set(mine)) == 40  # Within a user nothing occurs twice.


def test_a_user_does_not_depend_on_the_others():
  few = preferences.draw(_KINDS, [1] * 10, _SIZES)
  many = preferences.draw(_KINDS, [5] * 10, _SIZES)
  for part in _SIZES:
    for user in few[part]:
      np.testing.assert_array_equal(few[part][user], many[part][user])
  other = preferences.draw(_KINDS, [1] * 10, _SIZES, seed=1)
  assert set(other['train']['3-0000']) != set(few['train']['3-0000'])


def test_a_user_cannot_like_more_than_there_is():
  kinds = np.repeat([0, 1], [19, 100])
  with pytest.raises(OptionError, match='19 examples of kind 0.*needs 20'):
    preferences.draw(kinds, [1, 1], _SIZES)
  with pytest.raises(OptionError, match='100 examples of kind 1 and 19 others'):
    preferences.draw(kinds, [0, 1], _SIZES)


# ---- F1 ----------------------------------------------------------------------


def test_the_constant_predictor_of_the_paper():
  # Of ten examples five are liked; all are said to be disliked.
  assert float(f1.macro([0, 0, 5, 5])) == pytest.approx(1 / 3)
  assert float(f1.macro([5, 5, 0, 0])) == pytest.approx(1 / 3)
  assert float(f1.average([[0, 0, 5, 5]] * 10)) == pytest.approx(1 / 3)


def test_f1_agrees_with_scikit_learn():
  draw = np.random.default_rng(0)
  truth, said = draw.integers(0, 2, [2, 100])
  (tn, fp), (fn, tp) = metrics.confusion_matrix(truth, said)
  expected = metrics.f1_score(truth, said, average='macro')
  assert float(f1.macro([tp, fp, fn, tn])) == pytest.approx(expected)


def test_sub_populations_count_alike_or_by_their_size():
  # One that is right about all of 30, one that is wrong about all of 10.
  counts = [[15, 0, 0, 15], [0, 5, 5, 0]]
  assert float(f1.average(counts)) == pytest.approx(0.5)
  assert float(f1.average(counts, True)) == pytest.approx(0.75)
  # Who is not there does not count; nobody at all is no number.
  assert float(f1.average([*counts, [0, 0, 0, 0]])) == pytest.approx(0.5)
  assert np.isnan(float(f1.average([[0, 0, 0, 0]])))
  assert np.isnan(float(f1.average([[0, 0, 0, 0]], True)))


def test_f1_by_prevalence():
  by_name = {m.name: m for m in f1.build_metrics([0.2, 0.2, 0.6])}
  assert list(by_name)[-2:] == ['f1_share_0.6', 'f1_share_0.2']
  # The first says what is right of both of its users' images, the second
  # always no, the third the opposite of what is right.
  kinds = [[1, 0, 0], [0, 1, 0], [1, 0, 1], [0, 1, 1], [1, 0, 2], [0, 1, 2]]
  # The first is prototypical.
  labels = [[*row, row[2] == 0] for row in kinds]
  said = tf.one_hot([1, 0, 0, 0, 0, 1], 2)
  for metric in by_name.values():
    metric.update_state(tf.constant(labels), said)
  for name, expected in {
    'f1_share_0.6': 0.0,
    'f1_share_0.2': (1 + 1 / 3) / 2,
    'f1': (1 + 1 / 3 + 0) / 3,
    'f1_not_told': (1 / 3 + 0) / 2,
  }.items():
    assert float(by_name[name].result()) == pytest.approx(expected)
  alike = [m.name for m in f1.build_metrics([0.5, 0.5])]
  assert alike == ['f1', 'f1_not_told', 'f1_weighted', 'f1_0', 'f1_1']


def test_the_metric_counts_what_the_functions_take():
  # Liked or not, what is shown, the user's sub-population, if it is told that.
  labels = tf.constant(
    [[1, 0, 0, 0], [0, 2, 0, 0], [1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 0]]
  )
  said = tf.constant([1, 1, 1, 0, 0])
  logits = tf.one_hot(said, 2)
  by_name = {m.name: m for m in f1.build_metrics([1 / 3] * 3)}
  for metric in by_name.values():
    metric.update_state(labels, logits, sample_weight=[1, 1, 1, 1, 0])
  counts = [[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
  np.testing.assert_array_equal(by_name['f1'].counts, counts)
  for name, expected in {
    'f1': f1.average(counts),
    'f1_weighted': f1.average(counts, True),
    'f1_0': f1.macro(counts[0]),
    'f1_1': 1.0,
    'f1_2': np.nan,
  }.items():
    np.testing.assert_equal(float(by_name[name].result()), float(expected))
  by_name['f1'].update_state(labels, logits * np.nan)
  assert np.isnan(by_name['f1'].result())
  clone = f1.PreferenceF1.from_config(by_name['f1_1'].get_config())
  assert (clone.name, clone.groups) == ('f1_1', [1])


# ---- the model ---------------------------------------------------------------


def test_the_encoder_of_appendix_b():
  encoder = preference_models.build_encoder((28, 28), 2)
  assert encoder.output_shape == (None, 64)
  shapes = [
    encoder.get_layer(f'convolution_{i}').output_shape[1:] for i in (1, 2, 3)
  ]
  assert shapes == [(14, 14, 16), (7, 7, 32), (1, 1, 64)]
  # Weights and biases of convolutions; a scale and a shift of each output.
  convolutions = (2 * 9 + 1) * 16 + (16 * 9 + 1) * 32 + (32 * 49 + 1) * 64
  normalizations = 2 * (14 * 14 * 16 + 7 * 7 * 32 + 64)
  assert encoder.count_params() == convolutions + normalizations
  small = preference_models.build_encoder((8, 8), 1)
  assert small.output_shape == (None, 64)


def test_the_embedding_is_a_diagonal_beside_the_image():
  image = tf.zeros([2, 4, 3, 1])
  personal = tf.constant([[5.0, 6.0], [7.0, 8.0]])
  both = preference_models.append_to_image(image, personal)
  assert both.shape == (2, 4, 3, 2)
  expected = np.zeros([2, 4, 3])
  expected[:, 0, 0], expected[:, 1, 1] = [5, 7], [6, 8]
  np.testing.assert_array_equal(both[..., 1], expected)
  with pytest.raises(OptionError, match='4 numbers do not fit.*at most 3'):
    preference_models.append_to_image(image, tf.zeros([2, 4]))


@pytest.mark.slow
def test_the_head_sees_features_and_embedding():
  model = preference_models.build_preference((28, 28), 255, 28)
  assert model.get_layer('head').input_shape == (None, 92)  # As in the paper.
  assert model.output_shape == (None, 2)
  plain = preference_models.build_preference((28, 28), 255)
  assert plain.get_layer('head').input_shape == (None, 64)
  image = np.zeros([3, 28, 28], np.uint8)
  assert model(image).shape == (3, 2)
  (vector,) = model.get_layer('personal_embedding').get_weights()
  assert vector.shape == (28,)
  assert 0 <= vector.min() < vector.max() <= 1


def test_only_liking_is_learned():
  labels = tf.constant([[1, 7, 3, 0], [0, 3, 3, 0]])
  logits = tf.constant([[0.0, 0.0], [0.0, 0.0]])
  loss = losses.preference_loss(labels, logits)
  np.testing.assert_allclose(loss, np.log([2.0, 2.0]), rtol=1e-6)
  metric = losses.PreferenceAccuracy('accuracy')
  metric.update_state(labels, tf.constant([[0.0, 1.0], [0.0, 1.0]]))
  assert float(metric.result()) == 0.5


# ---- the task ----------------------------------------------------------------


@pytest.fixture(scope='module', name='task')
def fixture_task():
  return _load(num_users=50, embedding_size=4)


@pytest.mark.slow
def test_users_come_with_what_they_think(task):
  model = task.model_with('own')
  support, _ = task.tests['seen'].split
  parts = {}
  for part in _SIZES:
    # The split by mark reads a field, which training users lack.
    fields = {} if part == 'train' else support.fields
    parts[part] = task.clients(part, {**model.example_spec, **fields})
  assert [len(p) for p in parts.values()] == [50, 50, 50]
  client = {}
  for part in ('train', 'test'):
    seeds = sampling.client_seeds(['3-0001'], 0)
    (value,) = parts[part].cohort(['3-0001'], seeds)
    client[part] = value['examples']
    assert int(value['count']) == {'train': 20, 'test': 30}[part]
  liked, digit, group, is_prototypical = client['test']['y'].T
  assert not is_prototypical.any()  # There is one of five, the first.
  np.testing.assert_array_equal(liked, digit == 3)
  assert (group == 3).all()
  np.testing.assert_array_equal(client['test']['is_query'], [0] * 20 + [1] * 10)
  np.testing.assert_array_equal(client['test']['x'][:20], client['train']['x'])
  assert client['test']['x'].dtype == np.uint8
  assert liked[:20].sum() == 10
  assert liked[20:].sum() == 5


@pytest.mark.slow
def test_a_run_measures_so_many_users_drawn_once():
  ids = []
  for seed in (0, 0, 1):
    users = {'users': 50, 'validation_users': 7, 'test_users': 3}
    config = from_recipe(
      'mnist_preference_global', data='synthetic', seed=seed, **users
    )
    task = running.load(config)
    run = trainable.Trainable(config, task)
    ids += [
      run.evaluation_set(clients).clients.client_ids
      for clients in (task.validation, task.tests['seen'])
    ]
  assert [len(set(some)) for some in ids] == [7, 3] * 3
  assert ids[:2] == ids[2:4] != ids[4:]
  demo = from_recipe('demo', rounds=1, validation_users=3, test_users=2)
  report = run_experiment(demo, Output(None, tensorboard=False)).report
  counted = report['data']['clients']
  assert (counted['validation'], counted['test']) == (3, 2)
  assert report['validation']['num_clients'] == 3


def test_counts_and_attributes(task):
  counts = task.counts
  assert counts['users_of_sub_populations'] == [5] * 10
  assert counts['train'].items() >= {'users': 50, 'images': 1000}.items()
  assert 0 < counts['train']['distinct_images'] <= 1000
  assert 0 < counts['test_images_trained_on_by_somebody'] < 1
  assert task.attributes['7-0002'] == '7'
  assert len(task.attributes) == 50


@pytest.mark.slow
def test_what_is_the_users(task):
  def own(task):
    return {v.name for v in task.model_with('own').trainable('local')}

  assert own(task) == {'personal_embedding/own'}
  assert own(_load(num_users=10)) == {'head/kernel', 'head/bias'}
  assert not list(task.model_with('nobody').trainable('local'))


@pytest.mark.slow
@pytest.mark.parametrize(
  ('share', 'expected'),
  [(0.0, ['0']), (0.4, ['0', '1']), (1.0, ['0', '1', '2', '3', '4'])],
)
def test_the_first_users_of_a_digit_are_prototypical(share, expected):
  task = _load(num_users=50, prototypical_share=share)
  spec = task.model_with('heads').example_spec
  users = [f'{digit}-000{number}' for digit in (0, 7) for number in range(5)]
  seeds = sampling.client_seeds(users, 0)
  cohort = task.clients('train', spec).cohort(users, seeds)
  found = [
    user
    for user, client in zip(users, cohort, strict=True)
    if client['examples']['y'][:, losses.IS_PROTOTYPICAL].all()
  ]
  assert found == [f'{digit}-000{n}' for digit in (0, 7) for n in expected]


def test_what_is_not_liked_is_of_no_type_for_the_triplet_loss():
  labels = tf.constant([[1, 7, 3, 0], [0, 3, 3, 0]])
  found = preference_models.PARTS.liked_type(labels)
  np.testing.assert_array_equal(found, [7, -1])


@pytest.mark.slow
def test_the_type_head_can_be_left_out_of_the_loss():
  labels = tf.constant([[1, 3, 3, 0], [0, 5, 3, 0]])
  logits = tf.constant([[0.2, -0.1], [1.0, 0.5]])
  types = tf.random.stateless_normal([2, 10], seed=[0, 0])
  predictions = {'liked': logits, 'type': types}
  entropy = tf.nn.sparse_softmax_cross_entropy_with_logits

  def loss(**options) -> float:
    model = _load(num_users=10, **options).model_with('heads')
    is_real = tf.constant([True, True])
    value = model.loss(labels, predictions, tf.ones([2]), is_real)
    return float(value.objective)

  of_liked = entropy([1, 0], logits).numpy().mean()
  of_type = entropy([3, 5], types).numpy().mean()
  assert loss(type_head=False) == pytest.approx(of_liked)
  assert loss() == pytest.approx(of_liked + of_type)


@pytest.mark.slow
def test_it_trains_and_is_measured_by_f1(task):
  model = task.model_with('own')
  steps = tff_partial.Phase(batch_size=10)
  process = tff_partial.algorithms.build_fed_recon(model, reconstruct=steps)
  evaluation = tff_partial.algorithms.build_fed_recon_eval(
    model, split=task.validation.split, personalise=steps
  )
  with tff_partial.runtimes.cohort(jit=False):
    clients = task.clients('train', process.example_spec)
    trained = tff_partial.train(process, clients, rounds=2, clients_per_round=3)
    clients = task.clients('validation', evaluation.example_spec)
    measured = tff_partial.evaluate(
      tff_partial.EvaluationSet(evaluation, clients), trained.weights
    )
  assert measured['num_clients'] == 50
  assert measured['num_examples'] == 500
  assert 0 < measured['f1'] <= 1
  names = {name for name in measured if name.startswith('f1')}
  by_group = {f'f1_{g}' for g in range(10)}
  assert names == {'f1', 'f1_not_told', 'f1_weighted', *by_group}


@pytest.mark.slow
def test_there_may_be_more_heads_than_kinds():
  model = _load(num_users=50, num_groups=20).model_with('heads')
  shapes = {w.name: tuple(w.shape) for w in model.build().weights}
  assert model.num_groups == 20
  assert shapes['prototypes/vectors:0'] == (20, 8)
  assert shapes['type_head/bias:0'] == (10,)


@pytest.mark.slow
def test_what_own_heads_do_not_train_is_not_sent():
  model = _load(num_users=10).model_with('own_head')
  sent = model.specs('global')
  assert 'type_head/bias' in sent and 'prototypes/vectors' not in sent


@pytest.mark.slow
def test_fewer_heads_than_kinds_are_for_users_who_are_told_nothing():
  few = _load(num_users=50, num_groups=5)
  assert few.model_with('heads').num_groups == 5
  assignment = hyperparameters.FedEmbed().assignment
  assert assignment('least_loss', few.fed_embed_parts).assign
  for rule in ('type', 'prototype'):
    with pytest.raises(OptionError, match='preference_groups gives fewer'):
      assignment(rule, few.fed_embed_parts)


@pytest.mark.parametrize(
  ('options', 'form'),
  [
    ({'embedding_spread': 0.5}, 'own'),
    ({'type_head': False}, 'clusters'),
    ({'embedding_size': 4}, 'head_clusters'),
    ({'num_groups': 20}, 'nobody'),
  ],
)
def test_what_a_model_does_not_have_is_refused(options, form):
  with pytest.raises(OptionError, match='model does not have it'):
    _load(num_users=10, **options).model_with(form)


@pytest.mark.parametrize(
  'options, expected',
  [
    ({'shares': 'equal'}, 'shares=equal: choose one of balanced, imbalanced'),
    ({'num_users': 9}, '--users=9: so few users'),
    (
      {'num_users': 10, 'shares': 'imbalanced'},
      '--users=10: .* no user would like kind 6. Give 18 users',
    ),
    ({'embedding_size': -1}, 'embedding_size=-1'),
    ({'embedding_spread': 0.0}, '--preference_embedding_spread=0.0'),
    ({'prototypical_share': 1.5}, 'prototypical_share=1.5'),
  ],
)
def test_impossible_options_are_refused(options, expected):
  with pytest.raises(OptionError, match=expected):
    _load(**options)


@pytest.mark.slow
@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
def test_the_papers_users():
  counts = _load('real', shares='imbalanced').counts
  assert counts['users'] == 9_000
  assert counts['users_of_sub_populations'][:3] == [2250, 1350, 900]
  assert counts['train']['images'] == 180_000
