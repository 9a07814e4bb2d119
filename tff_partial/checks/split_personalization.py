"""The split-personalization constraint of FURL, sections 3.1 to 3.3.

It makes no difference to training where private parameters are kept, if

  Eq. 1: a user's loss does not depend on other users' private parameters
         (independent local training);
  Eq. 2: the new federated parameters follow from the old ones, from those that
         users trained, and from summaries of the users' data alone;
  Eq. 3: a user's new private parameters follow from its own old and trained
         ones, and from these summaries alone (independent aggregation).

`check_independent_training` looks for violations of Eq. 1 in a centralized
model, `check_independent_aggregation` for those of Eqs. 2 and 3 in a process.
Both draw private parameters at random and see what depends on them. So whatever
they find is a violation, but they miss those that do not show near the drawn
weights.
"""

from typing import NamedTuple

from tff_partial import errors


class CheckError(errors.UserError, ValueError):
  """Raised for a model or process that cannot be checked."""


class Violation(NamedTuple):
  """A violation of the constraint.

  Attributes:
    equation: 1, 2 or 3.
    variable: The variable, or the path into a state, that violates it.
    size: The largest absolute value that should be zero: a gradient (Eq. 1) or
      a change (Eqs. 2 and 3). Infinite for variables that are sent.
    what: A description, with the other variables or users involved.
  """

  equation: int
  variable: str
  size: float
  what: str

  def __str__(self) -> str:
    return (
      f'Eq. {self.equation} does not hold, by {self.size:.3g}: {self.variable} '
      f'{self.what}.'
    )


class Report(NamedTuple):
  """Result of a check.

  Attributes:
    equations: The equations that were checked.
    violations: All violations found.
  """

  equations: tuple[int, ...]
  violations: tuple[Violation, ...]

  @property
  def holds(self) -> bool:
    """True if no violation was found."""
    return not self.violations

  def __str__(self) -> str:
    broken = {violation.equation for violation in self.violations}
    lines = [
      f'Eq. {equation} holds.'
      for equation in self.equations
      if equation not in broken
    ]
    return '\n'.join([*lines, *map(str, self.violations)])
