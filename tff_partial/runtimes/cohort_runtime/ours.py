"""Default runtime of programs, if none was chosen."""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any, cast

import tensorflow_federated as tff

from tff_partial.runtimes.cohort_runtime.cohort import cohort
from tff_partial.runtimes.cohort_runtime.cohort import CohortRuntime
from tff_partial.runtimes.native_runtime.native import NativeRuntime
from tff_partial.runtimes.native_runtime.native import replace_stock_default

# Importing TFF makes a runtime the default, and importing this package replaces
# it. The user chose neither.
_UNCHOSEN = replace_stock_default()


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
  is_ours = isinstance(current, (CohortRuntime, NativeRuntime))
  if is_ours and current is not _UNCHOSEN:
    yield current
    return
  with _shared() as runtime:
    yield runtime
