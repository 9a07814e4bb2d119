"""Noise that each client adds before it sends."""

import abc
import dataclasses
from typing import Any

import tensorflow as tf

from tff_partial import random_bits
from tff_partial.dp import clipping as clipping_lib
from tff_partial.dp import dp_queries
from tff_partial.dp.mechanisms import LOCAL
from tff_partial.dp.mechanisms import Mechanism


@dataclasses.dataclass(frozen=True)
class ClientNoise(abc.ABC):
  """What clients do to what they send; `compose(before_sending=)`.

  Attributes:
    clip: The largest norm of an update.
    noise_multiplier: How much noise is added, in clips.
    noise_seed: Draws the noise of a simulation again. If None, the noise
      follows from the client's seed alone, which must be secret, as
      `programs.train` makes it.
  """

  clip: float
  noise_multiplier: float
  noise_seed: int | None = None

  def __post_init__(self) -> None:
    clipping_lib.check_positive(self.clip, 'clip')
    clipping_lib.check_positive(
      self.noise_multiplier, 'noise_multiplier', also_zero=True
    )

  @property
  @abc.abstractmethod
  def mechanism(self) -> Mechanism:
    """What it does to updates, for the accountant."""

  def __call__(self, update: Any, seed: tf.Tensor) -> Any:
    """Clips and noises what one client is about to send.

    Args:
      update: Floating-point tensors of known shapes.
      seed: The client's own for this round, integer `[2]`. Who knows it sees
        through the noise.

    Returns:
      The noised update, with the types of the update.
    """
    if self.noise_seed is not None:
      seed = random_bits.fold_in(seed, f'noise {self.noise_seed}')
    return self._noised(update, seed)

  @abc.abstractmethod
  def _noised(self, update: Any, seed: tf.Tensor) -> Any:
    """Clips and noises an update by a seed."""


@dataclasses.dataclass(frozen=True)
class LocalNoise(ClientNoise):
  """Has clients clip by L2 and add Gaussian noise; see `local_noise`.

  Attributes:
    clip: The largest L2 norm of an update.
    noise_multiplier: Standard deviation of the noise in clips.
    noise_seed: As for `ClientNoise`.
  """

  @property
  def mechanism(self) -> Mechanism:
    """What it does to updates, for the accountant."""
    return Mechanism(
      LOCAL,
      clipping_lib.FixedClip(self.clip),
      self.noise_multiplier,
      None,
      None,
      self.noise_seed is not None,
    )

  def _noised(self, update: Any, seed: tf.Tensor) -> Any:
    return local_noise(update, self.clip, self.noise_multiplier, seed)


def local_noise(
  update: Any, clip: float, noise_multiplier: float, seed: tf.Tensor
) -> Any:
  """Clips and noises what one client is about to send: local privacy.

  This is what FedEmbed's Algorithm 1 does in line 22, and HPFL's Fednoise with
  Laplace noise. The server needs not be trusted, but the noise of n clients
  adds up to sqrt(n) times this; `accounting.local_epsilon` says what it is
  worth. In a simulation whoever has the clients' seeds, such as the program
  that draws them, sees through it.

  Args:
    update: Floating-point tensors.
    clip: The largest L2 norm of an update.
    noise_multiplier: Standard deviation of the noise in clips.
    seed: The client's own for this round, integer `[2]`. Who knows it sees
      through the noise.

  Returns:
    The noised update, with the types of the update.

  Raises:
    PrivacyError: If an argument is impossible.
  """
  clipping_lib.check_positive(clip, 'clip')
  clipping_lib.check_positive(
    noise_multiplier, 'noise_multiplier', also_zero=True
  )
  query = dp_queries.GaussianSumQuery(
    clip, noise_multiplier, lambda: tf.cast(seed, tf.int32)
  )
  state = query.initial_global_state()
  units = query.preprocess_record(query.derive_sample_params(state), update)
  noised, _, _ = query.get_noised_result(units, state)
  return tf.nest.map_structure(
    lambda leaf, like: tf.cast(leaf, like.dtype), noised, update
  )
