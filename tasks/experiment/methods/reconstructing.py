"""Builders of algorithms whose clients reconstruct local weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.methods import building
from tasks.experiment.methods.building import Measuring
from tasks.experiment.methods.setting import Setting
import tff_partial

if TYPE_CHECKING:
  from tasks.experiment.methods.building import Build
  from tasks.experiment.options.training import LocalTraining
  from tff_partial import phases
  from tff_partial import processes
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models


def fed_recon(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return tff_partial.algorithms.build_fed_recon(
    model,
    split=run.local.build_split(),
    reconstruct=run.local.local_phase(),
    update=run.local.global_phase(),
    joint=run.hyperparameters.joint,
    through_solution=run.hyperparameters.through_solution,
    **run.server_arguments(),
  )


def fed_recon_eval(
  model: models.PartialModel, run: Setting, measuring: Measuring
) -> Evaluation:
  return tff_partial.algorithms.build_fed_recon_eval(
    model,
    personalise=run.local.when_measured(run.local.local_phase()),
    split=measuring.get('split') or run.local.split_when_measured(),
  )


def fed_recon_fine_tuning_eval(
  model: models.PartialModel, run: Setting, measuring: Measuring
) -> Evaluation:
  return tff_partial.algorithms.build_fed_recon_fine_tuning_eval(
    model,
    split=measuring.get('split') or run.local.split_when_measured(),
    personalise=run.local.when_measured(run.local.local_phase()),
    tune=run.local.global_tuning_phase(),
  )


def fed_als(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return tff_partial.algorithms.build_fed_als(
    model, memory=run.memory, attributes=run.task.item_columns()
  )


def _noisy_als(builder: str) -> Build:
  """Return what builds one of those that take the noise into account."""

  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    if run.ledger is None:
      raise OptionError(
        f'--algorithm={builder.removeprefix("build_")}: it shrinks by the '
        'noise of a private run. Give --target_epsilon and --clip=1, or use '
        'fed_als.'
      )
    return getattr(tff_partial.algorithms, builder)(
      model, aggregation=run.aggregation(), attributes=run.task.item_columns()
    )

  return build


dp_als = _noisy_als('build_dp_als')
fed_als_private = _noisy_als('build_fed_als_private')


fed_als_eval = building.supported_by('build_fed_als_eval')


def solving(_: LocalTraining) -> phases.Phase:
  """Return a phase that reads no flags; `fed_als_eval` has its own."""
  return tff_partial.Phase()


def fed_ials(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return tff_partial.algorithms.build_fed_ials(
    model, weighting=run.hyperparameters.weighting, memory=run.memory
  )


fed_ials_eval = building.supported_by(
  'build_fed_ials_eval',
  lambda run: {'weighting': run.hyperparameters.weighting},
)
