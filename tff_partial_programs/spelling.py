"""Suggestions for misspelt names, for use in messages."""

from collections.abc import Iterable
import difflib
from typing import Any


def hint(found: Any, known: Iterable[str], prefix: str = '') -> str:
  """Suggest the closest name, after a space; return '' if none is close.

  Args:
    prefix: The prefix of names on the command line, such as `--`.
  """
  meant = difflib.get_close_matches(str(found), list(known), 1)
  return f' Did you mean {prefix}{meant[0]}?' if meant else ''


def choose(found: Any, known: Iterable[str]) -> str:
  """Return the allowed values, and a suggestion of the closest one."""
  known = list(known)
  return f'choose one of {", ".join(known)}.{hint(found, known)}'
