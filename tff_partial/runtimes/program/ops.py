"""The steps and arguments that a straight-line program consists of."""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any, TypeAlias

import tensorflow_federated as tff

from tff_partial.runtimes.program import intrinsics
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import typed_values

# A value's name: that of a step, or the parameter's name and a path into it.
Key: TypeAlias = tuple[Any, ...]
Values: TypeAlias = Mapping[Key, typed_values.Nested]


class Kind(enum.Enum):
  """Where a step runs."""

  SERVER = 'at the server'
  CLIENT = 'at each client'
  AGGREGATE = 'from the clients to the server'


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """One assignment of the program.

  Attributes:
    key: The name of its value.
    block: What computes it.
    kind: Where it runs.
    reads: The values that it needs.
    stage: The number of aggregates, in a row, that must be done before.
    leaves: The graphs in it.
  """

  key: Key
  block: intrinsics.Block
  kind: Kind
  reads: frozenset[Key]
  stage: int
  leaves: Sequence[leaves.Leaf]

  @property
  def type_spec(self) -> tff.Type:
    """The type of its value."""
    return self.block.type_signature

  @property
  def is_random(self) -> bool:
    """Whether it draws randomness of its own."""
    return any(leaf.is_random for leaf in self.leaves)

  @property
  def owns_resources(self) -> bool:
    """Whether it has variables or tables."""
    return any(leaf.owns_resources for leaf in self.leaves)

  def __str__(self) -> str:
    called = self.block.compact_representation()
    called = called if len(called) < 120 else called[:117] + '...'
    return f'step {self.key[0]} = {called}'


@dataclasses.dataclass(frozen=True, eq=False)
class Argument:
  """A part of the parameter that has one placement."""

  key: Key
  type_spec: tff.Type

  @property
  def name(self) -> str:
    """How errors call it."""
    return '.'.join(['argument', *map(str, self.key[1:])])

  @property
  def is_at_clients(self) -> bool:
    """Whether each client has a value of its own."""
    return is_at_clients(self.type_spec)


def is_at_clients(type_spec: tff.Type) -> bool:
  """Whether a value of the type differs from client to client."""
  return (
    isinstance(type_spec, tff.FederatedType)
    and type_spec.placement is tff.CLIENTS
    and not type_spec.all_equal
  )
