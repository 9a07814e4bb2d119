"""`tasks.new_users`: metrics against the number of a user's examples."""

import errno
import pathlib
import tempfile

import pandas as pd
import pytest

from tests.support import commands

_DOCUMENTS = (
  *('--task=subreddit', '--algorithm=furl', '--held_out_share=0.3'),
  *('--set=num_support=2', '--set=num_reserved=5', *commands.TINY_DOCUMENTS),
  *('--clients_per_round=16', '--jit=false'),
  '--evaluation_reconstruction_learning_rate=2.0',
)
_RATINGS = ('--data=synthetic', '--clients_per_round=5', '--jit=false')
_PROTOTYPES = (
  *('--task=emnist', '--algorithm=fed_proto_nearest', '--protocol=unseen'),
  *_RATINGS,
)
_SHORT = ('--rounds=2', '--evaluate_every=2')


@pytest.fixture(scope='module', name='folders')
def fixture_folders(tmp_path_factory) -> dict[str, str]:
  """Folders of short runs, by what they are about."""
  folder = tmp_path_factory.mktemp('runs')
  folders = {}
  for name, options in {
    'documents': _DOCUMENTS,
    'ratings': _RATINGS,
    'seen': (*_RATINGS, '--protocol=seen'),
    'prototypes': _PROTOTYPES,
  }.items():
    folders[name] = f'--output_dir={folder / name}'
    commands.run_well('train', *options, *_SHORT, folders[name])
  return folders


@pytest.mark.slow
def test_authors_are_measured_beside_who_knows_labels_alone(folders):
  flags = folders['documents'], '--support=0,1,5', '--after=5'
  commands.run_well('new_users', *flags)
  folder = folders['documents'].partition('=')[2]
  frame = pd.read_csv(f'{folder}/new_users.csv')
  assert (commands.ROOT / folder / 'new_users.png').stat().st_size > 10_000
  measured = frame.pivot(index='who', columns='support', values='accuracy')
  assert list(measured.columns) == [0, 1, 5]
  # All sizes are measured on the same documents.
  assert frame[frame['who'] == 'new']['num_examples'].nunique() == 1
  # Whoever knows nothing of a user says the same for all.
  majority, largest = 'new, author_majority', 'new, largest_class'
  assert measured[0][majority] == measured[0][largest]
  assert measured[5][majority] > measured[0][majority]
  assert measured[5][largest] == measured[0][largest]
  # Examples change what the model says.
  losses = frame[frame['who'] == 'new']['loss']
  assert losses.nunique() == 3


@pytest.mark.slow
def test_authors_whose_vectors_are_gone_are_not_measured(folders):
  folder = pathlib.Path(folders['documents'].partition('=')[2])
  held = (folder / 'clients').rename(folder / 'held')
  outcome = commands.run_here('evaluate', folders['documents'], '--part=train')
  held.rename(folder / 'clients')
  commands.is_for_users(outcome, '--part=train:', f'{folder}/clients')


@pytest.mark.slow
def test_the_users_of_the_test_are_measured(folders):
  outcome = commands.run_well('new_users', folders['ratings'], '--support=0,4')
  assert outcome.output.split()[:5] == ['support', '0', '4', 'who', 'unseen']
  assert 'unseen, support_mean' in outcome.output
  # They are told what the server knows.
  outcome = commands.run_well('new_users', folders['prototypes'], '--support=2')
  assert 'unseen' in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(
  'run, flag, said',
  [
    (
      *('seen', '--support=1'),
      'all users of this run took part in training. Train with --protocol=un',
    ),
    ('ratings', '--support=1,x', '--support=1,x: expected numbers from 0'),
    ('ratings', '--support=-1', 'expected numbers from 0'),
    ('ratings', '--after=3', '--after=3: --support has 10 examples'),
    ('documents', '--after=9999', "of the users 'new' none has so many"),
  ],
)
def test_what_cannot_be_measured_is_refused(folders, run, flag, said):
  outcome = commands.run_here('new_users', folders[run], flag)
  assert outcome.status == 1
  assert said in outcome.errors


def test_a_read_only_folder_is_refused_before(tmp_path, monkeypatch):
  def refuse(dir):
    raise OSError(errno.EROFS, 'Read-only file system', f'{dir}/tmp0')

  (tmp_path / 'flags.txt').write_text('--data=synthetic\n')
  monkeypatch.setattr(tempfile, 'TemporaryFile', refuse)
  outcome = commands.run_here('new_users', f'--output_dir={tmp_path}')
  commands.is_for_users(outcome, f'{tmp_path}: Read-only file system.')
