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
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes import typed_values

# A shard of fewer clients costs more to start and merge than it gains.
_CLIENTS_PER_SHARD = 12
_MAX_SHARDS = 8


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
    arguments: The CLIENTS arguments of the whole cohort.
  """
  positions: np.ndarray
  bucket: int
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

  def __init__(self, values: Sequence[Any], type_spec: tff.FederatedType,
               where: str):
    member = type_spec.member
    self._clients = [
        typed_values.leaves(
            typed_values.to_nested(value, member, f'{where}, client {index}'))
        for index, value in enumerate(values)]
    self._shapes: dict[Any, int] = {}
    self._static = all(
        spec.shape.is_fully_defined()
        for spec in typed_values.tensor_specs(member))

  def __len__(self) -> int:
    return len(self._clients)

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

  def __init__(self, cohort: Any, type_spec: tff.FederatedType, where: str,
               arrays: DeviceArrays):
    self._cohort, self._type, self._where = cohort, type_spec.member, where
    self._arrays = arrays
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
    self._leaves = [self._find(group) for group in cohort.groups]

  def __len__(self) -> int:
    return len(self._cohort)

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

  def _find(self, group: Any) -> list[tuple[Any, bool]]:
    """Each leaf of the type, found by name among the group's arrays."""
    if not isinstance(self._type, tff.StructType):
      raise errors.ArgumentError(
          self._where, str(self._type), 'a cohort of named fields',
          'pass a plain list of client values')
    found = []
    for name, element in typed_values.fields(self._type):
      resident = name in group.resident
      if not resident and name not in group.given:
        raise errors.ArgumentError(
            self._where, f'a field `{name}` in the cohort',
            f'{sorted([*group.resident, *group.given])}',
            'give the cohort the fields of the computation\'s type')
      value = (group.resident if resident else group.given)[name]
      found.extend(
          (leaf, resident)
          for leaf in self._walk(value, element, f'{self._where}/{name}'))
    return found

  def _walk(self, value: Any, type_spec: tff.Type, where: str) -> list[Any]:
    if isinstance(type_spec, tff.StructType):
      elements = typed_values.elements_of(value, type_spec, where)
      return [
          leaf for element, (name, element_type) in zip(
              elements, typed_values.fields(type_spec))
          for leaf in self._walk(element, element_type, f'{where}/{name}')]
    spec = typed_values.leaf_spec(type_spec)
    found = 'object' if value.dtype == object else tf.as_dtype(value.dtype).name
    wanted = 'object' if spec.dtype == tf.string else spec.dtype.name
    if found.replace('string', 'object') != wanted or (
        not spec.shape.is_compatible_with(value.shape[1:])):
      raise errors.ArgumentError(
          where, f'{type_spec} for each client',
          f'{found}{list(value.shape[1:])}',
          'convert the arrays to that dtype and shape')
    return [value]


def open_argument(value: Any, type_spec: tff.FederatedType, where: str,
                  arrays: DeviceArrays) -> Values | Groups:
  """Looks at a CLIENTS argument without copying what is resident."""
  if hasattr(value, 'groups'):
    return Groups(value, type_spec, where, arrays)
  if isinstance(value, (str, bytes, Mapping)) or not isinstance(
      value, Sequence):
    raise errors.ArgumentError(
        where, f'a list with a value for each client ({type_spec})',
        f'a {type(value).__name__}', 'put the client values in a list')
  return Values(value, type_spec, where)


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
  result = []
  for members in groups.values():
    members = np.asarray(members)
    for start, end in cut(len(members)):
      positions = members[start:end]
      result.append(Shard(
          positions, bucket_of(len(positions)), list(arguments.values())))
  return size, result
