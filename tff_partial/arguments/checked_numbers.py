"""Settings that must be whole or finite numbers."""

import math
import numbers
from typing import Any


def why_not_whole(value: Any) -> str:
  """Says why a value is no whole number, or nothing if it is one.

  Args:
    value: What was given.
  """
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    return f'expected a whole number, found {value!r}'
  return ''


def why_not_finite(value: Any) -> str:
  """Says why a value is no finite number, or nothing if it is one.

  Args:
    value: What was given.
  """
  if isinstance(value, numbers.Real) and math.isfinite(value):
    return ''
  return f'expected a finite number, found {value!r}'
