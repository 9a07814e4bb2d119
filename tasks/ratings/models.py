"""How errors of ratings on a scale of any extent are trained and measured.

The model is that of the MovieLens task. On a scale other than one from 1 to 5,
its vectors, its loss and so the steps of training are those that ratings from 1
to 5 would have: what is four stars there is the extent of the scale.
"""

from typing import Any

import tensorflow as tf

from tasks.movielens import models as movielens_models

Scale = movielens_models.Scale


def unit_of(scale: Scale) -> float:
  """What a star is on a scale from a lowest to a highest rating."""
  lowest, highest = scale
  return (highest - lowest) / 4.0


@tf.keras.saving.register_keras_serializable(package='tff_partial')
class SquaredStars(tf.keras.losses.MeanSquaredError):
  """Mean squared error in stars."""

  def __init__(self, unit: float = 1.0, **kwargs: Any):
    """Make the loss.

    Args:
      unit: What a star is on the scale of the ratings.
      **kwargs: What every loss takes.
    """
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

  Args:
    scale: Limits to which predictions are clipped first, or None.
    step: The distance of neighbouring ratings: accuracy is the share of
      predictions at most half of it off, which is to say that they round to the
      rating. None for ratings that are no few steps.
  """
  metrics = [
    movielens_models.RatingError(scale),
    movielens_models.AbsoluteError(scale),
  ]
  if step is not None:
    metrics.append(movielens_models.RatingAccuracy(scale, step / 2.0))
  return metrics
