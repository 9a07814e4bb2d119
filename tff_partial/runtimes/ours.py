"""The runtime under which programs run, if none was chosen."""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any, cast

import tensorflow_federated as tff

from tff_partial.runtimes.cohort import cohort
from tff_partial.runtimes.cohort import CohortRuntime
from tff_partial.runtimes.native import NativeRuntime
from tff_partial.runtimes.native import replace_stock_default

# Importing TFF makes a runtime the default, and importing us another in its
# place. Neither was chosen.
_UNCHOSEN = replace_stock_default()


@functools.cache
def _shared() -> CohortRuntime:
  return cast(CohortRuntime, cohort())


@contextlib.contextmanager
def ours() -> Iterator[Any]:
  """Keep the current runtime if it is one of ours, else takes a `cohort()`.

  That is one and the same until the program ends, so that a second run of a
  process compiles nothing. What only TFF's programs can await, or knows no
  cohorts, is not kept either. Also a decorator, of functions that call
  computations.

  Yields:
    The runtime that is current meanwhile.
  """
  current = tff.framework.get_context_stack().current
  is_ours = isinstance(current, (CohortRuntime, NativeRuntime))
  if is_ours and current is not _UNCHOSEN:
    yield current
    return
  with _shared() as runtime:
    yield runtime
