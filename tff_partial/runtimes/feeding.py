"""From CLIENTS arguments to shards: what one call of a loop is given.

A cohort is cut into *groups* of clients whose tensors have the same shapes,
and each group into *shards* that may run at the same time. Both cuts look at
the cohort alone, never at the machine, so that a round has the same bits
wherever it runs.

An argument is either a plain sequence of client values, stacked here, or a
cohort whose `groups` name rows of arrays that stay where they are round after
round. The latter are handed to the program whole, once, with the rows to read.
"""

import collections
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes import typed_values

# A shard of fewer clients costs more to start and merge than it gains.
_CLIENTS_PER_SHARD = 24
_MAX_SHARDS = 8

# Padding costs little where a client is fed few bytes, and each size of it is
# one more program to compile: so small shards share one.
_LEAST_BUCKET = 32
_LIGHT = 1 << 16


class DeviceArrays:
  """Tensors of arrays that are the same objects round after round."""

  def __init__(self):
    self._tensors: dict[int, tuple[weakref.ref, tf.Tensor]] = {}

  def tensor(self, array: Any) -> tf.Tensor:
    if isinstance(array, tf.Tensor):
      return array
    known = self._tensors.get(id(array))
    if known is not None and known[0]() is array:
      return known[1]
    tensor = tf.constant(array)
    key = id(array)
    self._tensors[key] = (
        weakref.ref(array, lambda _: self._tensors.pop(key, None)), tensor)
    return tensor


@dataclasses.dataclass
class Feed:
  """A shard's share of one argument, leaf by leaf.

  Attributes:
    tensors: One per leaf, with a leading dimension: the population's rows
      where the leaf is resident, else the shard's clients.
    resident: Which leaves are resident.
    rows: int32 `[bucket]`, the rows of the shard's clients.
  """
  tensors: list[Any]
  resident: tuple[bool, ...]
  rows: np.ndarray


@dataclasses.dataclass
class Shard:
  """Some clients of one group, in cohort order.

  Attributes:
    positions: Their places in the cohort.
    bucket: The leading dimension of what is fed: their number, rounded up, so
      that a program compiled for one size serves many.
    cohort_size: The number of clients in the whole cohort.
    arguments: The CLIENTS arguments of the whole cohort.
  """
  positions: np.ndarray
  bucket: int
  cohort_size: int
  arguments: Sequence['Values | Groups']

  def __len__(self) -> int:
    return len(self.positions)

  def feeds(self) -> list[Feed]:
    """The shard's share of each argument, made when its turn comes."""
    return [a.feed(self.positions, self.bucket) for a in self.arguments]


def bucket_of(size: int) -> int:
  """The least power of two that holds `size` clients."""
  return 1 << max(size - 1, 0).bit_length()


def cut(size: int) -> list[tuple[int, int]]:
  """Start and end of each shard of a group of `size` clients."""
  number = 1
  while number < _MAX_SHARDS and size >= 2 * number * _CLIENTS_PER_SHARD:
    number *= 2
  ends = [size * (shard + 1) // number for shard in range(number)]
  return list(zip([0] + ends[:-1], ends))


def _pad(array: np.ndarray, bucket: int) -> np.ndarray:
  """Repeats the last client: padding is never read, but must be valid."""
  missing = bucket - len(array)
  if not missing:
    return array
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


class Values:
  """An argument that is a plain sequence of client values."""

  def __init__(self, values: Sequence[Any], reader: typed_values.Reader,
               where: str):
    self._clients = [
        typed_values.leaves(reader(value, where, f'client {index}'))
        for index, value in enumerate(values)]
    self._shapes: dict[Any, int] = {}
    self._static = reader.is_static

  def __len__(self) -> int:
    return len(self._clients)

  @property
  def client_bytes(self) -> int:
    """What one client's share costs to feed."""
    return max([sum(leaf.dtype.itemsize * leaf.size for leaf in client)
                for client in self._clients], default=0)

  def group_ids(self) -> list[int]:
    """Clients with equal ids have tensors of equal shapes."""
    if self._static:
      return [0] * len(self)
    return [
        self._shapes.setdefault(
            tuple(tuple(leaf.shape) for leaf in client), len(self._shapes))
        for client in self._clients]

  def feed(self, positions: np.ndarray, bucket: int) -> Feed:
    columns = zip(*[self._clients[position] for position in positions])
    tensors = [_pad(np.stack(column), bucket) for column in columns]
    return Feed(tensors, (False,) * len(tensors),
                np.zeros([bucket], np.int32))


class Groups:
  """An argument that names rows of resident arrays."""

  def __init__(self, cohort: Any, reader: typed_values.Reader, where: str,
               arrays: DeviceArrays):
    self._cohort, self._where, self._arrays = cohort, where, arrays
    self._group_of = np.full([len(cohort)], -1, np.int64)
    self._index_of = np.zeros([len(cohort)], np.int64)
    for number, group in enumerate(cohort.groups):
      self._group_of[group.positions] = number
      self._index_of[group.positions] = np.arange(len(group.positions))
    if (self._group_of < 0).any():
      raise errors.ArgumentError(
          where, 'a cohort whose groups hold every position',
          f'none for position {int(np.argmin(self._group_of))}',
          'give each client to one group')
    self._leaves = [self._find(group, reader) for group in cohort.groups]

  def __len__(self) -> int:
    return len(self._cohort)

  @property
  def client_bytes(self) -> int:
    """What one client's share costs to feed, resident arrays aside."""
    return max([
        array.nbytes // max(len(array), 1) for group in self._leaves
        for array, is_resident in group if not is_resident], default=0)

  def group_ids(self) -> list[int]:
    return self._group_of.tolist()

  def feed(self, positions: np.ndarray, bucket: int) -> Feed:
    number = self._group_of[positions[0]]
    indices = self._index_of[positions]
    rows = _pad(np.asarray(
        self._cohort.groups[number].rows, np.int32)[indices], bucket)
    tensors = [
        self._arrays.tensor(array) if is_resident else
        _pad(np.asarray(array)[indices], bucket)
        for array, is_resident in self._leaves[number]]
    return Feed(tensors, tuple(r for _, r in self._leaves[number]), rows)

  def _find(self, group: Any, reader: typed_values.Reader) -> list[
      tuple[Any, bool]]:
    """Each leaf of the type, found by name among the group's arrays."""
    merged = collections.OrderedDict(group.resident)
    merged.update(group.given)
    stacked = reader.stacked
    found = []
    for element, (name, element_reader) in zip(
        stacked.elements(merged, self._where), stacked.named):
      found.extend(
          (leaf, name not in group.given) for leaf in typed_values.leaves(
              element_reader(element, self._where, name)))
    return found


def open_argument(value: Any, reader: typed_values.Reader, where: str,
                  arrays: DeviceArrays) -> Values | Groups:
  """Looks at a CLIENTS argument without copying what is resident.

  Args:
    value: A sequence of client values, or a cohort with `groups`.
    reader: Reads the value of one client.
    where: What to call the argument in errors.
    arrays: Keeps resident arrays on the device.
  """
  if hasattr(value, 'groups'):
    return Groups(value, reader, where, arrays)
  if isinstance(value, (str, bytes, Mapping)) or not isinstance(
      value, Sequence):
    raise errors.ArgumentError(
        where, f'a list with a value for each client ({reader.type_spec})',
        f'a {type(value).__name__}', 'put the client values in a list')
  return Values(value, reader, where)


def shards(arguments: Mapping[str, Values | Groups]) -> tuple[
    int, list[Shard]]:
  """The number of clients, and the cohort cut into shards."""
  sizes = {name: len(argument) for name, argument in arguments.items()}
  if len(set(sizes.values())) > 1:
    raise errors.CohortSizeError(sizes)
  size = next(iter(sizes.values()), 0)
  groups = collections.OrderedDict()
  ids = zip(*[argument.group_ids() for argument in arguments.values()])
  for position, group in enumerate(ids):
    groups.setdefault(group, []).append(position)
  is_light = all(a.client_bytes <= _LIGHT for a in arguments.values())
  result = []
  for members in groups.values():
    members = np.asarray(members)
    pieces = cut(len(members))
    bucket = bucket_of(max(end - start for start, end in pieces))
    if is_light:
      bucket = max(bucket, _LEAST_BUCKET)
    for start, end in pieces:
      positions = members[start:end]
      result.append(Shard(positions, bucket, size, list(arguments.values())))
  return size, result
