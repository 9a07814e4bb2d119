"""Experimental: a cohort runtime whose clients run several at a time.

Clients of a shard run in lock-step, as one program with batched operations, by
`tf.vectorized_map`. On a CPU, XLA makes one client at a time faster
(benchmarks/README.md, item 19); on a GPU this was not measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import logging as std_logging
from typing import Any

from absl import logging
import tensorflow as tf

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import client_loop
from tff_partial.runtimes.cohort_runtime import cohort as cohort_lib
from tff_partial.runtimes.cohort_runtime import compiled_loop
from tff_partial.runtimes.cohort_runtime import jit_autotuning
from tff_partial.runtimes.cohort_runtime import loop_inputs
from tff_partial.runtimes.graphs import graphs
from tff_partial.runtimes.lanes import vectorizable
from tff_partial.runtimes.values import typed_values


class LaneLoop(compiled_loop.CompiledLoop):
  """`CompiledLoop` in whose body several clients run in lock-step."""

  def __init__(
    self,
    loop: client_loop.ClientLoop,
    signature: loop_inputs.Signature,
    num_lanes: int,
  ):
    """Trace the loop.

    Raises:
      UnfitForLanesError: If clients of this loop cannot run in lock-step.
    """
    self._num_lanes = min(num_lanes, signature.bucket)
    for is_so, what in (
      (loop.owns_resources, 'clients have variables or tables'),
      (loop.is_random, 'clients draw randomness without a seed'),
      (loop.reads_sequences, 'clients read sequences'),
    ):
      if is_so and self._num_lanes > 1:
        raise vectorizable.UnfitForLanesError(what)
    super().__init__(loop, signature)

  def __call__(
    self, inputs: Sequence[tf.Tensor], jit: bool
  ) -> compiled_loop.Results:
    """Run the loop; if a lane fails, run it again client by client.

    Lanes also run branches that a client would not take, which may fail.
    """
    try:
      return super().__call__(inputs, jit)
    except tf.errors.OpError:
      if self._num_lanes == 1:
        raise
    results = self._without_lanes(inputs, jit)
    logging.warning('Some clients failed in lanes, and ran one by one.')
    return results

  @functools.cached_property
  def _without_lanes(self) -> compiled_loop.CompiledLoop:
    return compiled_loop.CompiledLoop(self._loop, self._signature)

  def _body(
    self,
    flat: Sequence[tf.Tensor],
    stop: tf.Tensor,
    add: compiled_loop.Add,
    loop_over: compiled_loop.LoopOver,
  ) -> Callable[..., Any]:
    """Return the body of the loop, which computes and adds a client a lane."""
    if self._num_lanes == 1:
      return super()._body(flat, stop, add, loop_over)
    if self._is_ragged:
      raise vectorizable.UnfitForLanesError(
        'clients return values of different shapes'
      )

    def body(first: tf.Tensor, doubt: tf.Tensor, *state: Any) -> Any:
      # Spare lanes repeat the last client.
      indices = tf.minimum(first + tf.range(self._num_lanes), stop - 1)
      is_doubtful, client = self._in_lanes(flat, indices)

      def lane(number: tf.Tensor, doubt: tf.Tensor, *state: Any) -> Any:
        added = add(first + number, client(number), doubt, state)
        return number + 1, *added

      return first + self._num_lanes, *loop_over(
        tf.minimum(self._num_lanes, stop - first),
        lane,
        [tf.logical_or(doubt, is_doubtful), *state],
      )

    return body

  def _in_lanes(
    self, flat: Sequence[tf.Tensor], indices: tf.Tensor
  ) -> tuple[tf.Tensor, Callable[[tf.Tensor], compiled_loop.OfClient]]:
    """Compute for several clients in lock-step.

    Args:
      flat: See `Inputs.flat`.
      indices: The clients' indices.

    Returns:
      Whether any of them is in doubt, and a function from a lane to its client.
    """
    pattern: list[typed_values.Nested] = []

    def one(*flat: tf.Tensor) -> list[tf.Tensor]:
      client = self._one(self._open(flat[:-1])[1], flat[-1])
      pattern[:] = client.contributed
      doubt = functools.reduce(tf.logical_or, client.doubts, tf.constant(False))
      return [doubt, *typed_values.leaves(pattern), *client.returned]

    traced = graphs.trace(one, [*self._inputs, tf.TensorSpec([], tf.int32)])
    function = vectorizable.retraced(traced)
    try:
      with _silence():
        doubt, *stacked = tf.vectorized_map(
          lambda index: function(*flat, index, *traced.captured_inputs), indices
        )
    except (
      AssertionError,
      NotImplementedError,
      TypeError,
      ValueError,
    ) as error:
      raise vectorizable.UnfitForLanesError(
        errors.telling_line(error)
      ) from error

    def client(lane: tf.Tensor) -> compiled_loop.OfClient:
      leaves = iter([tf.gather(leaf, lane) for leaf in stacked])
      contributed = typed_values.like(pattern, leaves)
      return compiled_loop.OfClient(contributed, list(leaves), [])

    return tf.reduce_any(doubt), client


@contextlib.contextmanager
def _silence() -> Iterator[None]:
  """Silence warnings of operations that run once for each lane."""
  logger = tf.get_logger()
  level = logger.level
  logger.setLevel(std_logging.CRITICAL)
  try:
    yield
  finally:
    logger.setLevel(level)


def make_loop(
  num_lanes: int,
  strict: bool,
  loop: client_loop.ClientLoop,
  signature: loop_inputs.Signature,
) -> compiled_loop.CompiledLoop:
  """Trace a loop in lanes, or client by client with a warning.

  Raises:
    LanesRefusedError: If it must run in lanes (`strict`), and cannot.
  """
  try:
    return LaneLoop(loop, signature, num_lanes)
  except vectorizable.UnfitForLanesError as error:
    if strict:
      raise LanesRefusedError(str(error)) from error
    logging.warning(
      'Clients cannot run in lanes, and run one by one: %s', error
    )
    return compiled_loop.CompiledLoop(loop, signature)


class LanesRefusedError(errors.CohortRuntimeError):
  """Clients cannot run in lock-step."""

  def __init__(self, reason: str):
    super().__init__(
      'Expected clients that can run in lanes, found that they cannot: '
      f'{reason}; use runtimes.cohort().'
    )


def cohort_in_lanes(
  lanes: int,
  jit: jit_autotuning.Jit = 'auto',
  *,
  threads: int | None = None,
  strict: bool = False,
  choices: Mapping[str, bool] | None = None,
) -> cohort_lib.CohortRuntime:
  """Create a cohort runtime that runs several clients of a shard in lock-step.

  Results differ in their last bits from those of one lane, but are the same
  from run to run. Clients that cannot run so (with variables, sequences or
  unseeded random numbers) run one by one, with a warning.

  Args:
    lanes: How many clients run in lock-step.
    jit: See `runtimes.cohort`. Loops that end at different times for different
      clients, as of training, do not run in lanes under XLA.
    threads: See `runtimes.cohort`.
    strict: See `runtimes.cohort`; also raise an error for clients that cannot
      run in lanes.
    choices: See `runtimes.cohort`.

  Raises:
    ValueError: If `lanes` is less than one.
  """
  if lanes < 1:
    raise ValueError(f'Expected at least one lane, found {lanes}.')
  return cohort_lib.CohortRuntime(
    jit,
    threads,
    strict,
    choices,
    make_loop=functools.partial(make_loop, lanes, strict),
  )
