"""What holds for all tests: a quiet TensorFlow, and names that stay."""

import os
import signal

# Read when TensorFlow is first imported, hence before any test module is. Also
# inherited by the programs that tests start.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# Test files run side by side, so that no kernel needs more than one core.
os.environ.setdefault('TF_NUM_INTRAOP_THREADS', '1')

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
