"""Numbers in files, in the one form that all programs read alike."""

import math
import re

_NUMBER = re.compile(r'[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?')


def number(text: str) -> float:
  """Parse a finite number in digits from 0 to 9.

  Python also reads `1_0` as 10, digits of other scripts, and `inf`.

  Args:
    text: The number, with a point before its fraction.

  Returns:
    The number, or NaN if the text is not one.
  """
  if not _NUMBER.fullmatch(text):
    return math.nan
  value = float(text)
  return value if math.isfinite(value) else math.nan
