"""What goes wrong with a run."""

from tff_partial import errors


class ProgramError(errors.UserError, ValueError):
  """Raised for a run that cannot be carried out as asked."""
