"""Keras metrics of where held-out items rank among the items of a catalogue.

The predictions are ranks (`ranks_spec`): how many other items score above a
held-out item, how many equally, and how many there are. All metrics are exact
expectations: over the order of items with equal scores, so that a constant
score has the value of chance; and over the drawn negatives if the held-out item
is ranked among some of the others, as by He et al. ("Neural collaborative
filtering", WWW 2017). Krichene and Rendle ("On sampled metrics for item
recommendation", KDD 2020) show that such metrics can order methods differently
than the whole catalogue does, so measure both.

Each held-out item counts once. For users with several, `HitRate` is the recall,
and the mean over clients in an evaluation's `per_client` is that over users.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.errors import SettingError


def ranks_spec(k: int) -> dict[str, Any]:
  """Return specs of the ranks of one held-out item, which metrics measure.

  Under `all` and `drawn` are the numbers of other items that score `above` it,
  that are `tied` with it, and of all `others`; `drawn` leaves out other items
  that are held out for the same user. `held_out` is the number of these, the
  item included, and `top` the user's unseen items with the highest scores, -1
  for each that there are fewer.

  Args:
    k: Number of items in `top`.
  """
  number = tf.TensorSpec([], tf.float32)
  counts = dict.fromkeys(('above', 'tied', 'others'), number)
  return {
    'all': counts,
    'drawn': counts,
    'held_out': number,
    'top': tf.TensorSpec([k], tf.int32),
  }


def _log_choose(n: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
  """Return the logarithm of binomial coefficients; -inf where none is."""
  possible = (k >= 0) & (k <= n)
  n, k = tf.where(possible, n, 0.0), tf.where(possible, k, 0.0)
  found = tf.math.lgamma(n + 1) - tf.math.lgamma(k + 1)
  found -= tf.math.lgamma(n - k + 1)
  return tf.where(possible, found, tf.constant(float('-inf'), found.dtype))


class _Gain(tf.keras.metrics.Mean):
  """Mean gain of held-out items by their rank, from 0, among others.

  Subclasses set `prefix`, the name's beginning.
  """

  prefix = ''

  def __init__(
    self,
    k: int = 10,
    num_negatives: int | None = None,
    name: str | None = None,
    **kw: Any,
  ):
    """Make the metric.

    Args:
      k: Number of ranks with a gain.
      num_negatives: Number of other items that are drawn, among which the
        held-out item is ranked; None for all others.
      name: The metric's name; by default such as `hit_rate_10` with drawn items
        and `full_hit_rate_10` with all.
      **kw: Arguments of every metric.
    """
    checked_numbers.check_whole(SettingError, 1, k=k)
    if num_negatives is not None:
      checked_numbers.check_whole(SettingError, 0, num_negatives=num_negatives)
    of_all = 'full_' if num_negatives is None else ''
    super().__init__(name=name or f'{of_all}{self.prefix}_{k}', **kw)
    self.k = k
    self.num_negatives = num_negatives

  def up_to(self, rank: tf.Tensor, held_out: tf.Tensor) -> tf.Tensor:
    """Return the sum of gains of ranks below `rank`, float64.

    Args:
      rank: float64, whole numbers from 0.
      held_out: Number of held-out items, of the same shape or broadcast.
    """
    raise NotImplementedError

  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Add held-out items by their ranks, as in `ranks_spec`."""
    del y_true
    negatives = self.num_negatives
    among = y_pred['all' if negatives is None else 'drawn']
    above, tied, others, held_out = (
      tf.cast(tf.reshape(number, [-1]), tf.float64)
      for number in (
        *(among[name] for name in ('above', 'tied', 'others')),
        y_pred['held_out'],
      )
    )
    if negatives is None:
      gain = self._shared(above, tied, held_out)
    else:
      gain = self._of_drawn(negatives, above, tied, others)
    return super().update_state(
      tf.cast(gain, self.dtype), sample_weight=sample_weight
    )

  def _shared(
    self, above: tf.Tensor, tied: tf.Tensor, held_out: tf.Tensor
  ) -> tf.Tensor:
    """Return the mean gain of the ranks that tied items share."""
    total = self.up_to(above + tied + 1, held_out) - self.up_to(above, held_out)
    return total / (tied + 1)

  def _of_drawn(
    self, number: int, above: tf.Tensor, tied: tf.Tensor, others: tf.Tensor
  ) -> tf.Tensor:
    """Return the expectation over drawn others, `[batch]`.

    The numbers of drawn items above and of tied ones have a multivariate
    hypergeometric distribution. No other held-out item is among them, so that
    the item has the gain of an only one.
    """
    above, tied, others = (
      values[:, None, None] for values in (above, tied, others)
    )
    drawn = tf.minimum(tf.cast(number, tf.float64), others)
    i = tf.range(self.k, dtype=tf.float64)[:, None]
    j = tf.range(number + 1, dtype=tf.float64)
    log = _log_choose(above, i) + _log_choose(tied, j)
    log += _log_choose(others - above - tied, drawn - i - j)
    chance = tf.exp(log - _log_choose(others, drawn))
    only = tf.ones([], tf.float64)
    return tf.reduce_sum(chance * self._shared(i, j, only), [1, 2])

  def get_config(self) -> dict[str, Any]:
    """Return the metric's configuration."""
    return {
      **super().get_config(),
      'k': self.k,
      'num_negatives': self.num_negatives,
    }


class HitRate(_Gain):
  """Share of held-out items among the first k: HR@k, or recall@k."""

  prefix = 'hit_rate'

  def up_to(self, rank: tf.Tensor, held_out: tf.Tensor) -> tf.Tensor:
    """Return the number of ranks below `rank` and `k`."""
    del held_out
    return tf.minimum(rank, self.k)


class NDCG(_Gain):
  """Normalized discounted cumulative gain of the first k, NDCG@k.

  With the discount 1 / log2(rank + 2), rank from 0, divided by the largest
  possible sum for the user's number of held-out items. Among drawn items, each
  held-out item is ranked by itself, and the largest possible gain is 1.
  """

  prefix = 'ndcg'

  def up_to(self, rank: tf.Tensor, held_out: tf.Tensor) -> tf.Tensor:
    """Return the sum of normalized discounts of ranks below `rank`."""
    first = tf.range(self.k, dtype=tf.float64)
    discounts = tf.math.log(tf.constant(2.0, tf.float64)) / tf.math.log(
      first + 2
    )
    sums = tf.concat([[0.0], tf.cumsum(discounts)], 0)

    def of(number: tf.Tensor) -> tf.Tensor:
      return tf.gather(sums, tf.cast(tf.minimum(number, self.k), tf.int32))

    held_out = tf.maximum(held_out, 1)
    return of(rank) * held_out / of(held_out)


class ReciprocalRank(_Gain):
  """Mean of 1 / (rank + 1) for ranks below k, MRR@k."""

  prefix = 'mrr'

  def up_to(self, rank: tf.Tensor, held_out: tf.Tensor) -> tf.Tensor:
    """Return the harmonic number of `rank`, at most that of `k`."""
    del held_out
    one = tf.constant(1.0, tf.float64)
    rank = tf.minimum(rank, self.k)
    return tf.math.digamma(rank + 1) - tf.math.digamma(one)


class CatalogueCoverage(tf.keras.metrics.Metric):
  """Share of the catalogue that is among the first k items of some user."""

  def __init__(self, num_items: int, k: int = 10, **kw: Any):
    """Make the metric.

    Args:
      num_items: Number of items of the catalogue.
      k: Number of first items, at most as many as the evaluation keeps.
      **kw: Arguments of every metric.
    """
    checked_numbers.check_whole(SettingError, 1, num_items=num_items, k=k)
    super().__init__(**{'name': f'catalogue_coverage_{k}', **kw})
    self.num_items = num_items
    self.k = k
    self.shown = self.add_weight(
      name='shown', shape=[num_items], initializer='zeros'
    )

  @tf.autograph.experimental.do_not_convert  # It would hide the error.
  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> None:
    """Add the first items of users, which count if their weight is above 0."""
    del y_true
    top = y_pred['top']
    if top.shape[1] < self.k:
      raise SettingError(
        f'CatalogueCoverage: the evaluation keeps the first {top.shape[1]} '
        f'items, but k={self.k}. Pass num_top={self.k} to build_ranking_eval.'
      )
    top = top[:, : self.k]
    counts = tf.ones_like(top, tf.float32)
    if sample_weight is not None:
      is_real = tf.reshape(sample_weight, [-1, 1]) > 0
      counts *= tf.cast(is_real, tf.float32)
    self.shown.assign_add(
      tf.math.unsorted_segment_sum(
        tf.reshape(counts, [-1]), tf.reshape(top, [-1]), self.num_items
      )
    )

  def result(self) -> tf.Tensor:
    """Return the share of items that were shown; NaN without a user."""
    shown = tf.cast(self.shown > 0, tf.float32)
    share = tf.reduce_mean(shown)
    return tf.where(share > 0, share, float('nan'))

  def get_config(self) -> dict[str, Any]:
    """Return the metric's configuration."""
    return {**super().get_config(), 'num_items': self.num_items, 'k': self.k}


def ranking_metrics(
  k: int = 10, num_negatives: int = 99
) -> Callable[[], list[tf.keras.metrics.Metric]]:
  """Return a factory of hit rate and NDCG, among drawn items and all.

  Args:
    k: Number of ranks with a gain.
    num_negatives: Number of drawn items.
  """
  return lambda: [
    HitRate(k, num_negatives),
    NDCG(k, num_negatives),
    HitRate(k),
    NDCG(k),
    ReciprocalRank(k),
  ]
