"""Losses as functions of labels and predictions, from any Keras form."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from absl import logging
import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.data import id_ranges
from tff_partial.model.keras_functions import mask_of
from tff_partial.model.keras_variables import ModelError

LossFn = Callable[[Any, Any], tf.Tensor]


def assumed_labels(
  outputs: Any, loss: LossFn | tf.keras.losses.Loss, given: Any = None
) -> Any:
  """Return the spec of a label that fits the predictions and the loss."""
  if hasattr(loss, 'labels'):
    return loss.labels(outputs, given)
  if given is not None:
    return given
  if not isinstance(outputs, tf.TensorSpec):
    raise ModelError(
      'The model has several outputs. Give each a loss, `loss={name: ...}`; or '
      'pass a loss function over all outputs, and the spec of one label with '
      '`labels=tf.TensorSpec(...)`.'
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
  if getattr(loss, 'reduction', None) == 'mean_with_sample_weight':
    raise ModelError(
      "loss: its reduction 'mean_with_sample_weight' divides by weights of "
      "examples, and the loss here by their number. Take 'sum_over_batch_size'."
    )
  return loss


def classes(
  labels: Any, outputs: Any, loss: LossFn | tf.keras.losses.Loss
) -> id_ranges.Ids:
  """Return the range of labels, if loss and predictions determine it."""
  if hasattr(loss, 'ids'):
    return loss.ids(outputs)
  kind = name_in_keras(loss).replace('_', '').lower()
  if kind in ('binarycrossentropy', 'binaryfocalcrossentropy'):
    described = 'binary cross-entropy tells two classes apart'
    remedy = 'Write 0 for one and 1 for the other.'
    # Labels may be shares, which rounding can take beyond 0 and 1.
    limits = id_ranges.IdRange(2, described, remedy=remedy, slack=1e-3)
    return {'y': (limits,)}
  if kind != 'sparsecategoricalcrossentropy':
    return {}
  if not isinstance(outputs, tf.TensorSpec) or not outputs.shape.rank:
    return {}
  ignored = getattr(loss, '_fn_kwargs', {}).get('ignore_class')
  classes = outputs.shape[-1]
  described = f'the model predicts {classes} classes'
  return {'y': (id_ranges.IdRange(classes, described, ignored=ignored),)}


def name_in_keras(of: Any) -> str:
  """Return the name of a loss or metric of Keras; empty for a user's own."""
  named = of if hasattr(of, '__name__') else type(of)
  module = getattr(named, '__module__', None) or ''
  is_of_keras = module.split('.')[0] in ('keras', 'tf_keras')
  return named.__name__ if is_of_keras else ''


def _is_linear(prediction: tf.Tensor) -> bool:
  """Return True if a prediction is a sum that no activation follows."""
  operation = prediction.op
  while operation.type in ('Identity', 'Cast', 'Reshape', 'Squeeze'):
    operation = operation.inputs[0].op
  if operation.type == 'AddV2':  # A bias in Keras 3.
    return _is_linear(operation.inputs[0])
  return operation.type in ('BiasAdd', 'MatMul', 'BatchMatMulV2')


def warn_of_logits(model: Any, predictions: Any) -> None:
  """Warn of what takes sums without an activation for probabilities.

  Such are cross-entropies without `from_logits`, and beside one with it the
  metrics that compare predictions with thresholds between 0 and 1.

  Args:
    model: The model, whose loss may have one for each output.
    predictions: Symbolic predictions.
  """
  by_output = getattr(model.loss_function, 'losses', None)
  if not isinstance(by_output, dict):  # As of a Keras model that is a loss.
    by_output = {None: model.loss_function}
  for output, own in by_output.items():
    found = predictions if output is None else predictions[output]
    name = name_in_keras(own)
    is_entropy = name.replace('_', '').lower().endswith('crossentropy')
    if not (is_entropy and hasattr(found, 'op') and _is_linear(found)):
      continue
    wrong = [f'loss {name}']
    if getattr(own, '_fn_kwargs', {}).get('from_logits'):
      beside = [m for m in model.metrics.build() if m._of_output == output]
      wrong = [f'metric {m.name!r}' for m in beside if _takes_probabilities(m)]
    for what in wrong:
      logging.warning(
        'The %s%s expects probabilities, and the model ends without an '
        'activation. Pass the Keras object with from_logits=True or a '
        'threshold of 0, or end the model with a softmax or sigmoid.',
        what,
        '' if output is None else f' of output {output!r}',
      )


def _takes_probabilities(metric: tf.keras.metrics.Metric) -> bool:
  """Return True for a metric of Keras that is wrong for logits."""
  settings = {**vars(metric), **getattr(metric, '_fn_kwargs', {})}
  for name in ('_from_logits', 'from_logits'):
    if name in settings:
      return not settings[name]
  named = name_in_keras(getattr(metric, '_fn', metric))
  is_cut = settings.get('thresholds', settings.get('threshold')) in (0.5, [0.5])
  return is_cut or named in ('binary_accuracy', 'binary_crossentropy')


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
    losses: The weighted losses, 0 for padding, `[batch, ...]`.
  """

  objective: tf.Tensor
  total: tf.Tensor
  num_elements: tf.Tensor
  regularization: tf.Tensor
  losses: tf.Tensor

  @property
  def of_examples(self) -> tf.Tensor:
    """The sum of each example's weighted losses, `[batch]`."""
    return tf.reduce_sum(self.losses, range(1, self.losses.shape.rank))


def is_summed(loss: LossFn | tf.keras.losses.Loss) -> bool:
  """Return True if the objective is the sum of losses, not their mean."""
  reduction = getattr(loss, 'reduction', None)
  return bool(reduction == tf.keras.losses.Reduction.SUM)


def expand(tensor: tf.Tensor, rank: int, what: str) -> tf.Tensor:
  """Append axes to a tensor until it has a given rank.

  Raises:
    ModelError: If it has more axes; `what` names the tensor.
  """
  missing = rank - tensor.shape.rank
  if missing < 0:
    raise ModelError(
      f'{what} has {tensor.shape.rank} axes, batch included, where the losses '
      f'have {rank}. A loss function returns one loss per example, or one for '
      'each of its steps if these are weighted or masked.'
    )
  ones = tf.ones([missing], tf.int32)
  return tf.reshape(tensor, tf.concat([tf.shape(tensor), ones], 0))


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

    Raises:
      ModelError: If the model has other classes, labels do not name classes, or
        a weight is negative or not finite.
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
    for label, value in given.items():
      if wrong := checked_numbers.why_negative(value):
        raise ModelError(f'class_weight: class {label}: {wrong}.')
    self.values = [float(given[label]) for label in range(count)]
    # The shape of a label without the axis of classes or of one number.
    inner = shape[:-1]
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
    """Look up the weights of examples, float32 of a rank, by their labels."""
    if self.are_one_hot:
      classes = tf.argmax(labels, axis=-1)
    else:
      named = labels[..., 0] if self._drops_axis else labels
      classes = tf.cast(tf.round(named), tf.int32)  # As in Keras's `fit`.
      # Clip classes that the loss ignores: they need no weight.
      classes = tf.clip_by_value(classes, 0, len(self.values) - 1)
    weights = tf.gather(tf.constant(self.values, tf.float32), classes)
    return expand(weights, rank, 'The class weight')


def value_of(
  of: LossFn | tf.keras.losses.Loss,
  labels: Any,
  predictions: Any,
  weight: tf.Tensor,
  is_real: tf.Tensor,
  regularization: Sequence[tf.Tensor],
  class_weights: ClassWeights | None,
) -> LossValue:
  """Compute a loss as Keras would on the real examples alone.

  Args:
    of: The loss.
    labels: `[batch, ...]`.
    predictions: `[batch, ...]`.
    weight: float32 `[batch, ...]`, the examples' weights.
    is_real: bool `[batch]`; false for padding.
    regularization: Terms to add to the objective.
    class_weights: Weights of examples by their labels, if any.
  """
  of_labels, mask = labels, mask_of(predictions)
  is_number = tf.is_tensor(predictions) and predictions.shape.rank == 1
  if is_number or name_in_keras(of):
    has_steps = weight.shape.rank > 1 or mask is not None
    labels, predictions = aligned(labels, predictions, has_steps)
  losses = getattr(of, 'call', of)(labels, predictions)
  masks = {
    'The mask of predictions': mask,
    'The mask of losses': mask_of(losses),
  }
  losses = tf.cast(losses, tf.float32)
  if losses.shape.rank == 0:
    raise ModelError(
      'The loss function must return one loss per example, it returned a '
      'scalar. Leave the averaging to the training.'
    )
  rank = losses.shape.rank
  real = tf.cast(expand(is_real, rank, 'The padding'), tf.float32)
  for what, mask in masks.items():
    if mask is not None:
      real = real * tf.cast(expand(mask, rank, what), tf.float32)
  real = real * tf.ones_like(losses)
  weight = expand(weight, rank, 'The weight of examples')
  if class_weights is not None:
    weight *= class_weights.of(of_labels, rank)
  # Padding repeats a real example, so its loss is finite if the example's is.
  losses = losses * weight * real
  if getattr(of, 'has_weights', False):  # Their mean is the sum over outputs.
    losses, real = tf.reduce_mean(losses, 1), real[:, 0]
  total = tf.reduce_sum(losses)
  num_elements = tf.reduce_sum(real)
  if is_summed(of):
    objective = total
  else:
    objective = total / tf.maximum(num_elements, 1.0)
  penalty = tf.constant(0.0)
  for term in regularization:
    term = tf.cast(tf.reduce_sum(term), tf.float32)
    objective, penalty = objective + term, penalty + term
  return LossValue(objective, total, num_elements, penalty, losses)
