"""Clients that are read only when they take part.

If the number of examples of each client is known in advance, a cohort is
assembled before anything is read. Each thread then reads the clients of its
shard, and each worker of `runtimes.ray()` its own.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any, ClassVar

import numpy as np

from tff_partial.data import buckets
from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import lengths as lengths_lib
from tff_partial.data import populations
from tff_partial.data import table_rows

# What to do about a client without examples, which is read in a round.
_LEAVE_OUT = "Leave it out of the reader's `ids`, or give it examples."


@dataclasses.dataclass(frozen=True)
class Reader:
  """Clients that are loaded only for the rounds in which they take part.

  Attributes:
    ids: Ids of all clients, each once.
    read: From a client's id to its fields, arrays `[examples, ...]`. It must be
      picklable if other processes read, too; it is sent each time, so it should
      hold a file's name rather than its contents.
      If many clients at once are read faster, it also has two methods that take
      client ids: `together` reads their fields, `[examples, ...]`, one client
      after another, and `num_examples` returns their numbers of examples, int64
      `[clients]`, which lets workers read their own clients as below.
    example_spec: Spec of one example.
    capacities: Sizes to pad to. By default a cohort is padded to a power of
      two, so that a compiling runtime sees few sizes; several sizes save
      padding if clients differ much.
    version: Name of the data, so that a run does not resume with other data; by
      default some clients are read to detect this.
    num_examples: Client id to number of examples, if known before reading.
      Clients are then read where they run, and only as many at a time as run
      concurrently. For models with tables sized per client, or inputs of open
      length, clients are always read when their cohort is assembled.
  """

  ids: Sequence[str]
  read: Callable[[str], Mapping[str, Any]]
  example_spec: examples.ExampleSpec
  capacities: Sequence[int] | None = None
  version: str | None = None
  num_examples: Mapping[str, int] | None = None
  num_filtered: ClassVar[int] = 0  # Clients' sizes are known when read.
  are_distinct: ClassVar[bool] = False  # Whether ids were checked before.

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
    """Check that clients are read as examples of a given spec."""
    if not self.are_distinct:
      populations.check_distinct(self.ids)
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
    must_read = has_own_tables or lengths_lib.are_open(self.example_spec)
    counts = None if must_read else self._counts(client_ids)
    if counts is not None:
      return self._unread(client_ids, seeds, counts)
    ids, flat, offsets = populations.concatenate(
      ((client, self.read(client)) for client in client_ids),
      self.example_spec,
      None,
      _LEAVE_OUT,
    )
    num_rows = table_rows.count(self.example_spec, ids, flat, offsets)
    filled = buckets.fill(
      ids,
      flat,
      offsets,
      self._capacities(np.diff(offsets)),
      num_rows,
      self._lengths(flat, offsets),
      buckets.rounded,
    )
    members = np.arange(len(client_ids))
    return cohorts.Cohort(client_ids, buckets.groups_of(filled, members, seeds))

  def _capacities(self, counts: np.ndarray) -> list[int]:
    """Return the sizes to which such a cohort is padded, ascending."""
    return sorted(self.capacities or [buckets.rounded(int(counts.max()))])

  def _lengths(
    self, flat: Any, offsets: np.ndarray
  ) -> lengths_lib.Lengths | None:
    """Return the length to which sequences of a cohort are padded, if open."""
    found = buckets.lengths_of(self.example_spec, flat, offsets)
    if found is None:
      return None
    return found._replace(sizes=[buckets.rounded(int(found.steps.max()))])

  def _counts(self, client_ids: Sequence[str]) -> np.ndarray | None:
    """Return clients' numbers of examples, int32 `[clients]`, if known."""
    if hasattr(self.read, 'together') and hasattr(self.read, 'num_examples'):
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
    self, client_ids: Sequence[str], seeds: np.ndarray, counts: np.ndarray
  ) -> cohorts.Cohort:
    """Make a cohort whose clients are read where they run."""
    if counts.min() < 1:
      client = client_ids[int(counts.argmin())]
      raise populations.no_examples(client, _LEAVE_OUT)
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
    """Return a fingerprint of the clients' examples; see `ClientSource`.

    Raises:
      ClientDataError: If a client's examples cannot be used.
    """
    if self.version is not None:
      return self.version
    digest = hashlib.blake2b(digest_size=16)
    number = len(self.ids) if sample is None else min(sample, len(self.ids))
    for place in range(number):
      client = self.ids[place * len(self.ids) // number]
      fields, _ = populations.checked(
        f'Client {client!r}', self.read(client), self.example_spec
      )
      populations.add_to(digest, fields)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class UnreadExamples:
  """Examples of clients that are not read yet; see `cohorts.CohortGroup`.

  Attributes:
    read: See `Reader`.
    example_spec: See `Reader`.
    client_ids: The clients.
    counts: Number of examples of each, `[clients]`.
    capacity: Number of examples to which each is padded.
  """

  read: Callable[[str], Mapping[str, Any]]
  example_spec: examples.ExampleSpec
  client_ids: Sequence[str]
  counts: np.ndarray
  capacity: int

  @property
  def client_bytes(self) -> int:
    """Memory size of one client's examples."""
    return self.capacity * sum(
      spec.shape.num_elements() * spec.dtype.size
      for _, spec in examples.leaves(self.example_spec)
    )

  def take(self, rows: np.ndarray) -> 'UnreadExamples':
    """Select some of the clients, by their indices."""
    return dataclasses.replace(
      self,
      client_ids=tuple(self.client_ids[row] for row in rows.tolist()),
      counts=self.counts[rows],
    )

  def load(self) -> Mapping[str, Any]:
    """Read the examples: nested arrays `[clients, capacity, ...]`.

    Raises:
      ClientDataError: If a client's examples cannot be used, or their number
        is not the expected one.
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
    """Read and check examples, one client after another, with offsets."""
    if not hasattr(self.read, 'together'):
      _, flat, offsets = populations.concatenate(
        ((client, self.read(client)) for client in self.client_ids),
        self.example_spec,
        None,
        _LEAVE_OUT,
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
