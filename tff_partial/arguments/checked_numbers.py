"""Checks of settings that must be whole or finite numbers."""

import math
import numbers
from typing import Any


def why_not_whole(value: Any, at_least: int | None = None) -> str:
  """Return why a value is not a whole number, or '' if it is one.

  The least number that is accepted is `at_least`; any by default.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    return f'expected a whole number, found {value!r}'
  if at_least is not None and value < at_least:
    return f'expected at least {at_least}, found {value}'
  return ''


def check_whole(
  error: type[Exception], at_least: int | None = None, **named: Any
) -> None:
  """Raise `error` for the first argument that is not such a whole number."""
  for name, value in named.items():
    if wrong := why_not_whole(value, at_least):
      raise error(f'{name}: {wrong}.')


def why_not_finite(value: Any) -> str:
  """Return why a value is not a finite number, or '' if it is one."""
  if isinstance(value, numbers.Real) and math.isfinite(value):
    return ''
  return f'expected a finite number, found {value!r}'


def why_negative(value: Any) -> str:
  """Return why a value is not a finite number of 0 or more, or '' if it is."""
  if not why_not_finite(value) and value >= 0:
    return ''
  return f'expected a finite number of 0 or more, found {value!r}'
