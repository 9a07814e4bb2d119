"""The clients' part of a round: what a loop over clients computes.

A loop runs clients one after the other and adds what each sends to
accumulators. This module says which steps that takes, and what goes in and
out; `compiled_loop` makes a program of it.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import tensorflow as tf

from tff_partial.runtimes import feeding
from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key
Values = Mapping[Key, typed_values.Nested]


class ClientLoop:
  """Runs the clients of a shard, one after the other.

  Attributes:
    aggregates: The aggregates that this loop accumulates.
    outputs: Values of each client that outlive the loop.
    shared: What the server hands to every client.
    kept: Values of each client that an earlier loop kept for this one.
  """

  def __init__(self, program: straight_line.Program,
               aggregates: Sequence[straight_line.Step],
               outputs: Sequence[Key], kept: frozenset[Key]):
    self.program = program
    self.aggregates, self.outputs = list(aggregates), list(outputs)
    self.arguments = [a for a in program.arguments.values() if a.at_clients]
    members, reads = set(), set()
    waiting = [*self.outputs, *[k for s in aggregates for k in s.reads]]
    while waiting:
      key = waiting.pop()
      if key in reads:
        continue
      reads.add(key)
      if program.is_at_clients(key) and key in program.steps and (
          key not in kept):
        members.add(key)
        waiting.extend(program.steps[key].reads)
    self.steps = [s for s in program.steps.values() if s.key in members]
    self._all_steps = [*self.steps, *self.aggregates]
    self.kept = sorted(reads & kept, key=str)
    self.shared = sorted(
        (key for key in reads if not program.is_at_clients(key)), key=str)
    self._accumulators = {
        step.key: program.aggregation(step, {}).accumulator
        for step in self.aggregates}
    self.output_specs = [
        spec for key in self.outputs
        for spec in typed_values.tensor_specs(program.type_of(key))]

  @functools.cached_property
  def owns_resources(self) -> bool:
    """Whether clients have variables, which two threads must not share."""
    return any(leaf.owns_resources for step in self._all_steps
               for leaf in self.program.leaves_of(step))

  @functools.cached_property
  def is_random(self) -> bool:
    """Whether clients draw randomness of their own."""
    return any(step.is_random for step in self._all_steps)

  @property
  def is_empty(self) -> bool:
    return not (self.aggregates or self.outputs)

  def pattern(self, key: Key) -> typed_values.Nested:
    """How a value is nested."""
    return typed_values.pattern(self.program.type_of(key))

  def accumulator(self, step: straight_line.Step) -> typed_values.Nested:
    """How an aggregate's accumulator is nested."""
    return self._accumulators[step.key]

  @functools.cached_property
  def accumulator_specs(self) -> list[tf.TensorSpec]:
    """The leaves of all accumulators."""
    return [spec for step in self.aggregates
            for spec in typed_values.leaves(self._accumulators[step.key])]

  def client_inputs(self, feeds: Sequence[feeding.Feed],
                    kept: Mapping[Key, Sequence[tf.Tensor]],
                    index: tf.Tensor) -> dict[Key, Any]:
    """A client's share of the arguments, and of what was kept for it."""
    # Under XLA, a strided slice at a computed place copies the whole array;
    # `tf.gather` does not.
    values = {}
    for argument, feed in zip(self.arguments, feeds):
      row = tf.gather(feed.rows, index)
      flat = [tf.gather(tensor, row if is_resident else index)
              for tensor, is_resident in zip(feed.tensors, feed.resident)]
      values[argument.key] = typed_values.like(
          self.pattern(argument.key), iter(flat))
    for key, stacked in kept.items():
      values[key] = typed_values.like(
          self.pattern(key), iter([tf.gather(leaf, index) for leaf in stacked]))
    return values

  def returned(self, values: Values) -> list[tf.Tensor]:
    """The leaves of what one client returns."""
    return [leaf for key in self.outputs
            for leaf in typed_values.leaves(values[key])]

  def merge(self, one: Mapping[Key, list[tf.Tensor]],
            other: Mapping[Key, list[tf.Tensor]]) -> dict[
                Key, list[tf.Tensor]]:
    """Two shards' accumulators, merged as the aggregates ask for."""
    flat = [leaf for totals in (one, other) for step in self.aggregates
            for leaf in totals[step.key]]
    results = iter(self._merge(*flat))
    return {step.key: [next(results) for _ in typed_values.leaves(
        self.accumulator(step))] for step in self.aggregates}

  @functools.cached_property
  def _merge(self):
    specs = self.accumulator_specs

    def merge(*flat):
      flat = iter(flat)
      sides = [
          {step.key: typed_values.like(self.accumulator(step), flat)
           for step in self.aggregates} for _ in range(2)]
      return [
          tf.identity(leaf) for step in self.aggregates
          for leaf in typed_values.leaves(
              self.program.aggregation(step, {}).merge(
                  sides[0][step.key], sides[1][step.key]))]

    return typed_values.function(merge, [*specs, *specs])
