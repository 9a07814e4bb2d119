"""Parts of a program as it runs: server stages, and loops between them."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import TypeAlias

import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import typed_values

Key: TypeAlias = flat_program.Key
Values: TypeAlias = flat_program.Values
Kind = flat_program.Kind

# A client value of at most this many bytes is kept for a later loop rather
# than computed again.
_FEW_BYTES = 1 << 14


class Plan:
  """Program in parts: stage 0, loop 0, stage 1, loop 1, ..., the last stage.

  Attributes:
    stages: The stages of the server before, between and after the loops.
    loops: The loops over clients.
    client_results: The client values that the program returns.
  """

  def __init__(self, program: flat_program.Program):
    """Sort the program's steps.

    Raises:
      UnsupportedComputationError: If a value would have to be kept for a later
        loop, but cannot be.
    """
    self._program = program
    results = program.keys_read(program.result)
    self._steps = _needed(program, results)
    self.client_results = sorted(
      (key for key in results if program.is_at_clients(key)), key=str
    )
    outputs = {*self.client_results, *self._kept()}
    stages = [program.stage_of(key) for key in outputs]
    stages += [
      step.stage for step in self._steps if step.kind is Kind.AGGREGATE
    ]
    self.loops = [
      self._loop(stage, outputs) for stage in range(max(stages, default=-1) + 1)
    ]
    self.stages = [
      self._stage(stage, results) for stage in range(len(self.loops) + 1)
    ]

  def _aggregates(self, stage: int) -> list[flat_program.Step]:
    return [
      step
      for step in self._steps
      if step.kind is Kind.AGGREGATE and step.stage == stage
    ]

  def _kept(self) -> set[Key]:
    """Return client values that a later loop reads instead of recomputing.

    A random client value must not change within a round, so it must be kept.
    Small values may be. The rest, such as updates, is computed again: keeping
    it would take memory for all clients at once.
    """
    program = self._program
    drawn: set[Key] = set()
    for step in self._steps:
      if step.kind is Kind.CLIENT and (step.is_random or step.reads & drawn):
        drawn.add(step.key)
    kept = set()
    for step in self._steps:
      for key in step.reads:
        known = program.steps.get(key)
        if known is None or step.kind is Kind.SERVER:
          continue
        if known.kind is not Kind.CLIENT or known.stage == step.stage:
          continue
        size = typed_values.num_bytes(known.type_spec)
        if size is None and key in drawn:
          raise errors.UnsupportedComputationError(
            f'a random client value of unknown shape ({known.type_spec}) that '
            'is read after another aggregate',
            'it can neither be kept nor drawn again',
          )
        if key in drawn or (size is not None and size <= _FEW_BYTES):
          kept.add(key)
    return kept

  def _loop(self, stage: int, outputs: set[Key]) -> client_loop.ClientLoop:
    stage_of = self._program.stage_of
    return client_loop.ClientLoop(
      self._program,
      self._aggregates(stage),
      sorted((key for key in outputs if stage_of(key) == stage), key=str),
      frozenset(key for key in outputs if stage_of(key) < stage),
    )

  def _stage(self, stage: int, results: Iterable[Key]) -> 'ServerStage':
    """Build the stage of the server before loop number `stage`."""
    steps = [
      step
      for step in self._steps
      if step.kind is Kind.SERVER and step.stage == stage
    ]
    reports = self._aggregates(stage - 1)
    read_later = set(results)
    for step in self._steps:
      if step.kind is not Kind.CLIENT and step.stage >= stage:
        read_later |= step.reads
    for loop in self.loops[stage:]:
      read_later.update(loop.shared)
    computed = {step.key for step in [*steps, *reports]}
    return ServerStage(
      self._program,
      reports,
      steps,
      self._aggregates(stage),
      computed & read_later,
    )


def _needed(
  program: flat_program.Program, results: Iterable[Key]
) -> list[flat_program.Step]:
  """Return the steps that the result depends on, in order."""
  needed, waiting = set(), list(results)
  while waiting:
    key = waiting.pop()
    if key in program.steps and key not in needed:
      needed.add(key)
      waiting.extend(program.steps[key].reads)
  return [step for step in program.steps.values() if step.key in needed]


class ServerStage:
  """Computation of the server between two loops, as one graph."""

  def __init__(
    self,
    program: flat_program.Program,
    reports: Iterable[flat_program.Step],
    steps: Iterable[flat_program.Step],
    zeros: Iterable[flat_program.Step],
    outputs: Iterable[Key],
  ):
    """Determine what the stage needs.

    Args:
      program: The program.
      reports: The aggregates of the loop before.
      steps: The steps to run.
      zeros: The aggregates of the loop after.
      outputs: The values to return.
    """
    self._program = program
    self._reports, self._steps = list(reports), list(steps)
    self._zeros, self._outputs = list(zeros), sorted(outputs, key=str)
    computed = {step.key for step in [*self._reports, *self._steps]}
    used = [*self._reports, *self._steps, *self._zeros]
    read = {key for step in used for key in step.reads} - computed
    self._inputs = sorted(
      (key for key in read if not program.is_at_clients(key)), key=str
    )
    self._totals = [program.accumulator(step) for step in self._reports]

  def __call__(
    self, values: Values, totals: Sequence[tf.Tensor]
  ) -> tuple[dict[Key, typed_values.Nested], list[tf.Tensor]]:
    """Run the stage.

    Args:
      values: All values at the server so far.
      totals: The accumulators of the loop before.

    Returns:
      New values, and the first accumulators of the loop after.
    """
    if not self._outputs and not self._zeros:
      return {}, []
    flat = typed_values.leaves([values[key] for key in self._inputs])
    results = iter(self._function(*flat, *totals))
    computed = {
      key: typed_values.like(self._program.pattern(key), results)
      for key in self._outputs
    }
    return computed, list(results)

  @functools.cached_property
  def _function(self) -> Callable[..., list[tf.Tensor]]:
    specs = [
      typed_values.tensor_specs(self._program.type_of(key))
      for key in self._inputs
    ]
    inputs = typed_values.leaves([specs, self._totals])
    return graphs.quick(graphs.trace(self._run, inputs), inputs)

  def _run(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    program, left = self._program, iter(flat)
    values = {
      key: typed_values.like(program.pattern(key), left) for key in self._inputs
    }
    totals = typed_values.like(self._totals, left)
    for step, total in zip(self._reports, totals, strict=True):
      values[step.key] = program.aggregation(step, values).report(total)
    for step in self._steps:
      values[step.key] = program.run(step, values)
    results = [
      [values[key] for key in self._outputs],
      [program.aggregation(step, values).zero() for step in self._zeros],
    ]
    return [tf.identity(leaf) for leaf in typed_values.leaves(results)]
