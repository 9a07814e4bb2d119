"""The cohort runtime: a whole federated round as a compiled program.

  with tff_partial.runtimes.cohort():
    state = process.initialize()
    state, metrics = process.next(state, clients)

A federated computation is a straight-line program. This runtime runs its
server part, then one loop over the cohort in which every client's values are
computed and added to the accumulators of all aggregates that are ready, then
the rest; all in this process, with no worker and no port. It takes any
`tff.Computation` over dense tensors and knows nothing about what it computes.
"""

from collections.abc import Mapping
from concurrent import futures
import os
from typing import Any
import weakref

import tensorflow as tf
import tensorflow_federated as tff

from tff_partial.runtimes import choices as choices_lib
from tff_partial.runtimes import errors
from tff_partial.runtimes import fallback
from tff_partial.runtimes import feeding
from tff_partial.runtimes import rounds


class CohortContext(tff.framework.SyncContext):
  """Runs any `tff.Computation` over dense tensors in this process."""

  def __init__(self, jit: choices_lib.Jit, threads: int | None, strict: bool,
               debug: bool, choices: Mapping[str, bool] | None):
    self._strict, self._debug = strict, debug
    threads = default_threads() if threads is None else threads
    if threads < 1:
      raise ValueError(f'Expected at least one thread, found {threads}.')
    self._chooser = choices_lib.Chooser(jit, choices, strict, threads)
    self._resources = rounds.Resources(
        feeding.DeviceArrays(), self._chooser,
        futures.ThreadPoolExecutor(threads) if threads > 1 else None, debug)
    self._compiled: dict[Any, rounds.CompiledComputation] = {}
    self._by_identity: dict[int, Any] = {}
    self._fallback = fallback.NativeFallback()
    self._installed: list[Any] = []

  @property
  def choices(self) -> dict[str, bool]:
    """Whether XLA compiles each loop seen so far; JSON can hold it."""
    return dict(self._chooser.choices)

  @property
  def num_compiled(self) -> int:
    """How many loops were compiled so far."""
    return self._chooser.num_compiled

  def invoke(self, comp: tff.Computation, arg: Any) -> Any:
    """Runs a computation; TFF calls this."""
    try:
      compiled = self._compile(comp)
    except errors.UnsupportedComputationError as error:
      if self._strict:
        raise
      return self._fallback.run(comp, arg, error)
    return compiled(arg, self._resources)

  def _compile(self, comp: tff.Computation) -> rounds.CompiledComputation:
    known = self._by_identity.get(id(comp))
    if known is not None and known[0]() is comp:
      return known[1]
    # Equal programs hash alike, so that a process built again is not
    # compiled again.
    if comp not in self._compiled:
      self._compiled[comp] = rounds.CompiledComputation(comp)
    compiled = self._compiled[comp]
    key = id(comp)
    self._by_identity[key] = (
        weakref.ref(comp, lambda _: self._by_identity.pop(key, None)),
        compiled)
    return compiled

  def __enter__(self) -> 'CohortContext':
    installed = tff.framework.get_context_stack().install(self)
    installed.__enter__()
    self._installed.append(installed)
    return self

  def __exit__(self, *exception: Any) -> None:
    self._installed.pop().__exit__(*exception)
    if not self._installed:
      self._fallback.close()


def default_threads() -> int:
  """As many threads as cores that this process may use; one with a GPU."""
  if tf.config.list_physical_devices('GPU'):
    return 1
  return len(os.sched_getaffinity(0))


def cohort(
    jit: choices_lib.Jit = 'auto',
    threads: int | None = None,
    strict: bool = False,
    debug: bool = False,
    choices: Mapping[str, bool] | None = None,
) -> CohortContext:
  """A runtime that compiles whole rounds.

  Use it in a `with`, or make it TFF's default with
  `tff.framework.set_default_context`. Keep it for as long as you run the same
  computations: it holds what was compiled.

  XLA drops assertions: a loop that it compiles does not notice when a
  `tf.debugging.Assert` fails at a client.

  Args:
    jit: Whether XLA compiles the loop over clients. 'auto' measures each loop
      once, with and without, and keeps the faster.
    threads: How many shards of a cohort run side by side; by default one per
      core, or one if there is a GPU. Results do not depend on it.
    strict: Whether to raise an error for what cannot be compiled, such as
      `tf.data` sequences, instead of calling the native runtime; and, with
      `jit=True`, for what XLA refuses.
    debug: Whether to run clients one by one outside the compiled program and
      stop at the first float that is not finite.
    choices: What an earlier context's `choices` said, so that a run that is
      resumed repeats them. Other loops are still measured.

  Returns:
    A context of TFF, and a context manager that installs it.
  """
  return CohortContext(jit, threads, strict, debug, choices)
