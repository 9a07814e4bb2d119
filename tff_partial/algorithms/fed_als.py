"""Federated alternating least squares, in its variational form.

The model of ratings is `r = mean + b_u + m_i + <u, v_i> + noise`. A client's
local weights are the posterior of its bias and vector: their mean, which is one
linear solve (`Exact`), and their covariance. The server keeps the posterior of
each item's bias and vector, which it solves from sums that clients send for the
items that they rated; the priors of users and items, and the variance of the
noise, are estimated again in each round. Nothing is to be tuned but the number
of factors, and predictions have error bars.

This is the variational Bayes of Lim and Teh ("Variational Bayesian approach to
movie rating prediction", KDD Cup 2007), with full covariances; with those of
items zero it is alternating least squares (Zhou et al., 2008), whose federated
form is in Chien et al. (ICML 2021).

Deviations: clients need not all take part in a round. Sums of earlier rounds
then count by the weight `memory`, as in incremental EM (Neal and Hinton, 1998),
but a client's own earlier part is not replaced.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from scipy import stats
import tensorflow as tf

from tff_partial import aggregators
from tff_partial import client_state
from tff_partial import evaluation
from tff_partial.composition import compose
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.data import splits
from tff_partial.errors import SettingError
from tff_partial.model import keras_models
from tff_partial.model import models
from tff_partial.phases import Phase
from tff_partial.processes import PartialProcess
from tff_partial.solvers.exact import Exact
from tff_partial.solvers.exact import Prior
from tff_partial.statistics import Server
from tff_partial.statistics import Statistic
from tff_partial.tiers import GLOBAL
from tff_partial.tiers import LOCAL

# Names of the outputs.
RATING, VARIANCE = 'rating', 'variance'
_LAYER = 'ratings'
_USER, _SPREAD = f'{_LAYER}/user', f'{_LAYER}/user_spread'
_ITEM, _COVARIANCE = f'{_LAYER}/item', f'{_LAYER}/item_covariance'
_USER_MEAN, _USER_PRECISION = f'{_LAYER}/user_mean', f'{_LAYER}/user_precision'
_ITEMS_MEAN = f'{_LAYER}/items_mean'
_ITEMS_PRECISION = f'{_LAYER}/items_precision'
_NOISE = f'{_LAYER}/noise'
# The mean rating, and the size of one unit of all other weights.
_MEAN, _UNIT = f'{_LAYER}/mean', f'{_LAYER}/unit'

Metrics: TypeAlias = Callable[[], Sequence[tf.keras.metrics.Metric]]


class Packing:
  """Symmetric matrices as their lower triangles.

  Attributes:
    size: Number of rows of a matrix.
    number: Number of entries of a triangle.
  """

  def __init__(self, size: int):
    """Assign a number to each entry."""
    self.size = size
    self._places = np.tril_indices(size)
    self.number = len(self._places[0])
    self._entry = np.zeros([size, size], np.int32)
    self._entry[self._places] = np.arange(self.number)
    self._entry.T[self._places] = np.arange(self.number)

  def pack(self, matrices: tf.Tensor) -> tf.Tensor:
    """Return the triangles of matrices `[..., size, size]`."""
    rows, columns = self._places
    shape = tf.concat([tf.shape(matrices)[:-2], [self.size**2]], 0)
    return tf.gather(
      tf.reshape(matrices, shape), rows * self.size + columns, axis=-1
    )

  def dot(self, triangles: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """Return the sums of products of entries with those of one matrix.

    Args:
      triangles: Triangles of other matrices, `[number, entries]`.
      matrix: Symmetric, `[size, size]`.
    """
    twice = 2.0 - tf.eye(self.size)
    return tf.linalg.matvec(triangles, self.pack(twice * matrix))

  def unpack(self, triangles: tf.Tensor) -> tf.Tensor:
    """Return the matrices of triangles `[..., number]`."""
    return tf.gather(triangles, self._entry, axis=-1)


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
    **kwargs: Any,
  ):
    """Initialize the layer.

    Args:
      num_items: Number of items.
      num_factors: Length of the vectors, without biases.
      mean: The mean rating.
      unit: Number by which ratings are divided before anything else.
      initial_scale: Standard deviation of the first values of items' vectors.
      **kwargs: Arguments of all layers, such as the name.
    """
    super().__init__(**kwargs)
    self.num_items = num_items
    self.num_factors = num_factors
    self.mean = mean
    self.unit = unit
    self.initial_scale = initial_scale
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
    self.user_precision = add('user_precision', [size, size], 'identity')
    self.items_mean = add('items_mean', [size], 'zeros')
    self.items_precision = add('items_precision', [size, size], 'identity')
    self.noise = add('noise', [], 'ones')
    constant = tf.keras.initializers.Constant(self.mean)
    self.mean_rating = add('mean', [], constant)
    constant = tf.keras.initializers.Constant(self.unit)
    self.unit_rating = add('unit', [], constant)
    self.user = add('user', [size], 'zeros')
    self.user_spread = add('user_spread', [size, size], 'zeros')
    super().build(input_shape)

  def call(self, items: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return the mean and the variance of each item's rating, `[batch]`."""
    item = tf.gather(self.item, items)
    of_item = _with_one(item)
    rating = item[:, 0] + tf.linalg.matvec(of_item, self.user)
    # Error bars are outputs alone: nothing is trained on them.
    user, spread = map(tf.stop_gradient, (self.user, self.user_spread))
    spread *= self.noise
    of_user = _with_one(user)
    is_factor = 1.0 - tf.one_hot(0, self.packing.size)
    square = of_user[:, None] * of_user
    square += spread * is_factor[:, None] * is_factor
    variance = self.noise + self.packing.dot(
      tf.gather(self.item_covariance, items), square
    )
    variance += tf.reduce_sum(tf.matmul(of_item, spread) * of_item, 1)
    return {
      RATING: self.mean_rating + self.unit_rating * rating,
      VARIANCE: tf.stop_gradient(tf.square(self.unit_rating) * variance),
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
    }


def _with_one(vectors: tf.Tensor) -> tf.Tensor:
  """Return vectors with 1 in place of their biases: what biases multiply."""
  is_bias = tf.one_hot(0, vectors.shape[-1])
  return is_bias + (1.0 - is_bias) * vectors


def build_model(
  num_items: int,
  num_factors: int,
  *,
  mean: float = 0.0,
  unit: float = 1.0,
  initial_scale: float = 0.1,
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
    metrics: Makes metrics of labels and predictions, which are a mapping of
      `RATING` and `VARIANCE`.
    seed: Draws the first values.

  Raises:
    SettingError: If a size is not possible.
  """
  if num_items < 1 or num_factors < 0:
    raise SettingError(
      f'build_model: {num_items} items and {num_factors} factors are not '
      'possible. Give 1 or more items, and 0 or more factors.'
    )

  def build() -> tf.keras.Model:
    items = tf.keras.Input([], dtype=tf.int32, name='item_id')
    layer = RatingPosterior(
      num_items,
      num_factors,
      mean=mean,
      unit=unit,
      initial_scale=initial_scale,
      name=_LAYER,
    )
    return tf.keras.Model(items, layer(items), name='rating_posterior')

  return keras_models.from_keras(
    build,
    local=[_USER, _SPREAD],
    loss=lambda labels, found: tf.square((labels - found[RATING]) / unit),
    labels=tf.TensorSpec([]),
    metrics=metrics,
    seed=seed,
  )


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class IntervalCoverage(tf.keras.metrics.Mean):
  """Share of ratings within the interval that is to cover a given share."""

  def __init__(self, level: float = 0.8, name: str | None = None, **kw: Any):
    """Make the metric.

    Args:
      level: The share that intervals are to cover.
      name: The metric's name; `coverage_80` for a level of 0.8 by default.
      **kw: Arguments of every metric.
    """
    super().__init__(name=name or f'coverage_{level * 100:g}', **kw)
    self.level = level

  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Add a batch of labels and of outputs of the model."""
    distance = tf.abs(tf.reshape(y_true, [-1]) - y_pred[RATING])
    is_within = distance <= half_width(y_pred[VARIANCE], self.level)
    return super().update_state(
      tf.cast(is_within, self.dtype), sample_weight=sample_weight
    )

  def get_config(self) -> dict[str, Any]:
    """Return the metric's configuration."""
    return {**super().get_config(), 'level': self.level}


def half_width(variance: Any, level: float) -> Any:
  """Return the distance of an interval's ends from the predicted rating.

  Args:
    variance: The variance of the rating, as the model predicts it.
    level: The share of ratings that the interval is to cover.
  """
  return stats.norm.ppf((1 + level) / 2) * variance**0.5


def posterior_phase(on: splits.Part = splits.everything()) -> Phase:
  """Return the phase in which a client solves for its posterior.

  Args:
    on: The ratings that it knows.
  """
  return Phase(
    train=(LOCAL,),
    on=on,
    optimizer=Exact(prior=_prior, covariance=_SPREAD),
    variable_filter=_USER,
    terms=(_item_uncertainty,),
  )


def _prior(client: ClientContext) -> Prior:
  return Prior(
    {_USER: client.weight(GLOBAL, _USER_MEAN)},
    client.weight(GLOBAL, _USER_PRECISION),
  )


def _item_uncertainty(client: ClientContext) -> tf.Tensor:
  """Return the mean variance of ratings that is due to items."""
  batch = batch_of(client)
  user = _with_one(client.weight(LOCAL, _USER))
  packing = Packing(user.shape[0])
  held = tf.gather(client.weight(GLOBAL, _COVARIANCE), batch.x)
  weight = tf.where(batch.is_real, batch.weight, 0.0)
  number = tf.reduce_sum(tf.cast(batch.is_real, tf.float32))
  total = packing.unpack(tf.linalg.matvec(held, weight, transpose_a=True))
  square = tf.reduce_sum(user * tf.linalg.matvec(total, user))
  return square / tf.maximum(number, 1.0)


def build_fed_als(
  model: models.PartialModel,
  *,
  memory: float = 0.0,
) -> PartialProcess:
  """Build variational federated alternating least squares.

  Args:
    model: The model, from `build_model`.
    memory: Weight of the sums of earlier rounds, from 0, for cohorts of all
      clients, to less than 1: about `1 - cohort / clients`.

  Example:
    >>> model = algorithms.fed_als.build_model(num_items=1_000, num_factors=20)
    >>> process = algorithms.build_fed_als(model)

  Raises:
    SettingError: If the memory is not possible, or the model is another.
  """
  _check_model(model)
  if not 0 <= memory < 1:
    raise SettingError(
      f'memory={memory}: expected at least 0 and less than 1, about the share '
      'of clients that are not in a round.'
    )
  num_items, size = model.specs(GLOBAL)[_ITEM].shape
  packing = Packing(size)

  def first_state(model: models.PartialModel) -> Any:
    del model
    return collections.OrderedDict(
      users=collections.OrderedDict(
        number=tf.zeros([]),
        examples=tf.zeros([]),
        error=tf.zeros([]),
        mean=tf.zeros([size]),
        square=tf.zeros([size, size]),
      ),
      items=tf.zeros([num_items, packing.number + size]),
    )

  return compose(
    model,
    client_state=client_state.persist_local,
    work=[posterior_phase(), Phase(train=(), batch_size=100, measured=True)],
    statistics=[
      Statistic(
        'user_sums',
        _user_sums,
        # Priors forget faster than the sums of single items.
        update=lambda server, found: _update_priors(
          server, found, min(memory, 0.9)
        ),
      ),
      Statistic(
        'item_sums',
        lambda client: _item_sums(client, packing),
        join=aggregators.SumOfRowsFactory(num_items),
        update=lambda server, found: _update_items(
          server, found, memory, packing
        ),
      ),
    ],
    server_state=first_state,
  )


def _check_model(model: models.PartialModel) -> None:
  if _SPREAD not in (model.specs(LOCAL) if LOCAL in model.tiers else ()):
    raise SettingError(
      'build_fed_als: the model has no posterior. Make it with '
      '`algorithms.fed_als.build_model`.'
    )


def build_fed_als_eval(
  model: models.PartialModel,
  *,
  split: splits.Split | None = None,
  measure_batch_size: int = 100,
) -> evaluation.Evaluation:
  """Build an evaluation with the posterior of each client's support set.

  Args:
    model: The model, from `build_model`.
    split: Support and query set; the two halves by default.
    measure_batch_size: Examples measured at a time; does not change the result.

  Example:
    >>> model = algorithms.fed_als.build_model(num_items=1_000, num_factors=20)
    >>> evaluation = algorithms.build_fed_als_eval(model)
  """
  _check_model(model)
  return evaluation.build_query_evaluation(
    model,
    client_state=client_state.persist_local,
    train=(LOCAL,),
    personalise=posterior_phase(),
    split=split,
    measure_batch_size=measure_batch_size,
  )


def _moments(client: ClientContext) -> tuple[tf.Tensor, tf.Tensor]:
  """Return the mean and the covariance of a client's posterior."""
  spread = client.weight(LOCAL, _SPREAD)
  return client.weight(LOCAL, _USER), client.weight(GLOBAL, _NOISE) * spread


def _weights_of(client: ClientContext) -> tf.Tensor:
  """Return the weights of a client's examples, zero for padding."""
  return tf.where(client.is_real, client.examples['weight'], 0.0)


def _user_sums(client: ClientContext) -> Any:
  """Return what priors and the noise are estimated from."""
  mean, covariance = _moments(client)
  predictions = client.predict()
  weight = _weights_of(client)
  unit = client.weight(GLOBAL, _UNIT)
  errors = tf.square(client.examples['y'] - predictions[RATING])
  errors = (errors + predictions[VARIANCE]) / tf.square(unit)
  errors -= client.weight(GLOBAL, _NOISE)
  number = tf.reduce_sum(weight)
  counts = tf.cast(number > 0, tf.float32)
  return collections.OrderedDict(
    number=counts,
    examples=number,
    error=tf.reduce_sum(weight * tf.where(client.is_real, errors, 0.0)),
    mean=counts * mean,
    square=counts * (mean[:, None] * mean + covariance),
  )


def _item_sums(client: ClientContext, packing: Packing) -> Any:
  """Return a row for each rating: the normal equations of its item."""
  mean, covariance = _moments(client)
  second = mean[:, None] * mean + covariance
  one = _with_one(mean)
  # E[(1, u)(1, u)'] and E[(1, u) b].
  square = tf.concat(
    [one[None], tf.concat([one[1:, None], second[1:, 1:]], 1)], 0
  )
  by_bias = tf.concat([mean[:1], second[1:, 0]], 0)
  labels = client.examples['y'] - client.weight(GLOBAL, _MEAN)
  labels /= client.weight(GLOBAL, _UNIT)
  right = labels[:, None] * one - by_bias
  weight = _weights_of(client)
  rows = tf.concat(
    [tf.ones_like(labels)[:, None] * packing.pack(square), right], 1
  )
  return collections.OrderedDict(
    ids=tf.where(client.is_real, client.examples['x'], 0),
    values=tf.where(client.is_real[:, None], weight[:, None] * rows, 0.0),
  )


def _update_priors(server: Server, found: Any, memory: float) -> Server:
  """Estimate the users' prior and the noise from sums over users."""
  sums = tf.nest.map_structure(
    lambda old, new: memory * old + new, server.state['users'], found
  )
  number = tf.maximum(sums['number'], 1.0)
  mean = sums['mean'] / number
  covariance = sums['square'] / number - mean[:, None] * mean
  noise = sums['error'] / tf.maximum(sums['examples'], 1.0)
  weights = collections.OrderedDict(server.weights[GLOBAL])
  covariance = tf.cast(covariance, tf.float64)
  has_any = sums['number'] > mean.shape[0]
  weights[_USER_MEAN] = tf.where(has_any, mean, weights[_USER_MEAN])
  unit = tf.eye(mean.shape[0], dtype=tf.float64)
  precision = tf.linalg.inv(tf.where(has_any, covariance, unit))
  weights[_USER_PRECISION] = tf.where(
    has_any, noise * tf.cast(precision, tf.float32), weights[_USER_PRECISION]
  )
  weights[_NOISE] = tf.where(has_any, noise, weights[_NOISE])
  state = collections.OrderedDict(server.state, users=sums)
  return _replaced(server, weights, state)


def _update_items(
  server: Server, found: tf.Tensor, memory: float, packing: Packing
) -> Server:
  """Solve for the items' posteriors from sums over their raters."""
  sums = memory * server.state['items'] + found
  weights = collections.OrderedDict(server.weights[GLOBAL])
  noise = tf.cast(weights[_NOISE], tf.float64)
  totals = tf.cast(sums, tf.float64)
  square = packing.unpack(totals[:, : packing.number])
  right = totals[:, packing.number :]
  mean = tf.cast(weights[_ITEMS_MEAN], tf.float64)
  precision = tf.cast(weights[_ITEMS_PRECISION], tf.float64)
  inverse = tf.linalg.inv(square + precision)
  item = tf.linalg.matvec(inverse, right + tf.linalg.matvec(precision, mean))
  # The prior of the next round, from the items that were rated.
  is_rated = tf.cast(square[:, 0, 0] > 0, tf.float64)
  number = tf.maximum(tf.reduce_sum(is_rated), 1.0)
  mean = tf.reduce_sum(is_rated[:, None] * item, 0) / number
  centred = (item - mean) * is_rated[:, None]
  spread = tf.matmul(centred, centred, transpose_a=True)
  spread += noise * tf.reduce_sum(inverse * is_rated[:, None, None], 0)
  unit = tf.eye(packing.size, dtype=tf.float64)
  has_any = tf.reduce_sum(is_rated) > 0
  spread = tf.where(has_any, spread / number, unit)
  new = {
    _ITEM: item,
    _COVARIANCE: packing.pack(noise * inverse),
    _ITEMS_MEAN: mean,
    _ITEMS_PRECISION: noise * tf.linalg.inv(spread),
  }
  for name, value in new.items():
    value = tf.cast(value, tf.float32)
    weights[name] = tf.where(has_any, value, weights[name])
  return _replaced(
    server, weights, collections.OrderedDict(server.state, items=sums)
  )


def _replaced(server: Server, weights: Any, state: Any) -> Server:
  return Server(
    collections.OrderedDict(server.weights, **{GLOBAL: weights}), state
  )
