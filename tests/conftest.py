"""What holds for all tests: TensorFlow keeps its remarks to itself."""

import os

# Read when TensorFlow is first imported, hence before any test module is. Also
# inherited by the programs that tests start.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
