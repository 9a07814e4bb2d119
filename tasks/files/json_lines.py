"""Reads files of JSON lines, compressed or not, one record at a time.

A record is one line: a JSON object of which some fields are wanted. A line that
is not as it should be is never skipped or repaired: the reader stops and names
file and line.
"""

import bz2
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import gzip
import importlib
import io
import json
import lzma
import os
import pathlib
import re
from typing import Any, BinaryIO
import zlib

from absl import logging

from tasks.errors import DataError
from tasks.files import tables


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a record.

  Attributes:
    names: The names that it may have in the files; the first one found counts.
    parse: From a JSON value to the field's value; raises ValueError, with a
      text that says what was expected, if it cannot be.
    first: Where records may lack the field, its value before the first record
      that has it; later ones keep that of the record before, with a warning at
      each reading of a file.
  """

  names: tuple[str, ...]
  parse: Callable[[Any], Any]
  first: Any = None


def text(value: Any) -> str:
  if not isinstance(value, str):
    raise ValueError('a text')
  return value


def identifier(value: Any) -> str:
  """Parse a text that identifies a user or an item.

  JSON may hold halves of pairs of code units, which no file could keep.
  """
  if isinstance(value, str):
    try:
      value.encode()
    except UnicodeEncodeError:
      raise ValueError('a text of whole characters') from None
  return text(value)


def seconds(value: Any) -> int:
  """Parse a time in seconds since 1970: a number, or one written as text."""
  if isinstance(value, str) and re.fullmatch(tables.NUMBER, value.strip()):
    value = float(value)
  if type(value) not in (int, float) or not 0 <= value < 2**62:
    raise ValueError('a time in seconds since 1970')
  return int(value)


def binary(value: Any) -> int:
  """Parse a label of 0 or 1; false and true are the same."""
  if not isinstance(value, (bool, int)) or value not in (0, 1):
    raise ValueError('0 or 1')
  return int(value)


def find(
  folder: str | os.PathLike[str],
  name: str,
  patterns: Sequence[str],
  remedy: str,
) -> list[pathlib.Path]:
  """Find the files of a task in a folder, or in its sub-folder of that name.

  Args:
    folder: Where to look.
    name: The sub-folder, which is looked into first.
    patterns: What the files are called, such as `RC_*`, beside `*.jsonl`; an
      ending `.gz`, `.bz2`, `.xz` or `.zst` may follow.
    remedy: What an error advises.

  Returns:
    The files by name; of one that is there in several forms the unpacked one.

  Raises:
    DataError: If there is no folder or no file.
  """
  root = pathlib.Path(os.path.expanduser(folder))
  wanted = ['*.jsonl', '*.ndjson', *patterns]
  for place in (root / name, root):
    found = {
      path
      for pattern in wanted
      for ending in ('', *_OPENERS)
      for path in place.glob(pattern + ending)
      if path.is_file()
    }
    if found:
      # `unzstd` leaves the packed file, whose records are not to count twice.
      named = {
        path.with_suffix('') if path.suffix in _OPENERS else path: path
        for path in sorted(found, reverse=True)
      }
      return sorted(named.values())
  kind = 'the folder' if os.path.isdir(root) else 'what is no folder'
  raise DataError(
    f'{root}: there is no file {" or ".join(wanted)}, compressed or not, in '
    f'{kind} or in its sub-folder {name!r}. {remedy}'
  )


def read(
  path: pathlib.Path, fields: Sequence[Field]
) -> Iterator[tuple[Any, ...]]:
  """Read the records of one file in their order; blank lines are no records.

  Args:
    path: The file; its name's ending says how it is compressed.
    fields: What to read of a record.

  Yields:
    The values of the fields of one record.

  Raises:
    DataError: If the file cannot be read, is cut off or has no record, or a
      line is not as it should be.
  """
  number = 0
  is_empty, lacks = True, False
  values = [field.first for field in fields]
  try:
    with _OPENERS.get(path.suffix, open)(path, 'rb') as file:
      for number, line in enumerate(file, 1):
        if line.isspace():
          continue
        is_empty = False
        record = json.loads(line)
        if not isinstance(record, dict):
          raise ValueError(f'expected a JSON object, found {_shown(record)}')
        for place, field in enumerate(fields):
          name = next((name for name in field.names if name in record), None)
          found = None if name is None else record[name]
          if field.first is None or found not in (None, ''):
            values[place] = _value(record, name, field)
          elif not lacks:
            lacks = True
            logging.warning(
              '%s, line %d: the field %r is missing or unknown. Such records '
              'keep the place that they have in the file.',
              path,
              number,
              field.names[0],
            )
        yield tuple(values)
  except ImportError as error:
    raise DataError(
      f'{path}: files of Zstandard are read with the package zstandard, which '
      'is not installed. Install it, or unpack the file: unzstd --long=31 '
      f'{path.name}'
    ) from error
  except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
    raise DataError(
      f'{path}, after line {number}: the file cannot be read ({error}). If it '
      'is cut off, fetch it again.'
    ) from error
  except (ValueError, RecursionError) as error:
    raise DataError(
      f'{path}, line {number}: {error!s:.250}. Correct the line or remove it.'
    ) from error
  if is_empty:
    raise DataError(f'{path}: the file has no records. Remove it.')


def _value(record: dict[str, Any], name: str | None, field: Field) -> Any:
  if name is None:
    raise ValueError(
      f'the field {" or ".join(map(repr, field.names))} is missing; there are '
      f'{_shown(sorted(record))}'
    )
  try:
    return field.parse(record[name])
  except ValueError as error:
    raise ValueError(
      f'{name!r} should be {error}, found {_shown(record[name])}'
    ) from None


def _shown(value: Any) -> str:
  return f'{json.dumps(value):.60}'


def _open_zst(path: pathlib.Path, mode: str) -> BinaryIO:
  zstandard: Any = importlib.import_module('zstandard')
  # Dumps of Reddit are made with windows of this size.
  codec = zstandard.ZstdDecompressor(max_window_size=2**31)
  # What it opens has no lines by itself.
  return io.BufferedReader(zstandard.open(path, mode, dctx=codec))


_OPENERS: dict[str, Callable[..., Any]] = {
  '.gz': gzip.open,
  '.bz2': bz2.open,
  '.xz': lzma.open,
  '.zst': _open_zst,
}
