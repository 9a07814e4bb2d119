"""Builders of algorithms whose clients join a sub-population."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.training import LocalTraining
import tff_partial

if TYPE_CHECKING:
  from tff_partial import processes
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models

# Flags of prototypes, map nodes and centers; and of forming an embedding.
CENTERS = ('map_rate', 'map_server_rate')
FORMING = ('forming_steps', 'forming_learning_rate')


def fed_embed(
  rule: str, user: str, reads: tuple[str, ...] = ()
) -> building.Algorithm:
  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    how = run.hyperparameters.fed_embed.assignment(rule, run.parts)
    if run.ledger is not None:
      # Reassigning heads needs exact counts of clients.
      how = how._replace(reassign=None)
    return tff_partial.algorithms.build_fed_embed(
      model,
      parts=run.parts,
      assignment=how,
      training=run.local.of_both(),
      **run.server_arguments(),
    )

  def measure(
    model: models.PartialModel, run: Setting, measuring: building.Measuring
  ) -> Evaluation:
    return tff_partial.algorithms.build_fed_embed_eval(
      model,
      parts=run.parts,
      assignment=run.hyperparameters.fed_embed.assignment(rule, run.parts),
      **measuring,
    )

  return building.Algorithm(
    build,
    measure,
    user=user,
    personal=LocalTraining.of_personal,
    reads=reads,
  )


def p_fed_km(gradients: str, user: str) -> building.Algorithm:
  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    return building.builder('build_p_fed_km')(
      model,
      parts=run.parts,
      gradients=gradients,
      training=run.local.of_global(),
      **run.hyperparameters.fed_embed.centers,
      **run.server_arguments(),
    )

  def measure(
    model: models.PartialModel, run: Setting, measuring: building.Measuring
  ) -> Evaluation:
    return building.builder('build_p_fed_km_eval')(
      model,
      parts=run.parts,
      gradients=gradients,
      split=measuring.get('split') or run.local.split_when_measured(),
    )

  return building.Algorithm(build, measure, user=user, reads=CENTERS)


def ifca(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  # A private run would send numbers of members without noise.
  aggregation = dataclasses.replace(
    run.aggregation(), mean_of_members=run.ledger is None
  )
  return building.builder('build_ifca')(
    model,
    training=run.local.of_global(),
    **{**run.server_arguments(), 'aggregation': aggregation},
  )


def supported_by(name: str) -> building.Measure:
  """Adapt a builder of evaluations whose clients train nothing before.

  Args:
    name: The builder's name.
  """
  return lambda model, run, measuring: building.builder(name)(
    model, split=measuring.get('split') or run.local.split_when_measured()
  )
