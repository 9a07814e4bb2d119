"""Builders of algorithms whose clients join a sub-population."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.training import LocalTraining

if TYPE_CHECKING:
  from tff_partial import processes
  from tff_partial.model import models

# Flags of prototypes, map nodes and centers; and of forming an embedding.
CENTERS = ('map_rate', 'map_server_rate')
FORMING = ('forming_steps', 'forming_learning_rate')


def fed_embed(
  rule: str, user: str, reads: tuple[str, ...] = ()
) -> building.Algorithm:
  def measured(run: Setting) -> dict[str, Any]:
    how = run.hyperparameters.fed_embed.assignment(rule, run.parts)
    return {'parts': run.parts, 'assignment': how}

  def trained(run: Setting) -> dict[str, Any]:
    given = measured(run)
    if run.ledger is not None:
      # Reassigning heads needs exact counts of clients.
      given['assignment'] = given['assignment']._replace(reassign=None)
    return given

  return building.Algorithm(
    building.trained_by(
      'build_fed_embed', trained, training=LocalTraining.joint_phase
    ),
    building.measured_by('build_fed_embed_eval', measured),
    user=user,
    personal=LocalTraining.local_phase,
    reads=reads,
  )


def p_fed_km(gradients: str, user: str) -> building.Algorithm:
  def measured(run: Setting) -> dict[str, Any]:
    return {'parts': run.parts, 'gradients': gradients}

  def trained(run: Setting) -> dict[str, Any]:
    return {**measured(run), **run.hyperparameters.fed_embed.centers}

  return building.Algorithm(
    building.trained_by(
      'build_p_fed_km', trained, training=LocalTraining.global_phase
    ),
    building.supported_by('build_p_fed_km_eval', measured),
    user=user,
    reads=CENTERS,
  )


def ifca(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  # A private run would send numbers of members without noise.
  aggregation = dataclasses.replace(
    run.aggregation(), mean_of_members=run.ledger is None
  )
  return building.builder('build_ifca')(
    model,
    training=run.local.global_phase(),
    **{**run.server_arguments(), 'aggregation': aggregation},
  )
