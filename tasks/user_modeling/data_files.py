"""Access to the files of user modeling, which are never repaired.

A model trained on half a file looks like any other, so a damaged file is an
error that names it.
"""

from collections.abc import Hashable, Sequence
import os
import pathlib

from tasks.errors import DataError
from tasks.files import csv_tables

REMEDY = 'Correct the line, or fetch the file again.'
_REMEDY = (
  'name another folder with --data_dir or $TFF_PARTIAL_DATA_DIR, or use '
  'invented data with --data=synthetic, which needs no files.'
)


def find(
  folder: str | os.PathLike[str], places: Sequence[str], name: str
) -> pathlib.Path:
  """Find a file or folder below the data folder.

  Args:
    folder: The data folder.
    places: Sub-folders to search, in this order; '' is the data folder itself.
    name: Name of the file or folder.

  Raises:
    DataError: If it does not exist.
  """
  if not os.fspath(folder):
    raise DataError(f'No data folder was named: {_REMEDY}')
  root = pathlib.Path(os.path.expanduser(folder))
  try:
    if not root.is_dir():
      kind = 'is not a folder' if root.exists() else 'does not exist'
      raise DataError(f'{root}: the data folder {kind}. Make it, {_REMEDY}')
    for place in places:
      path = root / place / name
      if path.exists():
        return path
  except OSError as error:
    raise DataError(
      f'{root}: the data folder cannot be looked into '
      f'({error.strerror or error}). Change its permissions, {_REMEDY}'
    ) from error
  looked = ' and '.join(str(root / place) for place in places)
  raise DataError(
    f'{name!r} is missing: looked into {looked}. Put it there, {_REMEDY}'
  )


def read(path: pathlib.Path) -> bytes:
  """Read a whole file, with Unix line ends.

  Raises:
    DataError: If it is missing or cannot be read.
  """
  try:
    return path.read_bytes().replace(b'\r\n', b'\n')
  except OSError as error:
    raise DataError(
      f'{path}: cannot be read ({error.strerror or error}). Put the file there '
      f'or change its permissions, {_REMEDY}'
    ) from error


def damaged(path: pathlib.Path, line: Hashable, problem: str) -> DataError:
  """Make the error for a damaged line."""
  return csv_tables.damaged(path, line, problem, REMEDY)
