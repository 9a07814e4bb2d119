"""Losses as functions of labels and predictions, from any Keras form."""

from collections.abc import Callable
import dataclasses
from typing import Any

import tensorflow as tf

from tff_partial.data import id_ranges
from tff_partial.model import keras_3
from tff_partial.model.keras_variables import ModelError

LossFn = Callable[[Any, Any], tf.Tensor]


def assumed_labels(
  outputs: Any, loss: LossFn | tf.keras.losses.Loss
) -> tf.TensorSpec:
  """Return the spec of a label that fits the predictions and the loss."""
  if not isinstance(outputs, tf.TensorSpec):
    raise ModelError(
      'The model has several outputs. Pass the spec of one label with '
      '`labels=tf.TensorSpec(...)`, and a loss function over the outputs.'
    )
  name = type(loss).__name__ + getattr(loss, '__name__', '')
  if 'sparse' in name.lower():
    return tf.TensorSpec(outputs.shape[:-1], tf.int32)
  return tf.TensorSpec(outputs.shape, outputs.dtype)


def as_loss(loss: Any) -> LossFn | tf.keras.losses.Loss:
  """Convert a loss as for Keras's `compile` to a function or Keras loss."""
  if isinstance(loss, str):
    try:
      loss = tf.keras.losses.get(loss)
    except ValueError:
      raise ModelError(
        f'Keras has no loss {loss!r}. Pass one of its names, such as '
        "'mse' or 'sparse_categorical_crossentropy', a Keras loss, or a "
        'function of labels and predictions.'
      ) from None
  if isinstance(loss, type):
    raise ModelError(
      f'loss={loss.__name__} is a class; pass an instance: {loss.__name__}().'
    )
  if not callable(loss):
    raise ModelError(
      f'loss={loss!r} is no loss. Pass a Keras loss or its name, or a function '
      'of labels and predictions that returns one loss per example.'
    )
  return loss


def classes(
  labels: Any, outputs: Any, loss: LossFn | tf.keras.losses.Loss
) -> id_ranges.Ids:
  """Return the range of labels, if loss and predictions determine it."""
  kinds = [tf.keras.losses.SparseCategoricalCrossentropy]
  if keras := keras_3.module():
    kinds.append(keras.losses.SparseCategoricalCrossentropy)
  if type(loss) in kinds:
    ignored = getattr(loss, '_fn_kwargs', {}).get('ignore_class')
  elif loss is tf.keras.losses.sparse_categorical_crossentropy:
    ignored = None
  else:
    return {}
  if not isinstance(outputs, tf.TensorSpec) or not outputs.shape.rank:
    return {}
  classes = outputs.shape[-1]
  described = f'the model predicts {classes} classes'
  return {'y': (id_ranges.IdRange(classes, described, ignored=ignored),)}


def is_of_keras(loss: Any) -> bool:
  """Return true for Keras's own losses, not for a user's function or class."""
  named = loss if hasattr(loss, '__name__') else type(loss)
  module = getattr(named, '__module__', None) or ''
  return module.split('.')[0] in ('keras', 'tf_keras')


def aligned(labels: Any, predictions: Any, has_steps: bool) -> tuple[Any, Any]:
  """Give labels and predictions the same rank, as Keras's `fit` does.

  If one of them has an extra last axis of size 1, the other would broadcast
  over the batch. One number per example gets a last axis, since Keras's losses
  average over the last axis, which must not be the batch. Otherwise Keras drops
  the axis and so averages over steps; if steps are weighted or masked, the axis
  is added to the other instead, so that each step keeps its loss.

  Args:
    labels: `[batch, ...]`; anything but a tensor is returned unchanged.
    predictions: `[batch, ...]`, likewise.
    has_steps: True if the steps of an example are weighted or masked.
  """
  if not (tf.is_tensor(labels) and tf.is_tensor(predictions)):
    return labels, predictions
  ranks = labels.shape.rank, predictions.shape.rank
  if ranks == (1, 1):
    return labels[:, None], predictions[:, None]
  if ranks[0] - ranks[1] == 1 and labels.shape[-1] == 1:
    predictions, labels = aligned(predictions, labels, has_steps)
  elif ranks[1] - ranks[0] == 1 and predictions.shape[-1] == 1:
    if has_steps or ranks[0] == 1:
      labels = labels[..., None]
    else:
      predictions = tf.squeeze(predictions, -1)
  return labels, predictions


@dataclasses.dataclass(frozen=True)
class LossValue:
  """The loss of a batch.

  Attributes:
    objective: The value that training minimizes; scalar.
    total: Sum of the examples' weighted losses; scalar.
    num_elements: Number of summed losses, without padding; scalar.
    regularization: Losses that layers add to the objective; scalar.
  """

  objective: tf.Tensor
  total: tf.Tensor
  num_elements: tf.Tensor
  regularization: tf.Tensor
