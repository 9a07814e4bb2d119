"""Check that a loss is convex and curved, so that a solve finds its minimum."""

from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.solvers import affine
from tff_partial.solvers import newton
from tff_partial.solvers.exact import ExactError

# Number of random examples on which a loss is tried.
_TRIED = 16


def check(model: models.PartialModel, loss: Any = None) -> None:
  """Check that a loss is convex and curved in the predictions.

  It is tried on random predictions: curvatures from 0 to 1, and slopes also
  outside, where Keras clips what is to be a probability.

  Args:
    model: The model.
    loss: A loss that replaces the model's own.
  """
  if getattr(loss or model.loss_function, 'has_weights', False):
    raise ExactError(
      'Exact: examples have a weight for each output. Give them one weight.'
    )
  draw = np.random.default_rng(0)
  with tf.__internal__.FuncGraph('curvature').as_default():

    def drawn(
      spec: tf.TensorSpec, low: float = 0.0, high: float = 1.0
    ) -> tf.Tensor:
      shape = [_TRIED, *(2 if size is None else size for size in spec.shape)]
      if spec.dtype.is_floating:
        return tf.constant(draw.uniform(low, high, shape), spec.dtype)
      return tf.cast(tf.constant(draw.integers(0, 2, shape)), spec.dtype)

    labels = tf.nest.map_structure(drawn, model.example_spec['y'])
    near = tf.nest.map_structure(drawn, model.prediction_spec)
    far = tf.nest.map_structure(
      lambda spec: drawn(spec, -2.0, 3.0), model.prediction_spec
    )
    is_real = tf.fill([_TRIED], True)
    weight = tf.ones([_TRIED, *model.example_spec['weight'].shape])
    objective = newton.Objective(
      lambda found: model.loss(labels, found, weight, is_real, (), loss),
      None,
      False,
    )
    try:
      slopes, curvature, _ = newton.derivatives(objective, near)
      values = tracing.value_of(tf.cast(curvature, tf.float64))
      slopes -= newton.derivatives(objective, far)[0]
      moved = affine.by_example(near) - affine.by_example(far)
      rises = tracing.value_of(tf.reduce_sum(slopes * moved, 1))
    except (AttributeError, LookupError, ValueError) as error:
      raise _not_convex('has no second derivative by prediction') from error
  if not np.abs(values).max() > 0:
    raise _not_convex('has no curvature: its second derivative is zero')
  least = np.linalg.eigvalsh(values).min()
  if least < -1e-4 * np.abs(values).max():
    raise _not_convex(
      f'is not convex: a second derivative by prediction is {least:.3g}'
    )
  rises = np.nan_to_num(rises)
  if rises.min() < -1e-4 * np.abs(rises).max():
    raise _not_convex('is not convex: its slope falls where predictions grow')


def _not_convex(why: str) -> ExactError:
  return ExactError(
    f'Exact: the loss {why}. Take the squared error or a cross-entropy with '
    'from_logits=True, or train with an optimizer.'
  )
