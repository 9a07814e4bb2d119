"""Local training: a client runs its phases, batch by batch."""

import collections
from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tff_partial import contexts
from tff_partial import groups
from tff_partial import phases
from tff_partial import random_bits
from tff_partial import tiers
from tff_partial.client import client_batches
from tff_partial.client import exact_solves
from tff_partial.client import optimizer_slots
from tff_partial.client.client_steps import Steps
from tff_partial.client.client_steps import TrainState
from tff_partial.client.client_steps import Turn
from tff_partial.client.descent import are_finite
from tff_partial.client.descent import replaced
from tff_partial.client.descent import trained_by
from tff_partial.model import keras_metrics
from tff_partial.sparse import lookups
from tff_partial.sparse import rows


class ClientResult(NamedTuple):
  """Result of a client's phases.

  Attributes:
    context: The client's context: weights, for GROUP the copy of the client's
      group or all copies, and computed values.
    metrics: States of the metrics over all measured batches.
    loss: Sum and number of the losses over all measured batches; also the sum
      of the layers' regularization, times that number, if there is any.
    num_examples: int32, the number of examples in an epoch of the measured
      phases.
    is_measured: True if any of these has a weight above 0.
    num_steps: Tier to the number of optimizer steps that trained it, int32.
    is_finite: True if every loss and every new weight was finite.
    changes: Name of each GLOBAL table of which only some rows were trained to
      these rows' ids and their old minus their new values.
  """

  context: contexts.ClientContext
  metrics: keras_metrics.MetricState
  loss: list[tf.Tensor]
  num_examples: tf.Tensor
  is_measured: tf.Tensor
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
  assign: groups.Assign,
  context: contexts.ClientContext,
  copies: tiers.NamedTensors,
  model: lookups.RowModel,
  part_seed: tf.Tensor,
) -> contexts.ClientContext:
  """Return the client's context after it chose its group, or all copies."""

  def with_group(held: Any) -> tiers.Weights:
    return collections.OrderedDict(context.weights, **{tiers.GROUP: held})

  # With whole tables, which are computed only if the choice reads them.
  choosing, _ = model.whole(context._replace(weights=with_group(copies)))
  group = assign.choose(choosing.on(assign.on, part_seed))
  own = copies if assign.holds_all else groups.copy_of(copies, group)
  received = collections.OrderedDict(context.received, **{tiers.GROUP: own})
  return context._replace(
    weights=with_group(own), received=received, group=group
  )


def run(
  work: phases.Work,
  context: contexts.ClientContext,
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
  model = lookups.RowModel(tables, context)
  weights = model.weights
  copies = weights.get(tiers.GROUP, collections.OrderedDict())
  if copies:
    # Until the client chooses, for phases that do not read group weights.
    weights[tiers.GROUP] = groups.copy_of(copies, tf.constant(0))
  done = ClientResult(
    context._replace(weights=weights, received=weights, group=tf.constant(0)),
    context.model.metrics.initial_state(),
    [tf.constant(0.0)] * (3 if context.model.is_regularized else 2),
    tf.constant(0),
    tf.constant(False),
    dict.fromkeys(weights, tf.constant(0)),
    tf.constant(True),
    {},
  )
  # The same for all phases, so that random parts of the data are disjoint.
  part_seed = random_bits.of_parts(context.seed)
  for number, part in enumerate(work):
    seed = random_bits.fold_in(context.seed, f'phase {number}')
    known = done.context._replace(seed=seed)
    if isinstance(part, groups.Assign):
      done = done._replace(
        context=_assigned(part, known, copies, model, part_seed)
      )
    elif isinstance(part, contexts.Compute):
      found = part.function(known.on(part.on, part_seed))
      computed = {**known.computed, part.name: found}
      done = done._replace(context=known._replace(computed=computed))
    elif isinstance(part, contexts.OverwriteWeights):
      done = _overwritten(part, done._replace(context=known), part_seed)
    elif isinstance(part, phases.Phase) and part.exact is not None:
      if part.max_steps != 0:
        done = _solved(part, done._replace(context=known), model, part_seed)
    elif named := _to_do(number, part, done.weights):
      first, *_ = named.values()
      examples = done.context.examples
      batches = client_batches.Batches(
        first,
        {**examples, 'places': model.places},
        first.on.choose(examples, done.context.count, part_seed),
        random_bits.fold_in(seed, 'shuffle'),
        round_number,
      )
      _, *values = tf.while_loop(
        lambda step, *_, batches=batches: step < batches.number,
        functools.partial(
          Steps(model, done.context, part_seed).step,
          _turns(named, seed),
          batches.at,
        ),
        (tf.constant(0), *_first_state(named, done, round_number)),
        parallel_iterations=1,
      )
      done = _trained(named, done, batches, TrainState(*values))
  context, changes = model.whole(done.context._replace(seed=context.seed))
  return done._replace(context=context, changes=changes)


def _to_do(
  number: int, part: phases.Phase | phases.Interleaved, weights: tiers.Weights
) -> dict[str, phases.Phase]:
  """Return the phases of a part that have anything to do, by name.

  Raises:
    PhaseError: If `variable_filter` of a phase names none of the client's
      values that it trains, which no model knows.
  """
  values: Any = weights.get(tiers.CLIENT_VALUES, {})
  for phase in phases.interleaved_phases(part):
    if tiers.CLIENT_VALUES in phase.train and not any(
      map(phase.trains, values)
    ):
      raise phases.PhaseError(
        f'variable_filter={phase.variable_filter!r} names none of the values '
        f'that the phase could train: {list(values)}.'
      )
  return {
    optimizer_slots.name_of(number, place): phase
    for place, phase in enumerate(phases.interleaved_phases(part))
    if phase.max_steps != 0 and (phase.measured or trained_by([phase], weights))
  }


def _turns(named: Mapping[str, phases.Phase], seed: tf.Tensor) -> list[Turn]:
  """Return the turns of interleaved phases, each with a seed of its own."""
  return [
    Turn(
      phase,
      place,
      seed if not place else random_bits.fold_in(seed, f'{place}'),
      phase.measured,
      phase.steps_per_batch,
    )
    for place, phase in enumerate(named.values())
  ]


def _first_state(
  named: Mapping[str, phases.Phase],
  before: ClientResult,
  round_number: tf.Tensor | None,
) -> TrainState:
  """Return the state in which interleaved phases begin."""
  trained = trained_by(named.values(), before.weights)
  optimizers = [
    optimizer_slots.begin(
      phase,
      trained_by([phase], before.weights, before.context.model.state),
      before.context.slots.now.get(name, {}),
      round_number,
    )
    for name, phase in named.items()
  ]
  return TrainState(
    optimizers, trained, before.metrics, before.loss, before.is_finite
  )


def _trained(
  named: Mapping[str, phases.Phase],
  before: ClientResult,
  batches: client_batches.Batches,
  state: TrainState,
) -> ClientResult:
  """Return the result after interleaved phases that ended in `state`."""
  slots = before.context.slots
  for name, states in zip(named, state.optimizers, strict=True):
    slots = slots._replace(now=optimizer_slots.after(slots.now, name, states))
  num_examples, num_steps = before.num_examples, dict(before.num_steps)
  is_measured = before.is_measured
  if any(phase.measured for phase in named.values()):
    num_examples += batches.num_examples
    is_measured |= (batches.num_examples > 0) & batches.have_weight
  for phase in named.values():
    for tier in phase.train:
      num_steps[tier] = (
        num_steps.get(tier, 0) + batches.number * phase.steps_per_batch
      )
  return before._replace(
    context=before.context._replace(
      weights=replaced(before.weights, state.trained), slots=slots
    ),
    metrics=state.metrics,
    loss=state.loss,
    num_examples=num_examples,
    is_measured=is_measured,
    num_steps=num_steps,
    is_finite=state.is_finite,
  )


def _solved(
  phase: phases.Phase,
  before: ClientResult,
  model: lookups.RowModel,
  part_seed: tf.Tensor,
) -> ClientResult:
  """Return the result after a phase that solves exactly."""
  context = before.context
  solve = exact_solves.ExactSolve(phase, model, context, part_seed)
  trained = solve.solved()
  num_steps = dict(before.num_steps)
  for tier in phase.train:
    num_steps[tier] = num_steps.get(tier, 0) + 1
  return before._replace(
    context=context._replace(weights=replaced(before.weights, trained)),
    num_steps=num_steps,
    is_finite=before.is_finite & are_finite(trained),
  )


def _overwritten(
  part: contexts.OverwriteWeights, done: ClientResult, part_seed: tf.Tensor
) -> ClientResult:
  """Replace a client's weights by those that `part` computes."""
  new = part.function(done.context.on(part.on, part_seed))
  for tier, named in new.items():
    unknown = [n for n in named if n not in done.weights.get(tier, {})]
    if unknown:
      raise contexts.ContextError(
        f'A client is to replace its {tier} weights {unknown}, but it holds '
        f'{list(done.weights.get(tier, {}))} there.'
      )
  return done._replace(
    context=done.context._replace(weights=replaced(done.weights, new)),
    is_finite=done.is_finite & are_finite(new),
  )
