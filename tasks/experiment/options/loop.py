"""Options of the training loop: rounds, cohorts, stopping and outputs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from typing import ClassVar, TYPE_CHECKING

from tasks.options import detail
from tasks.options import option
from tasks.options import Options
import tff_partial

if TYPE_CHECKING:
  from tff_partial.training import callbacks
  from tff_partial.training import programs


@dataclasses.dataclass(frozen=True)
class Loop(Options):
  """Options of the rounds of a run."""

  title: ClassVar[str] = 'Rounds and cohorts'

  rounds: int = option(
    500, 'Rounds of training.', at_least=1, may_change=True, is_common=True
  )
  clients_per_round: int = option(
    100,
    'Clients whose updates a round aggregates; 0 for all.',
    at_least=0,
    is_common=True,
  )
  oversample: float = option(
    1.0,
    'A round asks this many times --clients_per_round, since some drop out.',
    at_least=1,
  )
  dropout_rate: float = option(
    0.0,
    'Probability that a client that is asked does not answer.',
    at_least=0,
    at_most=1,
  )
  evaluate_every: int = option(
    50,
    'Rounds between evaluations on validation clients.',
    at_least=1,
    is_common=True,
  )
  validation_users: int | None = option(
    None,
    'Number of clients that choose the best round, drawn once; by default all.',
    at_least=1,
  )
  test_users: int | None = option(
    None,
    'Number of clients that are tested, drawn once; by default all.',
    at_least=1,
  )
  early_stopping_patience: int | None = option(
    None,
    'End the run after this many evaluations in a row that are no better than '
    'the best one; by default it runs all --rounds.',
    at_least=1,
    is_common=True,
  )
  early_stopping_min_delta: float = detail(
    0.0,
    'By how much an evaluation must be better to count, for early stopping.',
    at_least=0,
  )

  def __post_init__(self) -> None:
    """Refuse incomplete early stopping."""
    super().__post_init__()
    if self.early_stopping_patience is None:
      self.refuse_set(
        ('early_stopping_min_delta',),
        'without --early_stopping_patience no run ends early. Give both or '
        'none.',
      )

  def callbacks(self, select: programs.Selection) -> list[callbacks.Callback]:
    """Return the callback that ends the run early, if there is one."""
    if self.early_stopping_patience is None:
      return []
    return [
      tff_partial.callbacks.EarlyStopping(
        self.early_stopping_patience,
        select.metric,
        select.higher_is_better,
        self.early_stopping_min_delta,
      )
    ]


@dataclasses.dataclass(frozen=True)
class Output(Options):
  """Options of outputs and of the display, which change no result."""

  title: ClassVar[str] = 'Outputs and resuming'

  output_dir: str | None = option(
    None,
    'Folder for all that the run writes; the same command resumes the run.',
    may_change=True,
    is_common=True,
  )
  checkpoint_every: int | None = option(
    None,
    'Rounds between checkpoints; by default --evaluate_every.',
    at_least=1,
    may_change=True,
  )
  tensorboard: bool = detail(
    True,
    'Write TensorBoard events: curves, and how metrics vary across clients.',
    may_change=True,
    is_common=True,
  )
  projector: int = option(
    0,
    "At the end, write the vectors of this many users for TensorBoard's "
    'embedding projector.',
    at_least=0,
    may_change=True,
  )
  progress: bool | None = detail(
    None, 'Show a progress bar; by default on a terminal.', may_change=True
  )

  @property
  def shows_progress(self) -> bool:
    """True if a progress bar is shown; by default on a terminal."""
    return sys.stderr.isatty() if self.progress is None else self.progress

  @property
  def state(self) -> str:
    """How far the run in the folder is, for messages."""
    folder = pathlib.Path(self.output_dir or '')
    result = folder / 'result.json'
    if result.exists():
      try:
        rounds = json.loads(result.read_text('utf-8'))['rounds']
      except (ValueError, KeyError, TypeError, RecursionError):
        return 'whose result cannot be read'
      return f'which has the result of {rounds} rounds'
    saved = [
      int(found[1])
      for path in folder.glob('checkpoints/*')
      if (found := re.fullmatch(r'round_(\d+)', path.name))
    ]
    return f'going on after round {max(saved)}' if any(saved) else 'a new run'


@dataclasses.dataclass(frozen=True)
class DryRun(Options):
  """The option to plan only."""

  title: ClassVar[str] = Output.title

  dry_run: bool = option(
    False,
    'Print what the run would do and cost, and write nothing.',
    is_common=True,
  )
