"""Noise that each client adds before it sends: Gaussian or Laplace."""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import dp_queries
from tff_partial.dp.mechanisms import LOCAL
from tff_partial.dp.mechanisms import Mechanism
from tff_partial.errors import PrivacyError

# Share of a clip that is used. The rest is far more than the rounding errors of
# a norm in 64 bits, so that no clipped update exceeds the clip.
_KEPT = 1.0 - 2.0**-20


@dataclasses.dataclass(frozen=True)
class ClientNoise(abc.ABC):
  """Clipping and noise at clients; for `Aggregation(postprocess_update=)`.

  Attributes:
    clip: The largest norm of an update.
    noise_multiplier: Amount of noise, in clips.
    noise_seed: Makes a simulation's noise reproducible. If None, the noise
      follows from the client's seed alone, which must be secret, as in
      `programs.train`.
  """

  clip: float
  noise_multiplier: float
  noise_seed: int | None = None
  # The kind of clip, and the standard deviation of noise of multiplier 1.
  _clipping: ClassVar[type[clipping_lib.OneClip]]
  _stddev: ClassVar[float]

  def __post_init__(self) -> None:
    clipping_lib.check_positive(self.clip, 'clip')
    clipping_lib.check_positive(
      self.noise_multiplier, 'noise_multiplier', also_zero=True
    )

  @property
  def mechanism(self) -> Mechanism:
    """The mechanism, for the accountant."""
    return Mechanism(
      LOCAL,
      self._clipping(self.clip),
      self._stddev * self.noise_multiplier,
      None,
      self.noise_seed is not None,
    )

  def __call__(self, update: Any, seed: tf.Tensor) -> Any:
    """Clip an update that a client is about to send, and add noise.

    Args:
      update: Floating-point tensors of known shapes.
      seed: The client's own for this round, integer `[2]`. Anyone who knows it
        can remove the noise.

    Returns:
      The noised update, with the types of the update.
    """
    if self.noise_seed is not None:
      seed = random_bits.fold_in(seed, f'noise {self.noise_seed}')
    return self._noised(update, seed)

  @abc.abstractmethod
  def _noised(self, update: Any, seed: tf.Tensor) -> Any:
    """Clip an update and add noise from a seed."""


@dataclasses.dataclass(frozen=True)
class LocalNoise(ClientNoise):
  """L2 clipping and Gaussian noise at clients.

  FedEmbed's Algorithm 1 does this in line 22. The server need not be trusted,
  but the noise of n clients adds up to sqrt(n) times this;
  `accounting.local_epsilon` computes the guarantee. In a simulation, a holder
  of the clients' seeds, such as the program that draws them, can remove it.

  Attributes:
    clip: The largest L2 norm of an update.
    noise_multiplier: Standard deviation of the noise in clips.
    noise_seed: As for `ClientNoise`.
  """

  _clipping, _stddev = clipping_lib.FixedClip, 1.0

  def _noised(self, update: Any, seed: tf.Tensor) -> Any:
    query = dp_queries.GaussianSumQuery(
      self.clip, self.noise_multiplier, lambda: tf.cast(seed, tf.int32)
    )
    state = query.initial_global_state()
    units = query.preprocess_record(query.derive_sample_params(state), update)
    noised, _, _ = query.get_noised_result(units, state)
    return tf.nest.map_structure(
      lambda leaf, like: tf.cast(leaf, like.dtype), noised, update
    )


@dataclasses.dataclass(frozen=True)
class L1Clip(clipping_lib.OneClip):
  """The same clip of the L1 norm in every round.

  Attributes:
    clip: The largest L1 norm of an update.
  """

  def query(self, noise: clipping_lib.Noise) -> dp_queries.PrivateSumQuery:
    """Refuse: sums at the server get Gaussian noise, with clips by L2."""
    raise PrivacyError(
      'L1Clip is for LaplaceNoise, which clients add themselves. For noise at '
      'the server use FixedClip, AdaptiveClip or TreeNoise.'
    )


@dataclasses.dataclass(frozen=True)
class LaplaceNoise(ClientNoise):
  """L1 clipping and Laplace noise at clients.

  It is for `Aggregation(postprocess_update=)`.

  This gives local differential privacy with delta 0: for any two values of a
  client's examples, the probabilities of its update in one round differ by at
  most the factor exp(epsilon), with epsilon = 2 * clip / scale = 2 /
  noise_multiplier, as two clipped updates differ by at most two clips. Epsilons
  of the rounds in which a client takes part add up. As L1 norms grow with the
  number of weights, the same epsilon requires more noise than
  `LocalNoise` at a small delta, except for small models.

  An update that is not finite counts as zeros. No ledger counts this noise.

  Attributes:
    clip: The largest L1 norm of an update: the sum of all absolute values.
    noise_multiplier: Scale of the noise in clips; its standard deviation is
      sqrt(2) times that. Zero for no noise.
    noise_seed: As for `ClientNoise`.
  """

  # A plan of Gaussian noise refuses this clip.
  _clipping, _stddev = L1Clip, math.sqrt(2.0)

  def epsilon(self, participations: int = 1) -> float:
    """Return one client's epsilon, at delta 0; infinity without noise.

    Args:
      participations: Number of updates that the client sends.

    Raises:
      PrivacyError: If it is negative.
    """
    clipping_lib.check_positive(participations, 'participations', True)
    if not participations:
      return 0.0
    if not self.noise_multiplier:
      return math.inf
    return participations * 2.0 / self.noise_multiplier

  def _noised(self, update: Any, seed: tf.Tensor) -> Any:
    clipped = _in_clips(update, self.clip)
    noised = [
      dp_queries.on_grid(
        leaf
        + self.noise_multiplier
        * standard_laplace(random_bits.fold_in(seed, number), leaf.shape),
        self.noise_multiplier,
      )
      for number, leaf in enumerate(tf.nest.flatten(clipped))
    ]
    return tf.nest.map_structure(
      lambda leaf, like: tf.cast(self.clip * leaf, like.dtype),
      tf.nest.pack_sequence_as(update, noised),
      update,
    )


def standard_laplace(seed: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Draw Laplace numbers of scale 1, float64 `shape`, suitable for privacy.

  They reach 44 scales, with correct frequencies beyond 17, the limit of 24
  bits.
  """
  size = tf.TensorShape(shape).num_elements()
  words = tf.cast(random_bits.bits(seed, [3, size]), tf.double)
  high, low, side = tf.unstack(words)
  above_zero = (high * 2.0**32 + low + 1.0) * 2.0**-64
  distance = -tf.math.log(above_zero)
  drawn = tf.where(side < 2.0**31, -distance, distance)
  return tf.reshape(drawn, shape)


def _in_clips(update: Any, clip: float) -> Any:
  """Clip an update in 64 bits to an L1 norm of at most 1, in clips."""
  update, _ = dp_queries.norm_of(update)
  norm = tf.add_n(
    [tf.reduce_sum(tf.abs(leaf)) for leaf in tf.nest.flatten(update)]
  )
  scale = _KEPT / tf.maximum(norm, tf.constant(clip, tf.double))
  return tf.nest.map_structure(lambda leaf: leaf * scale, update)
