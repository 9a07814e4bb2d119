"""Parts of a program as it runs: server stages, and loops between them."""

from collections.abc import Iterable

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import server_stage
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import typed_values

Key = flat_program.Key
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
    program, stage_of = self._program, self._program.stage_of
    return client_loop.ClientLoop(
      program,
      self._aggregates(stage),
      sorted((key for key in outputs if stage_of(key) == stage), key=str),
      # Results of unknown shape are not stacked, hence computed again.
      frozenset(
        key
        for key in outputs
        if stage_of(key) < stage
        and typed_values.num_bytes(program.type_of(key)) is not None
      ),
    )

  def _stage(
    self, stage: int, results: Iterable[Key]
  ) -> server_stage.ServerStage:
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
    return server_stage.ServerStage(
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
