"""The tasks of user modeling, from records to a result: HPFL and its rivals."""

from collections.abc import Iterator
import functools
import os
from typing import Any

import numpy as np
import pytest

from tasks.errors import DataError
from tasks.errors import OptionError
from tasks.experiment import Config
from tasks.experiment import from_recipe
from tasks.experiment import run
from tasks.experiment.config import TASKS
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import Hpfl
from tasks.experiment.runs.result import Result
from tasks.experiment.trainable import Trainable
from tasks.task import Data
from tasks.task import OWN
from tasks.task import TABLE
from tasks.task import TEST
from tasks.task import TRAIN
from tasks.task import VALIDATION
from tasks.user_modeling import measures
from tests.support import small_schools
from tests.support.small_clients import real_examples
from tff_partial import tiers
from tff_partial.client.client_work import CompositionError
from tff_partial.client_statistics import Join
from tff_partial.data import splits
from tff_partial.drafts import centers as drafts
from tff_partial.errors import UserError

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')

_SMALL: dict[str, Any] = {
  'data': 'synthetic',
  'rounds': 2,
  'clients_per_round': 3,
  'reconstruction_epochs': 1,
  'reconstruction_learning_rate': 0.01,
  'update_optimizer': 'adam',
  'update_learning_rate': 0.01,
  'jit': 'false',
}


@pytest.fixture(scope='module', autouse=True)
def fixture_small_data() -> Iterator[None]:
  with small_schools.instead():
    yield


def _config(task: str = 'assist', **flags: Any) -> Config:
  return from_recipe(f'{task}_hpfl'.replace('hpfl_hpfl', 'hpfl')).with_flags(
    {**_SMALL, **flags}
  )


@functools.cache
def _run(**flags: Any) -> Result:
  """A run in memory, once for all tests that look at it."""
  return run(_config(**flags))


def _seen(**flags: Any) -> dict[str, Any]:
  return _run(**flags).report['test']['seen']


@functools.cache
def _task(name: str = 'assist', **options: Any) -> Any:
  return TASKS[name](**options).load(Data(data='synthetic'), 0)


def _clients(task: Any, part: str, form: str = OWN) -> Any:
  return task.clients(part, task.model_with(form).example_spec)


def _fields(population: Any, client: str) -> dict[str, Any]:
  """A client's examples, without padding."""
  examples = real_examples(population, client)
  return {**examples, **examples.pop('x')}


# ---- clients -----------------------------------------------------------------


def test_a_client_trains_without_what_it_is_measured_on():
  task = _task()
  parts = {part: _clients(task, part) for part in (TRAIN, VALIDATION, TEST)}
  counts = task.counts
  for part, clients in parts.items():
    assert clients.client_ids == task.records.clients == ('0', '1', '2')
    assert clients.num_examples == counts[part]['records']
  # No item occurs twice at a user, so that each pair is in one part.
  for client in task.records.clients:
    held = [_fields(part, client) for part in parts.values()]
    pairs = [
      pair for of in held for pair in zip(of['user'], of['item'], strict=True)
    ]
    assert len(set(pairs)) == len(pairs)
  assert counts['records'] == sum(counts[part]['records'] for part in parts)
  assert counts['users'] == 25


@pytest.mark.parametrize(
  ('part', 'mark', 'other'),
  [(TRAIN, 'is_validation', VALIDATION), (TEST, 'is_query', TEST)],
  ids=['records that measure accuracy', 'the past of who personalises'],
)
def test_records_that_come_with_others_are_marked(part, mark, other):
  task, spec = _task(), _task().model_with(OWN).example_spec
  marked = spec.copy()
  marked.ids = spec.ids
  marked.update(splits.example_fields(*splits.by_mark(mark)))
  found = _fields(task.clients(part, marked), '1')
  is_marked = found[mark].astype(bool)
  for of, rows in ((TRAIN, ~is_marked), (other, is_marked)):
    alone = _fields(task.clients(of, spec), '1')
    for name in ('user', 'item', 'y'):
      np.testing.assert_array_equal(found[name][rows], alone[name])
  assert is_marked.any() and not is_marked.all()


def test_tables_have_rows_for_users_and_items_of_all_parts():
  task = _task()
  tables = task.kept_tables()
  assert tables['user/embeddings'] == (5, 8, 12)
  own_items = tuple(map(len, task.records.own_items))
  assert tables['item/embeddings'] == own_items
  for part in (TRAIN, VALIDATION, TEST):
    clients = _clients(task, part)
    cohort = clients.cohort(clients.client_ids, np.zeros([3, 2], np.int32))
    for table, expected in tables.items():
      assert tuple(value['rows'][table].sum() for value in cohort) == expected


def test_public_items_are_numbered_alike_at_all_clients():
  task = _task(items='public')
  model = task.model_with(OWN)
  assert list(task.kept_tables()) == ['user/embeddings']
  assert 'item/embeddings' in model.specs(tiers.GLOBAL)
  assert model.specs(tiers.GLOBAL)['item/embeddings'].shape[0] == 19
  assert 'list of items' in task.learned_from_training
  found = _fields(_clients(task, TEST), '2')
  own = _fields(_clients(_task(), TEST), '2')
  own_items = task.records.own_items[2]
  np.testing.assert_array_equal(found['item'], own_items[own['item']])
  np.testing.assert_array_equal(found['user'], own['user'])


def test_for_central_training_users_are_numbered_among_all():
  task = _task()
  model = task.model_with(TABLE)
  assert model.tiers == (tiers.GLOBAL,)
  assert model.specs(tiers.GLOBAL)['user/embeddings'].shape[0] == 25
  clients = _clients(task, TRAIN, TABLE)
  users = [_fields(clients, client)['user'] for client in clients.client_ids]
  assert [(x.min(), x.max()) for x in users] == [(0, 4), (5, 12), (13, 24)]


@pytest.mark.slow
def test_records_are_divided_anew_by_repeat_and_by_seed():
  tasks = [
    TASKS['assist'](repeat=repeat).load(Data(data='synthetic'), seed)
    for repeat, seed in ((0, 0), (0, 0), (1, 0), (0, 1))
  ]
  first, again, repeated, other = (
    _fields(_clients(task, TEST), '2')['item'].tolist() for task in tasks
  )
  assert first == again
  assert first != repeated and first != other


def test_other_forms_are_refused():
  with pytest.raises(OptionError, match='user_form=nobody: .* Choose own'):
    _task().model_with('nobody')


@pytest.mark.parametrize('name', ['assist', 'movielens_hpfl'])
def test_data_that_are_missing_are_asked_for(name, tmp_path):
  for folder in (None, str(tmp_path)):
    with pytest.raises(DataError, match='--data=synthetic'):
      TASKS[name]().load(Data(data_dir=folder), 0)


@pytest.mark.slow
@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
@pytest.mark.parametrize(
  ('name', 'users', 'records'),
  [('assist', 1_970, 240_639), ('movielens_hpfl', 925, 97_914)],
)
def test_recipes_have_all_clients_in_every_round(name, users, records):
  recipe = 'assist_hpfl' if name == 'assist' else name
  config = from_recipe(recipe, data_dir=_REAL)
  task = config.task.load(config.data, config.seed)
  assert (task.counts['users'], task.counts['records']) == (users, records)
  assert config.loop.clients_per_round == len(task.records.clients)


# ---- measures ----------------------------------------------------------------


@pytest.mark.parametrize('levels', [(0, 1), (1, 2, 3, 4, 5)])
def test_in_training_accuracy_is_as_in_the_result(levels):
  answers = np.tile(np.float32(levels), 9)
  # Also halfway between two answers, and beyond all.
  predictions = np.float32(np.linspace(-1.0, 6.5, 9 * len(levels) * 10))
  predictions = np.round(predictions[::10] * 2) / 2
  apart = np.abs(predictions[:, None] - np.float32(levels))
  nearest = np.float32(levels)[apart.argmin(axis=1)]  # The lower of two.
  scale = (float(levels[0]), float(levels[-1]))
  found = measures.is_right(scale)(answers[:, None], predictions[:, None])
  assert np.mean(found) == pytest.approx(np.mean(nearest == answers))
  metrics = measures.build_metrics(scale)
  assert found.shape == answers.shape
  names = [getattr(m, 'name', getattr(m, '__name__', '')) for m in metrics]
  of_answers = ['auc'] if scale[1] == 1 else []
  assert names == ['rmse', 'mae', 'accuracy', *of_answers]


def test_auc_in_training_takes_any_prediction():
  metric = measures.ClippedAUC(num_thresholds=1000)
  metric.update_state([0.0, 1.0, 0.0, 1.0], [-2.0, 3.0, 0.4, 0.3])
  # Of four pairs three are in order.
  assert float(metric.result()) == pytest.approx(0.75, abs=1e-3)


def _answers(client: str, **changes: Any) -> measures.Answers:
  """One user who answered an item of each of two attributes."""
  given: dict[str, Any] = {
    'user': np.array([0, 0]),
    'attributes': np.array([[0], [1]]),
    'answer': np.array([1.0, 0.0]),
    'prediction': np.array([0.9, 0.2]),
    'hidden': {'': np.array([[2.0, 1.0]])},
    'public': {'knowledge': np.array([[1.0, 0.0], [0.0, 1.0]])},
    'num_records': 2,
    'validation': np.eye(2, 50, dtype=int),
  }
  return measures.Answers(client, **{**given, **changes})


def test_users_are_compared_across_clients():
  clients = [
    _answers('a'),
    _answers(
      'b',
      answer=np.array([0.0, 0.0]),
      prediction=np.array([0.4, 0.6]),
      hidden={'': np.array([[1.0, 3.0]])},
      public={'knowledge': np.array([[1.0, 0.0], [0.0, -1.0]])},
    ),
  ]
  found = measures.measure(clients, (0.0, 1.0), 2)
  # By the first attribute the user of a is better, and answers better. By the
  # second one b's is, and both answer alike, which counts half.
  assert found['doa'] == pytest.approx((1.0 + 0.5) / 2)
  assert found['doa_printed'] == pytest.approx((1.0 + 0.0) / 2)
  # Both users' attributes are predicted in the order of h.
  assert found['ndcg'] == found['ndcg_printed'] == pytest.approx(1.0)
  # The only right answer has the largest of four predictions.
  assert found['auc'] == 1.0
  # The second attribute points the other way: 1 - cos is 2 for both orders of
  # the clients, over two attributes.
  assert found['similarity'] == pytest.approx((2 + 2) / 2)


def test_a_model_that_is_not_finite_has_no_numbers():
  lost = np.array([[np.nan, 1.0]])
  clients = [
    _answers('a', hidden={'': lost}, public={'knowledge': lost.T}),
    _answers('b', public={'knowledge': lost.T}),
  ]
  found = measures.measure(clients, (0.0, 1.0), 2)
  assert all(np.isnan(found[name]) for name in ('doa', 'ndcg', 'similarity'))


# ---- runs --------------------------------------------------------------------

_METRICS = {
  *('rmse', 'mae', 'accuracy', 'auc', 'accuracy_cut', 'doa', 'ndcg'),
  *('doa_related', 'ndcg_related', 'ndcg_printed', 'similarity'),
}
_NCD = {'model': 'ncd', 'biases': False}


def _check(report: dict[str, Any], names: set[str] = _METRICS) -> None:
  seen, validation = report['test']['seen'], report['validation']
  assert names <= set(seen)
  assert all(np.isfinite(seen[name]) for name in names)
  assert seen['num_clients'] == 3
  for measured, part in ((seen, 'test'), (validation, 'validation')):
    assert measured['num_examples'] == report['data'][part]['records']


@pytest.mark.slow
def test_hpfl_learns_and_is_measured():
  result = _run()
  _check(result.report)
  assert 'ndcg_related' in str(result)
  seen = result.report['test']['seen']
  # AUC by thresholds is of each client; the exact one is of all records.
  assert 0.0 <= seen['auc'] <= 1.0 and 0.0 <= seen['doa'] <= 1.0
  assert 'auc' in seen['per_client']
  # Clients keep tables of their own sizes and copies of what is public.
  store = result.trained.client_store
  for client, users in (('0', 5), ('1', 8), ('2', 12)):
    kept = store.client(client)
    assert kept['num_rows/user/embeddings'] == users
    table = kept['held/local/user/embeddings']
    assert table[:users].all() and not table[users:].any()
    assert kept['held/personal/relation/kernel'].shape == (4, 4)
    assert kept['held/accuracy/trained']
  # The server has centers of both tables: of 1 + 1 + 2 collected ones one.
  centers = result.trained.state.client_work['server']['centers']
  assert set(centers) == {'user/embeddings', 'item/embeddings'}
  assert centers['user/embeddings']['is_real'].any()


@pytest.mark.slow
@pytest.mark.parametrize(
  'flags',
  [
    {'algorithm': 'hpfl_k'},
    {'algorithm': 'hpfl_r', 'task': 'movielens_hpfl'},
    {**_NCD, 'hpfl_drafts': 'sums', 'user_model_biases_in_attributes': False},
    {'algorithm': 'distributed', 'user_model_biases_in_attributes': True},
    {'algorithm': 'fed_avg'},
    {'algorithm': 'fed_avg', 'user_model_items': 'public'},
    {'algorithm': 'fed_sgd', 'update_optimizer': 'sgd'},
    {'algorithm': 'fed_prox', 'task': 'movielens_hpfl'},
    {'algorithm': 'fed_att'},
    {'algorithm': 'fed_noise'},
    {
      **_NCD,
      'algorithm': 'centralized',
      'user_model_biases_in_attributes': False,
    },
  ],
  ids=lambda flags: ' '.join(map(str, flags.values())),
)
def test_the_others_learn_and_are_measured(flags):
  report = _run(**flags).report
  names = {*_METRICS}
  if flags.get('task') == 'movielens_hpfl':
    names -= {'auc'}
  if flags.get('model') == 'ncd':
    names -= {'doa_related', 'ndcg_related', 'similarity'}
  _check(report, names)


@pytest.mark.slow
def test_fed_avg_leaves_tables_to_the_clients():
  result = _run(algorithm='fed_avg')
  shared = result.trained.weights.trainable
  assert list(shared) == [tiers.GLOBAL]
  assert 'relation/kernel' in shared[tiers.GLOBAL]
  kept = result.trained.client_store.client('2')
  assert kept['held/user/embeddings'].shape == (12, 4)
  items = kept['num_rows/item/embeddings']
  assert items == len(_task().records.own_items[2])
  assert kept['held/item/embeddings'][:items].all()
  # What all share is alike at all clients, up to rounding.
  assert result.report['test']['seen']['similarity'] < 1e-9
  assert _seen()['similarity'] > 1e-3
  # After local training it is not (the paper's Table 5), from their tables on.
  assert _seen(algorithm='fine_tuning')['similarity'] > 1e-3
  tuned = Trainable(_config(algorithm='fine_tuning'), _task())
  assert tuned.remembers(_task().tests['seen'])
  wrong = Trainable(_config(algorithm='fine_tuning', tuned='no_layer'), _task())
  with pytest.raises(UserError, match='no_layer'):
    wrong.evaluation(_task().tests['seen'])


# ---- options -----------------------------------------------------------------


def test_drafts_by_hand():
  rows = {'user': (5, 8, 12), 'item': (10, 11, 25)}
  # At most 1 + 2 + 3 centers of items are collected, and a tenth of them is 1.
  assert Hpfl().drafting(rows, Join.SUM) == drafts.ClientCenters(6, 1, 10)
  # 5 + 6 + 13, and half of them.
  found = Hpfl(rows_per_center=2).drafting(rows, Join.SUM)
  assert found == drafts.ClientCenters(24, 12, 2)
  assert Hpfl(drafts='sums').drafting(rows, Join.SUM) == drafts.Sums(1)
  assert Hpfl(center_weighting='inverse').by_nearness
  assert not Hpfl().by_nearness


@pytest.mark.parametrize(
  ('make', 'expected'),
  [
    (lambda: Hpfl(drafts='all'), '--hpfl_drafts=all: choose one of'),
    (lambda: Hpfl(rows_per_center=0), 'hpfl_rows_per_center=0: give at le'),
    (lambda: Hpfl().drafting({}, Join.SUM), '--algorithm=hpfl_k'),
    (lambda: _config(model='mf'), '--model=mf: choose one of'),
    *(
      (lambda of=of: _config(algorithm=of, noise_multiplier=1.0), expected)
      for of, expected in {
        'hpfl': '--hpfl_drafts=centers: clients send centers',
        'fed_noise': (
          '--algorithm=fed_noise: its clients add noise of their own'
        ),
        'distributed': 'clients send nothing',
      }.items()
    ),
  ],
)
def test_impossible_choices_are_refused(make, expected):
  with pytest.raises(OptionError) as caught:
    make()
  assert expected in str(caught.value)


@pytest.mark.parametrize(
  ('name', 'what'),
  [
    ('item_attributes', 'attributes of items'),
    ('table_rows', 'tables of many users'),
  ],
)
def test_hpfl_is_for_tasks_of_many_users(name, what):
  config = Config()
  other = TASKS['emnist']().load(Data(data='synthetic'), 0)
  setting = Setting(
    other, config.local, config.server, config.hyperparameters, config.privacy
  )
  assert not setting.task.keeps_tables
  with pytest.raises(OptionError, match=f'--task=emnist: .* no {what}. Choose'):
    getattr(setting, name)


def test_what_trains_no_tables_is_refused_with_them():
  with pytest.raises(CompositionError, match='local variables, .*user/embeddi'):
    Trainable(_config(algorithm='fed_adam'), _task())


def test_drafts_of_biases_are_refused():
  with pytest.raises(OptionError, match='no private vectors'):
    Trainable(_config(model='bias'), _task(model='bias'))
