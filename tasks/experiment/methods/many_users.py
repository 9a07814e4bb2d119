"""Algorithms for clients that keep tables of many users each.

Algorithms that otherwise train one model for all leave these tables to clients.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import Hpfl
from tasks.experiment.options.training import LocalTraining
import tff_partial

if TYPE_CHECKING:
  from tff_partial import processes
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models


def _keeps_tables(model: models.PartialModel, run: Setting) -> bool:
  return run.task.keeps_tables and tff_partial.tiers.LOCAL in model.tiers


def fed_avg(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """Build FedAvg; tables that clients keep are trained as in FedPer."""
  if _keeps_tables(model, run):
    return tff_partial.algorithms.build_fed_per(
      model, training=run.local.joint_phase(), **run.server_arguments()
    )
  return tff_partial.algorithms.build_fed_avg(
    model, training=run.local.global_phase(), **run.server_arguments()
  )


def fine_tuning_eval(
  model: models.PartialModel, run: Setting, measuring: building.Measuring
) -> Evaluation:
  """Build an evaluation after fine-tuning; with tables, as in a round."""
  if _keeps_tables(model, run):
    measuring['personalise'] = dataclasses.replace(
      run.local.when_measured(run.local.joint_phase()),
      variable_filter=run.local.tuned,
    )
  return building.builder('build_fine_tuning_eval')(
    model, client_state=tff_partial.client_state.persist_local, **measuring
  )


def fed_prox(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """Build FedProx; tables that clients keep are trained without the penalty."""
  if _keeps_tables(model, run):
    from baselines import fed_prox as usual  # Slow, as it imports TFF.

    penalty = run.hyperparameters.penalty
    if penalty is None:
      penalty = usual.PENALTY
    training = dataclasses.replace(
      run.local.joint_phase(), terms=(tff_partial.terms.proximal(penalty),)
    )
    return tff_partial.algorithms.build_fed_per(
      model, training=training, **run.server_arguments()
    )
  return building.builder('build_fed_prox')(
    model,
    training=run.local.global_phase(),
    **run.hyperparameters.penalty_argument,
    **run.server_arguments(),
  )


def fed_sgd(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """Build FedSGD; tables that clients keep take one step on all examples."""
  rate = run.local.update.learning_rate
  if _keeps_tables(model, run):
    optimizers = {
      tff_partial.tiers.GLOBAL: tff_partial.sgd(rate),
      tff_partial.tiers.LOCAL: run.local.reconstruction.build(),
    }
    return tff_partial.algorithms.build_fed_per(
      model,
      training=tff_partial.Phase(optimizer=optimizers, batch_size=None),
      **run.server_arguments(),
    )
  return building.builder('build_fed_sgd')(
    model, client_learning_rate=rate, **run.server_arguments()
  )


def hpfl(*, drafts: bool = True, public: bool = True) -> building.Algorithm:
  """Build HPFL, or one half: drafts of private tables, or public components."""

  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    how = run.hyperparameters.hpfl
    rows = run.table_rows
    # In a private run, all that a client sends is clipped and noised as one
    # record, like an update elsewhere.
    aggregation = tff_partial.Aggregation()
    join = tff_partial.client_statistics.Join.SUM
    if run.ledger is not None:
      aggregation = run.aggregation()
      join = tff_partial.client_statistics.Join.WITH_UPDATE
    return tff_partial.algorithms.build_hpfl(
      model,
      attributes=run.item_attributes,
      drafts=how.drafting(rows, join) if drafts else None,
      tables=tuple(rows),
      public=public,
      training=run.local.joint_phase(tff_partial.tiers.PERSONAL),
      by_nearness=drafts and how.by_nearness,
      join=join,
      aggregation=aggregation,
    )

  return building.Algorithm(
    build,
    building.measured_by(
      'build_hpfl_eval', lambda run: {'attributes': run.item_attributes}
    ),
    user=tasks_lib.OWN,
    personal=LocalTraining.personal_model_phase,
    ignores=building.JOINING,
    reads=tuple(Hpfl().flags()) if drafts else (),
  )
