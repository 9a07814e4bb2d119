"""Predictions as affine functions of some of a client's weights.

A model is affine in these weights if the Jacobian of its predictions does not
depend on them. Whether it does is read from the graph of the Jacobian, so that
no layer needs to be known by name.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.model import keras_functions
from tff_partial.model import models
from tff_partial.model import tracing
from tff_partial.solvers import linear_systems
from tff_partial.solvers.exact import ExactError

# Prefix of the names of operations that compute gradients.
_GRADIENTS = 'gradient_tape/'


class Flat:
  """Named weights of some tiers as one vector, in the order of variables.

  Attributes:
    size: The number of weights.
    static_size: The same, or None if data determine it.
  """

  def __init__(self, weights: tiers.Weights):
    self._like = weights
    leaves = _leaves(weights)
    static = [leaf.shape.num_elements() for leaf in leaves]
    self._sizes: list[Any] = static
    self.static_size: int | None = None
    if None in static:
      self._sizes = [tf.size(leaf) for leaf in leaves]
      self.size: Any = tf.add_n(self._sizes)
    else:
      self.size = self.static_size = sum(static)

  def vector(self, weights: tiers.Weights) -> tf.Tensor:
    """Return weights of the same structure as a vector."""
    flat = [tf.reshape(leaf, [-1]) for leaf in _leaves(weights)]
    return tf.cast(tf.concat(flat, 0), tf.float32)

  def named(self, vector: tf.Tensor) -> tiers.Weights:
    """Return the weights that a vector holds, by tier and name."""
    parts = iter(tf.split(vector, self._sizes))

    def next_part(tier: str, name: str, tensor: tf.Tensor) -> tf.Tensor:
      del tier, name
      return tf.cast(tf.reshape(next(parts), tf.shape(tensor)), tensor.dtype)

    return tiers.mapped(next_part, self._like)


def _leaves(weights: tiers.Weights) -> list[tf.Tensor]:
  return [tensor for named in weights.values() for tensor in named.values()]


def by_example(predictions: Any) -> tf.Tensor:
  """Return all numbers predicted for each example, `[examples, numbers]`.

  Args:
    predictions: A tensor `[examples, ...]` or a structure of them.
  """
  flat = []
  for leaf in tf.nest.flatten(predictions):
    shape = leaf.shape[1:]
    number = shape.num_elements() if shape.is_fully_defined() else -1
    numbers = tf.reshape(leaf, [tf.shape(leaf)[0], number])
    flat.append(tf.cast(numbers, tf.float32))
  return flat[0] if len(flat) == 1 else tf.concat(flat, 1)


class Linearized:
  """Predictions of a client's examples around some weights.

  Attributes:
    predictions: The model's predictions at these weights.
  """

  def __init__(self, predict: Callable[[tf.Tensor], Any], around: tf.Tensor):
    """Predict at weights, and prepare derivatives, which may not be none."""
    self._around = around
    self._outer = tf.GradientTape(
      persistent=True, watch_accessed_variables=False
    )
    self._inner = tf.GradientTape(
      persistent=True, watch_accessed_variables=False
    )
    with self._outer:
      with self._inner:
        self._inner.watch(around)
        self.predictions = predict(around)
        self._numbers = by_example(self.predictions)
      # A gradient is linear in the direction in which it is taken, and its
      # derivative by the direction is the Jacobian, transposed.
      self._direction = tf.zeros_like(self._numbers)
      self._outer.watch(self._direction)
      self._gradient = self.pulled(self._direction)
    if self._gradient is None:
      raise ExactError(
        'Exact: the predictions depend on none of the weights that the phase '
        'solves for. Let the model read them in that phase, or name others '
        'with variable_filter=...'
      )

  def jacobian(self) -> tf.Tensor:
    """Return the derivatives by weight, `[weights, examples, numbers]`."""
    found = self._outer.jacobian(self._gradient, self._direction)
    return tf.cast(found, linear_systems.dtype())

  def pushed(self, change: tf.Tensor) -> tf.Tensor:
    """Return how predictions move by a change, `[examples, numbers]`."""
    return self._outer.gradient(
      self._gradient, self._direction, output_gradients=change
    )

  def pulled(self, direction: tf.Tensor) -> tf.Tensor:
    """Return the gradient of predictions in a direction, `[weights]`."""
    return self._inner.gradient(
      self._numbers, self._around, output_gradients=direction
    )


def shaped(numbers: tf.Tensor, predictions: Any) -> Any:
  """Give numbers by example the structure, shapes and masks of predictions.

  Args:
    numbers: `[examples, numbers]`, as from `by_example`.
    predictions: The predictions.
  """
  leaves = tf.nest.flatten(predictions)
  parts = [numbers]
  if len(leaves) > 1:
    sizes = [by_example(leaf).shape[1] for leaf in leaves]
    parts = tf.split(numbers, sizes, 1)
  return tf.nest.pack_sequence_as(
    predictions,
    [_like(part, leaf) for part, leaf in zip(parts, leaves, strict=True)],
  )


def added(predictions: Any, change: tf.Tensor) -> Any:
  """Add a change by example to predictions, and keep their Keras masks."""
  return shaped(
    by_example(predictions) + tf.cast(change, tf.float32), predictions
  )


def _like(numbers: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
  """Give numbers the shape, the dtype and the Keras mask of a tensor."""
  found = tf.reshape(tf.cast(numbers, tensor.dtype), tf.shape(tensor))
  found = tf.ensure_shape(found, tensor.shape)
  mask = keras_functions.mask_of(tensor)
  if mask is not None:
    found._keras_mask = mask
  return found


def check(
  model: models.PartialModel,
  read: tiers.WeightsFn,
  trains: Callable[[str, str], bool],
) -> None:
  """Check that a model's predictions are affine in some weights.

  Args:
    model: The model.
    read: From the weights that a client holds to those that the model reads.
    trains: (tier, variable name) -> True if the weight is solved for.
  """
  with tf.__internal__.FuncGraph('affine').as_default():
    weights = tiers.Weights(
      (
        tier,
        tiers.NamedTensors(
          (name, tf.compat.v1.placeholder(spec.dtype, spec.shape))
          for name, spec in model.specs(tiers.of_model(tier)).items()
        ),
      )
      for tier in (*model.tiers, tiers.PERSONAL)
      if tiers.of_model(tier) in model.tiers
    )
    own = tiers.Weights(
      (
        tier,
        tiers.NamedTensors((n, t) for n, t in named.items() if trains(tier, n)),
      )
      for tier, named in weights.items()
    )
    names = [name for named in own.values() for name in named]
    if not names:
      return  # The model has none of them: nothing is solved for.
    inputs = tf.nest.map_structure(tracing.placeholder, model.example_spec['x'])
    seed = tf.constant(random_bits.derive(model.seed, 'affine'))
    flat = Flat(own)
    vector = tf.compat.v1.placeholder(tf.float32, [flat.static_size])

    def predict(vector: tf.Tensor) -> Any:
      solved = flat.named(vector)
      held = tiers.Weights(
        (tier, tiers.NamedTensors({**named, **solved[tier]}))
        for tier, named in weights.items()
      )
      predictions, _ = model.predict(
        read(held), model.frozen_weights(), inputs, training=False, seed=seed
      )
      return predictions

    linearized = Linearized(predict, vector)
    direction = tf.compat.v1.placeholder(tf.float32, [flat.static_size])
    wrong = tracing.first_dependent(
      [linearized.pushed(direction)], [vector], _GRADIENTS
    )
  if wrong is not None:
    raise ExactError(
      f'Exact: the predictions are not affine in the weights {names}: the '
      'derivative with respect to them depends on them in '
      f'{wrong.name.removeprefix(_GRADIENTS)!r} ({wrong.type}). Leave out what '
      'follows them in the model, such as an activation (a loss with '
      'from_logits=True needs none), name the weights of the last layer alone '
      'with variable_filter=..., or train with an optimizer.'
    )
