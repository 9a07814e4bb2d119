"""The state of a run between two rounds."""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import secrets
from typing import Any

import tensorflow_federated as tff

from tff_partial import evaluation
from tff_partial import processes
from tff_partial.data import cohorts
from tff_partial.dp import privacy_plans
from tff_partial.runtimes.values import typed_values
from tff_partial.training import checkpoints
from tff_partial.training import client_errors
from tff_partial.training import evaluation_sets
from tff_partial.training import metrics_log
from tff_partial.training import selection
from tff_partial.training.client_store import client_rows
from tff_partial.training.client_store import client_store as client_store_lib


@dataclasses.dataclass
class Notes:
  """Notes on a run other than its weights; a checkpoint holds them as JSON.

  Attributes:
    best_round: The best round by the validation clients, or None.
    best_validation: Their metrics in that round.
    validation: Those of the last evaluation.
    validations: All validated rounds with their pooled metrics.
    before_last: What the validations' notes were before that of a last round
      that a longer run would not measure; None if there was none.
    first_loss: The largest finite training loss of the first rounds.
    first_validation_loss: The first finite validation loss.
    diverging_rounds: Number of rounds in a row that have diverged.
    ended_by: Name of the callback that ended the run.
    train: The last round's training metrics.
    measured: Last measurements of a private run's aggregator.
    secret: Seed of a private run's cohorts and of its clients' draws. It
      reveals which clients took part, and is only here and in the checkpoints.
    settings: The settings that must match to resume the run.
    deletions: Number of clients deleted from the store.
    columns: Those of a data frame that were joined to a vector, by field.
  """

  best_round: int | None = None
  best_validation: dict[str, Any] | None = None
  validation: dict[str, Any] | None = None
  validations: list[tuple[int, dict[str, Any]]] = dataclasses.field(
    default_factory=list
  )
  before_last: dict[str, Any] | None = None
  first_loss: float | None = None
  first_validation_loss: float | None = None
  diverging_rounds: int = 0
  ended_by: str | None = None
  train: dict[str, Any] = dataclasses.field(default_factory=dict)
  measured: dict[str, float] = dataclasses.field(default_factory=dict)
  secret: int | None = None
  settings: dict[str, str] = dataclasses.field(default_factory=dict)
  deletions: int | None = None
  columns: dict[str, list[str]] = dataclasses.field(default_factory=dict)


# Notes that a validation replaces.
_OF_VALIDATIONS = (
  'best_round',
  'best_validation',
  'validation',
  'first_validation_loss',
)
# Key of the runtime's choices; a checkpoint holds them with the notes.
_CHOICES = 'choices'


class Run:
  """A run between two rounds.

  Attributes:
    process: The process to train.
    privacy: Ledger of its cost, or None.
    store: Client states, or None.
    state: The server's state.
    best_weights: Those of the best round, once there is one. A last round that
      a longer run would not measure is left out.
    best_server_state: Server state other than these weights; None if there is
      none.
    round: Number of rounds done.
    notes: Everything else that is known.
  """

  def __init__(
    self,
    process: processes.PartialProcess,
    privacy: privacy_plans.PrivacyLedger | None = None,
  ):
    self.process = process
    self.privacy = privacy
    self.store: client_store_lib.ClientStore | None = None
    self.state = process.initialize()
    self.best_weights = process.get_model_weights(self.state)
    self.best_server_state = self.server_state
    self.round = 0
    self.notes = Notes()
    if privacy is not None and not privacy.simulation:
      self.notes.secret = secrets.randbits(128)

  @property
  def weights(self) -> Any:
    """The weights after the last round."""
    return self.process.get_model_weights(self.state)

  @property
  def server_state(self) -> Any:
    """Server state other than weights after the last round, or None."""
    return self.process.get_server_state(self.state)

  @property
  def best_held(self) -> Any:
    """Server state other than the best, or last, weights; or None."""
    if self.notes.best_round in (None, self.round):
      return self.server_state
    return self.best_server_state

  @property
  def best(self) -> Any:
    """The best weights; the last ones if there is no best round."""
    if self.notes.best_round in (None, self.round):
      return self.weights
    return self.best_weights

  @property
  def best_store(self) -> client_store_lib.ClientStates | None:
    """The client states when the weights were the best."""
    best = self.notes.best_round
    if self.store is None or best is None:
      return self.store
    return self.store.at(best)

  def next(self, clients: cohorts.Cohort) -> Mapping[str, Any]:
    """Run a round with some clients and return its metrics."""
    ids = clients.client_ids
    kept: Sequence[Any] = [collections.OrderedDict()] * len(ids)
    if self.store is not None:
      kept = client_rows.fitted(self.store.read(ids), self.store.type, clients)
    with client_errors.naming(f'Round {self.round + 1}', clients):
      output = self.process.next(self.state, kept, clients)
    if self.store is not None:
      self.store.write(ids, output.client_states)
    self.state = output.state
    self.round += 1
    return output.metrics

  def note_training(
    self, metrics: Mapping[str, Any], size: int, stop: selection.StoppingRule
  ) -> None:
    """Note the round's loss, and whether one more round has diverged."""
    notes = self.notes
    notes.train = dict(metrics)
    if not size:
      return
    if self.round <= stop.rounds or notes.first_loss is None:
      losses = (notes.first_loss, _first(None, metrics))
      known = [loss for loss in losses if loss is not None]
      notes.first_loss = max(known, default=None)
    diverged = stop.has_diverged(metrics, notes.first_loss, size)
    notes.diverging_rounds = notes.diverging_rounds + 1 if diverged else 0

  def validate(
    self,
    evaluation_set: evaluation_sets.EvaluationSet,
    seed: int,
    select: selection.Selection,
    on_clients: Callable[[evaluation.ByClient], Any] | None = None,
    is_extra: bool = False,
  ) -> dict[str, Any]:
    """Measure the validation clients, and keep the best weights.

    One that `is_extra`, which a longer run would not make, can be undone.
    """
    weights, notes = self.weights, self.notes
    measured = evaluation_sets.measure(
      evaluation_set,
      weights,
      seed=seed,
      client_store=self.store,
      on_clients=on_clients,
      server_state=self.server_state,
    )
    if is_extra:
      notes.before_last = {name: vars(notes)[name] for name in _OF_VALIDATIONS}
    notes.validation = measured
    notes.validations.append(
      (self.round, {name: measured[name] for name in evaluation_set.metrics})
    )
    notes.first_validation_loss = _first(notes.first_validation_loss, measured)
    if select.is_better(measured, notes.best_validation):
      notes.best_validation, notes.best_round = measured, self.round
      if not is_extra:
        self.best_weights = weights
        self.best_server_state = self.server_state
    return measured

  def undo_extra_validation(self) -> bool:
    """Forget a validation that this run, now longer, would not have made.

    Returns:
      True if there was one.
    """
    notes = self.notes
    if notes.before_last is None:
      return False
    self.notes = dataclasses.replace(
      notes,
      **notes.before_last,
      validations=notes.validations[:-1],
      before_last=None,
    )
    return True

  def is_over(self, rounds: int, stop: selection.StoppingRule) -> bool:
    """Return True if no round is left to do."""
    return bool(
      self.round >= rounds
      or self.notes.diverging_rounds >= stop.rounds
      or self.notes.ended_by
    )

  def has_diverged(self, stop: selection.StoppingRule) -> bool:
    """Return True if the training or the last validation has diverged."""
    train = self.notes.train
    is_lost = train.get('num_not_finite') and not train['num_clients']
    if is_lost or self.notes.diverging_rounds >= stop.rounds:
      return True
    measured = self.notes.validation
    if measured is None:
      return False
    size = evaluation.num_measured(measured)
    if not size:
      return False  # No client had anything to measure.
    return stop.has_diverged(measured, self.notes.first_validation_loss, size)

  @property
  def kinds(self) -> checkpoints.Progress:
    """The types of the content of this process's checkpoints."""
    process = self.process
    state = _specs(process.initialize.type_signature.result)
    return checkpoints.Progress(
      round=None,
      state=state,
      best_weights=_specs(process.get_model_weights.type_signature.result),
      notes=None,
      table=None,
      best_server_state=(
        () if process.server_state is None else process.get_server_state(state)
      ),
    )

  def save(
    self,
    saved: checkpoints.Checkpoints | None,
    table: metrics_log.Records | None,
  ) -> None:
    """Save client states, and then everything else."""
    if self.store is not None:
      best = (self.notes.before_last or vars(self.notes))['best_round']
      self.store.save(self.round, best)
      self.notes.deletions = self.store.deletions
    if saved is None:
      return
    choices = dict(getattr(_runtime(), 'choices', {}))
    saved.save(
      checkpoints.Progress(
        self.round,
        self.state,
        self.best_weights,
        checkpoints.encode({**vars(self.notes), _CHOICES: choices}),
        checkpoints.compress(table.text if table is not None else ''),
        () if self.best_server_state is None else self.best_server_state,
      )
    )

  def go_on_from(self, found: checkpoints.Progress) -> None:
    """Restore a checkpoint, and the runtime's choices at that time."""
    self.round = int(found.round)
    self.state = found.state
    self.best_weights = found.best_weights
    if self.best_server_state is not None:
      self.best_server_state = found.best_server_state
    noted = checkpoints.decode(found.notes)
    choices = noted.pop(_CHOICES)
    # Notes that runs of older versions lack keep their defaults.
    known = {name: noted[name] for name in vars(self.notes) if name in noted}
    self.notes = dataclasses.replace(self.notes, **known)
    recall = getattr(_runtime(), 'recall', None)
    if recall is not None:
      recall(choices)


def remembered(process: processes.PartialProcess) -> tff.Type | None:
  """Return the type of client states, or None if there are none."""
  if process.is_stateless:
    return None
  return process.initialize_client.type_signature.result


def _specs(kind: tff.Type) -> Any:
  """Return the specs of a type's leaves, in the type's containers."""
  return typed_values.converter(kind)(iter(typed_values.tensor_specs(kind)))


def _runtime() -> Any:
  """Return the runtime that will run the computations."""
  return tff.framework.get_context_stack().current


def _first(noted: float | None, measured: Mapping[str, Any]) -> float | None:
  """Return the first finite loss, for comparison with later ones."""
  is_measured = measured['num_clients'] and math.isfinite(measured['loss'])
  return measured['loss'] if noted is None and is_measured else noted
