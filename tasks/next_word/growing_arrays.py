"""Arrays that grow in temporary files, so that memory need not hold them."""

import mmap
import tempfile

import numpy as np

from tasks.errors import DataError


class GrowingArray:
  """An array of one axis to which more is appended, kept in a file.

  The file has no name, so that nothing of it is left when the program ends,
  however it ends.

  Attributes:
    dtype: The type of its items.
  """

  def __init__(self, dtype: type[np.generic]):
    """Open the file.

    Raises:
      DataError: If no temporary file can be made.
    """
    self.dtype = np.dtype(dtype)
    try:
      self._file = tempfile.TemporaryFile(prefix='sentences-')
    except OSError as error:
      raise _disk_error(error) from error

  def extend(self, values: np.ndarray) -> None:
    """Append items.

    Args:
      values: `[items]`, of any type of numbers that fits.

    Raises:
      DataError: If the disk is full.
    """
    try:
      self._file.write(values.astype(self.dtype, copy=False).tobytes())
    except OSError as error:
      raise _disk_error(error) from error

  def finish(self) -> np.ndarray:
    """Return all items, `[items]`, to be read only; nothing more is appended.

    The system reads them from the file when they are looked at, and forgets
    them when it needs the memory.

    Raises:
      DataError: If the disk is full.
    """
    with self._file as file:
      try:
        file.flush()
        if not file.tell():
          return np.zeros(0, self.dtype)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
      except OSError as error:
        raise _disk_error(error) from error
    return np.frombuffer(mapped, self.dtype)


def _disk_error(error: OSError) -> DataError:
  return DataError(
    f'{tempfile.gettempdir()}: the tokens of a corpus cannot be kept there '
    f'({error.strerror or error}). It takes 8 bytes a token, twice while the '
    'corpus is sorted. Make room, or name another folder with $TMPDIR.'
  )
