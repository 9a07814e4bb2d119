"""Layers of the document model."""

from typing import Any

import tensorflow as tf

from tasks import recurrent

# A prime above the number of characters, and one that keeps int32 from
# overflowing when it is multiplied by the former.
_HASH_FACTOR, _HASH_MODULUS = 257, 8_388_593


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class FusedLSTM(recurrent.LSTMLayer):
  """An LSTM whose whole loop over time is one operation of TensorFlow.

  Maps `[batch, time, features]` to `[batch, time, units]`. It computes what the
  Keras layer of this name computes, but in one kernel forward and one backward:
  with the small batches of clients, whose time goes into starting operations,
  it is several times as fast. XLA does not know the operation. The gates lie in
  the order input, cell, forget, output; in Keras the forget gate is second. A
  bias of one is added to it, with which Keras begins.

  TensorFlow's newer `BlockLSTMV2` has Keras's order, but TensorFlow 2.14 takes
  the older operation's gradient for its own, which is then wrong.
  """

  def __init__(self, units: int, go_backwards: bool = False, **kwargs: Any):
    """Make the layer.

    Args:
      units: Length of the output.
      go_backwards: Whether the text is read from its end. What comes out stays
        in the order of the text.
      **kwargs: What every layer takes, such as its name.
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
      cell_clip=-1.0,  # Nothing is clipped.
      use_peephole=False,
    ).h
    if self.go_backwards:
      hidden = tf.reverse(hidden, [0])
    hidden = tf.ensure_shape(
      tf.transpose(hidden, [1, 0, 2]), [None, inputs.shape[1], self.units]
    )
    return hidden

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'go_backwards': self.go_backwards}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class MeanOfPlaces(tf.keras.layers.Layer):
  """The mean of the vectors of a text's characters, without those that pad it.

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
  """What a user is like at a time: a vector that stays, and one that changes.

  Maps vectors `[batch, vectors * size]` and times `[batch]`, from 0 to 1, to
  `[batch, size]`: the sum of the first vector and of what lies, at that time,
  on straight lines between the others, which are evenly spaced control points.
  """

  def __init__(self, num_vectors: int, **kwargs: Any):
    """Make the layer.

    Args:
      num_vectors: The vector that stays and the control points, at least two.
      **kwargs: What every layer takes, such as its name.
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

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'num_vectors': self.num_vectors}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class SometimesUnknown(tf.keras.layers.Layer):
  """Users' vectors, of which some are zero in training.

  Maps `[batch, size]` to the same. Unlike dropout it leaves those that stay as
  they are, since what follows must do without the others.
  """

  def __init__(self, share: float, **kwargs: Any):
    """Make the layer.

    Args:
      share: How many of the vectors are zero, of one.
      **kwargs: What every layer takes, such as its name.
    """
    super().__init__(**kwargs)
    self.share = share
    self.drop = tf.keras.layers.Dropout(share, noise_shape=(None, 1))

  def call(self, vectors: tf.Tensor, training: bool | None = None) -> tf.Tensor:
    stays = self.drop(tf.ones_like(vectors), training=training)
    return vectors * tf.minimum(stays, 1.0)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'share': self.share}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NGrams(tf.keras.layers.Layer):
  """Numbers each character together with those before it, by hashing.

  Maps integers `[batch, time]` to int32 of the same shape, below `buckets`.
  Padding stays 0, and nothing else becomes 0.
  """

  def __init__(self, length: int, buckets: int, **kwargs: Any):
    """Make the layer.

    Args:
      length: How many characters are numbered together.
      buckets: How many numbers there are.
      **kwargs: What every layer takes, such as its name.
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
    return tf.where(
      tf.equal(text, 0), 0, 1 + number % tf.constant(self.buckets - 1)
    )

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      'length': self.length,
      'buckets': self.buckets,
    }
