"""Computation of a loop over clients: the clients' part of a round.

A loop runs clients one after the other and adds what each sends to
accumulators. This module determines the steps, inputs and outputs;
`compiled_loop` compiles them into a program.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.program import leaves
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import sequences
from tff_partial.runtimes.values import typed_values

Key: TypeAlias = flat_program.Key
Values: TypeAlias = flat_program.Values


class ClientLoop:
  """One stage of client values, and the aggregates over them.

  Attributes:
    program: The program that the loop is a part of.
    aggregates: The aggregates that it accumulates.
    outputs: Values of each client that outlive the loop.
    arguments: The parts of the parameter with a value for each client.
    steps: The steps that each client runs, in order.
    shared: The server values that every client receives.
    kept: Values of each client that an earlier loop kept for this one.
    leaves: The graphs that clients and accumulators run.
    output_specs: The specs of the leaves of `outputs`.
    accumulator_specs: The specs of the leaves of the accumulators.
  """

  def __init__(
    self,
    program: flat_program.Program,
    aggregates: Iterable[flat_program.Step],
    outputs: Iterable[Key],
    kept: frozenset[Key],
  ):
    """Determine what the loop computes; `kept` are values of earlier loops."""
    self.program = program
    self.aggregates, self.outputs = list(aggregates), list(outputs)
    self.arguments = [a for a in program.arguments.values() if a.is_at_clients]
    self._layouts = [
      [
        sequences.SequenceLayout(leaf)
        if isinstance(leaf, tff.SequenceType)
        else None
        for leaf in typed_values.leaves(program.pattern(argument.key))
      ]
      for argument in self.arguments
    ]
    reads: set[Key] = set()
    waiting = [*self.outputs, *[k for s in self.aggregates for k in s.reads]]
    while waiting:
      key = waiting.pop()
      if key in reads:
        continue
      reads.add(key)
      is_computed = key in program.steps and key not in kept
      if is_computed and program.is_at_clients(key):
        waiting.extend(program.steps[key].reads)
    self.steps = [
      step
      for step in program.steps.values()
      if step.key in reads - kept and program.is_at_clients(step.key)
    ]
    self.kept = sorted(reads & kept, key=str)
    self.shared = sorted(
      (key for key in reads if not program.is_at_clients(key)), key=str
    )
    self.leaves: list[leaves.Leaf] = [
      leaf for step in [*self.steps, *self.aggregates] for leaf in step.leaves
    ]
    self.output_specs = [
      spec
      for key in self.outputs
      for spec in typed_values.tensor_specs(program.type_of(key))
    ]
    self._accumulators = [program.accumulator(s) for s in self.aggregates]
    self.accumulator_specs = typed_values.leaves(self._accumulators)

  @property
  def owns_resources(self) -> bool:
    """True if clients have variables, which two threads must not share."""
    return any(leaf.owns_resources for leaf in self.leaves)

  @functools.cached_property
  def reads_sequences(self) -> bool:
    """True if clients receive a sequence."""
    read = [argument.key for argument in self.arguments]
    return any(
      typed_values.has_sequences(self.program.type_of(key))
      for key in [*read, *self.shared]
    )

  @property
  def is_random(self) -> bool:
    """True if clients draw random numbers without a seed."""
    return any(leaf.is_random for leaf in self.leaves)

  def client_inputs(
    self,
    feeds: Sequence[client_feeds.Feed],
    kept: Mapping[Key, Sequence[tf.Tensor]],
    index: tf.Tensor,
  ) -> dict[Key, Any]:
    """Return a client's share of the arguments and of the kept values."""
    # Under XLA, a strided slice at a computed place copies the whole array;
    # `tf.gather` does not.
    values = {}
    for argument, layouts, feed in zip(
      self.arguments, self._layouts, feeds, strict=True
    ):
      row = tf.gather(feed.rows, index)
      fed = iter(zip(feed.tensors, feed.kinds, strict=True))
      flat = []
      for layout in layouts:
        rows = []
        if layout is not None:
          rows = [next(fed)[0] for _ in range(layout.num_components)]
        tensor, kind = next(fed)
        leaf = tf.gather(
          tensor, row if kind is client_feeds.LeadingAxis.RESIDENT else index
        )
        flat.append(leaf if layout is None else layout.dataset(rows, leaf))
      values[argument.key] = typed_values.like(
        self.program.pattern(argument.key), iter(flat)
      )
    for key, stacked in kept.items():
      values[key] = typed_values.like(
        self.program.pattern(key),
        iter([tf.gather(leaf, index) for leaf in stacked]),
      )
    return values

  def returned(self, values: Values) -> list[tf.Tensor]:
    """Return the leaves of one client's outputs."""
    return [
      leaf for key in self.outputs for leaf in typed_values.leaves(values[key])
    ]

  def contributed(self, values: Values) -> list[typed_values.Nested]:
    """Return one client's contribution to each aggregate."""
    return [
      self.program.aggregation(step, values).value() for step in self.aggregates
    ]

  def accumulate(
    self,
    totals: Sequence[tf.Tensor],
    contributed: Sequence[typed_values.Nested],
  ) -> list[tf.Tensor]:
    """Add one client's contributions to the accumulators."""
    nested = typed_values.like(self._accumulators, iter(totals))
    return typed_values.leaves(
      [
        self.program.aggregation(step, {}).accumulate(total, new)
        for step, total, new in zip(
          self.aggregates, nested, contributed, strict=True
        )
      ]
    )

  def merge(
    self, one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]
  ) -> Sequence[tf.Tensor]:
    """Merge the accumulators of shards with those of later shards."""
    return self._merger(*one, *other) if self.aggregates else one

  @functools.cached_property
  def _merger(self) -> Callable[..., list[tf.Tensor]]:
    inputs = self.accumulator_specs * 2

    def merge(*flat: tf.Tensor) -> list[tf.Tensor]:
      left = iter(flat)
      one = typed_values.like(self._accumulators, left)
      other = typed_values.like(self._accumulators, left)
      merged = [
        self.program.aggregation(step, {}).merge(*totals)
        for step, *totals in zip(self.aggregates, one, other, strict=True)
      ]
      return [tf.identity(leaf) for leaf in typed_values.leaves(merged)]

    return graphs.quick(graphs.trace(merge, inputs), inputs)
