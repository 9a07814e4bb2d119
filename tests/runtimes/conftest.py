"""Fixtures of the runtimes' tests."""

from collections.abc import Callable, Iterator
import logging
from typing import Any

from absl import logging as absl_logging
import pytest
import tensorflow_federated as tff

from tff_partial.runtimes.native_runtime.native import native


@pytest.fixture(scope='module')
def natively() -> Iterator[Callable[..., Any]]:
  """Calls a function with arguments natively, from inside of any runtime."""
  with native() as context:
    install = tff.framework.get_context_stack().install

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
      with install(context):
        return function(*arguments)

    yield run


@pytest.fixture
def log() -> Iterator[list[str]]:
  """The messages that the runtimes log."""
  messages: list[str] = []
  handler = logging.Handler()
  handler.emit = lambda record: messages.append(record.getMessage())
  logger = absl_logging.get_absl_logger()
  logger.addHandler(handler)
  yield messages
  logger.removeHandler(handler)
