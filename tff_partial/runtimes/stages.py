"""The compiled parts of a round: server stages, and loops over a cohort.

A `ServerStage` runs the server's steps of one wave. A `ClientLoop` runs every
client of a shard, one after the other, and adds what it sends to accumulators;
a client's values are gone when the next client starts, but for those that the
computation returns.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import feeding
from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key
Kind = straight_line.Kind
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
    results = iter(self._function(*[_tensor(leaf) for leaf in flat]))
    computed = {
        key: typed_values.like(
            typed_values.pattern(self.program.type_of(key)), results)
        for key in self.outputs}
    zeros = {
        step.key: [next(results) for _ in typed_values.leaves(
            self._accumulators[step.key])]
        for step in self._zeros_of}
    return computed, zeros


def _tensor(leaf: Any) -> tf.Tensor:
  return leaf if isinstance(leaf, tf.Tensor) else tf.convert_to_tensor(leaf)


@dataclasses.dataclass(frozen=True)
class Signature:
  """What a loop is compiled for.

  Attributes:
    feeds: For each argument, its leaves' dtypes and shapes, and which leaves
      are resident.
    bucket: The leading dimension of whatever is fed by client.
  """
  feeds: tuple[Any, ...]
  bucket: int

  @classmethod
  def of(cls, feeds: Sequence[feeding.Feed], bucket: int) -> 'Signature':
    return cls(
        tuple((tuple((_dtype(t), tuple(t.shape)) for t in feed.tensors),
               feed.resident) for feed in feeds), bucket)

  def __str__(self) -> str:
    """The shapes of one client, without the sizes of cohort and population."""
    return ';'.join(
        ','.join(f'{dtype.name}{list(shape[1:])}' for dtype, shape in tensors)
        for tensors, _ in self.feeds)


def _dtype(tensor: Any) -> tf.DType:
  return tf.string if tensor.dtype == object else tf.as_dtype(tensor.dtype)


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
    self.kept = sorted(reads & kept, key=str)
    self.shared = sorted(
        (key for key in reads if not program.is_at_clients(key)), key=str)
    self._accumulators = {
        step.key: program.aggregation(step, {}).accumulator
        for step in self.aggregates}
    self._functions: dict[tuple[Signature, bool], Any] = {}

  @property
  def is_empty(self) -> bool:
    return not (self.aggregates or self.outputs)

  def pattern(self, key: Key) -> typed_values.Nested:
    """How a value is nested."""
    return typed_values.pattern(self.program.type_of(key))

  def accumulator(self, step: straight_line.Step) -> typed_values.Nested:
    """How an aggregate's accumulator is nested."""
    return self._accumulators[step.key]

  @property
  def num_compiled(self) -> int:
    """How many programs were compiled so far."""
    return len(self._functions)

  # ------------------------------------------------------------- one client
  def client_arguments(self, feeds, index: tf.Tensor) -> dict[Key, Any]:
    """One client's share of the arguments; `tf.gather`, since under XLA a
    strided slice at a computed place would copy the whole array."""
    values = {}
    for argument, feed in zip(self.arguments, feeds):
      row = tf.gather(feed.rows, index)
      flat = [tf.gather(tensor, row if is_resident else index)
              for tensor, is_resident in zip(feed.tensors, feed.resident)]
      values[argument.key] = typed_values.like(
          typed_values.pattern(argument.type_spec), iter(flat))
    return values

  def client_values(self, values: dict[Key, Any]) -> dict[Key, Any]:
    """Runs the steps of one client, given its arguments and what is shared."""
    for step in self.steps:
      values[step.key] = self.program.run(step, values)
    return values

  # ------------------------------------------------------------- the loop
  def _run(self, signature: Signature, *flat: tf.Tensor) -> list[tf.Tensor]:
    program = self.program
    flat = iter(flat)
    stop = next(flat)
    shared = {
        key: typed_values.like(typed_values.pattern(program.type_of(key)), flat)
        for key in self.shared}
    stacked = {
        key: [next(flat) for _ in typed_values.tensor_specs(
            program.type_of(key))] for key in self.kept}
    feeds = [
        feeding.Feed([next(flat) for _ in tensors], resident, next(flat))
        for tensors, resident in signature.feeds]
    start = list(flat)

    def client(index, *state):
      state = iter(state)
      values = {**shared, **self.client_arguments(feeds, index)}
      for key in self.kept:
        values[key] = typed_values.like(
            typed_values.pattern(program.type_of(key)),
            iter([tf.gather(leaf, index) for leaf in stacked[key]]))
      values = self.client_values(values)
      new = []
      for step in self.aggregates:
        total = typed_values.like(self._accumulators[step.key], state)
        aggregation = program.aggregation(step, values)
        new.extend(typed_values.leaves(
            aggregation.accumulate(total, aggregation.value())))
      new = [tf.ensure_shape(leaf, spec.shape)
             for leaf, spec in zip(new, self.accumulator_specs())]
      for key in self.outputs:
        for leaf in typed_values.leaves(values[key]):
          new.append(next(state).write(index, leaf))
      return (index + 1, *new)

    arrays = [
        tf.TensorArray(spec.dtype, signature.bucket, element_shape=spec.shape,
                       clear_after_read=False)
        for spec in self.output_specs()]
    results = tf.while_loop(
        lambda index, *_: index < stop, client,
        [tf.constant(0), *start, *arrays],
        shape_invariants=[
            tf.TensorShape([]),
            *[spec.shape for spec in self.accumulator_specs()],
            *[tf.TensorShape(None) for _ in arrays]],
        parallel_iterations=1)[1:]
    return [*results[:len(start)], *[a.stack() for a in results[len(start):]]]

  def accumulator_specs(self) -> list[tf.TensorSpec]:
    return [spec for step in self.aggregates
            for spec in typed_values.leaves(self._accumulators[step.key])]

  def output_specs(self) -> list[tf.TensorSpec]:
    return [spec for key in self.outputs
            for spec in typed_values.tensor_specs(self.program.type_of(key))]

  def compiled(self, signature: Signature, jit: bool) -> Any:
    """The loop for one signature, traced once and jitted on demand."""
    known = self._functions.get((signature, jit))
    if known is None:
      specs = self._specs(signature)
      known = typed_values.function(
          functools.partial(self._run, signature), specs, jit=jit)
      self._functions[signature, jit] = known
      logging.info(
          'Compiled a loop over up to %d clients of %s (%s), %d programs so '
          'far.', signature.bucket, signature, 'XLA' if jit else 'plain',
          self.num_compiled)
    return known

  def _specs(self, signature: Signature) -> list[tf.TensorSpec]:
    type_of = self.program.type_of
    specs = [tf.TensorSpec([], tf.int32)]
    for key in self.shared:
      specs.extend(typed_values.tensor_specs(type_of(key)))
    for key in self.kept:
      specs.extend(
          tf.TensorSpec([signature.bucket] + spec.shape, spec.dtype)
          for spec in typed_values.tensor_specs(type_of(key)))
    for tensors, _ in signature.feeds:
      specs.extend(tf.TensorSpec(shape, dtype) for dtype, shape in tensors)
      specs.append(tf.TensorSpec([signature.bucket], tf.int32))
    return specs + self.accumulator_specs()

  def inputs(self, shared: Values, kept: Mapping[Key, list[Any]],
             feeds: Sequence[feeding.Feed], zeros: Mapping[Key, list[Any]],
             stop: int) -> list[tf.Tensor]:
    """What the compiled loop takes, in its order."""
    flat = [np.int32(stop)]
    for key in self.shared:
      flat.extend(typed_values.leaves(shared[key]))
    for key in self.kept:
      flat.extend(kept[key])
    for feed in feeds:
      flat.extend([*feed.tensors, feed.rows])
    for step in self.aggregates:
      flat.extend(zeros[step.key])
    return [_tensor(leaf) for leaf in flat]

  def split(self, results: Sequence[tf.Tensor], count: int) -> tuple[
      dict[Key, list[tf.Tensor]], dict[Key, list[tf.Tensor]]]:
    """A shard's accumulators, and each client's outputs, padding cut off."""
    results = iter(results)
    totals = {
        step.key: [next(results) for _ in typed_values.leaves(
            self._accumulators[step.key])] for step in self.aggregates}
    outputs = {
        key: [next(results) for _ in typed_values.tensor_specs(
            self.program.type_of(key))] for key in self.outputs}
    return totals, outputs

  # ------------------------------------------------------------- merging
  def merge(self, one: Mapping[Key, list[tf.Tensor]],
            other: Mapping[Key, list[tf.Tensor]]) -> dict[
                Key, list[tf.Tensor]]:
    """Two shards' accumulators, merged as the aggregates ask for."""
    flat = [leaf for totals in (one, other) for step in self.aggregates
            for leaf in totals[step.key]]
    results = iter(self._merge(*flat))
    return {step.key: [next(results) for _ in typed_values.leaves(
        self._accumulators[step.key])] for step in self.aggregates}

  @functools.cached_property
  def _merge(self):
    specs = self.accumulator_specs()

    def merge(*flat):
      flat = iter(flat)
      sides = [
          {step.key: typed_values.like(self._accumulators[step.key], flat)
           for step in self.aggregates} for _ in range(2)]
      return [
          tf.identity(leaf) for step in self.aggregates
          for leaf in typed_values.leaves(
              self.program.aggregation(step, {}).merge(
                  sides[0][step.key], sides[1][step.key]))]

    return typed_values.function(merge, [*specs, *specs])
