"""FedEmbed's encoder of spectrograms, from its appendix B.2.

The paper's spectrograms are of 200 x 375 numbers, ours of 40 x 48. For smaller
ones than the paper's, the two pools are left out; all convolutions, kernels,
strides and layer sizes are as printed: the output of the convolutions is then 3
x 3 x 64 = 576 numbers in both cases. The first convolution pads by one, which
the paper does not print but the sizes of its normalizations require. Its heads
are printed with 92 inputs, those of MNIST; 256 features and the embedding are
meant.
"""

import tensorflow as tf

from tasks.preference.models import normalize

NUM_FEATURES = 256

_PAPER_SHAPE = (200, 375)


def build_encoder(
  shape: tuple[int, int], channels: int, activation: str | None = None
) -> tf.keras.Model:
  """Build the encoder of appendix B.2, from spectrograms to 256 features.

  Three convolutions of 16, 32 and 64 filters and a dense layer, each followed
  by a normalization over its whole output. The convolutions reduce 40 x 48 to
  20 x 16, 8 x 6 and 3 x 3.

  Args:
    shape: Height (bands) and width (frames) of a spectrogram.
    channels: Input channels: two with a personal embedding, else one.
    activation: Activation after the normalizations of the convolutions, such as
      'relu'. The paper has none.

  Returns:
    A model from floats `[batch, height, width, channels]` to `[batch, 256]`.
  """
  layers = tf.keras.layers
  pools = [(2, 3), (3, 3), None]
  if shape[0] < _PAPER_SHAPE[0] or shape[1] < _PAPER_SHAPE[1]:
    pools = [None] * 3
  convolutions = (
    (16, (3, 5), (2, 3)),
    (32, (5, 5), (2, 2)),
    (64, (3, 2), (2, 2)),
  )
  inputs = tf.keras.Input([*shape, channels])
  values = layers.ZeroPadding2D(1, name='padding_1')(inputs)
  for number, (convolution, pool) in enumerate(
    zip(convolutions, pools, strict=True), 1
  ):
    filters, kernel, strides = convolution
    values = layers.Conv2D(
      filters, kernel, strides, name=f'convolution_{number}'
    )(values)
    if pool:
      values = layers.AveragePooling2D(pool, name=f'pool_{number}')(values)
    values = normalize(number)(values)
    if activation:
      values = layers.Activation(activation, name=f'activation_{number}')(
        values
      )
  values = layers.Flatten(name='flatten')(values)
  values = layers.Dense(NUM_FEATURES, name='dense')(values)
  values = normalize(4, axes=[1])(values)
  return tf.keras.Model(inputs, values, name='encoder')
