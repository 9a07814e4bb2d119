"""What a loop over clients reads of one argument: arrays, and which rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import enum
from typing import Any, TypeAlias
import weakref

import numpy as np
import tensorflow as tf

from tff_partial.data import resident_arrays
from tff_partial.runtimes import errors
from tff_partial.runtimes.values import readers
from tff_partial.runtimes.values import typed_values


class LeadingAxis(enum.Enum):
  """Meaning of the leading dimension of a tensor."""

  CLIENTS = 'the clients'
  RESIDENT = 'the rows of a population'
  LAID = 'the rows of sequences, end to end'


@dataclasses.dataclass(frozen=True)
class Feed:
  """Some clients' share of one argument, leaf by leaf.

  Attributes:
    tensors: One per leaf; for a sequence, those of `sequences.laid`.
    kinds: The meaning of the leading dimension of each tensor.
    rows: int32, the rows of the clients in a population.
  """

  tensors: Sequence[Any]
  kinds: tuple[LeadingAxis, ...]
  rows: Any


# A feed, or a picklable function that reads it where its loop runs.
MaybeRead: TypeAlias = Feed | Callable[[], Feed]


def opened(feeds: Iterable[MaybeRead]) -> list[Feed]:
  """Return feeds, those read that are not yet."""
  return [feed() if callable(feed) else feed for feed in feeds]


def read_fields(
  unread: Any,
  given: Mapping[str, np.ndarray],
  reader: readers.ValueReader,
  where: str,
) -> Sequence[np.ndarray]:
  """Read some fields of structures; return the leaves with the given ones."""
  fields = {**unread.load(), **given}
  return typed_values.leaves(reader.stacked(fields, where))


class DeviceArrays:
  """Tensors of arrays that are the same objects in every round."""

  def __init__(self) -> None:
    self._tensors: dict[int, tuple[weakref.ref, Any]] = {}

  def tensor(self, array: np.ndarray) -> tf.Tensor:
    """Return the array's tensor, its leading dimension rounded up.

    If `resident_arrays` made the array, the tensor shares its memory.
    """
    key = id(array)
    known = self._tensors.get(key)
    if known is not None and known[0]() is array:
      return known[1]
    tensor = self._made(array)
    forget = weakref.ref(array, lambda _: self._tensors.pop(key, None))
    self._tensors[key] = forget, tensor
    return tensor

  def _made(self, array: np.ndarray) -> Any:
    shared = resident_arrays.with_room(array)
    # In the memory of a GPU, it is always a copy.
    if shared is not None and not tf.config.list_physical_devices('GPU'):
      with contextlib.suppress(tf.errors.InvalidArgumentError):  # For bools.
        return tf.experimental.dlpack.from_dlpack(shared.__dlpack__())
    return tf.constant(pad(array, resident_arrays.rounded(len(array))))

  def here(self, feeds: Sequence[MaybeRead]) -> Sequence[Feed]:
    """Open the feeds for a loop that runs in this process."""
    return opened(feeds)


def pad(array: np.ndarray, size: int) -> np.ndarray:
  """Repeat the last client: padding is never read, but must be valid."""
  missing = size - len(array)
  if not missing or not len(array):
    return array
  return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def fed(
  read: Callable[[], Sequence[np.ndarray]], clients: int, where: str, size: int
) -> Feed:
  """Read the leaves of clients where they run, and return their feed."""
  leaves = read()
  check_lengths(leaves, clients, where)
  tensors = [pad(leaf, size) for leaf in leaves]
  return Feed(
    tensors, (LeadingAxis.CLIENTS,) * len(tensors), np.zeros([size], np.int32)
  )


def check_lengths(leaves: Sequence[np.ndarray], size: int, where: str) -> None:
  """Refuse arrays that do not have one value for each client."""
  for leaf in leaves:
    if len(leaf) != size:
      raise errors.ArgumentError(
        where,
        f'arrays with a leading dimension of {size} clients',
        f'one of the shape {list(leaf.shape)}',
        'stack one value for each client',
      )
