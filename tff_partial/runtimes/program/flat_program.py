"""Federated computation as a straight-line program, cut into stages.

TFF rewrites any computation into a flat list of assignments: intrinsics over
placed values, with TensorFlow graphs at the leaves. Each becomes a `Step`.
Steps at the server run once a round; steps at the clients run once per client,
inside a loop over the cohort. A `federated_aggregate` is the only way from
clients to server, so a step's *stage* is the number of aggregates that must
finish, one after the other, before it can run:

  server steps of stage 0 · loop 0 · server steps of stage 1 · loop 1 · ...

Most algorithms have one loop. Values that are equal at all clients (a
broadcast, a map over it) are computed once, with the server's steps.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import enum
import functools
import hashlib
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.program import evaluator
from tff_partial.runtimes.program import intrinsics
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import typed_values

framework = tff.framework
Block = intrinsics.Block

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
    return typed_values.is_at_clients(self.type_spec)


class Program:
  """Steps of a computation, and methods to run one.

  Attributes:
    arguments: The parts of the parameter.
    steps: The steps, in an order in which they can run.
    result: The block of the result, which names steps and arguments.
    fingerprint: A hash that is the same for a program in every process.
  """

  def __init__(self, computation: tff.Computation):
    """Read a computation.

    Raises:
      UnsupportedComputationError: If it has parts without a rule here.
    """
    self._type = computation.type_signature
    _refuse_other_types(self._type)
    self._evaluator = evaluator.Evaluator()
    self._patterns: dict[Key, typed_values.Nested] = {}
    self._parameter: str | None = None
    self.arguments: dict[Key, Argument] = {}
    self.steps: dict[Key, Step] = {}
    self.result = self._read(_flatten(computation))
    self.fingerprint = self._fingerprint()

  def _read(self, block: Block) -> Block:
    """Note arguments and steps; return the block of the result."""
    parameter = self._type.parameter
    if isinstance(block, framework.CompiledComputation):
      argument = None
      if parameter is not None:
        self._parameter = 'argument'
        argument = framework.Reference('argument', parameter)
      block = framework.Call(block, argument)
    elif isinstance(block, framework.Lambda):
      self._parameter = block.parameter_name
      block = block.result
    if self._parameter is not None:
      self._add_arguments((self._parameter,), parameter)
    assignments: Sequence[tuple[str, Block]] = ()
    if isinstance(block, framework.Block):
      assignments, block = block.locals, block.result
    for name, value in assignments:
      self._add_step(name, value)
    if isinstance(
      block, framework.Reference | framework.Selection | framework.Struct
    ):
      return block
    self._add_step('result', block)
    return framework.Reference('result', block.type_signature)

  def _add_arguments(self, key: Key, type_spec: tff.Type) -> None:
    if isinstance(type_spec, tff.StructType) and tff.types.contains(
      type_spec, lambda inner: isinstance(inner, tff.FederatedType)
    ):
      for index, (_, element) in enumerate(typed_values.fields(type_spec)):
        self._add_arguments((*key, index), element)
    else:
      self.arguments[key] = Argument(key, type_spec)

  def _add_step(self, name: str, block: Block) -> None:
    kind = Kind.SERVER
    if _uri(block) in intrinsics.AGGREGATES:
      kind = Kind.AGGREGATE
    elif typed_values.is_at_clients(block.type_signature):
      kind = Kind.CLIENT
    reads = frozenset(self.keys_read(block))
    self.steps[(name,)] = Step(
      (name,),
      block,
      kind,
      reads,
      max([self.stage_of(key) for key in reads], default=0),
      self._evaluator.leaves_in(block),
    )

  def _fingerprint(self) -> str:
    digest = hashlib.sha256(self._type.compact_representation().encode())
    for step in self.steps.values():
      digest.update(f'{_uri(step.block)} {step.kind} {step.stage}'.encode())
      for leaf in step.leaves:
        # Names and order within a graph depend on what was traced before.
        digest.update(' '.join(sorted(leaf.op_types)).encode())
    return digest.hexdigest()[:16]

  @functools.cached_property
  def keys(self) -> list[Key]:
    """All keys; a place here means the same value in every process.

    The names in them are TFF's, whose counter goes on from program to program.
    """
    return [*self.arguments, *self.steps]

  def stage_of(self, key: Key) -> int:
    """Return the first stage in which a value can be read."""
    step = self.steps.get(key)
    if step is None:
      return 0
    return step.stage + (step.kind is Kind.AGGREGATE)

  def is_at_clients(self, key: Key) -> bool:
    """Check whether each client has its own value for this key."""
    if key in self.arguments:
      return self.arguments[key].is_at_clients
    return self.steps[key].kind is Kind.CLIENT

  @functools.cached_property
  def shows_order(self) -> bool:
    """True if an aggregate visibly depends on the order of clients.

    Sums of numbers do, but in their last bits only. Strings and concatenated
    rows do visibly.
    """
    return any(
      spec.dtype == tf.string or not spec.shape.is_fully_defined()
      for step in self.steps.values()
      if step.kind is Kind.AGGREGATE
      for spec in typed_values.leaves(self.accumulator(step))
    )

  def type_of(self, key: Key) -> tff.Type:
    """Return the type of a value."""
    return (self.arguments.get(key) or self.steps[key]).type_spec

  def pattern(self, key: Key) -> typed_values.Nested:
    """Return the nesting of a value; see `typed_values.pattern`."""
    if key not in self._patterns:
      self._patterns[key] = typed_values.pattern(self.type_of(key))
    return self._patterns[key]

  def keys_read(
    self, block: Block, bound: frozenset[str] = frozenset()
  ) -> set[Key]:
    """Return the keys of the steps and arguments that a block needs."""
    if isinstance(block, framework.Reference | framework.Selection):
      path: list[int] = []
      while isinstance(block, framework.Selection):
        path.insert(0, evaluator.index_of(block))
        block = block.source
      if not isinstance(block, framework.Reference):
        return self.keys_read(block, bound)
      if block.name in bound:
        return set()
      if block.name != self._parameter:
        return {(block.name,)}
      wanted = (block.name, *path)
      return {
        key
        for key in self.arguments
        if key[: len(wanted)] == wanted or wanted[: len(key)] == key
      }
    if isinstance(block, framework.Struct):
      return {key for inner in block for key in self.keys_read(inner, bound)}
    if isinstance(block, framework.Call):
      keys = self.keys_read(block.function, bound)
      if block.argument is not None:
        keys |= self.keys_read(block.argument, bound)
      return keys
    if isinstance(block, framework.Lambda):
      return self.keys_read(block.result, bound | {block.parameter_name})
    if isinstance(block, framework.Block):
      keys = set()
      for name, value in block.locals:
        keys |= self.keys_read(value, bound)
        bound |= {name}
      return keys | self.keys_read(block.result, bound)
    return set()

  def evaluate(self, block: Block, values: Values) -> typed_values.Nested:
    """Compute the value of a block, at the server or at one client."""
    return self._evaluator.evaluate(block, self._names(values))

  def aggregation(
    self, step: Step, values: Values
  ) -> intrinsics.AggregateParts:
    """Return an aggregate's functions, given the values that they read."""
    names = self._names(values)
    return intrinsics.AGGREGATES[step.block.function.uri](
      list(step.block.argument),
      lambda block: self._evaluator.evaluate(block, names),
    )

  def accumulator(self, step: Step) -> typed_values.Nested:
    """Return the nested specs of an aggregate's accumulator."""
    return self.aggregation(step, {}).accumulator

  def _names(self, values: Values) -> dict[str, Any]:
    """Return the values of the program's names."""
    names = {key[0]: value for key, value in values.items() if len(key) == 1}
    if self._parameter is not None:
      names[self._parameter] = self._assemble((self._parameter,), values)
    return names

  def _assemble(self, key: Key, values: Values) -> typed_values.Nested:
    """Build the parameter, with None for parts without a value."""
    if key in self.arguments:
      return values.get(key)
    places = [
      known[len(key)] for known in self.arguments if known[: len(key)] == key
    ]
    return [
      self._assemble((*key, index), values)
      for index in range(max(places, default=-1) + 1)
    ]


def _flatten(computation: tff.Computation) -> Block:
  """Flatten a program into assignments, all of known intrinsics."""
  try:
    block = tff.tensorflow.replace_intrinsics_with_bodies(
      computation.to_building_block()
    )[0]
    if not isinstance(block, framework.CompiledComputation):
      block = framework.to_call_dominant(block)
  except (TypeError, ValueError, NotImplementedError) as error:
    raise errors.UnsupportedComputationError(
      'a program that TFF cannot flatten', str(error)
    ) from error

  def check(inner: Block) -> tuple[Block, bool]:
    unknown = None
    if isinstance(inner, framework.Data | framework.Placement):
      unknown = f'a {type(inner).__name__} block'
    if isinstance(inner, framework.Intrinsic) and (
      inner.uri not in intrinsics.KNOWN
    ):
      unknown = f'the intrinsic {inner.uri}'
    if unknown:
      raise errors.UnsupportedComputationError(unknown, 'it has no rule here')
    return inner, False

  framework.transform_postorder(block, check)
  return block


def _refuse_other_types(type_spec: tff.FunctionType) -> None:
  """Refuse arguments and results that cannot be fed and fetched."""
  function = 'a function cannot be fed to a graph'
  refused = [
    (tff.FunctionType, 'a function', 'parameter', function),
    (tff.FunctionType, 'a function', 'result', function),
    (
      tff.SequenceType,
      'a sequence',
      'result',
      'a sequence is not a dense tensor',
    ),
  ]
  for kind, what, place, why in refused:
    part = getattr(type_spec, place)
    if part is not None and tff.types.contains(
      part, lambda inner, kind=kind: isinstance(inner, kind)
    ):
      raise errors.UnsupportedComputationError(
        f'{what} in the {place} ({part.compact_representation()})', why
      )


def _uri(block: Block) -> str | None:
  function = getattr(block, 'function', None)
  return function.uri if isinstance(function, framework.Intrinsic) else None
