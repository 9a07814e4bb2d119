"""Padding of clients to one of a few capacities, so that few shapes occur."""

import collections
from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tff_partial.data import cohorts
from tff_partial.data import examples
from tff_partial.data import lengths as lengths_lib
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


# Limits on the effort to save padding: the maximum number of buckets, the ratio
# of a capacity to the next smaller one, and the bytes up to which padding does
# not justify another bucket. Padding of examples costs only memory.
_OF_EXAMPLES = 3, 4, 2**28
# Padding of tables and of sequences also costs time whenever all of their rows
# or steps are processed.
_OF_TABLES = 8, 2, 2**16


def _default_capacities(
  counts: np.ndarray, example_bytes: int, effort: tuple[int, int, int]
) -> list[int]:
  """Return one capacity, and smaller ones if they save much padding.

  A compiling runtime compiles each capacity as another shape.
  """
  most, ratio, wasted_bytes = effort
  capacities = [max(int(counts.max()), 1)]
  while len(capacities) < most:
    inside = counts <= capacities[-1]
    wasted = (capacities[-1] - counts[inside]).sum() * example_bytes
    smaller = -(-capacities[-1] // ratio)
    if wasted <= wasted_bytes or not (counts <= smaller).any():
      break
    capacities.append(smaller)
  return sorted(capacities)


def fill(
  client_ids: Sequence[str],
  flat: Any,
  offsets: np.ndarray,
  capacities: Sequence[int] | None,
  num_rows: Mapping[str, np.ndarray],
  lengths: lengths_lib.Lengths | None = None,
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
    lengths: See `lengths_of`.
    round_rows: Rounds these up, so that few sizes occur.

  Raises:
    ClientDataError: If a client has more examples than the largest capacity, or
      longer ones.
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
  sizes: Sequence[int] = [0]
  of_length = np.zeros_like(which)
  if lengths is not None:
    sizes = lengths.sizes
    of_length = places(client_ids, lengths.steps, sizes, _WORDS_OF_STEPS)
  buckets = []
  for (number, capacity), (place, length) in itertools.product(
    enumerate(capacities), enumerate(sizes)
  ):
    indices = np.flatnonzero((which == number) & (of_length == place))
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

    cut = flat if lengths is None else _cut(flat, lengths, length)
    resident = collections.OrderedDict(
      examples=examples.map_fields(pad, cut), count=held.astype(np.int32)
    )
    if num_rows:
      resident['rows'] = collections.OrderedDict(
        # Masks of each client's rows of a table.
        (name, np.arange(round_rows(int(n[indices].max()))) < n[indices, None])
        for name, n in num_rows.items()
      )
    buckets.append(Bucket(resident, indices))
  return buckets


def _cut(flat: Any, lengths: lengths_lib.Lengths, length: int) -> Any:
  """Return examples whose fields of open length have a given one."""
  return examples.map_fields(
    lambda array, is_open: (
      lengths_lib.cut_or_padded(array, length) if is_open else array
    ),
    flat,
    lengths.are_open,
  )


_WORDS_OF_EXAMPLES = '{} examples', 'capacities', 'cut the client'
_WORDS_OF_STEPS = 'sequences of {} steps', 'lengths', 'cut the sequences'


def lengths_of(
  example_spec: examples.ExampleSpec,
  flat: Any,
  offsets: np.ndarray,
  given: Sequence[int] | None = None,
) -> lengths_lib.Lengths | None:
  """Find the lengths to which clients' sequences are padded.

  Args:
    example_spec: Spec of one example.
    flat: Nested arrays `[all examples, ...]`.
    offsets: `[clients + 1]`: client i has examples offsets[i] to offsets[i+1].
    given: The lengths; a few suitable ones if None or empty.

  Returns:
    The lengths, or None if no field's length is open.

  Raises:
    ClientDataError: If lengths are given, and no field's is open.
  """
  if not lengths_lib.are_open(example_spec):
    if given is not None:
      raise examples.ClientDataError(
        f'lengths={given!r}: no field of an example has an open length. Leave '
        'it out, or begin the model with `Input([None])`.'
      )
    return None
  steps = lengths_lib.num_steps(flat['x'], example_spec['x'], offsets)
  are_open = examples.map_fields(lengths_lib.is_open, example_spec)
  sizes = given
  if sizes is None or not len(sizes):
    step_bytes = sum(
      array.nbytes // max(array.shape[1], 1)
      for array, is_open in zip(
        tf.nest.flatten(flat), tf.nest.flatten(are_open), strict=True
      )
      if is_open
    )
    sizes = _default_capacities(steps, step_bytes // len(steps), _OF_TABLES)
  return lengths_lib.Lengths(steps, sorted(sizes), are_open)


def places(
  client_ids: Sequence[str],
  counts: np.ndarray,
  capacities: Sequence[int],
  said: tuple[str, str, str] = _WORDS_OF_EXAMPLES,
) -> np.ndarray:
  """Find the smallest capacity, of ascending ones, that holds each client.

  Raises:
    ClientDataError: If a client has more examples than the largest capacity;
      `said` has the words for examples, the capacities and the remedy.
  """
  if counts.max() > capacities[-1]:
    what, option, remedy = said
    raise examples.ClientDataError(
      f'Client {client_ids[int(counts.argmax())]!r} has '
      f'{what.format(counts.max())} but the largest bucket holds '
      f'{capacities[-1]}. Add a larger one to `{option}`, or {remedy}.'
    )
  return np.searchsorted(capacities, counts)


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
