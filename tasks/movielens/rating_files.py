"""Files of ratings, read line by line."""

from collections.abc import Hashable, Iterator
import csv
import dataclasses
import io
import math
import pathlib
import re

import pandas as pd

from tasks.errors import DataError

REMEDY_DAMAGED = (
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


def damaged(path: pathlib.Path, number: int, problem: str) -> DataError:
  return DataError(f'{path}, line {number}: {problem}. {REMEDY_DAMAGED}')


def read(path: pathlib.Path) -> bytes:
  """Read a file whole, with line ends as on Unix."""
  try:
    data = path.read_bytes()
  except FileNotFoundError as error:
    raise DataError(
      f'{path}: the file is missing, though other files of the data set are '
      f'there. {REMEDY_DAMAGED}'
    ) from error
  except OSError as error:
    raise DataError(
      f'{path}: cannot be read ({error.strerror or error}). Change its '
      'permissions, or name another folder with --data_dir.'
    ) from error
  return data.replace(b'\r\n', b'\n') if b'\r' in data else data


def without_header(
  data: bytes, layout: Layout, path: pathlib.Path
) -> tuple[bytes, int]:
  """Return a ratings file's lines and the number of the first of them."""
  # Lines without anything at the very end are no damage.
  if data.endswith(b'\n\n'):
    data = data.rstrip(b'\n') + b'\n'
  if not layout.header:
    return data, 1
  header, _, body = data.partition(b'\n')
  found = header.removeprefix(b'\xef\xbb\xbf').decode('ascii', 'replace')
  if data and found != layout.header:
    raise damaged(
      path, 1, f'the header is {found[:80]!r} instead of {layout.header!r}'
    )
  return body, 2


def parse_quickly(body: bytes, layout: Layout) -> pd.DataFrame | None:
  """Parse lines if all of them are beyond doubt, else returns None."""
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


def parse_slowly(
  body: bytes, layout: Layout, path: pathlib.Path, first_line: int
) -> pd.DataFrame:
  """Parse line by line and names the first line that is damaged."""
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
  """Parse one line of a ratings file, or says what is wrong with it."""
  try:
    line = raw.decode('ascii')
  except UnicodeDecodeError as error:
    byte = raw[error.start]
    raise damaged(
      path,
      number,
      f'the byte 0x{byte:02x} is not text; only digits belong here',
    ) from error
  fields = split_fields(line, layout.separator, 4, path, number)
  return (
    integer(fields[0], 'user id', path, number),
    integer(fields[1], 'item id', path, number),
    _on_scale(fields[2], layout, path, number),
    integer(fields[3], 'timestamp', path, number),
  )


def split_fields(
  line: str, separator: str, width: int, path: pathlib.Path, number: int
) -> list[str]:
  if not line:
    raise damaged(path, number, 'the line is empty')
  fields = line.split(separator)
  if len(fields) != width:
    raise damaged(
      path,
      number,
      f'{len(fields)} fields parted by {separator!r} instead of {width}: '
      f'{line[:80]!r}',
    )
  return fields


def integer(text: str, what: str, path: pathlib.Path, number: int) -> int:
  text = text.strip()
  if not _WHOLE_NUMBER.fullmatch(text):
    raise damaged(
      path, number, f'the {what} {text[:40]!r} is not an integer from 0 up'
    )
  digits = text.partition('.')[0].lstrip('0') or '0'
  # Python refuses to read numbers of thousands of digits.
  if len(digits) > 20 or int(digits) > _LARGEST_INTEGER:
    raise damaged(
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
    raise damaged(
      path, number, f'the rating {text.strip()[:40]!r} is not a number'
    )
  if not lowest <= rating <= highest or (rating - lowest) % step:
    raise damaged(
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


def repeated(
  table: pd.DataFrame, row: int, path: pathlib.Path, first_line: int
) -> DataError:
  """Names both lines of the first pair of user and item that comes twice."""
  user, item = table['user_id'].iloc[row], table['item_id'].iloc[row]
  same = (table['user_id'] == user) & (table['item_id'] == item)
  first = int(same.to_numpy().argmax())
  return damaged(
    path,
    row + first_line,
    f'user {user} rates item {item} a second time; the first is on line '
    f'{first + first_line}',
  )


def lines(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """Yield the numbered lines of a text file, which must end in a line end."""
  lines = _decode(read(path), path).split('\n')
  if lines.pop():
    raise _stops_midway(path, len(lines) + 1)
  while lines and not lines[-1]:
    lines.pop()
  if not lines:
    raise DataError(f'{path}: the file is empty. {REMEDY_DAMAGED}')
  yield from enumerate(lines, start=1)


def _decode(data: bytes, path: pathlib.Path) -> str:
  """Decode UTF-8, or else Latin-1, in which the older files are written."""
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError as error:
    if path.suffix == '.csv':
      number = data.count(b'\n', 0, error.start) + 1
      byte = data[error.start]
      raise damaged(
        path, number, f'the byte 0x{byte:02x} is not text in UTF-8'
      ) from error
    text = data.decode('latin-1')
  control = _CONTROL.search(text)
  if control:
    number = text.count('\n', 0, control.start()) + 1
    raise damaged(
      path, number, f'the character {control.group()!r} does not belong in text'
    )
  return text
