"""Programs: run a process round by round, measure, record, resume.

A run is a function of its arguments and its seed. With an output folder it can
be killed at any moment: the same call resumes from the last whole checkpoint
and ends with the same numbers, bit for bit.
"""

from collections.abc import Sequence
import os
from typing import Any, TypeAlias

from absl import logging

from tff_partial import processes
from tff_partial import runtimes
from tff_partial.arguments import checked_numbers
from tff_partial.arguments import spelling
from tff_partial.data import cohorts
from tff_partial.data import vocabularies
from tff_partial.data import vocabulary_checks
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import checkpoints
from tff_partial.training import client_selection
from tff_partial.training import evaluation_sets
from tff_partial.training import results
from tff_partial.training import resuming
from tff_partial.training import run_privacy
from tff_partial.training import run_settings
from tff_partial.training import run_state
from tff_partial.training import sampling
from tff_partial.training import selection
from tff_partial.training import training_loop
from tff_partial.training.client_store import client_store as client_store_lib
from tff_partial.training.errors import ProgramError as ProgramError
from tff_partial.training.errors import RunError

CHECKPOINTS_FOLDER = resuming.CHECKPOINTS_FOLDER
CLIENTS_FOLDER = resuming.CLIENTS_FOLDER

# Names used in training programs.
EvaluationSet: TypeAlias = evaluation_sets.EvaluationSet
evaluate = evaluation_sets.evaluate
Saved: TypeAlias = results.Saved
Selection: TypeAlias = selection.Selection
StoppingRule: TypeAlias = selection.StoppingRule
TrainingResult: TypeAlias = results.TrainingResult


@runtimes.ours()
def train(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  *,
  rounds: int,
  clients_per_round: int,
  seed: int = 0,
  oversample: float = 1.0,
  dropout_rate: float = 0.0,
  select_clients: client_selection.SelectClients | None = None,
  validation: EvaluationSet | None = None,
  evaluate_every: int = 50,
  checkpoint_every: int | None = None,
  select: Selection | None = None,
  stop: StoppingRule | None = None,
  callbacks: Sequence[callbacks_lib.Callback] = (),
  output_dir: str | os.PathLike[str] | None = None,
  client_store: client_store_lib.ClientStore | None = None,
  privacy: run_privacy.Accounting | None = None,
  diagnostics: bool = False,
  tensorboard: bool = True,
  show_progress: bool | None = None,
) -> TrainingResult:
  """Train for some rounds under the current runtime, or one of ours.

  docs/training.md has examples, and what happens when a run is resumed.

  Args:
    process: The algorithm.
    clients: The clients to train with.
    rounds: Number of rounds of the whole run.
    clients_per_round: Number of clients whose updates a round aggregates.
    seed: Seed of all random draws except the initial weights.
    oversample: Factor by which more clients are asked.
    dropout_rate: Probability that a client that was asked does not answer.
    select_clients: Selects among the clients that answer; by default the first.
    validation: Measured every `evaluate_every` rounds; selects the best round.
    evaluate_every: Rounds between evaluations.
    checkpoint_every: Rounds between checkpoints, by default `evaluate_every`.
    select: Criterion of the best round; by default the lowest loss.
    stop: Rule by which a run counts as diverged.
    callbacks: Called in order after each round; see `training.callbacks`.
    output_dir: Folder for records and checkpoints, which resumes a run there.
    client_store: Store of client states, of this run only; see `ClientStore`.
    privacy: Ledger of a private run, or 'unaccounted'; see `run_privacy`.
    diagnostics: True if a private run also records what is `_not_private`.
    tensorboard: True to write TensorBoard events, too.
    show_progress: True for a progress bar; by default in interactive shells.

  Raises:
    UserError: With a message for the user; what was written before is kept.
  """
  loop = check(
    process,
    clients,
    rounds=rounds,
    clients_per_round=clients_per_round,
    seed=seed,
    oversample=oversample,
    dropout_rate=dropout_rate,
    select_clients=select_clients,
    validation=validation,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
    select=select,
    stop=stop,
    callbacks=callbacks,
    privacy=privacy,
    diagnostics=diagnostics,
  )
  return resuming.run(
    loop, client_store, output_dir, tensorboard, show_progress
  )


def check(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  *,
  rounds: int,
  clients_per_round: int,
  seed: int = 0,
  oversample: float = 1.0,
  dropout_rate: float = 0.0,
  select_clients: client_selection.SelectClients | None = None,
  validation: EvaluationSet | None = None,
  evaluate_every: int = 50,
  checkpoint_every: int | None = None,
  select: Selection | None = None,
  stop: StoppingRule | None = None,
  callbacks: Sequence[callbacks_lib.Callback] = (),
  privacy: run_privacy.Accounting | None = None,
  diagnostics: bool = False,
) -> training_loop.TrainingLoop:
  """Check the arguments of `train`, for any folder, without running.

  Returns:
    The loop over the rounds, which has not begun.

  Raises:
    UserError: As for `train`.
  """
  if checkpoint_every is None:
    checkpoint_every = evaluate_every
  _check_kinds(process, validation, select, stop)
  select = select or Selection()
  checked_numbers.check_whole(
    *(ProgramError, 1),
    rounds=rounds,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
  )
  checked_numbers.check_whole(
    ProgramError, seed=seed, clients_per_round=clients_per_round
  )
  callbacks_lib.check(
    callbacks, None if validation is None else validation.metrics
  )
  cohorts.check(clients, process.example_spec)
  ids = clients.client_ids
  ledger = run_privacy.ledger_of(process, privacy, rounds)
  if ledger is not None and select_clients is not None:
    raise ProgramError(
      'select_clients: the accounting of a private run counts on clients that '
      'are drawn at random. Leave it out.'
    )
  if validation is not None:
    validation.check(run_state.remembered(process))
    vocabulary_checks.check_alike(clients, validation.clients)
    validation.check_metric(select.metric)
    selection.warn_of_direction(select)
  return training_loop.TrainingLoop(
    process=process,
    privacy=ledger,
    clients=clients,
    sampler=sampling.planned(
      ids, clients_per_round, seed, oversample, dropout_rate, ledger
    ),
    rounds=rounds,
    seed=seed,
    validation=validation,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
    select=select,
    stop=stop or StoppingRule(),
    callbacks=callbacks,
    diagnostics=diagnostics,
    select_clients=select_clients,
  )


def _check_process(process: Any) -> None:
  trains = 'a process that trains, `algorithms.build_fed_recon(model)`'
  kind = processes.PartialProcess
  spelling.check_kind('process', process, kind, trains, ProgramError)


def _check_kinds(process: Any, validation: Any, select: Any, stop: Any) -> None:
  if validation is not None:
    evaluation_sets.check_kind(validation)
  _check_process(process)
  for name, value, kind, expected in (
    ('select', select, Selection | None, "`Selection('loss')`"),
    ('stop', stop, StoppingRule | None, '`StoppingRule(rounds=5)`'),
  ):
    spelling.check_kind(name, value, kind, expected, ProgramError)
  if select is not None and validation is None:
    raise ProgramError(
      f'select={select}: without validation there is no round to select. Pass '
      'one, or leave it out.'
    )


@runtimes.ours()
def load(
  process: processes.PartialProcess,
  output_dir: str | os.PathLike[str],
  *,
  released: str = '',
  clients: cohorts.ClientSource | None = None,
) -> Saved:
  """Read the weights and client states that `train` left in a folder.

  Args:
    process: The trained process.
    output_dir: The folder.
    released: Fingerprint of the release before the first round, as in
      `PrivacyLedger`; empty to not compare it.
    clients: The training clients; None to not compare them.

  Raises:
    RunError: If there is no checkpoint, or it is from another process.
    ProgramError: If the run released something else, or had other clients.
    ClientStoreError: If there is a client store that does not match.
  """
  _check_process(process)
  folder = os.path.join(output_dir, CHECKPOINTS_FOLDER)
  run = run_state.Run(process)
  found = None
  if os.path.isdir(folder):
    loop = checkpoints.EventLoop()
    try:
      saved = checkpoints.Checkpoints(folder, loop, writable=False)
      found = saved.latest(run.kinds)
    finally:
      loop.close()
  if found is None:
    raise RunError(f'There is no checkpoint in {folder}. Train first.')
  run.go_on_from(found)
  settings = run.notes.settings
  now = {**settings, **run_settings.of_process(process)}
  if released:
    now[run_settings.RELEASED] = released
  if clients is not None:
    now |= run_settings.of_clients(clients, settings['privacy'] != 'None')
  run_settings.check(settings, now, output_dir)
  stored = os.path.join(output_dir, CLIENTS_FOLDER)
  if not process.is_stateless and os.path.isdir(stored):
    run.store = client_store_lib.ClientStore(
      process.initialize_client, folder=stored, writable=False
    )
  elif not process.is_stateless:
    logging.warning(
      '%s: there is no folder of what clients remember, so that all count as '
      'new, also those that took part. If the run had a store elsewhere, read '
      'that: `ClientStore(process.initialize_client, folder=...)`.',
      stored,
    )
  return Saved(
    run.round,
    run.state,
    run.weights,
    run.notes.best_round,
    run.best,
    run.store and run.store.at(run.round),
    run.best_store,
    run.best_held,
    process,
    vocabularies.kept_in(output_dir),
    run.notes.columns,
  )
