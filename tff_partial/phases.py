"""Phases: the steps in which a client trains some tiers on some examples.

An algorithm's work at a client is a list of phases, run in turn. A phase that
trains nothing only measures.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import errors
from tff_partial import keras_functions
from tff_partial import models
from tff_partial import random_bits
from tff_partial import splits
from tff_partial import tiers

Optimizer: TypeAlias = tff.learning.optimizers.Optimizer
# An extra loss term: (weights by tier, weights by tier at the phase's start)
# -> scalar.
Term = Callable[[Any, Any], tf.Tensor]


def sgd(learning_rate: float) -> Optimizer:
  """Plain gradient descent, the optimizer of the FedRecon paper's clients."""
  return tff.learning.optimizers.build_sgdm(learning_rate)


class PhaseError(errors.UserError, ValueError):
  """Raised for settings of a phase that make no sense."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """Trains the weights of some tiers on one part of a client's examples.

  Attributes:
    train: The tiers to train; none only measures.
    on: Which examples, in which order.
    optimizer: Any TFF optimizer. Plain gradient descent touches only the rows
      of an embedding table that a batch reads.
    batch_size: Examples per step; the last batch of an epoch may be smaller.
    epochs: How often the examples are gone through, at most.
    max_steps: Steps, at most; None for no limit. 0 leaves the phase out.
    shuffle: Whether each epoch takes the examples in a new order.
    terms: Losses to add to the model's own.
    measured: Whether the phase's predictions count in the metrics and its
      examples weigh the client. Predictions are those before each step.
  """

  train: tuple[str, ...] = (tiers.GLOBAL,)
  on: splits.Part = dataclasses.field(default_factory=splits.everything)
  optimizer: Optimizer = dataclasses.field(default_factory=lambda: sgd(0.1))
  batch_size: int = 20
  epochs: int = 1
  max_steps: int | None = None
  shuffle: bool = False
  terms: tuple[Term, ...] = ()
  measured: bool = False

  def __post_init__(self) -> None:
    """Checks the settings."""
    train = tiers.check_tiers(self.train, 'Phase(train=...)')
    object.__setattr__(self, 'train', train)
    if self.batch_size < 1:
      raise PhaseError(f'batch_size must be positive, found {self.batch_size}.')
    if self.epochs < 1:
      raise PhaseError(
        f'epochs must be positive, found {self.epochs}. To skip a phase, pass '
        'max_steps=0.'
      )
    if self.max_steps is not None and self.max_steps < 0:
      raise PhaseError(f'max_steps is negative: {self.max_steps}.')
    if not isinstance(self.optimizer, tff.learning.optimizers.Optimizer):
      raise PhaseError(
        'A phase takes one of `tff.learning.optimizers`, for example '
        f'`build_sgdm(0.1)`; found {type(self.optimizer).__name__}.'
      )


class Worked(NamedTuple):
  """What a client has after its phases.

  Attributes:
    weights: Tier to named tensors.
    metrics: States of the metrics over all measured batches.
    loss: Sum of the losses and number of them, over all measured batches.
    num_examples: int32, examples that the measured phases chose.
    is_finite: Whether every loss and every new weight was a finite number.
  """

  weights: tiers.Weights
  metrics: keras_functions.MetricState
  loss: list[tf.Tensor]
  num_examples: tf.Tensor
  is_finite: tf.Tensor


def _num_steps(phase: Phase, count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Steps in an epoch and altogether."""
  per_epoch = -(-count // phase.batch_size)
  steps = per_epoch * phase.epochs
  if phase.max_steps is not None:
    steps = tf.minimum(steps, phase.max_steps)
  return per_epoch, steps


def _epoch_orders(
  phase: Phase, chosen: splits.Chosen, seed: tf.Tensor
) -> tf.Tensor:
  """The order of the chosen examples in each epoch, `[epochs * capacity]`."""
  if not phase.shuffle:
    return chosen.order
  place = tf.range(tf.size(chosen.order))
  orders = []
  for epoch in range(phase.epochs):
    bits = random_bits.bits(
      random_bits.fold_in(seed, epoch), tf.shape(chosen.order)
    )
    last = tf.constant(tf.int64.max)
    key = tf.where(place < chosen.count, tf.cast(bits, tf.int64), last)
    orders.append(tf.gather(chosen.order, tf.argsort(key, stable=True)))
  return tf.concat(orders, 0)


def _batch(
  examples: Mapping[str, Any],
  orders: tf.Tensor,
  phase: Phase,
  count: tf.Tensor,
  per_epoch: tf.Tensor,
  step: tf.Tensor,
) -> tuple[collections.OrderedDict[str, Any], tf.Tensor]:
  """The examples of one step and which of them are real.

  What is missing to a full batch repeats the first chosen example: a value that
  the model can take, whatever it computes.
  """
  epoch, place = step // per_epoch, step % per_epoch
  offsets = place * phase.batch_size + tf.range(phase.batch_size)
  is_real = offsets < count
  start = epoch * tf.shape(examples['weight'])[0] if phase.shuffle else 0
  rows = tf.gather(orders, start + tf.where(is_real, offsets, 0))
  batch = collections.OrderedDict(
    (name, tf.nest.map_structure(lambda t: tf.gather(t, rows), examples[name]))
    for name in ('x', 'y', 'weight')
  )
  return batch, is_real


def _is_plain_descent(optimizer: Optimizer) -> bool:
  """Whether a step is `weights - learning_rate * gradients`, no more.

  Then a step on some rows of a table needs only these rows.
  """
  if type(optimizer) is not type(sgd(1.0)):
    return False  # It may look at other rows, or at the whole gradient.
  with tf.init_scope():
    state = optimizer.initialize(tf.TensorSpec([2], tf.float32))
  return set(state) == {'learning_rate'}  # No momentum.


def _step(
  optimizer: Optimizer,
  by_rows: bool,
  state: Any,
  weights: tiers.NamedTensors,
  gradients: Mapping[str, Any],
) -> tuple[Any, tiers.NamedTensors, tf.Tensor]:
  """One optimizer step; also says whether all weights it set are finite."""
  sparse = {
    name: gradient
    for name, gradient in gradients.items()
    if by_rows and isinstance(gradient, tf.IndexedSlices)
  }
  dense = [name for name in weights if name not in sparse]
  result = collections.OrderedDict(weights)
  sums = []
  if dense:
    state, moved = optimizer.next(
      state,
      collections.OrderedDict((name, weights[name]) for name in dense),
      collections.OrderedDict((name, gradients[name]) for name in dense),
    )
    result.update(moved)
    sums += [tf.reduce_sum(tensor) for tensor in moved.values()]
  for name, gradient in sparse.items():
    _, change = optimizer.next(
      state, tf.zeros_like(gradient.values), gradient.values
    )
    where = gradient.indices[:, None]
    result[name] = tf.tensor_scatter_nd_add(weights[name], where, change)
    sums.append(tf.reduce_sum(tf.gather(result[name], gradient.indices)))
  # The sum of some numbers is finite only if all of them are.
  is_finite = tf.reduce_all([tf.math.is_finite(total) for total in sums])
  return state, result, is_finite


def _run_phase(
  phase: Phase,
  model: models.PartialModel,
  before: Worked,
  frozen: tiers.NamedTensors,
  examples: Mapping[str, Any],
  chosen: splits.Chosen,
  seed: tf.Tensor,
) -> Worked:
  """Runs one phase after what was done `before`."""
  per_epoch, steps = _num_steps(phase, chosen.count)
  orders = _epoch_orders(phase, chosen, random_bits.fold_in(seed, 'shuffle'))
  tier_of = {
    name: tier for tier in phase.train for name in before.weights.get(tier, {})
  }
  trained = collections.OrderedDict(
    (name, before.weights[tier][name]) for name, tier in tier_of.items()
  )
  optimizer_state = phase.optimizer.initialize(
    tf.nest.map_structure(tf.TensorSpec.from_tensor, trained)
  )
  optimizer_state = tf.nest.map_structure(tf.convert_to_tensor, optimizer_state)
  if phase.max_steps == 0 or not (trained or phase.measured):
    return before
  by_rows = bool(trained) and _is_plain_descent(phase.optimizer)

  def placed(named: tiers.NamedTensors) -> tiers.Weights:
    return collections.OrderedDict(
      (
        tier,
        collections.OrderedDict(
          (name, named.get(name, tensor)) for name, tensor in tensors.items()
        ),
      )
      for tier, tensors in before.weights.items()
    )

  def body(
    step: tf.Tensor,
    optimizer_state: Any,
    trained: tiers.NamedTensors,
    metrics: keras_functions.MetricState,
    loss: list[tf.Tensor],
    is_finite: tf.Tensor,
  ) -> tuple[Any, ...]:
    batch, is_real = _batch(
      examples, orders, phase, chosen.count, per_epoch, step
    )
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(trained)
      weights = placed(trained)
      predictions, regularization = model.predict(
        weights,
        frozen,
        batch['x'],
        training=bool(tier_of),
        seed=random_bits.fold_in(seed, step),
      )
      value = model.loss(
        batch['y'], predictions, batch['weight'], is_real, regularization
      )
      objective = value.objective
      for term in phase.terms:
        objective += term(weights, before.weights)
    is_finite = tf.logical_and(is_finite, tf.math.is_finite(objective))
    if trained:
      gradients = tape.gradient(objective, trained)
      optimizer_state, trained, moved_finite = _step(
        phase.optimizer, by_rows, optimizer_state, trained, gradients
      )
      is_finite = tf.logical_and(is_finite, moved_finite)
    if phase.measured:
      real = tf.cast(is_real, tf.float32)
      rank = batch['weight'].shape.rank
      real = tf.reshape(real, [-1] + [1] * (rank - 1))
      metrics = model.metrics.update(
        metrics, batch['y'], predictions, batch['weight'] * real
      )
      loss = [loss[0] + value.total, loss[1] + value.num_elements]
    return step + 1, optimizer_state, trained, metrics, loss, is_finite

  _, _, trained, metrics, loss, is_finite = tf.while_loop(
    lambda step, *_: step < steps,
    body,
    (
      tf.constant(0),
      optimizer_state,
      trained,
      before.metrics,
      before.loss,
      before.is_finite,
    ),
    parallel_iterations=1,
  )
  num_examples = before.num_examples
  if phase.measured:
    num_examples += chosen.count
  return Worked(placed(trained), metrics, loss, num_examples, is_finite)


def run(
  phases: Sequence[Phase],
  model: models.PartialModel,
  weights: tiers.Weights,
  frozen: tiers.NamedTensors,
  examples: Mapping[str, Any],
  count: tf.Tensor,
  seed: tf.Tensor,
) -> Worked:
  """Runs phases one after another on one client's examples.

  Args:
    phases: What to do.
    model: The model.
    weights: Tier to its trainable weights at the start.
    frozen: Weights that are never trained.
    examples: The client's examples, `[capacity, ...]`.
    count: int32 scalar, how many of them are real.
    seed: int32 `[2]`; everything that is drawn follows from it.
  """
  done = Worked(
    weights,
    model.metrics.initial_state(),
    [tf.constant(0.0), tf.constant(0.0)],
    tf.constant(0),
    tf.constant(True),
  )
  # The same for all phases, so that drawn parts of the data stay disjoint.
  part_seed = random_bits.fold_in(seed, 'part')
  for number, phase in enumerate(phases):
    done = _run_phase(
      phase,
      model,
      done,
      frozen,
      examples,
      phase.on.choose(examples, count, part_seed),
      random_bits.fold_in(seed, f'phase {number}'),
    )
  return done
