"""The task of next words, and what it asks of runs."""

import collections
import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tasks.errors import OptionError
from tasks.experiment import from_recipe
from tasks.experiment import run
from tasks.experiment.config import Config
from tasks.experiment.config import TASKS
from tasks.experiment.runs.result import Result
from tasks.experiment.trainable import Trainable
from tasks.next_word import private_words
from tasks.next_word import synthetic
from tasks.next_word.models import BUCKET_LAYER
from tasks.task import Data
from tasks.task import NOBODY
from tasks.task import OWN
from tasks.task import Release
from tasks.task import Spent
from tasks.task import TABLE
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tests.support import planted
from tests.support.small_texts import texts_of
import tff_partial
from tff_partial import algorithms
from tff_partial import phases
from tff_partial import tiers
from tff_partial.data import splits

# 30 authors of some 8 sentences, 60 words and 5 buckets, and a tiny LSTM.
_SMALL: dict[str, Any] = {
  'data': 'synthetic',
  'next_word_vocabulary_size': 60,
  'next_word_buckets': 5,
  'next_word_max_tokens': 8,
  'next_word_embedding': 4,
  'lstm_units': 4,
  'next_word_projection': 4,
  'rounds': 2,
  'clients_per_round': 4,
  'evaluate_every': 2,
  'jit': 'false',
}


@pytest.fixture(scope='module', autouse=True)
def fixture_few_authors():
  with pytest.MonkeyPatch.context() as patch:
    few = functools.partial(synthetic.generate, 30, 8)
    patch.setattr(synthetic, 'generate', few)
    yield


def _config(recipe: str = 'fed_recon', **flags: Any) -> Config:
  return from_recipe(f'next_word_{recipe}').with_flags({**_SMALL, **flags})


@functools.cache
def _run(recipe: str = 'fed_recon', **flags: Any) -> Result:
  """A run in memory, once for all tests that look at it."""
  return run(_config(recipe, **flags))


def _unseen(result: Result) -> dict[str, Any]:
  return result.report['test']['unseen']


@functools.cache
def _task(release: Release = Release(), **flags: Any) -> Any:
  chosen = _config(**flags).task
  return TASKS['next_word'].load(chosen, Data(data='synthetic'), 0, release)


# ---- the task ----------------------------------------------------------------


@pytest.mark.slow
def test_authors_are_divided_and_described():
  counts = _task().counts
  assert counts['users'] == 30
  # 10 and 20 % of the authors.
  users = [counts[part]['users'] for part in (TRAIN, VALIDATION, TEST)]
  assert users == [21, 3, 6]
  assert counts['vocabulary'] == 60
  assert 0.5 < counts['coverage'] < 1.0
  spec = _task().model_with(OWN).example_spec
  clients = [_task().clients(part, spec) for part in (TRAIN, VALIDATION, TEST)]
  names = [name for part in clients for name in part.client_ids]
  assert len(set(names)) == 30
  assert sum(part.num_examples for part in clients) == counts['sentences']


@pytest.mark.slow
def test_vectors_of_other_words_are_local_or_global():
  local, shared = (_task().model_with(form) for form in (OWN, NOBODY))
  (name,) = local.specs(tiers.LOCAL)
  assert name == f'{BUCKET_LAYER}/embeddings'
  assert local.specs(tiers.LOCAL)[name].shape == [5, 4]
  assert not shared.specs(tiers.LOCAL)
  assert {*local.specs(tiers.GLOBAL), name} == {*shared.specs(tiers.GLOBAL)}


@pytest.mark.slow
@pytest.mark.parametrize(
  'algorithm', ['fed_recon', 'fed_recon_cache', 'fed_recon_knn_per']
)
def test_local_vectors_begin_with_values_that_all_learn_where_asked(algorithm):
  config = _config(algorithm=algorithm, learned_first_values=True)
  trainable = Trainable(config, _task())
  first = f'first_values/{BUCKET_LAYER}/embeddings'
  for model in (
    trainable.process.model,
    trainable.evaluation(_task().validation).model,
  ):
    assert first in model.specs(tiers.GLOBAL)


@pytest.mark.slow
def test_what_all_learn_alike_begins_with_no_other_learned_values():
  config = _config('fed_yogi', learned_first_values=True)
  with pytest.raises(OptionError, match='--learned_first_values: .* no local'):
    Trainable(config, _task())


def test_there_is_no_table_of_all_users():
  with pytest.raises(OptionError, match='--user_form=table: the model of the'):
    _task().model_with(TABLE)


def test_sentences_are_divided_by_time_where_authors_took_part():
  task = _task(protocol='seen')
  assert task.parts[TRAIN].users.tolist() == list(range(30))
  (name,) = task.tests
  assert name == 'seen' and task.tests[name].seen
  for part in (VALIDATION, TEST):
    of_part = task.parts[part]
    # What is measured was written after what was trained on.
    assert (of_part.older[:, 1] <= of_part.newer[:, 0]).all()


def test_the_vocabulary_knows_no_sentence_that_is_measured():
  task = _task(protocol='seen', next_word_vocabulary_size=1000)
  counts, held = collections.Counter(), task.parts[TRAIN]
  for user in held.users:
    number = held.newer[user, 1] - held.older[user, 0]
    for text in texts_of(task.sentences, user)[:number]:
      counts.update(text.split())
  assert task.words.words == tuple(
    sorted(counts, key=lambda w: (-counts[w], w))
  )
  assert task.counts['tokens'] == counts.total()


# ---- runs --------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_measures_what_table_2_does():
  result = _run()
  measured = _unseen(result)
  for name in ('accuracy', 'accuracy_in_vocabulary', 'accuracy_top_3'):
    assert 0.0 <= measured[name] <= 1.0
  assert measured['accuracy'] <= measured['accuracy_in_vocabulary']
  assert measured['accuracy_in_vocabulary'] <= measured['accuracy_top_3']
  # Sentences are padded; the loss is the mean over their tokens alone.
  assert measured['perplexity'] == pytest.approx(np.exp(measured['loss']), 1e-4)
  assert f'{measured["perplexity"]:.4f}' in str(result)


@pytest.mark.slow
def test_the_recipes_differ_in_whose_the_vectors_are():
  local, shared = (_run(name).report for name in ('fed_recon', 'fed_yogi'))
  # Five vectors of four numbers stay with the client.
  sent = [report['communication']['upload_bytes'] for report in (local, shared)]
  assert sent[1] - sent[0] == 5 * 4 * 4


@pytest.mark.slow
def test_seen_authors_are_measured_on_newer_sentences():
  result = _run('fed_yogi', protocol='seen')
  assert 0.0 <= result.report['test']['seen']['accuracy'] <= 1.0


# ---- weighting by tokens -----------------------------------------------------


def test_clients_count_by_their_tokens():
  """Two clients with a sentence each, of which one has twice as many tokens."""

  def build() -> tf.keras.Model:
    ids = tf.keras.Input([4], dtype=tf.int32)
    one = tf.keras.layers.Lambda(lambda x: tf.ones([tf.shape(x)[0], 4, 1]))(ids)
    bias = tf.keras.layers.Dense(1, use_bias=False, name='bias')(one)
    return tf.keras.Model(ids, bias)

  def loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
    losses = -tf.cast(labels, tf.float32) * predictions[..., 0]
    losses._keras_mask = tf.not_equal(labels, 0)
    return losses

  model = tff_partial.from_keras(
    build, loss=loss, metrics=list, labels=tf.TensorSpec([4], tf.int32)
  )
  config = _config('fed_yogi', client_weighting='targets')
  process = tff_partial.algorithms.build_fed_avg(
    model,
    training=phases.Phase(optimizer=phases.sgd(1.0)),
    aggregation=config.server.aggregation(10),
  )
  rows = np.zeros([1, 4], np.int32)
  clients = {
    'two tokens': {'x': rows, 'y': np.array([[1, 1, 0, 0]], np.int32)},
    'four tokens': {'x': rows, 'y': np.array([[4, 4, 4, 4]], np.int32)},
  }
  weights = planted.before_and_after(process, clients, 'seed')
  (before,), (after,) = (named.values() for named in weights)
  # Steps of 1 and 4, of which the second counts twice: (2 * 1 + 4 * 4) / 6.
  assert (after - before).item() == pytest.approx(3.0, rel=1e-5)


def test_a_private_run_does_not_weigh_by_tokens():
  with pytest.raises(OptionError, match='--client_weighting=targets: a client'):
    _config(client_weighting='targets', noise_multiplier=1.0)


# ---- optimizers and tuning ---------------------------------------------------


def _loss(evaluation: Any) -> float:
  """What first weights cost the authors for tests."""
  clients = _task().clients(TEST, evaluation.example_spec)
  names = list(clients.client_ids)
  cohort = clients.cohort(names, np.zeros([len(names), 2], np.int32))
  process = Trainable(_config(), _task()).process
  held = process.get_model_weights(process.initialize())
  kept = [evaluation.initialize_client([0, 0]) for _ in names]
  return float(evaluation.evaluate(held, kept, cohort).metrics['loss'])


@pytest.mark.slow
def test_tuning_after_reconstruction_by_nothing_changes_nothing():
  """With a rate of zero it is FedRecon's evaluation; otherwise it is not."""
  model = _task().model_with(OWN)
  rebuild = phases.Phase(optimizer=phases.sgd(0.3), batch_size=4)
  plain = algorithms.build_fed_recon_eval(model, personalise=rebuild)
  losses = [
    _loss(
      algorithms.build_fed_recon_fine_tuning_eval(
        model,
        personalise=rebuild,
        tune=phases.Phase(optimizer=phases.sgd(rate), batch_size=4),
        split=splits.halves(),
      )
    )
    for rate in (0.0, 0.5)
  ]
  assert losses[0] == pytest.approx(_loss(plain), rel=1e-6)
  assert losses[1] < losses[0]


@pytest.mark.slow
def test_clients_with_a_memory_tune_before_where_a_rate_is_given():
  """Where the memory has no share, it is FedRecon followed by fine-tuning."""

  def loss(algorithm: str, **flags: Any) -> float:
    trainable = Trainable(_config(algorithm=algorithm, **flags), _task())
    return _loss(trainable.evaluation(_task().validation))

  plain = loss('fed_recon')
  tuned = loss('fed_recon_fine_tuning', tuning_learning_rate=0.5)
  remembering = loss(
    'fed_recon_cache', tuning_learning_rate=0.5, memory_mixing=0
  )
  assert remembering == pytest.approx(tuned, rel=1e-6)
  assert tuned < plain - 1e-3


@pytest.mark.slow
def test_a_trained_state_is_measured_by_the_row_of_fine_tuning():
  trained = _run(rounds=2).trained
  config = _config(algorithm='fed_recon_fine_tuning')
  weights = Trainable(config, _task()).process.get_model_weights(trained.state)
  found, expected = (dict(w.trainable) for w in (weights, trained.weights))
  tf.nest.assert_same_structure(found, expected)


# ---- a vocabulary that is paid for -------------------------------------------

_PRIVATE = {
  'client_weighting': None,
  'target_epsilon': 8.0,
  'delta': 1e-4,
  'noise_seed': 3,
  'simulated_population': 5000,
  'next_word_vocabulary_noise': 2.0,
  'next_word_vocabulary_delta': 1e-5,
  'next_word_words_per_user': 20,
}


@pytest.mark.slow
def test_a_noised_vocabulary_is_paid_for():
  config = _config(**_PRIVATE)
  assert config.spent == Spent((2.0,), 1e-5)
  result = run(config)
  said = result.report['privacy']
  assert 7.9 < said['epsilon'] <= 8.0 and said['delta'] == 1e-4
  assert 'vocabulary' not in said['assumed_public']
  # Which words clients use is not told exactly either.
  assert 'upload_bytes_by_rows' not in result.report['communication']
  # Without the vocabulary the same epsilon takes less noise in the rounds.
  plan = config.privacy.ledger(21, config.loop, config.spent).plan
  cheaper = config.privacy.ledger(21, config.loop).plan
  assert plan.noise_multiplier > cheaper.noise_multiplier
  assert plan.delta_of_noise == pytest.approx(9e-5)


def test_an_exact_vocabulary_of_a_private_run_is_said_to_be_public():
  assert _task().learned_from_training == ('vocabulary',)
  task = _task(Release(0, 5000), **_PRIVATE)
  assert task.learned_from_training == ()


def test_more_users_tell_more_words():
  """As many users as there are tell few words; a hundred times as many all."""
  task = _task()
  learn = functools.partial(
    *(private_words.learn, task.sentences, task.parts[TRAIN].users, 60),
    *(private_words.NoisyThreshold(20, 2.0, 1e-5),),
    noise_seed=0,
  )
  with pytest.raises(OptionError, match='A word is told if'):
    learn()
  told = [len(learn(simulated_users=number).words) for number in (200, 5000)]
  assert told[0] < told[1] == 60


def test_noise_in_a_run_that_counts_no_epsilon_is_refused():
  with pytest.raises(OptionError, match='--task=next_word: it would release'):
    _config(next_word_vocabulary_noise=2.0)
  local = {'target_epsilon': 8.0, 'dp': 'local', 'clip': 1.0}
  local['client_weighting'] = 'uniform'
  with pytest.raises(OptionError, match='--dp=local: .* of a trusted server'):
    _config(next_word_vocabulary_noise=2.0, **local)


@pytest.mark.parametrize(
  ('flag', 'value', 'said'),
  [
    ('vocabulary_noise', 0.0, 'without noise the threshold protects no one'),
    ('vocabulary_delta', 1.0, 'give a probability above 0 and below 1'),
  ],
)
def test_impossible_noise_is_refused(flag, value, said):
  with pytest.raises(OptionError, match=f'next_word_{flag}=.*{said}'):
    _config(**{f'next_word_{flag}': value})
