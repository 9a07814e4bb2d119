"""The cohort runtime: a whole federated round as a compiled program.

  with tff_partial.runtimes.cohort():
    state = process.initialize()
    output = process.next(state, clients)

A federated computation is a straight-line program. This runtime runs its
server part, then one loop over the cohort in which every client's values are
computed and added to the accumulators of all aggregates that are ready, then
the rest; all in this process, with no worker and no port. It takes any
`tff.Computation` over tensors and sequences of them, and knows nothing about
what it computes.

  flat_program    reads a computation as operations, in stages
  schedule        sorts them into server stages and loops over clients
  sequences       reads data sets as arrays, and hands them to clients
  data_loops      has clients loop over them, which starts sooner
  client_inputs   what a loop is fed; resident arrays are used where they lie
  sharding        cuts a cohort into shards, by looking at the cohort alone
  compiled_loop   a loop over a shard as one program
  lanes           several clients in lock-step
  jit_autotuning  whether XLA compiles it
  operations      what draws at random, and what would outlive a call
  agreement       where XLA computes what kernels do; doubts notices where not
  rounds          runs stages and shards
  merging         merges what shards leave, in one and the same tree
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import os
from typing import Any, TypeAlias
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import client_inputs
from tff_partial.runtimes import errors
from tff_partial.runtimes import fallback
from tff_partial.runtimes import jit_autotuning as choices_lib
from tff_partial.runtimes import rounds
from tff_partial.runtimes import typed_values

Jit: TypeAlias = choices_lib.Jit
_Compiled: TypeAlias = (
  rounds.CompiledComputation | errors.UnsupportedComputationError
)
_Convert: TypeAlias = Callable[[Iterator[Any]], Any]


class _Runtime:
  """What both kinds of context share: programs, and a place on TFF's stack."""

  def __init__(
    self,
    jit: Jit,
    threads: int | None,
    strict: bool,
    debug: bool,
    choices: Mapping[str, bool] | None,
    workers: rounds.Workers | None = None,
    lanes: int = 1,
  ):
    """Start nothing yet.

    Args:
      jit: See `cohort`.
      threads: See `cohort`.
      strict: See `cohort`.
      debug: See `cohort`.
      choices: See `cohort`.
      workers: Other processes that run shards, as long as a context is open.
      lanes: See `cohort`.
    """
    threads = default_threads() if threads is None else threads
    if threads < 1:
      raise ValueError(f'Expected at least one thread, found {threads}.')
    self._strict = strict
    self._chooser = choices_lib.Chooser(jit, choices, strict, threads, lanes)
    self._resources = rounds.Resources(
      client_inputs.DeviceArrays() if workers is None else workers.arrays,
      self._chooser,
      futures.ThreadPoolExecutor(threads) if threads > 1 else None,
      debug,
      workers,
    )
    # Equal programs are equal keys, so that a process that is built again is
    # not compiled again. To compare them takes long: once per object.
    self._compiled: dict[tff.Computation, _Compiled] = {}
    self._known: weakref.WeakValueDictionary[int, tff.Computation] = (
      weakref.WeakValueDictionary()
    )
    self._of_known: dict[int, tuple[_Compiled, _Convert]] = {}
    self._fallback = fallback.NativeFallback()
    self._installed: list[Any] = []

  @property
  def choices(self) -> dict[str, bool]:
    """Whether XLA compiles each loop seen so far; JSON can hold it.

    Save it with a checkpoint, and hand it to the context that goes on.
    """
    return dict(self._chooser.choices)

  def recall(self, choices: Mapping[str, bool]) -> None:
    """Take over what an earlier runtime chose, for loops not yet compiled.

    Args:
      choices: Its `choices`.
    """
    self._chooser.choices.update(choices)

  @property
  def num_compiled(self) -> int:
    """How many loops were compiled so far."""
    return self._chooser.num_compiled

  def _run(self, computation: tff.Computation, argument: Any) -> Any:
    compiled, convert = self._compile(computation)
    if isinstance(compiled, errors.UnsupportedComputationError):
      if self._strict:
        raise compiled.with_traceback(None)
      return self._fallback.run(computation, argument, compiled)
    try:
      return compiled(argument, convert, self._resources)
    except errors.UnsupportedComputationError as error:
      if self._strict:  # A sequence that cannot be read as arrays.
        raise
      return self._fallback.run(computation, argument, error)

  def _compile(
    self, computation: tff.Computation
  ) -> tuple[_Compiled, _Convert]:
    key = id(computation)
    if self._known.get(key) is not computation:
      if computation not in self._compiled:
        try:
          self._compiled[computation] = rounds.CompiledComputation(computation)
        except errors.UnsupportedComputationError as error:
          self._compiled[computation] = error.with_traceback(None)
      self._known[key] = computation
      self._of_known[key] = (
        self._compiled[computation],
        typed_values.converter(computation.type_signature.result),
      )
    return self._of_known[key]

  def __enter__(self) -> Any:
    if self._resources.workers is not None:
      self._resources.workers.start()
    place = tff.framework.get_context_stack().install(self)
    place.__enter__()
    self._installed.append(place)
    return self

  def __exit__(self, *exception: Any) -> None:
    self._installed.pop().__exit__(*exception)
    if not self._installed:
      self._fallback.close()
      if self._resources.workers is not None:
        self._resources.workers.close()

  def set_default(self) -> None:
    """Run what is called outside any `with` here."""
    tff.framework.set_default_context(self)


class CohortRuntime(_Runtime, tff.framework.SyncContext):
  """Runs a computation when it is called, and returns its result."""

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Run a computation; TFF calls this."""
    return self._run(comp, arg)


class AsyncCohortRuntime(_Runtime, tff.framework.AsyncContext):
  """Runs a computation when it is awaited, one at a time."""

  async def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Run a computation; TFF calls this."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    return self._run(comp, arg)


def default_threads() -> int:
  """As many threads as cores that this process may use; one with a GPU."""
  if tf.config.list_physical_devices('GPU'):
    return 1
  if hasattr(os, 'sched_getaffinity'):  # On Linux.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def cores_for_clients() -> bool:
  """Lets the cores share a cohort among them, and not each kernel as well.

  Every core has a shard of the cohort to work on. Kernels that are small, such
  as convolutions of a client's few images, then take longer in several threads
  than in one, and those of oneDNN round their sums by the number of threads. To
  be called before TensorFlow computes anything; without this, or with a GPU,
  each kernel may use all cores, which suits a cohort of one client.

  Returns:
    Whether a kernel has one thread now. It has not if there is a GPU, or if
    TensorFlow has begun to compute with others.
  """
  if tf.config.list_physical_devices('GPU'):
    return False
  with contextlib.suppress(RuntimeError):
    tf.config.threading.set_intra_op_parallelism_threads(1)
  return tf.config.threading.get_intra_op_parallelism_threads() == 1


def cohort(
  jit: Jit = 'auto',
  threads: int | None = None,
  strict: bool = False,
  debug: bool = False,
  choices: Mapping[str, bool] | None = None,
  asynchronous: bool = False,
  lanes: int = 1,
) -> CohortRuntime | AsyncCohortRuntime:
  """A runtime that compiles whole rounds.

  Keep one for a whole run: it holds what was compiled, and the resident arrays
  of client data.

  XLA drops the errors of kernels, and has other ideas of NaN and of random
  floats. What holds an operation that the two do not agree about runs without
  it; where they agree for most inputs, a compiled loop notices the others, and
  is run again without XLA. So values and errors do not depend on `jit`.

  Args:
    jit: Whether XLA compiles the loop over clients. 'auto' measures each loop
      once, with and without, on the first client that it meets, and keeps the
      faster for all. On a CPU, long convolutions are not tried with XLA.
    threads: How many shards of a cohort run side by side; by default one per
      core, or one if there is a GPU. Results do not depend on it. See
      `cores_for_clients`, too.
    strict: Whether to raise an error for what cannot be compiled, such as
      functions as arguments, or for what cannot be read as dense arrays, such
      as a data set whose elements differ in shape, instead of calling the
      native runtime; and, with `jit=True`, for what XLA refuses.
    debug: Whether to run clients one by one outside the compiled program and
      stop at the first float that is not finite.
    choices: What an earlier runtime's `choices` said, so that a run that is
      resumed repeats them. Other loops are still measured.
    asynchronous: Whether its computations are awaited, as TFF's programs and
      `tff.program.NativeFederatedContext` want, instead of called.
    lanes: How many clients of a shard run in lock-step, as one program with
      batched operations. Results differ in their last bits from those of one
      lane, and are the same from run to run. What cannot run so (a client with
      variables, with sequences, with randomness of its own) runs one by one,
      with a warning.

  Returns:
    A context for `with`, for TFF's context stack, or for its method
    `set_default`.
  """
  options = (jit, threads, strict, debug, choices, None, lanes)
  if asynchronous:
    return AsyncCohortRuntime(*options)
  return CohortRuntime(*options)
