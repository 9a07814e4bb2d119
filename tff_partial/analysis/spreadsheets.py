"""CSV files that are safe to open in spreadsheets.

A spreadsheet runs a cell that starts with `=` as a formula: a film with such a
title could leak neighbouring cells. So strings that start like formulas are
written with an apostrophe in front, which is how spreadsheets mark text.
Numbers are not changed.
"""

import re

import pandas as pd

# The start of a formula, including full-width characters of East Asian scripts.
_FORMULA = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r'[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?')


def escaped(text: str) -> str:
  """Put an apostrophe before a cell's text that starts like a formula."""
  if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
    return f"'{text}"
  return text


def unescaped(text: str) -> str:
  """Undo `escaped`."""
  is_marked = text.startswith("'") and _FORMULA.match(text)
  return text[1:] if is_marked else text


def escaped_frame(frame: pd.DataFrame) -> pd.DataFrame:
  """Escape all strings of a data frame, including its header."""

  def of_cell(value: object) -> object:
    return escaped(value) if isinstance(value, str) else value

  texts = frame.select_dtypes(exclude=['number', 'bool'])
  changed = frame.copy()
  for column in texts.columns:
    changed[column] = texts[column].map(of_cell)
  return changed.rename(columns=of_cell)
