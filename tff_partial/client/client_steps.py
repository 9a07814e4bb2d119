"""Steps of a client: predict, differentiate, update."""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client.descent import connected
from tff_partial.client.descent import descend
from tff_partial.client.descent import replaced
from tff_partial.client.descent import trained_by
from tff_partial.contexts import Batch
from tff_partial.contexts import batch_of
from tff_partial.contexts import ClientContext
from tff_partial.model import keras_functions
from tff_partial.model import keras_metrics
from tff_partial.sparse import lookups
from tff_partial.sparse import rows


class Stand(NamedTuple):
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


def answered(answer: phases.Answer, context: ClientContext) -> Any:
  """Return the client's predictions that replace the model's.

  The Keras mask of the model's predictions is kept.

  Args:
    answer: Computes them.
    context: The client's context, including its batch.

  Raises:
    PhaseError: If the structure, shapes or dtypes differ from those of the
      model's predictions.
  """
  given = batch_of(context).predictions
  found = answer(context)
  if not _alike(given, found):
    raise phases.PhaseError(
      f'answer: a client predicts {found} in the place of {given}, which the '
      'model predicts. Return the same structure of tensors, of the same '
      'shapes and dtypes.'
    )
  mask = keras_functions.mask_of(given)
  if mask is not None:
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
  return all(
    tf.is_tensor(b)
    and a.dtype is b.dtype
    and a.shape.is_compatible_with(b.shape)
    for a, b in pairs
  )


class Client:
  """Constants of a client's training in interleaved phases."""

  def __init__(self, tables: lookups.Tables, context: ClientContext):
    self.model = context.model
    self.tables = tables
    self.context = context

  def _knows(
    self,
    weights: tiers.Weights,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    predictions: Any,
    seed: tf.Tensor,
    what: str,
  ) -> ClientContext:
    """Return the client's context within a step, for terms and answers."""
    return self.context._replace(
      weights=weights,
      seed=random_bits.fold_in(seed, what),
      batch=Batch(
        batch['x'], batch['y'], batch['weight'], is_real, predictions
      ),
    )

  def step(
    self,
    phase: phases.Phase,
    place: int,
    stand: Stand,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    seed: tf.Tensor,
    measured: bool,
  ) -> Stand:
    """Measure a batch, if `measured`, then take one step of a phase on it."""
    mine = trained_by([phase], stand.trained)
    metrics, loss = stand.metrics, stand.loss
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(mine)
      weights = replaced(self.context.weights, stand.trained)
      objective, predictions = tf.constant(0.0), None
      if phase.with_loss or measured:
        with rows.reading():
          predictions, regularization = self.model.predict(
            self.tables.stand_in(phase.read(weights), batch['places']),
            self.context.frozen,
            batch['x'],
            training=bool(mine),
            seed=seed,
          )
        if phase.answer is not None:
          predictions = answered(
            phase.answer,
            self._knows(weights, batch, is_real, predictions, seed, 'answer'),
          )
        value = self.model.loss(
          batch['y'],
          predictions,
          batch['weight'],
          is_real,
          regularization,
          phase.loss,
        )
      if phase.with_loss:
        objective = value.objective
      if phase.terms:
        context = self._knows(
          weights, batch, is_real, predictions, seed, 'terms'
        )
        for term in phase.terms:
          objective += term(context)
    is_finite = tf.logical_and(stand.is_finite, tf.math.is_finite(objective))
    optimizers, trained = list(stand.optimizers), stand.trained
    if mine:
      states = collections.OrderedDict(optimizers[place])
      sums = []
      gradients = connected(tape.gradient(objective, mine), mine)
      moved: tiers.Weights = collections.OrderedDict()
      for tier, named in mine.items():
        states[tier], moved[tier], changed = descend(
          phase.optimizer_of(tier), states[tier], named, gradients[tier]
        )
        sums += changed
      optimizers[place] = states
      trained = replaced(trained, moved)
      # A sum is finite only if all its terms are.
      moved_finite = tf.reduce_all([tf.math.is_finite(total) for total in sums])
      is_finite = tf.logical_and(is_finite, moved_finite)
    if measured:
      real = tf.cast(is_real, tf.float32)
      rank = batch['weight'].shape.rank
      real = tf.reshape(real, [-1] + [1] * (rank - 1))
      metrics = self.model.metrics.update(
        metrics, batch['y'], predictions, batch['weight'] * real
      )
      sums = [value.total, value.num_elements]
      if self.model.is_regularized:
        sums.append(value.regularization * value.num_elements)
      loss = [a + b for a, b in zip(loss, sums, strict=True)]
    return Stand(optimizers, trained, metrics, loss, is_finite)

  def steps(
    self,
    phase: phases.Phase,
    place: int,
    stand: Stand,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    seed: tf.Tensor,
  ) -> Stand:
    """Take all steps of a phase on one batch."""
    stand = self.step(phase, place, stand, batch, is_real, seed, phase.measured)
    if phase.repeats == 1:
      return stand

    def again(number: tf.Tensor, *stand: Any) -> tuple[Any, ...]:
      own_seed = random_bits.fold_in(seed, number)
      moved = self.step(
        phase, place, Stand(*stand), batch, is_real, own_seed, False
      )
      return number + 1, *moved

    return Stand(
      *tf.while_loop(
        lambda number, *_: number < phase.repeats,
        again,
        (tf.constant(1), *stand),
        parallel_iterations=1,
      )[1:]
    )
