"""Arrays of clients' examples that a runtime can use where they lie.

TensorFlow copies an array that it is given, unless it may share its memory:
then the array must begin where vector instructions can load from. The cohort
runtime also rounds the number of rows up. So these arrays are made with both in
mind, and a population is in memory once.
"""

import math
from typing import Any

import numpy as np

# Above, the number of rows is rounded up by an eighth at most.
_FEW_ROWS = 1 << 10
# Bytes; what Eigen and XLA want of a buffer.
_ALIGNMENT = 64


def rounded(rows: int) -> int:
  """A slightly larger number of rows, out of few.

  A source that loads other clients for each cohort has another number of rows
  each time, and each would be one more program to compile.
  """
  if rows <= _FEW_ROWS:
    return 1 << max(rows - 1, 0).bit_length()
  step = 1 << (rows.bit_length() - 4)
  return -(-rows // step) * step


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
  """Zeros, with memory behind them for a rounded number of rows.

  Args:
    shape: Rows first. Those that are added take no memory before somebody
      writes to them.
    dtype: Of numbers or bools; texts are objects, which cannot be shared.
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
  """An array with its number of rows rounded up, in the same memory.

  Args:
    array: Any array. What the rows that are added hold is undefined.

  Returns:
    The larger array, or None for one that `zeros` did not make.
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
