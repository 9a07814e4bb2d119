"""What clients return, gathered leaf by leaf while a loop runs.

Leaves of one shape become a stacked array. Where the shape is unknown before a
client has run, clients may differ: their values are laid end to end, and their
shapes kept beside them.
"""

from collections.abc import Iterator, Sequence
import math
from typing import Any

import numpy as np
import tensorflow as tf


class Column:
  """One leaf of a value that every client returns."""

  def __init__(self, spec: tf.TensorSpec):
    self._spec = spec
    self.is_ragged = not spec.shape.is_fully_defined()

  def arrays(self, bucket: int, stop: tf.Tensor) -> list[tf.TensorArray]:
    """Empty arrays for a loop over `stop` clients, at most `bucket`."""
    if not self.is_ragged:
      return [
        tf.TensorArray(self._spec.dtype, bucket, element_shape=self._spec.shape)
      ]
    # Only what was written can be laid end to end.
    return [
      tf.TensorArray(
        self._spec.dtype, stop, element_shape=[None], infer_shape=False
      ),
      tf.TensorArray(tf.int32, stop, element_shape=[self._spec.shape.rank]),
    ]

  def write(
    self, arrays: Iterator[tf.TensorArray], index: tf.Tensor, leaf: tf.Tensor
  ) -> list[tf.TensorArray]:
    """Adds one client's leaf to the next arrays."""
    return [next(arrays).write(index, part) for part in self._parts(leaf)]

  def stack(self, arrays: Iterator[tf.TensorArray]) -> list[tf.Tensor]:
    """The tensors in which a loop returns the next arrays."""
    if not self.is_ragged:
      return [next(arrays).stack()]
    return [next(arrays).concat(), next(arrays).stack()]

  def stack_eagerly(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same, of clients that ran one by one."""
    parts = list(zip(*[self._parts(leaf) for leaf in leaves], strict=True))
    if not self.is_ragged:
      return [tf.stack(parts[0])]
    return [tf.concat(parts[0], 0), tf.stack(parts[1])]

  def read(self, tensors: Iterator[tf.Tensor]) -> 'tf.Tensor | Ragged':
    """Takes what `stack` returned: the clients' leaves, by place."""
    first = next(tensors)
    return Ragged(first, next(tensors)) if self.is_ragged else first

  def _parts(self, leaf: tf.Tensor) -> list[tf.Tensor]:
    if self.is_ragged:
      return [tf.reshape(leaf, [-1]), tf.shape(leaf)]
    return [leaf]


class Ragged:
  """Arrays of different shapes, laid end to end."""

  def __init__(self, values: tf.Tensor, shapes: tf.Tensor):
    self._values, self._shapes = values, shapes

  def numpy(self) -> list[Any]:
    """One array for each client."""
    shapes = self._shapes.numpy()
    ends = np.cumsum([math.prod(shape) for shape in shapes.tolist()])
    parts = np.split(self._values.numpy(), ends[:-1])
    return [
      part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
    ]
