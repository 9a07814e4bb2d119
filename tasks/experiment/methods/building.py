"""Builders of algorithms from a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import importlib
import operator
from typing import Any, TYPE_CHECKING, TypeAlias, TypedDict

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.methods.setting import Setting
from tasks.experiment.options.hyperparameters import KEEP
from tasks.experiment.options.privacy import LOCAL
from tasks.experiment.options.server import Server
from tasks.experiment.options.training import LocalTraining
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

# Arguments of a builder, by name.
Arguments: TypeAlias = Mapping[str, Any]

# The size of a penalty, if one is given.
of_penalty = operator.attrgetter('hyperparameters.penalty_argument')


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


def fed_att(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  if run.privacy.is_on and run.privacy.dp != LOCAL:
    raise OptionError(
      '--algorithm=fed_att: the server divides by the sum of attentions, which '
      'its noise could bring near 0. Give --dp=local, or use fed_avg.'
    )
  if run.canaries is not None:
    raise OptionError(
      '--algorithm=fed_att: an audit watches what the server adds up, which '
      'attention changes at the clients. Audit fed_avg.'
    )
  return builder('build_fed_att')(
    model,
    server_learning_rate=run.server.optimizer.learning_rate,
    training=run.local.joint_phase(),
    aggregation=run.aggregation(),
  )


def per_fed_avg(hessian_free: bool) -> Build:
  return lambda model, run: builder('build_per_fed_avg')(
    model,
    adaptation_rate=run.local.reconstruction.learning_rate,
    hessian_free=hessian_free,
    training=run.local.global_phase(),
    **run.server_arguments(),
  )


def fed_proto(
  model: models.PartialModel, run: Setting
) -> processes.PartialProcess:
  return builder('build_fed_proto')(
    model,
    **_class_features(model),
    training=run.local.global_phase(),
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


def of_apfl(run: Setting) -> Arguments:
  how = run.hyperparameters
  rate = how.mixture_learning_rate
  return {'mixture': how.mixture, 'mixture_learning_rate': rate}


def of_furl(run: Setting) -> Arguments:
  rule = run.hyperparameters.private_rule
  scaled = tff_partial.client_statistics.SCALED_BY_SHARE
  return {'private_rule': None if rule == KEEP else scaled}


def of_fed_rap(run: Setting) -> Arguments:
  return {
    'shared': 'item/embeddings',
    'own': 'user_item/embeddings',
    'difference': run.hyperparameters.view_difference,
    'sparsity': run.hyperparameters.view_sparsity,
  }


def of_fed_noise(run: Setting) -> Arguments:
  clip = run.hyperparameters.laplace_clip
  return {'noise': tff_partial.dp.local_noise.LaplaceNoise(clip, 0.01)}


def of_scaffold(run: Setting) -> Arguments:
  return {'num_clients': run.num_clients}


def of_fed_dyn(run: Setting) -> Arguments:
  return {'participation': 1.0 - run.memory, **of_penalty(run)}


def penalty_of_p_fed_me(run: Setting) -> Arguments:
  """Return the penalty; by default none by which w moves beyond theta."""
  rate = run.local.update.learning_rate
  usual = tff_partial.algorithms.p_fed_me.PENALTY
  given = of_penalty(run)
  return given if given or rate <= 1 / usual else {'penalty': 1 / rate}


def of_p_fed_me(run: Setting) -> Arguments:
  return {
    'client_learning_rate': run.local.update.learning_rate,
    'mixing': run.server.optimizer.learning_rate,
    **penalty_of_p_fed_me(run),
  }


def adaptive(run: Setting) -> Arguments:
  return {
    'server_learning_rate': run.server.optimizer.learning_rate,
    'tau': run.hyperparameters.tau,
    'rule': run.hyperparameters.adaptive_rule,
  }


def penalty_and_features(run: Setting) -> Arguments:
  return {**of_penalty(run), 'features': _features}


def nothing(run: Setting) -> Arguments:
  del run
  return {}


def aggregating(run: Setting) -> Arguments:
  """Return how updates are aggregated, for what prescribes the optimizer."""
  return {'aggregation': run.aggregation()}


def measured_by(
  name: str, given: Callable[[Setting], Arguments] = nothing
) -> Measure:
  """Adapt a builder of evaluations.

  Args:
    name: The builder's name.
    given: Returns further arguments.
  """
  return lambda model, run, measuring: builder(name)(
    model, **given(run), **measuring
  )


def supported_by(
  name: str, given: Callable[[Setting], Arguments] = nothing
) -> Measure:
  """Adapt a builder of evaluations whose clients train nothing before.

  Args:
    name: The builder's name.
    given: Returns further arguments.
  """
  return lambda model, run, measuring: builder(name)(
    model,
    split=measuring.get('split') or run.local.split_when_measured(),
    **given(run),
  )


def trained_by(
  name: str,
  given: Callable[[Setting], Arguments] = nothing,
  server: Callable[[Setting], Arguments] = Setting.server_arguments,
  **phase_of: Callable[[LocalTraining], phases.Phase],
) -> Build:
  """Adapt a builder that takes phases.

  Args:
    name: The builder's name.
    given: Returns further arguments.
    server: Returns the arguments about the server.
    **phase_of: Name of each phase that it takes, and the function that reads
      the phase's flags.
  """
  return lambda model, run: builder(name)(
    model,
    **{phase: read(run.local) for phase, read in phase_of.items()},
    **given(run),
    **server(run),
  )
