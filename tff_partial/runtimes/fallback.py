"""Sends what the cohort runtime cannot compile to the native runtime."""

from concurrent import futures
from typing import Any

from absl import logging
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes import native


class NativeFallback:
  """A native runtime that starts with the first computation it is given."""

  def __init__(self) -> None:
    self._logged: set[tff.Computation] = set()
    self._native: Any = None
    self._thread: futures.ThreadPoolExecutor | None = None

  def run(
    self,
    computation: tff.Computation,
    argument: Any,
    error: errors.UnsupportedComputationError,
  ) -> Any:
    """Runs a computation natively, and says once per computation why."""
    if computation not in self._logged:
      self._logged.add(computation)
      logging.warning(
        'The native runtime, which is slower, runs the computation %s: it '
        'holds %s, and %s.',
        computation.type_signature.compact_representation(),
        error.what,
        error.why,
      )
    if self._thread is None:
      self._native = native.native()
      # TFF's context stack belongs to a thread. Entered in one of its own,
      # the worker stays, and the stack of the caller is as it was.
      self._thread = futures.ThreadPoolExecutor(
        1, initializer=self._native.__enter__
      )
    return self._thread.submit(
      self._native.invoke, computation, argument
    ).result()

  def close(self) -> None:
    """Ends the worker, if there is one; another `run` starts a new one."""
    if self._thread is not None:
      self._thread.submit(self._native.__exit__, None, None, None)
      self._thread.shutdown()
      self._thread = None
