"""Items' biases and vectors from noisy sums over their raters.

What an aggregator with noise releases is a noisy count of each item's raters
and, again and again, a noisy sum of what its raters' residuals say. The noise
is known, and so each item is shrunk by it: to what its attributes and its
popularity let expect, which is learned from the same releases and costs no
privacy.
"""

import collections
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.errors import SettingError

# Counts are of raters weighted by one over the root of their number of ratings,
# which is about so much.
_ROOT = 10.0
# Smallest count that is divided by, and below which no item counts for more.
_LEAST_COUNT, _RARE = 0.3, 2.0
# Items count for this power of their counts: rare ones have the noisier sums.
_POWER = -0.35
# Variances of biases and of vectors beside their expected values: at the
# start, and at least.
_FIRST, _LEAST = (0.15, 0.05), (0.005, 0.002)
# Rounds of estimating these variances, and the ridge of the regression.
_ESTIMATES, _RIDGE, _TINY = 4, 1.0, 1e-9
# Standard deviations of first vectors, and of what a user's taste for an
# attribute adds to a rating, in stars.
_FIRST_SCALE, TASTE_SCALE = 0.1, 0.25


def checked(attributes: np.ndarray | None, num_items: int) -> np.ndarray:
  """Return attributes of items as float64; of width 0 for None.

  Args:
    attributes: Attributes, `[items, width]`.
    num_items: Number of items.

  Raises:
    SettingError: If they are not of this shape, or not finite.
  """
  if attributes is None:
    attributes = np.zeros([num_items, 0])
  found = np.asarray(attributes, np.float64)
  if found.ndim != 2 or len(found) != num_items or not np.isfinite(found).all():
    raise SettingError(
      f'attributes: expected finite numbers, [{num_items}, width], a row for '
      f'each item, found {list(found.shape)}.'
    )
  return found


def ridge(number: int) -> tf.Tensor:
  """Return the ridge of a regression whose first column is a constant."""
  return _RIDGE * (1.0 - np.eye(number, 1)) * np.eye(number)


def regressed(known: tf.Tensor, found: tf.Tensor, weight: Any) -> tf.Tensor:
  """Return what a weighted regression on attributes expects, `[items, number]`.

  Args:
    known: Attributes, a constant first, `[items, width]`.
    found: What they are to predict, `[items, number]`.
    weight: Weights of the items, `[items, 1]`.
  """
  left = tf.matmul(known * weight, known, transpose_a=True)
  left += ridge(known.shape[1]) + _TINY * np.eye(known.shape[1])
  right = tf.matmul(known * weight, found, transpose_a=True)
  return tf.matmul(known, tf.linalg.solve(left, right))


class PrivateItems:
  """What is known of the items, and how noisy sums change it.

  Attributes:
    num_items: Number of items.
    num_factors: Number of columns of their vectors that are learned.
    attributes: The others, without `TASTE_SCALE`: `[items, width]`.
  """

  def __init__(
    self, num_items: int, num_columns: int, attributes: np.ndarray | None = None
  ):
    """Divide the columns of the items' vectors.

    Args:
      num_items: Number of items.
      num_columns: Length of the items' vectors, with attributes.
      attributes: Public attributes, `[items, width]`.

    Raises:
      SettingError: If the attributes do not fit.
    """
    self.attributes = checked(attributes, num_items)
    width = self.attributes.shape[1]
    if width > num_columns:
      raise SettingError(
        f'attributes: {width} columns, but the model has {num_columns} factors.'
        ' Give it one for each column, and more for those that are learned.'
      )
    self.num_items = num_items
    self.num_factors = num_columns - width

  def first(self, item: tf.Tensor) -> tf.Tensor:
    """Return the first biases and vectors of items, `[items, size]`.

    Learned columns begin as principal components of the attributes.

    Args:
      item: Values drawn for the same.
    """
    centred = self.attributes - self.attributes.mean(0)
    left, values, _ = np.linalg.svd(centred, full_matrices=False)
    number = min(self.num_factors, int(np.sum(values > 1e-6)))
    scale = _FIRST_SCALE * self.num_items**0.5
    found = tf.constant(scale * left[:, :number], item.dtype)
    public = tf.constant(TASTE_SCALE * self.attributes, item.dtype)
    drawn = item[:, number + 1 : self.num_factors + 1]
    return tf.concat([tf.zeros_like(item[:, :1]), found, drawn, public], 1)

  def weights(self, count: tf.Tensor) -> tf.Tensor:
    """Return how much a rating of each item counts in a sum, `[items]`."""
    count = tf.maximum(count, _RARE)
    weights = count**_POWER
    mean = tf.reduce_sum(count * weights**2) / tf.reduce_sum(count)
    return weights / tf.sqrt(mean)

  def refined(
    self,
    state: Any,
    item: tf.Tensor,
    sums: tf.Tensor,
    share: tf.Tensor,
    stddev: float,
    noise: Any,
  ) -> tuple[Any, tf.Tensor, tf.Tensor]:
    """Learn from a release of sums.

    Args:
      state: `count`, and `estimate` and `variance` so far.
      item: Present biases and learned vectors, `[items, learned]`.
      sums: The release: weighted sums of `-1/2` times the slopes of squared
        errors with respect to them, for users with vectors of unit variance.
      share: The release's share of the new estimate.
      stddev: Standard deviation of the noise of each number of it.
      noise: Variance of a rating.

    Returns:
      The new state, and mean and variance of each number.
    """

    def cast(tensor: Any) -> tf.Tensor:
      return tf.cast(tensor, tf.float64)

    count = tf.maximum(cast(state['count']), _LEAST_COUNT)
    divisor = (cast(self.weights(state['count'])) * count)[:, None]
    # A Newton step, of which only the noise of this release is not exact.
    found = cast(item) + cast(sums) / divisor
    share = cast(share)
    estimate = (1.0 - share) * cast(state['estimate']) + share * found
    variance = (1.0 - share) ** 2 * cast(state['variance'])
    variance += (share * stddev / divisor) ** 2
    # Raters are few, too.
    doubt = variance + cast(noise) / (_ROOT * count)[:, None]
    moments = [
      self._shrunk(estimate[:, k], doubt[:, k], count, is_bias=k == 0)
      for k in range(self.num_factors + 1)
    ]
    mean, left = (tf.stack(each, 1) for each in zip(*moments, strict=True))
    estimate, variance, mean, left = (
      tf.cast(each, tf.float32) for each in (estimate, variance, mean, left)
    )
    new = collections.OrderedDict(state, estimate=estimate, variance=variance)
    return new, mean, left

  def _shrunk(
    self, estimate: tf.Tensor, doubt: tf.Tensor, count: tf.Tensor, is_bias: bool
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the posterior of one number of each item: mean and variance.

    Its prior is a regression on attributes and popularity.
    """
    popular = tf.math.log(tf.maximum(count, 1.0))
    popular = tf.stack([tf.ones_like(count), popular, popular**2], 1)
    known = tf.concat([popular, self.attributes], 1)
    first, least = (each[0 if is_bias else 1] for each in (_FIRST, _LEAST))
    prior = tf.constant(first, tf.float64)
    expected = tf.zeros_like(estimate)
    for _ in range(_ESTIMATES):
      weight = 1.0 / (doubt + prior)
      expected = regressed(known, estimate[:, None], weight[:, None])[:, 0]
      beyond = (estimate - expected) ** 2 - doubt
      prior = tf.reduce_sum(weight**2 * beyond) / tf.reduce_sum(weight**2)
      prior = tf.maximum(prior, least)
    share = prior / (prior + doubt)
    return expected + share * (estimate - expected), share * doubt
