"""Run a loop of rounds, from where its folder and its store have got to."""

import dataclasses
import os
import time
from typing import Any

from absl import logging

from tff_partial import processes
from tff_partial.data import vocabularies
from tff_partial.training import checkpoints
from tff_partial.training import files
from tff_partial.training import metrics_log
from tff_partial.training import results
from tff_partial.training import run_settings
from tff_partial.training import run_state
from tff_partial.training import training_loop
from tff_partial.training.client_store import client_store as client_store_lib
from tff_partial.training.errors import ProgramError

CHECKPOINTS_FOLDER = 'checkpoints'
CLIENTS_FOLDER = 'clients'


def run(
  loop: training_loop.TrainingLoop,
  client_store: client_store_lib.ClientStore | None,
  output_dir: str | os.PathLike[str] | None,
  tensorboard: bool,
  show_progress: bool | None,
) -> results.TrainingResult:
  """Run the rounds that are left, from the last checkpoint in the folder on.

  States of `client_store` after rounds later than that are dropped; those that
  were saved as round 0 are the states before the first round.

  Other arguments are as for `train`.
  """
  if client_store is not None:
    _check_store(client_store, loop.process, loop.seed, output_dir)
  started = time.perf_counter()
  events = checkpoints.EventLoop()
  state: run_state.Run | None = None
  try:
    if output_dir is not None:
      loop.saved = checkpoints.Checkpoints(
        os.path.join(output_dir, CHECKPOINTS_FOLDER), events
      )
    state = loop.run
    _begin(loop, client_store, output_dir, tensorboard)
    loop.bar = metrics_log.Bar(loop.rounds, state.round, show_progress)
    while not loop.is_over:
      loop.next()
  finally:
    loop.close()
    events.close()
    # A run whose folder could not be opened has none.
    store = None if state is None else state.store
    if store is not None and store is not client_store:
      store.release()
  return loop.result(time.perf_counter() - started)


def _begin(
  loop: training_loop.TrainingLoop,
  client_store: client_store_lib.ClientStore | None,
  output_dir: str | os.PathLike[str] | None,
  tensorboard: bool,
) -> None:
  """Resume from the folder, and open the records that rounds write to."""
  run, found = loop.run, None
  if loop.saved is not None:
    settings = run_settings.describe(loop)
    found = loop.saved.latest(run.kinds)
    if found is not None:
      run.go_on_from(found)
      run_settings.check(run.notes.settings, settings, output_dir)
      _check_rounds_done(run, loop.rounds, output_dir)
    elif run.notes.secret is not None and output_dir is not None:
      _check_unpublished(output_dir)
    run.notes.settings = settings
  run.notes.columns = getattr(loop.clients, 'columns', {})
  if output_dir is not None:
    known = getattr(loop.clients, 'vocabularies', {})
    with files.writing(f'Cannot write to {output_dir}'):
      vocabularies.keep(known, output_dir, goes_on=found is not None)
  if run.notes.secret is not None:
    loop.sampler = dataclasses.replace(loop.sampler, seed=run.notes.secret)
  run.store = client_store
  if run.store is None and not run.process.is_stateless:
    run.store = client_store_lib.ClientStore(
      run.process.initialize_client,
      seed=loop.seed,
      folder=output_dir and os.path.join(output_dir, CLIENTS_FOLDER),
    )
  if run.store is not None:
    run.store.go_back_to(run.round)
    if run.privacy is not None and output_dir is not None:
      _check_deletions(run, output_dir)
  if output_dir is not None:
    table = None if found is None else checkpoints.decompress(found.table)
    loop.table = metrics_log.Records(
      output_dir, saved=table, tensorboard=tensorboard
    )
    if not loop.is_over and run.undo_extra_validation():
      loop.table.complete(loop.empty_validation)
    loop.history = metrics_log.read(loop.table.text)
    if run.privacy is not None and found is None:
      # After a kill, the same must be released from here on.
      run.save(loop.saved, loop.table)


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


def _check_unpublished(where: str | os.PathLike[str]) -> None:
  """Refuse to begin a private run that has published rounds already."""
  if published := metrics_log.last_round(where):
    raise ProgramError(
      f'{where}: {published} rounds of a private run were published here, but '
      'there is no checkpoint of them. To begin again would publish them with '
      'other noise, which costs the same users once more, uncounted. Bring '
      f'the folder {CHECKPOINTS_FOLDER!r} back from a copy, or begin a new run '
      'in another folder.'
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
