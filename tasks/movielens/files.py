"""Reads the files of the MovieLens data sets, strictly.

Three layouts exist: that of MovieLens 1M (`ratings.dat`, fields parted by
`::`), that of MovieLens 100K (`u.data`, parted by tabs), and the tables of the
newer data sets (`ratings.csv`). They are told apart by the name of the ratings
file. A line that is not as it should be is never skipped or repaired: the
reader stops and names file and line, because a model trained on half a file
looks just like any other.
"""

import dataclasses
import os
import pathlib
from typing import NamedTuple

import numpy as np
import pandas as pd

from tasks.errors import DataError
from tasks.files import tables

REMEDY_DAMAGED = (
  'Correct the line, or move the folder away and fetch the data again with '
  '--download.'
)
REMEDY_NO_DATA = (
  'Name the folder that holds the data with --data_dir or '
  '$TFF_PARTIAL_DATA_DIR, fetch them into it from the official address with '
  '--download, or use invented data with --data=synthetic, which needs no '
  'files.'
)

GENRES = tuple(f'genre_{number}' for number in range(19))

# Neither Latin-1 nor UTF-8 text has the control characters.
_TEXT = r'[^\x00-\x08\n-\x1f\x7f-\x9f]'
_STARS = r'[1-5](?:\.0*)?'
_HALF_STARS = r'(?:0?\.50*|[1-4](?:\.5?0*)?|5(?:\.0*)?)'
_NUMBERS = {
  **dict.fromkeys(('user_id', 'item_id', 'age', 'timestamp'), tables.WHOLE),
  **dict.fromkeys(GENRES, '[01]'),
}
_MAY_BE_EMPTY = ('genres', 'release', 'video_release', 'address')


@dataclasses.dataclass(frozen=True)
class File:
  """How one file of a data set is written.

  Attributes:
    name: Its name.
    separator: Stands between the values of a line.
    columns: Names of the columns. No two lines have the same first value,
      or first two values in a file of ratings.
    header: The file's first line; '' if it has none.
    rating: Regular expression of a rating; '' if there are none.
  """

  name: str
  separator: str
  columns: tuple[str, ...]
  header: str = ''
  rating: str = ''

  def read(self, folder: pathlib.Path) -> pd.DataFrame:
    """Read all lines, in the order in which they are written."""
    table = tables.read(
      folder / self.name,
      names=() if self.header else self.columns,
      separator=self.separator,
      remedy=REMEDY_DAMAGED,
      must_end=True,
      whole=[
        place
        for place, column in enumerate(self.columns)
        if _NUMBERS.get(column) == tables.WHOLE
      ],
    )
    header = ','.join(table.texts.columns)
    if header != (self.header or ','.join(self.columns)):
      raise table.refusal(
        1, f'the header is {header[:80]!r} instead of {self.header!r}'
      )
    if table.texts.empty:
      raise table.refusal(2, 'the file is empty but for its header')
    table.texts.columns = pd.Index(self.columns)
    frame = pd.DataFrame(
      {column: self._values(table, column) for column in self.columns}
    )
    keys = frame.iloc[:, : 2 if self.rating else 1]
    again = keys.duplicated()
    if again.any():
      line = again.idxmax()
      key = keys.loc[line]
      first = (keys == key).all(axis=1).idxmax()
      named = ', '.join(f'{name} {value}' for name, value in key.items())
      raise table.refusal(
        line, f'a second line of {named}; the first is on line {first}'
      )
    return frame.reset_index(drop=True)

  def _values(self, table: tables.TextTable, column: str) -> pd.Series:
    if column in _NUMBERS:
      return table.values(
        column,
        _NUMBERS[column],
        '0 or 1' if column in GENRES else 'a whole number from 0 up',
        lambda texts: texts.astype(np.int64),
      )
    if column == 'rating':
      return table.values(
        column,
        self.rating,
        'a rating on the scale',
        lambda texts: texts.astype(np.float64),
      )
    number = '*' if column in _MAY_BE_EMPTY else '+'
    return table.values(column, _TEXT + number, 'a text')


class Layout(NamedTuple):
  """How one family of MovieLens data sets is written.

  Attributes:
    name: The data set, where only one is written this way, else ''.
    scale: Lowest and highest rating.
    ratings: File of ratings.
    items: File of items.
    users: File of users' attributes; None if there is none.
  """

  name: str
  scale: tuple[float, float]
  ratings: File
  items: File
  users: File | None


_RATINGS = ('user_id', 'item_id', 'rating', 'timestamp')
_ITEMS = ('item_id', 'title', 'genres')
_ML_1M = Layout(
  'ml-1m',
  (1.0, 5.0),
  File('ratings.dat', '::', _RATINGS, rating=_STARS),
  File('movies.dat', '::', _ITEMS),
  File('users.dat', '::', ('user_id', 'gender', 'age', 'occupation', 'zip')),
)
_ML_100K = Layout(
  'ml-100k',
  (1.0, 5.0),
  File('u.data', '\t', _RATINGS, rating=_STARS),
  File(
    'u.item',
    '|',
    ('item_id', 'title', 'release', 'video_release', 'address', *GENRES),
  ),
  File('u.user', '|', ('user_id', 'age', 'gender', 'occupation', 'zip')),
)
_TABLES = Layout(
  '',
  (0.5, 5.0),
  File(
    'ratings.csv', ',', _RATINGS, 'userId,movieId,rating,timestamp', _HALF_STARS
  ),
  File('movies.csv', ',', _ITEMS, 'movieId,title,genres'),
  None,
)
_LAYOUTS = (_ML_1M, _ML_100K, _TABLES)

# Data set, in the order in which they are looked for, to its layout.
DATA_SETS = {
  'ml-1m': _ML_1M,
  'ml-100k': _ML_100K,
  'ml-latest-small': _TABLES,
  'ml-20m': _TABLES,
  'ml-25m': _TABLES,
  'ml-32m': _TABLES,
  'ml-latest': _TABLES,
}


def locate(
  folder: str | os.PathLike[str], name: str = ''
) -> tuple[pathlib.Path, Layout]:
  """Find a MovieLens data set in a folder or below it.

  Looked through are, in this order: the folder itself, its sub-folders named
  after a data set, and the same again in its sub-folder `movielens`.
  """
  if name and name not in DATA_SETS:
    raise DataError(
      f'{name!r} is not a MovieLens data set that can be read. Choose one of '
      f'{", ".join(DATA_SETS)}.'
    )
  root = pathlib.Path(os.path.expanduser(folder))
  if not os.fspath(folder) or not os.path.isdir(root):
    kind = 'is not a folder' if os.path.isfile(root) else 'does not exist'
    raise DataError(
      f'{os.fspath(folder)!r}: the data folder {kind}. {REMEDY_NO_DATA}'
    )
  names = (name,) if name else tuple(DATA_SETS)
  layouts = (DATA_SETS[name],) if name else _LAYOUTS
  for parent in (root, root / 'movielens'):
    for place in (parent, *(parent / each for each in names)):
      for layout in layouts:
        # Several data sets have files of the same names: if one of them is
        # asked for, the folder has to be called like it.
        called = name in (place.name, place.resolve().name)
        if (called or not name or layout.name) and os.path.isfile(
          place / layout.ratings.name
        ):
          return place, layout
  wanted = ' or '.join(layout.ratings.name for layout in layouts)
  raise DataError(
    f'{root}: holds no MovieLens ratings. Looked for {wanted}, in this folder, '
    f'in its sub-folders {", ".join(names)}, and in movielens below it. '
    f'{REMEDY_NO_DATA}'
  )


def read_items(
  folder: pathlib.Path, layout: Layout
) -> tuple[dict[int, str], pd.DataFrame]:
  """Read the titles and the genres of all items, by the ids of the file.

  Returns:
    The titles; and a row for each id, in which a genre's column has one over
    the root of the item's number of genres, or 0.

  Raises:
    DataError: If the file cannot be read or a line of it is damaged.
  """
  items = layout.items.read(folder).set_index('item_id')
  if 'genres' in items:
    genres = items['genres'].str.get_dummies('|')
  else:
    genres = items[list(GENRES)]
  genres = genres.astype(float)
  return (
    dict(zip(items.index.tolist(), items['title'], strict=True)),
    genres.div(genres.sum(axis=1).clip(lower=1.0) ** 0.5, axis=0),
  )


def read_users(folder: pathlib.Path, layout: Layout) -> pd.DataFrame | None:
  """Read what is known about the users, if the data set tells anything.

  Returns:
    Columns user_id (int64), gender (str), age (int64, years; of a range of
    ages in MovieLens 1M its lower end), occupation (str, a code in MovieLens
    1M) and zip (str), by ascending user_id. None if there is no such file.

  Raises:
    DataError: If the file cannot be read or a line of it is damaged.
  """
  if layout.users is None or not (folder / layout.users.name).exists():
    return None
  users = layout.users.read(folder).sort_values('user_id', ignore_index=True)
  return users[['user_id', 'gender', 'age', 'occupation', 'zip']]
