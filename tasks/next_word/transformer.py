"""A small causal transformer with pre-layer normalization.

Vaswani et al., Attention Is All You Need (2017), with learned positions, and
layer normalization before attention and before the dense layers instead of
after them (Xiong et al., On Layer Normalization in the Transformer
Architecture, 2020), which trains without a warm-up. Padding is at the end of a
sentence, so that no real token can attend to it.
"""

from typing import Any

import tensorflow as tf

_BLOCKS, _HEADS, _HIDDEN = 2, 2, 128


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class AddPositions(tf.keras.layers.Layer):
  """Layer that adds a learned vector to each position.

  Maps `[batch, time, size]` to the same.
  """

  def build(self, input_shape: tf.TensorShape) -> None:
    self.positions = self.add_weight(
      name='positions', shape=input_shape[1:], initializer='uniform'
    )
    super().build(input_shape)

  def call(self, vectors: tf.Tensor) -> tf.Tensor:
    return vectors + self.positions


def read(vectors: Any) -> Any:
  """Build the blocks, each of causal attention and two dense layers.

  Args:
    vectors: A Keras tensor `[batch, time, size]`; the heads divide its size.

  Returns:
    A Keras tensor like `vectors`.
  """
  layers = tf.keras.layers
  size = vectors.shape[-1]
  vectors = AddPositions(name='positions')(vectors)
  for number in range(_BLOCKS):
    normal = layers.LayerNormalization(name=f'normal_attention_{number}')(
      vectors
    )
    attended = layers.MultiHeadAttention(
      _HEADS, size // _HEADS, name=f'attention_{number}'
    )(normal, normal, use_causal_mask=True)
    vectors = layers.Add(name=f'after_attention_{number}')([vectors, attended])
    normal = layers.LayerNormalization(name=f'normal_{number}')(vectors)
    hidden = layers.Dense(_HIDDEN, 'gelu', name=f'hidden_{number}')(normal)
    made = layers.Dense(size, name=f'dense_{number}')(hidden)
    vectors = layers.Add(name=f'block_{number}')([vectors, made])
  return layers.LayerNormalization(name='normal')(vectors)
