"""Reads idx files, the format of MNIST and QMNIST, strictly.

An idx file is a magic number (two zeros, the type of its items, how many axes),
the length of each axis, and the items; big-endian, packed by gzip or not. A
file that is not as it should be is never cut or padded: a model trained on half
a file looks just like any other.
"""

from collections.abc import Sequence
import gzip
import math
import pathlib
import zlib

import numpy as np

from tasks.errors import DataError

# The third byte of a file to the type of its items.
_TYPES: dict[int, np.dtype] = {
  0x08: np.dtype('u1'),
  0x09: np.dtype('i1'),
  0x0B: np.dtype('>i2'),
  0x0C: np.dtype('>i4'),
  0x0D: np.dtype('>f4'),
  0x0E: np.dtype('>f8'),
}
_PACKED = '.gz'
_PIECE = 1 << 16  # Bytes that are unpacked at a time.


def read(
  folder: pathlib.Path,
  name: str,
  shape: Sequence[int | None],
  dtype: type[np.generic],
  remedy: str,
) -> np.ndarray:
  """Read `folder/name`, or `folder/name.gz` if there is no such file.

  Args:
    folder: Holds the file.
    name: Its name, without `.gz`.
    shape: What its shape must be; None stands for any length.
    dtype: Type of the items: those of the file must be of the same kind and
      size. They are returned in the machine's byte order.
    remedy: Sentences that say where to find a whole file.

  Returns:
    The items, `shape`.

  Raises:
    DataError: If the file is missing, cannot be read, is damaged, or holds
      something else; names it, and the byte (of the unpacked file).
  """
  path = folder / name
  if not path.exists():
    path = folder / f'{name}{_PACKED}'
  if not path.exists():
    raise DataError(
      f'{folder / name}: there is no such file, packed ({_PACKED}) or not. '
      f'{remedy}'
    )
  data = _contents(path, remedy)
  lengths, items = _header(data, path, remedy)
  if items.newbyteorder('=') != np.dtype(dtype):
    raise DataError(
      f'{path}, byte 2: expected items of type {np.dtype(dtype)}, found '
      f'{items.newbyteorder("=")}. {remedy}'
    )
  if len(lengths) != len(shape) or any(
    wanted not in (None, found)
    for wanted, found in zip(shape, lengths, strict=True)
  ):
    raise DataError(
      f'{path}, byte 4: expected the shape {_say(shape)}, found '
      f'{_say(lengths)}. '
      f'{remedy}'
    )
  begin = 4 * (1 + len(lengths))
  expected = begin + math.prod(lengths) * items.itemsize
  if len(data) != expected:
    raise DataError(
      f'{path}, byte {min(expected, len(data))}: expected {expected:,} bytes '
      f'for {_say(lengths)} items, found {len(data):,}, so it is cut off or '
      f'something was added. {remedy}'
    )
  return np.frombuffer(data, items, offset=begin).reshape(lengths).astype(dtype)


def _contents(path: pathlib.Path, remedy: str) -> bytes:
  """Return the whole file, unpacked."""
  data = bytearray()
  try:
    if path.suffix != _PACKED:
      return path.read_bytes()
    with gzip.open(path) as file:
      while piece := file.read(_PIECE):
        data += piece
    return bytes(data)
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise DataError(
      f'{path}: damaged, for it cannot be unpacked after {len(data):,} bytes '
      f'({error}). {remedy}'
    ) from error
  except OSError as error:
    raise DataError(
      f'{path}: cannot be read ({error.strerror}). Change its permissions, or '
      'name another folder with --data_dir.'
    ) from error


def _header(
  data: bytes, path: pathlib.Path, remedy: str
) -> tuple[tuple[int, ...], np.dtype]:
  """Return the lengths of the axes and the type of the items."""
  number_of_axes = data[3] if len(data) > 3 else 0
  end = 4 * (1 + number_of_axes)
  if data[:2] != b'\0\0' or data[2:3] == b'' or data[2] not in _TYPES:
    raise DataError(
      f'{path}, byte 0: no idx file, which would begin with two zeros and a '
      'type; '
      f'found {data[:4].hex(" ") or "nothing"}. {remedy}'
    )
  if number_of_axes == 0 or len(data) < end:
    raise DataError(
      f'{path}, byte {len(data)}: cut off within its header, after '
      f'{len(data)} bytes. {remedy}'
    )
  lengths = np.frombuffer(data, '>u4', number_of_axes, offset=4)
  return tuple(lengths.tolist()), _TYPES[data[2]]


def _say(shape: Sequence[int | None]) -> str:
  return ' x '.join('any' if n is None else f'{n:,}' for n in shape)
