"""What holds for all tests: a quiet TensorFlow, names that stay, slow ones."""

import collections
from collections.abc import Iterator
import os
import pathlib
import signal
import sys

import pytest

# Read when TensorFlow is first imported, hence before any test module is. Also
# inherited by the programs that tests start.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# Test files run side by side, so that no kernel needs more than one core.
os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')
if sys.version_info >= (3, 12):
  # TFF can be imported there after it, and tests import both by their names.
  import tff_partial as tff_partial

# A shell that starts the tests in the background has them ignore Ctrl-C, and
# all programs that they start; some tests are about just that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


# The tests that `make test` leaves out, a line each: one case, or a function
# with all its cases. Written by `make test-all ARGS=--note-slow=2`, where 2 is
# in seconds. What is not in it, such as a new test, is run.
_SLOW = pathlib.Path(__file__).with_name('slow_tests.txt')
_seconds: collections.Counter[str] = collections.Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds --note-slow."""
  parser.addoption(
    '--note-slow',
    type=float,
    metavar='SECONDS',
    help=f'Write into {_SLOW.name} which tests take longer.',
  )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Marks slow tests, before pytest chooses by marks."""
  slow = set(_SLOW.read_text(encoding='utf-8').splitlines())
  for item in items:
    is_slow = not slow.isdisjoint((item.nodeid, item.nodeid.split('[')[0]))
    if is_slow and item.get_closest_marker('quick') is None:
      item.add_marker(pytest.mark.slow)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
  """Counts what a test and its own fixtures take."""
  _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
  """Writes down which tests are slow, if that is asked for."""
  limit = session.config.getoption('--note-slow')
  if limit is None or hasattr(session.config, 'workerinput'):
    return
  slow = sorted(name for name, taken in _seconds.items() if taken > limit)
  _SLOW.write_text(''.join(f'{name}\n' for name in slow), encoding='utf-8')


def pytest_make_parametrize_id(
  config: object, val: object, argname: str
) -> str | None:
  """Names cases of bytes by their place.

  Workers must find the same names, and bytes can differ between two seconds:
  an archive's hold its time.
  """
  del config
  return argname if isinstance(val, bytes) else None


def _current_runtime() -> object:
  """None where no test has needed TFF yet."""
  tff = sys.modules.get('tensorflow_federated')
  return tff and tff.framework.get_context_stack().current


@pytest.fixture(scope='module', autouse=True)
def _runtime_stays() -> Iterator[None]:
  """Fails the module that leaves another runtime to the modules after it."""
  before = _current_runtime()
  yield
  assert before in (None, _current_runtime())
