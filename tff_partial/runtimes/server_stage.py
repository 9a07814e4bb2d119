"""The server's part of a round: reports, steps and zeros of one wave."""

from collections.abc import Mapping, Sequence
import functools

import tensorflow as tf

from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key
Values = Mapping[Key, typed_values.Nested]


class ServerStage:
  """Aggregates' reports and the server's steps of one wave, as one graph."""

  def __init__(self, program: straight_line.Program,
               reports: Sequence[straight_line.Step],
               steps: Sequence[straight_line.Step],
               zeros_of: Sequence[straight_line.Step],
               outputs: Sequence[Key]):
    self.program = program
    self._reports, self._steps, self._zeros_of = reports, steps, zeros_of
    self.outputs = list(outputs)
    computed = {step.key for step in [*reports, *steps]}
    read = set().union(*[s.reads for s in [*reports, *steps, *zeros_of]])
    self.inputs = sorted(
        (key for key in read - computed if not program.is_at_clients(key)),
        key=str)
    self._accumulators = {
        step.key: program.aggregation(step, {}).accumulator
        for step in [*reports, *zeros_of]}

  @property
  def is_empty(self) -> bool:
    return not (self.outputs or self._zeros_of)

  @functools.cached_property
  def _function(self):
    specs = [
        spec for key in self.inputs
        for spec in typed_values.tensor_specs(self.program.type_of(key))]
    for step in self._reports:
      specs.extend(typed_values.leaves(self._accumulators[step.key]))
    return typed_values.function(self._run, specs)

  def _run(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    flat = iter(flat)
    program = self.program
    values = {
        key: typed_values.like(
            typed_values.pattern(program.type_of(key)), flat)
        for key in self.inputs}
    for step in self._reports:
      total = typed_values.like(self._accumulators[step.key], flat)
      values[step.key] = program.aggregation(step, values).report(total)
    for step in self._steps:
      values[step.key] = program.run(step, values)
    results = [leaf for key in self.outputs
               for leaf in typed_values.leaves(values[key])]
    for step in self._zeros_of:
      results.extend(typed_values.leaves(
          program.aggregation(step, values).zero()))
    return [tf.identity(tf.convert_to_tensor(leaf)) for leaf in results]

  def __call__(self, values: Values, totals: Mapping[Key, list[tf.Tensor]]) -> (
      tuple[dict[Key, typed_values.Nested], dict[Key, list[tf.Tensor]]]):
    """New server values, and the zeros of the loop that follows."""
    if self.is_empty:
      return {}, {}
    flat = [leaf for key in self.inputs
            for leaf in typed_values.leaves(values[key])]
    for step in self._reports:
      flat.extend(totals[step.key])
    results = iter(self._function(*[tf.convert_to_tensor(leaf) for leaf in flat]))
    computed = {
        key: typed_values.like(
            typed_values.pattern(self.program.type_of(key)), results)
        for key in self.outputs}
    zeros = {
        step.key: [next(results) for _ in typed_values.leaves(
            self._accumulators[step.key])]
        for step in self._zeros_of}
    return computed, zeros
