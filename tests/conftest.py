"""Settings of all tests: a quiet TensorFlow, names of cases that stay."""

from collections.abc import Iterator
import gc
import os
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

# Tracing makes many objects that stay, so that collecting garbage finds little.
gc.set_threshold(50_000, 20, 20)

# A shell that starts the tests in the background has them ignore Ctrl-C, and
# all programs that they start; some tests are about just that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(scope='module')
def in_cohorts() -> Iterator[None]:
  """Runs the computations of a module on the cohort runtime without XLA."""
  from tff_partial import runtimes

  with runtimes.cohort(jit=False):
    yield


@pytest.fixture(scope='module')
def in_native() -> Iterator[None]:
  """Runs the computations of a module on the native runtime."""
  from tff_partial import runtimes

  with runtimes.native():
    yield
