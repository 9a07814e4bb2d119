"""A client's work as a whole: its checks, and what it trains for itself."""

import dataclasses

import tensorflow as tf

from tff_partial import contexts
from tff_partial import groups
from tff_partial import phases
from tff_partial import tiers
from tff_partial.data import splits
from tff_partial.model import models
from tff_partial.solvers import affine
from tff_partial.solvers import convexity
from tff_partial.solvers.exact import ExactError


def _own_part(
  phase: phases.Phase, model: models.PartialModel, rounds: int
) -> phases.Phase | None:
  """Return a phase limited to tiers that stay with the client, or None."""
  absent = {tiers.LOCAL} - {*model.tiers}  # Others are the algorithm's.
  train = tuple(t for t in phase.train if t in {*tiers.CLIENTS} - absent)
  if not train:
    return None
  epochs, max_steps = phase.epochs, phase.max_steps
  if callable(epochs):
    epochs = int(epochs(tf.constant(rounds)))
    if epochs < 1:  # In such a round the phase takes no step.
      epochs, max_steps = 1, 0
  factor = phase.rate_factor
  if callable(factor):
    factor = float(factor(tf.constant(rounds)))
  return dataclasses.replace(
    phase,
    train=train,
    on=splits.everything(),
    epochs=epochs,
    max_steps=max_steps,
    rate_factor=factor,
    slots=phases.RESET,
    measured=False,
  )


def personal_phases(
  work: phases.Work, model: models.PartialModel, rounds: int
) -> list[phases.Part]:
  """Return the part of a client's work that trains its own tiers.

  The phases use all of the client's examples.

  Args:
    work: A client's work in a round.
    model: The model.
    rounds: Number of completed rounds, for epochs and rates that depend on it.

  Returns:
    The phases, limited to tiers that stay with the client, the choice of its
    group and computed values for that; empty if there are none.
  """
  found: list[phases.Part] = []
  chooses = any(isinstance(part, groups.Assign) for part in work)
  for part in work:
    if isinstance(part, contexts.OverwriteWeights):
      continue  # It depends on what a round brings.
    if not isinstance(part, phases.Phase | phases.Interleaved):
      found += [part._replace(on=splits.everything())] if chooses else []
      continue
    turns = [
      _own_part(phase, model, rounds)
      for phase in phases.interleaved_phases(part)
    ]
    kept = tuple(phase for phase in turns if phase is not None)
    if kept:
      found.append(kept[0] if len(kept) == 1 else phases.Interleaved(kept))
  return found


def needs_personal_copy(work: phases.Work) -> bool:
  """Return True if clients need a personal copy of the GLOBAL weights."""
  return any(
    tiers.PERSONAL in phase.train
    or phase.read is not tiers.server_and_local_weights
    for phase in phases.all_phases(work)
  )


def holds_all_copies(work: phases.Work) -> bool:
  """Return True if clients hold the copies of all groups."""
  return any(
    isinstance(part, groups.Assign) and part.holds_all for part in work
  )


def follow_rounds(work: phases.Work) -> bool:
  """Return True if the work depends on the number of completed rounds."""
  return any(
    callable(phase.epochs) or callable(phase.rate_factor)
    for phase in phases.all_phases(work)
  )


def check(work: phases.Work, model: models.PartialModel) -> None:
  """Check a client's work as a whole.

  Raises:
    PhaseError: If `variable_filter` of a phase names no variable, a phase
      trains copies of global variables of a model without any, or interleaved
      phases have different batches.
    GroupError: If clients of a model with groups do not choose theirs, once and
      before they train its weights, or clients of other models do.
  """
  _check_groups(work, model)
  for part in work:
    if isinstance(
      part, groups.Assign | contexts.Compute | contexts.OverwriteWeights
    ):
      continue
    first, *others = map(phases.changed, phases.interleaved_phases(part))
    if others and any(phase.exact for phase in (first, *others)):
      raise phases.PhaseError(
        'A phase that solves exactly has no batches, so that phases cannot '
        'take turns with it. Run them one after another.'
      )
    for other in others:
      for name in phases.SCHEDULE:
        if getattr(first, name) != getattr(other, name):
          raise phases.PhaseError(
            f'Phases that take turns on each batch differ in {name}: '
            f'{getattr(first, name)} and {getattr(other, name)}.'
          )
  for phase in phases.all_phases(work):
    if phase.loss is not None:
      model.check_loss(phase.loss)
    names = [
      v.name
      for tier in phase.train
      for v in model.trainable(tiers.of_model(tier))
    ]
    if tiers.PERSONAL in phase.train and tiers.GLOBAL not in model.tiers:
      raise phases.PhaseError(
        'A phase trains copies of the global variables, but the model has no '
        f'global variables: it has {list(model.tiers)} ones.'
      )
    if phase.train == (tiers.CLIENT_VALUES,):
      continue  # The algorithm defines their names.
    if phase.variable_filter is not None and not any(map(phase.trains, names)):
      raise phases.PhaseError(
        f'variable_filter={phase.variable_filter!r} names none of the '
        f'variables that the phase could train: {names}.'
      )
    if phase.exact is not None and phase.max_steps != 0:
      _check_exact(phase, model)
    if phase.through is not None:
      _check_exact(phase.through, model)


def _check_exact(phase: phases.Phase, model: models.PartialModel) -> None:
  """Check that a model's weights can be solved for exactly."""

  def solves(tier: str, name: str) -> bool:
    return (
      tier in phase.train and phase.trains(name) and name not in model.state
    )

  settings = phase.exact
  local = model.specs(tiers.LOCAL)
  name = settings.covariance if settings else None
  if name is not None and (name not in local or solves(tiers.LOCAL, name)):
    raise ExactError(
      f'Exact: covariance={name!r} is to receive the inverse of the Hessian: '
      'name a LOCAL variable that the phase does not train (see '
      f'variable_filter) of {list(local)}.'
    )
  convexity.check(model, phase.loss)
  affine.check(model, phase.read, solves)


def _check_groups(work: phases.Work, model: models.PartialModel) -> None:
  has_groups = tiers.GROUP in model.tiers
  places = [
    place for place, part in enumerate(work) if isinstance(part, groups.Assign)
  ]
  if has_groups and not places:
    raise groups.GroupError(
      'The model has variables for groups, but the algorithm has no groups. '
      'Build the model without `group`.'
    )
  if places and not has_groups:
    raise groups.GroupError(
      'Clients choose groups, but the model has no variables for them. Build '
      'it with `group` and `num_groups`.'
    )
  if len(places) > 1:
    raise groups.GroupError(f'Clients choose their groups {len(places)} times.')
  for phase in phases.all_phases(work[: places[0]] if places else []):
    if tiers.GROUP in phase.train:
      raise groups.GroupError(
        'A phase trains the weights of a group before the client has chosen '
        'its group.'
      )
  for phase in phases.all_phases(work) if holds_all_copies(work) else []:
    if phase.weights_fn is None:
      raise groups.GroupError(
        'Clients hold the copies of all groups, of which the model reads one: '
        'say which by `weights_fn`, such as `groups.one_of_all(0)`.'
      )
