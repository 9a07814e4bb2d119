"""Reads the files of the MovieLens data sets, strictly.

Three layouts exist: that of MovieLens 1M (`ratings.dat`, fields parted by
`::`), that of MovieLens 100K (`u.data`, parted by tabs), and the tables of the
newer data sets (`ratings.csv`). They are told apart by the name of the ratings
file. A line that is not as it should be is never skipped or repaired: the
reader stops and names file and line, because a model trained on half a file
looks just like any other.
"""

from collections.abc import Iterator
import csv
import os
import pathlib

import pandas as pd

from tasks.errors import DataError
from tasks.movielens.rating_files import damaged
from tasks.movielens.rating_files import integer
from tasks.movielens.rating_files import Layout
from tasks.movielens.rating_files import lines
from tasks.movielens.rating_files import parse_quickly
from tasks.movielens.rating_files import parse_slowly
from tasks.movielens.rating_files import read
from tasks.movielens.rating_files import REMEDY_DAMAGED
from tasks.movielens.rating_files import repeated
from tasks.movielens.rating_files import split_fields
from tasks.movielens.rating_files import without_header

REMEDY_NO_DATA = (
  'Name the folder that holds the data with --data_dir or '
  '$TFF_PARTIAL_DATA_DIR, fetch them into it from the official address with '
  '--download, or use invented data with --data=synthetic, which needs no '
  'files.'
)


_ML_1M = Layout(
  'ml-1m', 'ratings.dat', 'movies.dat', 'users.dat', '::', '', (1.0, 5.0, 1.0)
)
_ML_100K = Layout(
  'ml-100k', 'u.data', 'u.item', 'u.user', '\t', '', (1.0, 5.0, 1.0)
)
_TABLES = Layout(
  '',
  'ratings.csv',
  'movies.csv',
  '',
  ',',
  'userId,movieId,rating,timestamp',
  (0.5, 5.0, 0.5),
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

  Args:
    folder: Where to look.
    name: One of `DATA_SETS` if only that one will do, else '' for the first.

  Returns:
    The folder that holds the files, and their layout.

  Raises:
    DataError: If the folder or the files do not exist, or the name is unknown.
  """
  if name and name not in DATA_SETS:
    raise DataError(
      f'{name!r} is not a MovieLens data set that can be read. Choose one of '
      f'{", ".join(DATA_SETS)}.'
    )
  if not os.fspath(folder):
    raise DataError(f'No data folder was named. {REMEDY_NO_DATA}')
  root = pathlib.Path(os.path.expanduser(folder))
  names = (name,) if name else tuple(DATA_SETS)
  layouts = (DATA_SETS[name],) if name else _LAYOUTS
  try:
    if not root.is_dir():
      kind = 'is not a folder' if root.exists() else 'does not exist'
      raise DataError(f'{root}: the data folder {kind}. {REMEDY_NO_DATA}')
    for place in _places(root, names, name):
      for layout in layouts:
        if (place / layout.ratings).is_file():
          return place, layout
  except OSError as error:
    raise DataError(
      f'{root}: the data folder cannot be looked into '
      f'({error.strerror or error}). {REMEDY_NO_DATA}'
    ) from error
  wanted = ' or '.join(layout.ratings for layout in layouts)
  raise DataError(
    f'{root}: holds no MovieLens ratings. Looked for {wanted}, in this folder, '
    f'in its sub-folders {", ".join(names)}, and in movielens below it. '
    f'{REMEDY_NO_DATA}'
  )


def _places(
  root: pathlib.Path, names: tuple[str, ...], only: str
) -> Iterator[pathlib.Path]:
  """Yield the folders that may hold a data set, the likeliest first."""
  for parent in (root, root / 'movielens'):
    # Several data sets have files of the same names: if one of them is asked
    # for, the folder has to be called like it.
    if not only or DATA_SETS[only].name or parent.resolve().name == only:
      yield parent
    yield from (parent / name for name in names)


def read_ratings(folder: pathlib.Path, layout: Layout) -> pd.DataFrame:
  """Read the file of ratings, in the order in which it is written.

  Args:
    folder: Holds the file.
    layout: How it is written.

  Returns:
    Columns user_id, item_id and timestamp (int64; seconds since 1970) and
    rating (float64), with the ids of the file.

  Raises:
    DataError: If the file cannot be read, has no ratings, or any line is
      damaged; names the first such line.
  """
  path = folder / layout.ratings
  body, first_line = without_header(read(path), layout, path)
  table = parse_quickly(body, layout)
  if table is None:
    table = parse_slowly(body, layout, path, first_line)
  if table.empty:
    raise DataError(f'{path}: the file holds no ratings. {REMEDY_DAMAGED}')
  again = table.duplicated(['user_id', 'item_id']).to_numpy()
  if again.any():
    raise repeated(table, int(again.argmax()), path, first_line)
  return table


def read_titles(folder: pathlib.Path, layout: Layout) -> dict[int, str]:
  """Read the titles of all items, by the ids of the file.

  Raises:
    DataError: If the file cannot be read or a line of it is damaged.
  """
  path = folder / layout.items
  if layout is _TABLES:
    return _read_title_table(path)
  separator, width = ('::', 3) if layout is _ML_1M else ('|', 24)
  titles: dict[int, str] = {}
  for number, line in lines(path):
    fields = split_fields(line, separator, width, path, number)
    _add_title(titles, fields[0], fields[1], path, number)
  return titles


def read_users(folder: pathlib.Path, layout: Layout) -> pd.DataFrame | None:
  """Read what is known about the users, if the data set tells anything.

  Returns:
    Columns user_id (int64), gender (str), age (int64, years; of a range of
    ages in MovieLens 1M its lower end), occupation (str, a code in MovieLens
    1M) and zip (str), by ascending user_id. None if there is no such file.

  Raises:
    DataError: If the file cannot be read or a line of it is damaged.
  """
  path = folder / layout.users
  if not layout.users or not path.exists():
    return None
  separator = '::' if layout is _ML_1M else '|'
  rows: dict[int, tuple[int, str, int, str, str]] = {}
  for number, line in lines(path):
    user, *rest = split_fields(line, separator, 5, path, number)
    # MovieLens 100K writes the age before the gender.
    gender, age = rest[:2] if layout is _ML_1M else (rest[1], rest[0])
    user_id = integer(user, 'user id', path, number)
    if user_id in rows:
      raise damaged(path, number, f'user {user_id} is there a second time')
    years = integer(age, 'age', path, number)
    rows[user_id] = (user_id, gender, years, rest[2], rest[3])
  users = pd.DataFrame(
    [rows[user_id] for user_id in sorted(rows)],
    columns=['user_id', 'gender', 'age', 'occupation', 'zip'],
  )
  return users.astype({'user_id': 'int64', 'age': 'int64'})


def _read_title_table(path: pathlib.Path) -> dict[int, str]:
  """Read `movies.csv`, where a title with a comma stands in quotes."""
  titles: dict[int, str] = {}
  numbered = lines(path)
  _, header = next(numbered)
  if header != 'movieId,title,genres':
    raise damaged(
      path,
      1,
      f"the header is {header[:80]!r} instead of 'movieId,title,genres'",
    )
  for number, line in numbered:
    try:
      (fields,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as error:
      raise damaged(path, number, f'cannot be parsed ({error})') from error
    if len(fields) != 3:
      raise damaged(
        path, number, f'{len(fields)} fields instead of 3: {line[:80]!r}'
      )
    _add_title(titles, fields[0], fields[1], path, number)
  return titles


def _add_title(
  titles: dict[int, str],
  item: str,
  title: str,
  path: pathlib.Path,
  number: int,
) -> None:
  item_id = integer(item, 'item id', path, number)
  if item_id in titles:
    raise damaged(path, number, f'item {item_id} is there a second time')
  if not title.strip():
    raise damaged(path, number, f'item {item_id} has no title')
  titles[item_id] = title.strip()
