"""Benchmarks of the cohort runtime; see README.md."""

import os

# Read when TensorFlow is first imported, also by child processes.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
