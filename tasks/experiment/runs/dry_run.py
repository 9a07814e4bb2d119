"""A preview of what a run would do and cost: `tasks.train --dry_run`."""

from collections.abc import Iterator
import math
import pathlib
import time
from typing import Any

from tasks import task as tasks_lib
from tasks.experiment.config import Config
from tasks.experiment.options.loop import Output
from tasks.experiment.runs import releasing
from tasks.experiment.runs import running
from tasks.experiment.runs.folder import Folder
from tasks.experiment.trainable import Trainable
from tff_partial import phases
from tff_partial import tiers
from tff_partial.analysis.communication import communication
from tff_partial.analysis.communication import uploads
from tff_partial.training import callbacks
from tff_partial.training import evaluation_sets
from tff_partial.training import sampling

# Rounds to time after the first, which is traced and compiled.
_TIMED = 3


def describe(config: Config, output: Output) -> Iterator[str]:
  """Describe what a run would do, and yield each line once it is known.

  Data are loaded, and some rounds are trained in memory to time them. What the
  task would release with noise is not drawn.

  Raises:
    UserError: If the run itself would refuse to start.
  """
  begun = time.perf_counter()
  folder = None
  if output.output_dir is not None:
    folder = Folder(output.output_dir)
    folder.check(
      {**config.flags(), **output.flags()},
      config.may_change() | output.may_change(),
    )
    where = pathlib.Path(output.output_dir)
    yield _line('folder', f'{where}, {output.state}')
  task = running.load(config, releasing.at_start(config, folder, is_plan=True))
  with running.executing(config.runtime):
    prepared = running.prepare(config, output, (), task)
    trainable, clients = prepared.trainable, prepared.clients
    yield _line('task', _clients(task, prepared))
    yield _line('method', f'{config.algorithm}, {_method(trainable)}')
    for phase in _phases(trainable):
      yield _line('phase', phase)
    yield _line('weights', _weights(trainable))
    joined, rounds = trainable.clients_per_round, config.loop.rounds
    yield _line(
      'rounds',
      f'{rounds} of {joined} clients, validation every '
      f'{config.loop.evaluate_every}',
    )
    counted = communication(
      trainable.process, clients if trainable.ledger is None else ()
    )
    asked = sampling.num_asked(joined, config.loop.oversample)
    yield _line('bytes', _bytes(counted, asked * rounds, joined * rounds))
    yield _line('privacy', _privacy(trainable, rounds))
    if trainable.ledger is not None:
      sizes = {n: s for n, (s, _) in uploads(trainable.process).items()}
      norm = trainable.ledger.plan.noise_norm(sizes)
      warning = norm.warning and f'. WARNING: {norm.warning}'
      yield _line('noise', f'{norm}{warning}')
    if releasing.is_due(config, folder):
      yield _line(
        'release',
        'drawn when the run begins, once, and kept in its folder; until then '
        'weights, bytes and seconds are those of the largest there can be',
      )
    before = time.perf_counter() - begun
    after = _seconds(config, prepared)
    yield _line(
      'seconds',
      f'about {_time(before + after)}, {_time(before)} of them before the '
      f'first round; estimated from {min(1 + _TIMED, rounds)} rounds and an '
      'evaluation on this machine',
    )


def _line(title: str, text: str) -> str:
  return f'{title + ":":<9}{text}'


def _clients(task: tasks_lib.Task, prepared: running.Prepared) -> str:
  """Describe how many clients train, validate and test."""
  tested = ', '.join(
    f'{len(test.clients.client_ids)} to test ({name})'
    for name, test in prepared.tests.items()
  )
  return (
    f'{task.name}: {len(prepared.clients.client_ids)} clients to train, '
    f'{len(prepared.validation.clients.client_ids)} to validate, {tested}'
  )


def _method(trainable: Trainable) -> str:
  """Describe what clients send and keep between rounds."""
  process = trainable.process
  sent = [*process.sent_beside]
  if process.sent:
    sent.insert(0, f'updates of {", ".join(process.sent)}')
  kept = 'nothing'
  if not process.is_stateless:
    # A whole structure of names and types would fill the screen.
    kept = 'what is their own'
  return f'clients send {"; ".join(sent) or "nothing"}; they remember {kept}'


def _phases(trainable: Trainable) -> Iterator[str]:
  """Yield the phases of a client's round, in order."""
  work = trainable.process.work
  for phase in phases.all_phases(work.work) if work is not None else ():
    does = f'train {" and ".join(phase.train)}' if phase.train else 'measure'
    size = 'all examples' if phase.batch_size is None else phase.batch_size
    epochs = phase.epochs if isinstance(phase.epochs, int) else 'varying'
    most = '' if phase.max_steps is None else f', at most {phase.max_steps}'
    yield (f'{does} on {phase.on.name}, epochs {epochs}, steps of {size}{most}')


def _weights(trainable: Trainable) -> str:
  """Describe how many parameters each tier has."""
  model = trainable.process.model
  parts = []
  for tier in model.tiers:
    shapes = [spec.shape for spec in model.specs_at_server(tier).values()]
    if all(shape.is_fully_defined() for shape in shapes):
      number = sum(math.prod(shape) for shape in shapes)
      parts.append(f'{number:,} {tier}')
    else:
      parts.append(f'{tier} as large as the client needs')
    if tier == tiers.LOCAL:
      parts[-1] += ' (at each client)'
  return ', '.join(parts)


def _bytes(counted: dict[str, Any], loads: int, sends: int) -> str:
  """Describe the bytes sent, per client and round and in total.

  Args:
    counted: The traffic of a client in a round.
    loads: How often a client is asked, in all rounds together.
    sends: How often one is joined.
  """
  down, up = counted['download_bytes'], counted['upload_bytes']
  by_rows = counted.get('upload_bytes_by_rows')
  text = f'{down:,} down and {up:,} up for a client in a round'
  if by_rows is not None:
    text += f' ({by_rows:,.0f} up by rows)'
    up = by_rows
  text += f'; {_size(down * loads)} down and {_size(up * sends)} up in all'
  others = counted.get('upload_not_counted')
  if others:
    text += f'; not counted: {", ".join(others)}'
  return text


def _size(number: float) -> str:
  for unit in ('B', 'kB', 'MB', 'GB', 'TB'):
    if number < 1000 or unit == 'TB':
      break
    number /= 1000
  return f'{number:.3g} {unit}'


def _privacy(trainable: Trainable, rounds: int) -> str:
  ledger = trainable.ledger
  if ledger is None:
    return 'none; the run is not private'
  plan = ledger.plan
  simulated = ', A SIMULATION' if ledger.simulation else ''
  return (
    f'epsilon {ledger.epsilon(rounds):.4g} at delta {plan.delta:.3g} after '
    f'{rounds} rounds, noise multiplier {plan.noise_multiplier:.4g}, '
    f'{plan.sampling.name} sampling{simulated}'
  )


def _time(seconds: float) -> str:
  if seconds < 120:
    return f'{seconds:.0f} s'
  if seconds < 7200:
    return f'{seconds / 60:.0f} min'
  return f'{seconds / 3600:.1f} h'


def _seconds(config: Config, prepared: running.Prepared) -> float:
  """Time some rounds and an evaluation, and estimate the whole run's time."""
  rounds = config.loop.rounds
  timed = min(1 + _TIMED, rounds)

  def has_enough(result: callbacks.RoundResult) -> bool:
    return result.round >= timed

  validation = prepared.validation
  trained = prepared._replace(validation=None, callbacks=[has_enough]).train(
    config, Output()
  )
  first, each = (
    trained.seconds[name] for name in ('first_round', 'per_round_median')
  )
  durations = []
  for _ in range(2):  # The first includes tracing and compiling.
    begun = time.perf_counter()
    evaluation_sets.evaluate(
      validation,
      trained.weights,
      seed=config.seed,
      client_store=trained.client_store if validation.remembering else None,
      server_state=trained.server_state,
    )
    durations.append(time.perf_counter() - begun)
  evaluations = -(-rounds // config.loop.evaluate_every)
  # Each test may run twice: after the last round, and for the best one.
  per_client = durations[1] / max(len(validation.clients.client_ids), 1)
  measured = sum(
    len(test.clients.client_ids) for test in prepared.tests.values()
  )
  return (
    first
    + (rounds - 1) * each
    + durations[0]
    + (evaluations - 1) * durations[1]
    + 2 * per_client * measured
  )
