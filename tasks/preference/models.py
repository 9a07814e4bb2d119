"""FedEmbed's model of a user's preferences, from its appendix B.1.

Personal embeddings, the encoder that all users share, and the whole model with
a single head or with all heads. Labels are integers `[batch, 4]`: liked or not,
kind of example, the user's sub-population, and whether it is a prototypical
user.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import tensorflow as tf

from tasks import task
from tasks.errors import OptionError
from tasks.images import HEAD
from tasks.images import scaled_input
from tasks.preference import losses
from tff_partial import assignments
from tff_partial import layers as layers_lib
from tff_partial.model import adapters
from tff_partial.model import keras_models
from tff_partial.model import models

LABEL_SPEC = tf.TensorSpec([4], tf.int32)

PERSONAL = 'personal_embedding'
GLOBAL_HEAD, TYPE_HEAD, PROTOTYPES = 'global_head', 'type_head', 'prototypes'
# Number of features of an image.
NUM_FEATURES = 64


def _first_embedding(spread: float) -> tf.keras.initializers.Initializer:
  return tf.keras.initializers.RandomUniform(0.0, spread)


# As in PyTorch, whose layers the appendix lists.
_LAYER_NORM_EPSILON = 1e-5


def build_encoder(
  shape: tuple[int, int], channels: int, activation: str | None = None
) -> tf.keras.Model:
  """Build the encoder of appendix B.1, from images to 64 features.

  Three convolutions, each followed by a normalization over its whole output: 16
  and 32 filters of 3 x 3 with stride 2, and 64 of the remaining size (7 x 7 for
  images of 28 x 28). With two channels it has as many parameters as PyTorch's,
  114,896.

  Args:
    shape: Height and width of an image.
    channels: Input channels: two with a personal embedding, else one.
    activation: Activation after the first two normalizations, such as 'relu'.
      The paper has none.

  Returns:
    A model from floats `[batch, height, width, channels]` to `[batch, 64]`.
  """
  layers = tf.keras.layers
  inputs = tf.keras.Input([*shape, channels])
  values = inputs
  for number, filters in enumerate((16, 32), 1):
    # PyTorch pads all sides by one; `same` would pad two of the four.
    values = layers.ZeroPadding2D(1, name=f'padding_{number}')(values)
    values = layers.Conv2D(filters, 3, 2, name=f'convolution_{number}')(values)
    values = normalize(number)(values)
    if activation:
      values = layers.Activation(activation, name=f'activation_{number}')(
        values
      )
  whole = values.shape[1:3]
  values = layers.Conv2D(NUM_FEATURES, whole, name='convolution_3')(values)
  values = normalize(3)(values)
  values = layers.Flatten(name='features')(values)
  return tf.keras.Model(inputs, values, name='encoder')


def build_preference(
  shape: tuple[int, int],
  ink: int,
  embedding_size: int = 0,
  encoder: Callable[..., tf.keras.Model] = build_encoder,
) -> tf.keras.Model:
  """Build FedEmbed's model with a single head, from images to two logits.

  Without an embedding it is the baseline Global, and with `head` local FedRep.
  With one it is Global+: the user's vector is the diagonal of a second channel
  of the image, and is appended to the features. For other methods, combine
  `build_personal_embedding`, `append_to_image` and `build_encoder`.

  The encoder is built of its first two arguments, as by `build_encoder`.
  """
  images, values = scaled_input(shape, ink)
  personal = None
  if embedding_size:
    personal = build_personal_embedding(embedding_size)(images)
    values = append_to_image(values, personal)
  features = encoder(shape, values.shape[-1])(values)
  if personal is not None:
    features = tf.keras.layers.Concatenate(name='with_embedding')(
      [features, personal]
    )
  logits = tf.keras.layers.Dense(2, name=HEAD)(features)
  return tf.keras.Model(images, logits, name='preference')


def build_fed_embed(
  shape: tuple[int, int],
  ink: int,
  embedding_size: int,
  num_groups: int,
  encoder: Callable[..., tf.keras.Model] = build_encoder,
  spread: float = 1.0,
  num_types: int | None = None,
) -> tf.keras.Model:
  """Build FedEmbed's model of one client with all heads (Figure 2).

  All heads read the features and the embedding. The head of the client's
  sub-population is named `head`; the server has one for each.

  Outputs are a mapping of LIKED, LIKED_GLOBALLY and TYPE to logits.
  """
  images, values = scaled_input(shape, ink)
  personal = build_personal_embedding(embedding_size, spread)(images)
  values = append_to_image(values, personal)
  features = encoder(shape, values.shape[-1])(values)
  dense = tf.keras.layers.Dense
  joined = tf.keras.layers.Concatenate(name='with_embedding')(
    [features, personal]
  )
  joined = layers_lib.Centers(
    num_groups,
    embedding_size,
    initializer=_first_embedding(spread),
    name=PROTOTYPES,
  )(joined)
  outputs = {
    losses.LIKED: dense(2, name=HEAD)(joined),
    losses.LIKED_GLOBALLY: dense(2, name=GLOBAL_HEAD)(joined),
    losses.TYPE: dense(num_types or num_groups, name=TYPE_HEAD)(joined),
  }
  return tf.keras.Model(images, outputs, name='fed_embed')


def build_clustered(
  shape: tuple[int, int],
  ink: int,
  num_groups: int,
  encoder: Callable[..., tf.keras.Model] = build_encoder,
  by_head: bool = False,
) -> tf.keras.Model:
  """Build PFedKM's model: the encoder, a cluster head and a global head.

  Outputs are a mapping of LIKED and LIKED_GLOBALLY to logits; centers are as
  long as what they cluster. With `by_head`, our PFedKM clusters the gradients
  of a linear head and not those of the encoder and the global head.
  """
  layers = tf.keras.layers
  images, values = scaled_input(shape, ink)
  encode = encoder(shape, values.shape[-1])
  features = encode(values)
  size = features.shape[-1] + 1
  if by_head:
    # As far apart as gradients of features whose size is about 1.
    length, spread = 2 * size, 0.2
    with_one = layers.Lambda(
      lambda values: tf.pad(values, [[0, 0], [0, 1]], constant_values=1.0),
      name='with_one',
    )(features)
    weights = layers_lib.PrivateVector(
      length, initializer='zeros', name=PERSONAL
    )(images)
    read = layers.Lambda(
      lambda pair: tf.linalg.matvec(pair[1], pair[0], transpose_a=True),
      name=GLOBAL_HEAD,
    )
    matrices = layers.Reshape([size, 2], name='weights')(weights)
  else:
    # So near zero that the direction of a gradient decides at first.
    length, spread = encode.count_params() + 2 * size, 1e-4
  features = layers_lib.Centers(
    num_groups,
    length,
    initializer=tf.keras.initializers.RandomUniform(-spread, spread),
    name=PROTOTYPES,
  )(features)
  outputs = {
    losses.LIKED: layers.Dense(2, name=HEAD)(features),
    losses.LIKED_GLOBALLY: read([with_one, matrices])
    if by_head
    else layers.Dense(2, name=GLOBAL_HEAD)(features),
  }
  name = 'head_clustered' if by_head else 'clustered'
  return tf.keras.Model(images, outputs, name=name)


def build_personal_embedding(
  size: int, spread: float = 1.0
) -> layers_lib.PrivateVector:
  """Build the layer of a user's vector, the same for all of its examples.

  FedEmbed's section 3.2 draws the initial values from an unspecified uniform
  distribution; ours is from 0 to `spread`, by default 1 as in PyTorch.
  """
  return layers_lib.PrivateVector(
    size, initializer=_first_embedding(spread), name=PERSONAL
  )


def append_to_image(image: tf.Tensor, personal: tf.Tensor) -> tf.Tensor:
  """Append a personal embedding to an image, as FedEmbed's section 4 does.

  The embedding is the first part of the diagonal of an additional channel.
  """
  height, width = image.shape[1:3]
  size = personal.shape[-1]
  if size > min(height, width):
    raise OptionError(
      f'--preference_embedding_size={size}: {size} numbers do not fit onto the '
      f'diagonal of an image of {height} x {width}. Give at most '
      f'{min(height, width)}.'
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


def build_partial(
  build: Callable[[], tf.keras.Model],
  user: str,
  num_groups: int,
  type_head: bool = True,
  **options: Any,
) -> models.PartialModel:
  """Make a `PartialModel` of FedEmbed's or PFedKM's Keras model."""
  heads: dict[str, Any] = {'local': [PERSONAL, HEAD]}
  if user != task.OWN_HEAD:
    heads = {'group': HEAD, 'num_groups': num_groups}
    if user != task.CLUSTERS:
      heads['local'] = PERSONAL
  loss = losses.fed_embed_loss if type_head else losses.preference_loss
  if user == task.CLUSTERS:
    loss = losses.clustered_loss
  elif user == task.HEAD_CLUSTERS:
    loss = losses.preference_loss
  model = keras_models.from_keras(
    build, loss=loss, labels=LABEL_SPEC, **heads, **options
  )
  if user == task.OWN_HEAD:
    # Nothing trains its prototypes, and noise would move them.
    model = adapters.freeze(model, but=f'(?!{PROTOTYPES}).*')
  return model


PARTS = assignments.FedEmbedVariables(
  embedding=f'{PERSONAL}/own',
  global_head=f'{GLOBAL_HEAD}/.*',
  global_loss=losses.global_loss,
  shared_loss=losses.shared_loss,
  prototypes=f'{PROTOTYPES}/vectors',
  sub_population=lambda labels: labels[:, losses.SUB_POPULATION],
  liked_type=lambda labels: tf.where(
    labels[:, losses.IS_LIKED] > 0, labels[:, losses.KIND], -1
  ),
  is_prototypical=lambda labels: labels[:, losses.IS_PROTOTYPICAL] > 0,
)
# Parts of a model that does not learn from its type head.
PARTS_WITHOUT_TYPES = dataclasses.replace(PARTS, shared_loss=None)


def normalize(
  number: int, axes: Sequence[int] = (1, 2, 3)
) -> tf.keras.layers.Layer:
  """Build a layer that normalizes an example over these axes, like PyTorch."""
  return tf.keras.layers.LayerNormalization(
    axis=list(axes), epsilon=_LAYER_NORM_EPSILON, name=f'normalization_{number}'
  )
