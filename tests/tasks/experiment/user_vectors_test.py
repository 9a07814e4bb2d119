"""Users' vectors, as TensorBoard's projector reads them."""

from google.protobuf import text_format
import numpy as np
import pytest
from tensorboard.plugins import projector

from tasks.experiment.runs import user_vectors
from tests.support import commands
from tests.support.commands import run_here
from tests.support.commands import run_well


def test_a_vector_is_what_a_user_remembers():
  remembered = {
    'user/vector': np.array([[1.0, 2.0]], np.float32),
    'user/bias': np.float32(3.0),
    'group': np.int32(7),
  }
  for name, expected in (('', [1.0, 2.0, 3.0]), ('vector', [1.0, 2.0])):
    found = user_vectors.own_vector(remembered, name)
    np.testing.assert_array_equal(found, expected)
  assert user_vectors.own_vector({'group': np.int32(7)}, '') is None


def test_vectors_and_names_are_a_line_a_user(tmp_path):
  vectors = {'ann': np.array([0.5, -1.0]), 'b\tob': np.array([0.0, 1e-9])}
  user_vectors.write(tmp_path, vectors)
  text = (tmp_path / 'user_vectors.tsv').read_text()
  assert text == '0.5\t-1\n0\t1e-09\n'
  # A single column has no heading.
  assert (tmp_path / 'users.tsv').read_text() == 'ann\nb ob\n'
  user_vectors.write(tmp_path, vectors, 'likes', {'ann': '3', 'b\tob': '4'})
  assert (tmp_path / 'users.tsv').read_text() == (
    'user\tlikes\nann\t3\nb ob\t4\n'
  )
  config = projector.ProjectorConfig()
  text_format.Parse((tmp_path / 'projector_config.pbtxt').read_text(), config)
  assert config.embeddings[0].metadata_path == 'users.tsv'


@pytest.mark.slow
def test_kept_vectors_are_written(tmp_path):
  run_well(
    *('train', *commands.SMALL, '--algorithm=furl', '--rounds=2'),
    *('--protocol=seen', '--min_examples=30', '--projector=5'),
    f'--output_dir={tmp_path}',
  )
  text = (tmp_path / 'tensorboard' / 'user_vectors.tsv').read_text()
  sizes = [len(line.split('\t')) for line in text.splitlines()]
  # Those who were drawn and remember something.
  assert 1 <= len(sizes) <= 5 and set(sizes) == {4}


@pytest.mark.slow
@pytest.mark.parametrize(
  'flags, said',
  [
    ('--algorithm=fed_avg', ['nothing of their own']),
    ('--algorithm=fed_avg --dry_run', ['nothing of their own']),
    (
      '--task=movielens_hpfl --algorithm=hpfl',
      ['--projector=5', 'tables of its own'],
    ),
  ],
)
def test_users_without_vectors_of_their_own_are_refused(tmp_path, flags, said):
  outcome = run_here(
    *('train', '--data=synthetic', '--rounds=2', '--jit=false'),
    *('--projector=5', f'--output_dir={tmp_path}', *flags.split()),
  )
  commands.is_for_users(outcome, *said)
  assert not (tmp_path / 'metrics.csv').exists()
