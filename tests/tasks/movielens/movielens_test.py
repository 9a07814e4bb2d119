"""Laws of the MovieLens task: who is measured on what, and recommendations."""

import os
import pathlib
from unittest import mock

import numpy as np
import pytest

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.experiment import Config
from tasks.experiment import from_recipe
from tasks.experiment.options.loop import Loop
from tasks.experiment.trainable import Trainable
from tasks.movielens import data as movielens_data
from tasks.movielens import task as movielens
from tasks.movielens.options import RankingOptions
from tasks.task import Data
from tasks.task import EvaluationClients
from tests.support.small_clients import real_examples
import tff_partial
from tff_partial import evaluation
from tff_partial import phases
from tff_partial.client import client_work
from tff_partial.data import splits
from tff_partial.training import personal_models

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')
_PARTS = ('train', 'validation', 'test')


def _make(seed: int = 0, **options) -> movielens.MovieLens:
  options = {'num_factors': 3, **options}
  return movielens.MovieLensOptions(**options).load(
    Data(data='synthetic'), seed
  )


@pytest.fixture(scope='module', name='unseen')
def fixture_unseen():
  return _make()


@pytest.fixture(scope='module', name='seen')
def fixture_seen():
  return _make(protocol='seen')


def _clients(task: movielens.MovieLens, part: str, spec=None):
  """The users of a part, with what the model with local weights reads."""
  return task.clients(part, spec or task.model_with('own').example_spec)


def _client(task: movielens.MovieLens, part: str, user: str, spec=None) -> dict:
  """A user's real examples, as a computation gets them."""
  return real_examples(_clients(task, part, spec), user)


def _ratings_of_training(task: movielens.MovieLens) -> np.ndarray:
  users = _clients(task, 'train').client_ids
  return np.concatenate([_client(task, 'train', user)['y'] for user in users])


# ---- users that were never seen ----------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('known, after', [(0, 3), (2, 2), (3, 5)])
def test_the_mean_of_known_ratings_by_hand(unseen, known, after):
  of_training = _ratings_of_training(unseen).mean()
  errors: list[float] = []
  for user in _clients(unseen, 'test').client_ids:
    rated = _client(unseen, 'test', user)['y']
    mean = rated[:known].mean() if known else of_training
    errors.extend(rated[after:] - mean)
  found = unseen.from_labels_alone(known, after)
  expected = pytest.approx(np.sqrt(np.mean(np.square(errors))))
  assert found == {'support_mean': {'unseen': expected}}


@pytest.mark.slow
def test_users_are_divided(unseen):
  clients = [_clients(unseen, part) for part in _PARTS]
  assert [len(c) for c in clients] == [480, 60, 60]
  users = [set(c.client_ids) for c in clients]
  assert len(set.union(*users)) == 600
  assert unseen.protocol == 'unseen'
  assert unseen.tests['unseen'].split is None


def test_a_fifth_of_a_new_users_latest_films_is_ranked():
  options = RankingOptions(protocol='unseen', max_examples=10)
  frames = options.load(Data(data='synthetic'), 0).frames
  for part in ('validation', 'test'):
    for _, own in frames[part].groupby('user_id'):
      assert own['is_query'].tolist() == [0] * 8 + [1] * 2
      assert own['timestamp'].is_monotonic_increasing


@pytest.mark.slow
def test_training_users_are_measured_by_the_split_of_training(unseen):
  trainable = Trainable(Config(loop=Loop(clients_per_round=5)), unseen)
  for who in (EvaluationClients('train', True), *unseen.tests.values()):
    found = trainable.evaluation_set(who)
    assert found.evaluation.parts.work[-1].on.name == 'fraction(0.5).query'
    assert len(found.clients) == len(_clients(unseen, who.part))


def test_the_counts_are_those_of_the_parts(unseen):
  counts = unseen.counts
  assert counts['name'] == 'synthetic'
  assert [counts[part]['users'] for part in _PARTS] == [480, 60, 60]
  for part in _PARTS:
    assert counts[part]['ratings'] == _clients(unseen, part).num_examples
  # No user of the invented ones has more ratings than are used.
  assert counts['ratings'] == sum(counts[p]['ratings'] for p in _PARTS)
  assert counts['users'] == 600
  assert counts['items'] == unseen.ratings.num_items


def test_examples_are_the_users_ratings(unseen):
  frame = unseen.ratings.frame
  for part in _PARTS:
    for user in _clients(unseen, part).client_ids[:3]:
      mine = frame[frame['user_id'] == int(user)]
      found = _client(unseen, part, user)
      expected = sorted(zip(mine['item_id'], mine['rating'], strict=True))
      assert sorted(zip(found['x'], found['y'], strict=True)) == expected
      assert found['x'].dtype == np.int32
      assert found['y'].dtype == np.float32
      # Shuffled once, since the halves must not be older and newer ratings.
      assert list(found['x']) != list(mine['item_id'])
      assert (found['weight'] == 1.0).all()


@pytest.mark.slow
def test_the_seed_divides_and_shuffles(unseen):
  again, other = _make(), _make(seed=1)
  ids, same, others = (
    _clients(task, 'test').client_ids for task in (unseen, again, other)
  )
  assert same == ids != others
  user = ids[0]
  found = _client(unseen, 'test', user)
  np.testing.assert_array_equal(_client(again, 'test', user)['x'], found['x'])
  (part,) = (p for p in _PARTS if user in _clients(other, p).client_ids)
  assert list(_client(other, part, user)['x']) != list(found['x'])


# ---- later ratings of users who took part ------------------------------------


@pytest.mark.slow
def test_users_are_measured_on_later_ratings(seen):
  assert seen.protocol == 'seen'
  model, parts = seen.model_with('own'), seen.tests['seen'].split
  process_spec = client_work.example_spec_of(
    model, [phases.Phase(on=part) for part in parts]
  )
  assert 'is_query' in process_spec and 'is_query' not in model.example_spec
  frame = seen.ratings.frame
  ids = _clients(seen, 'train').client_ids
  assert len(ids) == 600
  for user in ids[:5]:
    mine = frame[frame['user_id'] == int(user)]
    trained = _client(seen, 'train', user)
    in_turn = [set(trained['x'])]
    for part in ('validation', 'test'):
      found = _client(seen, part, user, process_spec)
      is_query = found['is_query'].astype(bool)
      # What was trained with rebuilds the local weights.
      np.testing.assert_array_equal(found['x'][~is_query], trained['x'])
      in_turn.append(set(found['x'][is_query]))
    # The oldest are trained on, and each is in one part.
    oldest_first = list(mine['item_id'])
    for items in in_turn:
      assert set(oldest_first[: len(items)]) == items
      del oldest_first[: len(items)]
    assert not oldest_first and mine['timestamp'].is_monotonic_increasing


# ---- the model ---------------------------------------------------------------


def _first_weights(task: movielens.MovieLens):
  with tff_partial.runtimes.cohort(jit=False):
    return client_work.initial_weights(task.model_with('own'))()


@pytest.mark.slow
def test_predictions_may_be_centred():
  plain, centred = _make(), _make(centred=True)
  mean = _ratings_of_training(centred).mean()
  items = np.arange(5, dtype=np.int32)
  weights = _first_weights(plain)
  predictions = [
    _predict(task.model_with('own'), weights, [0.0, 0.0, 0.0], items)
    for task in (plain, centred)
  ]
  np.testing.assert_allclose(predictions[0], 0.0, atol=1e-6)
  np.testing.assert_allclose(predictions[1], mean, rtol=1e-5)


def _predict(model, weights, vector, items) -> np.ndarray:
  local = {'user_embedding/vector': np.array(vector, np.float32)}
  (shared,) = weights.trainable.values()
  return np.asarray(model.to_keras(shared, weights.non_trainable, local)(items))


# ---- recommendations ---------------------------------------------------------


@pytest.fixture(scope='module', name='personal')
def fixture_personal(unseen):
  return tff_partial.algorithms.build_fed_recon_eval(
    unseen.model_with('own'),
    split=splits.same(),
    personalise=phases.Phase(
      optimizer=phases.sgd(0.5), max_steps=20, batch_size=5
    ),
  )


def _recommend(task, personal: evaluation.Evaluation, user: str, number: int):
  with tff_partial.runtimes.cohort(jit=False):
    keras_model = _own_model(task, personal, user)
  return task.recommend(keras_model, user, number)


def _own_model(task, personal: evaluation.Evaluation, user: str):
  """The user's model as `personal` makes it, and as `evaluate` asks for it."""
  clients = task.one_user(user, personal.example_spec)
  (value,) = clients.cohort([user], np.zeros([1, 2], np.int32))
  first = personal.initialize_client(value['seed'])
  return personal_models.model_of(personal, _first_weights(task), first, value)


@pytest.mark.slow
def test_recommendations_are_the_best_of_what_is_unrated(unseen, personal):
  found = _recommend(unseen, personal, '17', 10)
  frame = unseen.ratings.frame
  rated = set(frame[frame['user_id'] == 17]['item_id'])
  items = [item.item_id for item in found]
  assert len(set(items)) == 10
  assert not rated & set(items)
  ratings = [item.score for item in found]
  assert ratings == sorted(ratings, reverse=True)
  assert all(1.0 <= rating <= 5.0 for rating in ratings)
  assert [item.title for item in found] == [
    unseen.ratings.item_titles[item] for item in items
  ]
  # More of them begin with the same ones, and they are the same every time.
  every = _recommend(unseen, personal, '17', 200 - len(rated))
  assert every[:10] == found
  assert {item.item_id for item in every} == set(range(200)) - rated


@pytest.mark.slow
def test_recommendations_follow_from_all_of_the_users_ratings(unseen, personal):
  weights = _first_weights(unseen)
  rated = unseen.rated_by('17')
  clients = unseen.one_user('17', personal.example_spec)
  (value,) = clients.cohort(['17'], np.zeros([1, 2], np.int32))
  assert len(rated) == int(value['count'])
  with tff_partial.runtimes.cohort(jit=False):
    local = personal.personalise(
      weights, personal.initialize_client(value['seed']), value
    )
  found = _recommend(unseen, personal, '17', 3)
  unrated = np.setdiff1d(np.arange(200), rated['item_id']).astype(np.int32)
  scores = _predict(
    unseen.model_with('own'), weights, local['user_embedding/vector'], unrated
  )
  best = unrated[np.argsort(-scores, kind='stable')[:3]]
  assert [item.item_id for item in found] == list(best)


@pytest.mark.parametrize('user', ['0', '601', 'Anna', '-1', '17.0', ''])
def test_an_unknown_user_is_named(unseen, personal, user):
  with pytest.raises(OptionError, match='no user') as caught:
    _recommend(unseen, personal, user, 3)
  assert repr(user) in str(caught.value)
  assert '1 to 600' in str(caught.value)


@pytest.mark.parametrize('number', [0, -1, 200, 10_000])
def test_more_items_than_there_are_is_refused(unseen, personal, number):
  with pytest.raises(OptionError, match=f'top_n.* {number} of the'):
    _recommend(unseen, personal, '17', number)


# ---- options and data --------------------------------------------------------


@pytest.mark.parametrize(
  'options, expected',
  [
    ({'protocol': 'random'}, '--protocol=random: choose one of unseen, seen'),
    ({'num_factors': 2.5}, '--num_factors=2.5: give a whole number'),
    ({'l2': float('nan')}, '--l2=nan: give a finite number'),
    ({'l2': -1}, '--l2=-1: give at least 0'),
    ({'max_examples': 1}, '--max_examples=1: give at least 2'),
  ],
)
def test_impossible_options_are_refused(options, expected):
  with pytest.raises(OptionError, match=expected):
    movielens.MovieLensOptions(**options)


def test_biases_alone_need_an_exact_solve():
  biases = _make(num_factors=0)
  biases.model_with('posterior')
  with pytest.raises(OptionError, match='num_factors=0: biases alone'):
    biases.model_with('own')


@pytest.mark.parametrize('data_set', ['', 'ml-100k'])
def test_downloads_go_to_the_tasks_own_folder(tmp_path, monkeypatch, data_set):
  download = mock.Mock(side_effect=DataError('no net'))
  monkeypatch.setattr(movielens_data, 'download', download)
  options = movielens.MovieLensOptions(data_set=data_set)
  with pytest.raises(DataError, match='no net'):
    options.load(Data(data_dir=str(tmp_path), download=True), 0)
  ((folder, name),) = [call.args for call in download.call_args_list]
  assert pathlib.Path(folder) == tmp_path / 'movielens'
  assert name == (data_set or 'ml-1m')


@pytest.mark.parametrize('there', ['ml-100k', 'movielens/ml-100k'])
@pytest.mark.parametrize('name', ['', 'ml-100k'])
def test_present_data_are_not_fetched(tmp_path, monkeypatch, there, name):
  monkeypatch.setattr(movielens_data, 'download', pytest.fail)
  (tmp_path / there).mkdir(parents=True)
  (tmp_path / there / 'u.data').touch()
  options = movielens.MovieLensOptions(data_set=name)
  with pytest.raises(DataError, match='u.data: the file is empty'):
    options.load(Data(data_dir=str(tmp_path), download=True), 0)


def test_central_training_is_measured_on_the_same_ratings():
  federated = from_recipe('movielens_fed_recon').local
  central = from_recipe('movielens_centralized').local
  assert central.batch_size != federated.batch_size
  for local in (central, federated):
    assert local.split_when_measured().query.name == 'alternating(5)[1]'
  measured = central.when_measured(central.local_phase())
  assert measured.batch_size == federated.local_phase().batch_size == 5
