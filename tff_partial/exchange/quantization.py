"""Stochastic quantization of clients' updates (Suresh et al., ICML 2017).

"Distributed Mean Estimation with Limited Communication", section 2: each number
of a tensor is randomly rounded up or down to one of 2**bits levels between the
tensor's minimum and maximum, so that its expectation does not change.

TFF's own quantization (`tff.learning.compression_aggregator`) has other random
draws in every run. Here they follow from the client's seed, so that a run can
be repeated bit for bit.
"""

import dataclasses
import math
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial import random_bits
from tff_partial.errors import SettingError

_MOST_BITS = 16
# For the minimum and the maximum of a tensor.
_BOUNDS_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Quantization:
  """Quantization of clients' updates, for `compose(postprocess_update=)`.

  Tables are rounded and sent whole.

  Attributes:
    bits: Bits per number, 1 to 16.
    smallest: Tensors with fewer numbers are not rounded.
  """

  bits: int = 8
  smallest: int = 100

  def __post_init__(self) -> None:
    """Check the number of bits.

    Raises:
      SettingError: If it is not from 1 to 16.
    """
    if not 1 <= self.bits <= _MOST_BITS:
      raise SettingError(
        f'bits: a number of {self.bits} bits is not possible here. Give 1 to '
        f'{_MOST_BITS}.'
      )

  def __call__(self, update: Any, seed: tf.Tensor) -> Any:
    """Round one client's update.

    Args:
      update: Floating-point tensors of known shapes.
      seed: The client's seed for this round, integer `[2]`.

    Returns:
      The rounded update, with the types of the update.
    """
    rounded = [
      self._rounded(tensor, random_bits.fold_in(seed, f'quantization {place}'))
      for place, tensor in enumerate(tf.nest.flatten(update))
    ]
    return tf.nest.pack_sequence_as(update, rounded)

  def _rounded(self, tensor: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    if not self._rounds(tensor.shape.num_elements()):
      return tensor
    least, largest = tf.reduce_min(tensor), tf.reduce_max(tensor)
    step = (largest - least) / (2**self.bits - 1)
    levels = tf.math.divide_no_nan(tensor - least, step)
    chance = random_bits.uniform(seed, tensor.shape, dtype=tensor.dtype)
    return least + step * tf.floor(levels + chance)

  def _rounds(self, number: int) -> bool:
    return number >= self.smallest

  def num_bytes(self, kind: tff.TensorType) -> int:
    """Return the number of bytes of a tensor when it is sent.

    Args:
      kind: The type of the tensor.
    """
    number = math.prod(kind.shape or ())
    if not self._rounds(number):
      return int(number * kind.dtype.type().itemsize)
    return -(-number * self.bits // 8) + _BOUNDS_BYTES
