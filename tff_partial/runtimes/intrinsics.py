"""What each of TFF's intrinsics means at one place, and how to aggregate.

TFF's own bodies replace means, sums, minima and maxima by
`federated_aggregate`. Secure sums are summed here in the clear, as TFF's test
backend does, with the same check of each client's value against its maximum;
that check rides along in the accumulator, because XLA drops assertions.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes import typed_values

framework = tff.framework
Nested = typed_values.Nested


def prepare(computation: tff.Computation) -> framework.ComputationBuildingBlock:
  """The computation's block, derived intrinsics replaced by their bodies."""
  block = computation.to_building_block()
  return tff.tensorflow.replace_intrinsics_with_bodies(block)[0]


@dataclasses.dataclass(frozen=True)
class Aggregation:
  """How client values become one: `tff.federated_aggregate`'s parts."""
  # Called only where a client's values are at hand.
  value: Callable[[], Nested]
  zero: Callable[[], Nested]
  accumulate: Callable[[Nested, Nested], Nested]
  merge: Callable[[Nested, Nested], Nested]
  report: Callable[[Nested], Nested]
  # What an accumulator looks like: nested specs.
  accumulator: Nested


Evaluate = Callable[[framework.ComputationBuildingBlock], Any]


def _aggregate(step, parts, evaluate: Evaluate) -> Aggregation:
  value, zero, accumulate, merge, report = parts
  return Aggregation(
      value=lambda: evaluate(value),
      zero=lambda: evaluate(zero),
      accumulate=lambda total, new: evaluate(accumulate)([total, new]),
      merge=lambda one, other: evaluate(merge)([one, other]),
      report=lambda total: evaluate(report)(total),
      accumulator=typed_values.specs(accumulate.type_signature.result))


def _spread(limit: Nested, pattern: Nested) -> list[Any]:
  """One limit for each leaf: a single one stands for all."""
  flat = typed_values.leaves(limit)
  count = len(typed_values.leaves(pattern))
  return flat * count if len(flat) == 1 else flat


def _secure_sum(step, parts, evaluate: Evaluate,
                to_maximum=lambda limit: limit) -> Aggregation:
  """A sum with the largest value seen of each leaf beside it."""
  value, limit = parts
  pattern = typed_values.pattern(value.type_signature.member)
  specs = typed_values.tensor_specs(value.type_signature.member)
  count = len(specs)
  largest_specs = [tf.TensorSpec([], tf.int64)] * count

  def largest(leaf):
    return tf.reduce_max(tf.concat(
        [tf.reshape(tf.cast(leaf, tf.int64), [-1]), [tf.int64.min]], 0))

  def report(total):
    sums, seen = total
    limits = [to_maximum(leaf) for leaf in _spread(evaluate(limit), pattern)]
    checks = [
        tf.debugging.Assert(
            tf.reduce_all(found <= tf.cast(maximum, tf.int64)),
            ['client value larger than maximum specified for secure sum',
             found, 'not less than or equal to', maximum])
        for found, maximum in zip(seen, limits)]
    with tf.control_dependencies([c for c in checks if c is not None]):
      return typed_values.like(pattern, iter([tf.identity(s) for s in sums]))

  return Aggregation(
      value=lambda: evaluate(value),
      zero=lambda: [typed_values.zeros(specs),
                    [tf.constant(tf.int64.min)] * count],
      accumulate=lambda total, new: [
          [a + b for a, b in zip(total[0], typed_values.leaves(new))],
          [tf.maximum(a, largest(b))
           for a, b in zip(total[1], typed_values.leaves(new))]],
      merge=lambda one, other: [
          [a + b for a, b in zip(one[0], other[0])],
          [tf.maximum(a, b) for a, b in zip(one[1], other[1])]],
      report=report,
      accumulator=[specs, largest_specs])


def _secure_sum_bitwidth(step, parts, evaluate: Evaluate) -> Aggregation:
  return _secure_sum(
      step, parts, evaluate,
      lambda bits: tf.pow(tf.constant(2, tf.int64), tf.cast(bits, tf.int64))
      - 1)


def _secure_modular_sum(step, parts, evaluate: Evaluate) -> Aggregation:
  value, modulus = parts
  pattern = typed_values.pattern(value.type_signature.member)
  specs = typed_values.tensor_specs(value.type_signature.member)

  def add(one, other):
    return [a + b for a, b in zip(
        typed_values.leaves(one), typed_values.leaves(other))]

  return Aggregation(
      value=lambda: evaluate(value),
      zero=lambda: typed_values.zeros(specs),
      accumulate=add, merge=add,
      report=lambda total: typed_values.like(pattern, iter([
          tf.math.mod(leaf, tf.cast(by, leaf.dtype))
          for leaf, by in zip(total, _spread(evaluate(modulus), pattern))])),
      accumulator=specs)


# Every intrinsic that leads from the clients to the server.
AGGREGATES = {
    'federated_aggregate': _aggregate,
    'federated_secure_sum': _secure_sum,
    'federated_secure_sum_bitwidth': _secure_sum_bitwidth,
    'federated_secure_modular_sum': _secure_modular_sum,
}

_MAPS = {'federated_apply', 'federated_map', 'federated_map_all_equal'}
_EVALS = {'federated_eval_at_clients', 'federated_eval_at_server'}
_PASSES = {
    'federated_broadcast', 'federated_zip_at_clients',
    'federated_zip_at_server', 'federated_value_at_clients',
    'federated_value_at_server',
}


_SELECTS = {'federated_select', 'federated_secure_select'}


def _select(intrinsic: framework.Intrinsic, keys: tf.Tensor, max_key: tf.Tensor,
            server_value: Nested, select: Callable[[Nested], Nested]) -> Nested:
  """A client's choice of the server's value: a sequence, one item a key."""
  del max_key  # Bounds what a secure protocol prepares; nothing to prepare.
  element = intrinsic.type_signature.result.member.element
  chosen = tf.data.Dataset.from_tensor_slices(keys).map(
      lambda key: typed_values.to_tf_structure(
          select([server_value, key]), element))
  return tf.data.experimental.to_variant(chosen)


def run(intrinsic: framework.Intrinsic, argument: Any) -> Any:
  """The value of an intrinsic at the server, or at one client."""
  uri = intrinsic.uri
  if uri in _MAPS:
    function, value = argument
    return function(value)
  if uri in _EVALS:
    return argument()
  if uri in _PASSES:
    return argument
  if uri in _SELECTS:
    return _select(intrinsic, *argument)
  raise errors.UnsupportedComputationError(
      f'the intrinsic {uri}', 'the cohort runtime has no rule for it')
