"""Client states in arrays that grow with the clients that take part."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tff_partial.runtimes.values import sources


class StateTable:
  """Leaves in arrays that grow: a `sources.Source`."""

  is_in_memory = True

  def __init__(self, specs: Sequence[tf.TensorSpec]):
    self._specs = specs
    self._leaves = [sources.empty(spec, 0) for spec in specs]
    self._size = 0

  def __len__(self) -> int:
    return self._size

  @property
  def num_bytes(self) -> int:
    """Memory of the leaves in bytes."""
    return sum(
      leaf.nbytes
      if leaf.dtype != object
      else sum(own.nbytes for own in leaf if own is not None)
      for leaf in self._leaves
    )

  def new_row(self) -> int:
    """Add a row, and return its number."""
    self._size += 1
    return self._size - 1

  def write(self, rows: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
    """Store the leaves of some rows."""
    size = len(self._leaves[0])
    if self._size > size:
      # Twice the size, so that adding rows is cheap.
      more = max(self._size - size, size)
      self._leaves = [
        np.concatenate([leaf, sources.empty(spec, more)])
        for leaf, spec in zip(self._leaves, self._specs, strict=True)
      ]
    for own, leaf in zip(self._leaves, leaves, strict=True):
      own[rows] = leaf

  def fill(
    self, leaves: Sequence[np.ndarray], places: np.ndarray, rows: np.ndarray
  ) -> None:
    """See `sources.Source`."""
    sources.Held(self._leaves).fill(leaves, places, rows)

  def take(self, rows: np.ndarray) -> tuple[sources.Source, np.ndarray]:
    """Return a copy of some rows."""
    return sources.Held(self._leaves).take(rows)

  def erase(self, row: int) -> None:
    """See `sources.Source`."""
    sources.Held(self._leaves).erase(row)
