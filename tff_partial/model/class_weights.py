"""Class weights: weights of examples in the loss, by label."""

from collections.abc import Mapping
import math
from typing import Any

import tensorflow as tf

from tff_partial.data import id_ranges
from tff_partial.model import keras_metrics
from tff_partial.model.keras_variables import ModelError


class ClassWeights:
  """A weight for each class, as for Keras's `fit(class_weight=)`.

  Attributes:
    values: The weights, by class.
    are_one_hot: True if labels are one-hot vectors, not class numbers.
  """

  def __init__(
    self, given: Mapping[int, float], labels: tf.TensorSpec, outputs: Any
  ):
    """Check weights against the model's predictions.

    Args:
      given: Class to weight, for all classes from 0 on.
      labels: Spec of one example's label.
      outputs: Spec of one example's prediction: a number for each class, or one
        number for two classes.

    Raises:
      ModelError: If the model has other classes, if labels do not name
        classes, or if a weight is negative or not finite.
    """
    if not isinstance(given, Mapping):
      raise ModelError(
        f'class_weight={given!r}: expected a mapping from class to weight, '
        'such as {0: 1.0, 1: 5.0}.'
      )
    if not isinstance(outputs, tf.TensorSpec):
      raise ModelError(
        'class_weight: the model has several outputs, so it is unclear '
        'whose classes are meant. Give examples weights instead, in the field '
        '`weight`.'
      )
    shape = outputs.shape.as_list()
    has_axis = bool(shape) and shape[-1] != 1
    count = shape[-1] if has_axis else 2
    if sorted(given) != list(range(count)):
      raise ModelError(
        f'class_weight has the classes {sorted(given)}, but the model predicts '
        f'{count}: give a weight for each of 0 to {count - 1}.'
      )
    self.values = [float(given[label]) for label in range(count)]
    for label, value in enumerate(self.values):
      if not (math.isfinite(value) and value >= 0.0):
        raise ModelError(
          f'class_weight: class {label} has the weight {value}. Give finite '
          'numbers that are not negative.'
        )
    # The shape of a label without the axis of classes or of one number.
    inner = shape[:-1] if shape and (has_axis or shape[-1] == 1) else shape
    label_shape = labels.shape.as_list()
    self.are_one_hot = has_axis and label_shape == shape
    if not self.are_one_hot and label_shape not in (inner, [*inner, 1]):
      raise ModelError(
        f'class_weight: a label has the shape {label_shape}, from which no '
        f'class follows where a prediction has {shape}. Give examples weights '
        'instead, in the field `weight`.'
      )
    self._drops_axis = label_shape == [*inner, 1]

  @property
  def ids(self) -> id_ranges.Ids:
    """Valid labels, by field, if they are class numbers."""
    if self.are_one_hot:
      return {}
    count = len(self.values)
    return {
      'y': (id_ranges.IdRange(count, f'there are {count} class weights'),)
    }

  def of(self, labels: tf.Tensor, rank: int) -> tf.Tensor:
    """Look up the weights of examples by their labels.

    Args:
      labels: `[batch, ...]`.
      rank: Rank of the losses to multiply.

    Returns:
      float32 tensor of this rank.
    """
    if self.are_one_hot:
      classes = tf.argmax(labels, axis=-1)
    else:
      classes = tf.cast(
        labels[..., 0] if self._drops_axis else labels, tf.int32
      )
      # Clip classes that the loss ignores: they need no weight.
      classes = tf.clip_by_value(classes, 0, len(self.values) - 1)
    weights = tf.gather(tf.constant(self.values, tf.float32), classes)
    return keras_metrics.expand(weights, rank, 'The class weight')
