"""Steps and arguments of a straight-line program."""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
from typing import Any, TypeAlias

import tensorflow_federated as tff

from tff_partial.runtimes.program import intrinsics
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import typed_values

# Name of a value: that of a step, or the parameter's name and a path into it.
Key: TypeAlias = tuple[Any, ...]
Values: TypeAlias = Mapping[Key, typed_values.Nested]


class Kind(enum.Enum):
  """Place where a step runs."""

  SERVER = 'at the server'
  CLIENT = 'at each client'
  AGGREGATE = 'from the clients to the server'


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """Assignment of a program.

  Attributes:
    key: The name of its value.
    block: The block that computes it.
    kind: The place where it runs.
    reads: The values that it needs.
    stage: The number of aggregates, in a row, that must finish before.
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
    """Type of its value."""
    return self.block.type_signature

  @property
  def is_random(self) -> bool:
    """True if it draws random numbers without a seed."""
    return any(leaf.is_random for leaf in self.leaves)

  @property
  def owns_resources(self) -> bool:
    """True if it has variables or tables."""
    return any(leaf.owns_resources for leaf in self.leaves)

  def __str__(self) -> str:
    called = self.block.compact_representation()
    called = called if len(called) < 120 else called[:117] + '...'
    return f'step {self.key[0]} = {called}'


@dataclasses.dataclass(frozen=True, eq=False)
class Argument:
  """Part of the parameter with one placement."""

  key: Key
  type_spec: tff.Type

  @property
  def name(self) -> str:
    """Name in errors."""
    return '.'.join(['argument', *map(str, self.key[1:])])

  @property
  def is_at_clients(self) -> bool:
    """True if each client has its own value."""
    return is_at_clients(self.type_spec)


def is_at_clients(type_spec: tff.Type) -> bool:
  """Check whether values of the type may differ from client to client."""
  return (
    isinstance(type_spec, tff.FederatedType)
    and type_spec.placement is tff.CLIENTS
    and not type_spec.all_equal
  )
