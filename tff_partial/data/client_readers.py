"""Clients that are read only when they take part.

Where it is known beforehand how many examples clients have, a cohort is put
together before anything is read, and whoever runs some of its clients reads
these: a thread those of a shard, a worker of `runtimes.ray()` its own.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from tff_partial.data import buckets
from tff_partial.data import client_forms
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import populations
from tff_partial.data import table_rows


@runtime_checkable
class ReadsTogether(Protocol):
  """The `read` of a `Reader` that takes less time for many clients at once.

  Like `num_examples` of a `Reader`, it has clients read where they are run.
  """

  def num_examples(self, client_ids: Sequence[str]) -> np.ndarray:
    """How many examples each of some clients has, int64 `[clients]`."""

  def together(self, client_ids: Sequence[str]) -> Mapping[str, Any]:
    """Their fields, `[examples, ...]`, one client after another."""


@dataclasses.dataclass(frozen=True)
class Reader:
  """Clients that are loaded only for the rounds in which they take part.

  Attributes:
    ids: Ids of all clients.
    read: From a client's id to its fields, arrays `[examples, ...]`. A
      function that can be pickled, if other processes shall read too; it is
      sent along each time, so it should hold the name of a file, and not what
      is in it.
    example_spec: What one example consists of.
    capacities: Sizes to pad to. By default a cohort is padded to a power of
      two, so that a compiling runtime meets few sizes; those of clients who
      differ much cost less padding.
    version: Names the data, so that a run notices when it is to go on with
      others; by default some clients are read to tell.
    num_examples: How many examples each client has, if that is known before it
      is read. Then clients are read where they are run, and no more of them at
      a time than are run side by side. Clients of models with tables of the
      client's own size are always read when their cohort is put together.
  """

  ids: Sequence[str]
  read: Callable[[str], Mapping[str, Any]]
  example_spec: examples.ExampleSpec
  capacities: Sequence[int] | None = None
  version: str | None = None
  num_examples: Mapping[str, int] | None = None
  num_filtered: ClassVar[int] = 0  # What a client has is known when it is read.

  @property
  def client_ids(self) -> tuple[str, ...]:
    """Ids of all clients, in a fixed order."""
    return tuple(self.ids)

  def __len__(self) -> int:
    return len(self.ids)

  def __repr__(self) -> str:
    return (
      f'Reader of {len(self):,} clients, padded to '
      f'{self.capacities or "powers of two"}\n'
      f'{populations.indented(self.example_spec)}'
    )

  def check(self, example_spec: examples.ExampleSpec) -> None:
    """Check that clients are read for such examples.

    Raises:
      ClientDataError: If they are read for another model.
    """
    examples.check_spec(self.example_spec, example_spec)
    checked = examples.ids_of(self.example_spec)
    if checked and checked != examples.ids_of(example_spec):
      raise examples.ClientDataError(
        'The clients are read for a model with other ids: '
        f'{self.example_spec!r} instead of {example_spec!r}. Make the reader '
        'with the `example_spec` of the process or evaluation.'
      )

  def cohort(
    self, client_ids: Sequence[str], seeds: np.ndarray
  ) -> cohorts.Cohort:
    """Load the values of some clients; see `ClientSource`.

    Raises:
      ClientDataError: If a client's examples cannot be used.
    """
    if not client_ids:
      return cohorts.Cohort((), ())
    has_own_tables = id_ranges.client_sized(examples.ids_of(self.example_spec))
    counts = None if has_own_tables else self._counts(client_ids)
    if counts is not None:
      return self._unread(client_ids, seeds, counts)
    ids, flat, offsets, _ = populations.concatenate(
      ((client, self.read(client)) for client in client_ids),
      self.example_spec,
      None,
    )
    num_rows = table_rows.count(self.example_spec, ids, flat, offsets)
    filled = buckets.fill(
      ids,
      flat,
      offsets,
      self._capacities(np.diff(offsets)),
      num_rows,
      buckets.rounded,
    )
    members = np.arange(len(client_ids))
    return cohorts.Cohort(client_ids, buckets.groups_of(filled, members, seeds))

  def _capacities(self, counts: np.ndarray) -> list[int]:
    """The sizes that a cohort of such clients is padded to, ascending."""
    return sorted(self.capacities or [buckets.rounded(int(counts.max()))])

  def _counts(self, client_ids: Sequence[str]) -> np.ndarray | None:
    """How many examples clients have, int32 `[clients]`, if that is known."""
    if isinstance(self.read, ReadsTogether):
      return self.read.num_examples(client_ids).astype(np.int32)
    if self.num_examples is None:
      return None
    try:
      return np.array([self.num_examples[c] for c in client_ids], np.int32)
    except KeyError as error:
      raise examples.ClientDataError(
        f'Client {error.args[0]!r}: how many examples it has, `num_examples` '
        'does not say.'
      ) from None

  def _unread(
    self,
    client_ids: Sequence[str],
    seeds: np.ndarray,
    counts: np.ndarray,
  ) -> cohorts.Cohort:
    """A cohort whose clients are read where they are run."""
    if counts.min() < 1:
      raise populations.no_examples(client_ids[int(counts.argmin())])
    capacities = self._capacities(counts)
    which = buckets.places(client_ids, counts, capacities)
    groups = []
    for number in np.unique(which).tolist():
      positions = np.flatnonzero(which == number).astype(np.int32)
      unread = UnreadExamples(
        self.read,
        self.example_spec,
        tuple(client_ids[position] for position in positions),
        counts[positions],
        capacities[number],
      )
      given = {'count': counts, 'seed': np.asarray(seeds, np.int32)}
      groups.append(
        cohorts.CohortGroup(
          collections.OrderedDict(),
          np.arange(len(positions), dtype=np.int32),
          positions,
          collections.OrderedDict(
            (name, array[positions]) for name, array in given.items()
          ),
          unread,
        )
      )
    return cohorts.Cohort(client_ids, groups)

  def fingerprint(self, sample: int | None = None) -> str:
    """Says what the clients' examples are; see `ClientSource`.

    Raises:
      ClientDataError: If a client's examples cannot be used.
    """
    if self.version is not None:
      return self.version
    digest = hashlib.blake2b(digest_size=16)
    number = len(self.ids) if sample is None else min(sample, len(self.ids))
    for place in range(number):
      client = self.ids[place * len(self.ids) // number]
      where = f'Client {client!r}'
      fields = client_forms.as_fields(
        self.read(client), self.example_spec, where
      )
      populations.add_to(
        digest, examples.check_fields(fields, self.example_spec, where)
      )
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class UnreadExamples:
  """Examples of some clients that nobody has read yet; see `cohorts.Unread`.

  Attributes:
    read: See `Reader`.
    example_spec: See `Reader`.
    client_ids: The clients.
    counts: How many examples they have, `[clients]`.
    capacity: How many each is padded to.
  """

  read: Callable[[str], Mapping[str, Any]]
  example_spec: examples.ExampleSpec
  client_ids: Sequence[str]
  counts: np.ndarray
  capacity: int

  @property
  def client_bytes(self) -> int:
    """How much memory those of a client take."""
    return self.capacity * sum(
      spec.shape.num_elements() * spec.dtype.size
      for _, spec in examples.leaves(self.example_spec)
    )

  def take(self, rows: np.ndarray) -> 'UnreadExamples':
    """Those of some of the clients.

    Args:
      rows: Their places among the clients.
    """
    return dataclasses.replace(
      self,
      client_ids=tuple(self.client_ids[row] for row in rows.tolist()),
      counts=self.counts[rows],
    )

  def load(self) -> Mapping[str, Any]:
    """Read them: nested arrays `[clients, capacity, ...]`.

    Raises:
      ClientDataError: If a client's examples cannot be used, or are not as many
        as was said.
    """
    ids, flat, offsets = self.client_ids, *self._flat()
    differ = np.flatnonzero(np.diff(offsets) != self.counts)
    if differ.size:
      place = int(differ[0])
      raise examples.ClientDataError(
        f'Client {ids[place]!r} has {np.diff(offsets)[place]} examples, but '
        f'`num_examples` says {self.counts[place]}.'
      )
    (bucket,) = buckets.fill(ids, flat, offsets, [self.capacity], {})
    return {'examples': bucket.resident['examples']}

  def _flat(self) -> tuple[Any, np.ndarray]:
    """Examples one client after another, checked, and where clients begin."""
    if not isinstance(self.read, ReadsTogether):
      _, flat, offsets, _ = populations.concatenate(
        ((client, self.read(client)) for client in self.client_ids),
        self.example_spec,
        None,
      )
      return flat, offsets
    fields = self.read.together(self.client_ids)
    offsets = np.concatenate([[0], np.cumsum(self.counts)])

    def which(example: int) -> str:
      place = int(np.searchsorted(offsets, example, 'right')) - 1
      client = self.client_ids[place]
      return f'example {example - offsets[place]} of client {client!r}'

    flat = examples.check_fields(
      fields, self.example_spec, 'The clients', which=which
    )
    return flat, offsets
