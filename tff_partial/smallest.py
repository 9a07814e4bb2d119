"""An aggregator that takes the smallest of what clients send."""

import collections
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.aggregators import WeightedFactory


def smallest() -> WeightedFactory:
  """Take each row from the client that moves it least, of those that count.

  So a node of a self-organizing map goes to the client that is nearest to it
  (FedEmbed, section 3.3.1). What no client moves stays. One client's update
  goes through as it is: no noise covers it.
  """
  return _SmallestFactory()


class _SmallestFactory(WeightedFactory):
  """For named tensors `[rows, ...]`."""

  def create(
    self, value_type: tff.Type, weight_type: tff.Type
  ) -> tff.templates.AggregationProcess:
    """Create the process that chooses rows."""

    @tff.tensorflow.computation
    def zero() -> Any:
      value = tff.types.structure_from_tensor_type_tree(
        lambda leaf: tf.zeros(leaf.shape, leaf.dtype), value_type
      )
      size = tf.nest.map_structure(
        lambda t: tf.fill([t.shape[0]], float('inf')), value
      )
      return collections.OrderedDict(value=value, size=size)

    best_type = zero.type_signature.result

    def better(one: Any, other: Any) -> Any:
      chosen: dict[str, dict[str, tf.Tensor]] = {'value': {}, 'size': {}}
      for name, size in one['size'].items():
        nearer = other['size'][name] < size
        value = one['value'][name]
        rows_of = tf.reshape(nearer, [-1] + [1] * (value.shape.rank - 1))
        chosen['value'][name] = tf.where(rows_of, other['value'][name], value)
        chosen['size'][name] = tf.where(nearer, other['size'][name], size)
      return collections.OrderedDict(
        (part, collections.OrderedDict(named)) for part, named in chosen.items()
      )

    @tff.tensorflow.computation(best_type, (value_type, weight_type))
    def accumulate(best: Any, sent: Any) -> Any:
      value, weight = sent
      counts = weight > 0
      size = collections.OrderedDict(
        (
          name,
          tf.where(
            counts,
            tf.norm(tf.reshape(tensor, [tensor.shape[0], -1]), axis=1),
            float('inf'),
          ),
        )
        for name, tensor in value.items()
      )
      return better(best, collections.OrderedDict(value=value, size=size))

    @tff.tensorflow.computation(best_type, best_type)
    def merge(one: Any, other: Any) -> Any:
      return better(one, other)

    @tff.tensorflow.computation(best_type)
    def report(best: Any) -> Any:
      return best['value']

    @tff.federated_computation
    def initialize() -> Any:
      return tff.federated_value((), tff.SERVER)

    @tff.federated_computation(
      initialize.type_signature.result,
      tff.FederatedType(value_type, tff.CLIENTS),
      tff.FederatedType(weight_type, tff.CLIENTS),
    )
    def next_fn(state: Any, value: Any, weight: Any) -> Any:
      return tff.templates.MeasuredProcessOutput(
        state,
        tff.federated_aggregate(
          tff.federated_zip((value, weight)), zero(), accumulate, merge, report
        ),
        tff.federated_value((), tff.SERVER),
      )

    return tff.templates.AggregationProcess(initialize, next_fn)
