"""Programs: run a process round by round, measure, record, resume.

A run is a function of its arguments and its seed. With an output folder it can
be killed at any moment: the same call goes on from the last whole checkpoint
and ends with the same numbers, bit for bit.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
import secrets
import time
from typing import Any, TypeAlias

from absl import logging
import numpy as np
import tensorflow_federated as tff

from tff_partial import errors
from tff_partial import fingerprints
from tff_partial import processes
from tff_partial import random_bits
from tff_partial import runtimes
from tff_partial.data import cohorts
from tff_partial.dp import accounting
from tff_partial.dp import privacy as privacy_lib
from tff_partial.dp import privacy_plans
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import checkpoints
from tff_partial.training import client_errors
from tff_partial.training import client_store as client_store_lib
from tff_partial.training import evaluation_sets
from tff_partial.training import metrics_log
from tff_partial.training import sampling
from tff_partial.training import selection

CHECKPOINTS_FOLDER = 'checkpoints'
CLIENTS_FOLDER = 'clients'

# Names used by whoever trains.
EvaluationSet: TypeAlias = evaluation_sets.EvaluationSet
evaluate = evaluation_sets.evaluate
Selection: TypeAlias = selection.Selection
StoppingRule: TypeAlias = selection.StoppingRule


class ProgramError(errors.UserError, ValueError):
  """Raised for a run that cannot be carried out as asked."""


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """What a run ends with.

  Attributes:
    process: What was trained.
    state: The server's state after the last round.
    weights: The model's weights after the last round.
    best_weights: Those of the best round by the validation clients, or the last
      ones if there is none.
    best_round: That round, or None.
    validation: The validation metrics at the last evaluation, or None.
    best_validation: Those of the best round, or None.
    train: The last round's training metrics; none of a private run without
      diagnostics.
    rounds: How many rounds were run.
    diverged: Whether the run was stopped because its loss exploded, or ended so
      that it would have been.
    ended_by: The callback that ended the run, by its name; None if none did.
    seconds: `total`, `per_round_median` and `first_round` of this call.
    client_store: What clients remember after the last round, or None if they
      remember nothing.
    best_client_store: What they remembered after the best round, or the last
      one if there is none.
    privacy: What the rounds cost, as `PrivacyLedger.report` says, with the last
      round's measurements of the aggregator; None without a ledger.
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
  privacy: dict[str, Any] | None
  process: processes.PartialProcess = dataclasses.field(repr=False)

  def __repr__(self) -> str:
    """How the run went; weights and states are not printed."""
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
    return '\n'.join(lines)


def _described_metrics(
  what: str, metrics: Mapping[str, Any] | None
) -> list[str]:
  """A line on some metrics, or none."""
  values = [
    f'{name} {value:.4g}' if isinstance(value, float) else f'{name} {value}'
    for name, value in (metrics or {}).items()
    if isinstance(value, (bool, float, int, str))
  ]
  return [f'  {what}: {", ".join(values)}'] if values else []


class _Run:
  """The state of a run between rounds."""

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
    self.round = 0
    self.notes: dict[str, Any] = {
      'best_round': None,
      'best_validation': None,
      'validation': None,
      'first_loss': None,
      'first_validation_loss': None,
      'exploded': 0,
      'ended_by': None,
      # Pairs of a round and its pooled metrics.
      'validations': [],
      'train': {},
    }
    if privacy is not None:
      self.notes['measured'] = {}
      # Which clients are drawn, and what they draw. Who knows it knows who took
      # part. It is nowhere but here and in the checkpoints.
      if not privacy.simulation:
        self.notes['secret'] = secrets.randbits(128)

  @property
  def best(self) -> Any:
    """The best weights; the last ones if no round was measured as best."""
    if self.notes['best_round'] is None:
      return self.process.get_model_weights(self.state)
    return self.best_weights

  @property
  def best_store(self) -> client_store_lib.ClientStates | None:
    """What clients remembered when the weights were the best."""
    best = self.notes['best_round']
    if self.store is None or best is None:
      return self.store
    return self.store.at(best)

  def next(self, clients: cohorts.Cohort) -> Mapping[str, Any]:
    """Does a round with some clients; returns its metrics."""
    ids = clients.client_ids
    kept: Sequence[Any] = [collections.OrderedDict()] * len(ids)
    if self.store is not None:
      kept = self.store.read(ids)
    with client_errors.naming(f'Round {self.round + 1}', clients):
      output = self.process.next(self.state, kept, clients)
    if self.store is not None:
      self.store.write(ids, output.client_states)
    self.state = output.state
    self.round += 1
    return output.metrics

  def is_over(self, rounds: int, stop: StoppingRule) -> bool:
    """Says whether no round is left to do."""
    return bool(
      self.round >= rounds
      or self.notes['exploded'] >= stop.rounds
      or self.notes['ended_by']
    )

  def has_diverged(self, stop: StoppingRule) -> bool:
    """Says whether the weights are of no use any more."""
    if self.notes['exploded'] >= stop.rounds:
      return True
    measured = self.notes['validation']
    if measured is None:
      return False
    size = measured['num_clients'] + measured['num_not_finite']
    return stop.has_exploded(
      measured, self.notes.get('first_validation_loss'), size
    )

  def progress(
    self,
    choices: Mapping[str, bool] | None = None,
    table: metrics_log.Records | None = None,
  ) -> checkpoints.Progress:
    """Everything a checkpoint must hold."""
    return checkpoints.Progress(
      self.round,
      self.state,
      self.best_weights,
      checkpoints.encode({**self.notes, 'choices': dict(choices or {})}),
      checkpoints.compress(table.text if table is not None else ''),
    )

  def save(
    self,
    saved: checkpoints.Checkpoints | None,
    table: metrics_log.Records | None,
  ) -> None:
    """Saves what clients remember, and then everything else."""
    if self.store is not None:
      self.store.save(self.round, self.notes['best_round'])
      self.notes['deletions'] = self.store.deletions
    if saved is not None:
      saved.save(self.progress(getattr(_runtime(), 'choices', {}), table))

  def go_on_from(self, found: checkpoints.Progress) -> None:
    """Takes over a checkpoint, and has the runtime choose as it did then."""
    self.round = int(found.round)
    self.state = found.state
    self.best_weights = found.best_weights
    # What runs of older versions did not note keeps its first value.
    self.notes.update(checkpoints.decode(found.notes))
    choices = self.notes.pop('choices')
    recall = getattr(_runtime(), 'recall', None)
    if recall is not None:
      recall(choices)


def _runtime() -> Any:
  """The runtime that will run the computations."""
  return tff.framework.get_context_stack().current


def _remembered(process: processes.PartialProcess) -> tff.Type | None:
  """The type of what clients remember, or None if that is nothing."""
  if process.is_stateless:
    return None
  return process.initialize_client.type_signature.result


def _check_store(
  store: client_store_lib.ClientStore,
  process: processes.PartialProcess,
  seed: int,
  output_dir: str | os.PathLike[str] | None,
) -> None:
  """Checks that a store that was given is one for this run."""
  remembered = _remembered(process)
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


# What takes so long where nothing moves.
_FIRST = 'tracing and compiling, once'


def _check_positive(**numbers: int) -> None:
  for name, number in numbers.items():
    if number < 1:
      raise ProgramError(f'{name} must be positive, found {number}.')


def _sampler(
  client_ids: Sequence[str],
  clients_per_round: int,
  seed: int,
  oversample: float,
  dropout_rate: float,
  privacy: privacy_plans.PrivacyLedger | None,
) -> sampling.CohortSampler:
  """Draws cohorts; as they were planned, if there is a plan."""
  planned: dict[str, Any] = {}
  if privacy is not None:
    plan = privacy.plan
    if plan.clients_per_round != clients_per_round or (
      plan.population != len(client_ids) and not privacy.simulation
    ):
      raise ProgramError(
        f'The privacy was planned for {plan.clients_per_round} of '
        f'{plan.population} clients, but the run has {clients_per_round} of '
        f'{len(client_ids)}. Plan what is done.'
      )
    planned['poisson'] = isinstance(plan.sampling, accounting.PoissonSampling)
    if isinstance(plan.sampling, accounting.OncePerTree):
      planned['rounds_per_tree'] = plan.sampling.rounds_per_tree
  return sampling.CohortSampler(
    client_ids, clients_per_round, seed, oversample, dropout_rate, **planned
  )


# Of a source that has to load its clients, as many are looked at.
_CLIENTS_COMPARED = 64
# What makes a run another one, in words, where the value alone tells nothing.
_SETTINGS = {
  'process': 'process (algorithm, model, optimizers or learning rates)',
  'examples': "clients' examples",
}


def _settings(
  process: processes.PartialProcess,
  clients: cohorts.ClientSource,
  validation: EvaluationSet | None,
  sampler: sampling.CohortSampler,
  evaluate_every: int,
  select: Selection,
  privacy: privacy_plans.PrivacyLedger | None,
) -> dict[str, str]:
  """All by which a run is this one: its checkpoints go on with the same only.

  A private run that went on with other examples would publish two sums with the
  same noise, whose difference is exact. So its examples are compared in full.
  """
  sample = _CLIENTS_COMPARED if privacy is None else None
  settings = {
    'seed': str(sampler.seed),
    'clients_per_round': str(sampler.clients_per_round),
    'oversample': str(sampler.oversample),
    'dropout_rate': str(sampler.dropout_rate),
    'evaluate_every': str(evaluate_every),
    'select': str(select),
    'privacy': 'None',
    'process': _fingerprint(process),
    **_described(clients, sample),
  }
  if privacy is not None:
    # A process whose noise can be drawn again needs such a ledger.
    kind = 'a' if privacy.simulation else 'no'
    settings['privacy'] = f'{privacy.plan.terms}, {kind} simulation'
  described: dict[str, str] = {}
  if validation is not None:
    described = {
      'evaluation': fingerprints.of_computations(
        validation.evaluation.evaluate
      ),
      **_described(validation.clients, sample),
    }
  return {
    **settings,
    **{f'validation {name}': value for name, value in described.items()},
  }


def _fingerprint(process: processes.PartialProcess) -> str:
  return fingerprints.of_computations(
    process.initialize, process.next, process.initialize_client
  )


def _described(
  clients: cohorts.ClientSource, sample: int | None
) -> dict[str, str]:
  """Which clients a source has, and what their examples are."""
  ids = clients.client_ids
  digest = random_bits.derive('clients', *ids).tobytes().hex()
  return {
    'clients': f'{len(ids)} clients ({digest})',
    'examples': clients.fingerprint(sample),
  }


def _check_settings(
  before: Mapping[str, str], now: Mapping[str, str], where: Any
) -> None:
  """Refuses to go on with a run that is another one, naming what differs.

  Args:
    before: The settings of the run that was begun.
    now: Those with which it is to go on.
    where: Its folder.
  """
  for name in {**before, **now}:
    if before.get(name) != now.get(name):
      break
  else:
    return
  what = f'the {_SETTINGS[name]}' if name in _SETTINGS else name
  noted = [one.get(name, 'nothing') for one in (before, now)]
  remedy = 'Give the same to go on with it, or choose another folder.'
  if name == 'privacy':
    remedy = (
      'What is spent already was counted with the former. Give the same to go '
      'on with it; with a target epsilon, the same number of rounds, too.'
    )
  raise ProgramError(
    f'{where}: the run in this folder was begun with another setting: {what} '
    f'was {noted[0]} and is now {noted[1]}. {remedy}'
  )


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
  privacy: privacy_plans.PrivacyLedger | None = None,
  diagnostics: bool = False,
  tensorboard: bool = True,
  show_progress: bool = False,
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
      and settings, but for more rounds. Nothing is written if None.
    client_store: Where what clients remember is kept between rounds; by
      default in a folder of `output_dir`, or in memory without one. It belongs
      to this run alone: what is in it of later rounds than the one from which
      the run goes on is dropped. What was saved as round 0 is what clients
      remember before the first round.
    privacy: Counts what the run costs, if the process does what its plan says.
      Clients are drawn as planned; unless it is a simulation, cohorts and
      clients' seeds follow from a secret of the operating system, which is kept
      in the checkpoints, and no more from `seed`.
    diagnostics: Whether a private run also records what is exact of its
      cohorts: losses, metrics, how many clients came. Names of columns that
      are not private end in `_not_private`. A run without `privacy` always
      records these.
    tensorboard: Whether to write TensorBoard events, too.
    show_progress: Whether to show a progress bar.

  Raises:
    UserError: With a message for the user; what was written before is kept.
  """
  if checkpoint_every is None:
    checkpoint_every = evaluate_every
  _check_positive(
    rounds=rounds,
    evaluate_every=evaluate_every,
    checkpoint_every=checkpoint_every,
  )
  callbacks_lib.check(
    callbacks, None if validation is None else validation.metrics
  )
  cohorts.check(clients, process.example_spec)
  if client_store is not None:
    _check_store(client_store, process, seed, output_dir)
  select, stop = select or Selection(), stop or StoppingRule()
  if privacy is not None:
    privacy.check(process.mechanism)
  if validation is not None:
    validation.check(_remembered(process))
    if select.metric not in validation.metrics:
      raise ProgramError(
        f'There is no metric {select.metric!r} to choose the best round by. '
        f'Choose one of {validation.metrics}.'
      )
  sampler = _sampler(
    clients.client_ids,
    clients_per_round,
    seed,
    oversample,
    dropout_rate,
    privacy,
  )
  run = _Run(process, privacy)
  loop = checkpoints.EventLoop()
  started = time.perf_counter()
  bar = saved = table = None
  try:
    if output_dir is not None:
      saved = checkpoints.Checkpoints(
        os.path.join(output_dir, CHECKPOINTS_FOLDER), loop
      )
      settings = _settings(
        process, clients, validation, sampler, evaluate_every, select, privacy
      )
      found = saved.latest(run.progress())
      if found is not None:
        run.go_on_from(found)
        _check_settings(run.notes['settings'], settings, output_dir)
        _check_rounds_done(run, rounds, output_dir)
      run.notes['settings'] = settings
    if 'secret' in run.notes:
      sampler = dataclasses.replace(sampler, seed=run.notes['secret'])
    run.store = client_store or _store(process, seed, output_dir)
    if run.store is not None:
      run.store.go_back_to(run.round)
      if privacy is not None and output_dir is not None:
        _check_deletions(run, output_dir)
    if output_dir is not None:
      table = metrics_log.Records(
        output_dir,
        saved=None if found is None else checkpoints.decompress(found.table),
        tensorboard=tensorboard,
      )
      if privacy is not None and found is None:
        # What is released from here on must be released alike after a kill.
        run.save(saved, table)
    bar = metrics_log.Bar(rounds, run.round, show_progress)
    durations: list[float] = []
    has_validated = False
    while not run.is_over(rounds, stop):
      if not durations:
        bar.say(_FIRST)
      begun = time.perf_counter()
      number = run.round + 1
      asked = sampler.cohort(number)
      cohort = clients.cohort(asked, sampler.seeds(number, asked))
      nested = run.next(cohort)
      metrics = metrics_log.flatten(nested)
      durations.append(time.perf_counter() - begun)
      train_metrics = evaluation_sets.pooled(nested['client_work']['train'])
      _count_explosions(run, train_metrics, stop, len(cohort))
      if privacy is None:
        row = _row(metrics, train_metrics, durations[-1])
      else:
        row = _private_row(metrics, train_metrics, durations[-1], diagnostics)
        row.update(privacy.columns(number))
        run.notes['measured'] = _of_aggregator(row)
      is_validated = run.is_over(rounds, stop) or number % evaluate_every == 0
      if validation is not None:
        if is_validated and not has_validated:
          bar.say(f'validation: {_FIRST}')
        has_validated |= is_validated
        row.update(
          _validate(run, validation, seed, select)
          if is_validated
          else dict.fromkeys(_validation_columns(validation), '')
        )
      if table is not None:
        table.release(row, number)
      if callbacks:
        _call(callbacks, run, row)
        is_early = run.notes['ended_by'] and not is_validated
        if is_early and validation is not None:
          columns = _validate(run, validation, seed, select)
          row.update(columns)
          if table is not None:
            table.complete(columns)
      is_new_best = run.store is not None and run.notes['best_round'] == number
      if (
        run.is_over(rounds, stop)
        or number % checkpoint_every == 0
        or is_new_best
      ):
        run.save(saved, table)
      bar.step(_shown(run, select, row))
  finally:
    if bar is not None:
      bar.close()
    loop.close()
    if saved is not None:
      saved.close()
    if run.store is not None and run.store is not client_store:
      run.store.release()
  return TrainingResult(
    state=run.state,
    weights=process.get_model_weights(run.state),
    best_weights=run.best,
    best_round=run.notes['best_round'],
    validation=run.notes['validation'],
    best_validation=run.notes['best_validation'],
    train=(run.notes['train'] if privacy is None or diagnostics else {}),
    rounds=run.round,
    diverged=run.has_diverged(stop),
    ended_by=run.notes['ended_by'],
    seconds={
      'total': time.perf_counter() - started,
      'per_round_median': float(np.median(durations)) if durations else 0.0,
      'first_round': durations[0] if durations else 0.0,
    },
    client_store=run.store,
    best_client_store=run.best_store,
    privacy=(
      None
      if privacy is None
      else privacy.report(run.round, **run.notes['measured'])
    ),
    process=process,
  )


@dataclasses.dataclass(frozen=True)
class Saved:
  """What the newest checkpoint of a run holds.

  Attributes:
    process: What was trained.
    rounds: How many rounds were done.
    last_weights: The weights after that round, `ModelWeights`.
    best_round: The best round by the validation clients, or None.
    best_weights: Its weights, or the last ones.
    client_store: What clients remember after the last round; None if that is
      nothing, or is not in the folder.
    best_client_store: What they remembered after the best round, or the last
      one.
  """

  rounds: int
  last_weights: Any = dataclasses.field(repr=False)
  best_round: int | None
  best_weights: Any = dataclasses.field(repr=False)
  client_store: client_store_lib.ClientStates | None
  best_client_store: client_store_lib.ClientStates | None
  process: processes.PartialProcess = dataclasses.field(repr=False)


@runtimes.ours()
def load(
  process: processes.PartialProcess, output_dir: str | os.PathLike[str]
) -> Saved:
  """Reads the weights that `train` left in a folder, and what clients remember.

  Args:
    process: The process that was trained.
    output_dir: The folder.

  Raises:
    CheckpointError: If there is no checkpoint, or it is of another process.
    ClientStoreError: If there is a client store that does not go with it.
  """
  folder = os.path.join(output_dir, CHECKPOINTS_FOLDER)
  run = _Run(process)
  found = None
  if os.path.isdir(folder):
    loop = checkpoints.EventLoop()
    try:
      saved = checkpoints.Checkpoints(folder, loop, writable=False)
      found = saved.latest(run.progress())
    finally:
      loop.close()
  if found is None:
    raise checkpoints.CheckpointError(
      f'There is no checkpoint in {folder}. Train first.'
    )
  run.go_on_from(found)
  settings = run.notes['settings']
  _check_settings(
    settings, {**settings, 'process': _fingerprint(process)}, output_dir
  )
  clients = os.path.join(output_dir, CLIENTS_FOLDER)
  if not process.is_stateless and os.path.isdir(clients):
    run.store = client_store_lib.ClientStore(
      process.initialize_client, folder=clients, writable=False
    )
  return Saved(
    run.round,
    process.get_model_weights(run.state),
    run.notes['best_round'],
    run.best,
    run.store and run.store.at(run.round),
    run.best_store,
    process,
  )


def _count_explosions(
  run: _Run, train_metrics: Mapping[str, Any], stop: StoppingRule, size: int
) -> None:
  """Notes the round's loss, and whether it is one more explosion in a row."""
  notes = run.notes
  notes['train'] = dict(train_metrics)
  if not size:
    return
  _note_first_loss(run, 'first_loss', train_metrics)
  exploded = stop.has_exploded(train_metrics, notes['first_loss'], size)
  notes['exploded'] = notes['exploded'] + 1 if exploded else 0


def _note_first_loss(run: _Run, name: str, measured: Mapping[str, Any]) -> None:
  """Notes a loss to compare later ones with, unless there is one already."""
  is_measured = measured['num_clients'] and math.isfinite(measured['loss'])
  if is_measured and run.notes.get(name) is None:
    run.notes[name] = measured['loss']


def _row(
  metrics: Mapping[str, Any], train_metrics: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
  """The columns of a round: training metrics lose their prefix."""
  prefix = 'client_work/train/'
  row = {name: v for name, v in metrics.items() if not name.startswith(prefix)}
  row.update(train_metrics)
  row['seconds_round'] = seconds
  return row


def _private_row(
  metrics: Mapping[str, Any],
  train_metrics: Mapping[str, Any],
  seconds: float,
  diagnostics: bool,
) -> dict[str, Any]:
  """The columns of a private round: exact ones on request, and named so."""
  exact = {
    f'{name}{privacy_lib.NOT_PRIVATE}': value
    for name, value in train_metrics.items()
  }
  row = _row(metrics, exact, seconds)
  return {
    name: value
    for name, value in row.items()
    if diagnostics or not name.endswith(privacy_lib.NOT_PRIVATE)
  }


def _check_deletions(run: _Run, where: str | os.PathLike[str]) -> None:
  """Refuses to repeat private rounds in which a client was who is gone now.

  They have the same noise, so that the difference of what was published before
  and of what would be published now is exact.
  """
  published = metrics_log.last_round(where)
  if published > run.round and (
    run.store is not None and run.store.deletions != run.notes.get('deletions')
  ):
    raise ProgramError(
      f'{where}: a client was deleted after round {run.round} was saved, and '
      f'rounds up to {published} were published before. To repeat them without '
      'the client would publish other sums with the same noise, whose '
      'difference is exact. Begin a new run in another folder.'
    )


def _check_rounds_done(run: _Run, rounds: int, where: Any) -> None:
  """Refuses to hand out a longer run than is asked for."""
  done, ended_by = run.round, run.notes['ended_by']
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


def _of_aggregator(metrics: Mapping[str, Any]) -> dict[str, float]:
  """What the aggregator measured, by its own names."""
  prefix = 'aggregator/'
  return {
    name.removeprefix(prefix): float(value)
    for name, value in metrics.items()
    if name.startswith(prefix)
  }


def _call(
  callbacks: Sequence[callbacks_lib.Callback],
  run: _Run,
  row: Mapping[str, Any],
) -> None:
  """Tells the callbacks of a round, and notes if one ended the run."""
  run.notes['ended_by'] = callbacks_lib.call(
    callbacks,
    callbacks_lib.RoundResult(
      run.round,
      {name: value for name, value in row.items() if value != ''},
      dict(run.notes['validations']),
      lambda: run.process.get_model_weights(run.state),
    ),
  )


def _validate(
  run: _Run, evaluation_set: EvaluationSet, seed: int, select: Selection
) -> dict[str, Any]:
  """Measures the validation clients and keeps the best weights.

  Returns:
    The validation's columns of the round's row.
  """
  weights = run.process.get_model_weights(run.state)
  measured = evaluate(evaluation_set, weights, seed, run.store)
  notes = run.notes
  notes['validation'] = measured
  notes['validations'].append(
    (run.round, {name: measured[name] for name in evaluation_set.metrics})
  )
  _note_first_loss(run, 'first_validation_loss', measured)
  if select.is_better(measured, notes['best_validation']):
    notes.update(best_validation=measured, best_round=run.round)
    run.best_weights = weights
  return {
    column: measured[name]
    for column, name in _validation_columns(evaluation_set).items()
  }


def _validation_columns(evaluation_set: EvaluationSet) -> dict[str, str]:
  """The validation's columns of a row, with the metrics that fill them."""
  return {f'validation_{name}': name for name in evaluation_set.metrics}


def _shown(
  run: _Run, select: Selection, row: Mapping[str, Any]
) -> dict[str, float]:
  """What the progress bar shows: of a private run what it costs."""
  shown = {
    name: row[column]
    for name, column in (('loss', 'loss'), ('epsilon', 'privacy/epsilon'))
    if column in row
  }
  if run.notes['validation'] is not None:
    name = select.metric
    shown[f'validation_{name}'] = run.notes['validation'][name]
  return shown
