"""From the name of an algorithm to its process and evaluations."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from absl import flags

from tasks import emnist_models
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.fed_embed_flags import FedEmbedFlags
from tasks.preference_models import PARTS
from tasks.training_flags import TrainingFlags
from tff_partial import algorithms
from tff_partial import assignments
from tff_partial import baselines
from tff_partial import phases
from tff_partial import processes
from tff_partial.baselines import centralized
from tff_partial.baselines import p_fed_km
from tff_partial.data import populations
from tff_partial.data import splits
from tff_partial.evaluation import Evaluation
from tff_partial.evaluation import Measuring
from tff_partial.model import models
from tff_partial.training import programs

FLAGS = flags.FLAGS

Build = Callable[[models.PartialModel, TrainingFlags], processes.PartialProcess]
# (model, flags, what `build_query_evaluation` takes) -> evaluation.
Measure = Callable[[models.PartialModel, TrainingFlags, Measuring], Evaluation]


@dataclasses.dataclass(frozen=True)
class Algorithm:
  """How an algorithm's name becomes computations.

  Attributes:
    build: Builds the process.
    measure: Builds the evaluation.
    user: The form of the model that it trains, if no flag says another.
    own: How clients personalise before they are measured.
    always_personalises: Whether also those do who took part in training;
      otherwise these come with what they remember.
    is_central: Whether everybody's examples are given to a single client.
    counts_clients: Whether it needs to know how many clients there are.
  """

  build: Build
  measure: Measure
  user: str = tasks_lib.NOBODY
  own: Callable[[TrainingFlags], phases.Phase] | None = None
  always_personalises: bool = False
  is_central: bool = False
  counts_clients: bool = False


def _fed_recon(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  own, shared = training.own(), training.shared()
  return algorithms.build_fed_recon(
    model,
    split=training.split(),
    reconstruction_optimizer=training.reconstruction.get(),
    reconstruction_epochs=own.epochs,
    reconstruction_steps=own.max_steps,
    update_optimizer=training.update.get(),
    update_epochs=shared.epochs,
    update_steps=shared.max_steps,
    batch_size=own.batch_size,
    joint=training.joint,
    **training.joining(),
  )


def _fed_recon_eval(
  model: models.PartialModel, training: TrainingFlags, measuring: Measuring
) -> Evaluation:
  own = training.personalising(training.own())
  return algorithms.build_fed_recon_eval(
    model,
    split=measuring.get('split') or training.split(),
    reconstruction_optimizer=training.reconstruction.get(),
    reconstruction_epochs=own.epochs,
    reconstruction_steps=own.max_steps,
    batch_size=own.batch_size,
  )


def _furl(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  return algorithms.build_furl(
    model,
    training=training.together(),
    private_rule=training.private_rule,
    **training.joining(),
  )


def _scaffold(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  joining = training.joining()
  if FLAGS.client_weighting is None:
    # Clients count alike, unless somebody says otherwise.
    joining.pop('client_weighting')
  return baselines.build_scaffold(
    model,
    num_clients=training.num_clients,
    learning_rate=training.update_learning_rate,
    option=training.scaffold_option,
    training=training.shared(),
    **joining,
  )


def _apfl(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  return baselines.build_apfl(
    model,
    training=training.shared(),
    personal=dataclasses.replace(
      training.shared(), optimizer=training.reconstruction.get()
    ),
    **training.mixture,
    **training.joining(),
  )


def _fed_proto(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  logits = model.prediction_spec[emnist_models.LOGITS]
  return baselines.build_fed_proto(
    model,
    num_classes=logits.shape[-1],
    features=lambda outputs: outputs[tasks_lib.FEATURES],
    training=training.shared(),
    **dict[str, Any](training.penalty),
  )


def _p_fed_me(
  model: models.PartialModel, training: TrainingFlags
) -> processes.PartialProcess:
  return baselines.build_p_fed_me(
    model,
    personal=training.own_by_turns(),
    learning_rate=training.update_learning_rate,
    mixing=training.server_learning_rate,
    **training.penalty,
    **training.averaging(),
  )


def _fed_embed(
  assignment: Callable[[FedEmbedFlags], assignments.Assignment], user: str
) -> Algorithm:
  def build(
    model: models.PartialModel, training: TrainingFlags
  ) -> processes.PartialProcess:
    how = assignment(training.fed_embed)
    if training.ledger is not None:
      # Heads follow their clients by counts that are exact.
      how = how._replace(reassign=None)
    return algorithms.build_fed_embed(
      model,
      parts=training.fed_embed.parts,
      assignment=how,
      training=training.together(),
      **training.joining(),
    )

  def measure(
    model: models.PartialModel, training: TrainingFlags, measuring: Measuring
  ) -> Evaluation:
    return algorithms.build_fed_embed_eval(
      model,
      parts=training.fed_embed.parts,
      assignment=assignment(training.fed_embed),
      **measuring,
    )

  return Algorithm(build, measure, user=user, own=TrainingFlags.own)


def _p_fed_km(gradients: str, user: str) -> Algorithm:
  def build(
    model: models.PartialModel, training: TrainingFlags
  ) -> processes.PartialProcess:
    return baselines.build_p_fed_km(
      model,
      parts=PARTS,
      gradients=gradients,
      training=training.shared(),
      **training.fed_embed.centers,
      **training.joining(),
    )

  def measure(
    model: models.PartialModel, training: TrainingFlags, measuring: Measuring
  ) -> Evaluation:
    return baselines.build_p_fed_km_eval(
      model, parts=PARTS, gradients=gradients, split=measuring.get('split')
    )

  return Algorithm(build, measure, user=user)


def _measured_by(build: Callable[..., Evaluation]) -> Measure:
  return lambda model, training, measuring: build(model, **measuring)


def _held_by(build: Callable[..., Evaluation]) -> Measure:
  """An evaluation whose personal models are held near the global one."""
  return lambda model, training, measuring: build(
    model, **training.penalty, **measuring
  )


def _trained_by(
  build: Callable[..., processes.PartialProcess],
  *,
  has_penalty: bool = False,
  **phase_of: Callable[[TrainingFlags], phases.Phase],
) -> Build:
  """A process from a builder whose arguments are phases and how to join.

  Args:
    build: The builder.
    has_penalty: Whether it takes the size of a penalty.
    **phase_of: Name of each phase that it takes, and what reads its flags.
  """

  def build_with_flags(
    model: models.PartialModel, training: TrainingFlags
  ) -> processes.PartialProcess:
    return build(
      model,
      **{name: read(training) for name, read in phase_of.items()},
      **(training.penalty if has_penalty else {}),
      **training.joining(),
    )

  return build_with_flags


def _adaptive(build: Callable[..., processes.PartialProcess]) -> Build:
  """A process whose server's optimizer is prescribed, but for its rate."""
  return lambda model, training: build(
    model,
    training=training.shared(),
    learning_rate=training.server_learning_rate,
    **training.averaging(),
  )


_FOR_ALL = _measured_by(baselines.build_fed_avg_eval)
_own, _shared = TrainingFlags.own, TrainingFlags.shared

ALGORITHMS: dict[str, Algorithm] = {
  'fed_recon': Algorithm(
    _fed_recon,
    _fed_recon_eval,
    user=tasks_lib.OWN,
    own=_own,
    always_personalises=True,
  ),
  'furl': Algorithm(
    _furl,
    _measured_by(algorithms.build_furl_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'fed_embed_type': _fed_embed(FedEmbedFlags.by_type, tasks_lib.HEADS),
  'fed_embed_prototype': _fed_embed(
    FedEmbedFlags.by_prototype, tasks_lib.HEADS
  ),
  'fed_embed_som': _fed_embed(FedEmbedFlags.by_map, tasks_lib.HEADS),
  'fed_embed_personal': _fed_embed(FedEmbedFlags.personal, tasks_lib.OWN_HEAD),
  'fed_per': Algorithm(
    _trained_by(baselines.build_fed_per, training=TrainingFlags.together),
    _measured_by(baselines.build_fed_per_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'fed_sim': Algorithm(
    _trained_by(baselines.build_fed_sim, training=TrainingFlags.together),
    _measured_by(baselines.build_fed_sim_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'lg_fed_avg': Algorithm(
    _trained_by(baselines.build_lg_fed_avg, training=TrainingFlags.together),
    _measured_by(baselines.build_lg_fed_avg_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'fed_alt': Algorithm(
    _trained_by(baselines.build_fed_alt, personal=_own, shared=_shared),
    _measured_by(baselines.build_fed_alt_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'fed_rep': Algorithm(
    _trained_by(baselines.build_fed_rep, head=_own, representation=_shared),
    _measured_by(baselines.build_fed_rep_eval),
    user=tasks_lib.OWN,
    own=_own,
  ),
  'fed_babu': Algorithm(
    _trained_by(baselines.build_fed_babu, training=_shared),
    _measured_by(baselines.build_fed_babu_eval),
    user=tasks_lib.OWN,
    own=_own,
    always_personalises=True,
  ),
  'ditto': Algorithm(
    _trained_by(
      baselines.build_ditto,
      has_penalty=True,
      training=_shared,
      personal=_own,
    ),
    _held_by(baselines.build_ditto_eval),
    own=_own,
  ),
  'p_fed_me': Algorithm(
    _p_fed_me,
    _held_by(baselines.build_p_fed_me_eval),
    own=TrainingFlags.own_by_turns,
    always_personalises=True,
  ),
  'scaffold': Algorithm(_scaffold, _FOR_ALL, counts_clients=True),
  'apfl': Algorithm(
    _apfl,
    lambda model, training, measuring: baselines.build_apfl_eval(
      model, **training.mixture, **measuring
    ),
    own=_own,
  ),
  'fed_proto': Algorithm(
    _fed_proto,
    _measured_by(baselines.build_fed_proto_eval),
    user=tasks_lib.FEATURES,
    own=_own,
  ),
  'p_fed_km': _p_fed_km(p_fed_km.MODEL, tasks_lib.CLUSTERS),
  'p_fed_km_head': _p_fed_km(p_fed_km.HEAD, tasks_lib.HEAD_CLUSTERS),
  'local_only': Algorithm(
    lambda model, training: baselines.build_local_only(
      model, training=training.own()
    ),
    _measured_by(baselines.build_local_only_eval),
    own=_own,
  ),
  'fed_avg': Algorithm(
    _trained_by(baselines.build_fed_avg, training=_shared), _FOR_ALL
  ),
  'fine_tuning': Algorithm(
    _trained_by(baselines.build_fed_avg, training=_shared),
    _measured_by(baselines.build_fine_tuning_eval),
    own=_own,
    always_personalises=True,
  ),
  'fed_sgd': Algorithm(
    lambda model, training: baselines.build_fed_sgd(
      model,
      learning_rate=training.update_learning_rate,
      **training.joining(),
    ),
    _FOR_ALL,
  ),
  'fed_prox': Algorithm(
    _trained_by(baselines.build_fed_prox, has_penalty=True, training=_shared),
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
    lambda model, training: baselines.build_centralized(
      model, training=training.shared()
    ),
    _FOR_ALL,
    is_central=True,
  ),
}


def names() -> Sequence[str]:
  """The names that `--algorithm` takes."""
  return sorted(ALGORITHMS)


class Trainable:
  """An algorithm on a task's model.

  Attributes:
    process: Trains it.
    ledger: Counts what it costs to train; None if the run is not private.
  """

  def __init__(
    self, algorithm: Algorithm, task: tasks_lib.Task, training: TrainingFlags
  ):
    """Builds the process.

    Args:
      algorithm: The algorithm.
      task: The task.
      training: How clients train.
    """
    self._algorithm = algorithm
    self._task = task
    self._user = FLAGS.user_form or algorithm.user
    model = task.model_with(self._user)
    if training.privacy.is_on:
      training.privacy.check_algorithm(
        FLAGS.algorithm, is_central=algorithm.is_central
      )
    if training.privacy.is_on or algorithm.counts_clients:
      population = len(task.clients(tasks_lib.TRAIN, model.example_spec))
      training = training.planned_for(population)
    self._training = training
    self.ledger = training.ledger
    self._evaluations: dict[Any, Evaluation] = {}
    self.process = algorithm.build(model, training)

  def clients(self) -> populations.Population:
    """Packs those who take part in training."""
    spec = self.process.example_spec
    clients = self._task.clients(tasks_lib.TRAIN, spec)
    return centralized.pool(clients) if self._algorithm.is_central else clients

  @property
  def clients_per_round(self) -> int:
    """How many clients' updates a round joins; who holds all is alone."""
    return 1 if self._algorithm.is_central else int(FLAGS.clients_per_round)

  def remembers(self, whom: tasks_lib.EvaluationClients) -> bool:
    """Says whether clients come with what they remember from training.

    They do not where the evaluation has no use for it.
    """
    if not whom.seen or self._algorithm.always_personalises:
      return False
    kept = self.process.initialize_client.type_signature
    taken = self.evaluation(whom).initialize_client.type_signature
    return not self.process.is_stateless and bool(kept.is_equivalent_to(taken))

  def evaluation(self, whom: tasks_lib.EvaluationClients) -> Evaluation:
    """Builds, once, the evaluation of some clients.

    New users have no row in a table of all users: they rebuild weights of their
    own, as in Table 1 of the FedRecon paper.

    Args:
      whom: Whom to measure.
    """
    algorithm, user = self._algorithm, self._user
    if user == tasks_lib.TABLE and not whom.seen:
      algorithm, user = ALGORITHMS['fed_recon'], tasks_lib.OWN
    is_at_home = (
      whom.seen
      and not algorithm.always_personalises
      and not FLAGS.personalise_seen
    )
    measuring: Measuring = {}
    if whom.split is not None:
      measuring['split'] = whom.split
    elif whom.seen and algorithm.own is not None and not is_at_home:
      measuring['split'] = splits.by_mark()  # Their past, and what is measured.
    if algorithm.own is not None and not is_at_home:
      measuring['personalise'] = self._training.personalising(
        algorithm.own(self._training)
      )
      measuring.setdefault('split', self._training.split())
    parts = whom.split or ()
    key = (tuple(part.name for part in parts), is_at_home)
    if key not in self._evaluations:
      model = self._task.model_with(user)
      self._evaluations[key] = algorithm.measure(
        model, self._training, measuring
      )
    return self._evaluations[key]

  def evaluation_set(
    self, whom: tasks_lib.EvaluationClients
  ) -> programs.EvaluationSet:
    """Has some of the task's clients measured.

    Args:
      whom: Whom to measure.
    """
    evaluation = self.evaluation(whom)
    return programs.EvaluationSet(
      evaluation,
      self._task.clients(whom.part, evaluation.example_spec),
      remembering=self.remembers(whom),
    )

  def personal(self) -> Evaluation:
    """Builds what personalises on all of a client's examples.

    Raises:
      OptionError: If the algorithm's clients have nothing of their own.
    """
    if self._algorithm.own is None:
      raise OptionError(
        f'--algorithm={FLAGS.algorithm}: its clients have nothing of their '
        'own, so that all of them would be told the same.'
      )
    everything = tasks_lib.EvaluationClients('', False, splits.same())
    return self.evaluation(everything)
