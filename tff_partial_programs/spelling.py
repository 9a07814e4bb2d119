"""What a message says of a name that does not exist: which one was meant."""

from collections.abc import Iterable
import difflib
from typing import Any


def hint(found: Any, known: Iterable[str], prefix: str = '') -> str:
  """Says which name was probably meant, with a space before; or nothing.

  Args:
    found: What was given.
    known: The names that there are.
    prefix: Stands before each name on the command line, such as `--`.
  """
  meant = difflib.get_close_matches(str(found), list(known), 1)
  return f' Did you mean {prefix}{meant[0]}?' if meant else ''


def choose(found: Any, known: Iterable[str]) -> str:
  """Says what can be chosen, and what was probably meant.

  Args:
    found: What was given.
    known: The values that there are.
  """
  known = list(known)
  return f'choose one of {", ".join(known)}.{hint(found, known)}'
