"""A client's context at some point of its work.

Losses that a phase adds (`terms.py`), choices of a group (`groups.py`) and
everything else that a client computes (`Compute`) are functions of a
`ClientContext`.
"""

import collections
from collections.abc import Callable, Mapping
import types
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import errors
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.model import tracing


class ContextError(errors.UserError, ValueError):
  """Raised for values that are not available at a point of a client's work."""


class Batch(NamedTuple):
  """The examples of one step.

  Attributes:
    x: The model's inputs, `[batch, ...]`.
    y: Labels.
    weight: float32, the examples' weights.
    is_real: bool `[batch]`; false for padding.
    predictions: The model's outputs for `x`; None if the phase does not use
      its loss.
  """

  x: Any
  y: Any
  weight: tf.Tensor
  is_real: tf.Tensor
  predictions: Any

  @property
  def example_weights(self) -> tf.Tensor:
    """Weights of the examples, zero for padding; see `weights_of_examples`."""
    return tf.where(self.is_real, weights_of_examples(self.weight), 0.0)

  @classmethod
  def of(
    cls, fields: Mapping[str, Any], is_real: tf.Tensor, predictions: Any
  ) -> 'Batch':
    """Make a batch of the fields of its examples.

    Args:
      fields: `x`, `y` and `weight`.
      is_real: See `is_real`.
      predictions: See `predictions`.
    """
    return cls(fields['x'], fields['y'], fields['weight'], is_real, predictions)

  def mean(
    self, values: tf.Tensor, among: tf.Tensor | None = None
  ) -> tf.Tensor:
    """Return the mean of weighted values over the real examples, a scalar.

    Args:
      values: `[batch]`, one number per example, which is multiplied by the
        example's weight, the mean of those of its steps; ignored for padding.
      among: bool `[batch]`, the examples to average over; all by default. The
        mean over none is 0.

    Raises:
      ContextError: If there is another than one number per example.
    """
    if values.shape.rank != 1:
      raise ContextError(
        f'batch.mean: the values have the shape {values.shape}, not [batch], '
        'one number for each example. Reduce their other axes first.'
      )
    chosen = self.is_real if among is None else self.is_real & among
    values = tf.cast(values, tf.float32) * weights_of_examples(self.weight)
    total = tf.reduce_sum(tf.where(chosen, values, 0.0))
    number = tf.reduce_sum(tf.cast(chosen, tf.float32))
    return total / tf.maximum(number, 1.0)


class Outcome(NamedTuple):
  """Outcome of a client's work, besides weights.

  Attributes:
    num_examples: int32, examples that the measured phases chose.
    num_steps: Tier to the number of optimizer steps that trained it, int32.
    weight: float32, the weight of the client's update; zero if it does not
      count.
  """

  num_examples: tf.Tensor
  num_steps: Mapping[str, tf.Tensor]
  weight: tf.Tensor


class Slots(NamedTuple):
  """Optimizer slots kept from round to round; see `optimizer_slots.py`.

  Attributes:
    before: Phase to tier to state, at the start of the round.
    now: The current value of the same.
  """

  before: Mapping[str, Any]
  now: Mapping[str, Any]


class ClientContext(NamedTuple):
  """A client's context at some point of its work.

  Attributes:
    model: The model.
    weights: Tier to named tensors, current values; for GROUP the copy that the
      client chose, before that the first, and all copies while it chooses or if
      it holds all.
    received: Tier to named tensors, at the start of the round.
    frozen: Weights that are never trained.
    examples: The client's examples, `[capacity, ...]`.
    count: int32 scalar, the number of real examples.
    seed: int32 `[2]`, for random draws at this point.
    remembered: The client's state at the start of the round, without `slots`.
    server: The process's server state, sent besides weights; None if it has
      none, and in an evaluation that is built without `server_state`.
    computed: Values computed before, by name; see `Compute`.
    group: int32 scalar, the client's group; 0 until it has chosen.
    batch: The examples of the step, for terms and answers; None elsewhere.
    outcome: Outcome of the work; None until it is done.
    rows: For each client-sized table, the mask of its real rows, bool `[rows]`.
    slots: Optimizer slots that are kept; empty unless a phase requests it.
  """

  model: models.PartialModel
  weights: tiers.Weights
  received: tiers.Weights
  frozen: tiers.NamedTensors
  examples: Mapping[str, Any]
  count: tf.Tensor
  seed: tf.Tensor
  remembered: Any = None
  server: Any = None
  computed: Mapping[str, Any] = types.MappingProxyType({})
  group: Any = 0
  batch: Batch | None = None
  outcome: Outcome | None = None
  rows: Mapping[str, tf.Tensor] = types.MappingProxyType({})
  slots: Slots = Slots({}, {})

  def weight(self, tier: str, name: str) -> tf.Tensor:
    """Return one variable's current tensor.

    Args:
      tier: The tier that holds it.
      name: Name of the variable.

    Raises:
      ContextError: If the tier has no such variable.
    """
    named: Mapping[str, tf.Tensor] = self.weights.get(tier, {})
    if name not in named:
      raise ContextError(
        f'A client is to read the {tier} variable {name!r}, but the model has '
        f'{list(named)} there.'
      )
    return named[name]

  def predict(
    self,
    weights_fn: tiers.WeightsFn = tiers.server_and_local_weights,
    *,
    by_own_moments: bool = False,
  ) -> Any:
    """Return the model's predictions for all examples, `[capacity, ...]`.

    Those for padding are of the first example, or zeros.

    Args:
      weights_fn: The weights that the model reads.
      by_own_moments: True to let layers with states, such as batch
        normalization, predict as in a training step on all examples.
    """
    weights = weights_fn(self.weights)
    if not (by_own_moments and self.model.state):
      return self.filled()._predict(weights, training=False)[0]
    known = self._replace(examples=first_of(self.examples, self.count))
    rest = tf.shape(self.example_weights)[0] - self.count
    return tf.nest.map_structure(
      lambda t: tf.pad(t, [[0, rest], *[[0, 0]] * (t.shape.rank - 1)]),
      known._predict(weights, training=True)[0],
    )

  def gradients(
    self,
    tier: str = tiers.GLOBAL,
    *,
    loss: losses.LossFn | None = None,
    weights_fn: tiers.WeightsFn = tiers.server_and_local_weights,
  ) -> tiers.NamedTensors:
    """Return gradients of the loss over all of the client's examples, by name.

    Args:
      tier: The tier with respect to which they are taken.
      loss: A loss that replaces the model's own.
      weights_fn: The weights that the model reads.
    """
    held, known = self.weights[tier], self.filled()
    if self.model.state:  # Layers that take statistics see no padding.
      known = known._replace(examples=first_of(self.examples, self.count))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(held)
      predictions, regularization = known._predict(
        weights_fn(self.weights), training=True
      )
      value = self.model.loss(
        known.examples['y'],
        predictions,
        known.examples['weight'],
        known.is_real,
        regularization,
        loss,
      )
    found = tape.gradient(
      value.objective, held, unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    # The gradient of a table has only the rows that were read.
    return collections.OrderedDict(
      (name, tf.convert_to_tensor(slope)) for name, slope in found.items()
    )

  def on(self, part: splits.Part, seed: tf.Tensor) -> 'ClientContext':
    """Return the context of the client with only a part of its examples.

    Args:
      part: The part.
      seed: For random draws of the choice.
    """
    return self if part is splits.everything() else self._chosen(part, seed)

  def filled(self) -> 'ClientContext':
    """Return the context with padding that repeats the first example.

    A loss of padding is then finite, and so is 0 times its slope.
    """
    return self._chosen(splits.everything(), self.seed)

  def _chosen(self, part: splits.Part, seed: tf.Tensor) -> 'ClientContext':
    chosen = part.choose(self.examples, self.count, seed)
    is_chosen = tf.range(tf.size(chosen.order)) < chosen.count
    order = tf.where(is_chosen, chosen.order, chosen.order[0])
    examples = tf.nest.map_structure(
      lambda tensor: tf.gather(tensor, order), dict(self.examples)
    )
    return self._replace(examples=examples, count=chosen.count)

  @property
  def is_real(self) -> tf.Tensor:
    """Mask of the examples that are not padding, bool `[capacity]`."""
    return tf.range(tf.shape(self.examples['weight'])[0]) < self.count

  @property
  def example_weights(self) -> tf.Tensor:
    """Weights of the examples, zero for padding, `[capacity, ...]`."""
    weight = self.examples['weight']
    ones = [1] * (weight.shape.rank - 1)
    return tf.where(tf.reshape(self.is_real, [-1, *ones]), weight, 0.0)

  @property
  def counts(self) -> tf.Tensor:
    """Mask of the examples with a weight above zero, bool `[capacity]`."""
    return weights_of_examples(self.example_weights) > 0

  def _predict(self, weights: tiers.Weights, *, training: bool) -> Any:
    return self.model.predict(
      weights,
      self.frozen,
      self.examples['x'],
      training=training,
      seed=self.seed,
    )


def weights_of_examples(weight: tf.Tensor) -> tf.Tensor:
  """Return a weight for each example, `[batch]`: the mean if steps have some.

  Args:
    weight: The examples' weights, or those of their steps, `[batch, ...]`.
  """
  return tf.reduce_mean(weight, range(1, weight.shape.rank))


def first_of(examples: Mapping[str, Any], number: tf.Tensor) -> Any:
  """Return only the first examples, such as the real ones of a batch.

  Args:
    examples: The examples, `[capacity, ...]`.
    number: How many, an int32 scalar.
  """
  with tf.name_scope(tracing.DYNAMIC):
    return tf.nest.map_structure(lambda tensor: tensor[:number], dict(examples))


def batch_of(client: ClientContext) -> Batch:
  """Return the examples of the step.

  Raises:
    ContextError: If the client takes none, outside of a phase's terms and
      answer.
  """
  if client.batch is None:
    raise ContextError(
      '`client.batch` is None here: only the terms and the `predict_fn` of a '
      'phase have a batch.'
    )
  return client.batch


def outcome_of(client: ClientContext) -> Outcome:
  """Return the outcome of the client's work.

  Raises:
    ContextError: If the work is not done.
  """
  if client.outcome is None:
    raise ContextError(
      "`client.outcome` is None before a client's work is done: only "
      'statistics and the `keep` of a client state have it.'
    )
  return client.outcome


class Compute(NamedTuple):
  """A part of a client's work that computes a value and stores it.

  Later parts of the round find it in `ClientContext.computed`; after the round
  it is lost, unless it is kept or sent.

  Attributes:
    name: Key of the value.
    function: (the client's context) -> a structure of tensors.
    on: The examples in the context; all of them by default.
  """

  name: str
  function: Callable[[ClientContext], Any]
  on: splits.Part = splits.everything()


class OverwriteWeights(NamedTuple):
  """A part of a client's work that replaces some of its weights.

  The new weights follow from a formula, such as a mixture of the client's and
  the server's, and not from training.

  Attributes:
    function: (the client's context) -> the new weights, by tier and name; all
      others do not change.
    on: The examples in the context; all of them by default.
  """

  function: Callable[[ClientContext], tiers.Weights]
  on: splits.Part = splits.everything()
