"""Clients one by one, outside the compiled program.

A compiled loop says that something failed, not at which client. When one
fails, its clients are run again here, one after the other and step by step, to
find the client, the step and the shapes. With `debug=True` nothing else is
run, and every float is checked.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.runtimes import client_loop
from tff_partial.runtimes import columns
from tff_partial.runtimes import compiled_loop
from tff_partial.runtimes import errors
from tff_partial.runtimes import feeding
from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key


class OneByOne:
  """Runs a shard's clients eagerly, in cohort order."""

  def __init__(self, loop: client_loop.ClientLoop, shard: feeding.Shard,
               feeds: Sequence[feeding.Feed],
               kept: Mapping[Key, Sequence[tf.Tensor]],
               values: client_loop.Values):
    self._loop, self._shard, self._feeds = loop, shard, feeds
    self._kept, self._values = kept, values

  @contextlib.contextmanager
  def explaining(self) -> Iterator[None]:
    """Turns a failure of the compiled loop into one that names the client."""
    try:
      yield
    except tf.errors.OpError:
      for index in range(len(self._shard)):
        self._client(index, check=False)
      raise  # Every client runs on its own: TF's own words must do.

  def run(self, zeros: Mapping[Key, Sequence[tf.Tensor]]) -> tuple[
      dict[Key, list[tf.Tensor]], dict[Key, list[Any]]]:
    """Accumulators and outputs; stops at the first non-finite value."""
    loop = self._loop
    totals = [leaf for step in loop.aggregates for leaf in zeros[step.key]]
    returned: list[list[tf.Tensor]] = [[] for _ in loop.output_specs]
    for index in range(len(self._shard)):
      values = self._client(index, check=True)
      totals = self._accumulate(index, values, totals)
      for leaves, leaf in zip(returned, loop.returned(values)):
        leaves.append(leaf)
    gathered = [columns.Column(spec) for spec in loop.output_specs]
    stacked = [
        tensor for column, leaves in zip(gathered, returned)
        for tensor in column.stack_eagerly(leaves)]
    return compiled_loop.split(loop, gathered, [*totals, *stacked])

  def _client(self, index: int, check: bool) -> dict[Key, Any]:
    loop = self._loop
    values = {**self._values,
              **loop.client_inputs(self._feeds, self._kept, tf.constant(index))}
    for step in loop.steps:
      with self._naming(index, step, values):
        values[step.key] = loop.program.run(step, values)
      if check:
        self._check(index, step, values, values[step.key])
    for step in loop.aggregates:
      with self._naming(index, step, values):
        aggregation = loop.program.aggregation(step, values)
        values[step.key] = aggregation.value()
    return values

  def _accumulate(self, index: int, values: Mapping[Key, Any],
                  totals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    flat, new = iter(totals), []
    for step in self._loop.aggregates:
      with self._naming(index, step, values):
        total = typed_values.like(self._loop.accumulator(step), flat)
        nested = self._loop.program.aggregation(step, values).accumulate(
            total, values[step.key])
      self._check(index, step, values, nested)
      new.extend(typed_values.leaves(nested))
    return new

  @contextlib.contextmanager
  def _naming(self, index: int, step: straight_line.Step,
              values: Mapping[Key, Any]) -> Iterator[None]:
    try:
      yield
    except (tf.errors.OpError, ValueError, TypeError) as error:
      message = getattr(error, 'message', None) or str(error)
      raise errors.ClientComputationError(
          int(self._shard.positions[index]), self._shard.cohort_size,
          self._describe(step), self._shapes(step, values),
          message.strip()) from error

  def _check(self, index: int, step: straight_line.Step,
             values: Mapping[Key, Any], result: typed_values.Nested) -> None:
    for place, leaf in enumerate(typed_values.leaves(result)):
      array = np.asarray(leaf)
      if array.dtype.kind in 'fc' and not np.isfinite(array).all():
        names = typed_values.leaf_names(step.type_spec)
        raise errors.NonFiniteValueError(
            int(self._shard.positions[index]), self._shard.cohort_size,
            self._describe(step), names[min(place, len(names) - 1)],
            self._shapes(step, values))

  def _describe(self, step: straight_line.Step) -> str:
    """The step, and the Python functions in its graphs."""
    names = sorted({
        name for leaf in self._loop.program.leaves_of(step)
        for name in leaf.function_names})
    return f'{step}' + (f' (which calls {", ".join(names)})' if names else '')

  def _shapes(self, step: straight_line.Step, values: Mapping[Key, Any]) -> str:
    """Dtypes and shapes of what the step reads."""
    found = []
    for key in sorted(step.reads, key=str):
      leaves = [np.asarray(leaf) if isinstance(leaf, (int, float)) else leaf
                for leaf in typed_values.leaves(values.get(key, []))]
      shown = ', '.join(f'{tf.as_dtype(leaf.dtype).name}{list(leaf.shape)}'
                        for leaf in leaves[:8])
      found.append(
          '.'.join(map(str, key)) + f': {shown}'
          + (', ...' if len(leaves) > 8 else ''))
    return '; '.join(found) or 'nothing'
