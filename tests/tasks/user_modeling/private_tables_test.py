"""`tasks.private_tables`: attributes by client, maps, what drafts reveal."""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import json
import pathlib
import types
from typing import NamedTuple

from matplotlib import image
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tasks import private_tables
from tasks.experiment import Config
from tasks.experiment import Output
from tasks.experiment.command_line.flags import parse
from tasks.experiment.run.folder import Folder
from tasks.user_modeling import kept_tables
from tasks.user_modeling import models as user_models
from tasks.user_modeling import records as records_lib
from tests.support import commands
from tests.support import small_schools
from tff_partial import random_bits
from tff_partial.analysis import embeddings
from tff_partial.analysis import shares
from tff_partial.analysis.errors import AnalysisError
from tff_partial.clustering import k_means as clustering
from tff_partial.drafts import centers as drafts
from tff_partial.training.client_store import client_store
from tff_partial.training.client_store import sqlite_backend

_FLAGS = (
  '--task=assist',
  '--algorithm=hpfl',
  '--data=synthetic',
  '--rounds=2',
  '--clients_per_round=3',
  '--evaluate_every=1',
  '--batch_size=32',
  '--reconstruction_optimizer=adam',
  '--reconstruction_learning_rate=0.01',
  '--update_optimizer=adam',
  '--update_learning_rate=0.01',
  '--jit=false',
  '--tensorboard=false',
)
_SIZES = {'0': 5, '1': 8, '2': 12}


@pytest.fixture(scope='module', autouse=True)
def fixture_small_data() -> Iterator[None]:
  with small_schools.instead():
    yield


class _Shown(NamedTuple):
  """A run, and what the program said of it."""

  folder: pathlib.Path
  outcome: commands.Outcome

  def table(self, name: str) -> pd.DataFrame:
    names = {'client': str, 'user': str}
    return pd.read_csv(self.folder / name, dtype=names).fillna('')

  def drafts(self, table: str, kind: str) -> pd.DataFrame:
    every = self.table('drafts.csv')
    return every[(every['table'] == table) & (every['kind'] == kind)]


# A map that was drawn of another run: users at 0, 1, 4 and 5.
_OTHER = """client,what,user,x,y,0,1
a,user,ann,0,0,0,0
a,user,bob,1,0,1,0
b,user,cid,4,0,4,0
b,user,dan,5,0,5,0
b,center,,4.5,0,4.5,0
"""


def _show(folder: pathlib.Path, *flags: str, beside: str) -> _Shown:
  """Trains a short run, and draws it."""
  output = f'--output_dir={folder}'
  trained = commands.run_here('train', *_FLAGS, *flags, output)
  assert trained.status == 0, trained
  outcome = commands.run_here('private_tables', output, f'--beside={beside}')
  assert outcome.status == 0, outcome
  return _Shown(folder, outcome)


@pytest.fixture(scope='module', name='other')
def fixture_other(tmp_path_factory) -> str:
  folder = tmp_path_factory.mktemp('runs') / 'other'
  folder.mkdir()
  (folder / 'private_tables_map.csv').write_text(_OTHER)
  return str(folder)


@pytest.fixture(scope='module', name='hpfl')
def fixture_hpfl(tmp_path_factory, other) -> _Shown:
  return _show(
    tmp_path_factory.mktemp('runs') / 'hpfl',
    '--hpfl_rows_per_center=2',
    '--hpfl_min_users=2',
    beside=other,
  )


def _best(run: _Shown) -> int:
  """The best round of a run."""
  return json.loads((run.folder / 'result.json').read_text())['best']['round']


def _kept(run: _Shown, client: str) -> dict[str, np.ndarray]:
  """What a client of a run remembers after the best round."""
  with contextlib.closing(
    sqlite_backend.Versions(run.folder / 'clients', writable=False)
  ) as versions:
    state = client_store.look_up(versions, client, _best(run))
  assert state is not None
  return {name.removeprefix('held/'): leaf for name, leaf in state.items()}


def _rows(run: _Shown, table: str) -> dict[str, np.ndarray]:
  """The clients' rows of a table, without padding."""
  found = {}
  for client in _SIZES:
    kept = _kept(run, client)
    found[client] = kept[f'local/{table}'][: int(kept[f'num_rows/{table}'])]
  return found


# ---- attributes by client ----------------------------------------------------


@pytest.mark.slow
def test_the_largest_clients_come_first(hpfl):
  records = small_schools.generate()
  frame = hpfl.table('attribute_shares.csv')
  # Larger clients have more users, who have as many records each.
  assert frame['client'].tolist() == ['2', '1', '0']
  counts = np.bincount(records.client)
  assert frame['records'].tolist() == counts[[2, 1, 0]].tolist()
  expected = records_lib.attribute_shares(records)[[2, 1, 0]]
  np.testing.assert_allclose(frame[list(records.attribute_names)], expected)
  everyone = np.bincount(records.attributes[records.attributes >= 0])
  apart = np.abs(expected - everyone / everyone.sum()).sum(axis=1).mean() / 2
  assert f'from those of all by {apart:.3f} on' in hpfl.outcome.output


def test_clients_with_as_many_records_stay_in_order():
  records = small_schools.generate()
  some = records.take(np.flatnonzero(records.client == 1)[:4])
  even = dataclasses.replace(some, client=np.array([2, 1, 2, 1], np.int32))
  assert private_tables.largest(even, 2) == [1, 2]
  assert private_tables.largest(even, 10) == [1, 2, 0]


def test_many_attributes_find_room(tmp_path):
  names = [f'attribute {k}' for k in range(60)]
  rows = np.random.default_rng(0).dirichlet(np.ones(60), 2)
  path = tmp_path / 'shares.png'
  shares.draw({'one': rows[0], 'other': rows[1]}, names, path)
  assert min(image.imread(path).shape[:2]) > 300


@pytest.mark.parametrize('given', [{}, {'one': np.ones(2)}])
def test_shares_of_other_attributes_are_refused(tmp_path, given):
  with pytest.raises(AnalysisError, match='and 3 attributes. Give each'):
    shares.draw(given, ['a', 'b', 'c'], tmp_path / 'shares.png')


# ---- the map -----------------------------------------------------------------


@pytest.mark.slow
def test_users_are_drawn_by_their_hidden_characteristics(hpfl):
  frame = hpfl.table('private_tables_map.csv')
  users = frame[frame['what'] == 'user']
  assert users.groupby('client').size().to_dict() == _SIZES
  schools = small_schools.generate()
  names = dict(zip(schools.clients, schools.user_names, strict=True))
  for client, table in _rows(hpfl, 'user/embeddings').items():
    of_client = users[users['client'] == client]
    assert of_client['user'].tolist() == list(names[client])
    kept = _kept(hpfl, client)
    # Eq. 8: h_u = Emb_u * (KM_u HM).
    knowledge = kept['personal/knowledge_user/kernel']
    hidden = table * (knowledge @ kept['personal/hidden/kernel'])[:, 0]
    np.testing.assert_allclose(
      of_client[['0', '1', '2', '3']], hidden, rtol=1e-5, atol=1e-7
    )


@pytest.mark.slow
def test_centers_that_clients_send_are_marked(hpfl):
  frame = hpfl.table('private_tables_map.csv')
  centers = frame[frame['what'] == 'center']
  kind = 'centers of at least 2 rows'
  sent = hpfl.drafts('user/embeddings', kind)
  assert 3 <= len(centers) == len(sent) < 13
  assert (centers['user'] == '').all()


@pytest.mark.slow
def test_users_of_a_table_at_the_server_are_divided_by_client(tmp_path, other):
  central = _show(tmp_path / 'run', '--algorithm=centralized', beside=other)
  users = central.table('private_tables_map.csv')
  assert users['client'].tolist() == ['2'] * 12 + ['1'] * 8 + ['0'] * 5
  assert (users['what'] == 'user').all()
  assert sorted(users['user'], key=int) == [str(user) for user in range(25)]
  assert len(users[['0', '1', '2', '3']].drop_duplicates()) == 25
  assert 'No drafts: clients of this run' in central.outcome.output
  assert not (central.folder / 'drafts.csv').exists()


@pytest.mark.slow
def test_runs_stand_side_by_side(hpfl):
  _, own, other, *_ = hpfl.outcome.output.splitlines()
  frame = hpfl.table('private_tables_map.csv')
  users = frame[frame['what'] == 'user']
  expected = embeddings.silhouette(
    users[['0', '1', '2', '3']].to_numpy(), users['client'].tolist()
  )
  assert own.startswith(f'hpfl: silhouette of users by client {expected:.3f}')
  # The first is 1 from its own and 4.5 from the others on average: 3.5 / 4.5;
  # the second 2.5 / 3.5; and mirrored. Its map is the same.
  expected = (3.5 / 4.5 + 2.5 / 3.5) / 2
  assert other == (
    f'other: silhouette of users by client {expected:.3f}, of the map '
    f'{expected:.3f}.'
  )
  height, width, _ = image.imread(hpfl.folder / 'private_tables_map.png').shape
  assert width > 1.5 * height


def test_models_without_eq_8_are_drawn_by_their_vectors():
  sizes = {'num_users': 3, 'num_items': 4, 'num_attributes': 2}
  build = functools.partial(user_models.build, attributes_width=1, **sizes)
  # NCF has a table of 8 and one of 16 numbers.
  ncf = build('ncf')
  found = private_tables.characteristics(ncf)
  assert found.shape == (3, 24)
  np.testing.assert_array_equal(
    found[:, :8], ncf.get_layer('user').get_weights()[0]
  )
  assert private_tables.characteristics(build('gum')).shape == (3, 2)
  assert private_tables.characteristics(build('bias')) is None


# ---- drafts by hand ----------------------------------------------------------

# Of two rows there is one center.
_CENTERS = drafts.Centers(10, 10, rows_per_center=2)
_TABLES = {
  'ann': np.array([[0.0, 0.0], [0.0, 2.0]], np.float32),
  'bob': np.array([[10.0, 0.0], [10.0, 0.5], [20.0, 0.0]], np.float32),
}


@pytest.fixture(scope='module', name='clusters')
def fixture_clusters() -> dict[str, clustering.KMeans]:
  return kept_tables.clustered(_CENTERS, _TABLES, 'users', seed=0)


def test_drafts_of_clients_by_hand(clusters):
  frame = kept_tables.sent('users', _TABLES, clusters, min_rows=2)
  every = frame[frame['kind'] == 'centers'].sort_values(['client', 'rows'])
  # Ann sends (0, 1). Bob, of two centers, (20, 0), a row, and (10, 0.25).
  assert every['client'].tolist() == ['ann', 'bob', 'bob']
  assert every['rows'].tolist() == [2, 1, 2]
  assert every['distance'].tolist() == [1.0, 0.0, 0.25]
  # Rows are 2, 2, 0.5, 0.5 and 10 from their nearest other ones.
  assert (frame['between_rows'] == 2.0).all()
  enough = frame[frame['kind'] == 'centers of at least 2 rows']
  assert sorted(enough['distance']) == [0.25, 1.0]
  (first, second) = kept_tables.summary(frame).to_dict('records')
  assert first['share_equal'] == pytest.approx(1 / 3)
  assert (first['number'], first['median'], first['least']) == (3, 0.25, 0.0)
  assert (second['number'], second['share_equal']) == (2, 0.0)


def test_drafts_of_enough_rows_are_those_that_a_client_would_send(clusters):
  some = dataclasses.replace(_CENTERS, min_rows=2)
  sent = kept_tables.clustered(some, _TABLES, 'users', seed=0)
  for client, found in clusters.items():
    is_enough = found.counts >= 2
    np.testing.assert_array_equal(sent[client].is_real, is_enough)
    np.testing.assert_array_equal(
      sent[client].centers[is_enough], found.centers[is_enough]
    )


def test_centers_at_the_server_by_hand():
  centers = np.array([[0.0, 1.0], [10.0, 0.0]], np.float32)
  frame = kept_tables.at_server('users', 'sums', centers, _TABLES)
  # Two rows are nearest to the first one, three to the second, which is a row.
  assert frame['rows'].tolist() == [2, 3]
  assert frame['distance'].tolist() == [1.0, 0.0]
  assert frame['client'].tolist() == ['', '']


def test_a_draft_is_what_a_client_sends():
  # Bit for bit, with the same draws.
  rows = tf.random.stateless_normal([25, 3], [1, 2])
  seed = tf.constant([3, 4])
  client = types.SimpleNamespace(
    seed=seed, rows={}, weight=lambda tier, table: rows
  )
  statistic = _CENTERS.statistic(types.SimpleNamespace(seed=0), 'users')
  sent = statistic.summarize(client)
  found = _CENTERS.clusters(
    rows, tf.ones([25], tf.bool), random_bits.fold_in(seed, 'drafts of users')
  )
  np.testing.assert_array_equal(sent['rows'], found.centers)
  np.testing.assert_array_equal(sent['is_real'], found.is_real)
  assert int(tf.reduce_sum(found.counts)) == 25


def test_what_the_server_holds_is_what_is_real():
  held = {
    'users': {'rows': np.eye(3), 'is_real': np.array([True, False, True])}
  }
  state = types.SimpleNamespace(
    client_work={'round': 1, 'server': {'centers': held}}
  )
  found = drafts.at_server(state, 'users')
  np.testing.assert_array_equal(found, np.eye(3)[[0, 2]])
  assert drafts.at_server(state, 'items') is None
  without = types.SimpleNamespace(client_work={'round': 1})
  assert drafts.at_server(without, 'users') is None


# ---- drafts of runs ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('table', ['user/embeddings', 'item/embeddings'])
def test_every_draft_of_a_run_is_measured(hpfl, table):
  rows = _rows(hpfl, table)
  every = hpfl.drafts(table, 'centers')
  # Of two rows there is one center, which stands for as many.
  expected = {client: -(-len(own) // 2) for client, own in rows.items()}
  assert every.groupby('client').size().to_dict() == expected
  stand_for = {client: len(own) for client, own in rows.items()}
  assert every.groupby('client')['rows'].sum().to_dict() == stand_for
  # The center of a single row is that row.
  is_single = every['rows'] == 1
  assert (every['distance'][is_single] == 0.0).all()
  assert (every['distance'][~is_single] > 0.0).all()
  enough = hpfl.drafts(table, 'centers of at least 2 rows')
  assert enough['distance'].tolist() == every['distance'][~is_single].tolist()
  # Each row is nearest to one of the server's centers.
  held = hpfl.drafts(table, 'global centers')
  assert held['rows'].sum() == sum(stand_for.values())
  assert (held['client'] == '').all()


@pytest.mark.slow
def test_what_is_printed_of_drafts(hpfl):
  said = hpfl.outcome.output
  every = hpfl.drafts('user/embeddings', 'centers')
  (line,) = [
    line.split()
    for line in said.splitlines()
    if line.split()[:2] == ['user/embeddings', 'centers']
    and line.split()[2].isdigit()
  ]
  share = (every['rows'] == 1).mean()
  assert int(line[2]) == len(every)
  assert float(line[3]) == pytest.approx(every['distance'].median(), rel=1e-3)
  assert float(line[6]) == pytest.approx(share, abs=1e-3)
  assert f'rows after round {_best(hpfl)}, with other draws' in said
  assert 'What the server holds is of round 2, the last one' in said


@pytest.mark.parametrize(
  ('flags', 'kind'),
  [({}, 'global centers'), ({'hpfl_drafts': 'sums'}, 'sums')],
)
def test_what_the_server_holds_is_called_as_it_came_about(
  clusters, flags, kind
):
  centers = np.array([[0.0, 1.0], [0.0, 0.0]], np.float32)
  held = {'users': {'rows': centers, 'is_real': np.array([True, False])}}
  saved = types.SimpleNamespace(
    state=types.SimpleNamespace(client_work={'server': {'centers': held}}),
    client_store=None,
  )
  config = Config().with_flags({'algorithm': 'hpfl', **flags})
  frame = private_tables.measured(
    config, list(_TABLES), saved, {'users': _TABLES}, {'users': clusters}
  )
  assert frame['kind'].tolist() == ['centers'] * 3 + [kind]
  assert frame['rows'].tolist()[-1] == 5


# ---- what cannot be shown ----------------------------------------------------


def test_a_run_of_another_task_is_refused(tmp_path):
  config = parse(commands.SMALL)
  folder = Folder(str(tmp_path))
  folder.claim({**config.flags(), **Output(str(tmp_path)).flags()}, set())
  outcome = commands.run_here('private_tables', f'--output_dir={tmp_path}')
  commands.is_for_users(outcome, 'the task movielens keep no tables')


@pytest.mark.slow
def test_a_run_beside_that_was_not_drawn_is_refused(hpfl, tmp_path):
  outcome = commands.run_here(
    'private_tables', f'--output_dir={hpfl.folder}', f'--beside={tmp_path}'
  )
  commands.is_for_users(outcome, f'--beside={tmp_path}', 'Draw that run first')
