"""Errors of exports."""

from tff_partial import errors


class ExportError(errors.UserError, ValueError):
  """Raised for a model or settings that cannot be exported."""
