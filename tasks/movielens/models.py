"""Matrix factorization for one user, with the metrics of its errors.

The model predicts a rating as the scalar product of the item's vector and the
user's vector (FedRecon, sections 3 and 5.1.1). It knows a single user, the
client that it runs on. Layers whose names match `LOCAL_LAYERS` are the user's;
all others are shared. For comparison it can also have a table of all users at
the server (footnote 4 of the paper).
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_partial.templates import rating_posteriors

# Names of the user's local layers, for `from_keras`.
LOCAL_LAYERS = 'user_.*'

# Input names of a model with a table of all users.
ITEM, USER = 'item_id', 'user_id'

Scale = tuple[float, float]


def build_matrix_factorization(
  num_items: int,
  num_factors: int = 50,
  *,
  biases: bool = False,
  mean: float = 0.0,
  unit: float = 1.0,
  l2: float = 0.0,
  initial_scale: float = 0.05,
  num_users: int | None = None,
) -> tf.keras.Model:
  """Build a model from item ids, int32 `[batch]`, to ratings, `[batch]`.

  The defaults are those of the FedRecon paper, section 5.1.1.

  Args:
    num_items: Number of rows of the item table.
    num_factors: Length of the vectors.
    biases: True to add an item bias and a user bias, both initially zero.
    mean: A constant to add, such as the mean rating in training.
    unit: Scale of vectors and biases before `mean` is added, for ratings on
      another scale than stars.
    l2: Adds `l2` times the sum of squares of the user's vector and bias to the
      loss of each batch; of a table, the mean of all users' sums.
    initial_scale: Vectors begin uniform between plus and minus this.
    num_users: Number of rows of a table of all users, which then replaces the
      one user's vector; the input is a mapping of `ITEM` and `USER`, both int32
      `[batch]`. None for one user.

  Returns:
    A functional model with the layers item_embedding, user_embedding and, if
    there are biases, item_bias and user_bias.
  """
  user_penalty = tf.keras.regularizers.L2(l2 / (num_users or 1)) if l2 else None
  layers = tf.keras.layers
  item_ids = inputs = layers.Input(shape=(), dtype=tf.int32, name=ITEM)
  user_ids = None
  if num_users is not None:
    user_ids = layers.Input(shape=(), dtype=tf.int32, name=USER)
    inputs = {ITEM: item_ids, USER: user_ids}

  item_vectors = layers.Embedding(
    num_items, num_factors, _uniform(initial_scale), name='item_embedding'
  )(item_ids)
  if user_ids is None:
    ratings = UserEmbedding(
      initializer=_uniform(initial_scale),
      regularizer=user_penalty,
      name='user_embedding',
    )(item_vectors)
  else:
    user_vectors = layers.Embedding(
      num_users,
      num_factors,
      _uniform(initial_scale),
      user_penalty,
      name='user_embedding',
    )(user_ids)
    ratings = layers.Reshape((), name='ratings')(
      layers.Dot(1, name='products')([item_vectors, user_vectors])
    )
  if biases:
    item_biases = _biases(num_items, item_ids, 'item')
    ratings = layers.Add(name='with_item_bias')([ratings, item_biases])
    if user_ids is None:
      ratings = UserBias(regularizer=user_penalty, name='user_bias')(ratings)
    else:
      user_biases = _biases(num_users, user_ids, 'user', user_penalty)
      ratings = layers.Add(name='with_user_bias')([ratings, user_biases])
  if mean or unit != 1.0:
    ratings = layers.Rescaling(unit, offset=mean, name='with_mean')(ratings)
  return tf.keras.Model(inputs, ratings, name='matrix_factorization')


def _biases(
  number: int | None, ids: Any, whose: str, penalty: Any = None
) -> Any:
  """Look up a bias for each id, initially zero."""
  found = tf.keras.layers.Embedding(
    number, 1, 'zeros', penalty, name=f'{whose}_bias'
  )(ids)
  return tf.keras.layers.Reshape((), name=f'{whose}_bias_without_axis')(found)


def build_metrics(scale: Scale | None = None) -> list[tf.keras.metrics.Metric]:
  """Build the metrics `rmse` and `accuracy` of the FedRecon paper, Table 1.

  Predictions are clipped to any scale; the paper clips nothing.
  """
  return [RatingError(scale), RatingAccuracy(scale)]


class _OwnWeight(tf.keras.layers.Layer):
  """A layer with one weight, which belongs to one user."""

  def __init__(
    self, initializer: Any = 'zeros', regularizer: Any = None, **kwargs: Any
  ):
    """Make the layer, with a Keras initializer and regularizer."""
    super().__init__(**kwargs)
    self.initializer = tf.keras.initializers.get(initializer)
    self.regularizer = tf.keras.regularizers.get(regularizer)

  def _own(self, name: str, shape: list[int]) -> tf.Variable:
    return self.add_weight(
      name=name,
      shape=shape,
      initializer=self.initializer,
      regularizer=self.regularizer,
    )

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      'initializer': tf.keras.initializers.serialize(self.initializer),
      'regularizer': tf.keras.regularizers.serialize(self.regularizer),
    }


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class UserEmbedding(_OwnWeight):
  """One user's vector: maps item vectors to their scalar products with it.

  Maps float `[batch, num_factors]` to `[batch]`; the weight has the shape
  `[num_factors]`.
  """

  def build(self, input_shape: tf.TensorShape) -> None:
    self.vector = self._own('vector', [input_shape[-1]])
    super().build(input_shape)

  def call(self, item_vectors: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(item_vectors * self.vector, axis=-1)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class UserBias(_OwnWeight):
  """One user's bias, a scalar: adds it to all ratings, `[batch]`."""

  def build(self, input_shape: tf.TensorShape) -> None:
    self.bias = self._own('bias', [])
    super().build(input_shape)

  def call(self, ratings: tf.Tensor) -> tf.Tensor:
    return ratings + self.bias


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class AbsoluteError(tf.keras.metrics.Mean):
  """Mean absolute error of ratings."""

  def __init__(
    self, scale: Scale | None = None, name: str = 'mae', **kwargs: Any
  ):
    """Make the metric, of predictions clipped to any scale."""
    super().__init__(name=name, **kwargs)
    self.scale = None if scale is None else (scale[0], scale[1])

  def counted(self, distance: tf.Tensor) -> tf.Tensor:
    """Return the values to average, `[batch]`: the distances."""
    return distance

  def update_state(
    self,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
  ) -> Any:
    """Add a batch; all arguments are `[batch]` or `[batch, 1]`."""
    predicted = clip(flat(y_pred), self.scale)
    distance = tf.abs(tf.cast(flat(y_true), predicted.dtype) - predicted)
    return super().update_state(
      self.counted(distance),
      sample_weight=None if sample_weight is None else flat(sample_weight),
    )

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'scale': self.scale}


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class RatingError(AbsoluteError):
  """Root mean square error of ratings; its state is a sum and a count."""

  def __init__(
    self, scale: Scale | None = None, name: str = 'rmse', **kwargs: Any
  ):
    super().__init__(scale, name, **kwargs)

  def counted(self, distance: tf.Tensor) -> tf.Tensor:
    return tf.square(distance)

  def result(self) -> tf.Tensor:
    return tf.sqrt(super().result())


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class RatingAccuracy(AbsoluteError):
  """Share of predictions within half a star.

  On whole stars that is the share of predictions that round to the rating
  (FedRecon, section 5.1.1).
  """

  def __init__(
    self,
    scale: Scale | None = None,
    tolerance: float = 0.5,
    name: str = 'accuracy',
    **kwargs: Any,
  ):
    """Make the metric, with a maximum error in stars of correct predictions."""
    super().__init__(scale, name, **kwargs)
    self.tolerance = tolerance

  def counted(self, distance: tf.Tensor) -> tf.Tensor:
    """Return 1 for distances within the tolerance, and 0 for the rest."""
    return tf.cast(distance <= self.tolerance, self.dtype)

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'tolerance': self.tolerance}


def _uniform(scale: float) -> tf.keras.initializers.Initializer:
  return tf.keras.initializers.RandomUniform(-scale, scale)


def clip(predictions: tf.Tensor, scale: Scale | None) -> tf.Tensor:
  """Return predictions clipped to the scale, if there is one."""
  return predictions if scale is None else tf.clip_by_value(predictions, *scale)


def ratings_of(predictions: Any) -> Any:
  """Return the ratings among predictions, which may also have variances."""
  if isinstance(predictions, Mapping):
    return predictions[rating_posteriors.RATING]
  return predictions


def flat(values: Any) -> tf.Tensor:
  """Return values as `[batch]`, so that two of them never broadcast."""
  values = ratings_of(values)
  return tf.reshape(tf.convert_to_tensor(values), [-1])
