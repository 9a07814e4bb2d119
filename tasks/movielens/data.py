"""Sources and splits of MovieLens ratings.

Ratings are read from the original files of MovieLens 1M, MovieLens 100K or the
newer data sets (`load`), fetched from the official address (`download`), or
invented with the same schema (`synthetic`). Users are clients. The protocols
are those of the FedRecon paper, section 5.1: by users, to evaluate on users
unseen in training (`split_users`), and by time within each user's ratings
(`split_by_time`).

MovieLens is GroupLens's and has its own terms, in the README of each data set;
among them, no redistribution.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import os
import pathlib
import re
import tempfile
from typing import Any
import urllib.request

import numpy as np
import pandas as pd
import tensorflow as tf

from tasks.errors import DataError
from tasks.movielens import files as movielens_files
from tff_partial.data import partitions

OFFICIAL_ADDRESS = 'https://files.grouplens.org/datasets/movielens/'

# Purposes of random draws; each has its own stream of a seed.
_SPLIT_USERS, _SHUFFLE_USER, SYNTHETIC = range(3)
# Shares of training, validation and test.
_FRACTIONS = (0.8, 0.1, 0.1)
# Where ranges of ages begin, after the first.
_AGES = (18, 25, 35, 45, 50, 56)


@dataclasses.dataclass(frozen=True, eq=False)
class Ratings:
  """Ratings of items by users.

  Attributes:
    name: The data set, such as 'ml-1m'.
    frame: One row a rating, with the columns user_id (int64, as in the files),
      item_id (int32, from 0 to `num_items` - 1), rating (float32) and
      timestamp (int64, seconds since 1970). Sorted by user, then time; ratings
      of one user and second keep the order of the file.
    item_titles: The title of each item, by its item_id.
    original_item_ids: int64 `[num_items]`, ascending: the id of each item in
      the files. Only items that someone rates have an item_id.
    users: Known attributes of the users in `frame`, one row each by ascending
      user_id: the columns user_id, gender, age, occupation and zip. None if the
      data set has none.
    scale: The lowest and the highest possible rating.
    item_attributes: float64 `[num_items, width]`, the genres of each item,
      from 0 to 1. None if they are not known.
  """

  name: str
  frame: pd.DataFrame
  item_titles: tuple[str, ...]
  original_item_ids: np.ndarray
  users: pd.DataFrame | None
  scale: tuple[float, float]
  item_attributes: np.ndarray | None = None

  @property
  def num_items(self) -> int:
    """Number of items that at least one user rates."""
    return len(self.item_titles)


def load(folder: str | os.PathLike[str], name: str = '') -> Ratings:
  """Read a MovieLens data set from its original files."""
  place, layout = movielens_files.locate(folder, name)
  table = layout.ratings.read(place)
  titles, attributes = movielens_files.read_items(place, layout)
  users = movielens_files.read_users(place, layout)
  rated = table['item_id'].drop_duplicates().to_numpy()
  _check_described(rated, titles, 'item', layout.items.name, place)
  if layout.users is not None and users is not None:
    raters = table['user_id'].drop_duplicates().to_numpy()
    _check_described(raters, users['user_id'], 'user', layout.users.name, place)
  name = layout.name or name or place.resolve().name
  ratings = assemble(name, table, titles, users, layout.scale)
  return dataclasses.replace(
    ratings,
    item_attributes=attributes.loc[ratings.original_item_ids].to_numpy(),
  )


def user_columns(users: pd.DataFrame) -> pd.DataFrame:
  """Return numbers from 0 for users' gender, age and occupation.

  Args:
    users: As in `Ratings`.

  Returns:
    Columns of int32 by user_id; ages are those of MovieLens 1M's ranges.
  """
  found = users.set_index('user_id')
  return pd.DataFrame(
    {
      'gender': found['gender'].factorize(sort=True)[0],
      'age': np.digitize(found['age'], _AGES),
      'occupation': found['occupation'].factorize(sort=True)[0],
    },
    found.index,
    dtype=np.int32,
  )


def download(
  folder: str | os.PathLike[str],
  name: str = 'ml-1m',
  address: str = OFFICIAL_ADDRESS,
) -> pathlib.Path:
  """Fetch a data set from its official address, unless it is there already.

  The archive is checked against the publisher's MD5 checksum, and the data
  set's folder, which is returned, appears whole or not at all.
  """
  if name not in movielens_files.DATA_SETS or not os.fspath(folder):
    raise DataError(
      f'--download: cannot fetch {name!r} into the folder {str(folder)!r}. '
      f'Choose one of {", ".join(movielens_files.DATA_SETS)}, and name a '
      'folder with --data_dir or $TFF_PARTIAL_DATA_DIR.'
    )
  try:
    return movielens_files.locate(folder, name)[0]
  except DataError:
    pass  # Not there yet: download it.
  archive = f'{address}{name}.zip'
  target = pathlib.Path(os.path.expanduser(folder)).absolute()
  try:
    with urllib.request.urlopen(f'{archive}.md5', timeout=60) as response:
      published = response.read(4096).decode('ascii', 'replace').lower()
    digest = re.search(r'\b[0-9a-f]{32}\b', published)
    if digest is None:
      raise ValueError(f'{archive}.md5 holds no checksum')
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=target, prefix=f'.{name}-', suffix='.part'
    ) as scratch:
      tf.keras.utils.get_file(
        origin=archive,
        file_hash=digest.group(),
        extract=True,
        cache_subdir=scratch,
      )
      os.rename(os.path.join(scratch, name), target / name)
  except Exception as error:  # Keras raises no narrower one.
    raise DataError(
      f'{archive}: cannot be fetched into {target / name} ({error}). Check the '
      'connection and the folder, or fetch and unpack the archive by hand and '
      'name its folder with --data_dir; --data=synthetic needs no data at all.'
    ) from error
  return target / name


def describe(frame: pd.DataFrame) -> dict[str, int]:
  return {
    'ratings': len(frame),
    'users': int(frame['user_id'].nunique()),
    'items': int(frame['item_id'].nunique()),
  }


def split_users(frame: pd.DataFrame, seed: int = 0) -> tuple[pd.DataFrame, ...]:
  """Divide users at random: each part has all ratings of its users.

  The first parts end at the rounded multiples of their summed fractions, so
  that 6,040 users become 4,832, 604 and 604 (FedRecon, section 5.1).
  """
  user_ids = np.unique(frame['user_id'].to_numpy())
  shuffled = generator(seed, _SPLIT_USERS).permutation(user_ids)
  ends = np.rint(np.cumsum(_FRACTIONS)[:-1] * len(user_ids)).astype(int)
  parts = []
  for fraction, users in zip(_FRACTIONS, np.split(shuffled, ends), strict=True):
    if not len(users):
      raise DataError(
        f'{len(user_ids)} users cannot be divided into the shares '
        f'{_FRACTIONS}: the share {fraction} would have no user. Use more '
        'users.'
      )
    mine = np.isin(frame['user_id'].to_numpy(), users)
    parts.append(frame[mine].reset_index(drop=True))
  return tuple(parts)


def split_by_time(
  frame: pd.DataFrame, fractions: Sequence[float] = _FRACTIONS
) -> tuple[pd.DataFrame, ...]:
  """Divide each user's ratings by time: the first part has the oldest ones.

  Of a user's n ratings, a part ends at n times the summed fractions up to it,
  rounded down: 20 ratings become 16, 2 and 2, and 7 become 5, 1 and 1. The
  first part has at least one rating of every user; other parts may have none.

  Returns a frame for each part, sorted by user, then time. Ratings of the same
  second keep their order.
  """
  order = np.lexsort((frame['timestamp'], frame['user_id']))
  frame = frame.iloc[order]
  rows: Any = frame.groupby('user_id').indices
  return tuple(
    _of_users(frame, part.values())
    for part in partitions.split_examples(rows, fractions)
  )


def limit_per_user(
  frame: pd.DataFrame, max_examples: int | None = 300, seed: int = 0
) -> pd.DataFrame:
  """Shuffle each user's ratings and keep the first of them.

  Each user has a separate generator, so that a user's ratings do not depend on
  which other users there are (FedRecon's experiments keep 300).
  """
  places: Any = frame.groupby('user_id').indices
  return _of_users(
    frame,
    (
      generator(seed, _SHUFFLE_USER, int(user)).permutation(mine)[:max_examples]
      for user, mine in places.items()
    ),
  )


def _of_users(frame: pd.DataFrame, rows: Iterable[np.ndarray]) -> pd.DataFrame:
  """Return the rows of one user after another."""
  places = np.concatenate([np.zeros(0, np.int64), *rows])
  return frame.iloc[places].reset_index(drop=True)


def assemble(
  name: str,
  table: pd.DataFrame,
  titles: dict[int, str],
  users: pd.DataFrame | None,
  scale: tuple[float, float],
) -> Ratings:
  """Renumber items, sort rows and drop users and items without ratings."""
  item_ids, item_codes = np.unique(table['item_id'], return_inverse=True)
  frame = pd.DataFrame(
    {
      'user_id': table['user_id'].astype(np.int64),
      'item_id': item_codes.astype(np.int32),
      'rating': table['rating'].astype(np.float32),
      'timestamp': table['timestamp'].astype(np.int64),
    }
  )
  # Equal times keep the order of the file.
  frame = frame.sort_values(
    ['user_id', 'timestamp'], kind='stable', ignore_index=True
  )
  if users is not None:
    users = users[users['user_id'].isin(frame['user_id'])]
    users = users.reset_index(drop=True)
  return Ratings(
    name=name,
    frame=frame,
    item_titles=tuple(titles[item_id] for item_id in item_ids.tolist()),
    original_item_ids=item_ids.astype(np.int64),
    users=users,
    scale=scale,
  )


def _check_described(
  rated: np.ndarray,
  described: Iterable[int],
  what: str,
  file: str,
  place: pathlib.Path,
) -> None:
  """Raise an error for rated users or items that their file does not list."""
  missing = np.setdiff1d(rated, list(described))
  if missing.size:
    raise DataError(
      f'{place / file}: there is no line for {what} {missing[0]}, which has '
      f'ratings; {missing.size} of {rated.size} {what}s are missing. The files '
      'do not belong together or one is cut off: fetch the data again with '
      '--download into another folder.'
    )


def generator(seed: int, *words: int) -> np.random.Generator:
  """Return a generator for a seed and a purpose."""
  # Seeds are taken modulo 2**64, as negative ones are not allowed here.
  return np.random.Generator(
    np.random.PCG64(np.random.SeedSequence([seed % 2**64, *words]))
  )
