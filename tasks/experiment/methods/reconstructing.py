"""Builders of algorithms whose clients reconstruct local weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.errors import OptionError
from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.training import LocalTraining
import tff_partial

if TYPE_CHECKING:
  from tff_partial import phases
  from tff_partial import processes
  from tff_partial.model import models


def _personalising(run: Setting) -> building.Arguments:
  return {'personalise': run.local.when_measured(run.local.local_phase())}


fed_recon = building.trained_by(
  'build_fed_recon',
  lambda run: {
    'split': run.local.build_split(),
    'joint': run.hyperparameters.joint,
    'through_solution': run.hyperparameters.through_solution,
  },
  reconstruct=LocalTraining.local_phase,
  update=LocalTraining.global_phase,
)
fed_recon_eval = building.supported_by('build_fed_recon_eval', _personalising)
fed_recon_fine_tuning_eval = building.supported_by(
  'build_fed_recon_fine_tuning_eval',
  lambda run: {**_personalising(run), 'tune': run.local.global_tuning_phase()},
)

fed_als = building.trained_by(
  'build_fed_als',
  lambda run: {'memory': run.memory, 'attributes': run.task.item_columns()},
  server=building.nothing,
)


def _noisy_als(builder: str) -> building.Build:
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


fed_ials = building.trained_by(
  'build_fed_ials',
  lambda run: {
    'weighting': run.hyperparameters.weighting,
    'memory': run.memory,
  },
  server=building.nothing,
)
fed_ials_eval = building.supported_by(
  'build_fed_ials_eval',
  lambda run: {'weighting': run.hyperparameters.weighting},
)
