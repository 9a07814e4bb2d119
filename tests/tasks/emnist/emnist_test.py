"""Laws of the EMNIST task: who holds which images, and what models see."""

import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tasks.emnist import images as emnist_images
from tasks.emnist import models as emnist_models
from tasks.emnist import task as emnist
from tasks.errors import OptionError
from tasks.task import Data
from tests.support.small_clients import real_examples
import tff_partial
from tff_partial import algorithms
from tff_partial import phases

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')
_PARTS = ('train', 'validation', 'test')


def _load(data: str = 'synthetic', seed: int = 0, **options) -> emnist.Emnist:
  return emnist.EmnistOptions(**options).load(
    Data(data=data, data_dir=_REAL), seed
  )


def _client(task: emnist.Emnist, part: str, user: str, spec) -> dict:
  """A user's real examples."""
  return real_examples(task.clients(part, spec), user)


# ---- the task ----------------------------------------------------------------


@pytest.fixture(scope='module', name='task')
def fixture_task():
  return _load(model='dense')


def test_users_are_measured_on_further_images(task):
  model = task.model_with('nobody')
  evaluation_clients = task.tests['seen']
  assert (evaluation_clients.part, evaluation_clients.seen) == ('test', True)
  assert task.validation.part == 'validation'
  support, _ = evaluation_clients.split
  spec = {**model.example_spec, **support.fields}
  for user in ('0000', '0007'):
    trained = _client(task, 'train', user, model.example_spec)
    measured = _client(task, 'test', user, spec)
    is_query = measured['is_query'].astype(bool)
    np.testing.assert_array_equal(measured['x'][~is_query], trained['x'])
    assert set(measured['y']) == set(trained['y'])
    assert 0.2 < is_query.mean() < 0.35


def test_counts_are_those_of_the_clients(task):
  spec = task.model_with('nobody').example_spec
  counts = task.counts
  assert counts['name'] == 'digits'
  assert counts['images'] == 1797 == sum(counts[p]['images'] for p in _PARTS)
  assert counts['users'] == 20 == counts['train']['users']
  assert task.clients('train', spec).num_examples == counts['train']['images']


def test_labels_are_divided_by_a_dirichlet_distribution():
  sizes = []
  for alpha in (0.1, 100.0):
    parts = _load(partition='dirichlet', alpha=alpha)._parts.values()
    held = [
      np.concatenate(mine)
      for mine in zip(*map(dict.values, parts), strict=True)
    ]
    assert sorted(np.concatenate(held)) == list(range(1797))
    sizes.append([len(mine) for mine in held])
  # Users hold unlike numbers of images, the more so the smaller alpha is.
  assert min(sizes[0]) >= 10
  assert np.std(sizes[0]) > 4 * np.std(sizes[1])


def test_each_user_has_an_attribute(task):
  attributes = task.attributes
  assert attributes['0003'] in ('3', '4')
  assert len(attributes) == 20


def test_unseen_users_took_no_part_and_may_have_few_images():
  few = _load(protocol='unseen', max_examples=2)
  assert few.counts['images_of_a_user'] == [2, 2]
  task = _load(protocol='unseen', max_examples=30)
  spec = task.model_with('nobody').example_spec
  parts = [task.clients(part, spec) for part in _PARTS]
  assert [len(part) for part in parts] == [16, 2, 2]
  assert len(set().union(*(part.client_ids for part in parts))) == 20
  assert sum(part.num_examples for part in parts) == 600
  assert task.tests['unseen'].split is None
  assert not task.tests['unseen'].seen


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, own',
  [
    ('linear', {'head/bias'}),
    ('dense', {'head/kernel', 'head/bias'}),
    ('cnn', {'head/kernel', 'head/bias'}),
  ],
)
def test_the_last_layer_may_be_the_users(kind, own):
  task = _load(model=kind)
  names = {v.name for v in task.model_with('own').trainable('local')}
  assert names == own
  copies = task.model_with('group_heads').trainable('group')
  assert {v.name for v in copies} == own
  assert not list(task.model_with('nobody').trainable('local'))
  (shift,) = task.model_with('shifted').trainable('local')
  assert shift.name == 'shift/own'
  with pytest.raises(OptionError, match='--user_form=table: the model of the'):
    task.model_with('table')


@pytest.mark.slow
def test_heads_of_their_own_learn(task):
  """Better than to name every user's most frequent label."""
  model, evaluation_clients = task.model_with('own'), task.tests['seen']
  process = algorithms.build_fed_rep(model)
  head = phases.Phase(train=('local',), epochs=5)
  evaluation = algorithms.build_fed_rep_eval(
    model, split=evaluation_clients.split, personalise=head
  )
  with tff_partial.runtimes.cohort(jit=False):
    trained = tff_partial.train(
      process,
      task.clients('train', process.example_spec),
      rounds=10,
      clients_per_round=5,
    )
    clients = task.clients('test', evaluation.example_spec)
    exam = tff_partial.EvaluationSet(evaluation, clients)
    measured = tff_partial.evaluate(exam, trained.weights)
  assert measured['num_clients'] == 20
  assert measured['num_examples'] == task.counts['test']['images']
  labels = [task.images.labels[held] for held in task._parts['test'].values()]
  majority = sum(np.bincount(mine).max() for mine in labels)
  assert measured['accuracy'] > majority / measured['num_examples'] + 0.1


@pytest.mark.parametrize(
  'options, expected',
  [
    ({'partition': 'alphabet'}, '--emnist_partition=alphabet: .* of labels'),
    ({'protocol': 'blind'}, '--protocol=blind'),
    ({'model': 'forest'}, '--model=forest'),
    ({'edition': 'letters'}, '--data_set=letters'),
    ({'max_examples': 2}, '--max_examples=2'),
  ],
)
def test_impossible_options_are_refused(options, expected):
  with pytest.raises(OptionError, match=expected):
    emnist.EmnistOptions(**options)


def test_copies_are_only_of_methods_that_have_them():
  with pytest.raises(OptionError, match='--emnist_num_groups=3: only ifca'):
    _load(num_groups=3).model_with('nobody')


def test_small_digits_have_no_large_convolutions_and_no_writers():
  with pytest.raises(OptionError, match='--model=fed_avg_cnn: images of 8 x 8'):
    _load(model='fed_avg_cnn').model_with('own')
  with pytest.raises(OptionError, match="who wrote the images of 'digits'"):
    _load(partition='writers')


def test_federated_emnist_is_fetched_on_demand_only(monkeypatch):
  load = mock.Mock(return_value=emnist_images.load_digits())
  monkeypatch.setattr(emnist_images, 'load_federated_emnist', load)
  options = emnist.EmnistOptions(edition='federated_emnist')
  with pytest.raises(OptionError, match='--download'):
    options.load(Data(data_dir='somewhere'), 0)
  load.assert_not_called()
  task = options.load(Data(data_dir='somewhere', download=True), 0)
  load.assert_called_once_with('somewhere', only_digits=True)
  assert task.counts['users'] == 20


@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
def test_the_real_users():
  counts = _load('real').counts
  assert (counts['images'], counts['users']) == (70_000, 20)
  smallest, largest = counts['images_of_a_user']
  # In pFedMe's experiments, 1,165 to 3,834.
  assert 2 < largest / smallest < 4
  counts = _load('real', partition='writers').counts
  assert (counts['images'], counts['users']) == (60_000, 539)
  assert counts['images_of_a_user'] == [19, 131]


# ---- models ------------------------------------------------------------------


@pytest.mark.parametrize(
  'kind, parameters',
  [
    # 784 pixels and a one, for ten digits; and the same for 100 units first.
    ('linear', 785 * 10),
    ('dense', 785 * 100 + 101 * 10),
    ('cnn', 10 * 32 + 289 * 64 + (144 * 64 + 1) * 128 + 129 * 10),
    # As many as PFLlib's FedAvgCNN has for one channel.
    ('fed_avg_cnn', 582_026),
  ],
)
def test_sizes_of_models(kind, parameters):
  model = emnist_models.build_classifier(kind, (28, 28), 10, 255)
  assert model.count_params() == parameters
  assert model.output_shape == (None, 10)


def test_ink_is_one():
  model = emnist_models.build_classifier('linear', (2, 1), 1, 16)
  model.get_layer('head').set_weights([np.array([[1.0], [10.0]]), np.zeros(1)])
  image = np.array([[[16], [8]]], np.uint8)
  assert float(model(tf.constant(image))) == pytest.approx(1.0 + 5.0)
