"""Padding of clients to one of a few capacities, so that few shapes occur."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import resident_arrays


class Bucket(NamedTuple):
  """Clients padded to one capacity.

  Attributes:
    resident: Nested arrays `[clients of the bucket, ...]`.
    indices: int64 `[clients of the bucket]`, ascending indices of its clients.
  """

  resident: Any
  indices: np.ndarray

  @property
  def capacity(self) -> int:
    """Number of examples to which a client is padded."""
    return len(tf.nest.flatten(self.resident['examples'])[0][0])


def rounded(count: int) -> int:
  """Round a number of examples up to a power of two."""
  return 1 << max(count - 1, 0).bit_length()


# Bytes to copy at a time.
_COPIED_BYTES = 1 << 24


class _Effort(NamedTuple):
  """Limits on the effort to save padding.

  Attributes:
    buckets: Maximum number of buckets.
    ratio: Ratio of a capacity to the next smaller one.
    wasted_bytes: Padding up to this size does not justify another bucket.
  """

  buckets: int
  ratio: int
  wasted_bytes: int


# Padding of examples costs only memory.
_OF_EXAMPLES = _Effort(buckets=3, ratio=4, wasted_bytes=2**28)
# Padding of tables also costs time whenever all rows of a table are processed.
_OF_TABLES = _Effort(buckets=8, ratio=2, wasted_bytes=2**16)


def _default_capacities(
  counts: np.ndarray, example_bytes: int, effort: _Effort
) -> list[int]:
  """Return one capacity, and smaller ones if they save much padding.

  A compiling runtime compiles each capacity as another shape.
  """
  capacities = [max(int(counts.max()), 1)]
  while len(capacities) < effort.buckets:
    inside = counts <= capacities[-1]
    wasted = (capacities[-1] - counts[inside]).sum() * example_bytes
    smaller = -(-capacities[-1] // effort.ratio)
    if wasted <= effort.wasted_bytes or not (counts <= smaller).any():
      break
    capacities.append(smaller)
  return sorted(capacities)


def fill(
  client_ids: Sequence[str],
  flat: Any,
  offsets: np.ndarray,
  capacities: Sequence[int] | None,
  num_rows: Mapping[str, np.ndarray],
  round_rows: Callable[[int], int] = int,
) -> list[Bucket]:
  """Cut concatenated examples into clients and pad each to its capacity.

  Args:
    client_ids: Ids, `[clients]`.
    flat: Nested arrays `[all examples, ...]`.
    offsets: `[clients + 1]`: client i has examples offsets[i] to offsets[i+1].
    capacities: Sizes to pad to; a few suitable ones if None.
    num_rows: Name of each table sized per client to the clients' numbers of
      rows, `[clients]`; padded to the largest in a bucket.
    round_rows: Rounds these up, so that few sizes occur.

  Raises:
    ClientDataError: If a client has more examples than the largest capacity.
  """
  counts = np.diff(offsets)
  example_bytes = sum(
    array.nbytes // max(len(array), 1) for array in tf.nest.flatten(flat)
  )
  effort = _OF_TABLES if num_rows else _OF_EXAMPLES
  capacities = sorted(
    capacities or _default_capacities(counts, example_bytes, effort)
  )
  which = places(client_ids, counts, capacities)
  buckets = []
  for number, capacity in enumerate(capacities):
    indices = np.flatnonzero(which == number)
    if not indices.size:
      continue
    held = counts[indices]
    rows = np.repeat(np.arange(indices.size), held)
    columns = np.arange(held.sum()) - np.repeat(np.cumsum(held) - held, held)
    sources = np.repeat(offsets[:-1][indices], held) + columns

    def pad(
      array: np.ndarray,
      shape: tuple[int, int] = (indices.size, capacity),
      where: tuple[np.ndarray, np.ndarray] = (rows, columns),
      sources: np.ndarray = sources,
    ) -> np.ndarray:
      padded = resident_arrays.zeros((*shape, *array.shape[1:]), array.dtype)
      # All at once would make another copy of everything.
      step = max(1, _COPIED_BYTES * len(array) // max(array.nbytes, 1))
      for start in range(0, len(sources), step):
        some = slice(start, start + step)
        padded[where[0][some], where[1][some]] = array[sources[some]]
      return padded

    resident = collections.OrderedDict(
      examples=examples.map_fields(pad, flat), count=held.astype(np.int32)
    )
    if num_rows:
      resident['rows'] = collections.OrderedDict(
        (name, _masks(numbers[indices], round_rows))
        for name, numbers in num_rows.items()
      )
    buckets.append(Bucket(resident, indices))
  return buckets


def places(
  client_ids: Sequence[str], counts: np.ndarray, capacities: Sequence[int]
) -> np.ndarray:
  """Find the smallest capacity, of ascending ones, that holds each client.

  Raises:
    ClientDataError: If a client has more examples than the largest capacity.
  """
  if counts.max() > capacities[-1]:
    raise examples.ClientDataError(
      f'Client {client_ids[int(counts.argmax())]!r} has {counts.max()} '
      f'examples but the largest bucket holds {capacities[-1]}. Add a larger '
      'one to `capacities`, or cut the client.'
    )
  return np.searchsorted(capacities, counts)


def _masks(numbers: np.ndarray, round_rows: Callable[[int], int]) -> np.ndarray:
  """Return masks of each client's rows of a table, bool `[clients, rows]`."""
  return np.arange(round_rows(int(numbers.max()))) < numbers[:, np.newaxis]


def groups_of(
  buckets: Sequence[Bucket], members: np.ndarray, seeds: np.ndarray
) -> list[cohorts.CohortGroup]:
  """Find the rows of a cohort's members, given by index, in the buckets."""
  groups = []
  for bucket in buckets:
    inside = np.isin(members, bucket.indices)
    positions = np.flatnonzero(inside).astype(np.int32)
    if positions.size:
      rows = np.searchsorted(bucket.indices, members[positions])
      groups.append(
        cohorts.CohortGroup(
          bucket.resident,
          rows.astype(np.int32),
          positions,
          collections.OrderedDict(seed=np.asarray(seeds, np.int32)[positions]),
        )
      )
  return groups
