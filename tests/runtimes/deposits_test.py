"""What clients return and are given again, in files: the same, and no more."""

import gc
import os
import pathlib
import pickle
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tff_partial.runtimes.errors import CohortRuntimeError
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.values import sources

_SPECS = [
  tf.TensorSpec([2, 3], tf.float32),
  tf.TensorSpec([], tf.bool),
  tf.TensorSpec([0], tf.int64),
  tf.TensorSpec([4], tf.int32),
]


def _leaves(clients: int, first: int = 0) -> list[np.ndarray]:
  """Numbers that tell whose they are."""
  numbers = np.arange(first, first + clients)
  return [
    np.broadcast_to(
      numbers.reshape([-1, *[1] * len(spec.shape)]), [clients, *spec.shape]
    ).astype(spec.dtype.as_numpy_dtype)
    for spec in _SPECS
  ]


def _assert_are(leaves: list[np.ndarray], numbers: list[int]) -> None:
  expected = _leaves(max(numbers) + 1)
  for leaf, of_all in zip(leaves, expected, strict=True):
    assert leaf.dtype == of_all.dtype
    np.testing.assert_array_equal(leaf, of_all[numbers])


def _scattered(folder: pathlib.Path) -> sources.Scattered:
  """Clients 0 to 9: 3 to 5 in memory, the others in two files."""
  return sources.Scattered.of(
    _SPECS,
    [
      deposits.Deposit.write(str(folder), _leaves(3)).owned(),
      sources.Held(_leaves(3, first=3)),
      deposits.Deposit.write(str(folder), _leaves(4, first=6)).owned(),
    ],
    [np.arange(3), np.arange(3, 6), np.arange(6, 10)],
  )


def test_what_was_left_is_read(tmp_path):
  scattered = _scattered(tmp_path)
  assert len(scattered) == 10
  assert scattered.client_bytes == 6 * 4 + 1 + 0 + 4 * 4
  _assert_are(scattered.leaves(), [*range(10)])
  some = scattered.take(np.array([9, 4, 0, 6]))
  _assert_are(some.leaves(), [9, 4, 0, 6])
  _assert_are(some.take(np.array([2, 1])).leaves(), [0, 4])
  assert len(some.take(np.array([0, 3])).sources) == 1


def test_others_come_in_between(tmp_path):
  some = _scattered(tmp_path).take(np.array([8, 1, 4]))
  others = _scattered(tmp_path).take(np.array([7, 3]))
  parts = [(some, np.array([1, 2, 4])), (others, np.array([0, 3]))]
  found = sources.Scattered.joined(some.specs, parts)
  _assert_are(found.leaves(), [7, 8, 1, 3, 4])


def test_files_are_named_and_not_sent(tmp_path):
  many = [np.zeros([100, 1000], np.float32)]
  deposit = deposits.Deposit.write(str(tmp_path), many)
  specs = [tf.TensorSpec([1000], tf.float32)]
  held = sources.Held(many)
  everybody = np.arange(100)
  in_file = sources.Scattered.of(specs, [deposit], [everybody])
  in_memory = sources.Scattered.of(specs, [held], [everybody])
  few = np.array([3, 1])
  assert len(pickle.dumps(in_file.take(few))) < 2000
  # Of what is in memory only those that are wanted.
  assert 8000 < len(pickle.dumps(in_memory.take(few))) < 10_000
  again = pickle.loads(pickle.dumps(in_file.take(few)))
  np.testing.assert_array_equal(again.leaves()[0], np.zeros([2, 1000]))


@pytest.mark.slow
def test_a_file_goes_with_its_owner(tmp_path):
  scattered = _scattered(tmp_path)
  # A copy in another process owns nothing.
  del_copy = pickle.loads(pickle.dumps(scattered))
  del del_copy
  gc.collect()
  assert len(list(tmp_path.iterdir())) == 2
  kept = scattered.take(np.array([0]))
  del scattered
  gc.collect()
  assert len(list(tmp_path.iterdir())) == 1
  _assert_are(kept.leaves(), [0])
  del kept
  gc.collect()
  assert not list(tmp_path.iterdir())


def test_what_is_erased_is_gone(tmp_path):
  deposit = deposits.Deposit.write(str(tmp_path), _leaves(3, first=1))
  deposit.erase(1)
  leaves = [np.ones([3, *s.shape], s.dtype.as_numpy_dtype) for s in _SPECS]
  deposit.fill(leaves, np.arange(3), np.arange(3))
  np.testing.assert_array_equal(leaves[3][:, 0], [1, 0, 3])
  assert not leaves[1][1] and leaves[1][0]


# ---- what goes wrong ---------------------------------------------------------


def test_a_shortened_file_is_refused(tmp_path):
  scattered = _scattered(tmp_path)
  path = scattered.sources[0].path
  os.truncate(path, os.path.getsize(path) - 1)
  _assert_are(scattered.take(np.array([1, 9])).leaves(), [1, 9])
  with pytest.raises(CohortRuntimeError, match=f'{path} has become shorter'):
    scattered.leaves()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
  missing = str(tmp_path / 'missing')
  with pytest.raises(CohortRuntimeError, match='Make room, or name another'):
    deposits.Deposit.write(missing, _leaves(2))
  with pytest.raises(CohortRuntimeError, match=f'{missing}: no folder'):
    deposits.make_folder(missing)


_KILLED = """
import os, signal, sys
from tff_partial.runtimes.ray_runtime import deposits
from tff_partial.runtimes.values import sources
print(deposits.make_folder(sys.argv[1]), flush=True)
if sys.argv[2] == 'killed':
  os.kill(os.getpid(), signal.SIGKILL)
"""


def _make_folder(parent, how):
  """The path of a folder that a process made that has ended."""
  done = subprocess.run(
    [sys.executable, '-c', _KILLED, str(parent), how],
    stdout=subprocess.PIPE,
    text=True,
  )
  return pathlib.Path(done.stdout.strip())


@pytest.mark.slow
def test_folders_go_with_their_processes(tmp_path):
  (tmp_path / 'of somebody else').mkdir()
  assert not _make_folder(tmp_path, 'well').exists()
  left = _make_folder(tmp_path, 'killed')
  assert left.exists()
  own = pathlib.Path(deposits.make_folder(tmp_path))
  assert not left.exists()
  assert own.parent.parent == tmp_path
  assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
  assert {path.name for path in tmp_path.iterdir()} == {
    'of somebody else',
    own.parent.name,
  }


def test_folders_that_are_used_stay_whatever_their_names(tmp_path):
  own = pathlib.Path(deposits.make_folder(tmp_path))
  # Of other programs, and of other machines.
  (tmp_path / 'tff_partial.mine').mkdir()
  (tmp_path / 'tff_partial.file').write_text('')
  (tmp_path / 'tff_partial.link').symlink_to(own.parent)
  remote = tmp_path / 'tff_partial.remote'
  shutil.copytree(own.parent, remote)
  (remote / 'tff_partial.lock').write_text('another machine')
  before = {path.name for path in tmp_path.iterdir()}
  deposits.make_folder(tmp_path)
  assert before < {path.name for path in tmp_path.iterdir()}
  assert own.exists()
