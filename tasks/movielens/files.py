"""Reads the files of the MovieLens data sets, strictly.

Three layouts exist: that of MovieLens 1M (`ratings.dat`, fields parted by
`::`), that of MovieLens 100K (`u.data`, parted by tabs), and the tables of the
newer data sets (`ratings.csv`). They are told apart by the name of the ratings
file. A line that is not as it should be is never skipped or repaired: the
reader stops and names file and line, because a model trained on half a file
looks just like any other.
"""

from collections.abc import Hashable, Iterator
import csv
import dataclasses
import io
import math
import os
import pathlib
import re

import pandas as pd

from tasks.errors import DataError

REMEDY_NO_DATA = (
  'Name the folder that holds the data with --data_dir or '
  '$TFF_PARTIAL_DATA_DIR, fetch them into it from the official address with '
  '--download, or use invented data with --data=synthetic, which needs no '
  'files.'
)
_REMEDY_DAMAGED = (
  'Correct the line, or move the folder away and fetch the data again with '
  '--download.'
)

_COLUMNS: dict[Hashable, str] = {
  'user_id': 'int64',
  'item_id': 'int64',
  'rating': 'float64',
  'timestamp': 'int64',
}
_WHOLE_NUMBER = re.compile(r'[0-9]+(?:\.0*)?')
_LARGEST_INTEGER = 2**63 - 1
# Neither Latin-1 nor UTF-8 text has these; a binary or UTF-16 file does.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f]')


@dataclasses.dataclass(frozen=True)
class Layout:
  """How one family of MovieLens data sets is written.

  Attributes:
    name: The data set, where only one is written this way, else ''.
    ratings: Name of the file of ratings.
    items: Name of the file of items.
    users: Name of the file of users' attributes; '' if there is none.
    separator: Stands between the fields of the ratings file.
    header: The ratings file's first line; '' if it has none.
    scale: Lowest and highest rating, and the distance between neighbours.
  """

  name: str
  ratings: str
  items: str
  users: str
  separator: str
  header: str
  scale: tuple[float, float, float]


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
  """Finds a MovieLens data set in a folder or below it.

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
  """Yields the folders that may hold a data set, the likeliest first."""
  for parent in (root, root / 'movielens'):
    # Several data sets have files of the same names: if one of them is asked
    # for, the folder has to be called like it.
    if not only or DATA_SETS[only].name or parent.resolve().name == only:
      yield parent
    yield from (parent / name for name in names)


def read_ratings(folder: pathlib.Path, layout: Layout) -> pd.DataFrame:
  """Reads the file of ratings, in the order in which it is written.

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
  body, first_line = _without_header(_read(path), layout, path)
  table = _parse_quickly(body, layout)
  if table is None:
    table = _parse_slowly(body, layout, path, first_line)
  if table.empty:
    raise DataError(f'{path}: the file holds no ratings. {_REMEDY_DAMAGED}')
  again = table.duplicated(['user_id', 'item_id']).to_numpy()
  if again.any():
    raise _repeated(table, int(again.argmax()), path, first_line)
  return table


def read_titles(folder: pathlib.Path, layout: Layout) -> dict[int, str]:
  """Reads the titles of all items, by the ids of the file.

  Raises:
    DataError: If the file cannot be read or a line of it is damaged.
  """
  path = folder / layout.items
  if layout is _TABLES:
    return _read_title_table(path)
  separator, width = ('::', 3) if layout is _ML_1M else ('|', 24)
  titles: dict[int, str] = {}
  for number, line in _lines(path):
    fields = _fields(line, separator, width, path, number)
    _add_title(titles, fields[0], fields[1], path, number)
  return titles


def read_users(folder: pathlib.Path, layout: Layout) -> pd.DataFrame | None:
  """Reads what is known about the users, if the data set tells anything.

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
  for number, line in _lines(path):
    user, *rest = _fields(line, separator, 5, path, number)
    # MovieLens 100K writes the age before the gender.
    gender, age = rest[:2] if layout is _ML_1M else (rest[1], rest[0])
    user_id = _integer(user, 'user id', path, number)
    if user_id in rows:
      raise _damaged(path, number, f'user {user_id} is there a second time')
    years = _integer(age, 'age', path, number)
    rows[user_id] = (user_id, gender, years, rest[2], rest[3])
  users = pd.DataFrame(
    [rows[user_id] for user_id in sorted(rows)],
    columns=['user_id', 'gender', 'age', 'occupation', 'zip'],
  )
  return users.astype({'user_id': 'int64', 'age': 'int64'})


def _damaged(path: pathlib.Path, number: int, problem: str) -> DataError:
  return DataError(f'{path}, line {number}: {problem}. {_REMEDY_DAMAGED}')


def _read(path: pathlib.Path) -> bytes:
  """Reads a file whole, with line ends as on Unix."""
  try:
    data = path.read_bytes()
  except FileNotFoundError as error:
    raise DataError(
      f'{path}: the file is missing, though other files of the data set are '
      f'there. {_REMEDY_DAMAGED}'
    ) from error
  except OSError as error:
    raise DataError(
      f'{path}: cannot be read ({error.strerror or error}). Change its '
      'permissions, or name another folder with --data_dir.'
    ) from error
  return data.replace(b'\r\n', b'\n') if b'\r' in data else data


def _without_header(
  data: bytes, layout: Layout, path: pathlib.Path
) -> tuple[bytes, int]:
  """Returns a ratings file's lines and the number of the first of them."""
  # Lines without anything at the very end are no damage.
  if data.endswith(b'\n\n'):
    data = data.rstrip(b'\n') + b'\n'
  if not layout.header:
    return data, 1
  header, _, body = data.partition(b'\n')
  found = header.removeprefix(b'\xef\xbb\xbf').decode('ascii', 'replace')
  if data and found != layout.header:
    raise _damaged(
      path, 1, f'the header is {found[:80]!r} instead of {layout.header!r}'
    )
  return body, 2


def _parse_quickly(body: bytes, layout: Layout) -> pd.DataFrame | None:
  """Parses lines if all of them are beyond doubt, else returns None."""
  separator = layout.separator.encode()
  if body.translate(None, b'0123456789.\n' + separator):
    return None
  num_lines = body.count(b'\n')
  if not body.endswith(b'\n') or body.count(separator) != 3 * num_lines:
    return None
  # The fast parser takes one character for a separator.
  if len(separator) > 1:
    body, separator = body.replace(separator, b'\t'), b'\t'
  try:
    table = pd.read_csv(
      io.BytesIO(body),
      sep=separator.decode(),
      header=None,
      names=list(_COLUMNS),
      dtype=_COLUMNS,
      index_col=False,
      engine='c',
      quoting=csv.QUOTE_NONE,
      na_filter=False,
      skip_blank_lines=False,
      low_memory=False,
    )
  except (ValueError, OverflowError):
    return None
  lowest, highest, step = layout.scale
  steps = (table['rating'].to_numpy() - lowest) / step
  on_scale = (
    (steps >= 0) & (steps <= (highest - lowest) / step) & (steps % 1 == 0)
  )
  # An integer beyond the largest one comes back as another type.
  typed = [str(dtype) for dtype in table.dtypes] == list(_COLUMNS.values())
  whole = typed and on_scale.all() and len(table) == num_lines
  return table if whole else None


def _parse_slowly(
  body: bytes, layout: Layout, path: pathlib.Path, first_line: int
) -> pd.DataFrame:
  """Parses line by line and names the first line that is damaged."""
  rows = []
  lines = body.split(b'\n')
  for number, raw in enumerate(lines[:-1], start=first_line):
    rows.append(_rating(raw, layout, path, number))
  if lines[-1]:
    raise _stops_midway(path, first_line + len(lines) - 1)
  return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


def _rating(
  raw: bytes, layout: Layout, path: pathlib.Path, number: int
) -> tuple[int, int, float, int]:
  """Parses one line of a ratings file, or says what is wrong with it."""
  try:
    line = raw.decode('ascii')
  except UnicodeDecodeError as error:
    byte = raw[error.start]
    raise _damaged(
      path,
      number,
      f'the byte 0x{byte:02x} is not text; only digits belong here',
    ) from error
  fields = _fields(line, layout.separator, 4, path, number)
  return (
    _integer(fields[0], 'user id', path, number),
    _integer(fields[1], 'item id', path, number),
    _on_scale(fields[2], layout, path, number),
    _integer(fields[3], 'timestamp', path, number),
  )


def _fields(
  line: str, separator: str, width: int, path: pathlib.Path, number: int
) -> list[str]:
  if not line:
    raise _damaged(path, number, 'the line is empty')
  fields = line.split(separator)
  if len(fields) != width:
    raise _damaged(
      path,
      number,
      f'{len(fields)} fields parted by {separator!r} instead of {width}: '
      f'{line[:80]!r}',
    )
  return fields


def _integer(text: str, what: str, path: pathlib.Path, number: int) -> int:
  text = text.strip()
  if not _WHOLE_NUMBER.fullmatch(text):
    raise _damaged(
      path, number, f'the {what} {text[:40]!r} is not an integer from 0 up'
    )
  digits = text.partition('.')[0].lstrip('0') or '0'
  # Python refuses to read numbers of thousands of digits.
  if len(digits) > 20 or int(digits) > _LARGEST_INTEGER:
    raise _damaged(
      path,
      number,
      f'the {what} {text[:40]!r} is too large, with {len(digits):,} digits',
    )
  return int(digits)


def _on_scale(
  text: str, layout: Layout, path: pathlib.Path, number: int
) -> float:
  lowest, highest, step = layout.scale
  try:
    # Python reads 4_0 as 40.
    rating = math.nan if '_' in text else float(text)
  except ValueError:
    rating = math.nan
  if math.isnan(rating):
    raise _damaged(
      path, number, f'the rating {text.strip()[:40]!r} is not a number'
    )
  if not lowest <= rating <= highest or (rating - lowest) % step:
    raise _damaged(
      path,
      number,
      f'the rating {text.strip()[:40]!r} is off the scale, which goes from '
      f'{lowest:g} to {highest:g} in steps of {step:g}',
    )
  return rating


def _stops_midway(path: pathlib.Path, number: int) -> DataError:
  return DataError(
    f'{path}, line {number}: the file stops in the middle of this line, which '
    'has no line end, so it seems to be cut off. Fetch the data again with '
    '--download into another folder; if the line is whole, add a line end.'
  )


def _repeated(
  table: pd.DataFrame, row: int, path: pathlib.Path, first_line: int
) -> DataError:
  """Names both lines of the first pair of user and item that comes twice."""
  user, item = table['user_id'].iloc[row], table['item_id'].iloc[row]
  same = (table['user_id'] == user) & (table['item_id'] == item)
  first = int(same.to_numpy().argmax())
  return _damaged(
    path,
    row + first_line,
    f'user {user} rates item {item} a second time; the first is on line '
    f'{first + first_line}',
  )


def _lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Yields the numbered lines of a text file, which must end in a line end."""
  lines = _decode(_read(path), path).split('\n')
  if lines.pop():
    raise _stops_midway(path, len(lines) + 1)
  while lines and not lines[-1]:
    lines.pop()
  if not lines:
    raise DataError(f'{path}: the file is empty. {_REMEDY_DAMAGED}')
  yield from enumerate(lines, start=1)


def _decode(data: bytes, path: pathlib.Path) -> str:
  """Decodes UTF-8, or else Latin-1, in which the older files are written."""
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    if path.suffix == '.csv':
      number = data.count(b'\n', 0, error.start) + 1
      byte = data[error.start]
      raise _damaged(
        path, number, f'the byte 0x{byte:02x} is not text in UTF-8'
      ) from error
    text = data.decode('latin-1')
  control = _CONTROL.search(text)
  if control:
    number = text.count('\n', 0, control.start()) + 1
    raise _damaged(
      path, number, f'the character {control.group()!r} does not belong in text'
    )
  return text


def _read_title_table(path: pathlib.Path) -> dict[int, str]:
  """Reads `movies.csv`, where a title with a comma stands in quotes."""
  titles: dict[int, str] = {}
  numbered = _lines(path)
  _, header = next(numbered)
  if header != 'movieId,title,genres':
    raise _damaged(
      path,
      1,
      f"the header is {header[:80]!r} instead of 'movieId,title,genres'",
    )
  for number, line in numbered:
    try:
      (fields,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as error:
      raise _damaged(path, number, f'cannot be parsed ({error})') from error
    if len(fields) != 3:
      raise _damaged(
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
  item_id = _integer(item, 'item id', path, number)
  if item_id in titles:
    raise _damaged(path, number, f'item {item_id} is there a second time')
  if not title.strip():
    raise _damaged(path, number, f'item {item_id} has no title')
  titles[item_id] = title.strip()
