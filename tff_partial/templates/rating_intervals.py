"""Intervals of ratings with normal errors, and how many ratings they cover."""

from typing import Any

from scipy import stats
import tensorflow as tf

from tff_partial.errors import SettingError
from tff_partial.templates import rating_posteriors


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class IntervalCoverage(tf.keras.metrics.Mean):
  """Share of ratings within the interval that is to cover a given share."""

  def __init__(self, level: float = 0.8, name: str | None = None, **kw: Any):
    """Make the metric.

    Args:
      level: The share that intervals are to cover.
      name: The metric's name; `coverage_80` for a level of 0.8 by default.
      **kw: Arguments of every metric.

    Raises:
      SettingError: If the level is not between 0 and 1.
    """
    if not 0 < level < 1:
      raise SettingError(
        f'IntervalCoverage: level={level}: expected a share between 0 and 1, '
        'such as 0.8.'
      )
    super().__init__(name=name or f'coverage_{level * 100:g}', **kw)
    self.level = level

  def update_state(
    self, y_true: Any, y_pred: Any, sample_weight: Any = None
  ) -> Any:
    """Add a batch of labels and of outputs of the model."""
    distance = tf.abs(
      tf.reshape(y_true, [-1]) - y_pred[rating_posteriors.RATING]
    )
    is_within = distance <= half_width(
      y_pred[rating_posteriors.VARIANCE], self.level
    )
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
