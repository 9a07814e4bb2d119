"""Parts of user models: inputs, tables, layers and outputs."""

import dataclasses
from typing import Any, NamedTuple

import tensorflow as tf

# The names of the inputs.
USER, ITEM, ATTRIBUTES = 'user', 'item', 'attributes'

XAVIER = 'glorot_uniform'
# Table of each user's advantage on items with an attribute.
BIAS_IN_ATTRIBUTES = 'user_attribute_bias'


class InputSizes(NamedTuple):
  """Sizes of a model's inputs.

  Attributes:
    users: Rows of the tables of users.
    items: Rows of the tables of items.
    attributes: Number of attributes, K of the paper.
    attributes_width: Maximum number of attributes of an item.
  """

  users: int
  items: int
  attributes: int
  attributes_width: int


@dataclasses.dataclass(frozen=True)
class AnswerScale:
  """Conversion of scores to predictions.

  Attributes:
    low: The lowest answer.
    high: The highest answer.
    is_linear: True to add the score to the middle of the scale, which
      predictions may leave; otherwise the sigmoid of the score is stretched
      over the scale.
  """

  low: float = 0.0
  high: float = 1.0
  is_linear: bool = False

  def of(self, score: Any) -> Any:
    """Convert scores, Keras tensors `[batch, 1]`, to predictions."""
    layers = tf.keras.layers
    if self.is_linear:
      middle = (self.low + self.high) / 2
      return layers.Rescaling(1.0, offset=middle, name='prediction')(score)
    share = layers.Activation('sigmoid', name='share')(score)
    return layers.Rescaling(
      self.high - self.low, offset=self.low, name='prediction'
    )(share)


BINARY, RATINGS = AnswerScale(), AnswerScale(1.0, 5.0)


def multi_hot(ids: tf.Tensor, number: int) -> tf.Tensor:
  """Encode attributes, padded with -1, as multi-hot vectors."""
  return tf.reduce_max(tf.one_hot(ids, number), 1)


# ---- layers ------------------------------------------------------------------


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class MultiHot(tf.keras.layers.Layer):
  """Layer that maps lists of attributes to vectors; see `multi_hot`."""

  def __init__(self, number: int, **kwargs: Any):
    """Make the layer for a number of attributes."""
    super().__init__(**kwargs)
    self.number = number

  def call(self, ids: tf.Tensor) -> tf.Tensor:
    return multi_hot(ids, self.number)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class NonNegativeDense(tf.keras.layers.Dense):
  """Dense layer that uses the absolute values of its weights."""

  def call(self, inputs: tf.Tensor) -> tf.Tensor:
    values = tf.matmul(inputs, tf.abs(self.kernel)) + self.bias
    return self.activation(values)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class CommonBias(tf.keras.layers.Layer):
  """Layer that adds the same number, initially zero, to all scores."""

  def build(self, input_shape: tf.TensorShape) -> None:
    self.bias = self.add_weight(name='bias', shape=[], initializer='zeros')
    super().build(input_shape)

  def call(self, scores: tf.Tensor) -> tf.Tensor:
    return scores + self.bias


# ---- inputs and tables -------------------------------------------------------


def inputs_of(sizes: InputSizes) -> dict[str, Any]:
  """Make the inputs, named differently from the tables that they index."""
  return {
    USER: tf.keras.Input([], dtype=tf.int32, name='number_of_user'),
    ITEM: tf.keras.Input([], dtype=tf.int32, name='number_of_item'),
    ATTRIBUTES: tf.keras.Input(
      [sizes.attributes_width], dtype=tf.int32, name='attributes_of_item'
    ),
  }


def attributes_of(inputs: dict[str, Any], sizes: InputSizes) -> Any:
  return MultiHot(sizes.attributes, name='multi_hot')(inputs[ATTRIBUTES])


def attribute_biases(
  inputs: dict[str, Any], sizes: InputSizes, *, of_users: bool
) -> list[Any]:
  """Sum over an item's attributes: their biases, and the user's in them."""
  layers = tf.keras.layers
  hot = MultiHot(sizes.attributes, name='attributes_for_bias')(
    inputs[ATTRIBUTES]
  )
  of_all = layers.Dense(
    1, use_bias=False, kernel_initializer='zeros', name='attribute_bias'
  )(hot)
  if not of_users:
    return [of_all]
  own = looked_up(inputs, sizes, sizes.attributes, BIAS_IN_ATTRIBUTES, 'zeros')
  return [of_all, layers.Dot(1, name='bias_in_attributes')([own, hot])]


def looked_up(
  inputs: dict[str, Any],
  sizes: InputSizes,
  length: int,
  name: str,
  initializer: str = XAVIER,
) -> Any:
  """Look up the row of a new table, of the user or item that it is named by."""
  rows = {USER: sizes.users, ITEM: sizes.items}
  whose = name.split('_')[0]
  return tf.keras.layers.Embedding(
    rows[whose], length, embeddings_initializer=initializer, name=name
  )(inputs[whose])


def biases(inputs: dict[str, Any], sizes: InputSizes) -> Any:
  """Add the user's, the item's and the common bias."""
  names = ('user_bias', 'item_bias')
  found = [looked_up(inputs, sizes, 1, name, 'zeros') for name in names]
  both = tf.keras.layers.Add(name='both_biases')(found)
  return CommonBias(name='common_bias')(both)
