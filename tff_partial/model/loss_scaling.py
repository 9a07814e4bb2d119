"""Loss scaling for layers that compute in float16.

Gradients below 6e-8 vanish in float16. Those of a model's predictions are
multiplied by a constant before layers see them, and those of its weights, in
float32, divided by it (Micikevicius et al., Mixed precision training, ICLR
2018, section 3.2). So all that takes gradients has those of the loss itself.
Deviation: the constant stays, where Keras's `LossScaleOptimizer` lowers and
raises it and leaves steps out; where it overflows, the client counts as one
whose training came to values that are not finite.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Leaves gradients of means of examples up to 64, and from 6e-11.
SCALE = 1024.0


def scale_of(layers: Sequence[tf.keras.layers.Layer]) -> float:
  """Return the loss scale that a model with these layers needs."""
  halved = any(layer.compute_dtype == 'float16' for layer in layers)
  return SCALE if halved else 1.0


def scaled(values: Any, scale: float) -> Any:
  """Multiply the gradients, not the values, of all floats in a structure."""
  if scale == 1.0:
    return values

  @tf.custom_gradient
  def same(value: tf.Tensor) -> Any:
    def slope(upstream: Any) -> Any:
      if isinstance(upstream, tf.IndexedSlices):
        values, *rest = upstream.values, upstream.indices, upstream.dense_shape
        return tf.IndexedSlices(scale * values, *rest)
      return scale * upstream

    return tf.identity(value), slope

  def apply(value: tf.Tensor) -> tf.Tensor:
    if not value.dtype.is_floating:
      return value
    found = same(value)
    if hasattr(value, '_keras_mask'):
      found._keras_mask = value._keras_mask
    return found

  return tf.nest.map_structure(apply, values)
