"""Arrays that grow in temporary files to save memory."""

import mmap
import tempfile

import numpy as np

from tasks.errors import DataError


class GrowingArray:
  """One-dimensional array in a file, to which items can be appended.

  The file has no name, so that it disappears when the program ends, for
  whatever reason.

  Attributes:
    dtype: The dtype of its items.
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
      values: `[items]`, of any numeric type that fits.

    Raises:
      DataError: If the disk is full.
    """
    try:
      self._file.write(values.astype(self.dtype, copy=False).tobytes())
    except OSError as error:
      raise _disk_error(error) from error

  def finish(self) -> np.ndarray:
    """Return all items, `[items]`, read-only; nothing more can be appended.

    The array is memory-mapped: the system reads pages on access and drops them
    when it needs memory.

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
