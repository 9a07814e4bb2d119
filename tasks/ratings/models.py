"""Losses and metrics of ratings on a scale of any extent.

The model is that of the MovieLens task. On a scale other than 1 to 5, vectors,
loss and therefore training steps are the same as for ratings from 1 to 5: the
scale's extent corresponds to four stars.
"""

from typing import Any

import tensorflow as tf

from tasks.movielens import models as movielens_models

Scale = movielens_models.Scale


def unit_of(scale: Scale) -> float:
  """Return the size of one star on a scale from lowest to highest rating."""
  lowest, highest = scale
  return (highest - lowest) / 4.0


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class SquaredStars(tf.keras.losses.MeanSquaredError):
  """Mean squared error in stars."""

  def __init__(self, unit: float = 1.0, **kwargs: Any):
    """Make the loss, with the size of one star on the scale of the ratings."""
    super().__init__(**kwargs)
    self.unit = unit

  def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return super().call(
      tf.cast(y_true, y_pred.dtype) / self.unit, y_pred / self.unit
    )

  def get_config(self) -> dict[str, Any]:
    return {**super().get_config(), 'unit': self.unit}


def build_metrics(
  scale: Scale | None, step: float | None
) -> list[tf.keras.metrics.Metric]:
  """Build the metrics `rmse`, `mae` and, of ratings in steps, `accuracy`.

  Accuracy is the share of predictions within half a step, the distance of
  neighbouring ratings; the step is None where there are not a few.
  """
  metrics = [
    movielens_models.RatingError(scale),
    movielens_models.AbsoluteError(scale),
  ]
  if step is not None:
    metrics.append(movielens_models.RatingAccuracy(scale, step / 2.0))
  return metrics
