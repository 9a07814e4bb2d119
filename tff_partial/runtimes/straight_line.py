"""A federated computation as a straight-line program, cut into waves.

TFF rewrites any computation into a flat list of assignments: intrinsics over
placed values, with TensorFlow graphs at the leaves. Each becomes a `Step`.
Steps at the server run once a round; steps at the clients run once per client,
inside a loop over the cohort. A `federated_aggregate` is the only way from
clients to server, so a step's *wave* is the number of aggregates that must be
finished, one after the other, before it can run:

  server steps of wave 0 · loop 0 · server steps of wave 1 · loop 1 · ...

Most algorithms have one loop. What all clients hold alike (a broadcast, a map
over it) is computed once, with the server's steps. Within one place every intrinsic means the same
thing: a map calls its function, a broadcast or a zip passes its argument on.
"""

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes import intrinsics
from tff_partial.runtimes import leaves
from tff_partial.runtimes import typed_values

framework = tff.framework


class Kind(enum.Enum):
  SERVER = 'at the server'
  CLIENT = 'at each client'
  AGGREGATE = 'from the clients to the server'


# A value's name: that of a local, or the parameter's name and a path into it.
Key = tuple[Any, ...]


@dataclasses.dataclass(eq=False)
class Step:
  """One assignment of the program."""
  key: Key
  block: framework.ComputationBuildingBlock
  type_spec: tff.Type
  kind: Kind
  reads: frozenset[Key]
  # The number of aggregates, in a row, that must be done before.
  wave: int
  is_random: bool = False

  @property
  def uri(self) -> str | None:
    function = getattr(self.block, 'function', None)
    return function.uri if isinstance(function, framework.Intrinsic) else None

  def __str__(self) -> str:
    called = self.block.compact_representation()
    called = called if len(called) < 120 else called[:117] + '...'
    return f'step {self.key[0]} = {called}'


@dataclasses.dataclass(eq=False)
class Argument:
  """A part of the parameter that has one placement."""
  key: Key
  type_spec: tff.Type

  @property
  def name(self) -> str:
    """How errors call it."""
    return '.'.join(['argument', *map(str, self.key[1:])])

  @functools.cached_property
  def reader(self) -> typed_values.Reader:
    """Reads it at the server, or at one client."""
    return typed_values.Reader(self.type_spec)

  @property
  def at_clients(self) -> bool:
    """Whether each client has a value of its own."""
    return (isinstance(self.type_spec, tff.FederatedType) and
            self.type_spec.placement is tff.CLIENTS and
            not self.type_spec.all_equal)


class Program:
  """The steps of a computation, their waves, and how to run one step."""

  def __init__(self, computation: tff.Computation):
    self.type_signature = computation.type_signature
    refuse_sequences(self.type_signature)
    block = intrinsics.prepare(computation)
    if not isinstance(block, framework.CompiledComputation):
      block = framework.to_call_dominant(block)
    self._leaves: dict[bytes, leaves.Leaf] = {}
    self._leaf_of_block: dict[int, leaves.Leaf] = {}
    self._parameter: str | None = None
    self.arguments: dict[Key, Argument] = {}
    self.steps: dict[Key, Step] = {}
    self._read(block)
    self.num_loops = max(
        [step.wave + 1 for step in self.steps.values()
         if step.kind is not Kind.SERVER], default=0)
    self.fingerprint = self._fingerprint()

  # ------------------------------------------------------------- reading
  def _read(self, block: framework.ComputationBuildingBlock) -> None:
    parameter_type = self.type_signature.parameter
    if isinstance(block, framework.CompiledComputation):
      self._parameter = 'argument' if parameter_type is not None else None
      argument = framework.Reference(
          'argument', block.type_signature.parameter
      ) if parameter_type is not None else None
      block = framework.Call(block, argument)
    elif isinstance(block, framework.Lambda):
      self._parameter = block.parameter_name
      block = block.result
    if self._parameter is not None:
      self._add_arguments((self._parameter,), parameter_type)
    assignments = []
    if isinstance(block, framework.Block):
      assignments, block = list(block.locals), block.result
    for name, value in assignments:
      self._add_step(name, value)
    if not isinstance(block, (framework.Reference, framework.Selection,
                              framework.Struct)):
      self._add_step('result', block)
      block = framework.Reference('result', block.type_signature)
    self.result = block

  def _add_arguments(self, key: Key, type_spec: tff.Type) -> None:
    if isinstance(type_spec, tff.StructType) and tff.types.contains(
        type_spec, lambda t: isinstance(t, tff.FederatedType)):
      for index, (_, element) in enumerate(typed_values.fields(type_spec)):
        self._add_arguments((*key, index), element)
    else:
      self.arguments[key] = Argument(key, type_spec)

  def _add_step(self, name: str, block: framework.ComputationBuildingBlock):
    reads = frozenset(self.keys_read(block))
    wave = max([self.wave_of(key) for key in reads], default=0)
    type_spec = block.type_signature
    kind = Kind.SERVER
    if isinstance(type_spec, tff.FederatedType):
      if type_spec.placement is tff.CLIENTS and not type_spec.all_equal:
        kind = Kind.CLIENT
      elif _uri(block) in intrinsics.AGGREGATES:
        kind = Kind.AGGREGATE
    self.steps[(name,)] = Step(
        (name,), block, type_spec, kind, reads, wave, self._is_random(block))

  def wave_of(self, key: Key) -> int:
    """The wave in which the value is there to be read."""
    step = self.steps.get(key)
    if step is None:
      return 0
    return step.wave + (step.kind is Kind.AGGREGATE)

  def is_at_clients(self, key: Key) -> bool:
    """Whether each client has a value of its own under this key."""
    if key in self.arguments:
      return self.arguments[key].at_clients
    return self.steps[key].kind is Kind.CLIENT

  def type_of(self, key: Key) -> tff.Type:
    known = self.arguments.get(key) or self.steps[key]
    return known.type_spec

  def keys_read(self, block: framework.ComputationBuildingBlock,
                bound: frozenset[str] = frozenset()) -> set[Key]:
    """The steps and arguments whose values a block needs."""
    if isinstance(block, (framework.Reference, framework.Selection)):
      path = []
      source = block
      while isinstance(source, framework.Selection):
        path.append(_index(source))
        source = source.source
      if not isinstance(source, framework.Reference):
        return self.keys_read(source, bound)
      if source.name in bound:
        return set()
      if source.name != self._parameter:
        return {(source.name,)}
      wanted = (source.name, *reversed(path))
      return {key for key in self.arguments
              if key[:len(wanted)] == wanted or wanted[:len(key)] == key}
    if isinstance(block, framework.Struct):
      return set().union(*[self.keys_read(b, bound) for b in block])
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

  # ------------------------------------------------------------- running
  def leaf(self, block: framework.CompiledComputation) -> leaves.Leaf:
    """The leaf's function; equal graphs are imported once."""
    known = self._leaf_of_block.get(id(block))
    if known is None:
      key = hashlib.sha256(
          block.proto.SerializeToString(deterministic=True)).digest()
      if key not in self._leaves:
        self._leaves[key] = leaves.Leaf(block)
      known = self._leaf_of_block[id(block)] = self._leaves[key]
    return known

  def environment(self, values: Mapping[Key, typed_values.Nested]) -> dict[
      str, Any]:
    """What the names of the program stand for, given some of the values."""
    names = {key[0]: value for key, value in values.items()
             if key[0] != self._parameter}
    if self._parameter is not None:
      names[self._parameter] = self._assemble((self._parameter,), values)
    return names

  def _assemble(self, key: Key, values: Mapping[Key, typed_values.Nested]):
    if key in self.arguments:
      return values.get(key)
    size = 1 + max([known[len(key)] for known in self.arguments
                    if known[:len(key)] == key], default=-1)
    return [self._assemble((*key, index), values) for index in range(size)]

  def run(self, step: Step, values: Mapping[Key, typed_values.Nested]) -> (
      typed_values.Nested):
    """The value of a step at the server, or at one client."""
    return self.evaluate(step.block, self.environment(values))

  def evaluate(self, block: framework.ComputationBuildingBlock,
               names: Mapping[str, Any]) -> Any:
    """A block's value: nested lists, or a Python function over them."""
    if isinstance(block, framework.Reference):
      return names[block.name]
    if isinstance(block, framework.Struct):
      return [self.evaluate(element, names) for element in block]
    if isinstance(block, framework.Selection):
      return self.evaluate(block.source, names)[_index(block)]
    if isinstance(block, framework.Lambda):
      return self._function(block, names)
    if isinstance(block, framework.Block):
      names = dict(names)
      for name, value in block.locals:
        names[name] = self.evaluate(value, names)
      return self.evaluate(block.result, names)
    if isinstance(block, framework.CompiledComputation):
      return self.leaf(block)
    if isinstance(block, framework.Literal):
      return tf.constant(
          block.value, typed_values.leaf_spec(block.type_signature).dtype)
    if isinstance(block, framework.Call):
      argument = [] if block.argument is None else [
          self.evaluate(block.argument, names)]
      if isinstance(block.function, framework.Intrinsic):
        return intrinsics.run(block.function, *argument)
      return self.evaluate(block.function, names)(*argument)
    raise errors.UnsupportedComputationError(
        f'a {type(block).__name__} block', 'no rule for it')

  def _function(self, block: framework.Lambda,
                names: Mapping[str, Any]) -> Callable[..., Any]:
    if block.parameter_name is None:
      return lambda: self.evaluate(block.result, names)
    return lambda argument: self.evaluate(
        block.result, {**names, block.parameter_name: argument})

  def aggregation(self, step: Step, values) -> intrinsics.Aggregation:
    """The parts of an aggregate; its `value` needs a client's values."""
    names = self.environment(values)
    parts = list(step.block.argument) if isinstance(
        step.block.argument, framework.Struct) else [step.block.argument]
    return intrinsics.AGGREGATES[step.uri](
        step, parts, lambda block: self.evaluate(block, names))

  # ------------------------------------------------------------- describing
  def _is_random(self, block: framework.ComputationBuildingBlock) -> bool:
    return any(leaf.is_random for leaf in self._leaves_in(block))

  def _leaves_in(self, block: framework.ComputationBuildingBlock):
    found = []

    def look(inner):
      if isinstance(inner, framework.CompiledComputation):
        found.append(self.leaf(inner))
      return inner, False

    framework.transform_postorder(block, look)
    return found

  def leaves_of(self, step: Step) -> list[leaves.Leaf]:
    return self._leaves_in(step.block)

  def _fingerprint(self) -> str:
    """The same for the same program in another process, names aside."""
    digest = hashlib.sha256(
        self.type_signature.compact_representation().encode())
    for step in self.steps.values():
      digest.update(f'{step.uri}{step.kind}{step.wave}'.encode())
      for leaf in self.leaves_of(step):
        digest.update(' '.join(leaf.op_types).encode())
    return digest.hexdigest()[:16]


def refuse_sequences(type_spec: tff.FunctionType) -> None:
  """Raises when values that enter or leave are `tf.data` sequences."""
  for place, part in (('parameter', type_spec.parameter),
                      ('result', type_spec.result)):
    if part is not None and tff.types.contains(
        part, lambda t: isinstance(t, tff.SequenceType)):
      raise errors.UnsupportedComputationError(
          f'a sequence in the {place} ({part.compact_representation()})',
          'a sequence is not a dense tensor')


def _index(selection: framework.Selection) -> int:
  if selection.index is not None:
    return selection.index
  names = [name for name, _ in typed_values.fields(
      selection.source.type_signature)]
  return names.index(selection.name)


def _uri(block: framework.ComputationBuildingBlock) -> str | None:
  function = getattr(block, 'function', None)
  return function.uri if isinstance(function, framework.Intrinsic) else None
