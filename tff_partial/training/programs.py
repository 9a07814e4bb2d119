"""Programs: run a process round by round, measure, record, resume.

A run is a function of its arguments and its seed. With an output folder it can
be killed at any moment: the same call goes on from the last whole checkpoint
and ends with the same numbers, bit for bit.
"""

from collections.abc import Sequence
import dataclasses
import os
import time
from typing import Any, TypeAlias

from absl import logging

from tff_partial import checked_numbers
from tff_partial import processes
from tff_partial import runtimes
from tff_partial.data import cohorts
from tff_partial.data import vocabularies
from tff_partial.dp import privacy_plans
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import checkpoints
from tff_partial.training import client_store as client_store_lib
from tff_partial.training import evaluation_sets
from tff_partial.training import history
from tff_partial.training import metrics_log
from tff_partial.training import results
from tff_partial.training import run_privacy
from tff_partial.training import run_settings
from tff_partial.training import run_state
from tff_partial.training import sampling
from tff_partial.training import selection
from tff_partial.training import training_loop
from tff_partial.training.errors import ProgramError as ProgramError

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
  """Trains for some rounds, under the runtime that is current.

  If none of ours is, a `runtimes.cohort()` is taken that this and other calls
  share.

  Args:
    process: The algorithm.
    clients: The clients to train with.
    rounds: How many rounds the whole run has.
    clients_per_round: How many clients' updates a round joins.
    seed: Everything that is drawn follows from it, but for the first weights,
      which follow from the model's seed.
    oversample: How many times as many clients are asked.
    dropout_rate: The probability that a client that was asked does not answer.
    validation: Is run every so many rounds and chooses the best round.
    evaluate_every: Rounds between evaluations.
    checkpoint_every: Rounds between checkpoints; `evaluate_every` by default.
      If clients remember something, each new best round is saved, too.
    select: What makes a round the best; the lowest validation loss.
    stop: When a run counts as diverged.
    callbacks: Are called in turn after each round, when its row is written,
      with a `callbacks.RoundResult`. One that returns True ends the run: this
      round is its last one, is validated and saved, and the run does not go on
      when it is started again. After a kill a run repeats the rounds after its
      last checkpoint, and calls for them again.
    output_dir: Where records and checkpoints are written; if it holds a
      checkpoint, the run goes on from there, with the same process, clients
      and settings, but for more rounds. The clients' vocabularies are kept
      there, too (`vocabularies.load`). Nothing is written if None.
    client_store: Where what clients remember is kept between rounds; by
      default in a folder of `output_dir`, or in memory without one. It belongs
      to this run alone: what is in it of later rounds than the one from which
      the run goes on is dropped. What was saved as round 0 is what clients
      remember before the first round.
    privacy: Counts what the run costs, if the process does what its plan says.
      Clients are drawn as planned; unless it is a simulation, cohorts and
      clients' seeds follow from a secret of the operating system, which is kept
      in the checkpoints, and no more from `seed`. A process that clips and
      noises what clients send is refused without it, unless this is
      'unaccounted': a simulation of the noise, of which no epsilon is said.
    diagnostics: Whether a private run also records what is exact of its
      cohorts: losses, metrics, how many clients came. Names of columns that
      are not private end in `_not_private`. A run without a ledger always
      records these.
    tensorboard: Whether to write TensorBoard events, too.
    show_progress: Whether to show a progress bar; by default in a notebook and
      in an interactive shell.
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
  """Refuses what `train` would refuse whatever its folder holds; runs nothing.

  Args:
    process, clients, rounds, ...: As for `train`.

  Returns:
    What draws the cohorts, and what counts the run's cost, or None.

  Raises:
    UserError: As `train`.
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
  """Take over what the folder holds, and opens what the rounds write to."""
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
      # What is released from here on must be released alike after a kill.
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
  """Check that clients can be measured, and the best round be chosen."""
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
  """Check that a store that was given is one for this run."""
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
  """The store of a run that was given none."""
  if process.is_stateless:
    return None
  return client_store_lib.ClientStore(
    process.initialize_client,
    seed=seed,
    folder=output_dir and os.path.join(output_dir, CLIENTS_FOLDER),
  )


def _check_deletions(run: run_state.Run, where: str | os.PathLike[str]) -> None:
  """Refuses to repeat private rounds in which a client was who is gone now.

  They have the same noise, so that the difference of what was published before
  and of what would be published now is exact.
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
  """Refuses to hand out a longer run than is asked for."""
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
  """Read the weights that `train` left in a folder, and what clients remember.

  Args:
    process: The process that was trained.
    output_dir: The folder.
    released: The fingerprint of what was released before the first round, as
      `PrivacyLedger` has it, if it is to be compared.

  Raises:
    CheckpointError: If there is no checkpoint, or it is of another process.
    ProgramError: If the run released something else.
    ClientStoreError: If there is a client store that does not go with it.
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
    raise checkpoints.CheckpointError(
      f'There is no checkpoint in {folder}. Train first.'
    )
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
