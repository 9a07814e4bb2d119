"""Search for the client at which a compiled loop fails.

A compiled loop reports that something failed, but not at which client. Then its
clients run again here, one after the other and step by step, to find the
client, the step and the shapes.
"""

from collections.abc import Iterator
import contextlib
from typing import Any

import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import loop_inputs
from tff_partial.runtimes.cohort_runtime import sharding
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import typed_values


@contextlib.contextmanager
def named(
  loop: client_loop.ClientLoop,
  shard: sharding.Shard,
  inputs: loop_inputs.Inputs,
) -> Iterator[None]:
  """Turn a failure of a compiled loop into one that names the client.

  Raises:
    ClientComputationError: If a client fails when it runs alone.
  """
  try:
    yield
  except tf.errors.OpError:
    for index in range(len(shard)):
      _run_client(loop, shard, inputs, index)
    raise  # Every client runs on its own: keep TF's error.


def _run_client(
  loop: client_loop.ClientLoop,
  shard: sharding.Shard,
  inputs: loop_inputs.Inputs,
  index: int,
) -> None:
  """Run one client eagerly, and add it to the first accumulators."""
  program = loop.program
  values = {
    **inputs.values,
    **loop.client_inputs(inputs.feeds, inputs.kept, tf.constant(index)),
  }
  totals = iter(inputs.totals)
  for step in [*loop.steps, *loop.aggregates]:
    try:
      if step.kind is flat_program.Kind.AGGREGATE:
        total = typed_values.like(program.accumulator(step), totals)
        aggregation = program.aggregation(step, values)
        aggregation.accumulate(total, aggregation.value())
      else:
        values[step.key] = program.evaluate(step.block, values)
    except (tf.errors.OpError, ValueError, TypeError) as error:
      message = getattr(error, 'message', None) or str(error)
      raise errors.ClientComputationError(
        int(shard.positions[index]),
        shard.cohort_size,
        _describe(step),
        _shapes(step, values),
        message.strip(),
      ) from error


def _describe(step: flat_program.Step) -> str:
  """Describe a step and the Python functions in its graphs."""
  names = {name for leaf in step.leaves for name in leaf.function_names}
  called = f' (which calls {", ".join(sorted(names))})' if names else ''
  return f'{step}{called}'


def _shapes(step: flat_program.Step, values: flat_program.Values) -> str:
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
