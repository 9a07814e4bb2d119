"""The algorithms by name, each built from what is chosen for a run.

A new algorithm is one row of `ALGORITHMS`.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

from tasks import task as tasks_lib
from tasks.experiment.hyperparameters import FedEmbed
from tasks.experiment.hyperparameters import Hyperparameters
from tasks.experiment.hyperparameters import SCALED
from tasks.experiment.setting import Setting
from tasks.experiment.training import LocalTraining
from tasks.options import Leak
from tff_partial import algorithms
from tff_partial import assignments
from tff_partial import baselines
from tff_partial import phases
from tff_partial import processes
from tff_partial.baselines import p_fed_km
from tff_partial.evaluation import Evaluation
from tff_partial.evaluation import Measuring
from tff_partial.model import models

Build = Callable[[models.PartialModel, Setting], processes.PartialProcess]
# (model, setting, what `build_query_evaluation` takes) -> evaluation.
Measure = Callable[[models.PartialModel, Setting, Measuring], Evaluation]


def _nothing(hyperparameters: Hyperparameters) -> Iterator[Leak]:
  """What a private run may not choose, of most algorithms."""
  del hyperparameters
  yield from ()


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """How an algorithm's name becomes computations.

  Attributes:
    build: Builds the process.
    measure: Builds the evaluation.
    user: The form of the model that it trains, if no flag says another.
    personal: How clients personalise before they are measured.
    always_personalises: Whether also those do who took part in training;
      otherwise these come with what they remember.
    is_central: Whether everybody's examples are given to a single client.
    counts_clients: Whether it needs to know how many clients there are.
    why_not_private: Why it has no private form, and what to do; or None.
    leaks: Yields which of its choices a private run may not have.
  """

  build: Build
  measure: Measure
  user: str = tasks_lib.NOBODY
  personal: Callable[[LocalTraining], phases.Phase] | None = None
  always_personalises: bool = False
  is_central: bool = False
  counts_clients: bool = False
  why_not_private: str | None = None
  leaks: Callable[[Hyperparameters], Iterator[Leak]] = _nothing


def _fed_recon(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  personal, update = run.local.of_personal(), run.local.of_global()
  return algorithms.build_fed_recon(
    model,
    split=run.local.build_split(),
    reconstruction_optimizer=personal.optimizer,
    reconstruction_epochs=personal.epochs,
    reconstruction_steps=personal.max_steps,
    update_optimizer=update.optimizer,
    update_epochs=update.epochs,
    update_steps=update.max_steps,
    batch_size=update.batch_size,
    joint=run.hyperparameters.joint,
    **run.joining(),
  )


def _fed_recon_eval(
  model: models.PartialModel, run: Setting, measuring: Measuring
) -> Evaluation:
  personal = run.local.when_measured(run.local.of_personal())
  return algorithms.build_fed_recon_eval(
    model,
    split=measuring.get('split') or run.local.build_split(),
    reconstruction_optimizer=personal.optimizer,
    reconstruction_epochs=personal.epochs,
    reconstruction_steps=personal.max_steps,
    batch_size=personal.batch_size,
  )


def _furl(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  return algorithms.build_furl(
    model,
    training=run.local.of_both(),
    private_rule=run.hyperparameters.private_statistic,
    **run.joining(),
  )


def _furl_leaks(hyperparameters: Hyperparameters) -> Iterator[Leak]:
  if hyperparameters.private_rule == SCALED:
    yield Leak(
      'private_rule',
      SCALED,
      "clients are told the exact number of the cohort's examples",
      'Use --private_rule=keep.',
    )


def _scaffold(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  joining = run.joining()
  if run.server.client_weighting is None:
    # Clients count alike, unless somebody says otherwise.
    joining.pop('client_weighting')
  return baselines.build_scaffold(
    model,
    num_clients=run.num_clients,
    learning_rate=run.local.update.learning_rate,
    option=int(run.hyperparameters.scaffold_option),
    training=run.local.of_global(),
    **joining,
  )


def _apfl(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  return baselines.build_apfl(
    model,
    training=run.local.of_global(),
    personal=run.local.of_personal_as_global(),
    **run.hyperparameters.mixture_arguments,
    **run.joining(),
  )


def _fed_proto(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  logits = model.prediction_spec[tasks_lib.LOGITS]
  return baselines.build_fed_proto(
    model,
    num_classes=logits.shape[-1],
    features=lambda outputs: outputs[tasks_lib.FEATURES],
    training=run.local.of_global(),
    **dict[str, Any](run.hyperparameters.penalty_argument),
  )


def _p_fed_me(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return baselines.build_p_fed_me(
    model,
    personal=run.local.of_personal_repeated(),
    learning_rate=run.local.update.learning_rate,
    mixing=run.server.learning_rate,
    **run.hyperparameters.penalty_argument,
    **run.averaging(),
  )


def _fed_embed(
  assignment: Callable[[FedEmbed, assignments.Parts], assignments.Assignment],
  user: str,
) -> Algorithm:
  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    how = assignment(run.hyperparameters.fed_embed, run.parts)
    if run.ledger is not None:
      # Heads follow their clients by counts that are exact.
      how = how._replace(reassign=None)
    return algorithms.build_fed_embed(
      model,
      parts=run.parts,
      assignment=how,
      training=run.local.of_both(),
      **run.joining(),
    )

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    return algorithms.build_fed_embed_eval(
      model,
      parts=run.parts,
      assignment=assignment(run.hyperparameters.fed_embed, run.parts),
      **measuring,
    )

  return Algorithm(
    build, measure, user=user, personal=LocalTraining.of_personal
  )


def _p_fed_km(gradients: str, user: str) -> Algorithm:
  def build(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    return baselines.build_p_fed_km(
      model,
      parts=run.parts,
      gradients=gradients,
      training=run.local.of_global(),
      **run.hyperparameters.fed_embed.centers,
      **run.joining(),
    )

  def measure(
    model: models.PartialModel, run: Setting, measuring: Measuring
  ) -> Evaluation:
    return baselines.build_p_fed_km_eval(
      model, parts=run.parts, gradients=gradients, split=measuring.get('split')
    )

  return Algorithm(build, measure, user=user)


def _measured_by(build: Callable[..., Evaluation]) -> Measure:
  return lambda model, run, measuring: build(model, **measuring)


def _held_by(build: Callable[..., Evaluation]) -> Measure:
  """An evaluation whose personal models are held near the global one."""
  return lambda model, run, measuring: build(
    model, **run.hyperparameters.penalty_argument, **measuring
  )


def _trained_by(
  build: Callable[..., processes.PartialProcess],
  *,
  has_penalty: bool = False,
  **phase_of: Callable[[LocalTraining], phases.Phase],
) -> Build:
  """A process from a builder whose arguments are phases and how to join.

  Args:
    build: The builder.
    has_penalty: Whether it takes the size of a penalty.
    **phase_of: Name of each phase that it takes, and what reads its flags.
  """

  def build_with_flags(
    model: models.PartialModel, run: Setting
  ) -> processes.PartialProcess:
    return build(
      model,
      **{name: read(run.local) for name, read in phase_of.items()},
      **(run.hyperparameters.penalty_argument if has_penalty else {}),
      **run.joining(),
    )

  return build_with_flags


def _adaptive(build: Callable[..., processes.PartialProcess]) -> Build:
  """A process whose server's optimizer is prescribed, but for its rate."""
  return lambda model, run: build(
    model,
    training=run.local.of_global(),
    learning_rate=run.server.learning_rate,
    **run.averaging(),
  )


_FOR_ALL = _measured_by(baselines.build_fed_avg_eval)
_PERSONAL = LocalTraining.of_personal
_GLOBAL, _BOTH = LocalTraining.of_global, LocalTraining.of_both

ALGORITHMS: dict[str, Algorithm] = {
  'fed_recon': Algorithm(
    _fed_recon,
    _fed_recon_eval,
    user=tasks_lib.OWN,
    personal=_PERSONAL,
    always_personalises=True,
  ),
  'furl': Algorithm(
    _furl,
    _measured_by(algorithms.build_furl_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
    leaks=_furl_leaks,
  ),
  'fed_embed_type': _fed_embed(FedEmbed.by_type, tasks_lib.HEADS),
  'fed_embed_prototype': _fed_embed(FedEmbed.by_prototype, tasks_lib.HEADS),
  'fed_embed_som': _fed_embed(FedEmbed.by_map, tasks_lib.HEADS),
  'fed_embed_personal': _fed_embed(FedEmbed.personal, tasks_lib.OWN_HEAD),
  'fed_per': Algorithm(
    _trained_by(baselines.build_fed_per, training=_BOTH),
    _measured_by(baselines.build_fed_per_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
  ),
  'fed_sim': Algorithm(
    _trained_by(baselines.build_fed_sim, training=_BOTH),
    _measured_by(baselines.build_fed_sim_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
  ),
  'lg_fed_avg': Algorithm(
    _trained_by(baselines.build_lg_fed_avg, training=_BOTH),
    _measured_by(baselines.build_lg_fed_avg_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
  ),
  'fed_alt': Algorithm(
    _trained_by(baselines.build_fed_alt, personal=_PERSONAL, shared=_GLOBAL),
    _measured_by(baselines.build_fed_alt_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
  ),
  'fed_rep': Algorithm(
    _trained_by(
      baselines.build_fed_rep, head=_PERSONAL, representation=_GLOBAL
    ),
    _measured_by(baselines.build_fed_rep_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
  ),
  'fed_babu': Algorithm(
    _trained_by(baselines.build_fed_babu, training=_GLOBAL),
    _measured_by(baselines.build_fed_babu_eval),
    user=tasks_lib.OWN,
    personal=_PERSONAL,
    always_personalises=True,
  ),
  'ditto': Algorithm(
    _trained_by(
      baselines.build_ditto,
      has_penalty=True,
      training=_GLOBAL,
      personal=_PERSONAL,
    ),
    _held_by(baselines.build_ditto_eval),
    personal=_PERSONAL,
  ),
  'p_fed_me': Algorithm(
    _p_fed_me,
    _held_by(baselines.build_p_fed_me_eval),
    personal=LocalTraining.of_personal_repeated,
    always_personalises=True,
  ),
  'scaffold': Algorithm(_scaffold, _FOR_ALL, counts_clients=True),
  'apfl': Algorithm(
    _apfl,
    lambda model, run, measuring: baselines.build_apfl_eval(
      model, **run.hyperparameters.mixture_arguments, **measuring
    ),
    personal=_PERSONAL,
  ),
  'fed_proto': Algorithm(
    _fed_proto,
    _measured_by(baselines.build_fed_proto_eval),
    user=tasks_lib.FEATURES,
    personal=_PERSONAL,
  ),
  'p_fed_km': _p_fed_km(p_fed_km.MODEL, tasks_lib.CLUSTERS),
  'p_fed_km_head': _p_fed_km(p_fed_km.HEAD, tasks_lib.HEAD_CLUSTERS),
  'local_only': Algorithm(
    lambda model, run: baselines.build_local_only(
      model, training=run.local.of_personal()
    ),
    _measured_by(baselines.build_local_only_eval),
    personal=_PERSONAL,
    why_not_private='clients send nothing, so nothing needs noise. Leave '
    '--target_epsilon and --noise_multiplier out.',
  ),
  'fed_avg': Algorithm(
    _trained_by(baselines.build_fed_avg, training=_GLOBAL), _FOR_ALL
  ),
  'fine_tuning': Algorithm(
    _trained_by(baselines.build_fed_avg, training=_GLOBAL),
    _measured_by(baselines.build_fine_tuning_eval),
    personal=_PERSONAL,
    always_personalises=True,
  ),
  'fed_sgd': Algorithm(
    lambda model, run: baselines.build_fed_sgd(
      model,
      learning_rate=run.local.update.learning_rate,
      **run.joining(),
    ),
    _FOR_ALL,
  ),
  'fed_prox': Algorithm(
    _trained_by(baselines.build_fed_prox, has_penalty=True, training=_GLOBAL),
    _FOR_ALL,
  ),
  'fed_adam': Algorithm(
    _adaptive(baselines.build_fed_adam),
    _FOR_ALL,
  ),
  'fed_yogi': Algorithm(
    _adaptive(baselines.build_fed_yogi),
    _FOR_ALL,
  ),
  'centralized': Algorithm(
    lambda model, run: baselines.build_centralized(
      model, training=run.local.of_global()
    ),
    _FOR_ALL,
    is_central=True,
    why_not_private='whoever trains holds the examples of all users, so that '
    "no update is one user's. Use fed_avg for a private run.",
  ),
}


def names() -> Sequence[str]:
  """The names that `--algorithm` takes."""
  return sorted(ALGORITHMS)
