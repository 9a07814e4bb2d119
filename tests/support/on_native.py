"""Runs something on the native runtime, from inside of any other."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Any

import tensorflow_federated as tff

from tff_partial.runtimes.native_runtime.native import native


@contextlib.contextmanager
def running() -> Iterator[Callable[..., Any]]:
  """Within the context, what calls a function with arguments natively."""
  with native() as context:
    install = tff.framework.get_context_stack().install

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
      with install(context):
        return function(*arguments)

    yield run
