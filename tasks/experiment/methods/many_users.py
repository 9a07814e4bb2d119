"""Algorithms where clients have many users each, in tables that they keep.

What trains one model for all elsewhere leaves these tables to the clients here.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import baselines
from tasks import task as tasks_lib
from tasks.experiment.methods import building
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.training import LocalTraining
from tasks.options import Leak
from tff_partial import algorithms
from tff_partial import composition
from tff_partial import phases
from tff_partial import processes
from tff_partial import statistics
from tff_partial import terms
from tff_partial import tiers
from tff_partial.evaluation import Evaluation
from tff_partial.evaluation import Measuring
from tff_partial.model import models

# mu of FedProx, as `build_fed_prox` has it.
_FED_PROX_PENALTY = 0.1
# Flags of HPFL's drafts, and of its public components.
_OF_DRAFTS = (
  'hpfl_drafts',
  'hpfl_rows_per_center',
  'hpfl_num_centers',
  'hpfl_min_users',
  'hpfl_init',
  'hpfl_max_iterations',
  'hpfl_center_weighting',
)
_OF_PUBLIC = ('hpfl_threshold', 'hpfl_average_hidden')


def _keeps_tables(model: models.PartialModel, run: Setting) -> bool:
  return run.keeps_tables and tiers.LOCAL in model.tiers


def fed_avg(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """FedAvg; where clients keep tables, these are trained, too, as in FedPer."""
  if _keeps_tables(model, run):
    return algorithms.build_fed_per(
      model, training=run.local.of_both(), **run.joining()
    )
  return algorithms.build_fed_avg(
    model, training=run.local.of_global(), **run.joining()
  )


def fed_prox(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """FedProx; where clients keep tables, they train these freely."""
  if _keeps_tables(model, run):
    penalty = run.hyperparameters.penalty
    if penalty is None:
      penalty = _FED_PROX_PENALTY
    training = dataclasses.replace(
      run.local.of_both(), terms=(terms.proximal(penalty),)
    )
    return algorithms.build_fed_per(model, training=training, **run.joining())
  return baselines.build_fed_prox(
    model,
    training=run.local.of_global(),
    **run.hyperparameters.penalty_argument,
    **run.joining(),
  )


def fed_sgd(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """FedSGD; where clients keep tables, these make one step of all examples."""
  rate = run.local.update.learning_rate
  if _keeps_tables(model, run):
    optimizers = {
      tiers.GLOBAL: phases.sgd(rate),
      tiers.LOCAL: run.local.reconstruction.build(),
    }
    return algorithms.build_fed_per(
      model,
      training=phases.Phase(optimizer=optimizers, batch_size=None),
      **run.joining(),
    )
  return baselines.build_fed_sgd(model, learning_rate=rate, **run.joining())


def distributed(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  """Clients train models of their own, and send nothing."""
  return baselines.build_local_only(model, training=run.local.of_own_model())


def for_all(
  model: models.PartialModel, run: Setting, measuring: Measuring
) -> Evaluation:
  """Clients have one model, but for tables that they keep."""
  if _keeps_tables(model, run):
    return algorithms.build_fed_per_eval(model, **measuring)
  return algorithms.build_fed_avg_eval(model, **measuring)


def hpfl(*, drafts: bool = True, public: bool = True) -> building.Algorithm:
  """HPFL, or one of its halves.

  Args:
    drafts: Whether clients share drafts of private tables.
    public: Whether they share public components.
  """

  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    how = run.hyperparameters.hpfl
    rows = run.table_rows
    # In a private run all that a client sends is one record, clipped and noised
    # as an update is elsewhere.
    sharing: dict[str, Any] = {}
    if public:
      sharing['threshold'] = how.threshold
      sharing['average_others'] = how.average_hidden
    joining: composition.Averaging = {}
    join = statistics.Join.SUM
    if run.ledger is not None:
      joining = run.averaging()
      join = statistics.Join.WITH_UPDATE
    return algorithms.build_hpfl(
      model,
      attributes=run.item_attributes,
      drafts=how.drafting(rows, join) if drafts else None,
      tables=tuple(rows),
      public=public,
      training=run.local.of_own_model(),
      by_nearness=drafts and how.by_nearness,
      **sharing,
      join=join,
      aggregator=joining.get('aggregator'),
      before_sending=joining.get('before_sending'),
    )

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    return algorithms.build_hpfl_eval(
      model, attributes=run.item_attributes, **measuring
    )

  def leaks(hyperparameters: Hyperparameters) -> Iterator[Leak]:
    if drafts:
      yield from hyperparameters.hpfl.leaks()

  return building.Algorithm(
    build,
    measure,
    user=tasks_lib.OWN,
    personal=LocalTraining.of_own_model,
    leaks=leaks,
    ignores=building.JOINING,
    reads=(*(_OF_DRAFTS if drafts else ()), *(_OF_PUBLIC if public else ())),
  )
