"""One call of a computation: server stages and loops, in order.

`CompiledComputation` is built once per computation and called every round.
"""

from collections.abc import Mapping, Sequence
from concurrent import futures
import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import choices as choices_lib
from tff_partial.runtimes import client_loop
from tff_partial.runtimes import compiled_loop
from tff_partial.runtimes import debugging
from tff_partial.runtimes import feeding
from tff_partial.runtimes import server_stage
from tff_partial.runtimes import straight_line
from tff_partial.runtimes import typed_values

Key = straight_line.Key
Kind = straight_line.Kind

# A client value of at most this many bytes is kept for a later loop rather
# than computed again.
_SMALL = 1 << 14


@dataclasses.dataclass
class Resources:
  """What all computations of a context share.

  Attributes:
    arrays: Resident arrays, on the device.
    chooser: Decides which loops XLA compiles.
    pool: Runs shards side by side; None for one thread.
    debug: Whether clients run one by one, checked step by step.
  """
  arrays: feeding.DeviceArrays
  chooser: choices_lib.Chooser
  pool: futures.Executor | None
  debug: bool


class CompiledComputation:
  """A computation's stages, compiled as they are first needed."""

  def __init__(self, computation: tff.Computation):
    self.program = program = straight_line.Program(computation)
    self.type_signature = computation.type_signature
    parameter = self.type_signature.parameter
    self._reader = parameter and typed_values.Reader(parameter)
    self._result_keys = program.keys_read(program.result)
    steps = self._needed_steps()
    kept = self._kept(steps)
    self.loops = []
    for wave in range(program.num_loops):
      self.loops.append(client_loop.ClientLoop(
          program,
          [s for s in steps if s.kind is Kind.AGGREGATE and s.wave == wave],
          [key for key in self._client_results(steps) | kept
           if program.wave_of(key) == wave],
          frozenset(key for key in kept if program.wave_of(key) < wave)))
    if not self.loops and self._client_results(steps):
      # Client arguments returned as they are still pass through a loop.
      self.loops.append(client_loop.ClientLoop(
          program, [], list(self._client_results(steps)), frozenset()))
    self.server = self._server_stages(steps)

  def _needed_steps(self) -> list[straight_line.Step]:
    program = self.program
    needed, waiting = set(), list(self._result_keys)
    while waiting:
      key = waiting.pop()
      if key in program.steps and key not in needed:
        needed.add(key)
        waiting.extend(program.steps[key].reads)
    return [step for step in program.steps.values() if step.key in needed]

  def _client_results(self, steps) -> set[Key]:
    return {key for key in self._result_keys if self.program.is_at_clients(key)}

  def _kept(self, steps) -> set[Key]:
    """Client values that a later loop reads and must not compute again."""
    program = self.program
    random = set()
    for step in steps:
      if step.kind is Kind.CLIENT and (step.is_random or step.reads & random):
        random.add(step.key)
    kept = set()
    for step in steps:
      if step.kind is Kind.SERVER:
        continue
      for key in step.reads:
        known = program.steps.get(key)
        if known is None or known.kind is not Kind.CLIENT or (
            known.wave >= step.wave):
          continue
        if key in random or _num_bytes(known.type_spec) <= _SMALL:
          kept.add(key)
    return kept

  def _server_stages(self, steps) -> list[server_stage.ServerStage]:
    program = self.program
    computed_in = {}
    for step in steps:
      if step.kind is not Kind.CLIENT:
        computed_in[step.key] = program.wave_of(step.key)
    result = []
    for wave in range(len(self.loops) + 1):
      aggregates = self.loops[wave].aggregates if wave < len(
          self.loops) else []
      later = set(self._result_keys)
      for step in steps:
        if step.kind is Kind.SERVER and step.wave > wave or (
            step.kind is Kind.AGGREGATE and step.wave >= wave):
          later |= step.reads
      for loop in self.loops[wave:]:
        later |= set(loop.shared)
      result.append(server_stage.ServerStage(
          program,
          [s for s in steps if s.kind is Kind.AGGREGATE and
           s.wave == wave - 1],
          [s for s in steps if s.kind is Kind.SERVER and s.wave == wave],
          aggregates,
          sorted((key for key in later if computed_in.get(key) == wave),
                 key=str)))
    return result

  # ------------------------------------------------------------- one round
  def __call__(self, argument: Any, resources: Resources) -> Any:
    values, clients = self._open(argument, resources)
    size, shards = feeding.shards(clients)
    outputs: dict[Key, list[Any]] = {}
    totals: dict[Key, list[tf.Tensor]] = {}
    for wave, server in enumerate(self.server):
      computed, zeros = server(values, totals)
      values.update(computed)
      if wave < len(self.loops):
        totals = self._loop(wave, values, zeros, shards, outputs, resources)
    return self._result(values, outputs, size, shards)

  def _open(self, argument: Any, resources: Resources):
    values, clients = {}, {}
    for part in self.program.arguments.values():
      value = self._part(argument, part.key[1:])
      if part.at_clients:
        clients[part.name] = feeding.open_argument(
            value, part.reader, part.name, resources.arrays)
      else:
        nested = part.reader(value, part.name)
        values[part.key] = typed_values.like(
            nested, map(tf.convert_to_tensor, typed_values.leaves(nested)))
    return values, clients

  def _part(self, argument: Any, path: Sequence[int]) -> Any:
    reader = self._reader
    for index in path:
      argument = reader.elements(argument, 'the arguments')[index]
      reader = reader.named[index][1]
    return argument

  def _loop(self, wave: int, values, zeros, shards: Sequence[feeding.Shard],
            outputs: dict[Key, list[Any]], resources: Resources) -> dict[
                Key, list[tf.Tensor]]:
    loop = self.loops[wave]
    if loop.is_empty or not shards:
      return zeros

    def run(number: int):
      shard = shards[number]
      feeds = shard.feeds()
      kept = {key: outputs[key][number] for key in loop.kept}
      one_by_one = debugging.OneByOne(loop, shard, feeds, kept, values)
      if resources.debug:
        return one_by_one.run(zeros)

      def inputs(stop: int) -> list[tf.Tensor]:
        return compiled_loop.inputs(loop, values, kept, feeds, zeros, stop)

      signature = compiled_loop.Signature.of(feeds, shard.bucket)
      with one_by_one.explaining():
        compiled = resources.chooser.compiled(
            f'{self.program.fingerprint}/{wave}/{signature}', loop, signature,
            inputs(1))
        return compiled.split(compiled(inputs(len(shard))))

    if (resources.pool is None or resources.debug or loop.owns_resources
        or len(shards) == 1):
      results = map(run, range(len(shards)))
    else:
      results = resources.pool.map(run, range(len(shards)))
    merged = None
    for totals, returned in results:
      for key, leaves in returned.items():
        outputs.setdefault(key, []).append(leaves)
      merged = totals if merged is None else loop.merge(merged, totals)
    return merged

  def _result(self, values, outputs, size, shards) -> Any:
    found = dict(values)
    for key in self._result_keys:
      if self.program.is_at_clients(key):
        found[key] = _ClientValues(self._by_client(key, outputs, size, shards))
      elif key in values:
        pattern = values[key]
        found[key] = typed_values.like(pattern, iter(
            [_numpy(leaf) for leaf in typed_values.leaves(pattern)]))
    nested = self.program.evaluate(
        self.program.result, self.program.environment(found))
    return _to_python(nested, self.type_signature.result)

  def _by_client(self, key: Key, outputs, size: int, shards) -> list[Any]:
    clients: list[Any] = [None] * size
    pattern = typed_values.pattern(self.program.type_of(key))
    for shard, tensors in zip(shards, outputs.get(key, [])):
      arrays = [_numpy(tensor) for tensor in tensors]
      for index, position in enumerate(shard.positions):
        clients[position] = typed_values.like(
            pattern, iter([_element(array, index) for array in arrays]))
    return clients


@dataclasses.dataclass
class _ClientValues:
  """A result placed at CLIENTS: one nested value per client."""
  values: list[Any]


def _to_python(nested: Any, type_spec: tff.Type) -> Any:
  return tff.types.type_to_py_container(
      _to_struct(nested, type_spec), type_spec)


def _to_struct(nested: Any, type_spec: tff.Type) -> Any:
  if isinstance(nested, _ClientValues):
    return [typed_values.to_struct(value, type_spec.member)
            for value in nested.values]
  if isinstance(type_spec, tff.FederatedType):
    return typed_values.to_struct(nested, type_spec.member)
  if isinstance(type_spec, tff.StructType):
    return tff.structure.Struct([
        (name, _to_struct(element, element_type))
        for element, (name, element_type) in zip(
            nested, typed_values.fields(type_spec))])
  return nested


def _numpy(leaf: Any) -> Any:
  return leaf.numpy() if hasattr(leaf, 'numpy') else leaf


def _element(array: np.ndarray, index: int) -> Any:
  element = array[index]
  return element.copy() if isinstance(element, np.ndarray) else element


def _num_bytes(type_spec: tff.Type) -> float:
  total = 0
  for spec in typed_values.tensor_specs(type_spec):
    if not spec.shape.is_fully_defined():
      return float('inf')
    total += spec.shape.num_elements() * spec.dtype.size
  return total
