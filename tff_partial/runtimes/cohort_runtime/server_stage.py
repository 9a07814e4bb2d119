"""Server's part of a round: reports, steps and zeros of one stage."""

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import TypeAlias

import tensorflow as tf

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import typed_values

Key: TypeAlias = flat_program.Key
Values: TypeAlias = flat_program.Values


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
    """Report the loop before, run steps, then make zeros for the loop after."""
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
      values[step.key] = program.evaluate(step.block, values)
    results = [
      [values[key] for key in self._outputs],
      [program.aggregation(step, values).zero() for step in self._zeros],
    ]
    return [tf.identity(leaf) for leaf in typed_values.leaves(results)]
