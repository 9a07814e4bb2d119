"""Sources of handwritten digits and letters, and of pictures of clothes.

MNIST in its original idx files, with the writers of QMNIST, and Fashion-MNIST
in the same; TFF's federated EMNIST; FEMNIST as LEAF writes it; and the 1,797
small digits that come with scikit-learn, which need no file.
"""

from collections.abc import Iterator, Sequence
import os
import pathlib
from typing import Any

import numpy as np

from tasks.emnist.options import FASHION
from tasks.emnist.options import MNIST
from tasks.errors import DataError
from tasks.files import idx_files
from tasks.images import Images
from tff_partial.data import client_forms

FOLDER = 'emnist'
_FILES = {MNIST: ('MNIST', FOLDER), FASHION: ('Fashion-MNIST', FASHION)}
LEAF_FOLDER = 'femnist'

_SIDE = 28
# Digits, and letters in both cases.
_CHARACTERS = 62
# A writer, images `[images, height, width]`, and labels `[images]`.
_OfWriter = tuple[str, np.ndarray, np.ndarray]
_MNIST_PARTS = {'train': ('train', 60_000), 'test': ('t10k', 10_000)}
# QMNIST rebuilt MNIST with the writer of each image, in these columns.
_LABEL, _WRITER = 0, 2
_QMNIST_COLUMNS = 8

_NO_DATA = (
  'Fetch the four original files of {name} (train-images-idx3-ubyte.gz and so '
  'on) by hand and put them into the folder {folder!r} below --data_dir or '
  '$TFF_PARTIAL_DATA_DIR, or use --data=synthetic, the small digits of '
  'scikit-learn, which need no files.'
)
_REMEDY_WRITERS = (
  'Fetch qmnist-train-labels-idx2-int.gz and qmnist-test-labels-idx2-int.gz '
  'of the QMNIST project and put them beside the files of MNIST.'
)


def load_digits() -> Images:
  """Load the digits of scikit-learn, 8 x 8 pixels from 0 to 16."""
  from sklearn import datasets

  loaded = datasets.load_digits()
  return Images(
    'digits',
    loaded.images.astype(np.uint8),
    loaded.target.astype(np.int32),
    num_classes=10,
    ink=16,
  )


def load_mnist(
  data_dir: str | os.PathLike[str] | None,
  edition: str = MNIST,
  *,
  test: bool = False,
  writers: bool = False,
) -> Images:
  """Read MNIST or Fashion-MNIST from its original files, gzipped or not.

  Args:
    data_dir: Holds a folder with the files, `emnist` of MNIST and else
      `fashion_mnist`, or is it.
    edition: MNIST or FASHION.
    test: True to append the 10,000 test images to the 60,000 training ones.
    writers: True to read the writers of QMNIST, too, whose rows correspond to
      those of MNIST.

  Raises:
    DataError: If a file is missing or damaged, or the files do not belong
      together.
  """
  name, below = _FILES[edition]
  remedy = _NO_DATA.format(name=name, folder=below)
  if not data_dir:
    raise DataError(f'{name}: no data folder is named. {remedy}')
  folder = pathlib.Path(os.path.expanduser(data_dir))
  if (folder / below).is_dir():
    folder = folder / below
  parts = ['train', 'test'] if test else ['train']
  pixels, labels, written_by = zip(
    *(_read_part(folder, part, writers, remedy) for part in parts), strict=True
  )
  return Images(
    edition,
    np.concatenate(pixels),
    np.concatenate(labels),
    num_classes=10,
    ink=255,
    writers=np.concatenate(written_by) if writers else None,
  )


def _read_part(
  folder: pathlib.Path, part: str, writers: bool, remedy: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Read pixels, labels and perhaps writers of one part."""
  prefix, number = _MNIST_PARTS[part]
  pixels = idx_files.read(
    folder,
    f'{prefix}-images-idx3-ubyte',
    [number, _SIDE, _SIDE],
    np.uint8,
    remedy,
  )
  labels = idx_files.read(
    folder, f'{prefix}-labels-idx1-ubyte', [number], np.uint8, remedy
  ).astype(np.int32)
  if labels.max() > 9:
    raise DataError(
      f'{folder / prefix}-labels-idx1-ubyte: label {labels.max()} of image '
      f'{labels.argmax()} is no digit. {remedy}'
    )
  if not writers:
    return pixels, labels, None
  name = f'qmnist-{part}-labels-idx2-int'
  table = idx_files.read(
    folder, name, [None, _QMNIST_COLUMNS], np.int32, _REMEDY_WRITERS
  )[:number]
  if not np.array_equal(table[:, _LABEL], labels):
    raise DataError(
      f'{folder / name}: its labels are not those of MNIST, so that its rows '
      f'belong to other images. {_REMEDY_WRITERS}'
    )
  return pixels, labels, table[:, _WRITER]


def load_federated_emnist(
  data_dir: str | os.PathLike[str] | None, *, only_digits: bool = True
) -> Images:
  """Fetch TFF's federated EMNIST, or load it from the cache.

  Args:
    data_dir: Its folder `emnist` is the cache.
    only_digits: True to leave out letters: 10 classes instead of 62.

  Returns:
    The examples of all writers, followed by the test examples that TFF has of
    each, with full ink as a high value like MNIST; in TFF, paper is 1.

  Raises:
    DataError: If it cannot be fetched.
  """
  import tensorflow_federated as tff

  folder = None
  if data_dir:
    folder = os.path.join(os.path.expanduser(data_dir), FOLDER)
  try:
    parts = tff.simulation.datasets.emnist.load_data(
      only_digits=only_digits, cache_dir=folder
    )
  except Exception as error:
    # Any exception of the loader: network, disk, or a broken archive.
    raise DataError(
      f'Federated EMNIST: TFF cannot fetch or open it ({error}). Check the '
      f'connection and the folder {folder or "of the Keras cache"}, or use '
      '--data=synthetic, which needs no files.'
    ) from error
  return _of_writers(
    'federated_emnist',
    10 if only_digits else _CHARACTERS,
    [_tff_writers(part) for part in parts],
  )


def _tff_writers(part: Any) -> Iterator[_OfWriter]:
  """Yield the images and labels of the writers of TFF's clients."""
  for client in part.client_ids:
    dataset = part.create_tf_dataset_for_client(client)
    for batch in dataset.batch(1024).as_numpy_iterator():
      yield client, batch['pixels'], batch['label'].reshape(-1)


def load_leaf(data_dir: str | os.PathLike[str] | None) -> Images | None:
  """Read FEMNIST from the JSON files of LEAF (Caldas et al., 2018).

  Args:
    data_dir: Its folder `femnist` holds them, or holds folders `train` and
      `test` that do.

  Returns:
    The images, with full ink as a high value; in LEAF, paper is 1. None if
    there are no such files.

  Raises:
    DataError: If a file is damaged.
  """
  folder = pathlib.Path(os.path.expanduser(data_dir or ''), LEAF_FOLDER)
  parts = [folder / 'train', folder / 'test']
  parts = parts if parts[0].is_dir() else [folder]
  if not data_dir or not any(parts[0].glob('*.json')):
    return None
  return _of_writers(LEAF_FOLDER, _CHARACTERS, list(map(_leaf_writers, parts)))


def _leaf_writers(part: pathlib.Path) -> Iterator[_OfWriter]:
  """Yield the images and labels of the writers in a folder of LEAF's files."""
  try:
    for writer, held in client_forms.leaf_clients(part):
      x = np.asarray(held['x'], np.float32).reshape(-1, _SIDE, _SIDE)
      y = np.asarray(held['y'], np.int32)
      if len(x) != len(y) or not np.isin(y, range(_CHARACTERS)).all():
        raise ValueError(f'its {len(x)} images have {len(y)} labels {y[:3]}')
      if not ((x >= 0) & (x <= 1)).all():
        raise ValueError(f'its numbers are from {x.min()} to {x.max()}')
      yield writer, x, y
  except (KeyError, TypeError, ValueError) as error:
    raise DataError(
      f'{part}: expected the files of LEAF, where each writer has images x '
      f'of {_SIDE}x{_SIDE} numbers from 0 to 1 and labels y from 0 to '
      f'{_CHARACTERS - 1}; {error!s:.120}. Make them again with its '
      '`preprocess.sh`.'
    ) from None


def _of_writers(
  name: str, num_classes: int, parts: Sequence[Iterator[_OfWriter]]
) -> Images:
  """Join the images of writers, on which 1 is paper.

  Parts are for training and, if the publisher divides them, for tests.
  """
  pixels, labels, writers, is_test = [], [], [], []
  for number, part in enumerate(parts):
    for writer, x, y in part:
      pixels.append(np.rint(255 * (1 - x)).astype(np.uint8))
      labels.append(y.astype(np.int32))
      writers += [writer] * len(y)
      is_test += [number > 0] * len(y)
  return Images(
    name,
    np.concatenate(pixels),
    np.concatenate(labels),
    num_classes,
    ink=255,
    writers=np.array(writers),
    is_test=np.array(is_test) if len(parts) > 1 else None,
  )
