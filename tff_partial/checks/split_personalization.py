"""The split-personalization constraint of FURL, sections 3.1 to 3.3.

Where private parameters are kept makes no difference to training, if

  Eq. 1: a user's loss does not depend on other users' private parameters
         (independent local training);
  Eq. 2: the new federated parameters follow from the old ones, from those that
         users trained, and from summaries of the users' data alone;
  Eq. 3: a user's new private parameters follow from its own old and trained
         ones, and from these summaries alone (independent aggregation).

`check_independent_training` looks for what breaks Eq. 1 in a centralized model,
`check_independent_aggregation` for what breaks Eqs. 2 and 3 in a process. Both
change some private parameters, drawn at random, and see what else changes. So
what they find is a breach, and a breach that shows at no weights near those
that were drawn is not found.
"""

from typing import NamedTuple

from tff_partial import errors


class CheckError(errors.UserError, ValueError):
  """Raised for what cannot be checked as it is given."""


class Violation(NamedTuple):
  """One way in which the constraint is broken.

  Attributes:
    equation: 1, 2 or 3.
    variable: What breaks it: a variable, or a path into a state.
    size: The largest number, in absolute value, that had to be zero: a gradient
      (Eq. 1) or a change (Eqs. 2 and 3). Infinite for what is sent.
    what: What happens, and to which variables.
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
  """What a check came to.

  Attributes:
    equations: The equations that were checked.
    violations: All that was found.
  """

  equations: tuple[int, ...]
  violations: tuple[Violation, ...]

  @property
  def holds(self) -> bool:
    """Whether nothing was found that breaks the constraint."""
    return not self.violations

  def __str__(self) -> str:
    broken = {violation.equation for violation in self.violations}
    lines = [
      f'Eq. {equation} holds.'
      for equation in self.equations
      if equation not in broken
    ]
    return '\n'.join([*lines, *map(str, self.violations)])
