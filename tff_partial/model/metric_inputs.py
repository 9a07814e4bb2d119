"""Labels and weights in the shapes that Keras's metrics take."""

from typing import Any

import tensorflow as tf

from tff_partial.model import losses

# Metrics that compare predictions with thresholds.
_THRESHOLDED = (
  tf.keras.metrics.AUC,
  tf.keras.metrics.FalseNegatives,
  tf.keras.metrics.FalsePositives,
  tf.keras.metrics.Precision,
  tf.keras.metrics.PrecisionAtRecall,
  tf.keras.metrics.Recall,
  tf.keras.metrics.RecallAtPrecision,
  tf.keras.metrics.SensitivityAtSpecificity,
  tf.keras.metrics.SpecificityAtSensitivity,
  tf.keras.metrics.TrueNegatives,
  tf.keras.metrics.TruePositives,
)


def aligned(
  metric: tf.keras.metrics.Metric,
  labels: Any,
  predictions: Any,
  weight: tf.Tensor,
) -> tuple[Any, Any, tf.Tensor]:
  """Return labels, predictions and weights as a metric's `update_state` reads.

  Args:
    metric: The metric; others than Keras's own read them as they are.
    labels: `[batch, ...]`.
    predictions: `[batch, ...]`.
    weight: Weights of examples, `[batch]`, or of their steps, `[batch, ...]`.
  """
  has_steps, what = weight.shape.rank > 1, 'The weight of examples'
  if isinstance(metric, (tf.keras.metrics.MeanMetricWrapper, *_THRESHOLDED)):
    labels, predictions = losses.aligned(labels, predictions, has_steps)
  if isinstance(metric, _THRESHOLDED) and tf.is_tensor(predictions):
    # They add only one axis to weights.
    rank = max(weight.shape.rank, predictions.shape.rank - 1)
    weight = losses.expand(weight, rank, what)
  elif isinstance(metric, tf.keras.metrics.IoU) and tf.is_tensor(labels):
    # They take a weight for each label.
    of = labels if metric.sparse_y_true else labels[..., 0]
    weight = losses.expand(weight, of.shape.rank, what)
    weight *= tf.ones(tf.shape(of), weight.dtype)
  return labels, predictions, weight
