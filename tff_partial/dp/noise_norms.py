"""Norm of a round's noise, compared with the largest update."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from tff_partial.dp.clipping import parts_of
from tff_partial.dp.clipping import WHOLE
from tff_partial.errors import PrivacyError

# A noise norm this many times that of the largest mean update drowns it.
_HOPELESS = 10.0


class NoiseNorm(NamedTuple):
  """The norm of the noise in a round's mean update, and its comparison.

  Attributes:
    noise: Its expected L2 norm.
    largest_update: The largest L2 norm of the mean of clipped updates, reached
      if all clients move the same way.
  """

  noise: float
  largest_update: float

  @property
  def ratio(self) -> float:
    """Ratio of the noise's norm to the largest update's."""
    return self.noise / self.largest_update

  @property
  def is_hopeless(self) -> bool:
    """True if nothing can be learned from such updates."""
    return self.ratio > _HOPELESS

  @property
  def warning(self) -> str:
    """Advice if the noise is hopeless; else empty."""
    if not self.is_hopeless:
      return ''
    return (
      'The noise drowns what clients learn. Have more clients in a round, send '
      'fewer weights, or accept a larger epsilon.'
    )

  def __str__(self) -> str:
    return (
      f'norm {self.noise:.2g} against {self.largest_update:.2g} of the largest '
      f'mean update: {self.ratio:.2g} times as long'
    )


def of_mean(plan: Any, num_weights: int | Mapping[str, int]) -> NoiseNorm:
  """Compute the norms for the mean of a round's updates by a `PrivacyPlan`.

  Adaptive clips count with their initial value; the ratio is the same for any.
  For trees the noise is that of one node; most rounds have more. `num_weights`
  is the number of elements of an update, by part if the clipping is.

  Raises:
    PrivacyError: If the parts do not match those of the clipping.
  """
  clients, by_part = plan.clients_per_round, parts_of(plan.clipping)
  numbers = (
    num_weights if isinstance(num_weights, Mapping) else {WHOLE: num_weights}
  )
  if WHOLE in by_part:
    numbers = {WHOLE: sum(numbers.values())}
  if set(numbers) != set(by_part):
    raise PrivacyError(
      f'`num_weights` must be given for {sorted(by_part)}, as the clipping is, '
      f'found {num_weights}.'
    )
  share = 1.0 / len(by_part)  # See `clipping.largest_noise_multiplier`.
  divisor = math.sqrt(clients) if plan.is_local else clients
  noise, update = 0.0, 0.0
  for part, how in by_part.items():
    multiplier = how.value_multiplier(
      plan.noise_multiplier / math.sqrt(share), clients
    )
    noise += numbers[part] * (multiplier * how.first_clip / divisor) ** 2
    update += how.first_clip**2
  return NoiseNorm(math.sqrt(noise), math.sqrt(update))
