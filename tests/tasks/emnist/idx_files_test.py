"""Tests of the readers of idx files, of MNIST, and of federated EMNIST."""

import collections
import gzip
import json
import os
import pathlib
import struct
from unittest import mock

import numpy as np
import pytest
import tensorflow_federated as tff

from tasks.emnist import images as emnist_images
from tasks.errors import DataError
from tasks.files import idx_files

_REAL = os.environ.get('TFF_PARTIAL_DATA_DIR')
_ITEMS = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def _idx(array: np.ndarray) -> bytes:
  """An array as an idx file, written here by hand."""
  code = {'u1': 0x08, 'i4': 0x0C}[array.dtype.str[1:]]
  header = bytes([0, 0, code, array.ndim])
  header += struct.pack(f'>{array.ndim}I', *array.shape)
  return header + array.astype(array.dtype.newbyteorder('>')).tobytes()


def _read(folder: pathlib.Path, shape=(2, 3, 4), dtype=np.uint8) -> np.ndarray:
  return idx_files.read(folder, 'images', shape, dtype, 'Fetch it again.')


@pytest.mark.parametrize('packed', [False, True])
@pytest.mark.parametrize('dtype', [np.uint8, np.int32])
def test_what_was_written_is_read(tmp_path, packed, dtype):
  array = _ITEMS.astype(dtype)
  data = _idx(array)
  if packed:
    (tmp_path / 'images.gz').write_bytes(gzip.compress(data))
  else:
    (tmp_path / 'images').write_bytes(data)
  found = _read(tmp_path, dtype=dtype)
  np.testing.assert_array_equal(found, array)
  assert found.dtype == dtype
  # Any number of rows may be allowed.
  assert _read(tmp_path, (None, 3, 4), dtype).shape == (2, 3, 4)


_WHOLE = _idx(_ITEMS)


@pytest.mark.parametrize(
  'data, expected',
  [
    (b'', 'it begins with nothing'),
    (_WHOLE[:-1], 'reshape'),
    (_idx(_ITEMS[:1]), r'its shape is \[1, 3, 4\]'),
  ],
)
@pytest.mark.parametrize('packed', [False, True])
def test_damaged_files_are_named(tmp_path, data, expected, packed):
  name = 'images.gz' if packed else 'images'
  (tmp_path / name).write_bytes(gzip.compress(data) if packed else data)
  said = rf'{name}: no .* file of 2 x 3 x 4 items of uint8 \(.*{expected}'
  with pytest.raises(DataError, match=f'(?s){said}.*Fetch it again.$'):
    _read(tmp_path)


# ---- MNIST -------------------------------------------------------------------


def _write_mnist(folder: pathlib.Path, **changes: np.ndarray) -> None:
  """The files of MNIST with empty images, but for some changes."""
  folder.mkdir()
  for part, number in (('train', 60_000), ('t10k', 10_000)):
    labels = (np.arange(number) % 10).astype(np.uint8)
    table = np.zeros([number + 5, 8], np.int32)
    table[:number, 0] = labels
    table[:number, 2] = np.arange(number) // 100
    name = {'train': 'train', 't10k': 'test'}[part]
    files = {
      f'{part}-images-idx3-ubyte': np.zeros([number, 28, 28], np.uint8),
      f'{part}-labels-idx1-ubyte': labels,
      f'qmnist-{name}-labels-idx2-int': table,
    }
    for file, array in {**files, **changes}.items():
      (folder / file).write_bytes(_idx(array))


def test_mnist_is_read_from_its_folder(tmp_path):
  _write_mnist(tmp_path / 'emnist')
  for folder in (tmp_path, tmp_path / 'emnist'):
    images = emnist_images.load_mnist(folder)
    assert images.pixels.shape == (60_000, 28, 28)
    assert images.labels[:12].tolist() == [*range(10), 0, 1]
    assert images.writers is None
  images = emnist_images.load_mnist(tmp_path, test=True, writers=True)
  assert len(images) == 70_000
  assert images.writers.tolist()[99:101] == [0, 1]
  # Clothes are in files of the same names, in a folder of their own.
  (tmp_path / 'emnist').rename(tmp_path / 'fashion_mnist')
  images = emnist_images.load_mnist(tmp_path, 'fashion_mnist')
  assert (images.name, len(images)) == ('fashion_mnist', 60_000)
  (tmp_path / 'fashion_mnist' / 'train-images-idx3-ubyte').unlink()
  with pytest.raises(DataError, match="of Fashion-MNIST .* 'fashion_mnist'"):
    emnist_images.load_mnist(tmp_path, 'fashion_mnist')


def test_files_of_different_data_are_refused(tmp_path):
  table = np.zeros([60_005, 8], np.int32)
  _write_mnist(tmp_path / 'a', **{'qmnist-train-labels-idx2-int': table})
  with pytest.raises(DataError, match='labels are not those of MNIST'):
    emnist_images.load_mnist(tmp_path / 'a', writers=True)
  letters = np.full([60_000], 10, np.uint8)
  _write_mnist(tmp_path / 'b', **{'train-labels-idx1-ubyte': letters})
  with pytest.raises(DataError, match='label 10 of image 0 is no digit'):
    emnist_images.load_mnist(tmp_path / 'b')


@pytest.mark.parametrize('folder', [None, ''])
def test_a_folder_must_be_named(folder):
  with pytest.raises(DataError, match='no data folder') as error:
    emnist_images.load_mnist(folder)
  assert '--data=synthetic' in str(error.value)


def test_missing_files_say_what_to_do(tmp_path):
  with pytest.raises(
    DataError, match='train-images-idx3-ubyte: no whole'
  ) as error:
    emnist_images.load_mnist(tmp_path)
  for way in ('--data_dir', 'TFF_PARTIAL_DATA_DIR', '--data=synthetic'):
    assert way in str(error.value)


@pytest.mark.skipif(not _REAL, reason='needs TFF_PARTIAL_DATA_DIR')
def test_the_real_writers():
  images = emnist_images.load_mnist(_REAL, writers=True)
  assert len(images) == 60_000
  sizes = np.unique(images.writers, return_counts=True)[1]
  assert len(sizes) == 539
  assert (sizes.min(), np.median(sizes), sizes.max()) == (19, 116, 131)
  # The mean brightness that everybody normalizes MNIST by.
  assert images.pixels.mean() / images.ink == pytest.approx(0.1307, abs=1e-4)


# ---- data that need no files of ours -----------------------------------------


def test_the_digits_of_scikit_learn():
  images = emnist_images.load_digits()
  assert len(images) == 1797
  assert images.shape == (8, 8)
  assert (images.pixels.min(), images.pixels.max()) == (0, images.ink)
  assert np.unique(images.labels).tolist() == list(range(10))


def _fake_client_data(*clients: str):
  """Clients with an all-paper image of a 3 and an all-ink one of a 7."""
  return tff.simulation.datasets.TestClientData(
    {
      client: collections.OrderedDict(
        label=np.array([3, 7], np.int32),
        pixels=np.stack([np.ones([28, 28]), np.zeros([28, 28])]).astype('f4'),
      )
      for client in clients
    }
  )


def test_federated_emnist_is_read_by_writer(tmp_path, monkeypatch):
  data = _fake_client_data('anna', 'bert'), _fake_client_data('anna')
  load_data = mock.Mock(return_value=data)
  datasets = tff.simulation.datasets
  monkeypatch.setattr(datasets.emnist, 'load_data', load_data)
  images = emnist_images.load_federated_emnist(tmp_path)
  load_data.assert_called_once_with(
    only_digits=True, cache_dir=str(tmp_path / 'emnist')
  )
  assert images.writers.tolist() == ['anna'] * 2 + ['bert'] * 2 + ['anna'] * 2
  assert images.is_test.tolist() == [False] * 4 + [True] * 2
  assert images.labels.tolist() == [3, 7] * 3
  # Ink is high, as in MNIST.
  assert images.pixels[:, 0, 0].tolist() == [0, 255] * 3


def _leaf(path: pathlib.Path, paper: float = 1.0, **clients) -> None:
  """A file of LEAF with an all-paper and an all-ink image of each writer."""
  path.parent.mkdir(parents=True, exist_ok=True)
  images = [[paper] * 784, [0.0] * 784]
  held = {name: {'x': images, 'y': labels} for name, labels in clients.items()}
  path.write_text(json.dumps({'users': list(held), 'user_data': held}))


def test_femnist_is_read_from_leafs_files(tmp_path):
  assert emnist_images.load_leaf(tmp_path) is None
  _leaf(tmp_path / 'femnist/train/0.json', anna=[3, 61])
  _leaf(tmp_path / 'femnist/train/1.json', bert=[10, 36])
  _leaf(tmp_path / 'femnist/test/0.json', anna=[3, 5])
  images = emnist_images.load_leaf(tmp_path)
  assert images.writers.tolist() == ['anna'] * 2 + ['bert'] * 2 + ['anna'] * 2
  assert images.is_test.tolist() == [False] * 4 + [True] * 2
  assert images.labels.tolist() == [3, 61, 10, 36, 3, 5]
  assert images.num_classes == 62
  assert images.pixels[:, 27, 27].tolist() == [0, 255] * 3


@pytest.mark.parametrize(
  ('labels', 'paper'),
  [([3, 62], 1.0), ([3], 1.0), ([3, 4], 255.0), ([3, 4], float('nan'))],
)
def test_damaged_files_of_leaf_are_refused(tmp_path, labels, paper):
  _leaf(tmp_path / 'femnist/all.json', paper, anna=labels)
  with pytest.raises(DataError, match='femnist: expected the files of LEAF'):
    emnist_images.load_leaf(tmp_path)
