"""Errors of the cohort runtime.

Every message says what was expected, what was found, and what to do.
"""

from tff_partial.errors import UserError


class CohortRuntimeError(UserError):
  """Base of all errors that the cohort runtime raises itself."""


class ArgumentError(CohortRuntimeError, TypeError):
  """An argument does not have the type that the computation declares."""

  def __init__(self, where: str, expected: str, found: str, advice: str):
    super().__init__(f'{where}: expected {expected}, found {found}; {advice}.')


class CohortSizeError(CohortRuntimeError, ValueError):
  """Two CLIENTS arguments disagree about the number of clients."""

  def __init__(self, sizes: dict[str, int]):
    listed = ', '.join(f'{name} has {size}' for name, size in sizes.items())
    super().__init__(
      'Expected the same number of clients in every argument placed at '
      f'CLIENTS, found: {listed}; pass one value per client in each.'
    )


class UnsupportedComputationError(CohortRuntimeError, NotImplementedError):
  """The cohort runtime cannot compile a part of the computation."""

  def __init__(self, what: str, why: str):
    self.what, self.why = what, why
    super().__init__(
      f'Expected a computation over dense tensors, found {what}: {why}; '
      'call `cohort(strict=False)` to run it on the native runtime, or pass '
      'the data as dense tensors.'
    )


class ClientComputationError(CohortRuntimeError):
  """The computation of one client failed."""

  def __init__(
    self, client: int, cohort_size: int, step: str, shapes: str, reason: str
  ):
    self.client, self.step, self.reason = client, step, reason
    super().__init__(
      f'Client {client} of {cohort_size} (its place in the cohort, counted '
      f'from 0) failed in {step}, given {shapes}: {reason}'
    )


def telling_line(error: Exception) -> str:
  """Return the line of TensorFlow's message that states the problem."""
  lines = [line.strip() for line in str(error).split('\n') if line.strip()]
  idle = ('Graph execution error', 'Detected at node', 'File ', 'Traceback')
  telling = [line for line in lines if not line.startswith((*idle, '<stack'))]
  return (telling or lines or [type(error).__name__])[0][:300]
