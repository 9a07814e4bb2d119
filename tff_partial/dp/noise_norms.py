"""How long a round's noise is, beside the longest update that it could hide."""

from collections.abc import Mapping
import math
from typing import NamedTuple

from tff_partial.dp import clipping as clipping_lib

# Noise so many times as long as the largest mean update leaves nothing of it.
_HOPELESS = 10.0


class NoiseNorm(NamedTuple):
  """The noise in the mean of a round's updates, and what it is to be beside.

  Attributes:
    noise: Its expected L2 norm.
    largest_update: The largest L2 norm that the mean of clipped updates has,
      if all clients move the same way.
  """

  noise: float
  largest_update: float

  @property
  def ratio(self) -> float:
    """How many times as long the noise is."""
    return self.noise / self.largest_update

  @property
  def is_hopeless(self) -> bool:
    """Whether nothing can be learned from such updates."""
    return self.ratio > _HOPELESS

  @property
  def warning(self) -> str:
    """What to do where the noise is hopeless; empty elsewhere."""
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


def of_mean(
  clipping: clipping_lib.Clippings,
  noise_multiplier: float,
  clients_per_round: float,
  num_weights: int | Mapping[str, int],
  *,
  shares: Mapping[str, float] | None = None,
  is_local: bool = False,
) -> NoiseNorm:
  """Compute the norms for the mean of a round's updates.

  Adaptive clips are where they begin; the ratio is the same for any. Of trees
  it is the noise of one node, and that of most rounds is longer.

  Args:
    clipping: How the whole of what a client sends is clipped jointly, or how
      each part is.
    noise_multiplier: Standard deviation of the noise in clips, all parts
      together.
    clients_per_round: How many clients are expected.
    num_weights: How many numbers a client sends, in all; by part, if the
      clipping is.
    shares: Each part's share of what is spent; equal ones by default.
    is_local: Whether each client adds the noise, and not the server, once.

  Raises:
    PrivacyError: If the parts are not those of the clipping.
  """
  by_part = clipping if isinstance(clipping, Mapping) else {'': clipping}
  numbers: Mapping[str, int]
  if isinstance(clipping, Mapping):
    numbers = num_weights if isinstance(num_weights, Mapping) else {}
  elif isinstance(num_weights, Mapping):
    numbers = {'': sum(num_weights.values())}
  else:
    numbers = {'': num_weights}
  if set(numbers) != set(by_part):
    raise clipping_lib.PrivacyError(
      f'`num_weights` must be given for {sorted(by_part)}, as the clipping is, '
      f'found {num_weights}.'
    )
  share_of = clipping_lib.shares_of(by_part, shares)
  noise, update = 0.0, 0.0
  for part, how in by_part.items():
    multiplier = how.value_multiplier(
      noise_multiplier / math.sqrt(share_of[part]), clients_per_round
    )
    clients = math.sqrt(clients_per_round) if is_local else clients_per_round
    noise += numbers[part] * (multiplier * how.first_clip / clients) ** 2
    update += how.first_clip**2
  return NoiseNorm(math.sqrt(noise), math.sqrt(update))
