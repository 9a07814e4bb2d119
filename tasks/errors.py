"""Mistakes that the person at the command line can put right.

A program prints their text alone; every other exception is a fault of ours and
keeps its stack of frames.
"""

from tff_partial import errors


class TaskError(errors.UserError, ValueError):
  """A mistake whose text is one paragraph: the thing, its place, a remedy."""


class DataError(TaskError):
  """Raised for data that are missing, damaged or asked for in a wrong way."""


class OptionError(TaskError):
  """Raised for an option of a task whose value makes no sense."""
