"""Fixtures of the runtimes' tests."""

from collections.abc import Callable, Iterator
import logging
from typing import Any

from absl import logging as absl_logging
import pytest

from tests.support import on_native


@pytest.fixture(scope='module')
def natively() -> Iterator[Callable[..., Any]]:
  """Runs something on the native runtime."""
  with on_native.running() as run:
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
