"""Settings of a run from which an algorithm is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, TYPE_CHECKING

from tasks import task as tasks_lib
from tasks.errors import OptionError
from tasks.experiment.options.hyperparameters import Hyperparameters
from tasks.experiment.options.privacy import Privacy
from tasks.experiment.options.server import Server
from tasks.experiment.options.training import LocalTraining

if TYPE_CHECKING:
  from tff_partial import assignments
  from tff_partial import composition
  from tff_partial.algorithms import hpfl
  from tff_partial.checks import privacy_audit
  from tff_partial.dp import privacy_plans


@dataclasses.dataclass(frozen=True)
class Setting:
  """Options of a run, and what follows from its clients.

  Attributes:
    task: The task.
    local: Training on clients.
    server: Aggregation at the server.
    hyperparameters: Hyperparameters of single algorithms.
    privacy: Differential privacy, if any.
    num_clients: The number of training clients; 0 if it is not needed.
    clients_per_round: Clients whose updates a round joins.
    ledger: Counts the privacy spent; None if the run is not private.
    canaries: Canary clients for an audit of the run; or None.
  """

  task: tasks_lib.Task
  local: LocalTraining
  server: Server
  hyperparameters: Hyperparameters
  privacy: Privacy
  num_clients: int = 0
  clients_per_round: int = 0
  ledger: privacy_plans.PrivacyLedger | None = None
  canaries: privacy_audit.Canaries | None = None

  @property
  def memory(self) -> float:
    """The share of clients that are not in a round: the weight of old sums."""
    missing = 1.0 - self.clients_per_round / max(self.num_clients, 1)
    return max(missing, 0.0)

  @property
  def parts(self) -> assignments.FedEmbedVariables:
    """The parts of FedEmbed's model.

    Raises:
      OptionError: If the task has no such model.
    """
    if self.task.fed_embed_parts is None:
      raise OptionError(
        f'--task={self.task.name}: its model has no heads of sub-populations. '
        'Choose a task of preference, or another algorithm.'
      )
    return self.task.fed_embed_parts

  @property
  def table_rows(self) -> Mapping[str, Sequence[int]]:
    """Tables that can be drafted, and their numbers of rows by client.

    Raises:
      OptionError: If clients have no such tables.
    """
    if not self.task.keeps_tables:
      raise self._without('tables of many users')
    return self.task.kept_tables()

  @property
  def item_attributes(self) -> hpfl.Attributes:
    """The attributes of items.

    Raises:
      OptionError: If the task has none.
    """
    found = self.task.item_attributes()
    if found is None:
      raise self._without('attributes of items')
    return found

  def _without(self, what: str) -> OptionError:
    return OptionError(
      f'--task={self.task.name}: its clients have no {what}. Choose '
      '--task=assist or --task=movielens_hpfl, or another algorithm.'
    )

  def aggregation(self) -> composition.Aggregation:
    """Return how updates are aggregated."""
    if self.ledger is not None:
      return self.privacy.aggregation(self.ledger, self.canaries)
    return self.server.aggregation(self.clients_per_round)

  def server_arguments(self) -> dict[str, Any]:
    return {
      'aggregation': self.aggregation(),
      'server_optimizer': self.server.build_optimizer(),
    }
