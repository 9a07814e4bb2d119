"""What holds for all tests: TensorFlow keeps its remarks to itself."""

import os
import signal

# Read when TensorFlow is first imported, hence before any test module is. Also
# inherited by the programs that tests start.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

# A shell that starts the tests in the background has them ignore Ctrl-C, and
# all programs that they start; some tests are about just that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)
