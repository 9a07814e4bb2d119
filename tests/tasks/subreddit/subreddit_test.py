"""Laws of the tasks with documents: who is measured on what, and learning."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.experiment.command_line.arguments import parse
from tasks.subreddit import documents
from tasks.subreddit import models as subreddit_models
from tasks.subreddit import synthetic as subreddit_synthetic
from tasks.subreddit import task as subreddit
from tasks.task import Data
from tasks.task import TABLE
from tests.support.small_clients import real_examples
import tff_partial
from tff_partial import runtimes
from tff_partial import tiers
from tff_partial.composition import Aggregation

_SIZES = subreddit_models.DocumentSizes(
  ngram_lengths=(3,),
  ngram_buckets=500,
  char_embedding=8,
  places_per_step=8,
  lstm_units=8,
  mlp_units=(16,),
  user_embedding=7,
)


# Takes part in training.
_AUTHOR = 'author0001'


def _options(
  kind=subreddit.SubredditOptions, **options
) -> documents.DocumentOptions:
  return kind(
    **{'max_chars': 48, 'num_support': 2, 'num_reserved': 5, **options},
    sizes=_SIZES,
  )


@pytest.fixture(scope='module', name='task')
def fixture_task():
  return subreddit.Subreddit(
    subreddit_synthetic.comments(30, 4, 30), _options(held_out_share=0.2), 0
  )


@pytest.fixture(scope='module', name='sticker')
def fixture_sticker():
  return subreddit.Sticker(
    subreddit_synthetic.messages(20, 3, 40, taste_scale=4.0), _options(), 0
  )


def _ids(task, part: str) -> tuple[str, ...]:
  return task.clients(part, task.model_with('own').example_spec).client_ids


def _client(task, part: str, author: str = _AUTHOR, **more) -> dict:
  """An author's real examples, with what the local model reads and more."""
  spec = {**task.model_with('own').example_spec, **more}
  return real_examples(task.clients(part, spec), author)


def _texts_of(task, encoded: np.ndarray) -> list[str]:
  characters = '??' + task.vocabulary.characters
  return [''.join(characters[n] for n in row if n) for row in encoded]


# ---- who is measured on what -------------------------------------------------


@pytest.mark.slow
def test_examples_are_the_authors_comments(task):
  found, author = [], _ids(task, 'test')[0]
  for part in ('train', 'validation', 'test'):
    mine = _client(task, part, author)
    found += list(zip(_texts_of(task, mine['x']), mine['y'], strict=True))
  documents = task.documents
  rows = documents.author == documents.authors.index(author)
  assert sorted(found) == sorted(
    (text[:48], label)
    for text, label in zip(
      documents.texts[rows], documents.label[rows], strict=True
    )
  )


def test_who_personalises_first_comes_with_its_training_comments(task):
  author = _ids(task, 'test')[0]
  found = _client(task, 'test', author, is_query=tf.TensorSpec([], tf.int32))
  past = found['is_query'] == 0
  for part, mine in (('train', past), ('test', ~past)):
    expected = _client(task, part, author)
    np.testing.assert_array_equal(found['x'][mine], expected['x'])
    np.testing.assert_array_equal(found['y'][mine], expected['y'])


def test_a_form_that_documents_have_no_model_in_is_refused(task):
  said = '--user_form=features: the model of the'
  with pytest.raises(OptionError, match=said):
    task.model_with('features')


def test_everybody_in_training_is_measured_and_nobody_new_trains(task):
  train, test, new, mixed = (
    set(_ids(task, part)) for part in ('train', 'test', 'new', 'mixed')
  )
  assert train == test and len(train) == 24 and len(new) == 6
  assert not train & new
  several = np.flatnonzero(task.documents.has_several_labels)
  assert mixed == {task.documents.authors[place] for place in several} & test


def test_the_tests_are_of_authors_seen_and_new(task):
  assert list(task.tests) == ['seen', 'mixed', 'new', 'new_mixed']
  assert [who.seen for who in task.tests.values()] == [True, True, False, False]
  assert task.validation.part == 'validation' and task.validation.seen
  assert (task.selection_metric, task.higher_is_better) == ('accuracy', True)


@pytest.mark.slow
def test_without_authors_held_out_nobody_is_new(sticker):
  assert list(sticker.tests) == ['seen', 'mixed']
  with pytest.raises(DataError, match="the part 'new' has no documents"):
    _ids(sticker, 'new')


@pytest.mark.slow
def test_the_table_is_told_who_writes(task):
  clients = task.clients('train', task.model_with(TABLE).example_spec)
  author = task.documents.authors.index(_AUTHOR)
  mine = real_examples(clients, _AUTHOR)
  assert set(mine['x']['user'].tolist()) == {author}
  own = _client(task, 'train')
  np.testing.assert_array_equal(mine['x']['text'], own['x'])


@pytest.mark.slow
def test_who_drifts_is_told_when_it_writes():
  sizes = dataclasses.replace(_SIZES, control_points=3)
  task = subreddit.Subreddit(
    subreddit_synthetic.comments(10, 2, 20),
    dataclasses.replace(_options(), sizes=sizes),
    0,
  )
  mine = _client(task, 'train', time=tf.TensorSpec([], tf.int64))
  assert sorted(mine['x']) == ['text', 'when']
  by_time = mine['x']['when'][np.argsort(mine['time'])]
  np.testing.assert_allclose(by_time, np.linspace(0, 1, len(by_time)))
  spec = task.model_with(TABLE).example_spec
  assert sorted(spec['x']) == ['text', 'user', 'when']


def test_a_split_by_time_gets_the_times(task):
  mine = _client(task, 'train', time=tf.TensorSpec([], tf.int64))
  rows = task.documents.author == task.documents.authors.index(_AUTHOR)
  assert set(mine['time']) <= set(task.documents.time[rows])


def test_characters_are_learned_from_training_alone():
  documents = subreddit_synthetic.comments(10, 2, 20)
  first = subreddit.Subreddit(documents, _options(held_out_share=0.3), 0)
  documents.texts[first.parts['test']] = 'ξ'
  documents.texts[first.parts['new']] = 'ω'
  again = subreddit.Subreddit(documents, _options(held_out_share=0.3), 0)
  assert again.vocabulary == first.vocabulary


def test_authors_are_coloured_by_training_alone(task, sticker):
  attribute = task.attributes
  assert set(attribute) == set(_ids(task, 'train'))
  most = np.bincount(_client(task, 'train')['y']).argmax()
  assert attribute[_AUTHOR] == task.documents.labels[most]
  clicks = _client(sticker, 'train', 'user0003')
  share = float(sticker.attributes['user0003'])
  assert share == pytest.approx(clicks['y'].mean(), abs=0.0501)


def test_counts_and_predictors_are_for_json(task):
  counts = json.loads(json.dumps(task.counts))
  assert counts['authors'] == 30 and counts['train']['authors'] == 24
  assert counts['documents'] == sum(
    counts[part]['documents'] for part in ('train', 'validation', 'test', 'new')
  )
  found = counts['without_text']
  assert list(found['author_majority']) == list(task.tests)
  assert found['author_majority']['seen'] > found['largest_class']['seen']


def test_predictors_know_what_new_authors_may_learn_from(task):
  none, some = (task.from_labels_alone(n, 5)['author_majority'] for n in (0, 5))
  assert none['new'] == task.from_labels_alone(0, 5)['largest_class']['new']
  assert some['new'] > none['new'] + 0.1
  assert some['seen'] == none['seen']


# ---- learning ----------------------------------------------------------------


def _train(
  task, model, rounds: int, own_rate: float, server_rate: float, part='test'
):
  """FURL if a part of the model is local, else FedAvg; returns metrics."""
  algorithms = tff_partial.algorithms
  rates = {tiers.GLOBAL: 0.1, tiers.LOCAL: own_rate}
  steps = {tier: tff_partial.sgd(rate) for tier, rate in rates.items()}
  process = algorithms.build_furl(
    model,
    training=tff_partial.Phase(optimizer=steps),
    aggregation=Aggregation(aggregator=tff.aggregators.MeanFactory()),
    server_optimizer=tff.learning.optimizers.build_adam(server_rate),
  )
  with runtimes.cohort(jit=False):
    trained = tff_partial.train(
      process,
      task.clients('train', process.example_spec),
      rounds=rounds,
      clients_per_round=10,
    )
    exam = tff_partial.EvaluationSet(
      algorithms.build_furl_eval(model),
      task.clients(part, process.example_spec),
    )
    return tff_partial.evaluate(
      exam, trained.weights, client_store=trained.client_store
    )


@pytest.mark.slow
def test_furl_beats_predictors_without_text(task):
  # Neither the text nor the author alone tells the subreddit.
  measured = _train(task, task.model_with('own'), 60, 3.0, 0.02)
  without = task.from_labels_alone(0, 5)['author_majority']['seen']
  assert measured['accuracy'] > without + 0.02


@pytest.mark.slow
def test_the_area_grows_with_training(sticker):
  # On the training messages: of others there are too few for a steady area.
  model = sticker.model_with('own')
  before, after = (
    _train(sticker, model, rounds, 3.0, 0.005, part='train')['auc']
    for rounds in (1, 40)
  )
  assert after > before + 0.1


# ---- loading -----------------------------------------------------------------


@pytest.mark.parametrize(
  ('kind', 'record'),
  [
    (
      subreddit.SubredditOptions,
      {'author': 'a', 'subreddit': 's', 'body': 'b', 'created_utc': 1},
    ),
    (
      subreddit.StickerOptions,
      {'user': 'a', 'text': 'b', 'label': 1, 'time': 1},
    ),
  ],
)
def test_loads_files_and_inventions(tmp_path, kind, record):
  invented = _options(kind).load(Data(data='synthetic'), 0)
  assert invented.counts['authors'] == 60
  with pytest.raises(DataError, match='--data_dir'):
    _options(kind).load(Data(data_dir=None), 0)
  folder = tmp_path / invented.name
  folder.mkdir()
  text = f'{json.dumps(record)}\n' * 20
  (folder / 'some.jsonl').write_text(text)
  data = Data(data_dir=str(tmp_path))
  task = _options(kind, min_documents=20, max_documents=20).load(data, 0)
  assert task.counts['train'] == {'documents': 16, 'authors': 1}
  with pytest.raises(DataError, match='at least 21 documents'):
    _options(kind, min_documents=21).load(data, 0)


@pytest.mark.parametrize(
  ('name', 'options'),
  [
    ('num_reserved', {'num_support': 11, 'num_reserved': 10}),
    ('max_documents', {'min_documents': 11, 'max_documents': 10}),
  ],
)
def test_options_that_make_no_sense_are_refused(name, options):
  with pytest.raises(OptionError, match=name):
    subreddit.SubredditOptions(**options)


def test_flags_say_what_the_options_say():
  assert parse(['--task=subreddit']).task == subreddit.SubredditOptions()
  assert parse(['--task=sticker']).task == subreddit.StickerOptions()
  assert subreddit.StickerOptions().sizes.user_embedding == 4
  options = parse(
    """--task=sticker --set=ngram_lengths=3,4 --set=mlp_units=
    --set=user_embedding=9 --max_documents=0 --control_points=5""".split()
  ).task
  assert options.max_documents is None
  assert options.sizes == subreddit_models.DocumentSizes(
    ngram_lengths=(3, 4), mlp_units=(), user_embedding=9, control_points=5
  )
