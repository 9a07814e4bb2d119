"""Cohort runtime: a whole federated round as a compiled program.

  with tff_partial.runtimes.cohort():
    state = process.initialize()
    output = process.next(state, clients)

A federated computation is a straight-line program. This runtime runs its
server part, then one loop over the cohort in which every client's values are
computed and added to the accumulators of all aggregates that are ready, then
the rest; all in this process, with no worker and no port. It runs any
`tff.Computation` over tensors and sequences of them.

  flat_program    reads a computation as operations, in stages
  schedule        sorts them into server stages and loops over clients
  sequences       reads data sets as arrays and passes them to clients
  data_loops      makes clients loop over data sets, which starts faster
  client_inputs   feeds a loop; resident arrays are used in place
  sharding        cuts a cohort into shards, depending on the cohort alone
  compiled_loop   compiles a loop over a shard into one program
  jit_autotuning  chooses whether XLA compiles a loop
  operations      finds random operations, and state that outlives a call
  agreement       lists where XLA and kernels agree; `doubts` detects the rest
  rounds          runs stages and shards
  merging         merges the totals of shards, always in the same tree
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import functools
import itertools
import os
from typing import Any, cast, TypeAlias
import weakref

from absl import logging
import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.cohort_runtime import jit_autotuning as choices_lib
from tff_partial.runtimes.cohort_runtime import rounds
from tff_partial.runtimes.native_runtime import native
from tff_partial.runtimes.values import client_feeds
from tff_partial.runtimes.values import typed_values

Jit: TypeAlias = choices_lib.Jit
_Compiled: TypeAlias = (
  rounds.CompiledComputation | errors.UnsupportedComputationError
)
_Convert: TypeAlias = Callable[[Iterator[Any]], Any]


@dataclasses.dataclass(eq=False)
class _Kept:
  """What a context keeps of equal computations, and its last call's number."""

  compiled: _Compiled
  last_call: int = 0


class _CohortContext:
  """Base of both kinds of context: programs, and a place on TFF's stack."""

  def __init__(
    self,
    jit: Jit,
    threads: int | None,
    strict: bool,
    choices: Mapping[str, bool] | None,
    workers: Any = None,
  ):
    threads = default_threads() if threads is None else threads
    if threads < 1:
      raise ValueError(f'Expected at least one thread, found {threads}.')
    self._strict = strict
    self._chooser = choices_lib.Chooser(jit, choices, strict, threads)
    self._resources = rounds.Resources(
      client_feeds.DeviceArrays() if workers is None else workers.arrays,
      self._chooser,
      futures.ThreadPoolExecutor(threads) if threads > 1 else None,
      workers,
    )
    # Equal programs are equal keys, so that a process that is built again is
    # not compiled again. Comparing them is slow: once per object.
    self._kept: dict[tff.Computation, _Kept] = {}
    self._known: dict[int, tuple[weakref.ref, _Kept, _Convert]] = {}
    self._calls = itertools.count()
    self._logged: set[tff.Computation] = set()
    self._installed: list[Any] = []

  @property
  def choices(self) -> dict[str, bool]:
    """Choice of XLA for each loop seen so far; JSON can hold it.

    Save it with a checkpoint, and pass it to the context that resumes.
    """
    return dict(self._chooser.choices)

  def recall(self, choices: Mapping[str, bool]) -> None:
    """Adopt the `choices` of an earlier runtime, for loops not yet compiled."""
    self._chooser.choices.update(choices)

  @property
  def num_compiled(self) -> int:
    """Number of loops compiled so far."""
    return self._chooser.num_compiled

  def _run(self, computation: tff.Computation, argument: Any) -> Any:
    compiled, convert = self._compile(computation)
    if isinstance(compiled, errors.UnsupportedComputationError):
      if self._strict:
        raise compiled.with_traceback(None)
      return self._run_natively(computation, argument, compiled)
    try:
      return compiled(argument, convert, self._resources)
    except errors.UnsupportedComputationError as error:
      if self._strict:  # A sequence that cannot be read as arrays.
        raise
      return self._run_natively(computation, argument, error)

  def _run_natively(
    self,
    computation: tff.Computation,
    argument: Any,
    error: errors.UnsupportedComputationError,
  ) -> Any:
    """Run what cannot be compiled, and log why once per computation."""
    if computation not in self._logged:
      self._logged.add(computation)
      logging.warning(
        'The native runtime, which is slower, runs a computation: it holds '
        '%s, and %s.',
        error.what,
        error.why,
      )
    return self._native.invoke(computation, argument)

  @functools.cached_property
  def _native(self) -> native.NativeRuntime:
    # It starts with its first computation. It is not on TFF's context stack:
    # that belongs to a thread, and a runtime may be dropped, and ended, in
    # another one.
    return native.NativeRuntime(compiler=_for_worker)

  def _compile(
    self, computation: tff.Computation
  ) -> tuple[_Compiled, _Convert]:
    known = self._known.get(id(computation))
    if known is None or known[0]() is not computation:
      kept = self._kept.get(computation)
      if kept is None:
        try:
          kept = _Kept(rounds.CompiledComputation(computation))
        except errors.UnsupportedComputationError as error:
          kept = _Kept(error.with_traceback(None))
        if len(self._kept) >= rounds.MOST_PROGRAMS:
          self._forget_oldest()
        self._kept[computation] = kept
      convert = typed_values.converter(computation.type_signature.result)
      known = weakref.ref(computation), kept, convert
      self._known[id(computation)] = known
    _, kept, convert = known
    kept.last_call = next(self._calls)
    return kept.compiled, convert

  def _forget_oldest(self) -> None:
    """Forget the program whose last call is longest ago."""
    computation, oldest = min(
      self._kept.items(), key=lambda item: item[1].last_call
    )
    del self._kept[computation]
    self._known = {
      key: known for key, known in self._known.items() if known[1] is not oldest
    }
    if isinstance(oldest.compiled, rounds.CompiledComputation):
      self._chooser.forget(oldest.compiled.loops)

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
      runtime = self.__dict__.pop('_native', None)
      if runtime is not None:
        runtime.close()
      if self._resources.workers is not None:
        self._resources.workers.close()

  def set_default(self) -> None:
    """Make this the default context, for calls outside any `with`."""
    tff.framework.set_default_context(self)


def _for_worker(computation: tff.Computation) -> object:
  """Compile for the worker: secure sums in the clear, as in compiled rounds."""
  return tff.backends.native.desugar_and_transform_to_native(
    tff.backends.test.replace_secure_intrinsics_with_bodies(computation)
  )


class CohortRuntime(_CohortContext, tff.framework.SyncContext):
  """Context that runs a computation when called and returns its result."""

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Run a computation; TFF calls this."""
    return self._run(comp, arg)


class AsyncCohortRuntime(_CohortContext, tff.framework.AsyncContext):
  """Context that runs a computation when awaited, one at a time."""

  async def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Run a computation; TFF calls this."""
    if asyncio.iscoroutine(arg):
      arg = await arg
    return self._run(comp, arg)


def default_threads() -> int:
  """Return the default number of threads: usable cores, or one with a GPU."""
  if tf.config.list_physical_devices('GPU'):
    return 1
  if hasattr(os, 'sched_getaffinity'):  # On Linux.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def cores_for_clients() -> bool:
  """Spread the cores over the cohort's clients instead of within kernels.

  Every core has a shard of the cohort to work on. Small kernels, such as
  convolutions of a client's few images, then take longer in several threads
  than in one, and those of oneDNN round their sums by the number of threads.
  Call it before TensorFlow computes anything; without it, or with a GPU, each
  kernel may use all cores, which suits a cohort of one client.

  Returns:
    True if a kernel has one thread now; False if there is a GPU, or if
    TensorFlow has started with another number of threads.
  """
  if tf.config.list_physical_devices('GPU'):
    return False
  with contextlib.suppress(RuntimeError):
    tf.config.threading.set_intra_op_parallelism_threads(1)
  return tf.config.threading.get_intra_op_parallelism_threads() == 1


def cohort(
  jit: Jit = 'auto',
  threads: int | None = None,
  *,
  strict: bool = False,
  choices: Mapping[str, bool] | None = None,
  asynchronous: bool = False,
) -> CohortRuntime | AsyncCohortRuntime:
  """Create a runtime that compiles whole rounds.

  Keep one for a whole run: it holds the compiled programs and the resident
  arrays of client data.

  XLA drops the errors of kernels, and differs in NaN and random floats. Loops
  with an operation on which the two disagree run without XLA; where they agree
  for most inputs, a compiled loop detects the others and runs again without
  XLA. So values and errors do not depend on `jit`.

  Args:
    jit: Whether XLA compiles the loop over clients. 'auto' measures each loop
      once, with and without, on the first client that it meets, and keeps the
      faster for all. On a CPU, long convolutions are not tried with XLA.
    threads: How many shards of a cohort run in parallel; by default one per
      core, or one if there is a GPU. Results do not depend on it. See also
      `cores_for_clients`.
    strict: Whether to raise an error for computations that cannot be compiled,
      such as those with functions as arguments, or for data that cannot be read
      as dense arrays, such as a data set whose elements differ in shape,
      instead of calling the native runtime; and, with `jit=True`, for loops
      that XLA refuses.
    choices: The `choices` of an earlier runtime, so that a resumed run repeats
      them. Other loops are still measured.
    asynchronous: Whether computations are awaited, as TFF's programs and
      `tff.program.NativeFederatedContext` require, instead of called.

  Returns:
    A context for `with` or for TFF's context stack; `set_default` makes it the
    default.
  """
  options = (jit, threads, strict, choices)
  if asynchronous:
    return AsyncCohortRuntime(*options)
  return CohortRuntime(*options)


# Importing TFF makes a runtime the default, and importing this package replaces
# it. The user chose neither.
_UNCHOSEN = native.replace_stock_default()


@functools.cache
def _shared() -> CohortRuntime:
  return cast(CohortRuntime, cohort())


@contextlib.contextmanager
def ours() -> Iterator[Any]:
  """Keep the current runtime if it is one of ours, else use a `cohort()`.

  The latter is the same until the program ends, so that a second run of a
  process compiles nothing. Runtimes that only TFF's programs can await, or that
  know no cohorts, are not kept either. Also a decorator for functions that call
  computations.

  Yields:
    The runtime in use.
  """
  current = tff.framework.get_context_stack().current
  is_ours = isinstance(current, CohortRuntime | native.NativeRuntime)
  if is_ours and current is not _UNCHOSEN:
    yield current
    return
  with _shared() as runtime:
    yield runtime
