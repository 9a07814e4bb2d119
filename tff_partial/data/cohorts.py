"""Cohorts of clients, and their sources.

A `Cohort` is a sequence of client values that also gives a runtime the arrays
and rows it consists of, so that nothing needs copying client by client.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import numpy as np

from tff_partial.data import examples


class CohortGroup(NamedTuple):
  """Members of a cohort whose examples share one capacity.

  Attributes:
    resident: Nested arrays `[rows of the bucket, ...]`; the same object in each
      round, so that a runtime can keep its copy on a device.
    rows: int32 `[members]`, the members' rows in `resident` and `unread`.
    positions: int32 `[members]`, the members' positions in the cohort.
    given: Nested arrays `[members, ...]` that are new in every round.
    unread: Further fields of the members, if some are read where they run; see
      `client_readers.UnreadExamples`. Picklable if other processes read it.
  """

  resident: Any
  rows: np.ndarray
  positions: np.ndarray
  given: Any
  unread: Any = None


class Cohort(Sequence[Any]):
  """The clients of one round: a sequence of values, made on demand.

  Attributes:
    client_ids: Ids of the members in order.
    groups: The members by capacity.
  """

  def __init__(self, client_ids: Sequence[str], groups: Sequence[CohortGroup]):
    self.client_ids = tuple(client_ids)
    self.groups = tuple(groups)

  @functools.cached_property
  def _places(self) -> dict[int, tuple[CohortGroup, int]]:
    """The group of each position, and the index there."""
    return {
      int(position): (group, index)
      for group in self.groups
      for index, position in enumerate(group.positions)
    }

  def __len__(self) -> int:
    return len(self.client_ids)

  def __getitem__(self, position: Any) -> Any:
    try:
      place = range(len(self))[position]
    except IndexError:
      raise IndexError(f'The cohort has {len(self)} clients.') from None
    if isinstance(place, range):
      return [self[each] for each in place]
    group, index = self._places[place]
    row = group.rows[index]
    read: Mapping[str, Any] = {}
    if group.unread is not None:
      read = group.unread.take(group.rows[index : index + 1]).load()
    return collections.OrderedDict(
      **examples.map_fields(lambda array: array[0], read),
      **examples.map_fields(lambda array: array[row], group.resident),
      **examples.map_fields(lambda array: array[index], group.given),
    )


class ClientSource(Protocol):
  """A source of cohorts: a `Population` or a `Reader`."""

  @property
  def example_spec(self) -> examples.ExampleSpec:
    """Spec of one example."""

  @property
  def client_ids(self) -> tuple[str, ...]:
    """Ids of all clients, in a fixed order."""

  def cohort(self, client_ids: Sequence[str], seeds: np.ndarray) -> Cohort:
    """Return the values of some clients.

    Args:
      client_ids: Ids, in the order of the cohort.
      seeds: int32 `[clients, 2]`.

    Returns:
      A cohort of these clients, or of those that are available.

    Raises:
      ClientDataError: If a client is unknown or its data cannot be used.
    """

  def fingerprint(self, sample: int | None = None) -> str:
    """Return a short fingerprint of the clients' examples.

    Other examples have another one, so that a run does not resume with other
    data.

    Args:
      sample: Number of clients to load, evenly spaced, if the source has to
        load them; None for all.
    """


@dataclasses.dataclass(frozen=True)
class SomeClients:
  """A source of some of the clients of another.

  Attributes:
    source: The other source.
    client_ids: The clients.
  """

  source: ClientSource
  client_ids: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.client_ids)

  @property
  def example_spec(self) -> examples.ExampleSpec:
    """Spec of one example."""
    return self.source.example_spec

  @property
  def num_filtered(self) -> int:
    """Number of clients that the other source left out."""
    return getattr(self.source, 'num_filtered', 0)

  @property
  def vocabularies(self) -> Mapping[str, Any]:
    """Vocabularies of the other source, by column."""
    return getattr(self.source, 'vocabularies', {})

  @property
  def columns(self) -> Mapping[str, Any]:
    """Columns of the other source's data frame, by field."""
    return getattr(self.source, 'columns', {})

  def check(self, example_spec: examples.ExampleSpec) -> None:
    """Check that all clients of the other source can be used: see `check`."""
    check(self.source, example_spec)

  def cohort(self, client_ids: Sequence[str], seeds: np.ndarray) -> Cohort:
    """Return the values of some clients: see `ClientSource.cohort`."""
    return self.source.cohort(client_ids, seeds)

  def fingerprint(self, sample: int | None = None) -> str:
    """Return the fingerprint of all clients of the other source."""
    return self.source.fingerprint(sample)


def check(clients: Any, example_spec: examples.ExampleSpec) -> None:
  """Check before any round that an argument is a usable source of clients."""
  if not hasattr(clients, 'cohort') or not hasattr(clients, 'client_ids'):
    raise examples.ClientDataError(
      f'Expected packed clients, found a {type(clients).__name__}. Pack them: '
      '`tff_partial.pack({client: {"x": ..., "y": ...}}, process.example_spec)`'
      ', or `tff_partial.from_pandas(frame, process.example_spec, '
      'client_id=..., inputs=..., labels=...)`.'
    )
  if hasattr(clients, 'check'):  # Checks more than the spec.
    clients.check(example_spec)
  else:
    examples.check_spec(clients.example_spec, example_spec)
