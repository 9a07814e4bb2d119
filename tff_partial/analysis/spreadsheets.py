"""CSV files that spreadsheets open as data.

A spreadsheet takes a cell that begins with `=` for a formula, and runs it: a
film of such a title could send what stands beside it elsewhere. So texts that
begin like formulas are written with an apostrophe before them, as spreadsheets
themselves mark texts. Numbers stay as they are.
"""

import re

import pandas as pd

# What begins a formula, also in the full width of East Asian scripts.
_FORMULA = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r'[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?')


def escaped(text: str) -> str:
  """Put an apostrophe before a text that begins like a formula.

  Args:
    text: What a cell shall hold.
  """
  if _FORMULA.match(text) and not _NUMBER.fullmatch(text):
    return f"'{text}"
  return text


def unescaped(text: str) -> str:
  """Return the text from which `escaped` made a cell.

  Args:
    text: What the cell holds.
  """
  is_marked = text.startswith("'") and _FORMULA.match(text)
  return text[1:] if is_marked else text


def escaped_frame(frame: pd.DataFrame) -> pd.DataFrame:
  """Escapes all texts of a data frame, those of its header too.

  Args:
    frame: What shall be written.
  """

  def of_cell(value: object) -> object:
    return escaped(value) if isinstance(value, str) else value

  texts = frame.select_dtypes(exclude=['number', 'bool'])
  changed = frame.copy()
  for column in texts.columns:
    changed[column] = texts[column].map(of_cell)
  return changed.rename(columns=of_cell)
