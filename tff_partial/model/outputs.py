"""Losses and metrics of models with several outputs, as Keras's `compile` has.

    from_keras(
      build,
      loss={'rating': 'mse', 'genre': 'sparse_categorical_crossentropy'},
      loss_weights={'genre': 0.1},
      metrics={'genre': ['accuracy']},
    )

The objective is the weighted sum of the outputs' mean losses. Labels are a
structure like the losses: a mapping by output, or a tuple in order.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from tff_partial.arguments import checked_numbers
from tff_partial.errors import SettingError
from tff_partial.model import losses
from tff_partial.model import tracing
from tff_partial.model.keras_functions import mask_of
from tff_partial.model.keras_variables import ModelError

Places: TypeAlias = Mapping[Any, int] | None


def by_output(given: Any) -> dict[Any, Any]:
  """Return what is given for each output, by its name or its place."""
  if isinstance(given, Mapping):
    return dict(given)
  return dict(enumerate(given))


def num_features(
  prediction_spec: Any, features: Callable[[Any], tf.Tensor]
) -> int:
  """Return the length of an example's features.

  Args:
    prediction_spec: Specs of one example's prediction.
    features: (a batch of the model's outputs) -> features `[batch, size]`.

  Raises:
    SettingError: If they are no vector of a known length.
  """
  found = features(tracing.one_example(prediction_spec))
  if found.shape.rank != 2 or found.shape[-1] is None:
    raise SettingError(
      f'features: those of one example are {found.shape[1:]}, not a vector.'
    )
  return int(found.shape[-1])


def are_several(given: Any) -> bool:
  """Return True if something is given by output."""
  return isinstance(given, (Mapping, list, tuple))


class LossOfOutputs:
  """A loss for each output, as one function of labels and predictions.

  Attributes:
    losses: Output to its loss, for outputs that have one.
    scales: Output to the weight of its loss.
    places: Output to the place of its label, of losses in a sequence.
    has_weights: True if examples have a weight for each output.
  """

  def __init__(self, given: Any, loss_weights: Any, weights: tf.TensorSpec):
    """Check the losses.

    Args:
      given: A loss for each output, a mapping or a sequence; None for none.
      loss_weights: Weights of some of them, in the same form; 1 by default.
      weights: Spec of an example's weight: a number, or one for each output
        with a loss.
    """
    self.losses = {
      output: losses.as_loss(loss)
      for output, loss in by_output(given).items()
      if loss is not None
    }
    if not self.losses:
      raise ModelError(f'loss={given!r}: no output has a loss.')
    self.places = None
    if not isinstance(given, Mapping):
      self.places = {o: place for place, o in enumerate(self.losses)}
    summed = [o for o, loss in self.losses.items() if losses.is_summed(loss)]
    if summed:
      raise ModelError(
        f'loss: those of the outputs {summed} are sums (reduction SUM), while '
        'others are means over examples. Weigh means with loss_weights=...'
      )
    scales = by_output(() if loss_weights is None else loss_weights)
    unknown = sorted(set(scales) - set(self.losses), key=str)
    if unknown:
      raise ModelError(
        f'loss_weights: {unknown} are no outputs with a loss, which are '
        f'{list(self.losses)}.'
      )
    for output, scale in scales.items():
      wrong = checked_numbers.why_not_finite(scale)
      if wrong:
        raise ModelError(f'loss_weights[{output!r}]: {wrong}.')
    self.scales = {o: float(scales.get(o, 1.0)) for o in self.losses}
    shape = tuple(weights.shape)
    self.has_weights = shape == (len(self.losses),)
    if shape and not self.has_weights:
      raise ModelError(
        f'weights={weights}: with several outputs, an example has one weight, '
        f'or {len(self.losses)}: one for each output with a loss.'
      )

  @property
  def __name__(self) -> str:
    """The losses in words."""
    said = (
      f'{output}: {getattr(loss, "__name__", type(loss).__name__)}'
      for output, loss in self.losses.items()
    )
    return f'{{{", ".join(said)}}}'

  def labels(self, outputs: Any, given: Any = None) -> Any:
    """Return the specs of labels that fit predictions.

    Args:
      outputs: Specs of the predictions.
      given: Specs of labels, which are put in the order of weights; or None.

    Raises:
      ModelError: If the model has other outputs.
    """
    known = by_output(outputs) if are_several(outputs) else {'': outputs}
    unknown = [output for output in self.losses if output not in known]
    if unknown:
      raise ModelError(
        f'loss: the model has no outputs {unknown}, but {list(known)}. Let it '
        'return a mapping to name them, '
        "`tf.keras.Model(inputs, {'name': output})`."
      )
    if isinstance(given, Mapping) and self.places is None:
      names = dict.fromkeys([*self.losses, *given])
      return {o: given[o] for o in names if o in given}
    if given:
      return given
    found = {
      output: losses.assumed_labels(known[output], loss)
      for output, loss in self.losses.items()
    }
    return found if self.places is None else tuple(found.values())

  def of(self, labels: Any) -> dict[Any, Any]:
    """Return the label of each output with a loss."""
    if self.places is None:
      return {output: labels[output] for output in self.losses}
    return dict(zip(self.losses, labels, strict=True))

  def __call__(self, labels: Any, predictions: Any) -> tf.Tensor:
    """Compute the sum of each example's losses, `[batch]`.

    If outputs have weights of their own, `[batch, outputs]`, whose mean is the
    sum over outputs.
    """
    found = by_output(predictions)
    columns = []
    for output, label in self.of(labels).items():
      loss = self.losses[output]
      label, prediction = losses.aligned(label, found[output], False)
      values = getattr(loss, 'call', loss)(label, prediction)
      for what, tensor in (('Output', found[output]), ('The loss of', values)):
        if mask_of(tensor) is not None:  # Such as of `ignore_class`.
          raise ModelError(
            f'{what} {output!r} has a mask, and so means over other steps than '
            'the other outputs. Pass one loss function over all outputs.'
          )
      values = tf.cast(values, tf.float32)
      if values.shape.rank == 0:
        raise ModelError(
          f'The loss of output {output!r} must return one loss per example, it '
          'returned a scalar. Leave the averaging to the training.'
        )
      rest = list(range(1, values.shape.rank))
      mean = tf.reduce_mean(values, rest) if rest else values
      columns.append(self.scales[output] * mean)
    if self.has_weights:
      return len(columns) * tf.stack(columns, 1)
    return tf.add_n(columns)

  def ids(self, outputs: Any) -> dict[str, Any]:
    """Return the ranges of labels that losses and predictions determine.

    Args:
      outputs: Specs of the predictions.
    """
    known = by_output(outputs)
    found = {}
    for output, loss in self.losses.items():
      path = f'.{output}' if self.places is None else f'[{self.places[output]}]'
      for field, ranges in losses.classes(None, known[output], loss).items():
        found[field + path] = ranges
    return found


def part_of(
  output: Any, labels: Any, predictions: Any, places: Places = None
) -> tuple[Any, Any]:
  """Return labels and predictions of one output, or of all.

  Args:
    output: The output; None for all.
    labels: Labels by output.
    predictions: Predictions by output.
    places: Output to its key among labels; None for the same.

  Raises:
    ModelError: If there is no such output, or it has no label.
  """
  if output is None:
    return labels, predictions
  found = []
  for what, structure, keys in (
    ('label', labels, places),
    ('output', predictions, None),
  ):
    try:
      found.append(structure[output if keys is None else keys[output]])
    except (KeyError, IndexError, TypeError):
      raise ModelError(
        f'metrics: there is no {what} {output!r}. An output that is measured '
        'has a loss, too.'
      ) from None
  return found[0], found[1]


def weight_of(
  output: Any, labels: Any, weight: tf.Tensor, places: Places = None
) -> tf.Tensor:
  """Return the weights of examples for one output, or for all.

  Args:
    output: The output; None for all.
    labels: Labels by output.
    weight: `[batch]`, or `[batch, outputs]`.
    places: As for `part_of`.
  """
  if output is None or weight.shape.rank < 2:
    return weight
  output = output if places is None else places[output]
  return weight[:, list(by_output(labels)).index(output)]


def as_loss(given: Any, loss_weights: Any, weights: tf.TensorSpec) -> Any:
  """Convert what is given for a loss to a function or a Keras loss.

  Args:
    given: One loss, or one for each output.
    loss_weights: Their weights, if they are several.
    weights: Spec of an example's weight.

  Raises:
    ModelError: If it is no loss.
  """
  if are_several(given):
    return LossOfOutputs(given, loss_weights, weights)
  if loss_weights is not None:
    raise ModelError(
      f'loss_weights={loss_weights!r} weigh losses of several outputs, but '
      'there is one loss. Give a mapping or list of losses, or leave it out.'
    )
  return losses.as_loss(given)
