"""Errors of runs."""

from tff_partial import errors


class ProgramError(errors.UserError, ValueError):
  """Raised for a run that is not possible as requested."""


class RunError(errors.UserError, RuntimeError):
  """Raised for what fails in a run: files, or what a client computes."""
