"""Checks of settings that must be whole or finite numbers."""

import math
import numbers
from typing import Any


def why_not_whole(value: Any) -> str:
  """Return why a value is not a whole number, or '' if it is one.

  Args:
    value: The given value.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    return f'expected a whole number, found {value!r}'
  return ''


def why_not_finite(value: Any) -> str:
  """Return why a value is not a finite number, or '' if it is one.

  Args:
    value: The given value.
  """
  if isinstance(value, numbers.Real) and math.isfinite(value):
    return ''
  return f'expected a finite number, found {value!r}'


def why_negative(value: Any) -> str:
  """Return why a value is not a finite number of 0 or more, or '' if it is one.

  Args:
    value: The given value.
  """
  if not why_not_finite(value) and value >= 0:
    return ''
  return f'expected a finite number of 0 or more, found {value!r}'
