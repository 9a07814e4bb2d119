"""Batches of a client: the examples that each step of a phase reads."""

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tff_partial import contexts
from tff_partial import phases
from tff_partial import random_bits
from tff_partial.data import splits


class Batches:
  """Batches of a phase at a client.

  Attributes:
    number: int32, the number of batches.
    num_examples: int32, the number of examples in an epoch.
    have_weight: True if any of the chosen examples has a weight above 0.
  """

  def __init__(
    self,
    phase: phases.Phase,
    examples: Mapping[str, Any],
    chosen: splits.Chosen,
    seed: tf.Tensor,
    round_number: tf.Tensor | None,
  ):
    """Choose the examples and their order.

    `seed` is int32 `[2]`, `round_number` int32 or None.
    """
    self._examples = examples
    self._count = chosen.count
    self._capacity = tf.shape(examples['weight'])[0]
    self._shuffle, self._seed = phase.shuffle, seed
    self._order, self._orders = chosen.order, None
    epochs = phase.epochs
    if callable(epochs):
      epochs = tf.maximum(tf.cast(epochs(round_number), tf.int32), 0)
    elif phase.shuffle:
      self._orders = tf.concat([*map(self._order_of, range(epochs))], 0)
    self._size = phase.batch_size or self._capacity
    self.num_examples = chosen.count
    if phase.drop_remainder:
      self.num_examples -= chosen.count % self._size
    weights = contexts.weights_of_examples(examples['weight'])
    is_chosen = tf.range(self._capacity) < chosen.count
    self.have_weight = tf.reduce_any(
      is_chosen & (tf.gather(weights, chosen.order) > 0)
    )
    self._per_epoch = -(-self.num_examples // tf.maximum(self._size, 1))
    self.number = self._per_epoch * epochs
    if phase.max_steps is not None:
      self.number = tf.minimum(self.number, phase.max_steps)

  def _order_of(self, epoch: int | tf.Tensor) -> tf.Tensor:
    """Return the order of the chosen examples in an epoch, `[capacity]`."""
    if not self._shuffle:
      return self._order
    bits = random_bits.bits(
      random_bits.fold_in(self._seed, epoch), tf.shape(self._order)
    )
    order = splits.order_by(tf.cast(bits, tf.int64), self._count)
    return tf.gather(self._order, order)

  def at(
    self, step: tf.Tensor
  ) -> tuple[collections.OrderedDict[str, Any], tf.Tensor]:
    """Return the examples of one step and the mask of real ones.

    Padding of a batch repeats the epoch's first example: a value that is valid
    for any model.

    Args:
      step: int32, the index of the step.
    """
    number = tf.maximum(self._per_epoch, 1)  # An exact solve may have none.
    epoch, place = step // number, step % number
    offsets = place * self._size + tf.range(self._size)
    is_real = offsets < self.num_examples
    places = tf.where(is_real, offsets, 0)
    if self._orders is None:
      chosen = tf.gather(self._order_of(epoch), places)
    else:
      chosen = tf.gather(self._orders, epoch * self._capacity + places)
    batch = collections.OrderedDict(
      (name, self._examples[name]) for name in ('x', 'y', 'weight', 'places')
    )
    return tf.nest.map_structure(lambda t: tf.gather(t, chosen), batch), is_real
