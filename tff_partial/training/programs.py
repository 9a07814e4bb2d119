"""Programs: run a process round by round, measure, record, resume.

A run is a function of its arguments and its seed. With an output folder it can
be killed at any moment: the same call resumes from the last whole checkpoint
and ends with the same numbers, bit for bit.
"""

from collections.abc import Sequence
import dataclasses
import os
import time
from typing import Any, TypeAlias

from absl import logging

from tff_partial import processes
from tff_partial import runtimes
from tff_partial.arguments import checked_numbers
from tff_partial.data import cohorts
from tff_partial.data import vocabularies
from tff_partial.dp import privacy_plans
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import checkpoints
from tff_partial.training import evaluation_sets
from tff_partial.training import history
from tff_partial.training import metrics_log
from tff_partial.training import results
from tff_partial.training import run_privacy
from tff_partial.training import run_settings
from tff_partial.training import run_state
from tff_partial.training import selection
from tff_partial.training import training_loop
from tff_partial.training.client_store import client_store as client_store_lib
from tff_partial.training.errors import ProgramError as ProgramError
from tff_partial.training.errors import RunError
from tff_partial.training.participation import sampling

CHECKPOINTS_FOLDER = 'checkpoints'
CLIENTS_FOLDER = 'clients'

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
  participation: sampling.Participation | None = None,
) -> TrainingResult:
  """Train for some rounds under the current runtime.

  If that is none of ours, a `runtimes.cohort()` is used that this and other
  calls share.

  Args:
    process: The algorithm.
    clients: The clients to train with.
    rounds: Number of rounds of the whole run.
    clients_per_round: Number of clients whose updates a round aggregates.
    seed: Seed of all random draws except the initial weights, which follow from
      the model's seed.
    oversample: Factor by which more clients are asked.
    dropout_rate: Probability that a client that was asked does not answer.
    validation: Measured every `evaluate_every` rounds; selects the best round.
    evaluate_every: Rounds between evaluations.
    checkpoint_every: Rounds between checkpoints; `evaluate_every` by default.
      If clients have states, each new best round is saved, too.
    select: Criterion of the best round; by default the lowest validation loss.
    stop: Rule by which a run counts as diverged.
    callbacks: Called in order after each round, once its row is written, with a
      `callbacks.RoundResult`. One that returns True ends the run: this round is
      its last one, is validated and saved, and the run does not resume when it
      is started again. After a kill a run repeats the rounds after its last
      checkpoint, and calls for them again.
    output_dir: Folder for records and checkpoints; if it holds a checkpoint,
      the run resumes from there, with the same process, clients and settings,
      except for more rounds. The clients' vocabularies are kept there, too
      (`vocabularies.load`). Nothing is written if None.
    client_store: Store of client states between rounds; by default in a folder
      of `output_dir`, or in memory without one. It belongs to this run only:
      states of later rounds than the one from which the run resumes are
      dropped. Those saved as round 0 are the states before the first round.
    privacy: Counts the cost of the run, if the process follows its plan.
      Clients are drawn as planned; unless it is a simulation, cohorts and
      clients' seeds follow from a secret of the operating system, which is kept
      in the checkpoints, and not from `seed`. A process that clips and noises
      updates is refused without it, unless this is 'unaccounted': a simulation
      of the noise without an epsilon.
    diagnostics: True if a private run also records exact values of its cohorts:
      losses, metrics, number of clients. Names of columns that are not private
      end in `_not_private`. A run without a ledger always records these.
    tensorboard: True to write TensorBoard events, too.
    show_progress: True to show a progress bar; by default in a notebook and in
      an interactive shell.
    participation: Clients asked in reserve, slow ones, the time of day, and
      epochs over the clients; by default none of these.

  Raises:
    UserError: With a message for the user; what was written before is kept.
  """
  if checkpoint_every is None:
    checkpoint_every = evaluate_every
  select = select or Selection()
  sampler, ledger = check(
    process,
    clients,
    rounds=rounds,
    clients_per_round=clients_per_round,
    seed=seed,
    oversample=oversample,
    dropout_rate=dropout_rate,
    validation=validation,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
    select=select,
    callbacks=callbacks,
    privacy=privacy,
    participation=participation,
  )
  if client_store is not None:
    _check_store(client_store, process, seed, output_dir)
  started = time.perf_counter()
  loop = training_loop.TrainingLoop(
    run=run_state.Run(process, ledger),
    clients=clients,
    sampler=sampler,
    rounds=rounds,
    seed=seed,
    validation=validation,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
    select=select,
    stop=stop or StoppingRule(),
    callbacks=callbacks,
    diagnostics=diagnostics,
  )
  events = checkpoints.EventLoop()
  try:
    if output_dir is not None:
      loop.saved = checkpoints.Checkpoints(
        os.path.join(output_dir, CHECKPOINTS_FOLDER), events
      )
    _begin(loop, client_store, output_dir, tensorboard)
    loop.bar = metrics_log.Bar(rounds, loop.run.round, show_progress)
    while not loop.is_over:
      loop.next()
  finally:
    loop.close()
    events.close()
    if loop.run.store is not None and loop.run.store is not client_store:
      loop.run.store.release()
  return loop.result(time.perf_counter() - started)


def check(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  *,
  rounds: int,
  clients_per_round: int,
  seed: int = 0,
  oversample: float = 1.0,
  dropout_rate: float = 0.0,
  validation: EvaluationSet | None = None,
  evaluate_every: int = 50,
  checkpoint_every: int | None = None,
  select: Selection | None = None,
  callbacks: Sequence[callbacks_lib.Callback] = (),
  privacy: run_privacy.Accounting | None = None,
  participation: sampling.Participation | None = None,
) -> tuple[sampling.CohortSampler, privacy_plans.PrivacyLedger | None]:
  """Check the arguments of `train`, for any folder, without running.

  Returns:
    The sampler of cohorts, and the ledger of the run's cost, or None.

  Raises:
    UserError: As for `train`.
  """
  _check_positive(
    rounds=rounds,
    evaluate_every=evaluate_every,
    checkpoint_every=evaluate_every
    if checkpoint_every is None
    else checkpoint_every,
  )
  for name, value in (('seed', seed), ('clients_per_round', clients_per_round)):
    wrong = checked_numbers.why_not_whole(value)
    if wrong:
      raise ProgramError(f'{name}: {wrong}.')
  callbacks_lib.check(
    callbacks, None if validation is None else validation.metrics
  )
  cohorts.check(clients, process.example_spec)
  ledger = run_privacy.ledger_of(
    process, privacy, len(clients.client_ids), clients_per_round, rounds
  )
  if validation is not None:
    _check_validation(validation, process, select or Selection())
  sampler = sampling.planned(
    clients.client_ids,
    clients_per_round,
    seed,
    oversample,
    dropout_rate,
    ledger,
    participation,
  )
  return sampler, ledger


def _begin(
  loop: training_loop.TrainingLoop,
  client_store: client_store_lib.ClientStore | None,
  output_dir: str | os.PathLike[str] | None,
  tensorboard: bool,
) -> None:
  """Resume from the folder, and open the records that rounds write to."""
  run, found = loop.run, None
  if loop.saved is not None:
    settings = run_settings.describe(
      run.process,
      loop.clients,
      loop.validation,
      loop.sampler,
      loop.evaluate_every,
      loop.select,
      run.privacy,
    )
    found = loop.saved.latest(run.kinds)
    if found is not None:
      run.go_on_from(found)
      run_settings.check(run.notes.settings, settings, output_dir)
      _check_rounds_done(run, loop.rounds, output_dir)
    run.notes.settings = settings
  if output_dir is not None:
    known = getattr(loop.clients, 'vocabularies', {})
    vocabularies.keep(known, output_dir, goes_on=found is not None)
  if run.notes.secret is not None:
    loop.sampler = dataclasses.replace(loop.sampler, seed=run.notes.secret)
  run.store = client_store or _store(run.process, loop.seed, output_dir)
  if run.store is not None:
    run.store.go_back_to(run.round)
    if run.privacy is not None and output_dir is not None:
      _check_deletions(run, output_dir)
  if output_dir is not None:
    table = None if found is None else checkpoints.decompress(found.table)
    loop.history = history.read(table or '')
    loop.table = metrics_log.Records(
      output_dir, saved=table, tensorboard=tensorboard
    )
    if run.privacy is not None and found is None:
      # After a kill, the same must be released from here on.
      run.save(loop.saved, loop.table)


def _check_positive(**numbers: int) -> None:
  for name, number in numbers.items():
    wrong = checked_numbers.why_not_whole(number)
    if wrong:
      raise ProgramError(f'{name}: {wrong}.')
    if number < 1:
      raise ProgramError(f'{name} must be positive, found {number}.')


def _check_validation(
  validation: EvaluationSet,
  process: processes.PartialProcess,
  select: Selection,
) -> None:
  """Check that clients can be measured, and the best round selected."""
  validation.check(run_state.remembered(process))
  if select.metric not in validation.metrics:
    raise ProgramError(
      f'There is no metric {select.metric!r} to choose the best round by. '
      f'Choose one of {validation.metrics}.'
    )


def _check_store(
  store: client_store_lib.ClientStore,
  process: processes.PartialProcess,
  seed: int,
  output_dir: str | os.PathLike[str] | None,
) -> None:
  """Check that a given store fits this run."""
  remembered = run_state.remembered(process)
  if remembered is None or not store.type.is_equivalent_to(remembered):
    raise ProgramError(
      f'The client store holds states of the type {store.type}, but clients of '
      f'this process remember {remembered or "nothing"}.'
    )
  if store.seed != seed:
    raise ProgramError(
      f'The client store has the seed {store.seed}, the run has {seed}.'
    )
  if output_dir is not None and store.path is None:
    raise ProgramError(
      'The client store is in memory, so that the run could not go on from its '
      'checkpoints. Give the store a folder, or leave it out.'
    )
  if output_dir is None and max(store.rounds, default=0) > 0:
    raise ProgramError(
      f'The client store holds states of round {store.rounds[-1]}, but a run '
      'without output_dir begins with round 1. Give a new store.'
    )


def _store(
  process: processes.PartialProcess,
  seed: int,
  output_dir: str | os.PathLike[str] | None,
) -> client_store_lib.ClientStore | None:
  """Build the store of a run that was given none."""
  if process.is_stateless:
    return None
  return client_store_lib.ClientStore(
    process.initialize_client,
    seed=seed,
    folder=output_dir and os.path.join(output_dir, CLIENTS_FOLDER),
  )


def _check_deletions(run: run_state.Run, where: str | os.PathLike[str]) -> None:
  """Refuse to repeat private rounds after a client was deleted.

  They have the same noise, so that the difference between the sums published
  before and those published now is exact.
  """
  published = metrics_log.last_round(where)
  if published > run.round and (
    run.store is not None and run.store.deletions != run.notes.deletions
  ):
    raise ProgramError(
      f'{where}: a client was deleted after round {run.round} was saved, and '
      f'rounds up to {published} were published before. To repeat them without '
      'the client would publish other sums with the same noise, whose '
      'difference is exact. Begin a new run in another folder.'
    )


def _check_rounds_done(run: run_state.Run, rounds: int, where: Any) -> None:
  """Refuse a run that has done more rounds than requested."""
  done, ended_by = run.round, run.notes.ended_by
  if done > rounds:
    raise ProgramError(
      f'{where}: the run in this folder has done {done} rounds, and {rounds} '
      f'are asked for. Ask for {done} or more, or choose another folder.'
    )
  if ended_by:
    logging.warning(
      '%s: the run was ended after round %d by %s; nothing is left to train. '
      'To train on, begin a run in another folder.',
      where,
      done,
      ended_by,
    )
  elif done == rounds:
    logging.warning(
      '%s: round %d of %d is done; nothing is left to train.',
      where,
      done,
      rounds,
    )
  else:
    logging.info('Going on from the checkpoint of round %d.', done)


@runtimes.ours()
def load(
  process: processes.PartialProcess,
  output_dir: str | os.PathLike[str],
  *,
  released: str = '',
) -> Saved:
  """Read the weights and client states that `train` left in a folder.

  Args:
    process: The trained process.
    output_dir: The folder.
    released: Fingerprint of the release before the first round, as in
      `PrivacyLedger`; empty to not compare it.

  Raises:
    RunError: If there is no checkpoint, or it is from another process.
    ProgramError: If the run released something else.
    ClientStoreError: If there is a client store that does not match.
  """
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
  run_settings.check(
    settings,
    {
      **settings,
      'process': run_settings.of_process(process),
      run_settings.IN_WORDS: run_settings.in_words(process),
      **({run_settings.RELEASED: released} if released else {}),
    },
    output_dir,
  )
  clients = os.path.join(output_dir, CLIENTS_FOLDER)
  if not process.is_stateless and os.path.isdir(clients):
    run.store = client_store_lib.ClientStore(
      process.initialize_client, folder=clients, writable=False
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
  )
