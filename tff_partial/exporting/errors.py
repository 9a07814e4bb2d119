"""What is raised where a model cannot be exported."""

from tff_partial import errors


class ExportError(errors.UserError, ValueError):
  """Raised for a model or for settings that cannot be exported."""
