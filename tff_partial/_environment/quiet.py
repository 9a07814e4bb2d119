"""Keeps what TensorFlow says about itself out of the way of what matters.

The package's `__init__` imports this module first, because TensorFlow reads how
much to say when it is imported. Whoever sets `TF_CPP_MIN_LOG_LEVEL`, or imports
TensorFlow before, decides for themselves.
"""

import logging
import os

# Otherwise it names what it looked for and did not find, such as GPUs, as
# errors. What fails later is raised, whatever is logged.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


class _Noise(logging.Filter):
  """Drops lines of TensorFlow's log that a user can do nothing about."""

  def filter(self, record: logging.LogRecord) -> bool:
    text = record.getMessage()
    # Each checkpoint is a SavedModel, which TensorFlow announces.
    is_of_checkpoint = text.startswith('Assets written to') and (
      '/checkpoints/round_' in text
    )
    # TFF's secure aggregators check bounds by assertions. These run, whether or
    # not anybody uses their result.
    is_of_assertion = 'Object was never used' in text and '/Assert/' in text
    return not (is_of_checkpoint or is_of_assertion)


logging.getLogger('tensorflow').addFilter(_Noise())
