"""Reads idx files, the format of MNIST and QMNIST, strictly.

An idx file is a magic number (two zeros, the type of its items, how many axes),
the length of each axis, and the items; big-endian, packed by gzip or not. A
file that is not as it should be is never cut or padded: a model trained on half
a file looks just like any other.
"""

from collections.abc import Sequence
import gzip
import pathlib
import zlib

import numpy as np

from tasks.errors import DataError

# Types of items to the third byte of a file.
_CODES = {np.dtype(np.uint8): 0x08, np.dtype(np.int32): 0x0C}


def read(
  folder: pathlib.Path,
  name: str,
  shape: Sequence[int | None],
  dtype: type[np.generic],
  remedy: str,
) -> np.ndarray:
  """Read `folder/name`, or `folder/name.gz` if there is no such file.

  In the shape, None stands for any length. The remedy says where to find a
  whole file.
  """
  path, packed = folder / name, folder / f'{name}.gz'
  is_packed = packed.exists() and not path.exists()
  path = packed if is_packed else path
  try:
    data = path.read_bytes()
    data = gzip.decompress(data) if is_packed else data
    if data[:4] != bytes([0, 0, _CODES[np.dtype(dtype)], len(shape)]):
      raise ValueError(f'it begins with {data[:4].hex(" ") or "nothing"}')
    lengths = np.frombuffer(data, '>u4', len(shape), offset=4).tolist()
    if any(
      n not in (None, found) for n, found in zip(shape, lengths, strict=True)
    ):
      raise ValueError(f'its shape is {lengths}')
    items = np.dtype(dtype).newbyteorder('>')
    found = np.frombuffer(data, items, offset=4 * (1 + len(shape)))
    return found.reshape(lengths).astype(dtype)
  except (OSError, EOFError, zlib.error, ValueError) as error:
    wanted = ' x '.join('any' if n is None else str(n) for n in shape)
    raise DataError(
      f'{path}: no whole idx file of {wanted} items of {np.dtype(dtype)} '
      f'({getattr(error, "strerror", None) or error}). {remedy}'
    ) from error
