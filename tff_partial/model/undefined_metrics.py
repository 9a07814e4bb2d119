"""Values of Keras metrics that have none: NaN in place of 0."""

from typing import Any

import tensorflow as tf


def or_nan(metric: tf.keras.metrics.Metric, value: Any) -> Any:
  """Replace Keras's value of an undefined metric by NaN.

  Keras divides by zero to 0: if all of a client's examples are of one class,
  its area under the ROC curve is 0, the worst value, and counts as such in a
  mean over clients. If Keras averages over labels or classes, undefined ones
  are left out. Metrics of other classes must return NaN themselves.
  """
  metrics = tf.keras.metrics
  if isinstance(metric, metrics.AUC):
    return _area(metric, value)
  if isinstance(metric, metrics.FBetaScore):
    return _f_score(metric, value)
  counted: Any = None
  if isinstance(metric, (metrics.Mean, metrics.MeanTensor)):
    counted = metric.count
  elif isinstance(metric, metrics.Precision):
    counted = metric.true_positives + metric.false_positives
  elif isinstance(
    metric,
    (metrics.Recall, metrics.PrecisionAtRecall, metrics.RecallAtPrecision),
  ):
    counted = _positives(metric)
  elif isinstance(
    metric, (metrics.SensitivityAtSpecificity, metrics.SpecificityAtSensitivity)
  ):
    counted = _positives(metric) * _negatives(metric)
  elif isinstance(metric, metrics.IoU):
    seen = tf.reduce_sum(metric.total_cm, 0) + tf.reduce_sum(metric.total_cm, 1)
    counted = tf.reduce_sum(tf.gather(seen, metric.target_class_ids))
  elif isinstance(metric, metrics.R2Score):
    total = metric.squared_sum - metric.sum**2 / metric.count
    # Equal labels have none, up to the rounding of float32.
    counted = tf.reduce_min(total - 1e-6 * metric.squared_sum)
  if counted is None:
    return value
  counted = tf.convert_to_tensor(counted)
  if counted.shape.rank and not value.shape.rank:
    counted = counted[0]  # The same for all thresholds.
  return tf.where(counted > 0, value, tf.cast(float('nan'), value.dtype))


def _positives(metric: Any) -> tf.Tensor:
  """Count positive examples by threshold and label."""
  return metric.true_positives + metric.false_negatives


def _negatives(metric: Any) -> tf.Tensor:
  return metric.true_negatives + metric.false_positives


def _over_defined(
  value: tf.Tensor, is_defined: tf.Tensor, weights: Any = None
) -> tf.Tensor:
  """Correct a mean that counted undefined values as 0."""
  shares = tf.ones_like(is_defined, value.dtype)
  if weights is not None:
    shares = tf.cast(weights, value.dtype)
  all_of = tf.reduce_sum(shares)
  defined = tf.reduce_sum(tf.where(is_defined, shares, 0))
  # Keep the exact value if all are defined.
  mean = tf.where(defined < all_of, value * all_of / defined, value)
  return tf.where(defined > 0, mean, tf.cast(float('nan'), value.dtype))


def _area(metric: Any, value: tf.Tensor) -> tf.Tensor:
  """Average the area under a curve over the labels that have one."""
  is_defined = _positives(metric)[0] > 0
  if metric.curve.name == 'ROC':
    is_defined &= _negatives(metric)[0] > 0
  weights = metric.label_weights if metric.multi_label else None
  return _over_defined(value, is_defined, weights)


def _f_score(metric: Any, value: tf.Tensor) -> tf.Tensor:
  """Average the F score over classes with examples or predictions."""
  wrong = metric.false_positives + metric.false_negatives
  is_defined = metric.true_positives + wrong > 0
  if metric.average is None:
    return tf.where(is_defined, value, tf.cast(float('nan'), value.dtype))
  weights = None
  if metric.average == 'weighted':
    weights = metric.intermediate_weights
    is_defined = tf.convert_to_tensor(weights) > 0
  return _over_defined(value, is_defined, weights)
