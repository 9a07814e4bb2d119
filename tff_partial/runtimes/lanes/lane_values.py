"""Tensors that may differ between lanes."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf


class UnfitForLanesError(ValueError):
  """Several clients cannot run a computation in lock-step."""


class Value(NamedTuple):
  """Tensor, and whether its leading dimension is that of the lanes.

  A list of tensors (`tf.TensorArray`) always has lanes in each of its elements;
  here it has lanes if elements differ between them.
  """

  tensor: tf.Tensor
  has_lanes: bool


def spread(value: Value, number: int) -> Value:
  """Return the same value with lanes.

  Args:
    value: The value.
    number: The number of lanes.
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
  """Return a place in a list, or its length, which must have no lanes."""
  if value.has_lanes:
    raise UnfitForLanesError('lanes would read different places of a list')
  return value.tensor


def selected(
  mask: tf.Tensor, new: Sequence[Value], old: Sequence[Value]
) -> list[Value]:
  """Select new values in the lanes of a mask, old ones elsewhere."""
  values = []
  for one, other in zip(new, old, strict=True):
    if one.tensor.dtype == tf.variant:
      raise UnfitForLanesError('lanes would need lists of different lengths')
    tensor = tf.raw_ops.Select(condition=mask, x=one.tensor, y=other.tensor)
    tensor.set_shape(one.tensor.shape)
    values.append(Value(tensor, True))
  return values
