"""A model of ratings whose users and items have posteriors.

The model is `r = mean + b_u + m_i + <u, v_i> + noise`. A client's local weights
are the posterior of its bias and vector: their mean, which is one linear solve
(`Exact`), and their covariance. The posteriors of items, the priors and the
variance of the noise are global weights; `fed_als.py` says how the server
learns them. A user whose ratings follow the model less than others' has wider
error bars: a factor on its variances is a local weight, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.data.id_ranges import IdRange
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior
from tff_partial.solvers.triangles import Packing
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

# Name of the input with items' ids, where there are others.
ITEM_ID = 'item_id'
# Names of the outputs; the last is the part of the variance that is due to what
# is not known of the user.
RATING, VARIANCE, OF_USER = 'rating', 'variance', 'variance_of_user'
LAYER = 'ratings'
USER, SPREAD = f'{LAYER}/user', f'{LAYER}/user_spread'
# A user's factor on variances, and the number of ratings that its prior counts.
SCALE, _SCALE_PRIOR = f'{LAYER}/user_scale', 20.0
ITEM, COVARIANCE = f'{LAYER}/item', f'{LAYER}/item_covariance'
USER_MEAN, USER_PRECISION = f'{LAYER}/user_mean', f'{LAYER}/user_precision'
NOISE = f'{LAYER}/noise'
# Prefix of a table of what users' values of an attribute add to their mean.
_OF = f'{LAYER}/of_'
# That of what the items that they rated add, and a number of ratings for it.
_BY_RATED, _RATED_PRIOR = f'{LAYER}/by_rated_items', 10.0
# The mean rating, and the size of one unit of all other weights.
MEAN, UNIT = f'{LAYER}/mean', f'{LAYER}/unit'

Metrics: TypeAlias = Callable[[], Sequence[tf.keras.metrics.Metric]]


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class RatingPosterior(tf.keras.layers.Layer):
  """Mean and variance of a user's ratings of items.

  Biases come first in all vectors and matrices.
  """

  def __init__(
    self,
    num_items: int,
    num_factors: int,
    *,
    mean: float = 0.0,
    unit: float = 1.0,
    initial_scale: float = 0.1,
    user_attributes: Mapping[str, int] | None = None,
    rated_items: bool = False,
    **kwargs: Any,
  ):
    """Take the settings, see `build_model`, and arguments of all layers."""
    super().__init__(**kwargs)
    self.num_items = num_items
    self.num_factors = num_factors
    self.mean = mean
    self.unit = unit
    self.initial_scale = initial_scale
    self.user_attributes = dict(user_attributes or {})
    self.rated_items = rated_items
    self.packing = Packing(num_factors + 1)

  def build(self, input_shape: tf.TensorShape) -> None:
    """Create the weights."""
    size = self.packing.size

    def add(name: str, shape: list[int], initializer: Any) -> tf.Variable:
      return self.add_weight(name, shape, initializer=initializer)

    normal = tf.keras.initializers.RandomNormal(stddev=self.initial_scale)
    self.item = add('item', [self.num_items, size], normal)
    self.item_covariance = add(
      'item_covariance', [self.num_items, self.packing.number], 'zeros'
    )
    # Priors: precisions are in units of the noise's.
    self.user_mean = add('user_mean', [size], 'zeros')
    for name, number in self.user_attributes.items():
      setattr(self, f'of_{name}', add(f'of_{name}', [number, size], 'zeros'))
    if self.rated_items:
      self.by_rated_items = add('by_rated_items', [size, size], 'zeros')
    self.user_precision = add('user_precision', [size, size], 'identity')
    self.noise = add('noise', [], 'ones')
    constant = tf.keras.initializers.Constant(self.mean)
    self.mean_rating = add('mean', [], constant)
    constant = tf.keras.initializers.Constant(self.unit)
    self.unit_rating = add('unit', [], constant)
    self.user = add('user', [size], 'zeros')
    self.user_spread = add('user_spread', [size, size], 'zeros')
    self.user_scale = add('user_scale', [], 'ones')
    super().build(input_shape)

  def call(self, inputs: Any) -> dict[str, tf.Tensor]:
    """Return mean and variances of each item's rating, `[batch]` each."""
    items = items_of(inputs)
    item = tf.gather(self.item, items)
    of_item = with_one(item)
    rating = item[:, 0] + tf.linalg.matvec(of_item, self.user)
    # Error bars are outputs alone: nothing is trained on them.
    user, spread = map(tf.stop_gradient, (self.user, self.user_spread))
    spread *= self.noise
    of_user = with_one(user)
    is_factor = 1.0 - tf.one_hot(0, self.packing.size)
    square = of_user[:, None] * of_user
    square += spread * is_factor[:, None] * is_factor
    of_spread = tf.reduce_sum(tf.matmul(of_item, spread) * of_item, 1)
    variance = self.noise + self.packing.dot(
      tf.gather(self.item_covariance, items), square
    )
    star = tf.stop_gradient(tf.square(self.unit_rating))
    return {
      RATING: self.mean_rating + self.unit_rating * rating,
      VARIANCE: (
        self.user_scale * star * tf.stop_gradient(variance + of_spread)
      ),
      OF_USER: self.user_scale * star * tf.stop_gradient(of_spread),
    }

  def get_config(self) -> dict[str, Any]:
    """Return the layer's configuration."""
    return {
      **super().get_config(),
      'num_items': self.num_items,
      'num_factors': self.num_factors,
      'mean': self.mean,
      'unit': self.unit,
      'initial_scale': self.initial_scale,
      'user_attributes': self.user_attributes,
      'rated_items': self.rated_items,
    }


def items_of(inputs: Any) -> tf.Tensor:
  """Return the items' ids among a model's inputs."""
  return inputs[ITEM_ID] if isinstance(inputs, Mapping) else inputs


def with_one(vectors: tf.Tensor) -> tf.Tensor:
  """Return vectors with 1 in place of their biases: what biases multiply.

  Args:
    vectors: `[..., size]`, the biases first.
  """
  is_bias = tf.one_hot(0, vectors.shape[-1])
  return is_bias + (1.0 - is_bias) * vectors


def build_model(
  num_items: int,
  num_factors: int,
  *,
  mean: float = 0.0,
  unit: float = 1.0,
  initial_scale: float = 0.1,
  user_attributes: Mapping[str, int] | None = None,
  rated_items: bool = False,
  metrics: Metrics = list,
  seed: int = 0,
) -> models.PartialModel:
  """Build the model that `build_fed_als` trains.

  Args:
    num_items: Number of items; inputs are their ids.
    num_factors: Length of the vectors; 0 for biases alone.
    mean: A constant to add, such as the mean rating.
    unit: The size of one star: ratings are divided by it, so that the first
      priors fit any scale.
    initial_scale: Standard deviation of the first values of items' vectors.
    user_attributes: What is known of users, such as their occupation, which
      the mean of their prior follows: name to the number of values. Inputs are
      then a mapping of `ITEM_ID` and, by these names, of the user's values,
      from 0, the same for all of its ratings. They stay at the client.
    rated_items: True if the mean of a user's prior follows also which items it
      rated: the sum of their vectors, over the root of 10 more than their
      number.
    metrics: Makes metrics of labels and predictions, which are a mapping of
      `RATING`, `VARIANCE` and `OF_USER`.
    seed: Draws the first values.

  Raises:
    SettingError: If a size is not possible.
  """
  checked_numbers.check_whole(SettingError, 1, num_items=num_items)
  checked_numbers.check_whole(SettingError, 0, num_factors=num_factors)

  def build() -> tf.keras.Model:
    names = (ITEM_ID, *(user_attributes or ()))
    inputs: Any = {n: tf.keras.Input([], dtype=tf.int32, name=n) for n in names}
    inputs = inputs if user_attributes else inputs[ITEM_ID]
    layer = RatingPosterior(
      num_items,
      num_factors,
      mean=mean,
      unit=unit,
      initial_scale=initial_scale,
      user_attributes=user_attributes,
      rated_items=rated_items,
      name=LAYER,
    )
    return tf.keras.Model(inputs, layer(inputs), name='rating_posterior')

  model = keras_models.from_keras(
    build,
    local=[USER, SPREAD, SCALE],
    loss=lambda labels, found: tf.square((labels - found[RATING]) / unit),
    labels=tf.TensorSpec([]),
    metrics=metrics,
    seed=seed,
  )
  for name, number in (user_attributes or {}).items():
    # The layer reads none of them, so that its graph does not tell.
    what = f'user_attributes: {name!r} has {number} values'
    model.example_spec.ids[f'x.{name}'] = (IdRange(number, what),)
  return model


def posterior_phases() -> list[Phase]:
  """Return the phases in which a client solves for its posterior.

  The first solves for its bias and vector, the second for its factor on
  variances, from how far its ratings are from those that it then predicts.
  """
  return [
    Phase(
      train=(LOCAL,),
      optimizer=Exact(prior=_prior, covariance=SPREAD),
      variable_filter=USER,
      terms=(_item_uncertainty,),
    ),
    Phase(
      train=(LOCAL,),
      optimizer=Exact(prior=lambda _: Prior({SCALE: 1.0}, _SCALE_PRIOR)),
      variable_filter=SCALE,
      terms=(_distance_to_surprise,),
      use_model_loss=False,
    ),
  ]


def tables_of(weights: Mapping[str, Any]) -> list[str]:
  """Return the names of the tables of users' attributes among others."""
  return [name for name in weights if name.startswith((_OF, _BY_RATED))]


def known_of(client: ClientContext) -> tf.Tensor:
  """Return what is known of a user besides its ratings.

  Returns:
    1, then 1 for each of its values, and what it rated: in the order of the
    tables.
  """
  known, x = [tf.ones([1])], client.examples['x']
  for table in tables_of(client.weights[GLOBAL]):
    if table == _BY_RATED:
      known.append(_of_rated_items(client))
    else:
      number = client.weight(GLOBAL, table).shape[0]
      known.append(tf.one_hot(x[table.removeprefix(_OF)][0], number))
  return tf.concat(known, 0)


def _of_rated_items(client: ClientContext) -> tf.Tensor:
  """Return the sum of the rated items' vectors, over a root of their number."""
  x, weights = client.examples['x'], client.example_weights
  if client.batch is not None:  # Of the support set alone.
    x, weights = client.batch.x, client.batch.example_weights
  rated = tf.cast(weights > 0, tf.float32)
  vectors = tf.gather(client.weight(GLOBAL, ITEM), items_of(x))
  total = tf.linalg.matvec(vectors, rated, transpose_a=True)
  return total / tf.sqrt(_RATED_PRIOR + tf.reduce_sum(rated))


def _prior(client: ClientContext) -> Prior:
  tables = tables_of(client.weights[GLOBAL])
  means = tf.concat(
    [
      client.weight(GLOBAL, USER_MEAN)[None],
      *(client.weight(GLOBAL, name) for name in tables),
    ],
    0,
  )
  return Prior(
    {USER: tf.linalg.matvec(means, known_of(client), transpose_a=True)},
    client.weight(GLOBAL, USER_PRECISION),
  )


def _item_uncertainty(client: ClientContext) -> tf.Tensor:
  """Return the mean variance of ratings that is due to items."""
  batch = batch_of(client)
  user = with_one(client.weight(LOCAL, USER))
  packing = Packing(user.shape[0])
  held = tf.gather(client.weight(GLOBAL, COVARIANCE), items_of(batch.x))
  number = tf.reduce_sum(tf.cast(batch.is_real, tf.float32))
  total = packing.unpack(
    tf.linalg.matvec(held, batch.example_weights, transpose_a=True)
  )
  square = tf.reduce_sum(user * tf.linalg.matvec(total, user))
  return square / tf.maximum(number, 1.0)


def _distance_to_surprise(client: ClientContext) -> tf.Tensor:
  """Return the mean squared distance of the factor to surprises.

  A surprise is the square of a residual over what is expected of it: the
  variance less the user's part of it twice, since the user has seen the rating,
  or in so far as its weight below 1 let it.
  """
  batch, scale = batch_of(client), client.weight(LOCAL, SCALE)
  found, seen = batch.predictions, tf.minimum(batch.example_weights, 1.0)
  expected = (found[VARIANCE] - 2.0 * seen * found[OF_USER]) / scale
  surprise = tf.square(batch.y - found[RATING]) / expected
  return batch.mean(tf.square(scale - tf.stop_gradient(surprise)))


def excess(client: ClientContext) -> tf.Tensor:
  """Return the weighted excess of expected squared errors over the noise.

  Args:
    client: The client, after `posterior_phases`.

  Returns:
    In units, `[capacity]`; zero for padding.
  """
  found = client.predict()
  unit = client.weight(GLOBAL, UNIT)
  errors = tf.square(client.examples['y'] - found[RATING])
  errors += found[VARIANCE] / client.weight(LOCAL, SCALE)
  errors = errors / tf.square(unit) - client.weight(GLOBAL, NOISE)
  return tf.where(client.is_real, client.example_weights * errors, 0.0)


def moments(client: ClientContext) -> tuple[tf.Tensor, tf.Tensor]:
  """Return the mean and the covariance of a client's posterior.

  Args:
    client: The client, after `posterior_phases`.
  """
  spread = client.weight(LOCAL, SPREAD)
  return client.weight(LOCAL, USER), client.weight(GLOBAL, NOISE) * spread


def check_model(builder: str, model: models.PartialModel) -> None:
  """Refuse a model that `build_model` did not make.

  Raises:
    SettingError: It names the `builder` that got the model.
  """
  models.check(model)
  if SPREAD not in model.specs(LOCAL):
    raise SettingError(
      f'{builder}: the model has no posterior. Make it with '
      '`tff_partial.templates.rating_posteriors.build_model`.'
    )
