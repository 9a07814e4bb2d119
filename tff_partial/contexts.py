"""What a client knows at some place of its work.

Losses that a phase adds (`terms.py`), choices of a group (`groups.py`) and
whatever else a client computes (`Compute`) are functions of a `ClientContext`.
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


class ContextError(errors.UserError, ValueError):
  """Raised for what a client does not know at a place of its work."""


class Batch(NamedTuple):
  """The examples of one step.

  Attributes:
    x: What the model reads, `[batch, ...]`.
    y: Labels.
    weight: float32, the examples' weights.
    is_real: bool `[batch]`; false for padding.
    predictions: What the model makes of `x`; None if the phase does not use
      its loss.
  """

  x: Any
  y: Any
  weight: tf.Tensor
  is_real: tf.Tensor
  predictions: Any

  def mean(self, values: tf.Tensor) -> tf.Tensor:
    """The mean of weighted values `[batch]` over the real examples, a scalar.

    Args:
      values: One number for each example; counts for nothing in padding.
    """
    real = tf.cast(self.is_real, tf.float32)
    values = tf.cast(values, tf.float32) * self.weight
    total = tf.reduce_sum(tf.where(self.is_real, values, 0.0))
    return total / tf.maximum(tf.reduce_sum(real), 1.0)


class Outcome(NamedTuple):
  """What a client's work came to, besides weights.

  Attributes:
    num_examples: int32, examples that the measured phases chose.
    num_steps: Tier to how many optimizer steps it was trained by, int32.
    weight: float32, how much the client's update counts; zero if nothing of
      it does.
  """

  num_examples: tf.Tensor
  num_steps: Mapping[str, tf.Tensor]
  weight: tf.Tensor


class Slots(NamedTuple):
  """What optimizers keep from round to round; see `optimizer_slots.py`.

  Attributes:
    before: Phase to tier to state, as the round began.
    now: The same, as it stands.
  """

  before: Mapping[str, Any]
  now: Mapping[str, Any]


class ClientContext(NamedTuple):
  """What a client knows at some place of its work.

  Attributes:
    model: The model.
    weights: Tier to named tensors, as they stand; of GROUP the copy that the
      client chose, before that the first, and all copies where it chooses.
    received: Tier to named tensors, as the round began.
    frozen: Weights that are never trained.
    examples: The client's examples, `[capacity, ...]`.
    count: int32 scalar, how many of them are real.
    seed: int32 `[2]`, for what is drawn at this place.
    remembered: The client's state as the round began, without `slots`.
    server: What the server sends beside weights: the process's server state;
      None if it has none, and in an evaluation that is built without
      `server_state`.
    computed: What was computed before, by name; see `Compute`.
    group: int32 scalar, the client's group; 0 until it has chosen.
    batch: The examples of the step, for terms and answers; None elsewhere.
    outcome: What the work came to; None as long as it goes on.
    rows: Of each table of the client's own size, which of its rows are real,
      bool `[rows]`.
    slots: What optimizers keep; nothing unless a phase says so.
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
    """One variable's tensor, as it stands.

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

  def predict(self, reads: tiers.Reads = tiers.as_they_are) -> Any:
    """The model's predictions for all examples, `[capacity, ...]`.

    Args:
      reads: The weights that the model reads.
    """
    predictions, _ = self._predict(reads(self.weights), training=False)
    return predictions

  def gradients(
    self,
    tier: str = tiers.GLOBAL,
    *,
    loss: losses.LossFn | None = None,
    reads: tiers.Reads = tiers.as_they_are,
  ) -> tiers.NamedTensors:
    """Gradients of the loss over all of the client's examples, by name.

    Args:
      tier: The weights with respect to which they are taken.
      loss: Another loss than the model's own.
      reads: The weights that the model reads.
    """
    held = self.weights[tier]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(held)
      predictions, regularization = self._predict(
        reads(self.weights), training=True
      )
      value = self.model.loss(
        self.examples['y'],
        predictions,
        self.examples['weight'],
        self.is_real,
        regularization,
        loss,
      )
    found = tape.gradient(
      value.objective,
      held,
      unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    # That of a table has its rows alone.
    return collections.OrderedDict(
      (name, tf.convert_to_tensor(slope)) for name, slope in found.items()
    )

  def on(self, part: splits.Part, seed: tf.Tensor) -> 'ClientContext':
    """The same of a client that has a part of its examples alone.

    Args:
      part: The part.
      seed: For what is drawn in choosing.
    """
    if part is splits.everything():
      return self
    chosen = part.choose(self.examples, self.count, seed)
    is_chosen = tf.range(tf.size(chosen.order)) < chosen.count
    order = tf.where(is_chosen, chosen.order, chosen.order[0])
    examples = tf.nest.map_structure(
      lambda tensor: tf.gather(tensor, order), dict(self.examples)
    )
    return self._replace(examples=examples, count=chosen.count)

  @property
  def is_real(self) -> tf.Tensor:
    """Which of the examples are no padding, bool `[capacity]`."""
    return tf.range(tf.shape(self.examples['weight'])[0]) < self.count

  def _predict(self, weights: tiers.Weights, *, training: bool) -> Any:
    return self.model.predict(
      weights,
      self.frozen,
      self.examples['x'],
      training=training,
      seed=self.seed,
    )


def batch_of(client: ClientContext) -> Batch:
  """The examples of the step.

  Raises:
    ContextError: If the client takes none, outside of a phase's terms and
      answer.
  """
  if client.batch is None:
    raise ContextError(
      'There is no batch at this place of the work: only terms and answers of '
      'phases know one.'
    )
  return client.batch


def outcome_of(client: ClientContext) -> Outcome:
  """What the client's work came to.

  Raises:
    ContextError: If the work goes on.
  """
  if client.outcome is None:
    raise ContextError(
      "There is no outcome before a client's work is done: only statistics and "
      'what is kept know it.'
    )
  return client.outcome


class Compute(NamedTuple):
  """A place in a client's work at which it computes something and holds it.

  What comes later in the round finds it in `ClientContext.computed`; after the
  round it is forgotten, unless it is kept or sent.

  Attributes:
    name: Under which it is held.
    function: (what the client knows) -> a structure of tensors.
    on: The examples that it knows there; all of them by default.
  """

  name: str
  function: Callable[[ClientContext], Any]
  on: splits.Part = splits.everything()


class Revise(NamedTuple):
  """A place in a client's work at which it replaces weights that it holds.

  What a client's weights become follows from a formula there, such as a
  mixture of its own and the server's, and not from training.

  Attributes:
    function: (what the client knows) -> the new weights, by tier and name;
      those that it leaves out stay as they are.
  """

  function: Callable[[ClientContext], tiers.Weights]
