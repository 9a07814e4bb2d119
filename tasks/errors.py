"""Errors that the user of the command line can fix.

A program prints only their message; any other exception is a bug, and shows its
stack trace.
"""

from tff_partial import errors


class TaskError(errors.UserError, ValueError):
  """An error whose message is one paragraph: problem, place and remedy."""


class DataError(TaskError):
  """Raised for data that are missing, damaged or wrongly requested."""


class OptionError(TaskError):
  """Raised for an option of a task whose value makes no sense."""
