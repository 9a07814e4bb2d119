"""Loop over the clients of a shard, as one program.

The bound of the loop is a tensor, so that one program serves every shard that
fits into its bucket. Only the outputs of the computation outlive a client.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple, TypeAlias

from absl import logging
import tensorflow as tf

from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import loop_inputs
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.program import flat_program
from tff_partial.runtimes.values import client_batch
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import typed_values
from tff_partial.runtimes.xla import agreement
from tff_partial.runtimes.xla import doubts
from tff_partial.runtimes.xla import reductions

Key: TypeAlias = flat_program.Key


class Results(NamedTuple):
  """Results of a loop over a shard.

  Attributes:
    totals: The leaves of the accumulators.
    outputs: For each output, its leaves, each with one part per client.
  """

  totals: list[tf.Tensor]
  outputs: dict[Key, list[tf.Tensor | client_batch.Ragged]]


class CompiledLoop:
  """`ClientLoop` for one signature; traced once, run with XLA or without."""

  def __init__(
    self, loop: client_loop.ClientLoop, signature: loop_inputs.Signature
  ):
    """Trace the loop for exact shapes."""
    self._loop, self._signature = loop, signature
    self._is_doubted = False
    self._inputs = self._specs()
    self._columns = [client_batch.Column(spec) for spec in loop.output_specs]
    if self._is_ragged:
      # Dimensions that the type leaves open may still follow from the shapes
      # of this group's inputs.
      shapes = graphs.trace(self._returned, self._inputs).output_shapes
      self._columns = [
        client_batch.Column(tf.TensorSpec(shape, spec.dtype))
        for shape, spec in zip(shapes, loop.output_specs, strict=True)
      ]
    self._traced = graphs.trace(self._run, self._inputs)

  def __call__(self, inputs: Sequence[tf.Tensor], jit: bool) -> Results:
    """Run the loop, with XLA or without; see `Inputs.flat`.

    A loop runs again without XLA where XLA may differ from kernels.
    """
    if jit:
      is_doubtful, results = self.run(inputs, jit=True)
      if not is_doubtful.numpy():
        return results
      if not self._is_doubted:
        self._is_doubted = True
        logging.warning(
          'XLA computes something else for some clients (of NaN, an index out '
          'of range, an integer divided by zero, or the like). Their loop runs '
          'again without XLA, now and whenever that happens.'
        )
    return self.run(inputs, jit=False)[1]

  def run(
    self, inputs: Sequence[tf.Tensor], jit: bool
  ) -> tuple[tf.Tensor, Results]:
    """Run the loop; return whether its results are in doubt, and these."""
    is_doubtful, *results_of_loop = (self._jitted if jit else self._plain)(
      *inputs
    )
    results = iter(results_of_loop)
    totals = [next(results) for _ in self._loop.accumulator_specs]
    leaves = iter([column.read(results) for column in self._columns])
    pattern = self._loop.program.pattern
    outputs = {
      key: [next(leaves) for _ in typed_values.leaves(pattern(key))]
      for key in self._loop.outputs
    }
    return is_doubtful, Results(totals, outputs)

  @property
  def _is_ragged(self) -> bool:
    return any(column.is_ragged for column in self._columns)

  @functools.cached_property
  def _plain(self) -> Callable[..., list[tf.Tensor]]:
    return graphs.quick(self._traced, self._inputs)

  @functools.cached_property
  def _jitted(self) -> Callable[..., list[tf.Tensor]]:
    if self._is_ragged:
      raise agreement.UnfitForXlaError(
        'a client returns a value whose shape is unknown before it has run'
      )
    if self._loop.is_random:
      raise agreement.UnfitForXlaError(
        'clients draw randomness without a seed, and XLA would draw the same '
        'in every run'
      )
    if self._loop.reads_sequences:
      raise agreement.UnfitForXlaError(
        'clients read sequences, which XLA does not know'
      )
    if not agreement.are_nans_kept():
      raise agreement.UnfitForXlaError(
        'XLA loses NaN in maxima: XLA_FLAGS say so, or XLA was used before '
        'this package was imported'
      )
    with reductions.folded():
      traced = graphs.trace(self._run, self._inputs, jit=True)
    return graphs.quick(traced, self._inputs)

  def _specs(self) -> list[tf.TensorSpec]:
    """Return the specs of `Inputs.flat`."""
    loop, bucket = self._loop, self._signature.bucket
    specs = [tf.TensorSpec([], tf.int32)]
    for key in loop.shared:
      specs.extend(typed_values.tensor_specs(loop.program.type_of(key)))
    for key in loop.kept:
      for spec in typed_values.tensor_specs(loop.program.type_of(key)):
        specs.append(tf.TensorSpec([bucket] + spec.shape, spec.dtype))
    for tensors, _ in self._signature.feeds:
      specs.extend(tf.TensorSpec(shape, dtype) for dtype, shape in tensors)
      specs.append(tf.TensorSpec([bucket], tf.int32))
    return [*specs, *loop.accumulator_specs]

  def _open(
    self, flat: Sequence[tf.Tensor]
  ) -> tuple[tf.Tensor, loop_inputs.Inputs]:
    """Return the bound of the loop, and the inputs that `flat` flattened."""
    loop, left = self._loop, iter(flat)
    pattern = loop.program.pattern
    stop = next(left)
    return stop, loop_inputs.Inputs(
      {key: typed_values.like(pattern(key), left) for key in loop.shared},
      {
        key: [next(left) for _ in typed_values.leaves(pattern(key))]
        for key in loop.kept
      },
      [
        client_feeds.Feed([next(left) for _ in tensors], kinds, next(left))
        for tensors, kinds in self._signature.feeds
      ],
      list(left),
    )

  def _client(
    self, inputs: loop_inputs.Inputs, index: tf.Tensor
  ) -> client_loop.Values:
    """Compute all values of one client."""
    loop = self._loop
    values = {
      **inputs.values,
      **loop.client_inputs(inputs.feeds, inputs.kept, index),
    }
    for step in loop.steps:
      values[step.key] = loop.program.evaluate(step.block, values)
    return values

  def _returned(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    _, inputs = self._open(flat)
    return self._loop.returned(self._client(inputs, tf.constant(0)))

  def _run(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    loop = self._loop
    stop, inputs = self._open(flat)
    count = len(inputs.totals)

    def body(index: tf.Tensor, doubt: tf.Tensor, *state: Any) -> list[Any]:
      with doubts.noticed() as noticed:
        values = self._client(inputs, index)
        returned = loop.returned(values)
        totals = [
          tf.ensure_shape(leaf, spec.shape)
          for leaf, spec in zip(
            loop.accumulate(state[:count], loop.contributed(values)),
            loop.accumulator_specs,
            strict=True,
          )
        ]
      arrays = iter(state[count:])
      written = [
        array
        for column, leaf in zip(self._columns, returned, strict=True)
        for array in column.write(arrays, index, leaf)
      ]
      doubt = functools.reduce(tf.logical_or, noticed, doubt)
      return [index + 1, doubt, *totals, *written]

    arrays = [
      array
      for column in self._columns
      for array in column.arrays(self._signature.bucket, stop)
    ]
    results = tf.while_loop(
      lambda index, *_: index < stop,
      body,
      [tf.constant(0), tf.constant(False), *inputs.totals, *arrays],
      shape_invariants=[
        tf.TensorShape([]),
        tf.TensorShape([]),
        *[spec.shape for spec in loop.accumulator_specs],
        *[tf.TensorShape(None) for _ in arrays],
      ],
      parallel_iterations=1,
    )[1:]
    written = iter(results[1 + count :])
    stacked = [
      tensor for column in self._columns for tensor in column.stack(written)
    ]
    return [*results[: 1 + count], *stacked]
