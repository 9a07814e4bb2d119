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

  def __post_init__(self) -> None:
    clipping_lib.check_positive(self.clip, 'clip')
    clipping_lib.check_positive(
      self.noise_multiplier, 'noise_multiplier', also_zero=True
    )

  @property
  @abc.abstractmethod
  def mechanism(self) -> Mechanism:
    """The mechanism, for the accountant."""

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

  @property
  def mechanism(self) -> Mechanism:
    """The mechanism, for the accountant."""
    return Mechanism(
      LOCAL,
      clipping_lib.FixedClip(self.clip),
      self.noise_multiplier,
      None,
      None,
      self.noise_seed is not None,
    )

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
