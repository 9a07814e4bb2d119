"""What a message says of a name that does not exist: which one was meant."""

from collections.abc import Collection, Iterable
import difflib
import re

from tff_partial import errors


class UnknownNameError(errors.UserError, ValueError):
  """Raised for a name that does not exist."""


def unknown(what: str, found: Iterable[object], known: Collection[str]) -> str:
  """Names the first name that does not exist, and what was probably meant.

  Args:
    what: What such names are of, for example `field`.
    found: The names that were given.
    known: The names that there are.

  Returns:
    Such as "unknown field 'weights'; did you mean 'weight'?", or nothing where
    all names exist.
  """
  for name in found:
    if name not in known:
      meant = difflib.get_close_matches(str(name), known, 1)
      hint = f'; did you mean {meant[0]!r}?' if meant else '.'
      return f'unknown {what} {name!r}{hint}'
  return ''


def check_patterns(
  where: str, patterns: Iterable[str], names: Collection[str]
) -> None:
  """Check that each regular expression means a variable.

  Args:
    where: Begins the error message.
    patterns: Regular expressions over whole names.
    names: The names of all variables.

  Raises:
    UnknownNameError: If one matches no name.
  """
  for pattern in patterns:
    if not any(re.fullmatch(pattern, name) for name in names):
      wrong = unknown('variable', [pattern], names)
      raise UnknownNameError(
        f'{where}: {wrong} The variables are {list(names)}.'
      )
