"""What an algorithm may ask of the run that it is built for."""

from collections.abc import Mapping, Sequence
import dataclasses

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.options.training import LocalTraining
from tasks.experiment.options.training import Server
from tff_partial import assignments
from tff_partial import composition
from tff_partial.algorithms import hpfl
from tff_partial.checks import privacy_audit
from tff_partial.dp import privacy_plans


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is chosen for a run, and what follows from its clients.

  Attributes:
    task: The task.
    local: How clients train.
    server: How the server joins updates.
    hyperparameters: What single algorithms have beside.
    privacy: Whether and how the run is private.
    num_clients: How many may take part in training; 0 if it is not needed.
    ledger: Counts what the run costs; None if it is not private.
    canaries: Clients that hide among the others, to audit the run; or None.
  """

  task: tasks_lib.Task
  local: LocalTraining
  server: Server
  hyperparameters: Hyperparameters
  privacy: Privacy
  num_clients: int = 0
  ledger: privacy_plans.PrivacyLedger | None = None
  canaries: privacy_audit.Canaries | None = None

  @property
  def parts(self) -> assignments.Parts:
    """The parts of FedEmbed's model.

    Raises:
      OptionError: If the task has no such model.
    """
    if not isinstance(self.task, tasks_lib.HasParts):
      raise OptionError(
        f'--task={self.task.name}: its model has no heads of sub-populations. '
        'Choose a task of preference, or another algorithm.'
      )
    return self.task.parts

  @property
  def keeps_tables(self) -> bool:
    """Whether clients train and keep tables, whatever the algorithm."""
    return isinstance(self.task, tasks_lib.KeepsTables)

  @property
  def table_rows(self) -> Mapping[str, Sequence[int]]:
    """The tables of which drafts can be made, and how many rows clients have.

    Raises:
      OptionError: If clients have no such tables.
    """
    if not isinstance(self.task, tasks_lib.KeepsTables):
      raise self._without('tables of many users')
    return self.task.kept_tables()

  @property
  def item_attributes(self) -> hpfl.Attributes:
    """The attributes of items.

    Raises:
      OptionError: If the task knows none.
    """
    if not isinstance(self.task, tasks_lib.HasItemAttributes):
      raise self._without('attributes of items')
    return self.task.item_attributes()

  def _without(self, what: str) -> OptionError:
    return OptionError(
      f'--task={self.task.name}: its clients have no {what}. Choose '
      '--task=assist or --task=movielens_hpfl, or another algorithm.'
    )

  def averaging(self, *, alike: bool = False) -> composition.Averaging:
    """How updates are joined.

    Args:
      alike: Whether the algorithm counts clients alike, unless a flag says
        otherwise.
    """
    if self.ledger is not None:
      averaging = self.privacy.averaging(self.ledger, self.canaries)
    else:
      averaging = self.server.averaging()
    if alike and self.server.client_weighting is None:
      averaging.pop('client_weighting')
    return averaging

  def joining(self, *, alike: bool = False) -> composition.Joining:
    """How updates are joined, and what the server does with them.

    Args:
      alike: As for `averaging`.
    """
    return {
      **self.averaging(alike=alike),
      'server_optimizer': self.server.build_optimizer(),
    }
