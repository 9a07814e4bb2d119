"""Clipping and noise of updates: fixed, by quantile, or with trees.

Several parts of an update, such as tiers, may be clipped separately. A total
noise multiplier is then shared among them.
"""

import abc
from collections.abc import Mapping
import dataclasses
import math
from typing import Any, NamedTuple, TypeAlias

from tff_partial.arguments import checked_numbers
from tff_partial.dp import dp_queries
from tff_partial.dp import dp_trees
from tff_partial.errors import PrivacyError


def check_positive(value: float, name: str, also_zero: bool = False) -> None:
  """Raise an error if a number is not positive and finite."""
  if not (math.isfinite(value) and (value > 0 or (also_zero and value == 0))):
    raise PrivacyError(
      f'`{name}` must be a finite number above {"or " if also_zero else ""}'
      f'zero, found {value}.'
    )


class Noise(NamedTuple):
  """Noise of one part of an update.

  Attributes:
    multiplier: The part's total cost, as the noise multiplier of a single
      Gaussian mechanism; below the largest.
    make_seed: Makes the seed of the noise.
    specs: Specs of the part.
    clients_per_round: Expected number of clients in a round.
  """

  multiplier: float
  make_seed: dp_queries.MakeSeed
  specs: Any
  clients_per_round: float


class Clipping(abc.ABC):
  """Clipping and noise of one part of an update."""

  @property
  @abc.abstractmethod
  def first_clip(self) -> float:
    """The largest norm of an update in the first round."""

  @abc.abstractmethod
  def query(self, noise: Noise) -> dp_queries.PrivateSumQuery:
    """Make the query."""

  def largest_noise_multiplier(self, clients_per_round: float) -> float:
    """Return an exclusive upper limit of noise; infinity by default."""
    del clients_per_round
    return math.inf

  def value_multiplier(
    self, noise_multiplier: float, clients_per_round: float
  ) -> float:
    """Return the noise multiplier of the sum alone.

    Args:
      noise_multiplier: The part's total cost.
      clients_per_round: Expected number of clients in a round.
    """
    del clients_per_round
    return noise_multiplier


@dataclasses.dataclass(frozen=True)
class OneClip(Clipping):
  """The base of clippings by the same clip in every round.

  Attributes:
    clip: The largest norm of an update.
  """

  clip: float

  def __post_init__(self) -> None:
    check_positive(self.clip, 'clip')

  @property
  def first_clip(self) -> float:
    """The clip, the same in every round."""
    return self.clip


@dataclasses.dataclass(frozen=True)
class FixedClip(OneClip):
  """The same clip in every round.

  Attributes:
    clip: The largest L2 norm of an update.
  """

  def query(self, noise: Noise) -> dp_queries.PrivateSumQuery:
    """Make the Gaussian mechanism."""
    return dp_queries.GaussianSumQuery(
      self.clip, noise.multiplier, noise.make_seed
    )


@dataclasses.dataclass(frozen=True)
class AdaptiveClip(Clipping):
  """A clip that follows a quantile of the clients' norms (Andrew et al. 2021).

  The noised count of clipped clients costs privacy, so the sum gets more noise:
  both together cost the requested noise multiplier.

  Attributes:
    initial: The first clip.
    quantile: Share of clients that should not be clipped.
    learning_rate: The clip changes by at most `exp(learning_rate)` a round.
    count_stddev: Standard deviation of the count's noise, in clients; by
      default a twentieth of the expected clients in a round.
  """

  initial: float = 0.1
  quantile: float = 0.5
  learning_rate: float = 0.2
  count_stddev: float | None = None

  def __post_init__(self) -> None:
    check_positive(self.initial, 'initial')
    check_positive(self.learning_rate, 'learning_rate', also_zero=True)
    if self.count_stddev is not None:
      check_positive(self.count_stddev, 'count_stddev')
    if not 0.0 <= self.quantile <= 1.0:
      raise PrivacyError(
        f'`quantile` must be between 0 and 1, found {self.quantile}.'
      )

  def largest_noise_multiplier(self, clients_per_round: float) -> float:
    """Return the count's noise multiplier; one client moves it by a half."""
    return 2.0 * (self.count_stddev or 0.05 * clients_per_round)

  def value_multiplier(
    self, noise_multiplier: float, clients_per_round: float
  ) -> float:
    """Return a multiplier above the total's, since the count costs privacy."""
    if not noise_multiplier:
      return 0.0
    largest = self.largest_noise_multiplier(clients_per_round)
    return (noise_multiplier**-2 - largest**-2) ** -0.5

  @property
  def first_clip(self) -> float:
    """The initial clip."""
    return self.initial

  def query(self, noise: Noise) -> dp_queries.PrivateSumQuery:
    """Make the Gaussian mechanism with a noised count."""
    count_stddev, clients = self.count_stddev or 0.0, noise.clients_per_round
    if noise.multiplier:
      count_stddev = self.largest_noise_multiplier(clients) / 2.0
    return dp_queries.AdaptiveClipSumQuery(
      self.initial,
      self.value_multiplier(noise.multiplier, clients),
      noise.make_seed,
      quantile=self.quantile,
      learning_rate=self.learning_rate,
      count_stddev=count_stddev,
      expected_clients=clients,
    )


@dataclasses.dataclass(frozen=True)
class TreeNoise(OneClip):
  """A fixed clip, and noise by tree aggregation (DP-FTRL, Kairouz et al. 2021).

  The noise multiplier is that of a node of the tree. Clients need not be
  sampled at random, but each may take part in only one round of a tree; see
  `samplings.OncePerTree`.

  Attributes:
    clip: The largest L2 norm of an update.
    rounds_per_tree: Number of rounds after which a new tree starts.
  """

  rounds_per_tree: int

  def __post_init__(self) -> None:
    super().__post_init__()
    check_positive(self.rounds_per_tree, 'rounds_per_tree')
    if wrong := checked_numbers.why_not_whole(self.rounds_per_tree):
      raise PrivacyError(f'`rounds_per_tree`: {wrong}.')

  def query(self, noise: Noise) -> dp_queries.PrivateSumQuery:
    """Make the tree."""
    return dp_trees.TreeResidualSumQuery(
      self.clip,
      noise.multiplier,
      noise.make_seed,
      specs=noise.specs,
      rounds_per_tree=self.rounds_per_tree,
    )


Clippings: TypeAlias = Clipping | Mapping[str, Clipping]
# Name of the single part of values that are clipped jointly.
WHOLE = 'all.parts'


def parts_of(clipping: Clippings) -> Mapping[str, Clipping]:
  """Return the clipping of each part, by name; a joint one is that of `WHOLE`.

  Args:
    clipping: Clipping of an update: joint, or by part.

  Raises:
    PrivacyError: If it is something else.
  """
  parts = clipping if isinstance(clipping, Mapping) else {WHOLE: clipping}
  if not parts or not all(isinstance(how, Clipping) for how in parts.values()):
    raise PrivacyError(
      '`clipping` must be FixedClip, AdaptiveClip or TreeNoise, or one of them '
      f'by part, found {clipping!r}.'
    )
  return parts


def largest_noise_multiplier(
  clipping: Clippings, clients_per_round: float
) -> float:
  """Return an exclusive upper limit of the noise multiplier of all parts.

  Args:
    clipping: Clipping of an update: joint, or by part.
    clients_per_round: Expected number of clients in a round.
  """
  parts = parts_of(clipping)
  # Several Gaussian mechanisms cost as much as one with the noise multiplier
  # `(sum_i z_i**-2)**-0.5`. So a part with the share `s` of a total noise
  # multiplier `z` gets `z / sqrt(s)`; all parts have the same share.
  share = 1.0 / len(parts)
  return min(
    how.largest_noise_multiplier(clients_per_round) * math.sqrt(share)
    for how in parts.values()
  )
