"""A loop over the clients of a shard, as one program.

The bound of the loop is a tensor, so that one program serves every shard that
fits into its bucket. Only what the computation returns outlives a client.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial.runtimes import client_loop
from tff_partial.runtimes import columns
from tff_partial.runtimes import feeding
from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key


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
    return ','.join(
        f'{dtype.name}{list(shape[1:])}'
        for tensors, _ in self.feeds for dtype, shape in tensors)


def _dtype(tensor: Any) -> tf.DType:
  return tf.string if tensor.dtype == object else tf.as_dtype(tensor.dtype)


class UnfitForXlaError(ValueError):
  """XLA would compile the loop, but compute something else."""


class CompiledLoop:
  """A `ClientLoop` for one signature, by XLA or by TensorFlow's executor."""

  def __init__(self, loop: client_loop.ClientLoop, signature: Signature,
               jit: bool):
    self._loop, self._signature, self.jit = loop, signature, jit
    specs = self._specs()
    self._columns = [columns.Column(spec) for spec in loop.output_specs]
    if any(column.is_ragged for column in self._columns):
      # Dimensions that the type leaves open may still follow from the shapes
      # of what this group of clients is fed.
      traced = tf.function(self._returned, autograph=False)
      self._columns = [
          columns.Column(tf.TensorSpec(shape, spec.dtype))
          for shape, spec in zip(
              traced.get_concrete_function(*specs).output_shapes,
              loop.output_specs)]
    if jit and any(column.is_ragged for column in self._columns):
      raise UnfitForXlaError(
          'a client returns a value whose shape is unknown before it has run')
    if jit and loop.is_random:
      raise UnfitForXlaError(
          'clients draw randomness without a seed, and XLA would draw the same '
          'in every run')
    self._function = typed_values.function(self._run, specs, jit=jit)

  def __call__(self, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Runs the loop on `inputs`; see `split` for what comes out."""
    return self._function(*inputs)

  def split(self, results: Sequence[tf.Tensor]) -> tuple[
      dict[Key, list[tf.Tensor]], dict[Key, list[Any]]]:
    """A shard's accumulators, and its clients' outputs, leaf by leaf."""
    return split(self._loop, self._columns, results)

  def _specs(self) -> list[tf.TensorSpec]:
    type_of = self._loop.program.type_of
    specs = [tf.TensorSpec([], tf.int32)]
    for key in self._loop.shared:
      specs.extend(typed_values.tensor_specs(type_of(key)))
    for key in self._loop.kept:
      specs.extend(
          tf.TensorSpec([self._signature.bucket] + spec.shape, spec.dtype)
          for spec in typed_values.tensor_specs(type_of(key)))
    for tensors, _ in self._signature.feeds:
      specs.extend(tf.TensorSpec(shape, dtype) for dtype, shape in tensors)
      specs.append(tf.TensorSpec([self._signature.bucket], tf.int32))
    return specs + self._loop.accumulator_specs

  def _open(self, flat: Sequence[tf.Tensor]) -> tuple[Any, ...]:
    """What the inputs are: bound, shared, kept, feeds, accumulators."""
    loop, flat = self._loop, iter(flat)
    stop = next(flat)
    shared = {key: typed_values.like(loop.pattern(key), flat)
              for key in loop.shared}
    kept = {key: [next(flat) for _ in typed_values.leaves(loop.pattern(key))]
            for key in loop.kept}
    feeds = [
        feeding.Feed([next(flat) for _ in tensors], resident, next(flat))
        for tensors, resident in self._signature.feeds]
    return stop, shared, kept, feeds, list(flat)

  def _client(self, shared, kept, feeds, index: tf.Tensor) -> dict[Key, Any]:
    """All values of one client."""
    loop = self._loop
    values = {**shared, **loop.client_inputs(feeds, kept, index)}
    for step in loop.steps:
      values[step.key] = loop.program.run(step, values)
    return values

  def _returned(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    _, shared, kept, feeds, _ = self._open(flat)
    return self._loop.returned(
        self._client(shared, kept, feeds, tf.constant(0)))

  def _run(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    loop = self._loop
    stop, shared, kept, feeds, start = self._open(flat)

    def client(index, *state):
      state = iter(state)
      values = self._client(shared, kept, feeds, index)
      new = []
      for step in loop.aggregates:
        total = typed_values.like(loop.accumulator(step), state)
        aggregation = loop.program.aggregation(step, values)
        new.extend(typed_values.leaves(
            aggregation.accumulate(total, aggregation.value())))
      new = [tf.ensure_shape(leaf, spec.shape)
             for leaf, spec in zip(new, loop.accumulator_specs)]
      for column, leaf in zip(self._columns, loop.returned(values)):
        new.extend(column.write(state, index, leaf))
      return (index + 1, *new)

    arrays = [array for column in self._columns
              for array in column.arrays(self._signature.bucket, stop)]
    results = tf.while_loop(
        lambda index, *_: index < stop, client,
        [tf.constant(0), *start, *arrays],
        shape_invariants=[
            tf.TensorShape([]),
            *[spec.shape for spec in loop.accumulator_specs],
            *[tf.TensorShape(None) for _ in arrays]],
        parallel_iterations=1)[1:]
    totals, written = results[:len(start)], iter(results[len(start):])
    return [*totals, *[tensor for column in self._columns
                       for tensor in column.stack(written)]]


def inputs(loop: client_loop.ClientLoop, shared: client_loop.Values,
           kept: Mapping[Key, Sequence[Any]], feeds: Sequence[feeding.Feed],
           zeros: Mapping[Key, Sequence[Any]], stop: int) -> list[tf.Tensor]:
  """What a compiled loop takes, in its order."""
  flat = [np.int32(stop)]
  for key in loop.shared:
    flat.extend(typed_values.leaves(shared[key]))
  for key in loop.kept:
    flat.extend(kept[key])
  for feed in feeds:
    flat.extend([*feed.tensors, feed.rows])
  for step in loop.aggregates:
    flat.extend(zeros[step.key])
  return [tf.convert_to_tensor(leaf) for leaf in flat]


def split(loop: client_loop.ClientLoop, gathered: Sequence[columns.Column],
          results: Sequence[tf.Tensor]) -> tuple[
              dict[Key, list[tf.Tensor]], dict[Key, list[Any]]]:
  """Accumulators, and clients' outputs leaf by leaf, from a flat list."""
  results, gathered = iter(results), iter(gathered)
  totals = {
      step.key: [next(results) for _ in typed_values.leaves(
          loop.accumulator(step))] for step in loop.aggregates}
  outputs = {
      key: [next(gathered).read(results) for _ in typed_values.leaves(
          loop.pattern(key))] for key in loop.outputs}
  return totals, outputs
