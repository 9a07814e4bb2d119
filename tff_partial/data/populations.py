"""Clients in memory; a round only indexes their arrays."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
from typing import Any

from absl import logging
import numpy as np
import tensorflow as tf

from tff_partial.data import buckets
from tff_partial.data import client_forms
from tff_partial.data import cohorts
from tff_partial.data import data_frames
from tff_partial.data import examples
from tff_partial.data import id_ranges
from tff_partial.data import lengths as lengths_lib
from tff_partial.data import table_rows
from tff_partial.data import vocabularies as vocabularies_lib
from tff_partial.data.examples import ClientDataError

# What to do about a client without examples.
FILTER = (
  'Leave it out, or pass `min_examples` to have small clients filtered and '
  'counted (with 0 all are kept: without examples they send nothing).'
)


def concatenate(
  clients: Iterable[tuple[str, Any]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
  remedy: str = FILTER,
) -> tuple[list[str], Any, np.ndarray]:
  """Check clients one by one and concatenate those with enough examples.

  Clients with fewer than `min_examples` are left out. If it is 0, all are kept;
  if None, those without examples are refused, with a `remedy`.

  Returns:
    The ids of the clients, nested arrays of all their examples, and the offsets
    of each client's examples, with the end.

  Raises:
    ClientDataError: For an unusable client.
  """
  examples.check_is_spec(example_spec)
  kept = large_enough(clients, example_spec, min_examples, remedy)
  ids, fields, counts = zip(*kept, strict=True)
  flat = examples.map_fields(
    lambda spec, *arrays: lengths_lib.joined(spec, arrays),
    *(example_spec, *fields),
  )
  return list(ids), flat, np.concatenate([[0], np.cumsum(counts)])


def large_enough(
  clients: Iterable[tuple[str, Any]],
  example_spec: examples.ExampleSpec,
  min_examples: int | None,
  remedy: str = FILTER,
) -> Iterator[tuple[str, Any, int]]:
  """Yield clients with enough examples, checked one by one.

  Args:
    clients: Ids, and examples as for `client_forms.as_fields`.
    example_spec: Spec of one example.
    min_examples: See `concatenate`.
    remedy: Likewise.

  Yields:
    Ids, nested arrays, and numbers of examples.

  Raises:
    ClientDataError: For an unusable client, or if none is left.
  """
  filtered = kept = 0
  for client, fields in clients:
    arrays, count = checked(f'Client {client!r}', fields, example_spec)
    if min_examples is None and not count:
      raise no_examples(client, remedy)
    if count < (min_examples or 0):
      filtered += 1
      continue
    kept += 1
    yield client, arrays, count
  report_filtered(filtered, kept, min_examples)


def checked(
  where: str, given: Any, example_spec: examples.ExampleSpec
) -> tuple[Any, int]:
  """Return fields as nested arrays, and their number of examples.

  Args:
    where: What they are of, for messages.
    given: Fields as for `client_forms.as_fields`.
    example_spec: Spec of one example.

  Raises:
    ClientDataError: If they cannot be used.
  """
  fields = client_forms.as_fields(given, example_spec, where)
  arrays = examples.check_fields(fields, example_spec, where)
  lengths = {len(array) for array in tf.nest.flatten(arrays)}
  if len(lengths) != 1:
    raise examples.ClientDataError(
      f'{where}: fields have different numbers of examples: {sorted(lengths)}.'
    )
  return arrays, lengths.pop()


def no_examples(client: str, remedy: str) -> ClientDataError:
  """Make the error for a client without examples."""
  return ClientDataError(f'Client {client!r} has no examples. {remedy}')


def check_distinct(client_ids: Iterable[Any]) -> None:
  """Refuse ids that two clients have.

  Raises:
    ClientDataError: If there are such ids, or some that read alike.
  """
  ids = collections.Counter(map(str, client_ids))
  for client, number in ids.most_common(1):
    if number > 1:
      raise ClientDataError(
        f'{number} clients have the id {client!r}, or ids that read alike, '
        "such as 1 and '1'. Give each another one, of one type."
      )


def indented(example_spec: Mapping[str, Any]) -> str:
  """Describe examples, indented below the description of their source."""
  spec = examples.ExampleSpec(example_spec)
  return '\n'.join(f'  {line}' for line in repr(spec).splitlines())


def report_filtered(filtered: int, kept: int, min_examples: int | None) -> None:
  """Log the number of clients that were left out.

  Raises:
    ClientDataError: If none is left.
  """
  if filtered:
    logging.info(
      'Left out %d of %d clients, which have fewer than %s examples.',
      filtered,
      filtered + kept,
      min_examples,
    )
  if not kept:
    raise ClientDataError(
      f'None of {filtered} clients has the {min_examples or 1} examples that '
      'it takes. Lower `min_examples` or give more data.'
    )


def add_to(digest: Any, fields: Any, path: str = '') -> None:
  """Add nested arrays to a digest, with their names, types and shapes."""
  if isinstance(fields, Mapping):
    for name, part in fields.items():
      add_to(digest, part, f'{path}/{name}')
  elif isinstance(fields, tuple):
    for place, part in enumerate(fields):
      add_to(digest, part, f'{path}/{place}')
  else:
    digest.update(f'{path} {fields.dtype.str} {fields.shape}'.encode())
    if fields.dtype != object:
      digest.update(np.ascontiguousarray(fields))
      return
    for text in fields.ravel():
      raw = text.encode() if isinstance(text, str) else text
      digest.update(len(raw).to_bytes(8, 'little') + raw)


class Population:
  """Clients whose examples are in memory, padded and grouped by capacity.

  `pack`, `from_pandas` and `from_tff` make populations (see `packing.py`).

  Attributes:
    client_ids: Ids of all clients, in a fixed order.
    example_spec: Spec of one example.
    num_filtered: Number of clients left out for too few examples.
    columns: Columns of a data frame that were joined to a vector, by field.
    vocabularies: Column of a data frame to the vocabulary that encoded its
      values.
    dropped: Rows of a data frame that were dropped because they lacked values.
  """

  def __init__(
    self,
    client_ids: Sequence[str],
    example_spec: examples.ExampleSpec,
    flat: Any,
    offsets: np.ndarray,
    *,
    capacities: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    num_filtered: int = 0,
    vocabularies: Mapping[str, vocabularies_lib.Vocabulary] | None = None,
    columns: Mapping[str, Any] | None = None,
    num_rows: table_rows.NumRows | None = None,
    dropped: data_frames.Dropped = data_frames.Dropped(),
  ):
    """Take over checked, concatenated examples.

    Args:
      client_ids: Distinct ids, `[clients]`.
      example_spec: Spec of one example.
      flat: Arrays `[all examples, ...]` in the structure of `example_spec`.
      offsets: `[clients + 1]`: client i has examples offsets[i] to
        offsets[i+1].
      capacities: Sizes to pad to; a few suitable ones if None.
      lengths: Lengths to pad sequences of open length to; likewise.
      num_filtered: Number of clients left out before.
      vocabularies: Column to the vocabulary that encoded it.
      columns: Column of a data frame, or several of one vector, by field.
      num_rows: Numbers of rows that clients need, if more.
      dropped: Rows that were dropped before.
    """
    self.example_spec = example_spec
    self.num_filtered = num_filtered
    self.vocabularies = dict(vocabularies or {})
    self.columns = {
      field: list(map(str, joined))
      for field, joined in (columns or {}).items()
      if isinstance(joined, list)
    }
    self.dropped = dropped
    self.client_ids = tuple(client_ids)
    self._fingerprint: str | None = None
    self._warned: set[str] = set()
    self._index = {client: i for i, client in enumerate(self.client_ids)}
    check_distinct(self.client_ids)
    self._counts = np.diff(offsets)
    self._buckets = buckets.fill(
      self.client_ids,
      flat,
      np.asarray(offsets),
      capacities,
      table_rows.count(
        example_spec, self.client_ids, flat, np.asarray(offsets), num_rows
      ),
      buckets.lengths_of(example_spec, flat, np.asarray(offsets), lengths),
    )

  @property
  def num_examples(self) -> int:
    """Total number of real examples of all clients."""
    return int(self._counts.sum())

  def __len__(self) -> int:
    return len(self.client_ids)

  def __repr__(self) -> str:
    counts = self._counts
    lines = [
      f'Population of {len(self):,} clients with {self.num_examples:,} '
      f'examples ({counts.min():,} to {counts.max():,} a client, median '
      f'{np.median(counts):,.0f}), padded to '
      f'{sorted({bucket.capacity for bucket in self._buckets})}'
      f'{self._said_lengths()}',
      indented(self.example_spec),
    ]
    if self.num_filtered:
      lines.append(f'  {self.num_filtered:,} left out for too few examples')
    if self.dropped.num_rows:
      lines.append(f'  {self.dropped}')
    lines += [f'  {c!r}: {v!r}' for c, v in self.vocabularies.items()]
    return '\n'.join(lines)

  def _said_lengths(self) -> str:
    for path, spec in examples.leaves(self.example_spec):
      if lengths_lib.is_open(spec):
        arrays = [self._field(bucket, path)[0] for bucket in self._buckets]
        return f', sequences to {sorted({a.shape[2] for a in arrays})}'
    return ''

  def check(self, example_spec: examples.ExampleSpec) -> None:
    """Check that the clients can be used with a given example spec.

    Raises:
      ClientDataError: If they were packed for another model, or have an id that
        this one does not have.
    """
    examples.check_spec(self.example_spec, example_spec)
    checked = examples.ids_of(self.example_spec)
    for path, ids in examples.ids_of(example_spec).items():
      new = [limits for limits in ids if limits not in checked.get(path, ())]
      for bucket in self._buckets if new else ():
        self._check_ids(bucket, path, new)
      self._warn_of_tables(path, [limits for limits in ids if limits.is_local])

  def _field(
    self, bucket: buckets.Bucket, path: str
  ) -> tuple[np.ndarray, np.ndarray]:
    """Return a field `[clients, capacity, ...]`, and its mask of examples."""
    array = dict(examples.leaves(bucket.resident['examples']))[path]
    count = bucket.resident['count']
    return array, np.arange(bucket.capacity) < count[:, np.newaxis]

  def _warn_of_tables(
    self, path: str, ids: Sequence[id_ranges.IdRange]
  ) -> None:
    """Warn once about a local table of which each client reads one row."""
    if path in self._warned or not any(
      (limits.size or 0) > 1 for limits in ids
    ):
      return
    self._warned.add(path)
    for bucket in self._buckets:
      array, is_real = self._field(bucket, path)
      if (array != array[:, :1])[is_real].any():
        return
    if self._counts.max() < 2 or len(self) < 2:
      return
    logging.warning(
      'Each client holds a %s, since it is local, but reads one row of it in '
      'all its examples (%r). If these are ids of clients, leave them out and '
      'give each client a vector of its own: '
      '`tff_partial.layers.PrivateVector(units, name=...)`.',
      ids[0].what.replace(' has ', ' of ', 1),
      path,
    )

  def _check_ids(
    self, bucket: buckets.Bucket, path: str, ids: Sequence[id_ranges.IdRange]
  ) -> None:
    array, is_real = self._field(bucket, path)
    client, place = np.nonzero(is_real)

    def which(example: int) -> str:
      name = self.client_ids[bucket.indices[client[example]]]
      return f'example {place[example]} of client {name!r}'

    examples.check_ids(array[is_real], ids, path, which)

  def cohort(
    self, client_ids: Sequence[str], seeds: np.ndarray
  ) -> cohorts.Cohort:
    """Return the values of some clients, by index; see `ClientSource`.

    Raises:
      ClientDataError: If an id is unknown.
    """
    try:
      members = np.array([self._index[c] for c in client_ids], np.int64)
    except KeyError as error:
      raise examples.ClientDataError(
        f'There is no client {error.args[0]!r} among the {len(self)} clients, '
        f'such as {self.client_ids[0]!r}.'
      ) from None
    return cohorts.Cohort(
      client_ids, buckets.groups_of(self._buckets, members, seeds)
    )

  def fingerprint(self, sample: int | None = None) -> str:
    """Return a fingerprint of all examples; see `ClientSource`."""
    del sample  # All examples are in memory.
    if self._fingerprint is None:
      digest = hashlib.blake2b(digest_size=16)
      for bucket in self._buckets:
        add_to(digest, (bucket.indices, bucket.resident))
      self._fingerprint = digest.hexdigest()
    return self._fingerprint
