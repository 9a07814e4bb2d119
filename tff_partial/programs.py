"""Programs: run a process round by round, measure, record, resume.

A run is a function of its arguments and its seed. With an output folder it can
be killed at any moment: the same call goes on from the last whole checkpoint
and ends with the same numbers, bit for bit.
"""

import collections
from collections.abc import Mapping
import dataclasses
import math
import os
import time
from typing import Any

from absl import logging
import numpy as np
import tensorflow_federated as tff

from tff_partial import checkpoints
from tff_partial import errors
from tff_partial import evaluation
from tff_partial import examples
from tff_partial import keras_functions
from tff_partial import processes
from tff_partial import records
from tff_partial import sampling

CHECKPOINTS_FOLDER = 'checkpoints'


class ProgramError(errors.UserError, ValueError):
  """Raised for a run that cannot be carried out as asked."""


@dataclasses.dataclass(frozen=True)
class Exam:
  """An evaluation and all the clients that take part in it.

  Attributes:
    evaluation: What the clients do.
    clients: Who they are; all of them are measured, not a sample.
  """

  evaluation: evaluation.Evaluation
  clients: examples.ClientSource


@dataclasses.dataclass(frozen=True)
class Selection:
  """Which round counts as the best one.

  Attributes:
    metric: A pooled metric of the validation clients.
    higher_is_better: Whether a larger value is better.
  """

  metric: str = 'loss'
  higher_is_better: bool = False

  def is_better(
    self, measured: Mapping[str, Any], best: Mapping[str, Any] | None
  ) -> bool:
    """Says whether a validation beats the best one so far.

    One that lost fewer clients always does: to lose the worst of them must not
    look like progress.

    Args:
      measured: Pooled metrics by name.
      best: Those of the best validation so far, or None.
    """
    value = measured[self.metric]
    if not (math.isfinite(value) and measured['num_clients']):
      return False
    if best is None:
      return True
    lost, fewest = measured['num_not_finite'], best['num_not_finite']
    if lost != fewest:
      return lost < fewest
    least = best[self.metric]
    return value > least if self.higher_is_better else value < least


@dataclasses.dataclass(frozen=True)
class StoppingRule:
  """When a run has diverged and is stopped instead of being trained on.

  Weights can explode and stay finite for a thousand rounds.

  Attributes:
    factor: A loss above this many times the first round's loss is an explosion.
    share_not_finite: More clients than this share without finite losses and
      weights are one, too.
    rounds: So many exploded rounds in a row stop the run.
  """

  factor: float = 3.0
  share_not_finite: float = 0.5
  rounds: int = 5

  def has_exploded(
    self,
    train: Mapping[str, Any],
    first_loss: float | None,
    num_clients: int,
  ) -> bool:
    """Says whether a round has exploded.

    Args:
      train: The round's training metrics.
      first_loss: The loss of the first round that had one.
      num_clients: The size of the cohort.
    """
    loss = float(train['loss'])
    lost = int(train['num_not_finite'])
    if not math.isfinite(loss) or lost > self.share_not_finite * num_clients:
      return True
    # As many times the first loss; some losses are negative.
    rise = (self.factor - 1.0) * abs(first_loss or 0.0)
    return first_loss is not None and loss > first_loss + rise


@dataclasses.dataclass(frozen=True)
class TrainingResult:
  """What a run ends with.

  Attributes:
    state: The server's state after the last round.
    weights: The model's weights after the last round.
    best_weights: Those of the best round by the validation clients, or the last
      ones if there is none.
    best_round: That round, or None.
    validation: The validation metrics at the last evaluation, or None.
    best_validation: Those of the best round, or None.
    train: The last round's training metrics.
    rounds: How many rounds were run.
    diverged: Whether the run was stopped because its loss exploded, or ended so
      that it would have been.
    seconds: `total`, `per_round_median` and `first_round` of this call.
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
  seconds: dict[str, float]


def evaluate(exam: Exam, weights: Any, seed: int = 0) -> dict[str, Any]:
  """All clients of an exam personalise the model and are measured.

  Args:
    exam: The evaluation and its clients.
    weights: The model's weights at the server, `ModelWeights`.
    seed: The run's seed; a client's draws follow from it and its id.

  Returns:
    Pooled metrics by name, and under `per_client` their distribution.
  """
  ids = exam.clients.client_ids
  seeds = sampling.client_seeds(ids, seed, 'evaluation')
  kept = _first_states(exam.evaluation.initialize_client, seeds)
  measured = exam.evaluation.evaluate(
    weights, kept, exam.clients.cohort(ids, seeds)
  )
  result = _measured(measured.metrics)
  result['per_client'] = evaluation.summarize(measured.per_client)
  return result


def _measured(metrics: Any) -> dict[str, Any]:
  """Pooled metrics by name; not numbers where no client was measured."""
  flat = records.flatten(metrics)
  return {
    name: value
    if flat['num_clients'] or name in keras_functions.COUNTS
    else math.nan
    for name, value in flat.items()
  }


def _first_states(
  initialize_client: tff.Computation, seeds: np.ndarray
) -> list[Any]:
  """What clients remember that never took part."""
  if not len(initialize_client.type_signature.result):
    return [collections.OrderedDict()] * len(seeds)
  return [initialize_client(seed) for seed in seeds]


class _Run:
  """The state of a run between rounds."""

  def __init__(self, process: processes.PartialProcess):
    self.process = process
    self.state = process.initialize()
    self.best_weights = process.get_model_weights(self.state)
    self.round = 0
    self.notes: dict[str, Any] = {
      'best_round': None,
      'best_validation': None,
      'validation': None,
      'first_loss': None,
      'exploded': 0,
      'train': {},
    }

  @property
  def best(self) -> Any:
    """The best weights; the last ones if no round was measured as best."""
    if self.notes['best_round'] is None:
      return self.process.get_model_weights(self.state)
    return self.best_weights

  def has_diverged(self, stop: StoppingRule) -> bool:
    """Says whether the weights are of no use any more."""
    if self.notes['exploded'] >= stop.rounds:
      return True
    measured = self.notes['validation']
    if measured is None:
      return False
    size = measured['num_clients'] + measured['num_not_finite']
    return stop.has_exploded(measured, self.notes['first_loss'], size)

  def progress(self, choices: Mapping[str, bool]) -> checkpoints.Progress:
    """Everything a checkpoint must hold."""
    notes = checkpoints.encode({**self.notes, 'choices': dict(choices)})
    return checkpoints.Progress(
      self.round, self.state, self.best_weights, notes
    )

  def go_on_from(self, found: checkpoints.Progress) -> Mapping[str, bool]:
    """Takes over a checkpoint; returns what the runtime had chosen."""
    self.round = int(found.round)
    self.state = found.state
    self.best_weights = found.best_weights
    notes = checkpoints.decode(found.notes)
    choices: Mapping[str, bool] = notes.pop('choices')
    self.notes = notes
    return choices


def _runtime() -> Any:
  """The runtime that will run the computations."""
  return tff.framework.get_context_stack().current


def _recall(choices: Mapping[str, bool]) -> None:
  """Has the runtime choose again what it chose in an earlier process."""
  recall = getattr(_runtime(), 'recall', None)
  if recall is not None:
    recall(choices)


def _check_rounds(rounds: int, evaluate_every: int) -> None:
  if rounds < 1:
    raise ProgramError(f'rounds must be positive, found {rounds}.')
  if evaluate_every < 1:
    raise ProgramError(
      f'evaluate_every must be positive, found {evaluate_every}.'
    )


def train(
  process: processes.PartialProcess,
  clients: examples.ClientSource,
  *,
  rounds: int,
  clients_per_round: int,
  seed: int = 0,
  oversample: float = 1.0,
  dropout_rate: float = 0.0,
  validation: Exam | None = None,
  evaluate_every: int = 50,
  select: Selection | None = None,
  stop: StoppingRule | None = None,
  output_dir: str | os.PathLike[str] | None = None,
  tensorboard: bool = True,
  show_progress: bool = False,
) -> TrainingResult:
  """Trains for some rounds, under the runtime that is current.

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
    evaluate_every: Rounds between evaluations, and between checkpoints.
    select: What makes a round the best; the lowest validation loss.
    stop: When a run counts as diverged.
    output_dir: Where records and checkpoints are written; if it holds a
      checkpoint, the run goes on from there. Nothing is written if None.
    tensorboard: Whether to write TensorBoard events, too.
    show_progress: Whether to show a progress bar.

  Raises:
    UserError: With a message for the user; what was written before is kept.
  """
  _check_rounds(rounds, evaluate_every)
  if not process.is_stateless:
    raise ProgramError(
      'The clients of this process remember something from round to round, '
      'which `train` does not store. Call `process.next` with their states.'
    )
  select, stop = select or Selection(), stop or StoppingRule()
  if validation is not None and select.metric not in _metrics_of(validation):
    raise ProgramError(
      f'There is no metric {select.metric!r} to choose the best round by. '
      f'Choose one of {_metrics_of(validation)}.'
    )
  sampler = sampling.CohortSampler(
    clients.client_ids, clients_per_round, seed, oversample, dropout_rate
  )
  run = _Run(process)
  loop = checkpoints.EventLoop()
  started = time.perf_counter()
  bar = saved = None
  try:
    if output_dir is not None:
      saved = checkpoints.Checkpoints(
        os.path.join(output_dir, CHECKPOINTS_FOLDER), loop
      )
      found = saved.latest(run.progress({}))
      if found is not None:
        _recall(run.go_on_from(found))
        logging.info('Going on from the checkpoint of round %d.', run.round)
      table = records.Records(
        output_dir, loop, last_round=run.round, tensorboard=tensorboard
      )
    bar = records.Bar(rounds, run.round, show_progress)
    durations: list[float] = []
    while run.round < rounds and run.notes['exploded'] < stop.rounds:
      begun = time.perf_counter()
      number = run.round + 1
      ids = sampler.cohort(number)
      output = process.next(
        run.state,
        [collections.OrderedDict()] * len(ids),
        clients.cohort(ids, sampler.seeds(number, ids)),
      )
      run.state, run.round = output.state, number
      metrics = records.flatten(output.metrics)
      durations.append(time.perf_counter() - begun)
      train_metrics = _measured(output.metrics['client_work']['train'])
      _count_explosions(run, train_metrics, stop, len(ids))
      is_last = number == rounds or run.notes['exploded'] >= stop.rounds
      row = _row(metrics, train_metrics, durations[-1])
      is_milestone = is_last or number % evaluate_every == 0
      if validation is not None:
        measured = (
          _validate(run, validation, seed, select) if is_milestone else {}
        )
        row.update(_validation_columns(validation, measured))
      if saved is not None:
        table.release(row, number)
        if is_milestone:
          choices = getattr(_runtime(), 'choices', {})
          saved.save(run.progress(choices))
      bar.step(_shown(run, select))
  finally:
    if bar is not None:
      bar.close()
    loop.close()
    if saved is not None:
      saved.close()
  return TrainingResult(
    state=run.state,
    weights=process.get_model_weights(run.state),
    best_weights=run.best,
    best_round=run.notes['best_round'],
    validation=run.notes['validation'],
    best_validation=run.notes['best_validation'],
    train=run.notes['train'],
    rounds=run.round,
    diverged=run.has_diverged(stop),
    seconds={
      'total': time.perf_counter() - started,
      'per_round_median': float(np.median(durations)) if durations else 0.0,
      'first_round': durations[0] if durations else 0.0,
    },
  )


@dataclasses.dataclass(frozen=True)
class Saved:
  """What the newest checkpoint of a run holds.

  Attributes:
    round: Rounds done.
    last_weights: The weights after that round, `ModelWeights`.
    best_round: The best round by the validation clients, or None.
    best_weights: Its weights, or the last ones.
  """

  round: int
  last_weights: Any
  best_round: int | None
  best_weights: Any


def load(
  process: processes.PartialProcess, output_dir: str | os.PathLike[str]
) -> Saved:
  """Reads the weights that `train` left in a folder.

  Args:
    process: The process that was trained.
    output_dir: The folder.

  Raises:
    CheckpointError: If there is no checkpoint, or it is of another process.
  """
  folder = os.path.join(output_dir, CHECKPOINTS_FOLDER)
  run = _Run(process)
  found = None
  if os.path.isdir(folder):
    loop = checkpoints.EventLoop()
    try:
      saved = checkpoints.Checkpoints(folder, loop, writable=False)
      found = saved.latest(run.progress({}))
    finally:
      loop.close()
  if found is None:
    raise checkpoints.CheckpointError(
      f'There is no checkpoint in {folder}. Train first.'
    )
  _recall(run.go_on_from(found))
  return Saved(
    run.round,
    process.get_model_weights(run.state),
    run.notes['best_round'],
    run.best,
  )


def _count_explosions(
  run: _Run, train_metrics: Mapping[str, Any], stop: StoppingRule, size: int
) -> None:
  """Notes the round's loss, and whether it is one more explosion in a row."""
  notes = run.notes
  notes['train'] = dict(train_metrics)
  if not size:
    return
  loss = train_metrics['loss']
  measured = train_metrics['num_clients'] and math.isfinite(loss)
  if notes['first_loss'] is None and measured:
    notes['first_loss'] = loss
  exploded = stop.has_exploded(train_metrics, notes['first_loss'], size)
  notes['exploded'] = notes['exploded'] + 1 if exploded else 0


def _row(
  metrics: Mapping[str, Any], train_metrics: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
  """The columns of a round: training metrics lose their prefix."""
  prefix = 'client_work/train/'
  row = {name: v for name, v in metrics.items() if not name.startswith(prefix)}
  row.update(train_metrics)
  row['seconds_round'] = seconds
  return row


def _validate(
  run: _Run, exam: Exam, seed: int, select: Selection
) -> dict[str, Any]:
  """Measures the validation clients and keeps the best weights."""
  weights = run.process.get_model_weights(run.state)
  measured = evaluate(exam, weights, seed)
  notes = run.notes
  notes['validation'] = measured
  if select.is_better(measured, notes['best_validation']):
    notes.update(best_validation=measured, best_round=run.round)
    run.best_weights = weights
  return measured


def _validation_columns(
  exam: Exam, measured: Mapping[str, Any]
) -> dict[str, Any]:
  """The validation's columns of a row, empty between evaluations."""
  return {
    f'validation_{name}': measured.get(name, '') for name in _metrics_of(exam)
  }


def _metrics_of(exam: Exam) -> list[str]:
  """The names of the pooled metrics of an exam."""
  result = exam.evaluation.evaluate.type_signature.result
  return tff.structure.name_list(result.metrics.member)


def _shown(run: _Run, select: Selection) -> dict[str, float]:
  """What the progress bar shows."""
  shown = {'loss': run.notes['train']['loss']}
  if run.notes['validation'] is not None:
    name = select.metric
    shown[f'validation_{name}'] = run.notes['validation'][name]
  return shown
