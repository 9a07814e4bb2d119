"""FedEmbed's model of what a user likes, from its appendix B.1.

Personal embeddings, the encoder that all users share, and the whole with a
single head. Labels are integers `[batch, 3]`: liked or not, what is shown, and
the user's sub-population; the models here learn the first.
"""

import functools
from typing import Any

import tensorflow as tf

from tasks.emnist_models import HEAD
from tasks.emnist_models import scaled_input
from tasks.errors import OptionError
from tff_partial import layers as layers_lib

# Columns of an example's label.
IS_LIKED, KIND, SUB_POPULATION = range(3)
LABEL_SPEC = tf.TensorSpec([3], tf.int32)

PERSONAL = 'personal_embedding'
# What the encoder makes of an image.
NUM_FEATURES = 64

# As in PyTorch, whose layers the appendix prints.
_LAYER_NORM_EPSILON = 1e-5


def build_encoder(
  shape: tuple[int, int], channels: int, activation: str | None = None
) -> tf.keras.Model:
  """Builds the encoder of appendix B.1, from images to 64 features.

  Three convolutions, each followed by a normalization over its whole output:
  16 and 32 filters of 3 x 3 at every second pixel, and 64 of the size that is
  then left (7 x 7 of images of 28 x 28). With two channels it has as many
  parameters as PyTorch's, 114,896.

  Args:
    shape: Height and width of an image.
    channels: Channels of its input: two with a personal embedding, else one.
    activation: Follows the first two normalizations, such as 'relu'. The paper
      prints none.

  Returns:
    A model from floats `[batch, height, width, channels]` to `[batch, 64]`.
  """
  layers = tf.keras.layers
  inputs = tf.keras.Input([*shape, channels])
  values = inputs
  for number, filters in enumerate((16, 32), 1):
    # PyTorch pads all sides by one, where `same` would pad two of the four.
    values = layers.ZeroPadding2D(1, name=f'padding_{number}')(values)
    values = layers.Conv2D(filters, 3, 2, name=f'convolution_{number}')(values)
    values = _normalize(number)(values)
    if activation:
      values = layers.Activation(activation, name=f'activation_{number}')(
        values
      )
  whole = values.shape[1:3]
  values = layers.Conv2D(NUM_FEATURES, whole, name='convolution_3')(values)
  values = _normalize(3)(values)
  values = layers.Flatten(name='features')(values)
  return tf.keras.Model(inputs, values, name='encoder')


def build_preference(
  shape: tuple[int, int],
  ink: int,
  embedding_size: int = 0,
  activation: str | None = None,
) -> tf.keras.Model:
  """Builds FedEmbed's model with a single head, from images to two logits.

  Without an embedding it is the baseline Global, and with `head` local FedRep.
  With one it is Global+: the user's vector is the diagonal of a second channel
  of the image, and is appended to the features. For other methods, put
  `build_personal_embedding`, `append_to_image` and `build_encoder` together.

  Args:
    shape: Height and width of an image.
    ink: The value of full ink.
    embedding_size: Length of the personal embedding, 0 for none; no longer than
      the image is high and wide.
    activation: What `build_encoder` takes.

  Raises:
    OptionError: If the embedding does not fit onto the image's diagonal.
  """
  images, values = scaled_input(shape, ink)
  personal = None
  if embedding_size:
    personal = build_personal_embedding(embedding_size)(images)
    values = append_to_image(values, personal)
  encoder = build_encoder(shape, values.shape[-1], activation)
  features = encoder(values)
  if personal is not None:
    features = tf.keras.layers.Concatenate(name='with_embedding')(
      [features, personal]
    )
  logits = tf.keras.layers.Dense(2, name=HEAD)(features)
  return tf.keras.Model(images, logits, name='preference')


def build_personal_embedding(size: int) -> layers_lib.PrivateVector:
  """Builds the layer of one user's vector, the same for all of its examples.

  FedEmbed's section 3.2 draws the first values from a uniform distribution
  without saying which; ours lies between 0 and 1, PyTorch's default.

  Args:
    size: Length of the vector.
  """
  return layers_lib.PrivateVector(
    size,
    initializer=tf.keras.initializers.RandomUniform(0.0, 1.0),
    name=PERSONAL,
  )


def append_to_image(image: tf.Tensor, personal: tf.Tensor) -> tf.Tensor:
  """Appends a personal embedding to an image, as FedEmbed's section 4 does.

  Args:
    image: Floats `[batch, height, width, channels]`.
    personal: `[batch, size]`, no longer than the image is high and wide; it
      becomes the first part of the diagonal of one more channel.

  Raises:
    OptionError: If it does not fit.
  """
  height, width = image.shape[1:3]
  size = personal.shape[-1]
  if size > min(height, width):
    raise OptionError(
      f'embedding_size: {size} numbers do not fit onto the diagonal of an '
      f'image of {height} x {width}. Give at most {min(height, width)}.'
    )
  diagonal = tf.keras.layers.Lambda(
    functools.partial(_diagonal, shape=(height, width)), name='diagonal'
  )(personal)
  return tf.keras.layers.Concatenate(name='with_diagonal')([image, diagonal])


def _diagonal(personal: tf.Tensor, shape: tuple[int, int]) -> tf.Tensor:
  size = personal.shape[-1]
  square = tf.linalg.diag(personal)
  padded = tf.pad(square, [[0, 0], [0, shape[0] - size], [0, shape[1] - size]])
  return padded[..., tf.newaxis]


def preference_loss(labels: tf.Tensor, predictions: tf.Tensor) -> tf.Tensor:
  """Cross-entropy of liked or not, the first of labels `[batch, 3]`."""
  return tf.nn.sparse_softmax_cross_entropy_with_logits(
    labels[:, IS_LIKED], predictions
  )


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class PreferenceAccuracy(tf.keras.metrics.SparseCategoricalAccuracy):
  """Share of examples whose being liked or not was predicted."""

  def update_state(
    self,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
  ) -> Any:
    """Adds a batch of labels `[batch, 3]`, of which the first is predicted."""
    return super().update_state(y_true[:, IS_LIKED], y_pred, sample_weight)


def _normalize(number: int) -> tf.keras.layers.Layer:
  return tf.keras.layers.LayerNormalization(
    axis=[1, 2, 3],
    epsilon=_LAYER_NORM_EPSILON,
    name=f'normalization_{number}',
  )
