"""Differentially private sums with reproducible noise.

The queries of tensorflow-privacy draw unseeded noise, so that a run can neither
be resumed nor compared. These have the same mechanisms and accounting, with
these differences:

*   Noise comes from `random_bits`, by the seed and the round in the state.
*   A record that is not finite counts as a record of zeros.
*   A record is clipped in 64 bits and rounded toward zero to integer multiples
    of 2**-30 of the clip. Integer sums are exact: a client moves the sum by at
    most the clip, whatever the other records and their order, and every runtime
    computes the same sum.
*   Noise is drawn and added in 64 bits, and the noised sum is rounded to a grid
    that depends only on the noise. So a sum's low bits reveal nothing.
"""

import collections
from collections.abc import Callable
import math
from typing import Any, NamedTuple, TypeAlias

import dp_accounting
import tensorflow as tf
import tensorflow_privacy as tfp

from tff_partial import random_bits
from tff_partial.client import descent

Measurements: TypeAlias = collections.OrderedDict[str, tf.Tensor]
# Makes the first seed, int32 `[2]`, when a state is initialized.
MakeSeed: TypeAlias = Callable[[], tf.Tensor]

# Units per clip. A share of 2**-20 is kept in reserve, far more than the
# rounding errors of a norm in 64 bits.
_UNITS = 2.0**30
_UNITS_SENT = _UNITS * (1.0 - 2.0**-20)
# Grid steps per standard deviation, for the rounding of sums.
_STEPS = 2.0**20
# Limits of adaptive clips.
_SMALLEST_CLIP, _LARGEST_CLIP = 2.0**-60, 2.0**60


def standard_normal(seed: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Draw standard normal numbers, float64 `shape`, suitable for privacy.

  They reach 9.4 standard deviations. `random_bits.normal` ends at 5.8, which
  would reveal differences that must stay hidden.
  """
  size = tf.TensorShape(shape).num_elements()
  words = tf.cast(random_bits.bits(seed, [3, size]), tf.double)
  high, low, turn = tf.unstack(words)
  above_zero = (high * 2.0**32 + low + 1.0) * 2.0**-64
  angle = (turn + 0.5) * (2.0 * math.pi * 2.0**-32)
  drawn = tf.sqrt(-2.0 * tf.math.log(above_zero)) * tf.cos(angle)
  return tf.reshape(drawn, shape)


def structure_of_noise(seed: tf.Tensor, structure: Any) -> Any:
  """Draw standard normal numbers, float64, in a given structure."""
  leaves = tf.nest.flatten(structure)
  return tf.nest.pack_sequence_as(
    structure,
    [
      standard_normal(random_bits.fold_in(seed, number), leaf.shape)
      for number, leaf in enumerate(leaves)
    ],
  )


def on_grid(values: tf.Tensor, stddev: float) -> tf.Tensor:
  """Round noised numbers, float64, to a grid that depends only on the noise."""
  if not stddev:
    return values
  step = 2.0 ** math.floor(math.log2(stddev)) / _STEPS
  return tf.round(values / step) * step


def norm_of(record: Any) -> tuple[Any, tf.Tensor]:
  """Return a record in 64 bits, zeros if it is not finite, and its L2 norm."""
  leaves = [tf.cast(leaf, tf.double) for leaf in tf.nest.flatten(record)]
  is_finite = descent.are_finite(leaves)
  leaves = [tf.where(is_finite, leaf, tf.zeros_like(leaf)) for leaf in leaves]
  norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(leaf)) for leaf in leaves]))
  return tf.nest.pack_sequence_as(record, leaves), norm


def to_units(record: Any, clip: tf.Tensor) -> tuple[Any, tf.Tensor]:
  """Clip a record and convert it to units of 2**-30 of the clip.

  Returns the clipped record as int64, of norm 2**30 at most, and its original
  norm.
  """
  record, norm = norm_of(record)
  scale = _UNITS_SENT / tf.maximum(norm, tf.cast(clip, tf.double))
  # A cast to integers rounds toward zero, so no number grows.
  units = tf.nest.map_structure(
    lambda leaf: tf.cast(leaf * scale, tf.int64), record
  )
  return units, norm


def from_units(units: Any) -> Any:
  """Convert units to float64, in clips."""
  return tf.nest.map_structure(
    lambda leaf: tf.cast(leaf, tf.double) / _UNITS, units
  )


def in_sizes_of(structure: Any, clip: tf.Tensor) -> Any:
  """Multiply a structure in clips by the clip, as float32."""
  return tf.nest.map_structure(
    lambda leaf: tf.cast(leaf * tf.cast(clip, tf.double), tf.float32), structure
  )


def _signal_to_noise(noised: Any, stddev: tf.Tensor) -> tf.Tensor:
  """Estimate the ratio of the signal's norm to the noise's.

  The expected squared norm of a noised sum is the signal's plus the noise's.
  Only the noised sum is used, so this costs no privacy.
  """
  leaves = tf.nest.flatten(noised)
  size = sum(leaf.shape.num_elements() for leaf in leaves)
  squares = tf.add_n([tf.reduce_sum(tf.square(leaf)) for leaf in leaves])
  ratio = squares / (size * tf.square(stddev))
  return tf.sqrt(tf.maximum(ratio - 1.0, 0.0))


class PrivateSumQuery(tfp.SumAggregationDPQuery):
  """A sum of clipped records with noise, float32; the base of the others."""

  def __init__(self, clip: float, noise_multiplier: float, seed: MakeSeed):
    """Store the parameters.

    Args:
      clip: The largest L2 norm of a record, or its initial value.
      noise_multiplier: Standard deviation of the noise in clips.
      seed: Makes the seed of all noise.
    """
    self._clip, self._make_seed = clip, seed
    self.noise_multiplier = noise_multiplier

  def derive_sample_params(self, global_state: Any) -> tf.Tensor:
    """Return the clip, for the clients."""
    return global_state.clip

  def initial_sample_state(self, template: Any = None) -> Any:
    """Return the sum of no records."""
    return tf.nest.map_structure(
      lambda leaf: tf.zeros(leaf.shape, tf.int64), template
    )

  def preprocess_record(self, params: tf.Tensor, record: Any) -> Any:
    """Clip a client's record."""
    return to_units(record, params)[0]

  def is_clipped(self, params: tf.Tensor, record: Any) -> tf.Tensor:
    """Return true if a client's record is clipped, which is not private."""
    return norm_of(record)[1] > tf.cast(params, tf.double)

  def measure(self, before: Any, after: Any, noised: Any) -> Measurements:
    """Measure a round from values that are already private."""
    del after
    measured = collections.OrderedDict(clip=before.clip)
    measured['noise_stddev'] = self._stddev(before)
    if self.noise_multiplier:
      measured['signal_to_noise'] = _signal_to_noise(
        noised, measured['noise_stddev']
      )
    return measured

  def _stddev(self, state: Any) -> tf.Tensor:
    return state.clip * tf.constant(self.noise_multiplier, tf.float32)

  def _event(self) -> dp_accounting.DpEvent:
    return dp_accounting.GaussianDpEvent(tf.constant(self.noise_multiplier))

  def _noised(self, units: Any, seed: tf.Tensor) -> Any:
    """Return a sum with Gaussian noise, in clips."""
    total = from_units(units)
    if not self.noise_multiplier:
      return total
    return tf.nest.map_structure(
      lambda leaf, noise: on_grid(
        leaf + self.noise_multiplier * noise, self.noise_multiplier
      ),
      total,
      structure_of_noise(seed, total),
    )


class GaussianState(NamedTuple):
  """The state of `GaussianSumQuery`.

  Attributes:
    seed: The seed of all noise, int32 `[2]`. It never changes.
    round: Number of noised sums so far, int32. No two have the same noise.
    clip: The largest L2 norm of a record, float32.
  """

  seed: tf.Tensor
  round: tf.Tensor
  clip: tf.Tensor


class GaussianSumQuery(PrivateSumQuery):
  """The Gaussian mechanism: `tfp.GaussianSumQuery` with seeds."""

  def initial_global_state(self) -> GaussianState:
    """Make the seed."""
    return GaussianState(
      self._make_seed(), tf.constant(0), tf.constant(self._clip, tf.float32)
    )

  def get_noised_result(
    self, sample_state: Any, global_state: GaussianState
  ) -> tuple[Any, GaussianState, dp_accounting.DpEvent]:
    """Add the round's noise."""
    seed = random_bits.fold_in(global_state.seed, global_state.round)
    noised = in_sizes_of(self._noised(sample_state, seed), global_state.clip)
    after = global_state._replace(round=global_state.round + 1)
    return noised, after, self._event()


class AdaptiveState(NamedTuple):
  """The state of `AdaptiveClipSumQuery`.

  Attributes:
    seed: The seed of all noise, int32 `[2]`. It never changes.
    round: Number of noised sums so far, int32. No two have the same noise.
    clip: The next round's clip, float32.
    share_clipped: Share of clipped clients in the last round, by noised count.
  """

  seed: tf.Tensor
  round: tf.Tensor
  clip: tf.Tensor
  share_clipped: tf.Tensor


class AdaptiveClipSumQuery(PrivateSumQuery):
  """The Gaussian mechanism with a clip that follows a quantile of the norms.

  Andrew et al. 2021: `tfp.QuantileAdaptiveClipSumQuery` with geometric updates
  and seeds. The number of clients that are not clipped is noised.
  """

  def __init__(
    self,
    clip: float,
    noise_multiplier: float,
    seed: MakeSeed,
    *,
    quantile: float,
    learning_rate: float,
    count_stddev: float,
    expected_clients: float,
  ):
    """Store the parameters; see `clipping.AdaptiveClip`.

    The sum's noise multiplier is without the count's noise.
    """
    super().__init__(clip, noise_multiplier, seed)
    self._quantile, self._learning_rate = quantile, learning_rate
    self._count_stddev, self._expected = count_stddev, expected_clients

  def initial_global_state(self) -> AdaptiveState:
    """Make the seed."""
    clip = tf.constant(self._clip, tf.float32)
    return AdaptiveState(self._make_seed(), tf.constant(0), clip, tf.zeros([]))

  def initial_sample_state(self, template: Any = None) -> Any:
    """Return the sum of no records, and the count of no clients."""
    units = super().initial_sample_state(template)
    return collections.OrderedDict(units=units, halves=tf.zeros([], tf.int64))

  def preprocess_record(self, params: tf.Tensor, record: Any) -> Any:
    """Clip a client's record and note if it was clipped."""
    units, norm = to_units(record, params)
    # Plus or minus a half, so one client moves the count by at most a half.
    unclipped = norm <= tf.cast(params, tf.double)
    halves = 2 * tf.cast(unclipped, tf.int64) - 1
    return collections.OrderedDict(units=units, halves=halves)

  def get_noised_result(
    self, sample_state: Any, global_state: AdaptiveState
  ) -> tuple[Any, AdaptiveState, dp_accounting.DpEvent]:
    """Add the round's noise and adapt the clip."""
    seed, clip = global_state.seed, global_state.clip
    seed = random_bits.fold_in(seed, global_state.round)
    noised = self._noised(
      sample_state['units'], random_bits.fold_in(seed, 'sum')
    )
    count = tf.cast(sample_state['halves'], tf.double) / 2.0
    noise = standard_normal(random_bits.fold_in(seed, 'count'), count.shape)
    count = on_grid(count + self._count_stddev * noise, self._count_stddev)
    unclipped = tf.clip_by_value(count / self._expected + 0.5, 0.0, 1.0)
    unclipped = tf.cast(unclipped, tf.float32)
    adapted = clip * tf.exp(-self._learning_rate * (unclipped - self._quantile))
    after = AdaptiveState(
      global_state.seed,
      global_state.round + 1,
      tf.clip_by_value(adapted, _SMALLEST_CLIP, _LARGEST_CLIP),
      1.0 - unclipped,
    )
    event = dp_accounting.ComposedDpEvent(
      [
        self._event(),
        dp_accounting.GaussianDpEvent(tf.constant(2.0 * self._count_stddev)),
      ]
    )
    return in_sizes_of(noised, clip), after, event

  def measure(self, before: Any, after: Any, noised: Any) -> Measurements:
    """Measure a round from values that are already private."""
    measured = super().measure(before, after, noised)
    measured['share_clipped'] = after.share_clipped
    return measured
