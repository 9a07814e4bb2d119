"""Builders of algorithms from a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import importlib
from typing import Any, TYPE_CHECKING, TypeAlias, TypedDict

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.hyperparameters import SCALED
from tasks.experiment.options.privacy import LOCAL
from tasks.experiment.options.server import Server
from tasks.experiment.options.training import LocalTraining
from tasks.options import Leak
import tff_partial

if TYPE_CHECKING:
  from tff_partial import phases
  from tff_partial import processes
  from tff_partial.data import splits
  from tff_partial.evaluation import Evaluation
  from tff_partial.model import models

# Flags of the server's optimizer except its learning rate, for algorithms that
# prescribe the optimizer; and all flags of the server, for algorithms that
# do not aggregate, or not by these flags.
STEPPING = tuple(
  flag
  for flag in (*Server().optimizer.flags(), 'server_decay_rounds')
  if flag != 'server_learning_rate'
)
JOINING = tuple(Server().flags())
# All flags of local training except the split.
TRAINING = tuple(
  flag
  for flag in LocalTraining().flags()
  if not any(part in flag for part in ('split', 'support_share', 'batch_size'))
)

# All that trains global weights.
UPDATING = tuple(flag for flag in LocalTraining().flags() if 'update_' in flag)
# All of that but the rate of a single step.
ALL_BUT_ONE_STEP = tuple(
  flag for flag in UPDATING if flag != 'update_learning_rate'
)

# (model, setting) -> process.
Build: TypeAlias = (
  'Callable[[models.PartialModel, Setting], processes.PartialProcess]'
)
# (model, setting, arguments of the builder) -> evaluation.
Measure: TypeAlias = (
  'Callable[[models.PartialModel, Setting, Measuring], Evaluation]'
)


class Measuring(TypedDict, total=False):
  """Arguments of builders of evaluations."""

  personalise: phases.Phase | None
  split: splits.Split | None


def builder(name: str) -> Callable[..., Any]:
  """Import a builder of the library or of the baselines.

  Args:
    name: Its name, such as 'build_fed_avg'.
  """
  if hasattr(tff_partial.algorithms, name):
    return getattr(tff_partial.algorithms, name)
  return getattr(importlib.import_module('baselines'), name)


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """Builders and properties of an algorithm.

  Attributes:
    build: Builds the process.
    measure: Builds the evaluation.
    user: The user form of the model that it trains, unless a flag overrides it.
    personal: Builds the phase that personalises before an evaluation.
    always_personalises: True if training clients personalise, too; otherwise
      they are evaluated with their stored state.
    is_central: True if a single client holds the examples of all users.
    has_memory: True if clients predict with something outside the model, such
      as a memory, the server's prototypes or a mixture of models.
    counts_clients: True if it needs the number of clients.
    why_not_private: The reason for having no private form, and a remedy; or
      None.
    adds_noise: True if its clients add noise that no ledger counts.
    reads: Flags that only some algorithms read, and this one does.
    ignores: Flags that most algorithms read, and this one does not.
    leaks: Yields its settings that a private run may not have.
  """

  build: Build
  measure: Measure
  user: str = tasks_lib.NOBODY
  personal: Callable[[LocalTraining], phases.Phase] | None = None
  always_personalises: bool = False
  is_central: bool = False
  has_memory: bool = False
  counts_clients: bool = False
  why_not_private: str | None = None
  adds_noise: bool = False
  ignores: tuple[str, ...] = ()
  reads: tuple[str, ...] = ()
  leaks: Callable[[Hyperparameters], Iterator[Leak]] = lambda _: iter(())


def furl(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  return tff_partial.algorithms.build_furl(
    model,
    training=run.local.of_both(),
    private_rule=run.hyperparameters.private_statistic,
    **run.server_arguments(),
  )


def fed_rap(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return tff_partial.algorithms.build_fed_rap(
    model,
    shared='item/embeddings',
    own='user_item/embeddings',
    difference=run.hyperparameters.view_difference,
    sparsity=run.hyperparameters.view_sparsity,
    training=run.local.of_both(),
    **run.server_arguments(),
  )


def furl_leaks(hyperparameters: Hyperparameters) -> Iterator[Leak]:
  if hyperparameters.private_rule == SCALED:
    yield Leak(
      'set=private_rule',
      SCALED,
      "clients are told the exact number of the cohort's examples",
      'Use --set=private_rule=keep.',
    )


def fed_att(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  if run.privacy.is_on and run.privacy.dp != LOCAL:
    raise OptionError(
      '--algorithm=fed_att: the server divides by the sum of attentions, which '
      'its noise would make anything. Give --dp=local, or use fed_avg.'
    )
  return builder('build_fed_att')(
    model,
    step_size=run.server.learning_rate,
    training=run.local.of_both(),
    aggregation=run.aggregation(),
  )


def fed_noise(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return builder('build_fed_noise')(
    model,
    noise=tff_partial.dp.local_noise.LaplaceNoise(
      run.hyperparameters.laplace_clip, 0.01
    ),
    training=run.local.of_both(),
    **run.server_arguments(),
  )


def alone(training: Callable[[LocalTraining], phases.Phase]) -> Build:
  """Adapt local training, which sends nothing.

  Args:
    training: Reads the flags of a client's training.
  """
  return lambda model, run: builder('build_local_only')(
    model, training=training(run.local)
  )


def scaffold(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return builder('build_scaffold')(
    model,
    num_clients=run.num_clients,
    learning_rate=run.local.update.learning_rate,
    training=run.local.of_global(),
    **run.server_arguments(),
  )


def fed_dyn(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return builder('build_fed_dyn')(
    model,
    participation=1.0 - run.memory,
    training=run.local.of_global(),
    aggregation=run.aggregation(),
    **dict[str, Any](run.hyperparameters.penalty_argument),
  )


def per_fed_avg(hessian_free: bool) -> Build:
  return lambda model, run: builder('build_per_fed_avg')(
    model,
    adaptation_rate=run.local.reconstruction.learning_rate,
    hessian_free=hessian_free,
    training=run.local.of_global(),
    **run.server_arguments(),
  )


def apfl(model: models.PartialModel, run: Setting) -> processes.PartialProcess:
  return tff_partial.algorithms.build_apfl(
    model,
    training=run.local.of_global(),
    personal=run.local.of_personal_as_global(),
    **run.hyperparameters.mixture_arguments,
    **run.server_arguments(),
  )


def fed_proto(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return builder('build_fed_proto')(
    model,
    **_class_features(model),
    training=run.local.of_global(),
    **dict[str, Any](run.hyperparameters.penalty_argument),
  )


def fed_proto_nearest_eval(
  model: models.PartialModel, run: Setting, measuring: Measuring
) -> Evaluation:
  del run
  return builder('build_fed_proto_nearest_eval')(
    model, **_class_features(model), logits=tasks_lib.LOGITS, **measuring
  )


def _features(outputs: Any) -> Any:
  return outputs[tasks_lib.FEATURES]


def _class_features(model: models.PartialModel) -> dict[str, Any]:
  """Return the number of classes of a model, and how to get its features."""
  return {
    'num_classes': model.prediction_spec[tasks_lib.LOGITS].shape[-1],
    'features': _features,
  }


def p_fed_me(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return tff_partial.algorithms.build_p_fed_me(
    model,
    personal=run.local.of_personal_repeated(),
    learning_rate=run.local.update.learning_rate,
    mixing=run.server.learning_rate,
    **run.hyperparameters.penalty_argument,
    aggregation=run.aggregation(),
  )


def measured_by(name: str) -> Measure:
  """Adapt a builder of evaluations.

  Args:
    name: The builder's name.
  """
  return lambda model, run, measuring: builder(name)(model, **measuring)


def held_by(name: str) -> Measure:
  """Adapt a builder of evaluations with a penalty for leaving the global model.

  Args:
    name: The builder's name.
  """
  return lambda model, run, measuring: builder(name)(
    model, **run.hyperparameters.penalty_argument, **measuring
  )


def trained_by(
  name: str,
  *,
  has_penalty: bool = False,
  has_features: bool = False,
  **phase_of: Callable[[LocalTraining], phases.Phase],
) -> Build:
  """Adapt a builder that takes phases and aggregation arguments.

  Args:
    name: The builder's name.
    has_penalty: True if it takes the size of a penalty.
    has_features: True if it takes a function to the features among outputs.
    **phase_of: Name of each phase that it takes, and the function that reads
      the phase's flags.
  """
  return lambda model, run: builder(name)(
    model,
    **{phase: read(run.local) for phase, read in phase_of.items()},
    **(run.hyperparameters.penalty_argument if has_penalty else {}),
    **({'features': _features} if has_features else {}),
    **run.server_arguments(),
  )


def adaptive(name: str) -> Build:
  """Adapt a builder that prescribes the server's optimizer except its rate.

  Args:
    name: The builder's name.
  """
  return lambda model, run: builder(name)(
    model,
    training=run.local.of_global(),
    learning_rate=run.server.learning_rate,
    tau=run.hyperparameters.tau,
    rule=run.hyperparameters.adaptive_rule,
    aggregation=run.aggregation(),
  )
