"""F1 of users' likes and dislikes, averaged over sub-populations.

FedEmbed prints one number that it calls F1. Its 0.33 for a constant predictor,
with no deviation, fits only one reading: macro over the two labels within a
sub-population, then averaged over sub-populations. For users who like half of
their examples, a constant "no" has an F1 of 2/3 for no and of 0 for yes: 1/3.

All functions take counts of shape `[..., 4]`, in the order tp, fp, fn, tn:
liked examples predicted to be liked (true positives), disliked ones predicted
to be liked (false positives), liked ones predicted to be disliked (false
negatives), and disliked ones predicted so (true negatives).
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tasks.preference.losses import IS_LIKED
from tasks.preference.losses import IS_PROTOTYPICAL
from tasks.preference.losses import logits_of
from tasks.preference.losses import SUB_POPULATION

COUNTS = ('tp', 'fp', 'fn', 'tn')


def macro(counts: Any) -> tf.Tensor:
  """Return the mean F1 of both labels, `[...]`; 0 without examples."""
  tp, fp, fn, tn = tf.unstack(tf.cast(counts, tf.float32), 4, axis=-1)
  wrong = fp + fn
  yes = tf.math.divide_no_nan(2 * tp, 2 * tp + wrong)
  no = tf.math.divide_no_nan(2 * tn, 2 * tn + wrong)
  return (yes + no) / 2


def average(counts: Any, is_weighted: bool = False) -> tf.Tensor:
  """Compute FedEmbed's F1: macro per sub-population, then their mean.

  Sub-populations without examples are left out; without any example the result
  is NaN. If it is weighted, sub-populations count by their examples.
  """
  sizes = tf.reduce_sum(tf.cast(counts, tf.float32), axis=-1)
  weights = sizes if is_weighted else tf.cast(sizes > 0, tf.float32)
  return tf.reduce_sum(macro(counts) * weights) / tf.reduce_sum(weights)


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class PreferenceF1(tf.keras.metrics.Metric):
  """F1 over some sub-populations; its state is the counts, `[groups, 4]`.

  Labels are those of `preference_models`, predictions logits `[batch, 2]`, or a
  mapping of outputs that includes them. Without users of the sub-populations
  the result is NaN.
  """

  def __init__(
    self,
    groups: Sequence[int],
    is_weighted: bool = False,
    counts_told: bool = True,
    name: str = 'f1',
    **kwargs: Any,
  ):
    """Make the metric of some sub-populations.

    Args:
      groups: The sub-populations.
      is_weighted: True to weight them by their examples.
      counts_told: False to leave out prototypical users, who are told their
        sub-population.
      name: The metric's name.
      **kwargs: Keras's other arguments.
    """
    super().__init__(name=name, **kwargs)
    self.groups = list(groups)
    self.is_weighted = is_weighted
    self.counts_told = counts_told
    self.counts = self.add_weight(
      name='counts', shape=[len(self.groups), len(COUNTS)], initializer='zeros'
    )

  def update_state(
    self,
    y_true: tf.Tensor,
    y_pred: tf.Tensor,
    sample_weight: tf.Tensor | None = None,
  ) -> Any:
    is_liked = tf.cast(y_true[:, IS_LIKED], tf.bool)
    logits = logits_of(y_pred)
    says_so = logits[:, 1] > logits[:, 0]
    places = 2 * tf.cast(~says_so, tf.int32) + tf.cast(~is_liked, tf.int32)
    cells = tf.one_hot(places, len(COUNTS), dtype=self.counts.dtype)
    is_wrong = tf.reduce_any(tf.math.is_nan(logits), -1, keepdims=True)
    cells = tf.where(is_wrong, tf.constant(float('nan'), cells.dtype), cells)
    if sample_weight is not None:
      cells *= tf.cast(sample_weight, cells.dtype)[:, tf.newaxis]
    if not self.counts_told:
      is_told = tf.cast(y_true[:, IS_PROTOTYPICAL, tf.newaxis], cells.dtype)
      cells *= 1.0 - is_told
    is_of = tf.equal(
      y_true[:, SUB_POPULATION, tf.newaxis],
      tf.constant([self.groups], y_true.dtype),
    )
    return self.counts.assign_add(
      tf.matmul(tf.cast(is_of, cells.dtype), cells, transpose_a=True)
    )

  def result(self) -> tf.Tensor:
    return average(self.counts, self.is_weighted)

  def get_config(self) -> dict[str, Any]:
    return {
      **super().get_config(),
      'groups': self.groups,
      'is_weighted': self.is_weighted,
      'counts_told': self.counts_told,
    }


def build_metrics(shares: Sequence[float]) -> list[tf.keras.metrics.Metric]:
  """Build `f1`, `f1_not_told`, `f1_weighted`, and the F1 of sub-populations.

  The latter are `f1_0`, `f1_1`, ... of single sub-populations, and if some are
  more common than others also `f1_share_0.25`, ... of those that are equally
  common (FedEmbed's Table 4).
  """
  groups = range(len(shares))
  equally_common = {
    share: [g for g in groups if shares[g] == share]
    for share in sorted(set(shares), reverse=True)
  }
  if len(equally_common) == 1:
    equally_common = {}
  return [
    PreferenceF1(groups),
    PreferenceF1(groups, counts_told=False, name='f1_not_told'),
    PreferenceF1(groups, is_weighted=True, name='f1_weighted'),
    *(PreferenceF1([g], name=f'f1_{g}') for g in groups),
    *(
      PreferenceF1(members, name=f'f1_share_{share:g}')
      for share, members in equally_common.items()
    ),
  ]
