"""The base of layers that compute an LSTM in other ways than Keras."""

from typing import Any, ClassVar

import tensorflow as tf


class LSTMLayer(tf.keras.layers.Layer):
  """A layer with the weights of a Keras LSTM, from sequences to sequences.

  Attributes:
    first_bias: The Keras initializer of the bias of the gates.
  """

  first_bias: ClassVar[Any] = 'zeros'

  def __init__(self, units: int, **kwargs: Any):
    super().__init__(**kwargs)
    self.units = units

  def build(self, input_shape: tf.TensorShape) -> None:
    self.kernel = self.add_weight(
      name='kernel',
      shape=[input_shape[-1], 4 * self.units],
      initializer='glorot_uniform',
    )
    self.recurrent_kernel = self.add_weight(
      name='recurrent_kernel',
      shape=[self.units, 4 * self.units],
      initializer='orthogonal',
    )
    self.bias = self.add_weight(
      name='bias', shape=[4 * self.units], initializer=self.first_bias
    )
    super().build(input_shape)
