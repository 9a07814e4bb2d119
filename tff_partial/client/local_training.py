"""Local training: a client runs its phases, batch by batch."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import groups
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client import client_batches
from tff_partial.client import optimizer_slots
from tff_partial.client.client_steps import Client
from tff_partial.client.client_steps import Stand
from tff_partial.client.descent import replaced
from tff_partial.client.descent import trained_by
from tff_partial.contexts import ClientContext
from tff_partial.contexts import Compute
from tff_partial.contexts import ContextError
from tff_partial.contexts import Revise
from tff_partial.model import keras_metrics
from tff_partial.sparse import lookups
from tff_partial.sparse import rows


class ClientResult(NamedTuple):
  """Result of a client's phases.

  Attributes:
    context: The client's context: weights, for GROUP the copy of the client's
      group, and computed values.
    metrics: States of the metrics over all measured batches.
    loss: Sum and number of the losses over all measured batches; also the sum
      of the layers' regularization, times that number, if there is any.
    num_examples: int32, the number of examples in an epoch of the measured
      phases.
    num_steps: Tier to the number of optimizer steps that trained it, int32.
    is_finite: True if every loss and every new weight was finite.
    changes: Name of each GLOBAL table of which only some rows were trained to
      these rows' ids and their old minus their new values.
  """

  context: ClientContext
  metrics: keras_metrics.MetricState
  loss: list[tf.Tensor]
  num_examples: tf.Tensor
  num_steps: Mapping[str, tf.Tensor]
  is_finite: tf.Tensor
  changes: Mapping[str, rows.Change]

  @property
  def weights(self) -> tiers.Weights:
    """Tier to named tensors."""
    return self.context.weights

  @property
  def group(self) -> tf.Tensor:
    """int32, the client's group; 0 if the model has none."""
    return self.context.group


def _assigned(
  assign: groups.Assign, context: ClientContext, copies: tiers.NamedTensors
) -> ClientContext:
  """Return the client's context after it chose its group, from all copies."""

  def with_group(held: Any) -> tiers.Weights:
    return collections.OrderedDict(context.weights, **{tiers.GROUP: held})

  group = assign.choose(context._replace(weights=with_group(copies)))
  own = groups.copy_of(copies, group)
  received = collections.OrderedDict(context.received, **{tiers.GROUP: own})
  return context._replace(
    weights=with_group(own), received=received, group=group
  )


def _counted(
  num_steps: Mapping[str, tf.Tensor],
  turns: Sequence[phases.Phase],
  batches: tf.Tensor,
) -> dict[str, tf.Tensor]:
  """Return each tier's number of steps after some more batches."""
  counted = dict(num_steps)
  for phase in turns:
    for tier in phase.train:
      counted[tier] = counted.get(tier, 0) + batches * phase.repeats
  return counted


def _take_turns(
  named: Mapping[str, phases.Phase],
  tables: lookups.Tables,
  before: ClientResult,
  batches: client_batches.Batches,
  seed: tf.Tensor,
  round_number: tf.Tensor | None,
) -> ClientResult:
  """Run interleaved phases, starting from the result `before`."""
  turns = list(named.values())
  client = Client(tables, before.context)
  trained = trained_by(turns, before.weights)
  slots = before.context.slots
  optimizers = [
    optimizer_slots.begin(
      phase,
      trained_by([phase], before.weights),
      slots.now.get(name, {}),
      round_number,
    )
    for name, phase in named.items()
  ]

  def body(step: tf.Tensor, *values: Any) -> tuple[Any, ...]:
    stand = Stand(*values)
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
      *Stand(
        optimizers, trained, before.metrics, before.loss, before.is_finite
      ),
    ),
    parallel_iterations=1,
  )
  stand = Stand(*values)
  for name, states in zip(named, stand.optimizers, strict=True):
    slots = slots._replace(now=optimizer_slots.after(slots.now, name, states))
  num_examples = before.num_examples
  if any(phase.measured for phase in turns):
    num_examples += batches.num_examples
  return before._replace(
    context=before.context._replace(
      weights=replaced(before.weights, stand.trained), slots=slots
    ),
    metrics=stand.metrics,
    loss=stand.loss,
    num_examples=num_examples,
    num_steps=_counted(before.num_steps, turns, batches.number),
    is_finite=stand.is_finite,
  )


class _Tables:
  """The GLOBAL tables of which a client trains only some rows.

  Attributes:
    tables: The tables that are trained by rows.
    rows: Name of each table to the rows that the client's examples look up.
    held: All GLOBAL weights as received, with whole tables.
  """

  def __init__(self, tables: lookups.Tables, context: ClientContext):
    self.tables = tables
    self.rows = tables.choose(
      context.frozen, context.examples['x'], context.count
    )
    self.held = context.weights.get(tiers.GLOBAL, collections.OrderedDict())

  def _with(
    self,
    weights: tiers.Weights,
    value_of: Callable[[str, rows.Chosen], tf.Tensor],
  ) -> tiers.Weights:
    values = collections.OrderedDict(
      (name, value_of(name, chosen)) for name, chosen in self.rows.items()
    )
    return replaced(weights, collections.OrderedDict({tiers.GLOBAL: values}))

  def rows_of(self, weights: tiers.Weights) -> tiers.Weights:
    """Return weights with rows in place of tables."""
    return self._with(weights, lambda name, rows: rows.of(self.held[name]))

  def whole(self, result: ClientResult, before: tiers.Weights) -> ClientResult:
    """Return the result with whole tables and the changes of their rows."""
    after = result.weights.get(tiers.GLOBAL, self.held)
    context = result.context
    return result._replace(
      context=context._replace(
        # A whole table is computed only if it is read.
        weights=self._with(
          result.weights,
          lambda name, rows: rows.within(self.held[name], after[name]),
        ),
        received=self._with(context.received, lambda name, _: self.held[name]),
      ),
      changes=collections.OrderedDict(
        (
          name,
          rows.Change(chosen.ids, before[tiers.GLOBAL][name] - after[name]),
        )
        for name, chosen in self.rows.items()
      ),
    )


def run(
  work: phases.Work,
  context: ClientContext,
  tables: lookups.Tables | None = None,
  round_number: tf.Tensor | None = None,
) -> ClientResult:
  """Run phases one after another on one client's examples.

  Args:
    work: The phases and other parts.
    context: The client's context at the start of the round: `weights` are all
      that it holds, for GROUP all copies. Its `seed` determines all random
      draws.
    tables: Tables that are trained by rows; none by default.
    round_number: int32 scalar, the number of completed rounds, for work that
      depends on it.
  """
  mine = _Tables(tables or lookups.Tables(context.model, ()), context)
  seed = context.seed
  weights = mine.rows_of(context.weights)
  copies = weights.get(tiers.GROUP, collections.OrderedDict())
  if copies:
    # Until the client chooses, for phases that do not read group weights.
    weights[tiers.GROUP] = groups.copy_of(copies, tf.constant(0))
  done = ClientResult(
    context._replace(weights=weights, received=weights, group=tf.constant(0)),
    context.model.metrics.initial_state(),
    [tf.constant(0.0)] * (3 if context.model.is_regularized else 2),
    tf.constant(0),
    dict.fromkeys(weights, tf.constant(0)),
    tf.constant(True),
    {},
  )
  # The same for all phases, so that random parts of the data are disjoint.
  part_seed = random_bits.fold_in(seed, 'part')
  for number, part in enumerate(work):
    own_seed = random_bits.fold_in(seed, f'phase {number}')
    known = done.context._replace(seed=own_seed)
    if isinstance(part, groups.Assign):
      done = done._replace(context=_assigned(part, known, copies))
    elif isinstance(part, Compute):
      found = part.function(known.on(part.on, part_seed))
      computed = {**known.computed, part.name: found}
      done = done._replace(context=known._replace(computed=computed))
    elif isinstance(part, Revise):
      done = _revised(part, done._replace(context=known))
    else:
      named = {
        optimizer_slots.name_of(number, place): phase
        for place, phase in enumerate(phases.taking_turns(part))
      }
      done = _train(named, done, mine, own_seed, part_seed, round_number)
  done = mine.whole(done, weights)
  return done._replace(context=done.context._replace(seed=seed))


def _revised(revise: Revise, done: ClientResult) -> ClientResult:
  """Replace a client's weights by those that `revise` computes."""
  new = revise.function(done.context)
  for tier, named in new.items():
    unknown = [n for n in named if n not in done.weights.get(tier, {})]
    if unknown:
      raise ContextError(
        f'A client is to replace its {tier} weights {unknown}, but it holds '
        f'{list(done.weights.get(tier, {}))} there.'
      )
  changed = [tensor for named in new.values() for tensor in named.values()]
  are_finite = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in changed]
  return done._replace(
    context=done.context._replace(weights=replaced(done.weights, new)),
    is_finite=tf.reduce_all([done.is_finite, *are_finite]),
  )


def _train(
  named: Mapping[str, phases.Phase],
  done: ClientResult,
  mine: _Tables,
  own_seed: tf.Tensor,
  part_seed: tf.Tensor,
  round_number: tf.Tensor | None,
) -> ClientResult:
  """Run a phase, or several interleaved, if there is anything to do."""
  named = {
    name: phase
    for name, phase in named.items()
    if phase.max_steps != 0
    and (phase.measured or trained_by([phase], done.weights))
  }
  if not named:
    return done
  first, *_ = named.values()
  context = done.context
  chosen = first.on.choose(context.examples, context.count, part_seed)
  places = {name: chosen.places for name, chosen in mine.rows.items()}
  batches = client_batches.Batches(
    first,
    {**context.examples, 'places': places},
    chosen,
    random_bits.fold_in(own_seed, 'shuffle'),
    round_number,
  )
  return _take_turns(named, mine.tables, done, batches, own_seed, round_number)
