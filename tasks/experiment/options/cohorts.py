"""Options that make cohorts more like those of real devices."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from typing import ClassVar, TYPE_CHECKING

from tasks.errors import OptionError
from tasks.options import detail
from tasks.options import Leak
from tasks.options import option
from tasks.options import Options
import tff_partial

if TYPE_CHECKING:
  from tff_partial.training.participation.sampling import Participation

# Orders of `Participation`.
UNIFORM, EPOCHS = 'uniform', 'epochs'
# Options that have no effect without --set=availability_day.
_OF_A_DAY = ('availability_floor', 'time_zone_spread')


@dataclasses.dataclass(frozen=True)
class Cohorts(Options):
  """Options of sampling, stragglers, partial work and availability."""

  title: ClassVar[str] = 'Rounds and cohorts'

  sampling: str = option(
    UNIFORM,
    'Whether each cohort is drawn from all clients, or in epochs: each client '
    'is asked once before any is asked again.',
    choices=(UNIFORM, EPOCHS),
  )
  extra_clients: int = option(
    0,
    'Clients asked in reserve: the first that answer are joined, as many as '
    '--clients_per_round.',
    at_least=0,
  )
  speed_spread: float = detail(
    0.0,
    'How much clients differ in speed: the standard deviation of log latency '
    'between clients.',
    at_least=0,
  )
  latency_spread: float = detail(
    0.0,
    'Standard deviation of log latency between rounds of one client.',
    at_least=0,
  )
  partial_work: float = detail(
    0.0,
    'Share of the clients, the slowest of a round, that train on the first of '
    'their examples alone, from one to all.',
    at_least=0,
    at_most=1,
  )
  availability_day: int | None = detail(
    None,
    'Rounds of a day, in which each client is available at its own time; by '
    'default all clients always are.',
    at_least=2,
  )
  availability_floor: float = detail(
    0.1,
    'Probability that a client is available at its worst time of the day.',
    at_least=0,
    at_most=1,
  )
  time_zone_spread: float = detail(
    1.0,
    "Share of the day over which clients' time zones are spread: 1 around the "
    'world, 0 for one zone.',
    at_least=0,
    at_most=1,
  )

  def __post_init__(self) -> None:
    """Refuse options of a day without --set=availability_day."""
    super().__post_init__()
    if self.availability_day is not None:
      return
    for name in _OF_A_DAY:
      if getattr(self, name) != getattr(type(self), name):
        raise OptionError(
          f'{self.argument(name)}={getattr(self, name)}: all clients are '
          'always available. Give --set=availability_day, too, or leave it out.'
        )

  def check_reserve(self, oversample: float) -> None:
    """Refuse latencies that have no effect.

    Args:
      oversample: How many times as many clients are asked.

    Raises:
      OptionError: If no client is asked in reserve and slow clients do all
        their work.
    """
    if self.extra_clients or self.partial_work or oversample > 1.0:
      return
    for name in ('speed_spread', 'latency_spread'):
      if getattr(self, name):
        raise OptionError(
          f'{self.argument(name)}={getattr(self, name)}: all clients are '
          'waited for and do all their work, however slow they are. Give '
          '--extra_clients, --oversample or --set=partial_work, too, or leave '
          'it out.'
        )

  def leaks_when(
    self, *, oversample: float, once_per_tree: bool
  ) -> Iterator[Leak]:
    """Yield the settings that a private run may not have.

    Args:
      oversample: How many times as many clients are asked.
      once_per_tree: True with tree noise, which asks no client twice per tree
        anyway.
    """
    by_latency = 'who is joined depends on how fast others are'
    if self.extra_clients:
      yield Leak(
        'extra_clients',
        self.extra_clients,
        by_latency,
        'Leave it out, and give a larger --clients_per_round.',
      )
    for name in ('speed_spread', 'latency_spread'):
      if getattr(self, name) and oversample > 1.0:
        yield Leak(
          f'set={name}',
          getattr(self, name),
          by_latency,
          'Leave --oversample out.',
        )
    if self.availability_day is not None:
      yield Leak(
        'set=availability_day',
        self.availability_day,
        'how likely a client is in a round follows the time of day',
        'Leave it out.',
      )
    if self.sampling != UNIFORM and not once_per_tree:
      yield Leak(
        'sampling',
        self.sampling,
        'whether a client can be in a round follows from the rounds before',
        'Leave it out, or use --dp_mechanism=tree, which is made for that.',
      )

  def participation(self) -> Participation:
    """Return these options as the library takes them."""
    participation = tff_partial.training.participation
    day = None
    if self.availability_day is not None:
      day = participation.availability.Availability(
        self.availability_day, self.availability_floor, self.time_zone_spread
      )
    return participation.sampling.Participation(
      order=self.sampling,
      extra_clients=self.extra_clients,
      latency=participation.latency.Latency(
        self.speed_spread, self.latency_spread
      ),
      partial_work=self.partial_work,
      availability=day,
    )
