"""Local training: a client goes through its phases, batch by batch."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import groups
from tff_partial import keras_metrics
from tff_partial import lookups
from tff_partial import models
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import rows
from tff_partial import splits
from tff_partial import tiers


class Worked(NamedTuple):
  """What a client has after its phases.

  Attributes:
    weights: Tier to named tensors; of GROUP the copy of the client's group.
    group: int32, the client's group; 0 if the model has none.
    metrics: States of the metrics over all measured batches.
    loss: Sum of the losses and number of them, over all measured batches.
    num_examples: int32, examples that the measured phases chose.
    is_finite: Whether every loss and every new weight was a finite number.
    changes: Name of each GLOBAL table of which only some rows were trained, to
      these rows and what they were before less what they are now.
  """

  weights: tiers.Weights
  group: tf.Tensor
  metrics: keras_metrics.MetricState
  loss: list[tf.Tensor]
  num_examples: tf.Tensor
  is_finite: tf.Tensor
  changes: collections.OrderedDict[str, rows.Change]


class _Batches:
  """The batches that a phase goes through at a client."""

  def __init__(
    self,
    phase: phases.Phase,
    examples: Mapping[str, Any],
    chosen: splits.Chosen,
    seed: tf.Tensor,
    round_number: tf.Tensor | None,
  ):
    self._examples = examples
    self._count = chosen.count
    self._capacity = tf.shape(examples['weight'])[0]
    self._shuffle, self._seed = phase.shuffle, seed
    self._order, self._orders = chosen.order, None
    epochs = phase.epochs
    if callable(epochs):
      epochs = tf.cast(epochs(round_number), tf.int32)
    elif phase.shuffle:
      self._orders = tf.concat([*map(self._order_of, range(epochs))], 0)
    self._size = self._capacity
    if phase.batch_size is not None:
      self._size = tf.constant(phase.batch_size)
    self._static_size = phase.batch_size
    self._per_epoch = -(-chosen.count // tf.maximum(self._size, 1))
    self.number = self._per_epoch * epochs
    if phase.max_steps is not None:
      self.number = tf.minimum(self.number, phase.max_steps)

  def _order_of(self, epoch: int | tf.Tensor) -> tf.Tensor:
    """The order of the chosen examples in an epoch, `[capacity]`."""
    if not self._shuffle:
      return self._order
    bits = random_bits.bits(
      random_bits.fold_in(self._seed, epoch), tf.shape(self._order)
    )
    is_chosen = tf.range(tf.size(self._order)) < self._count
    last = tf.constant(tf.int64.max)
    key = tf.where(is_chosen, tf.cast(bits, tf.int64), last)
    return tf.gather(self._order, tf.argsort(key, stable=True))

  def at(
    self, step: tf.Tensor
  ) -> tuple[collections.OrderedDict[str, Any], tf.Tensor]:
    """The examples of one step and which of them are real.

    What is missing to a full batch repeats the first chosen example: a value
    that the model can take, whatever it computes.
    """
    epoch, place = step // self._per_epoch, step % self._per_epoch
    within = tf.range(
      self._capacity if self._static_size is None else self._static_size
    )
    offsets = place * self._size + within
    is_real = offsets < self._count
    places = tf.where(is_real, offsets, 0)
    if self._orders is None:
      chosen = tf.gather(self._order_of(epoch), places)
    else:
      chosen = tf.gather(self._orders, epoch * self._capacity + places)
    batch = collections.OrderedDict(
      (
        name,
        tf.nest.map_structure(
          lambda t: tf.gather(t, chosen), self._examples[name]
        ),
      )
      for name in ('x', 'y', 'weight', 'places')
    )
    return batch, is_real


def _descend(
  optimizer: phases.Optimizer,
  state: Any,
  weights: tiers.NamedTensors,
  gradients: Mapping[str, Any],
) -> tuple[Any, tiers.NamedTensors, list[tf.Tensor]]:
  """One optimizer step; also returns sums over all that it changed."""
  by_rows = phases.is_plain_descent(optimizer)
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
  return state, result, sums


class _Stand(NamedTuple):
  """Where a client's training in phases that take turns stands, between steps.

  Attributes:
    optimizers: For each phase, the optimizer's state of each tier.
    trained: Tier to the weights that any of the phases trains.
    metrics: See `Worked`.
    loss: See `Worked`.
    is_finite: See `Worked`.
  """

  optimizers: list[collections.OrderedDict[str, Any]]
  trained: tiers.Weights
  metrics: keras_metrics.MetricState
  loss: list[tf.Tensor]
  is_finite: tf.Tensor


def _replaced(weights: tiers.Weights, trained: tiers.Weights) -> tiers.Weights:
  """Weights of all tiers, with newer values of some."""
  return collections.OrderedDict(
    (
      tier,
      collections.OrderedDict(
        (name, trained[tier].get(name, tensor) if tier in trained else tensor)
        for name, tensor in named.items()
      ),
    )
    for tier, named in weights.items()
  )


def _trained_by(
  group: Iterable[phases.Phase], weights: tiers.Weights
) -> tiers.Weights:
  """The weights that phases train, by tier."""
  chosen: tiers.Weights = collections.OrderedDict()
  for tier, named in weights.items():
    names = [
      name
      for name in named
      if any(tier in phase.train and phase.trains(name) for phase in group)
    ]
    if names:
      chosen[tier] = collections.OrderedDict((n, named[n]) for n in names)
  return chosen


class _Client:
  """What does not change while a client works at phases in turn."""

  def __init__(
    self,
    model: models.PartialModel,
    tables: lookups.Tables,
    weights: tiers.Weights,
    received: tiers.Weights,
    frozen: tiers.NamedTensors,
  ):
    self.model = model
    self.tables = tables
    self.weights = weights
    self.received = received
    self.frozen = frozen

  def step(
    self,
    phase: phases.Phase,
    place: int,
    stand: _Stand,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    seed: tf.Tensor,
    measured: bool,
  ) -> _Stand:
    """Takes one step of a phase, and measures it before."""
    mine = _trained_by([phase], stand.trained)
    metrics, loss = stand.metrics, stand.loss
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(mine)
      weights = _replaced(self.weights, stand.trained)
      objective = tf.constant(0.0)
      if phase.with_loss or measured:
        with rows.reading():
          predictions, regularization = self.model.predict(
            self.tables.stand_in(
              tiers.read_by_model(weights, phase.reads), batch['places']
            ),
            self.frozen,
            batch['x'],
            training=bool(mine),
            seed=seed,
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
      for term in phase.terms:
        objective += term(weights, self.received)
    is_finite = tf.logical_and(stand.is_finite, tf.math.is_finite(objective))
    optimizers, trained = list(stand.optimizers), stand.trained
    if mine:
      states = collections.OrderedDict(optimizers[place])
      sums = []
      gradients = tape.gradient(
        objective, mine, unconnected_gradients=tf.UnconnectedGradients.ZERO
      )
      moved: tiers.Weights = collections.OrderedDict()
      for tier, named in mine.items():
        states[tier], moved[tier], changed = _descend(
          phase.optimizer_of(tier), states[tier], named, gradients[tier]
        )
        sums += changed
      optimizers[place] = states
      trained = _replaced(trained, moved)
      # The sum of some numbers is finite only if all of them are.
      moved_finite = tf.reduce_all([tf.math.is_finite(total) for total in sums])
      is_finite = tf.logical_and(is_finite, moved_finite)
    if measured:
      real = tf.cast(is_real, tf.float32)
      rank = batch['weight'].shape.rank
      real = tf.reshape(real, [-1] + [1] * (rank - 1))
      metrics = self.model.metrics.update(
        metrics, batch['y'], predictions, batch['weight'] * real
      )
      loss = [loss[0] + value.total, loss[1] + value.num_elements]
    return _Stand(optimizers, trained, metrics, loss, is_finite)

  def steps(
    self,
    phase: phases.Phase,
    place: int,
    stand: _Stand,
    batch: Mapping[str, Any],
    is_real: tf.Tensor,
    seed: tf.Tensor,
  ) -> _Stand:
    """Takes all steps of a phase on one batch."""
    stand = self.step(phase, place, stand, batch, is_real, seed, phase.measured)
    if phase.repeats == 1:
      return stand

    def again(number: tf.Tensor, *stand: Any) -> tuple[Any, ...]:
      own_seed = random_bits.fold_in(seed, number)
      moved = self.step(
        phase, place, _Stand(*stand), batch, is_real, own_seed, False
      )
      return number + 1, *moved

    return _Stand(
      *tf.while_loop(
        lambda number, *_: number < phase.repeats,
        again,
        (tf.constant(1), *stand),
        parallel_iterations=1,
      )[1:]
    )


def _assigned(
  assign: groups.Assign,
  before: Worked,
  copies: tiers.NamedTensors,
  examples: Mapping[str, Any],
  count: tf.Tensor,
) -> Worked:
  """Lets a client choose its group, after what was done `before`."""

  def with_group(held: Any) -> tiers.Weights:
    return collections.OrderedDict(before.weights, **{tiers.GROUP: held})

  group = assign.choose(groups.Situation(with_group(copies), examples, count))
  return before._replace(
    weights=with_group(groups.copy_of(copies, group)), group=group
  )


def _take_turns(
  turns: Sequence[phases.Phase],
  client: _Client,
  before: Worked,
  batches: _Batches,
  count: tf.Tensor,
  seed: tf.Tensor,
) -> Worked:
  """Runs phases that take turns on each batch, after what was done `before`."""
  trained = _trained_by(turns, before.weights)
  optimizers = [
    collections.OrderedDict(
      (
        tier,
        tf.nest.map_structure(
          tf.convert_to_tensor,
          phase.optimizer_of(tier).initialize(
            tf.nest.map_structure(tf.TensorSpec.from_tensor, named)
          ),
        ),
      )
      for tier, named in _trained_by([phase], before.weights).items()
    )
    for phase in turns
  ]

  def body(step: tf.Tensor, *values: Any) -> tuple[Any, ...]:
    stand = _Stand(*values)
    batch, is_real = batches.at(step)
    for place, phase in enumerate(turns):
      own_seed = seed if not place else random_bits.fold_in(seed, f'{place}')
      stand = client.steps(
        phase,
        place,
        stand,
        batch,
        is_real,
        random_bits.fold_in(own_seed, step),
      )
    return step + 1, *stand

  _, *values = tf.while_loop(
    lambda step, *_: step < batches.number,
    body,
    (
      tf.constant(0),
      *_Stand(
        optimizers, trained, before.metrics, before.loss, before.is_finite
      ),
    ),
    parallel_iterations=1,
  )
  stand = _Stand(*values)
  num_examples = before.num_examples
  if any(phase.measured for phase in turns):
    num_examples += count
  return Worked(
    _replaced(before.weights, stand.trained),
    before.group,
    stand.metrics,
    stand.loss,
    num_examples,
    stand.is_finite,
    before.changes,
  )


def run(
  work: phases.Work,
  model: models.PartialModel,
  weights: tiers.Weights,
  frozen: tiers.NamedTensors,
  examples: Mapping[str, Any],
  count: tf.Tensor,
  seed: tf.Tensor,
  tables: lookups.Tables | None = None,
  round_number: tf.Tensor | None = None,
) -> Worked:
  """Runs phases one after another on one client's examples.

  Args:
    work: What to do.
    model: The model.
    weights: Tier to its trainable weights as the round begins; of GROUP all
      copies.
    frozen: Weights that are never trained.
    examples: The client's examples, `[capacity, ...]`.
    count: int32 scalar, how many of them are real.
    seed: int32 `[2]`; everything that is drawn follows from it.
    tables: Those that are trained by rows; none by default.
    round_number: int32 scalar: how many rounds were done, for work that
      depends on it.
  """
  tables = tables or lookups.Tables(model, ())
  chosen_rows = tables.choose(frozen, examples['x'], count)

  def with_tables(
    weights: tiers.Weights, value_of: Callable[[str, rows.Chosen], tf.Tensor]
  ) -> tiers.Weights:
    values = collections.OrderedDict(
      (name, value_of(name, chosen)) for name, chosen in chosen_rows.items()
    )
    return _replaced(weights, collections.OrderedDict({tiers.GLOBAL: values}))

  held = weights.get(tiers.GLOBAL, collections.OrderedDict())
  weights = with_tables(weights, lambda name, chosen: chosen.of(held[name]))
  copies = weights.get(tiers.GROUP, collections.OrderedDict())
  group = tf.constant(0)
  if copies:
    # Until the client chooses, for phases that read no group's weights.
    weights[tiers.GROUP] = groups.copy_of(copies, group)
  examples = {
    **examples,
    'places': {name: chosen.places for name, chosen in chosen_rows.items()},
  }
  done = Worked(
    weights,
    group,
    model.metrics.initial_state(),
    [tf.constant(0.0), tf.constant(0.0)],
    tf.constant(0),
    tf.constant(True),
    collections.OrderedDict(),
  )
  # The same for all phases, so that drawn parts of the data stay disjoint.
  part_seed = random_bits.fold_in(seed, 'part')
  for number, part in enumerate(work):
    if isinstance(part, groups.Assign):
      done = _assigned(part, done, copies, examples, count)
      weights[tiers.GROUP] = done.weights[tiers.GROUP]
      continue
    turns = [
      phase
      for phase in phases.taking_turns(part)
      if phase.max_steps != 0
      and (phase.measured or _trained_by([phase], weights))
    ]
    if not turns:
      continue
    own_seed = random_bits.fold_in(seed, f'phase {number}')
    chosen = turns[0].on.choose(examples, count, part_seed)
    batches = _Batches(
      turns[0],
      examples,
      chosen,
      random_bits.fold_in(own_seed, 'shuffle'),
      round_number,
    )
    client = _Client(model, tables, done.weights, weights, frozen)
    done = _take_turns(turns, client, done, batches, chosen.count, own_seed)
  after = done.weights.get(tiers.GLOBAL, held)
  return done._replace(
    # Nobody computes a whole table who does not read it.
    weights=with_tables(
      done.weights, lambda name, chosen: chosen.within(held[name], after[name])
    ),
    changes=collections.OrderedDict(
      (name, rows.Change(chosen.ids, weights[tiers.GLOBAL][name] - after[name]))
      for name, chosen in chosen_rows.items()
    ),
  )
