"""Optimizer state at clients: learning rates of a round, and slots.

Besides the learning rate an optimizer has slots, such as the moments and the
step count of Adam. They are initialized again in every round, unless a phase
has `slots='kept'`: then the slots of the client's own weights are kept with
these weights. Slots of weights that the server holds are never kept.
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tff_partial import phases
from tff_partial import tiers
from tff_partial.client.descent import first_state
from tff_partial.client.descent import trained_by
from tff_partial.model import models
from tff_partial.model import tracing

# The tiers of weights that are the client's own.
_OWN = (tiers.LOCAL, tiers.PERSONAL)

HELD, SLOTS = 'held', 'slots'

# Name of a phase to tier to the optimizer's state.
Kept = Mapping[str, Mapping[str, Any]]


def name_of(number: int, place: int) -> str:
  """Return the name of a phase within a client's work.

  Args:
    number: The index of the part of the work.
    place: The phase's index among the interleaved phases of the part.
  """
  return f'phase_{number}_{place}'


def keeping(work: phases.Work) -> dict[str, phases.Phase]:
  """Return the phases whose slots are kept with the client, by name."""
  return {
    name_of(number, place): phase
    for number, part in enumerate(work)
    if isinstance(part, phases.Phase | phases.Interleaved)
    for place, phase in enumerate(phases.interleaved_phases(part))
    if phase.slots == phases.KEPT
  }


def _trained(
  phase: phases.Phase, model: models.PartialModel
) -> dict[str, collections.OrderedDict[str, tf.TensorSpec]]:
  """Return specs of the client's own weights that a phase trains, by tier."""
  own = collections.OrderedDict(
    (tier, model.specs(tiers.of_model(tier)))
    for tier in _OWN
    if tier in phase.train
  )
  return trained_by([phase], own, model.state)


def first(
  keeping: Mapping[str, phases.Phase], model: models.PartialModel
) -> collections.OrderedDict[str, Any]:
  """Make the kept slots of a client that never took part."""
  return collections.OrderedDict(
    (
      name,
      collections.OrderedDict(
        (tier, first_state(phase.optimizer_of(tier), named))
        for tier, named in _trained(phase, model).items()
      ),
    )
    for name, phase in keeping.items()
  )


def begin(
  phase: phases.Phase,
  weights: tiers.Weights,
  kept: Mapping[str, Any],
  round_number: tf.Tensor | None,
) -> collections.OrderedDict[str, Any]:
  """Make the states of a phase's optimizers at its start.

  Args:
    phase: The phase.
    weights: Tier to the weights that it trains.
    kept: Tier to the state kept with the client, if any.
    round_number: int32 scalar, the number of completed rounds, if known.

  Returns:
    Tier to state.
  """
  factor = phase.rate_factor
  if callable(factor):
    try:
      factor = factor(round_number)
    except TypeError as error:  # TensorFlow's is about an operation.
      raise phases.PhaseError(
        f'rate_factor: the function fails on the number of rounds, an int32 '
        f'scalar: {error!s:.100} Make it a float first: '
        '`lambda done: 0.9 ** tf.cast(done, tf.float32)`.'
      ) from error
  states = collections.OrderedDict()
  for tier, named in weights.items():
    optimizer = phase.optimizer_of(tier)
    state = first_state(optimizer, named)
    # Rates and the like are those of the phase, not those that were kept.
    given = collections.OrderedDict(optimizer.get_hparams(state))
    has_factor = tf.is_tensor(factor) or factor != 1.0
    if has_factor:
      rate = given[phases.RATE]
      given[phases.RATE] = rate * tf.cast(factor, rate.dtype)
    if tier in kept:
      state = tf.nest.pack_sequence_as(state, tf.nest.flatten(kept[tier]))
    if has_factor or tier in kept:
      state = optimizer.set_hparams(state, given)
    states[tier] = state
  return states


def after(
  kept: Kept, name: str, states: Mapping[str, Any]
) -> collections.OrderedDict[str, Any]:
  """Replace the kept slots of one phase by its optimizers' new states.

  Args:
    kept: The kept slots of all phases.
    name: The phase's name.
    states: Tier to state, for all tiers that the phase trains.
  """
  return collections.OrderedDict(
    (
      one,
      collections.OrderedDict((tier, states[tier]) for tier in held)
      if one == name
      else held,
    )
    for one, held in kept.items()
  )


def check(
  keeping: Mapping[str, phases.Phase],
  model: models.PartialModel,
  recall: Callable[..., Any],
  remembered: Any,
  shared: Any,
) -> None:
  """Check that slots can be kept with a client.

  Raises:
    PhaseError: If such a phase trains none of the client's own weights, or the
      client forgets them, or some tables are client-sized.
  """
  if not keeping:
    return
  sized = list(model.client_tables.names)
  if sized:
    raise phases.PhaseError(
      f"slots='kept': the tables {sized} have the size that a client's data "
      'need, which changes, and what an optimizer keeps of them would have to '
      'follow. Leave `slots` out, or build the model without `client_sized`.'
    )

  def look(held: Any, received: Any, seed: tf.Tensor) -> Any:
    weights = recall(model, held, received, seed)
    for phase in keeping.values():
      _check_phase(phase, model, weights, tf.nest.flatten(held))
    return ()

  seed = tf.TensorSpec([2], tf.int32)
  tracing.traced(look, remembered, shared, seed)


def _check_phase(
  phase: phases.Phase,
  model: models.PartialModel,
  recalled: Mapping[str, Any],
  remembered: list[tf.Tensor],
) -> None:
  """Check one phase against the weights that a client recalls."""
  own = _trained(phase, model)
  if not own:
    raise phases.PhaseError(
      f"slots='kept': a phase trains {list(phase.train)}, of which the model "
      "has no weights of the client's own: those of the server change between "
      "a client's rounds. Give the phase that trains "
      f'{" or ".join(map(repr, _OWN))} weights, or leave `slots` out.'
    )
  for tier in own:
    known = list(recalled.get(tier, {}).values())
    if not tracing.depends_on(known, remembered):
      raise phases.PhaseError(
        f"slots='kept': clients of this algorithm forget their {tier!r} "
        'weights after each round, and begin with others in the next, for '
        'which what an optimizer kept would be wrong. Leave `slots` out, or '
        'take an algorithm whose clients remember them, such as FURL.'
      )
