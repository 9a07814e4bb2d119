"""MovieLens 100K with regions of the United States as clients.

A region is the first digit of a user's zip code (HPFL, section 5.1). Codes that
start with a letter are Canadian; their users are left out, which gives the
paper's 925 users of 10 clients.
"""

import os
import pathlib

import numpy as np

from tasks.errors import DataError
from tasks.movielens import data as movielens_data
from tasks.movielens import files as movielens_data_sets
from tasks.movielens import rating_files
from tasks.user_modeling import records

_NAME = 'ml-100k'
_GENRES = 'u.genre'
_NUM_GENRES = 19
_NUM_FIELDS = 5 + _NUM_GENRES  # Of a movie; the genres are last.
_DIGITS = tuple('0123456789')


def load(
  folder: str | os.PathLike[str], *, min_users: int = 5
) -> records.Records:
  """Read MovieLens 100K: answers are 1 to 5, attributes are the genres.

  Args:
    folder: Holds the files, or the folder `ml-100k` or `movielens/ml-100k`.
    min_users: Regions with fewer users are left out (HPFL, section 5.1).

  Raises:
    DataError: If a file is missing or damaged; names the file and the line.
  """
  place, layout = movielens_data_sets.locate(folder, _NAME)
  ratings = movielens_data.load(folder, _NAME)
  if ratings.users is None:
    raise DataError(
      f'{place / layout.users}: the file is missing, which has the zip codes '
      f'that make the clients. {rating_files.REMEDY_DAMAGED}'
    )
  region_of = ratings.users.set_index('user_id')['zip'].str.slice(0, 1)
  region = ratings.frame['user_id'].map(region_of)
  has_region = region.isin(_DIGITS).to_numpy()
  frame = ratings.frame[has_region]
  return records.build(
    'movielens_hpfl',
    client=region[has_region].to_numpy(str),
    user=frame['user_id'].to_numpy(),
    item=ratings.original_item_ids[frame['item_id'].to_numpy()],
    answer=frame['rating'].to_numpy(),
    tags=read_genres(place),
    scale=ratings.scale,
    min_users=min_users,
    left_out={
      'users_without_region': int((~region_of.isin(_DIGITS)).sum()),
      'records_without_region': int((~has_region).sum()),
    },
  )


def read_genres(folder: pathlib.Path) -> records.Tags:
  """Read the genres of all movies.

  Args:
    folder: Holds `u.genre` and `u.item`.

  Returns:
    The genres of each movie; their ids are their numbers in `u.genre`.

  Raises:
    DataError: If a file is missing or a line of it is damaged.
  """
  names = _read_names(folder / _GENRES)
  path = folder / 'u.item'
  items, genres = [], []
  for number, line in rating_files.lines(path):
    fields = rating_files.split_fields(line, '|', _NUM_FIELDS, path, number)
    item = rating_files.integer(fields[0], 'item id', path, number)
    flags = fields[-_NUM_GENRES:]
    if not set(flags) <= {'0', '1'}:
      raise rating_files.damaged(
        path, number, f'the genres should be 0 or 1, found {"|".join(flags)!r}'
      )
    own = [genre for genre, flag in enumerate(flags) if flag == '1']
    if not own:
      raise rating_files.damaged(path, number, f'item {item} has no genre')
    items += [item] * len(own)
    genres += own
  return records.Tags(np.array(items), np.array(genres), dict(enumerate(names)))


def _read_names(path: pathlib.Path) -> list[str]:
  """Read the names of the genres, which are numbered from 0."""
  names: list[str] = []
  for number, line in rating_files.lines(path):
    name, code = rating_files.split_fields(line, '|', 2, path, number)
    if rating_files.integer(code, 'genre', path, number) != len(names):
      raise rating_files.damaged(
        path,
        number,
        f'the genre {name!r} has the number {code} instead of {len(names)}',
      )
    names.append(name)
  if len(names) != _NUM_GENRES:
    raise rating_files.damaged(
      path, len(names), f'{len(names)} genres instead of {_NUM_GENRES}'
    )
  return names
