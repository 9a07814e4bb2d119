"""Tasks with their data, and the binaries that train and measure them."""

import os

# TensorFlow reads it when it is imported; its own notes are not the user's.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

# Before all others, because it says what to do where TFF is missing.
import tff_partial as tff_partial
