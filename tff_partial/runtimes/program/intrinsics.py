"""TFF's intrinsics at one placement, and their aggregations.

TFF's own bodies replace means, sums, minima and maxima by
`federated_aggregate`. Secure sums are summed here in the clear, as TFF's test
backend does, with the same check of each client's value against its maximum;
that check is part of the accumulator, because XLA drops assertions.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes.values import typed_values

Block: TypeAlias = tff.framework.ComputationBuildingBlock
Nested: TypeAlias = typed_values.Nested
# Turns a block into a nested value, or a Python function of such values.
Evaluate: TypeAlias = Callable[[Block], Any]


@dataclasses.dataclass(frozen=True)
class AggregateParts:
  """Parts of a `tff.federated_aggregate`, as Python functions.

  Attributes:
    value: Returns a client's value; called only where it can be computed.
    zero: Returns the first accumulator.
    accumulate: Adds a client's value to an accumulator.
    merge: Merges two accumulators.
    report: Turns the last accumulator into the result.
    accumulator: The nested specs of an accumulator.
  """

  value: Callable[[], Nested]
  zero: Callable[[], Nested]
  accumulate: Callable[[Nested, Nested], Nested]
  merge: Callable[[Nested, Nested], Nested]
  report: Callable[[Nested], Nested]
  accumulator: Nested


def _aggregate(parts: Sequence[Block], evaluate: Evaluate) -> AggregateParts:
  value, zero, accumulate, merge, report = parts
  return AggregateParts(
    value=lambda: evaluate(value),
    zero=lambda: evaluate(zero),
    accumulate=lambda total, new: evaluate(accumulate)([total, new]),
    merge=lambda one, other: evaluate(merge)([one, other]),
    report=lambda total: evaluate(report)(total),
    accumulator=typed_values.specs(accumulate.type_signature.result),
  )


def _sum(value: Block, evaluate: Evaluate) -> AggregateParts:
  """Build a sum whose accumulator is the list of the leaves' sums."""
  member = value.type_signature.member
  pattern = typed_values.pattern(member)
  specs = typed_values.tensor_specs(member)

  def add(one: Nested, other: Nested) -> list[tf.Tensor]:
    pairs = zip(
      typed_values.leaves(one), typed_values.leaves(other), strict=True
    )
    return [a + b for a, b in pairs]

  return AggregateParts(
    value=lambda: evaluate(value),
    zero=lambda: typed_values.zeros(specs),
    accumulate=add,
    merge=add,
    report=lambda total: typed_values.like(pattern, iter(total)),
    accumulator=specs,
  )


def _for_each_leaf(bound: Nested, count: int) -> list[Any]:
  """Return one bound for each leaf, where one may apply to all."""
  flat = typed_values.leaves(bound)
  return flat * count if len(flat) == 1 else flat


def _largest(leaf: tf.Tensor) -> tf.Tensor:
  flat = tf.reshape(tf.cast(leaf, tf.int64), [-1])
  return tf.reduce_max(tf.concat([flat, [tf.int64.min]], 0))


def _secure_sum(
  parts: Sequence[Block],
  evaluate: Evaluate,
  to_maximum: Callable[[tf.Tensor], tf.Tensor] = lambda bound: bound,
) -> AggregateParts:
  """Build a sum that also keeps the largest value seen of each leaf."""
  value, bound = parts
  total = _sum(value, evaluate)
  count = len(total.accumulator)

  def report(accumulator: Nested) -> Nested:
    sums, seen = accumulator
    checks = []
    bounds = _for_each_leaf(evaluate(bound), count)
    for found, maximum in zip(seen, map(to_maximum, bounds), strict=True):
      checks.append(
        tf.debugging.Assert(
          tf.reduce_all(found <= tf.cast(maximum, tf.int64)),
          ['client value larger than maximum specified for secure sum', found]
          + ['not less than or equal to', maximum],
        )
      )
    # In eager mode, an assertion is None, with nothing to depend on.
    with tf.control_dependencies([c for c in checks if c is not None]):
      return total.report([tf.identity(leaf) for leaf in sums])

  def larger(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> Nested:
    return [tf.maximum(a, b) for a, b in zip(one, other, strict=True)]

  return AggregateParts(
    value=total.value,
    zero=lambda: [total.zero(), [tf.constant(tf.int64.min)] * count],
    accumulate=lambda old, new: [
      total.accumulate(old[0], new),
      larger(old[1], [_largest(leaf) for leaf in typed_values.leaves(new)]),
    ],
    merge=lambda one, other: [
      total.merge(one[0], other[0]),
      larger(one[1], other[1]),
    ],
    report=report,
    accumulator=[total.accumulator, [tf.TensorSpec([], tf.int64)] * count],
  )


def _secure_sum_bitwidth(
  parts: Sequence[Block], evaluate: Evaluate
) -> AggregateParts:
  def to_maximum(bits: tf.Tensor) -> tf.Tensor:
    return tf.pow(tf.constant(2, tf.int64), tf.cast(bits, tf.int64)) - 1

  return _secure_sum(parts, evaluate, to_maximum)


def _secure_modular_sum(
  parts: Sequence[Block], evaluate: Evaluate
) -> AggregateParts:
  value, modulus = parts
  total = _sum(value, evaluate)
  # Wide, since a sum beyond its dtype would have another remainder.
  wide = [tf.TensorSpec(s.shape, tf.int64) for s in total.accumulator]

  def report(sums: Sequence[tf.Tensor]) -> Nested:
    moduli = _for_each_leaf(evaluate(modulus), len(sums))
    return total.report(
      [
        tf.cast(tf.math.mod(leaf, tf.cast(by, tf.int64)), spec.dtype)
        for leaf, by, spec in zip(sums, moduli, total.accumulator, strict=True)
      ]
    )

  return dataclasses.replace(
    total,
    value=lambda: [
      tf.cast(leaf, tf.int64) for leaf in typed_values.leaves(total.value())
    ],
    zero=lambda: typed_values.zeros(wide),
    report=report,
    accumulator=wide,
  )


# Every intrinsic from the clients to the server.
AGGREGATES: dict[str, Callable[[Sequence[Block], Evaluate], AggregateParts]] = {
  'federated_aggregate': _aggregate,
  'federated_secure_sum': _secure_sum,
  'federated_secure_sum_bitwidth': _secure_sum_bitwidth,
  'federated_secure_modular_sum': _secure_modular_sum,
}

_MAPS = {'federated_apply', 'federated_map', 'federated_map_all_equal'}
_EVALS = {'federated_eval_at_clients', 'federated_eval_at_server'}
_PASSES = {
  'federated_broadcast',
  'federated_value_at_clients',
  'federated_value_at_server',
  'federated_zip_at_clients',
  'federated_zip_at_server',
}
# Every intrinsic with a rule.
KNOWN = {*AGGREGATES, *_MAPS, *_EVALS, *_PASSES}


def run(intrinsic: tff.framework.Intrinsic, argument: Any) -> Any:
  """Compute an intrinsic at the server, or at one client."""
  if intrinsic.uri in _MAPS:
    function, value = argument
    return function(value)
  if intrinsic.uri in _EVALS:
    return argument()
  if intrinsic.uri in _PASSES:
    return argument
  raise ValueError(f'No rule for the intrinsic {intrinsic.uri}.')
