"""Tensors that differ between lanes, and those that do not."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class UnfitForLanesError(ValueError):
  """What a client computes cannot be computed for several in lock-step."""


class Value(NamedTuple):
  """A tensor, and whether its leading dimension is that of the lanes.

  A list of tensors (`tf.TensorArray`) always has lanes in each of its elements;
  here it has lanes if elements differ between them.
  """

  tensor: tf.Tensor
  has_lanes: bool


def spread(value: Value, number: int) -> Value:
  """The same value with lanes.

  Args:
    value: The value.
    number: How many lanes there are.
  """
  tensor = value.tensor
  if value.has_lanes:
    return value
  if tensor.dtype == tf.variant:
    return Value(tensor, True)
  shape = tf.concat([[number], tf.shape(tensor)], 0)
  result = tf.broadcast_to(tensor[tf.newaxis], shape)
  result.set_shape([number, *tensor.shape])
  return Value(result, True)


def same_in_all(value: Value) -> tf.Tensor:
  """A place in a list, or its length."""
  if value.has_lanes:
    raise UnfitForLanesError('lanes would read different places of a list')
  return value.tensor


def selected(
  mask: tf.Tensor, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
  """New values in the lanes of a mask, old ones elsewhere."""
  values = []
  for one, other in zip(new, old, strict=True):
    if one.tensor.dtype == tf.variant:
      raise UnfitForLanesError('lanes would need lists of different lengths')
    tensor = tf.raw_ops.Select(condition=mask, x=one.tensor, y=other.tensor)
    tensor.set_shape(one.tensor.shape)
    values.append(Value(tensor, True))
  return values
