"""MovieLens 100K with regions of the United States as clients.

A region is the first digit of a user's zip code (HPFL, section 5.1). Codes that
start with a letter are Canadian; their users are left out, which gives the
paper's 925 users of 10 clients.
"""

import os
import pathlib

from tasks.errors import DataError
from tasks.movielens import data as movielens_data
from tasks.movielens import files as data_sets
from tasks.user_modeling import records

NAME = 'ml-100k'
_GENRES = data_sets.File('u.genre', '|', ('name', 'genre_id'))
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
  place, _ = data_sets.locate(folder, NAME)
  ratings = movielens_data.load(folder, NAME)
  if ratings.users is None:
    raise DataError(
      f'{place / "u.user"}: the file is missing, which has the zip codes '
      f'that make the clients. {data_sets.REMEDY_DAMAGED}'
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
  """Read the genres of all movies, numbered as in `u.genre`."""
  named = _GENRES.read(folder)
  numbers = [str(number) for number in range(len(data_sets.GENRES))]
  if named['genre_id'].tolist() != numbers:
    raise DataError(
      f'{folder / _GENRES.name}: the genres are not numbered from 0 to '
      f'{numbers[-1]} in order. {data_sets.REMEDY_DAMAGED}'
    )
  file = data_sets.DATA_SETS[NAME].items
  movies = file.read(folder)
  flags = movies[list(data_sets.GENRES)].to_numpy(bool)
  has_genre = flags.any(axis=1)
  if not has_genre.all():
    item = movies['item_id'][has_genre.argmin()]
    raise DataError(
      f'{folder / file.name}: the item {item} has no genre. '
      f'{data_sets.REMEDY_DAMAGED}'
    )
  rows, genres = flags.nonzero()
  items = movies['item_id'].to_numpy()[rows]
  return records.Tags(items, genres, named['name'].to_dict())
