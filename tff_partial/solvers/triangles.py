"""Symmetric matrices without what they say twice."""

import numpy as np
import tensorflow as tf


class Packing:
  """Symmetric matrices as their lower triangles.

  Attributes:
    size: Number of rows of a matrix.
    number: Number of entries of a triangle.
  """

  def __init__(self, size: int):
    """Assign a number to each entry."""
    self.size = size
    self._places = np.tril_indices(size)
    self.number = len(self._places[0])
    self._entry = np.zeros([size, size], np.int32)
    self._entry[self._places] = np.arange(self.number)
    self._entry.T[self._places] = np.arange(self.number)

  def pack(self, matrices: tf.Tensor) -> tf.Tensor:
    """Return the triangles of matrices `[..., size, size]`."""
    rows, columns = self._places
    shape = tf.concat([tf.shape(matrices)[:-2], [self.size**2]], 0)
    return tf.gather(
      tf.reshape(matrices, shape), rows * self.size + columns, axis=-1
    )

  def dot(self, triangles: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """Return the sums of products of entries with those of one matrix.

    Args:
      triangles: Triangles of other matrices, `[number, entries]`.
      matrix: Symmetric, `[size, size]`.
    """
    twice = 2.0 - tf.eye(self.size)
    return tf.linalg.matvec(triangles, self.pack(twice * matrix))

  def unpack(self, triangles: tf.Tensor) -> tf.Tensor:
    """Return the matrices of triangles `[..., number]`."""
    return tf.gather(triangles, self._entry, axis=-1)
