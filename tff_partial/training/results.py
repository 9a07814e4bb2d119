"""Results of a run, returned or saved in its folder."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from tff_partial import processes
from tff_partial.client import client_work
from tff_partial.data.vocabularies import Vocabulary
from tff_partial.model import models
from tff_partial.training.client_store import client_store as client_store_lib
from tff_partial.training.errors import ProgramError


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """Result of a run.

  Attributes:
    process: The trained process.
    state: The server's state after the last round.
    weights: The model's weights after the last round.
    best_weights: Those of the best round by the validation clients, or the last
      ones if there is none.
    best_round: That round, or None.
    validation: The validation metrics at the last evaluation, or None.
    best_validation: Those of the best round, or None.
    train: The last round's training metrics; empty for a private run without
      diagnostics.
    rounds: Number of rounds done.
    diverged: True if the run was stopped because its loss diverged, if no
      client of its last round was finite, or if its last validation diverged.
    ended_by: Name of the callback that ended the run, or None.
    seconds: `total`, `per_round_median` and `first_round` of this call; the
      latter two are NaN if no round was left to do.
    client_store: Client states after the last round, or None if there are none.
    best_client_store: Those after the best round, or the last one if there is
      none.
    best_server_state: Server state other than weights after the best round, or
      the last one if there is none, such as FedProto's prototypes; None if
      there is no such state.
    privacy: Cost of the rounds, as in `PrivacyLedger.report`, with the last
      round's measurements of the aggregator; None without a ledger.
    history: The row of `metrics.csv` for each round of the whole run, written
      or not: column to number, with `round` from 1 and `validation_*` where the
      validation clients were measured. A private run's has nothing exact,
      unless the run records `diagnostics`.
    vocabularies: Those of the training clients, by column; perhaps empty.
    columns: Their columns that were joined to a vector, by field.
  """

  state: Any
  weights: Any
  best_weights: Any
  best_round: int | None
  validation: dict[str, Any] | None
  best_validation: dict[str, Any] | None
  train: dict[str, Any]
  rounds: int
  diverged: bool
  ended_by: str | None
  seconds: dict[str, float]
  client_store: client_store_lib.ClientStore | None
  best_client_store: client_store_lib.ClientStates | None
  best_server_state: Any = dataclasses.field(repr=False)
  privacy: dict[str, Any] | None
  history: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False)
  process: processes.PartialProcess = dataclasses.field(repr=False)
  vocabularies: Mapping[str, Vocabulary] = dataclasses.field(repr=False)
  columns: Mapping[str, list[str]] = dataclasses.field(repr=False)

  @property
  def server_state(self) -> Any:
    """Server state other than weights after the last round, or None."""
    return self.process.get_server_state(self.state)

  def __repr__(self) -> str:
    """Describe the run, without weights and states."""
    if self.diverged:
      ended = ', diverged'
    else:
      ended = f', ended by {self.ended_by}' if self.ended_by else ''
    lines = [
      f'TrainingResult after {self.rounds} rounds in '
      f'{self.seconds["total"]:.1f} s{ended}',
      *_described_metrics('train', self.train),
      *_described_metrics('validation', self.validation),
      *_described_metrics(
        f'best validation, round {self.best_round}', self.best_validation
      ),
      *_described_metrics('privacy', self.privacy),
    ]
    if self.process.is_noised and self.privacy is None:
      lines.append('  privacy: unaccounted, a simulation of the noise')
    return '\n'.join(lines)


def _described_metrics(
  what: str, metrics: Mapping[str, Any] | None
) -> list[str]:
  """Return a line on some metrics, or none."""
  values = [
    f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
    for name, value in (metrics or {}).items()
    if isinstance(value, (bool, float, int, str))
  ]
  return [f'  {what}: {", ".join(values)}'] if values else []


@dataclasses.dataclass(frozen=True)
class Saved:
  """Content of a run's newest checkpoint.

  Attributes:
    process: The trained process.
    rounds: Number of rounds done.
    state: The server's state after the last round.
    last_weights: The weights after the last round, `ModelWeights`.
    best_round: The best round by the validation clients, or None.
    best_weights: Its weights, or the last ones.
    client_store: Client states after the last round; None if there are none, or
      they are not in the folder.
    best_client_store: Those after the best round, or the last one.
    best_server_state: Server state other than the best weights, or None.
    vocabularies: Those of the training clients, by column; perhaps empty.
    columns: Their columns that were joined to a vector, by field.
  """

  rounds: int
  state: Any = dataclasses.field(repr=False)
  last_weights: Any = dataclasses.field(repr=False)
  best_round: int | None
  best_weights: Any = dataclasses.field(repr=False)
  client_store: client_store_lib.ClientStates | None
  best_client_store: client_store_lib.ClientStates | None
  best_server_state: Any = dataclasses.field(repr=False)
  process: processes.PartialProcess = dataclasses.field(repr=False)
  vocabularies: Mapping[str, Vocabulary] = dataclasses.field(repr=False)
  columns: Mapping[str, list[str]] = dataclasses.field(repr=False)


def weights_of(model: models.PartialModel, weights: Any) -> Any:
  """Return the server weights that a model reads, matched by name.

  Args:
    model: The model, which may differ from the trained one.
    weights: Weights at the server, `ModelWeights`.

  Raises:
    ProgramError: If some are missing, or they are no weights.
  """
  if not isinstance(getattr(weights, 'trainable', None), Mapping):
    raise ProgramError(
      'weights: expected a result of `train`, or its `best_weights`, found '
      f'a {type(weights).__name__}.'
    )
  shared, frozen = client_work.weights_specs(model)

  def chosen(specs: Any, given: Any, what: str) -> Any:
    missing = [name for name in specs if name not in given]
    if missing:
      raise ProgramError(
        f'The model that is measured has {what} weights {missing}, the one '
        f'that was trained has {list(given)}. Give layers that both have the '
        'same names.'
      )
    return collections.OrderedDict((name, given[name]) for name in specs)

  return client_work.ModelWeights(
    collections.OrderedDict(
      (tier, chosen(specs, weights.trainable.get(tier, {}), tier))
      for tier, specs in shared.items()
    ),
    chosen(frozen, weights.non_trainable, 'frozen'),
  )
