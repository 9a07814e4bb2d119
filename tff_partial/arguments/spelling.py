"""Hints for what is not there: the name or the kind that was meant."""

from collections.abc import Collection, Iterable
import difflib
import re
from typing import Any

from tff_partial.errors import SettingError


def unknown(what: str, found: Iterable[object], known: Collection[str]) -> str:
  """Report the first name that does not exist, and what was probably meant.

  Args:
    what: The kind of the names, for example `field`.
    found: The given names.
    known: The existing names.

  Returns:
    Such as "unknown field 'weights'; did you mean 'weight'?", or '' if all
    names exist.
  """
  for name in found:
    if name not in known:
      meant = difflib.get_close_matches(str(name), known, 1)
      hint = f'; did you mean {meant[0]!r}?' if meant else '.'
      return f'unknown {what} {name!r}{hint}'
  return ''


def check_kind(
  name: str, value: object, kind: Any, expected: str, error: type[Exception]
) -> None:
  """Raise `error` for an argument of another class than is `expected`."""
  if not isinstance(value, kind):
    raise error(f'{name}: expected {expected}, found a {type(value).__name__}.')


def check_names(
  what: str, names: Iterable[str], error: type[Exception]
) -> None:
  """Raise `error` for a name that TFF's computations cannot have."""
  for name in names:
    if not re.fullmatch(r'[\w.\\/>-]*', name, re.ASCII):
      raise error(
        f'{what} {name!r}: TFF reads names of English letters, digits, and _ '
        'or - alone. Choose another.'
      )


def why_no_pattern(pattern: Any) -> str:
  """Return why a value is not a regular expression, or '' if it is one."""
  try:
    re.compile(pattern)
  except (re.error, TypeError) as error:
    return f'{pattern!r} is not a regular expression: {error}.'
  return ''


def check_patterns(
  where: str, patterns: Iterable[str], names: Collection[str]
) -> None:
  """Check that each regular expression matches a variable.

  Args:
    where: Start of the error message.
    patterns: Regular expressions over whole names.
    names: The names of all variables.
  """
  for pattern in patterns:
    wrong = why_no_pattern(pattern)
    if not (wrong or any(re.fullmatch(pattern, name) for name in names)):
      wrong = unknown('variable', [pattern], names)
    if wrong:
      raise SettingError(f'{where}: {wrong} The variables are {list(names)}.')
