"""Layers of the document model."""

from typing import Any

import tensorflow as tf

from tasks import recurrent

# A prime above the number of characters, and one whose product with the former
# fits into int32.
_HASH_FACTOR, _HASH_MODULUS = 257, 8_388_593


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class FusedLSTM(recurrent.LSTMLayer):
  """LSTM whose whole loop over time is one TensorFlow operation.

  Maps `[batch, time, features]` to `[batch, time, units]`. It computes the same
  as the Keras LSTM, but in one kernel forward and one backward: with the small
  batches of clients, where launching operations dominates, it is several times
  as fast. XLA does not support the operation. The gates have the order input,
  cell, forget, output; in Keras the forget gate is second. A bias of one is
  added to it, as initially in Keras.

  TensorFlow's newer `BlockLSTMV2` has Keras's order, but TensorFlow 2.14 uses
  the older operation's gradient for it, which is wrong.
  """

  def __init__(self, units: int, go_backwards: bool = False, **kwargs: Any):
    """Make the layer.

    Args:
      units: Length of the output.
      go_backwards: True to read the text from its end. The output stays in the
        order of the text.
    """
    super().__init__(units, **kwargs)
    self.go_backwards = go_backwards

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    by_time = tf.transpose(inputs, [1, 0, 2])
    if self.go_backwards:
      by_time = tf.reverse(by_time, [0])
    first = tf.zeros([tf.shape(by_time)[1], self.units])
    no_peephole = tf.zeros([self.units])
    hidden = tf.raw_ops.BlockLSTM(
      seq_len_max=tf.shape(by_time, out_type=tf.int64)[0],
      x=by_time,
      cs_prev=first,
      h_prev=first,
      w=tf.concat([self.kernel, self.recurrent_kernel], 0),
      wci=no_peephole,
      wcf=no_peephole,
      wco=no_peephole,
      b=self.bias,
      forget_bias=1.0,
      cell_clip=-1.0,  # No clipping.
      use_peephole=False,
    ).h
    if self.go_backwards:
      hidden = tf.reverse(hidden, [0])
    by_text = tf.transpose(hidden, [1, 0, 2])
    return tf.ensure_shape(by_text, [None, inputs.shape[1], self.units])


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class MeanOfPlaces(tf.keras.layers.Layer):
  """Mean of the vectors of a text's characters, without padding.

  Maps `[batch, time, size]` and the characters, integers `[batch, time]`, to
  `[batch, size]`; a text without characters to zeros.
  """

  def call(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    vectors, text = inputs
    is_text = tf.cast(tf.not_equal(text, 0), vectors.dtype)[..., tf.newaxis]
    total = tf.reduce_sum(vectors * is_text, axis=1)
    return total / tf.maximum(tf.reduce_sum(is_text, axis=1), 1.0)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class Drift(tf.keras.layers.Layer):
  """User vector at a time: a constant vector plus one that drifts.

  Maps vectors `[batch, vectors * size]` and times `[batch]`, from 0 to 1, to
  `[batch, size]`: the sum of the first vector and of the linear interpolation
  at that time between the others, which are evenly spaced control points.
  """

  def __init__(self, num_vectors: int, **kwargs: Any):
    """Make the layer.

    Args:
      num_vectors: Number of constant vector and control points, at least two.
    """
    super().__init__(**kwargs)
    self.num_vectors = num_vectors

  def call(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
    vectors, when = inputs
    size = vectors.shape[-1] // self.num_vectors
    vectors = tf.reshape(vectors, [-1, self.num_vectors, size])
    last = self.num_vectors - 2
    points = tf.range(last + 1, dtype=vectors.dtype)
    distance = tf.abs(when[:, tf.newaxis] * last - points)
    shares = tf.maximum(1.0 - distance, 0.0)[..., tf.newaxis]
    return vectors[:, 0] + tf.reduce_sum(vectors[:, 1:] * shares, axis=1)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class SometimesUnknown(tf.keras.layers.Layer):
  """User vectors, some of which are zero in training.

  Maps `[batch, size]` to the same. Unlike dropout it does not rescale the
  others, since the layers after it must do without the zeroed ones.
  """

  def __init__(self, share: float, **kwargs: Any):
    """Make the layer.

    Args:
      share: Share of the vectors to set to zero.
    """
    super().__init__(**kwargs)
    self.drop = tf.keras.layers.Dropout(share, noise_shape=(None, 1))

  def call(self, vectors: tf.Tensor, training: bool | None = None) -> tf.Tensor:
    stays = self.drop(tf.ones_like(vectors), training=training)
    return vectors * tf.minimum(stays, 1.0)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NGrams(tf.keras.layers.Layer):
  """Layer that hashes each character together with those before it.

  Maps integers `[batch, time]` to int32 of the same shape, below `buckets`.
  Only padding is mapped to 0.
  """

  def __init__(self, length: int, buckets: int, **kwargs: Any):
    """Make the layer.

    Args:
      length: Number of characters to hash together.
      buckets: Number of different outputs.
    """
    super().__init__(**kwargs)
    self.length = length
    self.buckets = buckets

  def call(self, text: tf.Tensor) -> tf.Tensor:
    text = tf.cast(text, tf.int32)
    time = text.shape[1]
    before = tf.pad(text, [[0, 0], [self.length - 1, 0]])
    number = tf.zeros_like(text)
    for place in range(self.length):
      number = number * _HASH_FACTOR + before[:, place : place + time]
      number %= _HASH_MODULUS
    hashed = 1 + number % tf.constant(self.buckets - 1)
    return tf.where(tf.equal(text, 0), 0, hashed)
