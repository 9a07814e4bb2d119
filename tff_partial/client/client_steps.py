"""Steps of a client: predict, differentiate, update."""

import collections
from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import contexts
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client import descent
from tff_partial.client import exact_solves
from tff_partial.model import keras_functions
from tff_partial.model import keras_metrics
from tff_partial.model import losses
from tff_partial.model import models
from tff_partial.sparse import lookups


class TrainState(NamedTuple):
  """State of training in interleaved phases, between steps.

  Attributes:
    optimizers: For each phase, the optimizer's state of each tier.
    trained: Tier to the weights that any of the phases trains.
    metrics: See `ClientResult`.
    loss: See `ClientResult`.
    is_finite: See `ClientResult`.
  """

  optimizers: list[collections.OrderedDict[str, Any]]
  trained: tiers.Weights
  metrics: keras_metrics.MetricState
  loss: list[tf.Tensor]
  is_finite: tf.Tensor


class Turn(NamedTuple):
  """A phase that takes its turn on each batch.

  Attributes:
    phase: The phase.
    place: The index of its optimizers' states.
    seed: int32 `[2]`, for the random draws of its steps.
    measured: True to measure a batch before the first step on it.
    steps: Number of steps on each batch.
  """

  phase: phases.Phase
  place: int
  seed: tf.Tensor
  measured: bool
  steps: int


# The index of a step -> its batch, and the mask of real examples.
BatchFn = Callable[[tf.Tensor], tuple[Mapping[str, Any], tf.Tensor]]


def replaced_predictions(
  predict_fn: phases.PredictFn, context: contexts.ClientContext
) -> Any:
  """Return the client's predictions that replace the model's.

  The Keras mask of the model's predictions is kept.

  Args:
    predict_fn: Computes them.
    context: The client's context, including its batch.

  Raises:
    PhaseError: If the structure, shapes or dtypes differ from those of the
      model's predictions.
  """
  given = contexts.batch_of(context).predictions
  measured = tf.nest.map_structure(
    lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
    context.model.replaced_spec,
  )
  found = predict_fn(context)
  if not _alike(measured, found):
    raise phases.PhaseError(
      f'predict_fn: a client predicts {found} in the place of {measured}, '
      'which the model predicts. Return the same structure of tensors, of the '
      'same shapes and dtypes.'
    )
  mask = keras_functions.mask_of(given)
  if mask is not None and tf.is_tensor(found):
    found = tf.identity(found)
    found._keras_mask = mask
  return found


def _alike(one: Any, other: Any) -> bool:
  """Return True if two structures have tensors of equal shapes and dtypes."""
  try:
    tf.nest.assert_same_structure(one, other, check_types=False)
  except (TypeError, ValueError):
    return False
  pairs = zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True)
  return all(tf.is_tensor(b) and a.is_compatible_with(b) for a, b in pairs)


def _descended(
  turn: Turn,
  state: TrainState,
  mine: tiers.Weights,
  gradients: Mapping[str, Any],
) -> TrainState:
  """Return the state after a phase's optimizers stepped on its weights."""
  optimizers = list(state.optimizers)
  states = collections.OrderedDict(optimizers[turn.place])
  moved: tiers.Weights = collections.OrderedDict()
  sums = []
  for tier, named in mine.items():
    states[tier], moved[tier], changed = descent.descend(
      turn.phase.optimizer_of(tier), states[tier], named, gradients[tier]
    )
    sums += changed
  optimizers[turn.place] = states
  # A sum is finite only if all its terms are.
  return state._replace(
    optimizers=optimizers,
    trained=descent.replaced(state.trained, moved),
    is_finite=state.is_finite & descent.are_finite(sums),
  )


def _with_states(
  state: TrainState, held: tiers.Weights, updates: Mapping[str, tf.Tensor]
) -> TrainState:
  """Return the state of training with new states of the model's layers.

  A state belongs to one tier: if the model reads the sum of a shared and a
  personal weight, only the former follows.

  Args:
    state: The state of training.
    held: The weights that the phase trains, by tier: other states stay. Numbers
      of the client besides the model may have the same names.
    updates: Name to new value.
  """
  if not updates:
    return state
  new = dict(updates)
  moved = collections.OrderedDict(
    (tier, collections.OrderedDict((n, new.pop(n)) for n in named if n in new))
    for tier, named in held.items()
    if tier != tiers.CLIENT_VALUES
  )
  return state._replace(
    trained=descent.replaced(state.trained, moved),
    is_finite=state.is_finite & descent.are_finite(moved),
  )


def _with_terms(
  objective: tf.Tensor, phase: phases.Phase, context: contexts.ClientContext
) -> tf.Tensor:
  """Add a phase's terms to its objective; refuse one that is no number."""
  for term in phase.terms:
    objective += term(context)
  if objective.shape.rank:
    raise phases.PhaseError(
      f'terms: one is of the shape {objective.shape}, where a batch has one '
      'number. Take the mean, `client.batch.mean(values)`.'
    )
  return objective


def _measured(
  model: models.PartialModel,
  state: TrainState,
  batch: Mapping[str, Any],
  is_real: tf.Tensor,
  predictions: Any,
  value: losses.LossValue,
) -> TrainState:
  """Return the state with the metrics and the loss of one more batch."""
  real = tf.cast(is_real, tf.float32)
  rank = batch['weight'].shape.rank
  real = tf.reshape(real, [-1] + [1] * (rank - 1))
  metrics = model.metrics.update(
    state.metrics, batch['y'], predictions, batch['weight'] * real
  )
  sums = [value.total, value.num_elements]
  if model.is_regularized:
    sums.append(value.regularization * value.num_elements)
  loss = [a + b for a, b in zip(state.loss, sums, strict=True)]
  return state._replace(metrics=metrics, loss=loss)


class Steps:
  """Steps of a client in interleaved phases."""

  def __init__(
    self,
    model: lookups.RowModel,
    context: contexts.ClientContext,
    part_seed: tf.Tensor,
  ):
    """Store what does not change between steps.

    `part_seed` is int32 `[2]`, for random parts of its examples.
    """
    self._model = model
    self._context = context
    self._part_seed = part_seed

  def _knows(
    self,
    weights: tiers.Weights,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    predictions: Any,
    seed: tf.Tensor,
    what: str,
  ) -> contexts.ClientContext:
    """Return the client's context within a step, for terms and answers."""
    return self._context._replace(
      weights=weights,
      seed=random_bits.fold_in(seed, what),
      batch=contexts.Batch.of(batch, is_real, predictions),
    )

  def _predicted(
    self,
    weights: tiers.Weights,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    training: bool,
    seed: tf.Tensor,
  ) -> tuple[Any, Any, Mapping[str, tf.Tensor]]:
    """Return predictions for a batch, losses, and new states of layers.

    A model with states is trained on the real examples alone, the first ones
    of a batch, so that its layers see no padding; what it predicts for the
    first one stands for padding, of which any loss is then a number.
    """
    if not (training and self._context.model.state):
      return self._model.predict(weights, batch, training=training, seed=seed)
    number = tf.reduce_sum(tf.cast(is_real, tf.int32))
    predictions, losses, updates = self._model.predict(
      weights, contexts.first_of(batch, number), training=True, seed=seed
    )
    places = tf.range(tf.shape(is_real)[0])
    places = tf.where(places < number, places, 0)

    def padded(tensor: tf.Tensor) -> tf.Tensor:
      # One more row, for a batch without examples.
      rows = tf.pad(tensor, [[0, 1], *[[0, 0]] * (tensor.shape.rank - 1)])
      found = tf.gather(rows, places)
      found.set_shape([is_real.shape[0], *tensor.shape[1:]])
      if (mask := keras_functions.mask_of(tensor)) is not None:
        found._keras_mask = padded(mask)
      return found

    return tf.nest.map_structure(padded, predictions), losses, updates

  def _follow(
    self, phase: phases.Phase, trained: tiers.Weights
  ) -> Callable[[tiers.Weights], tiers.Weights]:
    """Return a function that puts an exact solution among a client's weights.

    Args:
      phase: The phase. If its gradients pass through no solution, the function
        returns the weights as they are.
      trained: The weights that are trained, as they are now.
    """
    if phase.through is None:
      return lambda weights: weights
    solve = exact_solves.ExactSolve(
      phase.through, self._model, self._context, self._part_seed
    )
    solution = solve.solve(descent.replaced(self._context.weights, trained))
    return lambda weights: solve.followed(weights, solution)

  def step(
    self,
    turns: Sequence[Turn],
    batch_at: BatchFn,
    number: tf.Tensor,
    *values: Any,
  ) -> tuple[Any, ...]:
    """Let each phase in turn measure a batch and take its steps on it.

    The body of a `tf.while_loop`. Further steps of a phase on the same batch
    are a loop of this method too.

    Args:
      turns: The phases.
      batch_at: Returns the batch of a step.
      number: int32, the index of the step.
      *values: The parts of a `TrainState`.

    Returns:
      The next index, and the parts of the new state.
    """
    model, state = self._context.model, TrainState(*values)
    batch, is_real = batch_at(number)
    for turn in turns:
      phase = turn.phase
      seed = random_bits.fold_in(turn.seed, number)
      held = descent.trained_by([phase], state.trained)
      mine = descent.trained_by([phase], held, model.state)
      updates: Mapping[str, tf.Tensor] = {}
      follow = self._follow(phase, state.trained)
      with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(mine)
        weights = follow(descent.replaced(self._context.weights, state.trained))
        objective, predictions = tf.constant(0.0), None
        if phase.use_model_loss or turn.measured:
          predictions, regularization, updates = self._predicted(
            phase.read(weights), batch, is_real, bool(held), seed
          )
          if phase.predict_fn is not None:
            predictions = replaced_predictions(
              phase.predict_fn,
              self._knows(weights, batch, is_real, predictions, seed, 'answer'),
            )
          value = model.loss(
            batch['y'],
            model.compared(predictions) if phase.predict_fn else predictions,
            batch['weight'],
            is_real,
            regularization,
            phase.loss,
          )
        if phase.use_model_loss:
          objective = value.objective
        if phase.terms:
          context = self._knows(
            weights, batch, is_real, predictions, seed, 'terms'
          )
          objective = _with_terms(objective, phase, context)
      is_finite = state.is_finite & tf.math.is_finite(objective)
      if turn.measured and not phase.use_model_loss:
        is_finite &= tf.math.is_finite(value.total)
      state = state._replace(is_finite=is_finite)
      if mine:
        gradients = descent.connected(tape.gradient(objective, mine), mine)
        state = _descended(turn, state, mine, gradients)
      state = _with_states(state, held, updates)
      if turn.measured:
        state = _measured(model, state, batch, is_real, predictions, value)
      if turn.steps > 1:
        again = turn._replace(seed=seed, measured=False, steps=1)
        _, *values = tf.while_loop(
          lambda number, *_, steps=turn.steps: number < steps,
          functools.partial(self.step, [again], lambda _: (batch, is_real)),
          (tf.constant(1), *state),
          parallel_iterations=1,
        )
        state = TrainState(*values)
    return number + 1, *state
