"""Programs that measure what the cohort runtime must show; see README.md."""

import os

# Read when TensorFlow is first imported, also by the processes started here.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
