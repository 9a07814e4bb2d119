"""Clients run one by one, outside the compiled program.

A compiled loop reports that something failed, but not at which client. When one
fails, its clients run again here, one after the other and step by step, to find
the client, the step and the shapes. With `debug=True` only this runs, and every
float is checked.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import compiled_loop
from tff_partial.runtimes.cohort_runtime import loop_inputs
from tff_partial.runtimes.cohort_runtime import sharding
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import typed_values

Values: TypeAlias = flat_program.Values


class OneByOne:
  """Eager runs of a shard's clients, in cohort order."""

  def __init__(
    self,
    loop: client_loop.ClientLoop,
    shard: sharding.Shard,
    inputs: loop_inputs.Inputs,
  ):
    self._loop, self._shard, self._inputs = loop, shard, inputs

  @contextlib.contextmanager
  def explaining(self) -> Iterator[None]:
    """Turn a failure of the compiled loop into one that names the client."""
    try:
      yield
    except tf.errors.OpError:
      for index in range(len(self._shard)):
        client = _Client(self._loop, self._shard, index, checked=False)
        client.add(self._inputs.totals, client.values(self._inputs))
      raise  # Every client runs on its own: keep TF's error.

  def run(self) -> compiled_loop.Results:
    """Do what the compiled loop does, and check every float."""
    loop, totals = self._loop, list(self._inputs.totals)
    gatherers = [client_batch.Column(spec) for spec in loop.output_specs]
    returned: list[list[tf.Tensor]] = [[] for _ in gatherers]
    for index in range(len(self._shard)):
      client = _Client(loop, self._shard, index, checked=True)
      values = client.values(self._inputs)
      totals = client.add(totals, values)
      for leaves, leaf in zip(returned, loop.returned(values), strict=True):
        leaves.append(leaf)
    stacked = [
      tensor
      for column, leaves in zip(gatherers, returned, strict=True)
      for tensor in column.stack_eagerly(leaves)
    ]
    return compiled_loop.Results(
      totals, compiled_loop.gathered(loop, gatherers, iter(stacked))
    )


class _Client:
  """One client of a shard, run eagerly, step by step."""

  def __init__(
    self,
    loop: client_loop.ClientLoop,
    shard: sharding.Shard,
    index: int,
    checked: bool,
  ):
    self._loop, self._shard = loop, shard
    self._index, self._checked = index, checked

  def values(self, inputs: loop_inputs.Inputs) -> Values:
    """Compute all values of the client."""
    loop = self._loop
    place = tf.constant(self._index)
    values = {
      **inputs.values,
      **loop.client_inputs(inputs.feeds, inputs.kept, place),
    }
    for step in loop.steps:
      with self._naming(step, values):
        values[step.key] = loop.program.run(step, values)
      self._check(step, values, values[step.key])
    return values

  def add(self, totals: Sequence[tf.Tensor], values: Values) -> list[tf.Tensor]:
    """Add the client to the accumulators."""
    left, new = iter(totals), []
    for step in self._loop.aggregates:
      total = typed_values.like(self._loop.program.accumulator(step), left)
      with self._naming(step, values):
        aggregation = self._loop.program.aggregation(step, values)
        total = aggregation.accumulate(total, aggregation.value())
      self._check(step, values, total)
      new.extend(typed_values.leaves(total))
    return new

  @contextlib.contextmanager
  def _naming(self, step: flat_program.Step, values: Values) -> Iterator[None]:
    try:
      yield
    except (tf.errors.OpError, ValueError, TypeError) as error:
      message = getattr(error, 'message', None) or str(error)
      raise errors.ClientComputationError(
        int(self._shard.positions[self._index]),
        self._shard.cohort_size,
        _describe(step),
        _shapes(step, values),
        message.strip(),
      ) from error

  def _check(
    self, step: flat_program.Step, values: Values, result: typed_values.Nested
  ) -> None:
    if not self._checked:
      return
    for place, leaf in enumerate(typed_values.leaves(result)):
      if leaf.dtype == tf.variant:
        continue  # A sequence, which the next step reads.
      array = np.asarray(leaf)
      if array.dtype.kind in 'fc' and not np.isfinite(array).all():
        names = typed_values.leaf_names(step.type_spec)
        raise errors.NonFiniteValueError(
          int(self._shard.positions[self._index]),
          self._shard.cohort_size,
          _describe(step),
          # An accumulator may have other leaves than its result.
          names[place] if place < len(names) else f'leaf {place}',
          _shapes(step, values),
        )


def _describe(step: flat_program.Step) -> str:
  """Describe a step and the Python functions in its graphs."""
  names = {name for leaf in step.leaves for name in leaf.function_names}
  called = f' (which calls {", ".join(sorted(names))})' if names else ''
  return f'{step}{called}'


def _shapes(step: flat_program.Step, values: Values) -> str:
  """Describe the dtypes and shapes that a step reads."""
  found = []
  for key in sorted(step.reads, key=str):
    leaves = list(map(_shape, typed_values.leaves(values.get(key, []))))
    more = ', ...' if len(leaves) > 8 else ''
    found.append(f'{".".join(map(str, key))}: {", ".join(leaves[:8])}{more}')
  return '; '.join(found) or 'nothing'


def _shape(leaf: Any) -> str:
  tensor = tf.convert_to_tensor(leaf)
  return f'{tensor.dtype.name}{list(tensor.shape)}'
