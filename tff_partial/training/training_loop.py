"""The rounds of a run: train, measure, record, save."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial import evaluation
from tff_partial import phases
from tff_partial import processes
from tff_partial.data import cohorts
from tff_partial.data import splits
from tff_partial.dp import privacy as privacy_lib
from tff_partial.dp import privacy_plans
from tff_partial.training import callbacks as callbacks_lib
from tff_partial.training import checkpoints
from tff_partial.training import client_selection
from tff_partial.training import evaluation_sets
from tff_partial.training import metrics_log
from tff_partial.training import results
from tff_partial.training import run_state
from tff_partial.training import sampling
from tff_partial.training import selection
from tff_partial.training.errors import ProgramError

# Shown on the bar during the slow first call.
_FIRST = 'tracing and compiling, once'
# Beginnings of the names of a round's metrics; the table leaves out the first.
_TRAIN, _AGGREGATOR = 'client_work/train/', 'aggregator/'
# That of a column of the validation clients.
_VALIDATION = 'validation_'
# So many times the first loss is warned of in runs too short to be stopped.
_EXPLODED = 1e6


@dataclasses.dataclass
class TrainingLoop:
  """A run with everything that its rounds need.

  Attributes:
    process: The process to train.
    privacy: Ledger of the run's cost, or None.
    clients: The clients to train with.
    sampler: Draws the cohorts.
    rounds: Number of rounds of the whole run.
    seed: The run's seed.
    validation: Clients that are measured every `evaluate_every` rounds, or
      None.
    evaluate_every: Rounds between evaluations.
    checkpoint_every: Rounds between checkpoints.
    select: Criterion of the best round.
    stop: Rule by which a run counts as diverged.
    callbacks: Called after each round.
    diagnostics: True if a private run also records exact values.
    select_clients: Selects among the clients of a draw; None to take all.
    saved: The checkpoints; None if nothing is written.
    table: The table of rows; None if nothing is written.
    bar: The progress bar.
    durations: Seconds of each round of this call.
    has_validated: True if this call has measured the validation clients.
    has_warned: True if this call has warned of clients without query examples.
    history: The rounds so far, including those before this call.
  """

  process: processes.PartialProcess
  privacy: privacy_plans.PrivacyLedger | None
  clients: cohorts.ClientSource
  sampler: sampling.CohortSampler
  rounds: int
  seed: int
  validation: evaluation_sets.EvaluationSet | None
  evaluate_every: int
  checkpoint_every: int
  select: selection.Selection
  stop: selection.StoppingRule
  callbacks: Sequence[callbacks_lib.Callback]
  diagnostics: bool
  select_clients: client_selection.SelectClients | None = None
  saved: checkpoints.Checkpoints | None = None
  table: metrics_log.Records | None = None
  bar: metrics_log.Bar = dataclasses.field(
    default_factory=lambda: metrics_log.Bar(0, 0, shown=False)
  )
  durations: list[float] = dataclasses.field(default_factory=list)
  has_validated: bool = False
  has_warned: bool = False
  history: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  @functools.cached_property
  def run(self) -> run_state.Run:
    """State that changes from round to round."""
    return run_state.Run(self.process, self.privacy)

  @property
  def is_over(self) -> bool:
    """True if no round is left to do."""
    return self.run.is_over(self.rounds, self.stop)

  def next(self) -> None:
    """Run a round, measure and record it, and save if that is due."""
    run = self.run
    row = self._train()
    is_due = self.is_over or run.round % self.evaluate_every == 0
    row.update(self._validation(is_due))
    if self.table is not None:
      self.table.release(row, run.round)
    if self.callbacks:
      self._call(row)
      if run.notes.ended_by and not is_due and self.validation is not None:
        columns = self._validation(True)
        row.update(columns)
        if self.table is not None:
          self.table.complete(columns)
    self.history.append(metrics_log.entry(run.round, row))
    saves = self.is_over or run.round % self.checkpoint_every == 0
    if run.store is not None:
      saves |= run.store.is_full or run.notes.best_round == run.round
    if saves:
      run.save(self.saved, self.table)
    self.bar.step(self._shown(row))

  def _train(self) -> dict[str, Any]:
    """Train with the round's cohort; return the round's columns."""
    run, privacy = self.run, self.privacy
    if not self.durations:
      self.bar.say(_FIRST)
    begun = time.perf_counter()
    number = run.round + 1
    asked = self._asked(number)
    cohort = self.clients.cohort(asked, self.sampler.seeds(number, asked))
    nested = run.next(cohort)
    metrics = metrics_log.flatten(nested)
    seconds = time.perf_counter() - begun
    self.durations.append(seconds)
    train = evaluation_sets.pooled(nested['client_work']['train'])
    size = evaluation.num_measured(train)
    if size < len(cohort):
      train['num_without_query'] = len(cohort) - size
      self._note_without_query(number, len(cohort), size)
    run.note_training(train, len(cohort) if size else 0, self.stop)
    row = {n: v for n, v in metrics.items() if not n.startswith(_TRAIN)}
    if privacy is None:
      return {**row, **train, 'seconds_round': seconds}
    exact = {f'{n}{privacy_lib.NOT_PRIVATE}': v for n, v in train.items()}
    row = {**row, **exact, 'seconds_round': seconds}
    if not self.diagnostics:
      row = {
        name: value
        for name, value in row.items()
        if not name.endswith(privacy_lib.NOT_PRIVATE)
      }
    row.update(privacy.columns(number))
    run.notes.measured = {
      name.removeprefix(_AGGREGATOR): float(value)
      for name, value in row.items()
      if name.startswith(_AGGREGATOR)
    }
    return row

  def _asked(self, number: int) -> list[str]:
    """Return the clients of a round."""
    sampler = self.sampler
    if self.select_clients is None:
      return sampler.cohort(number)
    drawn = sampler.drawn(number)
    if not drawn:
      return drawn
    process, state = self.run.process, self.run.state
    return client_selection.selected(
      self.select_clients,
      client_selection.Draw(
        number,
        drawn,
        sampler.clients_per_round,
        sampler.generator('selection', number),
        list(self.history),
        lambda measuring: self._measured(
          measuring,
          drawn,
          process.get_model_weights(state),
          process.get_server_state(state),
        ),
      ),
    )

  def _measured(
    self,
    measuring: evaluation.Evaluation,
    client_ids: Sequence[str],
    weights: Any,
    server_state: Any,
  ) -> evaluation.ByClient:
    """Measure weights, and what some of the clients remember."""
    some = cohorts.SomeClients(self.clients, tuple(client_ids))
    store = None if measuring.is_stateless else self.run.store
    measured = evaluation_sets.EvaluationSet(measuring, some, store is not None)
    found: list[evaluation.ByClient] = []
    evaluation_sets.measure(
      measured,
      weights,
      seed=self.seed,
      client_store=store,
      on_clients=found.append,
      server_state=server_state,
    )
    return found[0]

  def _note_without_query(self, number: int, asked: int, measured: int) -> None:
    """Warn once of clients without query examples; refuse if all lack them."""
    if not measured:
      _check_query_examples(self.run.process, self.clients)
    if self.has_warned or (self.privacy and not self.diagnostics):
      return
    self.has_warned = True
    logging.warning(
      'Round %d: %d of %d clients have no query examples of a weight above 0, '
      'by which clients train what they share and are measured. They count for '
      'nothing. Leave them out, or choose another split.',
      number,
      asked - measured,
      asked,
    )

  def _validation(self, is_due: bool) -> dict[str, Any]:
    """Return the validation's columns, which are empty if it is not due."""
    if self.validation is None:
      return {}
    if not is_due:
      return self.empty_validation
    if not self.has_validated:
      self.bar.say(f'validation: {_FIRST}')
    self.has_validated = True
    measured = self.run.validate(
      self.validation,
      self.seed,
      self.select,
      self._histograms,
      is_extra=self.run.round % self.evaluate_every != 0,
    )
    return {
      column: measured[column.removeprefix(_VALIDATION)]
      for column in self.empty_validation
    }

  @property
  def empty_validation(self) -> dict[str, str]:
    """The validation's columns of a round that is not validated."""
    metrics = [] if self.validation is None else self.validation.metrics
    return dict.fromkeys((f'{_VALIDATION}{name}' for name in metrics), '')

  def _histograms(self, values: evaluation.ByClient) -> None:
    """Record how metrics differ between clients; on request if private.

    The measured clients may be those that train.
    """
    if self.table is not None and (not self.privacy or self.diagnostics):
      self.table.histograms('validation', values, self.run.round)

  def _call(self, row: Mapping[str, Any]) -> None:
    """Call the callbacks after a round, and note if one ended the run."""
    run = self.run
    get_weights, state = run.process.get_model_weights, run.state
    run.notes.ended_by = callbacks_lib.call(
      self.callbacks,
      callbacks_lib.RoundResult(
        run.round,
        {name: value for name, value in row.items() if value != ''},
        dict(run.notes.validations),
        lambda: get_weights(state),
        run.notes.before_last is not None,
      ),
    )

  def _shown(self, row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for the progress bar, epsilon if private."""
    shown = {
      name: row[column]
      for name, column in (('loss', 'loss'), ('epsilon', 'privacy/epsilon'))
      if column in row
    }
    if self.run.notes.validation is not None:
      name = self.select.metric
      shown[f'validation_{name}'] = self.run.notes.validation[name]
    return shown

  def close(self) -> None:
    """Close the progress bar and the checkpoints."""
    self.bar.close()
    if self.saved is not None:
      self.saved.close()

  def result(self, seconds: float) -> results.TrainingResult:
    """Return the result of the run."""
    run, notes, privacy = self.run, self.run.notes, self.privacy
    times = self.durations
    vocabularies = getattr(self.clients, 'vocabularies', {})
    train = notes.train if privacy is None or self.diagnostics else {}
    has_diverged = run.has_diverged(self.stop)
    if has_diverged:
      logging.warning(
        '%s', selection.describe_divergence(run.round, self.rounds, train)
      )
    losses = [row['loss'] for row in self.history if 'loss' in row] or [0.0]
    if not has_diverged and losses[-1] > _EXPLODED * max(losses[0], 1.0):
      logging.warning(
        'The loss of the last round was %.4g, and that of the first one %.4g. '
        'Its weights may have exploded: try a smaller learning rate.',
        *(losses[-1], losses[0]),
      )
    return results.TrainingResult(
      state=run.state,
      weights=run.weights,
      best_weights=run.best,
      best_round=notes.best_round,
      validation=notes.validation,
      best_validation=notes.best_validation,
      train=train,
      rounds=run.round,
      diverged=has_diverged,
      ended_by=notes.ended_by,
      seconds={
        'total': seconds,
        'per_round_median': float(np.median(times)) if times else np.nan,
        'first_round': times[0] if times else np.nan,
      },
      client_store=run.store,
      best_client_store=run.best_store,
      best_server_state=run.best_held,
      privacy=(
        None
        if privacy is None
        else privacy.report(
          run.round,
          [f'vocabulary of {column}' for column in vocabularies]
          + [
            layer.learned for layer in run.process.example_spec.lifted.values()
          ],
          **notes.measured,
        )
      ),
      history=self.history,
      process=run.process,
      vocabularies=vocabularies,
      columns=run.notes.columns,
    )


def _check_query_examples(
  process: processes.PartialProcess, clients: cohorts.ClientSource
) -> None:
  """Refuse to train if no client has an example in a measured phase.

  Clients are read one after another up to the first that has one.
  """
  if process.work is None:
    return
  parts = [
    phase.on for phase in phases.all_phases(process.work.work) if phase.measured
  ]
  known: dict[Any, bool] = {}
  seeds = np.zeros([1, 2], np.int32)
  for client_id in clients.client_ids:
    (client,) = clients.cohort([client_id], seeds)
    examples, count = client['examples'], int(client['count'])
    # Clients whose fields are alike are split alike.
    fields = [
      np.asarray(examples[name]) for name in splits.example_fields(*parts)
    ]
    key = (len(examples['weight']), count, *(f.tobytes() for f in fields))
    if key not in known:
      tensors = tf.nest.map_structure(tf.constant, dict(examples))
      known[key] = any(
        part.choose(tensors, tf.constant(count), tf.constant(seeds[0])).count
        > 0
        for part in parts
      )
    if known[key]:
      return
  names = ', '.join(sorted({part.name for part in parts}))
  raise ProgramError(
    f'None of the {len(clients.client_ids):,} clients has query examples, '
    f'those of {names}, by which clients train what they share and are '
    'measured: nothing would be trained. Give clients more examples, or '
    'choose another split, such as `split=tff_partial.splits.same()`.'
  )
