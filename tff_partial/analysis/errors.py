"""The error of an analysis."""

from tff_partial import errors


class AnalysisError(errors.UserError, ValueError):
  """Raised for runs, embeddings or assignments that cannot be analysed."""
