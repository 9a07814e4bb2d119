"""Native runtime for computations that the cohort runtime cannot compile."""

import threading
from typing import Any

from absl import logging
import tensorflow_federated as tff

from tff_partial.runtimes import errors
from tff_partial.runtimes.native_runtime import native


class NativeFallback:
  """Native runtime that starts with its first computation.

  It is not on TFF's context stack: that belongs to a thread, and a runtime may
  be dropped, and ended, in another one.
  """

  def __init__(self) -> None:
    self._logged: set[tff.Computation] = set()
    self._lock = threading.Lock()
    self._native: native.NativeRuntime | None = None

  def run(
    self,
    computation: tff.Computation,
    argument: Any,
    error: errors.UnsupportedComputationError,
  ) -> Any:
    """Run a computation natively, and log why once per computation."""
    with self._lock:
      if computation not in self._logged:
        self._logged.add(computation)
        logging.warning(
          'The native runtime, which is slower, runs a computation: it holds '
          '%s, and %s.',
          error.what,
          error.why,
        )
      if self._native is None:
        self._native = native.NativeRuntime(compiler=_compiled)
      runtime = self._native
    return runtime.invoke(computation, argument)

  def close(self) -> None:
    """End the worker, if any; another `run` starts a new one."""
    with self._lock:
      if self._native is not None:
        self._native.close()
        self._native = None


def _compiled(computation: tff.Computation) -> object:
  """Compile for the worker: secure sums in the clear, as in compiled rounds."""
  return tff.backends.native.desugar_and_transform_to_native(
    tff.backends.test.replace_secure_intrinsics_with_bodies(computation)
  )
