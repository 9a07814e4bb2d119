"""Reads files of JSON lines, compressed or not, one record at a time.

A record is one line: a JSON object of which some fields are wanted. A line that
is not as it should be is never skipped or repaired: the reader stops and names
file and line.
"""

import bz2
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import fnmatch
import functools
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
from tasks.files import bounded_lines
from tasks.files import numbers

_PLAIN = ('.jsonl', '.ndjson')
# Dumps of Reddit are made with windows of this size.
_ZST_WINDOW = 2**31
_SHOWN = 60  # Characters of a bad value in a message.
# Much longer than a record of any corpus; a line of gigabytes, which compresses
# to a thousandth, would be in memory as a whole.
_LONGEST_LINE = 1 << 23  # Bytes.
_LONGEST_TEXT = 1_000_000  # Characters.
# More digits than Python reads, whose message says nothing of the file.
_LONG_NUMBER = re.compile(rb'[0-9]{4301,}')


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a record.

  Attributes:
    names: The names that it may have in the files; the first one found counts.
    parse: From a JSON value to the field's value; raises ValueError, with a
      text that says what was expected, if it cannot be.
    first: Where records may lack the field, its value before the first record
      that has it; later ones keep that of the record before, with a warning
      once a file.
  """

  names: tuple[str, ...]
  parse: Callable[[Any], Any]
  first: Any = None


def text(value: Any) -> str:
  """Parse a text."""
  if not isinstance(value, str):
    raise ValueError('a text')
  if len(value) > _LONGEST_TEXT:
    raise ValueError(f'a text of at most {_LONGEST_TEXT:,} characters')
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
  if isinstance(value, bool) or not isinstance(value, (int, float, str)):
    raise ValueError('a time in seconds since 1970')
  try:
    value = numbers.number(value.strip()) if isinstance(value, str) else value
    number = int(value)
  except (ValueError, OverflowError):
    number = -1
  if not 0 <= number < 2**62:
    raise ValueError('a time in seconds since 1970')
  return number


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
    The files by name.

  Raises:
    DataError: If there is no folder or no file.
  """
  root = pathlib.Path(os.path.expanduser(folder))
  wanted = [*(f'*{ending}' for ending in _PLAIN), *patterns]
  try:
    if not root.is_dir():
      kind = 'is not a folder' if root.exists() else 'does not exist'
      raise DataError(f'{root}: the data folder {kind}. {remedy}')
    for place in (root / name, root):
      if not place.is_dir():
        continue
      found = sorted(
        path
        for path in place.iterdir()
        if path.is_file() and _is_named(path.name, wanted)
      )
      if found:
        return found
  except OSError as error:
    raise DataError(
      f'{root}: the data folder cannot be looked into '
      f'({error.strerror or error}). {remedy}'
    ) from error
  raise DataError(
    f'{root}: there is no file {" or ".join(wanted)}, compressed or not, in '
    f'the folder or in its sub-folder {name!r}. {remedy}'
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
  is_empty = True
  before = [field.first for field in fields]
  for number, line in _lines(path):
    is_empty = False
    try:
      values = list(_parsed(line, fields))
      for place, value in enumerate(values):
        if value is None:
          _tell_of_lacking(path, fields[place].names[0], number)
          values[place] = before[place]
      before = values
      yield tuple(values)
    except _Unexpected as error:
      raise DataError(
        f'{path}, line {number}: {error}. Correct the line or remove it.'
      ) from error
  if is_empty:
    raise DataError(f'{path}: the file has no records. Remove it.')


@functools.cache
def _told(path: pathlib.Path, name: str) -> set[int]:
  """Return what was said of a file."""
  return set()


def _tell_of_lacking(path: pathlib.Path, name: str, line: int) -> None:
  """Says once a file that records lack a field."""
  told = _told(path, name)
  if not told:
    told.add(line)
    logging.warning(
      '%s, line %d: the field %r is missing or unknown. Such records keep the '
      'place that they have in the file.',
      path,
      line,
      name,
    )


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
  """Yield the lines that are not blank, with their numbers."""
  read = 0
  try:
    with _open(path) as file:
      lines = bounded_lines.read(
        path,
        file,
        _LONGEST_LINE,
        'bytes',
        ', as no record should be. Divide or remove it.',
      )
      for read, line in lines:
        if not line.isspace():
          yield read, line
  except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise DataError(
      f'{path}, after line {read}: the file cannot be read ({reason}). If it '
      'is cut off, fetch it again.'
    ) from error


class _Unexpected(ValueError):
  """A line is not as it should be."""


def _parsed(line: bytes, fields: Sequence[Field]) -> Iterator[Any]:
  try:
    record = json.loads(line)
  except UnicodeDecodeError:
    raise _Unexpected('the line is not text in UTF-8') from None
  except (json.JSONDecodeError, RecursionError) as error:
    raise _Unexpected(f'the line is not JSON ({error})') from None
  except ValueError:
    number = _LONG_NUMBER.search(line)
    if number is None:
      raise
    raise _Unexpected(
      f'at column {number.start() + 1} begins a number of '
      f'{len(number.group()):,} digits'
    ) from None
  if not isinstance(record, dict):
    raise _Unexpected(f'expected a JSON object, found {_shown(record)}')
  for field in fields:
    name = next((name for name in field.names if name in record), None)
    is_known = name is not None and record[name] not in (None, '')
    if field.first is not None and not is_known:
      yield None
      continue
    if name is None:
      raise _Unexpected(
        f'the field {" or ".join(map(repr, field.names))} is missing; there '
        f'are {_shown(sorted(record))}'
      )
    try:
      yield field.parse(record[name])
    except ValueError as error:
      raise _Unexpected(
        f'{name!r} should be {error}, found {_shown(record[name])}'
      ) from None


def _shown(value: Any) -> str:
  shown = json.dumps(value)
  return shown if len(shown) <= _SHOWN else f'{shown[:_SHOWN]}...'


def _is_named(name: str, patterns: Sequence[str]) -> bool:
  """Whether a name, without the ending of a compression, fits a pattern."""
  stem = name
  for ending in _OPENERS:
    stem = stem.removesuffix(ending)
  return any(fnmatch.fnmatchcase(stem, pattern) for pattern in patterns)


def _open(path: pathlib.Path) -> BinaryIO:
  opener = _OPENERS.get(path.suffix, lambda path: open(path, 'rb'))
  return opener(path)


def _open_zst(path: pathlib.Path) -> BinaryIO:
  try:
    zstandard: Any = importlib.import_module('zstandard')
  except ImportError:
    raise DataError(
      f'{path}: files of Zstandard are read with the package zstandard, which '
      'is not installed. Install it, or unpack the file: unzstd --long=31 '
      f'{path.name}'
    ) from None
  # What it opens has no lines by itself.
  return io.BufferedReader(
    zstandard.open(
      path, 'rb', dctx=zstandard.ZstdDecompressor(max_window_size=_ZST_WINDOW)
    )
  )


_OPENERS: dict[str, Callable[[pathlib.Path], Any]] = {
  '.gz': gzip.open,
  '.bz2': bz2.open,
  '.xz': lzma.open,
  '.zst': _open_zst,
}
