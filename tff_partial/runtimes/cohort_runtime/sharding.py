"""Cut of a cohort into shards, which may run in parallel.

A cohort consists of *groups* of clients whose tensors have the same shapes,
and a group of *shards*. Both cuts depend on the cohort alone, never on the
machine, so that a round has the same bits wherever it runs.
"""

import collections
from collections.abc import Mapping
import dataclasses

import numpy as np

from tff_partial.runtimes import errors
from tff_partial.runtimes.values import client_inputs

# A shard of fewer clients costs more to start and to merge than it gains. All
# shards of fewer than 256 clients have at most 32, hence share a program.
_CLIENTS_PER_SHARD = 16
# From this many shards on, more of them help only with more workers than that,
# and each should be worth sending.
_MANY_SHARDS = 8
_CLIENTS_PER_SHARD_OF_MANY = 128
# None should be so large that a few of them do not fit into memory.
_BYTES_PER_SHARD_OF_MANY = 1 << 25

# Padding costs little where few bytes are fed for a client.
_LEAST_BUCKET = 32
_FEW_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Shard:
  """Some clients of one group, in cohort order.

  Attributes:
    positions: Their places in the cohort.
    bucket: The leading dimension of their feeds: their number, rounded up, so
      that a program compiled for one size serves many.
    cohort_size: The number of clients in the whole cohort.
  """

  positions: np.ndarray
  bucket: int
  cohort_size: int

  def __len__(self) -> int:
    return len(self.positions)


def cut(
  arguments: Mapping[str, client_inputs.Clients], in_order: bool = False
) -> list[Shard]:
  """Cut a cohort into shards.

  Args:
    arguments: The CLIENTS arguments, by their names.
    in_order: Whether the clients of a shard, and the shards, must follow one
      another as in the cohort. Then a group starts wherever shapes change.
  """
  sizes = {name: len(argument) for name, argument in arguments.items()}
  if len(set(sizes.values())) > 1:
    raise errors.CohortSizeError(sizes)
  size = next(iter(sizes.values()), 0)
  clients = list(arguments.values())
  groups = collections.defaultdict(list)
  numbers = [argument.groups for argument in clients]
  runs, last = 0, None
  for position, group in enumerate(zip(*numbers, strict=True)):
    runs += group != last
    last = group
    groups[runs if in_order else group].append(position)
  is_light = all(a.client_bytes <= _FEW_BYTES for a in clients)
  client_bytes = sum(a.client_bytes for a in clients)
  shards = []
  for members in groups.values():
    ends = _ends(len(members), client_bytes)
    bucket = 1 << (max(np.diff([0, *ends])) - 1).item().bit_length()
    if is_light:
      bucket = max(bucket, _LEAST_BUCKET)
    for positions in np.split(np.asarray(members), ends[:-1]):
      shards.append(Shard(positions, bucket, size))
  return shards


def _ends(size: int, client_bytes: int) -> list[int]:
  """Return the ends of the shards of a group of `size` clients."""
  of_many = max(
    _CLIENTS_PER_SHARD,
    min(
      _CLIENTS_PER_SHARD_OF_MANY,
      _BYTES_PER_SHARD_OF_MANY // max(client_bytes, 1),
    ),
  )
  number = 1
  while size >= 2 * number * (
    _CLIENTS_PER_SHARD if number < _MANY_SHARDS else of_many
  ):
    number *= 2
  return [size * (shard + 1) // number for shard in range(number)]
