"""States of a client's metrics, which are summed over clients and finalized."""

import collections
from typing import Any

import tensorflow as tf

from tff_partial.client import local_training
from tff_partial.model import keras_metrics
from tff_partial.model import models


def metric_finalizers(
  model: models.PartialModel,
) -> collections.OrderedDict[str, Any]:
  """Return, by name, functions from a metric's summed state to its value."""
  count = tf.function(lambda state: state[0])
  mean = tf.function(lambda state: tf.math.divide_no_nan(state[0], state[1]))
  finalizers = collections.OrderedDict({keras_metrics.LOSS: mean})
  if model.is_regularized:
    finalizers[keras_metrics.REGULARIZATION] = mean
  finalizers.update(model.metrics.finalizers())
  for name in ('num_examples', 'num_clients', 'num_not_finite'):
    finalizers[name] = count
  return finalizers


def unfinalized_metrics(result: local_training.ClientResult) -> Any:
  """Return a client's metric states; zeros if it does not count."""
  counts = result.is_finite & result.is_measured
  loss, number, *penalty = result.loss
  states = collections.OrderedDict({keras_metrics.LOSS: [loss, number]})
  if penalty:
    # Separate from the loss; Keras's `evaluate` reports the sum of both.
    states[keras_metrics.REGULARIZATION] = [*penalty, number]
  states.update(result.metrics)
  states['num_examples'] = [result.num_examples]
  states['num_clients'] = [tf.ones([], tf.int32)]
  states = collections.OrderedDict(
    (name, [tf.where(counts, t, tf.zeros_like(t)) for t in tensors])
    for name, tensors in states.items()
  )
  states['num_not_finite'] = [tf.cast(~result.is_finite, tf.int32)]
  return states
