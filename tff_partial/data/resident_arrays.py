"""Arrays of clients' examples that a runtime can use without a copy.

TensorFlow copies an array unless it can share its memory, for which the array
must be aligned for vector instructions. The cohort runtime also rounds up the
number of rows. These arrays allow both, so that a population is in memory only
once.
"""

import math
from typing import Any

import numpy as np

# Above, the number of rows is rounded up by at most an eighth.
_FEW_ROWS = 1 << 10
# Bytes; the alignment that Eigen and XLA require of a buffer.
_ALIGNMENT = 64


def rounded(rows: int) -> int:
  """Round a number of rows up to one of few values.

  A source that loads different clients for each cohort has a different number
  of rows each time, and each would require compiling another program.
  """
  if rows <= _FEW_ROWS:
    return 1 << max(rows - 1, 0).bit_length()
  step = 1 << (rows.bit_length() - 4)
  return -(-rows // step) * step


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Return zeros, with memory behind them for a rounded number of rows.

  Added rows take no memory until they are written. Texts are objects, which
  cannot be shared.
  """
  dtype = np.dtype(dtype)
  if dtype.hasobject:
    return np.full(shape, b'', dtype)
  needed = math.prod((rounded(shape[0]), *shape[1:])) * dtype.itemsize
  memory = np.zeros([needed + _ALIGNMENT], np.uint8)
  begin = -memory.ctypes.data % _ALIGNMENT
  used = math.prod(shape) * dtype.itemsize
  return memory[begin : begin + used].view(dtype).reshape(shape)


def with_room(array: np.ndarray) -> np.ndarray | None:
  """Return an array with its number of rows rounded up, in the same memory.

  Values of added rows are undefined. None if `zeros` did not make the array.
  """
  memory = array.base
  if not (
    isinstance(memory, np.ndarray)
    and memory.dtype == np.uint8
    and memory.ndim == 1
    and memory.flags.owndata
    and array.flags.c_contiguous
    and array.ndim
    and array.size
    and array.ctypes.data % _ALIGNMENT == 0
  ):
    return None
  shape = (rounded(len(array)), *array.shape[1:])
  begin = array.ctypes.data - memory.ctypes.data
  end = begin + math.prod(shape) * array.itemsize
  if end > memory.nbytes:
    return None
  return memory[begin:end].view(array.dtype).reshape(shape)
