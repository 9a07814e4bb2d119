"""`tasks.users`: what a run knows of its users, as a map and as groups."""

import shutil

import pandas as pd
import pytest

from tests.support import commands

_DOCUMENTS = (
  f'--flagfile={commands.ROOT / "tasks/recipes/subreddit_furl.flags"}',
  *commands.TINY_DOCUMENTS,
  '--update_steps=2',
)
_DIGITS = (
  *('--task=mnist_preference', '--data=synthetic', '--users=40'),
  *('--preference_embedding_size=8', '--clients_per_round=12', '--jit=false'),
)
_PROTOTYPE = ('--algorithm=fed_embed_prototype', '--triplet_steps=40')
_SHORT = ('--rounds=2', '--evaluate_every=2')
_BESIDE = {'server': 'federated', 'embeddings': 'prototype'}


@pytest.fixture(scope='module', name='runs')
def fixture_runs(tmp_path_factory) -> dict[str, commands.Outcome]:
  """What is drawn of short runs, each in a folder of its name."""
  folder = tmp_path_factory.mktemp('runs')
  table = ('--algorithm=centralized', '--user_form=table')
  drawn = {}
  for name, options in {
    'federated': _DOCUMENTS,
    'server': (*_DOCUMENTS, *table),
    'alone': (*_DOCUMENTS, *table, '--user_form=nobody'),
    'prototype': (*_DIGITS, *_PROTOTYPE),
    'embeddings': (*_DIGITS, '--algorithm=fed_sim'),
    'personal': (*_DIGITS, '--algorithm=fed_embed_personal'),
    'heads': (*_DIGITS, '--algorithm=fed_rep', '--preference_embedding_size=0'),
    'ratings': ('--data=synthetic', '--clients_per_round=5'),
  }.items():
    output = f'--output_dir={folder / name}'
    commands.run_well('train', *options, *_SHORT, output)
    beside = _BESIDE.get(name)
    others = [f'--beside={folder / beside}'] if beside else []
    drawn[name] = commands.run_here('users', output, *others)
  drawn['folder'] = folder
  return drawn


@pytest.mark.slow
def test_runs_stand_side_by_side(runs):
  assert runs['federated'].output.startswith('federated: silhouette ')
  for name, beside in _BESIDE.items():
    lines = runs[name].output.splitlines()
    assert [line.split(':')[0] for line in lines[:2]] == [name, beside]
    for picture in ('user_map.png', 'user_groups.png'):
      assert (runs['folder'] / name / picture).stat().st_size > 10_000


@pytest.mark.slow
def test_runs_of_one_name_are_told_apart(runs):
  own = runs['folder'] / 'server'
  other = runs['folder'] / 'more' / 'server'
  shutil.copytree(runs['folder'] / 'federated', other)
  flags = f'--output_dir={own}', f'--beside={other}'
  drawn = commands.run_here('users', *flags).output.splitlines()
  assert [line.split(':')[0] for line in drawn[:2]] == [str(own), str(other)]


@pytest.mark.slow
def test_a_table_has_all_authors_and_a_store_those_who_took_part(runs):
  frame = pd.read_csv(runs['folder'] / 'server' / 'users.csv')
  # Of each, the vector that stays and two control points.
  assert frame.shape == (60, 3 + 3 * 5)
  frame = pd.read_csv(runs['folder'] / 'federated' / 'users.csv')
  # 32 of 60 took part in each of two rounds.
  assert 32 <= len(frame) < 60 and frame.shape[1] == 3 + 3 * 5


@pytest.mark.slow
@pytest.mark.parametrize('name', ['prototype', 'embeddings', 'personal'])
def test_those_who_took_part_are_shown(runs, name):
  frame = pd.read_csv(runs['folder'] / name / 'users.csv', dtype=str)
  # Twelve of forty took part in each of two rounds.
  assert 12 <= len(frame) <= 24 and frame.shape[1] == 3 + 8
  likes = [user.split('-')[0] for user in frame['user']]
  assert frame['attribute'].tolist() == likes
  assert frame['group'].nunique() > 1
  # Whoever goes on until its prototype is the nearest joins those who like the
  # same; k-means must find out.
  assert (frame['group'] == frame['attribute']).all() == (name == 'prototype')
  assert 'groups: purity' in runs[name].output
  if name == 'prototype':
    assert 'accuracy 1.000' in runs[name].output


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, said',
  [
    ('alone', 'does not know its users'),
    ('heads', 'does not know its users'),  # They are no embeddings.
    ('ratings', 'the task movielens knows nothing to colour them by'),
  ],
)
def test_where_there_is_nothing_to_draw(runs, name, said):
  assert runs[name].status == 1
  assert said in runs[name].errors
