"""An algorithm on a task's model, built from an experiment."""

import dataclasses
import os
from typing import Any

from baselines import centralized
from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.config import Config
from tasks.experiment.methods import algorithms
from tasks.experiment.methods.building import Measuring
from tasks.experiment.methods.setting import Setting
from tff_partial import random_bits
from tff_partial.checks import privacy_audit
from tff_partial.data import cohorts
from tff_partial.data import splits
from tff_partial.evaluation import Evaluation
from tff_partial.training import programs
from tff_partial.training import run_privacy


class Trainable:
  """An algorithm on a task's model.

  Attributes:
    process: The process that trains it.
    ledger: Counts the privacy spent; None if the run is not private.
    accounting: The same in the form that `programs.train` takes.
    user_form: The user form of the model, one of `USER_FORMS`.
    selection: The metric that chooses the best round.
    clients_per_round: Updates aggregated per round: 1 if a single client has
      all examples.
  """

  def __init__(
    self,
    config: Config,
    task: tasks_lib.Task,
    canaries: privacy_audit.Canaries | None = None,
  ):
    """Build the process.

    Raises:
      UserError: If the run cannot be as private as requested.
    """
    self._config = config
    self._algorithm = config.how
    self._task = task
    self.user_form = config.user_form or self._form()
    model = config.hyperparameters.first_weights.begin(
      task.model_with(self.user_form)
    )
    population, ledger, loop = 0, None, config.loop
    if (
      config.privacy.is_on
      or self._algorithm.counts_clients
      or not loop.clients_per_round
    ):
      population = len(task.clients(tasks_lib.TRAIN, model.example_spec))
      if canaries is not None:
        if config.privacy.is_on and not config.privacy.simulated_population:
          canaries.check_delta(population, config.privacy.delta)
        population += canaries.number
      if not loop.clients_per_round:
        loop = dataclasses.replace(loop, clients_per_round=population)
      ledger = config.privacy.ledger(
        population, loop, config.spent, self._task.released
      )
    is_central = self._algorithm.is_central
    self.clients_per_round = 1 if is_central else loop.clients_per_round
    self._setting = Setting(
      task=task,
      local=config.local,
      server=config.server,
      hyperparameters=config.hyperparameters,
      privacy=config.privacy,
      num_clients=population,
      clients_per_round=loop.clients_per_round,
      ledger=ledger,
      canaries=canaries,
    )
    self.ledger = ledger
    self.accounting: run_privacy.Accounting | None = (
      run_privacy.UNACCOUNTED if self._algorithm.adds_noise else ledger
    )
    self.selection = programs.Selection(
      task.selection_metric, task.higher_is_better
    )
    self._evaluations: dict[Any, Evaluation] = {}
    self.process = self._algorithm.build(model, self._setting)

  def saved(self, output_dir: str | os.PathLike[str]) -> programs.Saved:
    """Load what a run of this algorithm saved in its folder.

    Raises:
      UserError: If nothing is saved there, or only of another run.
    """
    # Of other data, those who are measured may have taken part.
    clients, released = self.clients(), self._task.released
    return programs.load(
      self.process, output_dir, released=released, clients=clients
    )

  def _form(self) -> str:
    """Return the user form that the algorithm trains by default."""
    form = self._algorithm.user
    if form == tasks_lib.NOBODY and self._task.keeps_tables:
      return tasks_lib.TABLE if self._algorithm.is_central else tasks_lib.OWN
    return form

  def clients(self) -> tasks_lib.Clients:
    spec = self.process.example_spec
    clients = self._task.clients(tasks_lib.TRAIN, spec)
    return centralized.pool(clients) if self._algorithm.is_central else clients

  def remembers(self, clients: tasks_lib.EvaluationClients) -> bool:
    """Return True if clients are evaluated with their states from training.

    They are not if the evaluation does not use these states, as one that always
    personalises does not, but for tables that clients keep.
    """
    forgets = (
      self._algorithm.always_personalises and not self._task.keeps_tables
    )
    if not clients.seen or forgets:
      return False
    kept = self.process.initialize_client.type_signature
    taken = self.evaluation(clients).initialize_client.type_signature
    return not self.process.is_stateless and bool(kept.is_equivalent_to(taken))

  def evaluation(self, clients: tasks_lib.EvaluationClients) -> Evaluation:
    """Return the evaluation of some clients, which is built once.

    New users have no row in a table of all users: they reconstruct local
    weights, as in Table 1 of the FedRecon paper.
    """
    algorithm, user = self._algorithm, self.user_form
    if user == tasks_lib.TABLE and not clients.seen:
      algorithm, user = algorithms.ALGORITHMS['fed_recon'], tasks_lib.OWN
    is_at_home = (
      clients.seen
      and not algorithm.always_personalises
      and not self._config.local.personalise_seen
    )
    measuring: Measuring = {}
    if clients.split is not None:
      measuring['split'] = clients.split
    elif (
      clients.seen
      and clients.part != tasks_lib.TRAIN
      and algorithm.personal is not None
      and not is_at_home
    ):
      measuring['split'] = splits.by_mark()  # Past examples, and test ones.
    if algorithm.personal is not None and not is_at_home:
      local = self._config.local
      measuring['personalise'] = local.when_measured(algorithm.personal(local))
      measuring.setdefault('split', local.split_when_measured())
    parts = measuring.get('split') or ()
    key = (user, is_at_home, *(part.name for part in parts))
    if key not in self._evaluations:
      model = self._config.hyperparameters.first_weights.begin(
        self._task.model_with(user)
      )
      self._evaluations[key] = self._task.measured(
        algorithm.measure(model, self._setting, measuring), clients
      )
    return self._evaluations[key]

  def evaluation_set(
    self, clients: tasks_lib.EvaluationClients
  ) -> programs.EvaluationSet:
    """Pack some of the task's clients with their evaluation."""
    evaluation = self.evaluation(clients)
    return programs.EvaluationSet(
      evaluation,
      self._drawn(
        self._task.clients(clients.part, evaluation.example_spec), clients.part
      ),
      remembering=self.remembers(clients),
    )

  def _drawn(
    self, clients: cohorts.ClientSource, part: str
  ) -> cohorts.ClientSource:
    """Draw the clients of a part that are evaluated, by the run's seed."""
    loop, seed = self._config.loop, self._config.seed
    number = {
      tasks_lib.VALIDATION: loop.validation_users,
      tasks_lib.TEST: loop.test_users,
    }.get(part)
    if number is None or number >= len(clients.client_ids):
      return clients
    draw = random_bits.generator(seed, part)
    drawn = draw.permutation(sorted(clients.client_ids))[:number]
    return cohorts.SomeClients(clients, tuple(sorted(drawn.tolist())))

  def personal(self) -> Evaluation:
    """Build an evaluation that personalises on all of a client's examples.

    Raises:
      OptionError: If clients do not personalise, or predict with something
        outside the model.
    """
    self.check_is_a_model()
    if self._algorithm.personal is None:
      raise OptionError(
        f'--algorithm={self._config.algorithm}: its clients have nothing of '
        'their own, so that all of them would be told the same.'
      )
    everything = tasks_lib.EvaluationClients('', False, splits.same())
    return self.evaluation(everything)

  def check_is_a_model(self) -> None:
    """Check that clients predict with their models alone."""
    if self._algorithm.has_memory:
      raise OptionError(
        f'--algorithm={self._config.algorithm}: clients also predict by more '
        'than a model, such as a memory. Use the algorithm by which the model '
        'was trained, such as fed_recon.'
      )
