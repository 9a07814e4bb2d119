"""Filters for TensorFlow's messages about itself.

The package's `__init__` imports this module first, because TensorFlow reads its
log level when it is imported. Set `TF_CPP_MIN_LOG_LEVEL`, or import TensorFlow
before this package, to override it.
"""

import logging
import os

# Otherwise it logs what it did not find, such as GPUs, as errors. Later
# failures are raised, whatever is logged.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


class _Noise(logging.Filter):
  """Filter for lines of TensorFlow's log that users can do nothing about."""

  def filter(self, record: logging.LogRecord) -> bool:
    text = record.getMessage()
    # Each checkpoint is a SavedModel, which TensorFlow announces.
    is_of_checkpoint = text.startswith('Assets written to') and (
      '/checkpoints/round_' in text
    )
    # TFF's secure aggregators check bounds by assertions. These run even if
    # their result is not used.
    is_of_assertion = 'Object was never used' in text and '/Assert/' in text
    return not (is_of_checkpoint or is_of_assertion)


logging.getLogger('tensorflow').addFilter(_Noise())
